"""The entry point of `bd3lm`: parses the command line and prints errors as one line. Nothing imports it."""

import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Annotated, Any, Union

import tyro
from tyro.conf import subcommand

import bd3lm
from bd3lm.cli.errors import EXPECTED, is_out_of_memory, line_of, warn
from bd3lm.cli.mistakes import command_named, given_twice, in_one_line, mistyped
from bd3lm.cli.waiting import loading_told
from bd3lm.commands import every_command
from bd3lm.commands.shared.command import Command
from bd3lm.io.signals import forget_stops, line_and_status, stop_behind
from bd3lm.io.terminal import one_entry, say
from bd3lm.kinds import load_plugin

_STANDARD_OUTPUT = 1  # the descriptor
_DESCRIPTION = (
    "Train, sample, measure and serve block diffusion language models. Any command also takes `--plugin "
    "FILE_OR_MODULE` (repeatable), which loads your own methods, rules or commands, and `--debug`, which "
    "shows tracebacks. `bd3lm --version` prints the version."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Bad input prints one line on standard error; only --debug shows a traceback.

    If the reader closes the pipe early, as `head` does, the status is that of a closed pipe.
    """
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # while a closed pipe can still be told from a failure
    except BrokenPipeError:
        if not _nobody_reads():
            raise
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # at which rich exits with 1
            raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STANDARD_OUTPUT)  # Python flushes once more at its end
    return 128 + signal.SIGPIPE


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that was closed at its other end."""
    poll = select.poll()
    poll.register(_STANDARD_OUTPUT, 0)  # errors are reported even if not requested
    return bool(poll.poll(0))


def _main(words: list[str]) -> int:
    forget_stops()
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words == ["--version"]:
        say(f"bd3lm {bd3lm.__version__}")
        return 0
    try:
        words, plugins = _without_plugins(words)
        every_command()  # ours first, so that a plugin with one of their names gets an error
        for source in plugins:
            load_plugin(source)
        command = _parsed(words, every_command(), debug=debug)
        if command is None:
            return 2
        warnings.showwarning = warn
        with loading_told():
            return command.run()
    except (Exception, KeyboardInterrupt) as error:
        if (stop := stop_behind(error)) is not None:
            line, status = line_and_status(stop)
            _say(line)
            return status
        expected = isinstance(error, EXPECTED) or is_out_of_memory(error)
        if debug or not expected or (isinstance(error, BrokenPipeError) and _nobody_reads()):
            raise
        _say(line_of(error))
        return 1


def _without_plugins(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The other words, and the sources after each --plugin."""
    kept: list[str] = []
    sources: list[str] = []
    rest = list(words)
    while rest:
        flag, equals, source = rest.pop(0).partition("=")
        if flag != "--plugin":
            kept.append(f"{flag}{equals}{source}")
            continue
        if not equals and rest and not rest[0].startswith("-"):
            source = rest.pop(0)
        if not source:
            raise ValueError("--plugin must be a .py file or a module, got none")
        sources.append(source)
    return kept, sources


def _parsed(words: list[str], commands: Mapping[str, type[Command]], *, debug: bool) -> Command | None:
    """Parse the command line; None after printing what is wrong with it."""
    if (wrong := mistyped(words, commands)) is not None:
        _say(wrong)
        return None
    more: dict[str, Any] = {}
    if words and words[0] in commands:
        kept, more = commands[words[0]].set_aside(words[1:])
        words = [words[0], *kept]
    is_chosen = bool(words) and words[0] in commands
    kinds: Any = Union[  # noqa: UP007
        tuple(
            Annotated[each, subcommand(name, description=None if is_chosen else _summary(each))]
            for name, each in commands.items()
        )
    ]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parsed: Any = tyro.cli(kinds, prog="bd3lm", description=_DESCRIPTION, args=words or ["--help"])
    except SystemExit:
        if box := said.getvalue():
            if debug:
                say(box, to=sys.stderr)
            else:
                _say(in_one_line(box, command_named(words, commands)))
        raise
    if heard := said.getvalue().rstrip():  # printed although the command line was valid
        say(heard, to=sys.stderr)
    if (wrong := given_twice(parsed, words)) is not None:
        _say(wrong)
        return None
    return replace(parsed, **more) if more else parsed


def _summary(command: type[Command]) -> str | None:
    """The first sentence of a command's help, for the list of all commands; None if it has no docstring."""
    said = command.__doc__ or ""
    if said.startswith(f"{command.__name__}("):  # what dataclass writes in its place
        return None
    return " ".join(said.partition("\n\n")[0].split())


def _say(line: str) -> None:
    say(f"bd3lm: {one_entry(line)}", to=sys.stderr)
