"""The command `bd3lm`. Nothing imports this module."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import tyro
from tyro.conf import OmitArgPrefixes, Positional, Suppress, arg, subcommand

import bd3lm


class _Command(Protocol):
    def run(self) -> int:
        """Do it, and say how it went."""


@dataclass(frozen=True)
class Demo:
    """Train a small model on text that every Python carries, measure it exactly, and sample from it."""

    out: Path = Path("runs/demo")
    """Where to write the run."""

    def run(self) -> int:
        from bd3lm.demo import run_demo

        return run_demo(self.out)


@dataclass(frozen=True)
class Prove:
    """Enumerate every text of a tiny model: its likelihood sums to one, and its sampler agrees."""

    seed: int = 0
    """Seed of the random weights."""
    samples: int = 20_000
    """How many texts to draw for the comparison."""

    def run(self) -> int:
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
    overrides: Suppress[tuple[str, ...]] = ()
    """The words --any.field value, which `main` sets aside before tyro sees them."""

    def run(self) -> int:
        from bd3lm.recipe import parse_overrides
        from bd3lm.runs import is_run, resolve_stages, train_stages

        if self.preset is None and self.config is None:
            raise ValueError("a preset or --config must be given; `bd3lm presets` lists the presets")
        stages = resolve_stages(
            self.preset,
            config=self.config,
            overrides=parse_overrides(self.overrides),
            start_from=self.start_from,
        )
        if self.show:
            _show(stages)
            return 0
        out = self.out or Path("runs") / (self.preset or (self.config.stem if self.config else "run"))
        if self.resume and not is_run(out):
            raise ValueError(f"--resume needs a run to go on with, but {out} holds none")
        runs = train_stages(stages, out, resume=self.resume, device=self.device)
        last = runs[-1].trainer
        if last.stopped_by == "signal":
            return 130
        if last.engine.is_main:
            print(f"wrote {runs[-1].out / 'model'}")
            if self.preset in ("demo", "demo-paper"):
                from bd3lm.demo import report

                report(runs, out)
        return 0


def _show(stages: Sequence[tuple[str, Any]]) -> None:
    """Print recipes as a file that --config takes: one as it is, several each under its stage."""
    import yaml

    from bd3lm.recipe import recipe_to_dict

    recipes = {name: recipe_to_dict(recipe) for name, recipe in stages}
    print(
        yaml.safe_dump(recipes if len(recipes) > 1 else next(iter(recipes.values())), sort_keys=False), end=""
    )


@dataclass(frozen=True)
class SampleCommand:
    """Let a model write, one text for each prompt. In a terminal one text is shown as it is uncovered."""

    model: Positional[str]
    """A run, model folder or hub id."""
    prompts: Positional[tuple[str, ...]] = ()
    """Texts to continue; none starts from nothing."""
    count: int = 1
    """Texts for each prompt."""
    length: int | None = None
    """Tokens a text may reach, its prompt included; by default the network's context. It may be longer, but
    for SEDD and D3PM with uniform noise."""
    nucleus: float | None = None
    """Draw from the likeliest tokens that hold this much probability; 1 is the model itself. By default 0.9,
    for SEDD 0.99, for SSD-LM 0.95."""
    nucleus_rule: Literal["inclusive", "exclusive"] = "inclusive"
    """Whether the token that crosses --nucleus is kept; the reference implementation leaves it out."""
    temperature: float = 1.0
    top_k: int | None = None
    """Draw from this many of the likeliest tokens."""
    seed: int = 0
    batch: int = 32
    """Texts written side by side. It changes speed and memory, not the texts."""
    steps: int | None = None
    """Ancestral steps a block (5,000 in the paper) instead of first-hitting ones; for SEDD and D3PM their
    steps, for SSD-LM those of each block."""
    projection: Literal["sampling", "greedy", "multi_hot"] = "sampling"
    """How SSD-LM makes almost one-hot vectors of what its network says."""
    remask: float | None = None
    """With --steps: ReMDM's eta in [0, 1], the share of what may be hidden again that is."""
    tokens_per_pass: int | None = None
    """Reveal so many tokens of the random order at once. Faster, and no longer the model's distribution."""
    confidence: float | None = None
    """Reveal tokens drawn with at least this probability at once. Not the model's distribution either."""
    entropy_bound: float | None = None
    """Reveal tokens together while their entropies bound the error by so many nats."""
    eos: bool = True
    """End a text at the end token."""
    entropy_floor: float | None = None
    """End a text whose last 256 tokens have less entropy, in nats; 4 in the paper."""
    entropy_window: int = 256
    """How many last tokens that is."""
    redraws: int = 0
    """How often to draw a text below the floor again, rather than end it."""
    stride: int | None = None
    """For a model of one block, past its context: tokens written at a time."""
    cache: bool = True
    """Keep keys and values between passes."""
    out: Path | None = None
    """Write texts, tokens and costs as JSON lines to this new file."""
    tokenizer: str | None = None
    """For a model saved without one: a folder or a name on the hub."""
    device: str | None = None
    """cpu, cuda or cuda:1; by default a GPU where there is one."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Precision of the network; by default that of its weights."""

    def run(self) -> int:
        import torch
        from rich.console import Console

        from bd3lm.lm import Settings, load
        from bd3lm.samples import check_out, run_sample
        from bd3lm.training import pick_device

        if self.count < 1:
            raise ValueError(f"--count must be at least 1, got {self.count}")
        self._check_ways()
        if self.out is not None:
            check_out(self.out)
        model = load(
            self.model,
            device=pick_device(self.device),
            dtype=getattr(torch, self.dtype) if self.dtype else None,
            tokenizer=self.tokenizer,
        )
        in_blocks = model.config.method.kind == "block_diffusion"
        settings = Settings(
            length=self.length,
            seed=self.seed,
            batch_size=self.batch,
            temperature=self.temperature,
            top_k=self.top_k,
            nucleus_p=self.nucleus,
            nucleus_rule=self.nucleus_rule,
            unmasking=self._unmasking(in_blocks),
            steps=None if in_blocks else self.steps,
            projection=self.projection,
            stop_at_eos=self.eos,
            entropy_floor=self.entropy_floor,
            entropy_window=self.entropy_window,
            redraws=self.redraws,
            stride=self.stride,
            cache=self.cache,
        )
        prompts = [prompt for prompt in self.prompts or ("",) for _ in range(self.count)]
        run_sample(model, prompts, settings, out=self.out, notes=Console(stderr=True))
        return 0

    def _check_ways(self) -> None:
        if self.remask is not None and self.steps is None:
            raise ValueError("--remask needs --steps, the steps a block is given to think it over")
        ways = {
            "--steps": self.steps,
            "--tokens-per-pass": self.tokens_per_pass,
            "--confidence": self.confidence,
            "--entropy-bound": self.entropy_bound,
        }
        chosen = [name for name, value in ways.items() if value is not None]
        if len(chosen) > 1:
            raise ValueError(f"only one of {', '.join(ways)} may be given, got {' and '.join(chosen)}")

    def _unmasking(self, in_blocks: bool) -> Any:
        """What the flags say of the order of reveal; to methods with steps of their own --steps is those."""
        from bd3lm.sampling import Ancestral, EntropyBound, FirstHitting, MostConfident, Remasking

        if self.remask is not None and self.steps is not None:
            return Remasking(steps=self.steps, eta=self.remask)
        if self.steps is not None and in_blocks:
            return Ancestral(self.steps)
        if self.confidence is not None:
            return MostConfident(threshold=self.confidence)
        if self.entropy_bound is not None:
            return EntropyBound(self.entropy_bound)
        return FirstHitting(1 if self.tokens_per_pass is None else self.tokens_per_pass)


@dataclass(frozen=True)
class Variance:
    """How noisy each way of drawing masks is on a trained block diffusion model."""

    run_folder: Positional[Path]
    """The folder of a run (of one stage)."""
    batches: int = 20
    """Held-out batches to measure the loss on."""
    gradients: int = 0
    """Held-out batches to measure the gradient on; 0 does not."""
    seed: int = 0

    def run(self) -> int:
        from bd3lm.variances import report_variances

        report_variances(self.run_folder, batches=self.batches, gradients=self.gradients, seed=self.seed)
        return 0


@dataclass(frozen=True)
class Presets:
    """List the named runs."""

    def run(self) -> int:
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
    tokenizer: str | None = None
    """A folder with tokenizer.json, a name on the hub, or bytes; by default the paper's for the corpus."""
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

    def run(self) -> int:
        from bd3lm.data import load_corpus, load_tokenizer, prepare

        corpus = load_corpus(self.source, folder=self.folder, field=self.field, held_out=self.held_out)
        shards = prepare(
            corpus,
            load_tokenizer(self.tokenizer or ("bert-base-uncased" if self.source == "lm1b" else "gpt2")),
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

    def run(self) -> int:
        from bd3lm.data import load_corpus, train_bpe

        corpus = load_corpus(self.source, folder=self.folder, field=self.field)
        tokenizer = train_bpe(corpus.documents("train"), self.vocabulary)
        tokenizer.save(self.out)
        print(f"wrote {self.out}: {tokenizer.vocab_size:,} tokens")
        return 0


Data = (
    Annotated[Prepare, subcommand("prepare", prefix_name=False)]
    | Annotated[TrainTokenizer, subcommand("train-tokenizer", prefix_name=False)]
)


@dataclass(frozen=True)
class DataCommand:
    """Prepare text for training."""

    command: OmitArgPrefixes[Data]

    def run(self) -> int:
        return self.command.run()


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

    def run(self) -> int:
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
    | Annotated[SampleCommand, subcommand("sample")]
    | Annotated[Presets, subcommand("presets")]
    | Annotated[Variance, subcommand("variance")]
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
    words, overrides = _set_aside_overrides(words)
    parsed: Any = tyro.cli(Command, prog="bd3lm", description=_DESCRIPTION, args=words or ["--help"])
    command: _Command = replace(parsed, overrides=tuple(overrides)) if isinstance(parsed, Train) else parsed
    warnings.showwarning = _warn
    try:
        return command.run()
    except (ValueError, OSError, FloatingPointError, ImportError) as error:
        if debug:
            raise
        print(f"bd3lm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bd3lm: interrupted", file=sys.stderr)
        return 130


def _set_aside_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Split `train`'s words into its own flags and the --any.field value pairs, wherever they stand."""
    if words[:1] != ["train"]:
        return words, []
    own = {
        "--out",
        "--config",
        "--resume",
        "--no-resume",
        "--from",
        "--device",
        "--show",
        "--no-show",
        "--help",
    }
    kept, overrides, rest = ["train"], [], words[1:]
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word.partition("=")[0] in own:
            kept.append(word)
            continue
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return kept, overrides


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning is one line; where in the source it arose is of no use to whoever runs a command."""
    print(f"bd3lm: warning: {message}", file=sys.stderr)
