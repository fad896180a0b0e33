"""A separate program that runs chat templates and loads nothing of bd3lm.

A template is a program from the maker of a model. It may loop forever or fill the memory, in more ways than a
list of forbidden things can name. So the system ends it: this process has little time per template and little
memory. The template runs in Jinja's sandbox and cannot change its inputs.

Arguments: the seconds of computing per template, and the bytes of memory. Each line of standard input is
JSON: a `template`, its variables `said`, and the most `characters` it may write. Each line of standard output
is the answer: its output `text`, or an `error`.
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
    """The tag that marks the assistant's part of a text; we ignore it."""

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
    """Jinja's sandbox with the functions that chat templates call."""
    box = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    box.filters["tojson"] = _to_json
    kept = {name: box.globals[name] for name in ("range", "dict", "namespace")}
    box.globals = {**kept, "raise_exception": _refuse}
    return box


@lru_cache(maxsize=8)
def _compiled(template: str) -> CodeType:
    """A compiled template, shared by thousands of conversations."""
    return _sandbox().compile(template)


def _written(template: str, said: dict[str, Any], most: int) -> str:
    box = _sandbox()
    program: Template = Template.from_code(box, _compiled(template), box.make_globals(None), None)
    pieces, length = [], 0
    for piece in program.generate(said):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise ValueError(f"it writes more than {most:,} characters")
    return "".join(pieces)


def _limit(kind: int, most: int) -> None:
    """Set a limit, unless the system lacks it, as macOS lacks a memory limit."""
    with suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main() -> None:
    """Run one template after another, until the input ends."""
    seconds, size = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, size)
    for line in sys.stdin:
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)
        enough = True
        try:
            asked = json.loads(line)
            answer = {"text": _written(asked["template"], asked["said"], asked["characters"])}
        except MemoryError:
            answer = {"error": f"it used more than {size >> 20:,} MiB of memory"}
            enough = False
        except Exception as error:  # a program can raise anything
            answer = {"error": " ".join(str(error).split())[:500] or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if not enough:
            return


if __name__ == "__main__":
    main()
