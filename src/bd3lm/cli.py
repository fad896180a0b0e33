"""The command `bd3lm`. Nothing imports this module."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, subcommand

import bd3lm


@dataclass(frozen=True)
class Demo:
    """Prove a tiny model: its likelihood sums to one, its bounds hold, its sampler agrees."""

    seed: int = 0
    """Seed of the random weights."""
    samples: int = 20_000
    """How many texts to draw for the comparison."""

    def run(self) -> int:
        from bd3lm.demo import run_demo

        return 0 if run_demo(seed=self.seed, samples=self.samples) else 1


@dataclass(frozen=True)
class Convert:
    """Rewrite a checkpoint (the reference implementation's, or our own) in this project's format."""

    source: Positional[str]
    """A folder, a Lightning .ckpt file, or a hub id such as owner/name."""
    out: Positional[Path]
    """The folder to write."""
    context: int | None = None
    """Context length, for a .ckpt (which does not say)."""
    block_size: int | None = None
    """Block size, for a .ckpt."""

    def run(self) -> int:
        from bd3lm.lm import load

        model = load(self.source)
        model.save_pretrained(self.out)
        print(f"wrote {self.out}: {model.config}")
        return 0


Command = Annotated[Demo, subcommand("demo")] | Annotated[Convert, subcommand("convert")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on standard error, a traceback only with --debug."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [a for a in args if a != "--debug"]
    if args == ["--version"]:
        print(f"bd3lm {bd3lm.__version__}")
        return 0
    command = tyro.cli(Command, prog="bd3lm", description=_DESCRIPTION, args=args)
    try:
        return command.run()
    except (ValueError, OSError) as error:
        if debug:
            raise
        print(f"bd3lm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bd3lm: interrupted", file=sys.stderr)
        return 130


_DESCRIPTION = (
    "Block diffusion language models. `--debug` before or after any command shows tracebacks; "
    "`--version` prints the version."
)
