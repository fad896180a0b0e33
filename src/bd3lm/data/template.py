"""Runs a chat template: a program of its own, which nothing of bd3lm is loaded for.

A template is a program of whoever made a model, and may loop for ever or make what no memory holds, in more
ways than a list of what is forbidden can name. So the system ends it: this process has little time and little
memory. In it the template runs in Jinja's sandbox and cannot change what it is given.

Standard input holds JSON: `template`, what it is `said`, and the limits `seconds`, `bytes` and `characters`.
Standard output holds what it wrote as JSON, `text`, or the `error` why there is none.
"""

import json
import resource
import sys
from contextlib import suppress
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """The tag that says which part of a text an assistant wrote: of no concern here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        found: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return found


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(message: str) -> None:
    raise ValueError(str(message))


def _sandbox() -> ImmutableSandboxedEnvironment:
    """Jinja's, with what chat templates call."""
    box = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    box.filters["tojson"] = _to_json
    kept = {name: box.globals[name] for name in ("range", "dict", "namespace")}
    box.globals = {**kept, "raise_exception": _refuse}
    return box


def _written(template: str, said: dict[str, Any], most: int) -> str:
    pieces, length = [], 0
    for piece in _sandbox().from_string(template).generate(said):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise ValueError(f"it makes a text of more than {most:,} characters")
    return "".join(pieces)


def _limit(seconds: int, size: int) -> None:
    """What the system does not limit, as macOS does not its memory, is not."""
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, size),
    ):
        with suppress(ValueError, OSError):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Run one template."""
    asked = json.load(sys.stdin)
    _limit(asked["seconds"], asked["bytes"])
    try:
        answer = {"text": _written(asked["template"], asked["said"], asked["characters"])}
    except MemoryError:
        answer = {"error": f"it takes more than {asked['bytes'] >> 20:,} MiB of memory"}
    except Exception as error:  # of any kind that a program can raise
        answer = {"error": " ".join(str(error).split())[:500] or type(error).__name__}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
