"""Runs chat templates: a program of its own, which nothing of bd3lm is loaded for.

A template is a program of whoever made a model, and may loop for ever or make what no memory holds, in more
ways than a list of what is forbidden can name. So the system ends it: this process has little time for each
and little memory. In it a template runs in Jinja's sandbox and cannot change what it is given.

Its arguments are the seconds of computing that each may take, and the bytes of memory that there are. Each
line of standard input is JSON: a `template`, what it is `said`, and how many `characters` it may write. Each
is answered by a line of standard output: what it wrote, `text`, or the `error` why there is none.
"""

import json
import math
import resource
import signal
import sys
import time
from contextlib import suppress
from functools import lru_cache
from types import CodeType
from typing import Any

from jinja2 import Template, nodes
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


@lru_cache(maxsize=8)
def _compiled(template: str) -> CodeType:
    """Its program, which thousands of conversations share."""
    return _sandbox().compile(template)


def _written(template: str, said: dict[str, Any], most: int) -> str:
    box = _sandbox()
    program: Template = Template.from_code(box, _compiled(template), box.make_globals(None), None)
    pieces, length = [], 0
    for piece in program.generate(said):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise ValueError(f"it makes a text of more than {most:,} characters")
    return "".join(pieces)


def _limit(kind: int, most: int) -> None:
    """What the system does not limit, as macOS does not its memory, is not."""
    with suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Run one template after another, until there is no more to read."""
    seconds, size = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, size)
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)
        enough = True
        try:
            asked = json.loads(line)
            answer = {"text": _written(asked["template"], asked["said"], asked["characters"])}
        except MemoryError:
            answer = {"error": f"it takes more than {size >> 20:,} MiB of memory"}
            enough = False
        except Exception as error:  # of any kind that a program can raise
            answer = {"error": " ".join(str(error).split())[:500] or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if not enough:
            return


if __name__ == "__main__":
    main()
