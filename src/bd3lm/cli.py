"""The command `bd3lm`. Nothing imports this module."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import tyro
from tyro.conf import Positional, arg, subcommand

import bd3lm


class _Command(Protocol):
    def run(self, rest: list[str]) -> int:
        """Do it; `rest` are words that no flag took."""


@dataclass(frozen=True)
class Demo:
    """Train a small model on text that every Python carries, measure it exactly, and sample from it."""

    out: Path = Path("runs/demo")
    """Where to write the run."""

    def run(self, rest: list[str]) -> int:
        _refuse(rest)
        from bd3lm.demo import run_demo

        run_demo(self.out)
        return 0


@dataclass(frozen=True)
class Prove:
    """Enumerate every text of a tiny model: its likelihood sums to one, and its sampler agrees."""

    seed: int = 0
    """Seed of the random weights."""
    samples: int = 20_000
    """How many texts to draw for the comparison."""

    def run(self, rest: list[str]) -> int:
        _refuse(rest)
        from bd3lm.proof import run_proof

        return 0 if run_proof(seed=self.seed, samples=self.samples) else 1


@dataclass(frozen=True)
class Train:
    """Train a preset, or a recipe of your own. `--any.field value` sets any field of the recipe.

    Under torchrun it trains on all processes. `bd3lm train PRESET --show` prints the resolved recipe.
    """

    preset: Positional[str | None] = None
    """A named run; `bd3lm presets` lists them. Without one the config file says everything."""
    out: Path | None = None
    """Where to write the run; by default runs/PRESET."""
    config: Path | None = None
    """A YAML file with what differs from the preset."""
    resume: bool = False
    """Go on with the run in --out."""
    start_from: Annotated[str | None, arg(name="from")] = None
    """A run, model folder or hub id whose weights to start from, with a fresh optimizer."""
    device: str | None = None
    """cpu, cuda or cuda:1; by default a GPU where there is one."""
    show: bool = False
    """Print the resolved recipe and stop."""

    def run(self, rest: list[str]) -> int:
        from bd3lm.recipe import parse_overrides, recipe_to_dict
        from bd3lm.runs import resolve_stages, train_stages

        if self.preset is None and self.config is None:
            raise ValueError("a preset or --config must be given; `bd3lm presets` lists the presets")
        stages = resolve_stages(
            self.preset,
            config=self.config,
            overrides=parse_overrides(rest),
            start_from=self.start_from,
        )
        if self.show:
            import yaml

            for name, recipe in stages:
                print(f"# stage {name}\n{yaml.safe_dump(recipe_to_dict(recipe), sort_keys=False)}")
            return 0
        name = self.preset or (self.config.stem if self.config else "run")
        out = self.out or Path("runs") / name
        runs = train_stages(stages, out, resume=self.resume, device=self.device)
        last = runs[-1].trainer
        if not last.engine.is_main:
            return 0
        if last.step < last.settings.steps:
            return 130
        print(f"wrote {runs[-1].out / 'model'}")
        if (self.preset or "").startswith("demo"):
            from bd3lm.demo import report

            report(runs)
        return 0


@dataclass(frozen=True)
class Presets:
    """List the named runs."""

    def run(self, rest: list[str]) -> int:
        _refuse(rest)
        from bd3lm.presets import PRESETS

        width = max(map(len, PRESETS))
        for name, preset in PRESETS.items():
            print(f"{name:{width}}  {preset.description}")
        return 0


@dataclass(frozen=True)
class Prepare:
    """Text to token shards: parallel, resumable, the same bytes every time."""

    source: Positional[str]
    """A file or folder (txt, jsonl, parquet; also .gz .xz .zst), or a named corpus such as lm1b."""
    out: Positional[Path]
    """The folder to write."""
    tokenizer: str = "gpt2"
    """A folder with tokenizer.json, a name on the hub, or bytes."""
    workers: int = 1
    """Processes that tokenize."""
    eos: bool = True
    """Put an end-of-text token after every document."""
    bos: bool = False
    """Put a beginning-of-text token before every document."""
    folder: Path | None = None
    """A local copy of a named corpus."""
    field: str | None = None
    """The field that holds the text, in jsonl and parquet; text by default."""
    held_out: float | None = None
    """Share of the documents, the last ones, to hold out where there is no validation file."""

    def run(self, rest: list[str]) -> int:
        _refuse(rest)
        from bd3lm.data import load_corpus, load_tokenizer, prepare

        corpus = load_corpus(self.source, folder=self.folder, field=self.field, held_out=self.held_out)
        shards = prepare(
            corpus,
            load_tokenizer(self.tokenizer),
            self.out,
            workers=self.workers,
            eos_between_documents=self.eos,
            bos_before_documents=self.bos,
        )
        for name in shards.splits:
            split = shards.split(name)
            print(f"{name}: {split.documents:,} documents, {split.tokens:,} tokens")
        print(f"wrote {self.out}")
        return 0


@dataclass(frozen=True)
class TrainTokenizer:
    """Train a byte-level BPE on a corpus."""

    source: Positional[str]
    """A file, a folder or a named corpus; its training split is used."""
    out: Positional[Path]
    """The folder to write."""
    vocabulary: int = 8192
    """Number of tokens, the special ones included."""
    folder: Path | None = None
    """A local copy of a named corpus."""
    field: str | None = None
    """The field that holds the text, in jsonl and parquet; text by default."""

    def run(self, rest: list[str]) -> int:
        _refuse(rest)
        from bd3lm.data import load_corpus, train_bpe

        corpus = load_corpus(self.source, folder=self.folder, field=self.field)
        tokenizer = train_bpe(corpus.documents("train"), self.vocabulary)
        tokenizer.save(self.out)
        print(f"wrote {self.out}: {tokenizer.vocab_size:,} tokens")
        return 0


Data = Annotated[Prepare, subcommand("prepare")] | Annotated[TrainTokenizer, subcommand("train-tokenizer")]


@dataclass(frozen=True)
class DataCommand:
    """Prepare text for training."""

    command: Data

    def run(self, rest: list[str]) -> int:
        return self.command.run(rest)


@dataclass(frozen=True)
class Convert:
    """Rewrite a checkpoint (the reference implementation's, or our own) in this project's format."""

    source: Positional[str]
    """A folder, a Lightning .ckpt file, or a hub id such as owner/name."""
    out: Positional[Path]
    """The folder to write."""
    context: int | None = None
    """Context length; a .ckpt file does not say, so give it there."""
    block_size: int | None = None
    """Block size, for a .ckpt of a block diffusion model; by default one block (MDLM)."""
    causal: bool = False
    """Whether a .ckpt is of an autoregressive model."""
    weights: Literal["ema", "raw"] | None = None
    """Which weights of a .ckpt to take; by default the EMA's where there are any."""

    def run(self, rest: list[str]) -> int:
        _refuse(rest)
        from bd3lm.interop import LightningFacts
        from bd3lm.lm import load

        lightning = None
        if self.source.endswith(".ckpt"):
            if self.context is None:
                raise ValueError("--context must be given for a .ckpt, which does not say it")
            lightning = LightningFacts(
                context=self.context,
                block_size=None if self.causal else self.block_size or self.context,
                causal=self.causal,
                weights=self.weights,
            )
        elif self.context or self.block_size or self.causal or self.weights:
            raise ValueError(
                f"--context, --block-size, --causal and --weights are for a .ckpt file, got {self.source}"
            )
        model = load(self.source, lightning=lightning)
        model.save_pretrained(self.out)
        parameters = sum(p.numel() for p in model.network.parameters())
        print(f"wrote {self.out}: {model.config.method}, {parameters:,} parameters")
        return 0


Command = (
    Annotated[Train, subcommand("train")]
    | Annotated[DataCommand, subcommand("data")]
    | Annotated[Presets, subcommand("presets")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Demo, subcommand("demo")]
    | Annotated[Prove, subcommand("prove")]
)

_DESCRIPTION = (
    "Block diffusion language models. `--debug` with any command shows tracebacks; `--version` prints the "
    "version."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad input is one line on standard error, a traceback only with --debug."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words == ["--version"]:
        print(f"bd3lm {bd3lm.__version__}")
        return 0
    parsed: Any = tyro.cli(
        Command, prog="bd3lm", description=_DESCRIPTION, args=words or ["--help"], return_unknown_args=True
    )
    command: _Command = parsed[0]
    try:
        return command.run(parsed[1])
    except (ValueError, OSError, FloatingPointError) as error:
        if debug:
            raise
        print(f"bd3lm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bd3lm: interrupted", file=sys.stderr)
        return 130


def _refuse(rest: list[str]) -> None:
    if rest:
        raise ValueError(f"no such flag or argument: {' '.join(rest)} (see --help)")
