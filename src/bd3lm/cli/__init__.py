"""The command `bd3lm`: words to calls, and errors to lines. Nothing imports this package."""

import difflib
import io
import os
import re
import select
import shlex
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, get_args, get_type_hints

import tyro
from tyro.conf import UseAppendAction, subcommand

import bd3lm
from bd3lm.cli.benching import Bench, Kinds
from bd3lm.cli.data import Convert, Data, DataCommand
from bd3lm.cli.harness import Harness
from bd3lm.cli.judging import Judge
from bd3lm.cli.lengths import Lengths
from bd3lm.cli.measuring import Eval, Score, Variance, ZeroShot
from bd3lm.cli.mistakes import in_one_line
from bd3lm.cli.reporting import ReportCommand
from bd3lm.cli.sampling import SampleCommand
from bd3lm.cli.showing import Demo, Prove
from bd3lm.cli.training import Presets, Train, set_aside_overrides


class _Command(Protocol):
    def run(self) -> int:
        """Do it, and say how it went."""


Command = (
    Annotated[Train, subcommand("train")]
    | Annotated[DataCommand, subcommand("data")]
    | Annotated[SampleCommand, subcommand("sample")]
    | Annotated[Presets, subcommand("presets")]
    | Annotated[Eval, subcommand("eval")]
    | Annotated[ZeroShot, subcommand("zeroshot")]
    | Annotated[Score, subcommand("score")]
    | Annotated[Judge, subcommand("judge")]
    | Annotated[Lengths, subcommand("lengths")]
    | Annotated[Harness, subcommand("harness")]
    | Annotated[Variance, subcommand("variance")]
    | Annotated[ReportCommand, subcommand("report")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Demo, subcommand("demo")]
    | Annotated[Prove, subcommand("prove")]
)

_COMMANDS: dict[str, Any] = {"bd3lm": Command, "bd3lm data": Data, "bd3lm bench": Kinds}

_STANDARD_OUTPUT = 1  # the descriptor
_ONE_AT_A_TIME = get_args(UseAppendAction[Any])[1]  # type: ignore[misc]  # marks a flag that is repeated
_DESCRIPTION = (
    "Block diffusion language models. `--debug` with any command shows tracebacks; `--version` prints the "
    "version."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on standard error, a traceback only with --debug.

    A reader that has seen enough, such as `head`, is no failure: the status is then that of a closed pipe.
    """
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            print(end="", flush=True)  # while a closed pipe can still be told from a failure
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
    poll.register(_STANDARD_OUTPUT, 0)  # errors are told without being asked for
    return bool(poll.poll(0))


def _main(words: list[str]) -> int:
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words == ["--version"]:
        print(f"bd3lm {bd3lm.__version__}")
        return 0
    if (wrong := _mistyped(words)) is not None:
        print(f"bd3lm: {wrong}", file=sys.stderr)
        return 2
    words, overrides = set_aside_overrides(words)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parsed: Any = tyro.cli(Command, prog="bd3lm", description=_DESCRIPTION, args=words or ["--help"])
    except SystemExit:
        if box := said.getvalue():
            print(box if debug else f"bd3lm: {in_one_line(box, _command(words))}", file=sys.stderr)
        raise
    print(said.getvalue(), end="", file=sys.stderr)  # what is said of a command that can be read
    if (wrong := _given_twice(parsed, words)) is not None:
        print(f"bd3lm: {wrong}", file=sys.stderr)
        return 2
    command: _Command = replace(parsed, overrides=tuple(overrides)) if isinstance(parsed, Train) else parsed
    warnings.showwarning = _warn
    try:
        return command.run()
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        if debug or (isinstance(error, BrokenPipeError) and _nobody_reads()):
            raise
        line = _with_own_pip(str(error)) if isinstance(error, ImportError) else str(error)
        print(f"bd3lm: {line}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as error:
        if debug or not _is_out_of_memory(error):
            raise
        print(f"bd3lm: {_out_of_memory(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bd3lm: interrupted", file=sys.stderr)
        return 130


def _with_own_pip(said: str) -> str:
    """How to install an extra, by the pip of this very environment, which may not be that on the path."""
    own = Path(sys.executable).with_name("pip")
    found = shutil.which("pip")
    if not own.exists() or (found is not None and Path(found).parent == own.parent):
        return said
    shown = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own
    return said.replace(": pip install ", f": {shlex.quote(str(shown))} install ")


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Told by names and words: to ask torch for its class would import it for every command."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(error) for words in ("DefaultCPUAllocator: ", "CUDA error: out of memory"))


def _out_of_memory(error: RuntimeError | MemoryError) -> str:
    """One line on an allocation that failed, whose own words may be a paragraph about the allocator."""
    found = re.search(r"allocate ([0-9.]+ [A-Za-z]+)", str(error))
    much = f" at {found[1]} more" if found else ""
    return (
        f"out of memory{much}: make the batch smaller (--train.micro_batch in training), the context or the "
        "network"
    )


def _command(words: Sequence[str]) -> str:
    """The command that some words begin with."""
    said = "bd3lm"
    for word in words:
        if said not in _COMMANDS or word.replace("_", "-") not in _names(said):
            break
        said += f" {word.replace('_', '-')}"
    return said


def _mistyped(words: Sequence[str]) -> str | None:
    """What to say of a word that stands where a command should; `config.did_you_mean` would import torch."""
    said = _command(words)
    rest = words[said.count(" ") :]
    if said in _COMMANDS and rest and not rest[0].startswith("-"):
        names = _names(said)
        near = difflib.get_close_matches(rest[0], names, n=1)
        hint = f", did you mean {near[0]!r}?" if near else "."
        return f"{said} has no command {rest[0]!r}{hint} Its commands are {', '.join(names)}"
    if said in _COMMANDS and words and not rest:
        return f"{said} needs a command, {' or '.join(_names(said))}; see {said} --help"
    if said == "bd3lm sample" and {"--prompt", "--prompts"} & {word.partition("=")[0] for word in words}:
        return 'bd3lm sample takes prompts after the model, without a flag: bd3lm sample MODEL "Once upon"'
    return None


def _given_twice(command: Any, words: Sequence[str]) -> str | None:
    """What to say of a flag for several values that was given more than once: tyro would keep the last.

    A flag that takes one value and is repeated is no mistake: of that it keeps all.
    """
    given = Counter(word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--"))
    hints = get_type_hints(type(command), include_extras=True)
    for field in fields(command):
        flag, value = f"--{field.name.replace('_', '-')}", getattr(command, field.name)
        repeatable = _ONE_AT_A_TIME in getattr(hints[field.name], "__metadata__", ())
        if isinstance(value, tuple) and given[flag] > 1 and not repeatable:
            return f"{flag} takes several values after one flag, got it {given[flag]} times: {flag} A B"
        if is_dataclass(value) and (wrong := _given_twice(value, words)) is not None:
            return wrong
    return None


def _names(command: str) -> list[str]:
    return [each.__metadata__[0].name for each in get_args(_COMMANDS[command])]


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning is one line; where in the source it arose is of no use to whoever runs a command."""
    print(f"bd3lm: warning: {message}", file=sys.stderr)
