"""`bd3lm data` and `bd3lm convert`: from other people's files to ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, subcommand

from bd3lm.cli.flags import (
    DTYPES,
    DType,
    FieldFlag,
    NewFolder,
    OptionalFolder,
    OptionalInt,
    named,
)

if TYPE_CHECKING:
    from bd3lm.data import Tokenizer


@dataclass(frozen=True)
class Prepare:
    """Text to token shards: parallel, resumable, the same bytes every time."""

    source: Positional[Annotated[str, named("SOURCE")]]
    """A file or folder (txt, jsonl, parquet; also .gz .xz .zst), or a named corpus such as lm1b."""
    out: NewFolder
    """The folder to write."""
    tokenizer: Annotated[str | None, named("TOKENIZER")] = None
    """A folder with tokenizer.json, a name on the hub, or bytes; by default the paper's for the corpus."""
    workers: int = 1
    """Processes that tokenize."""
    eos: bool = True
    """Put an end-of-text token after every document."""
    bos: bool = False
    """Put a beginning-of-text token before every document."""
    folder: OptionalFolder = None
    """A local copy of a named corpus."""
    field: FieldFlag = None
    text_unit: Annotated[Literal["file", "line", "paragraph"] | None, named("{file,line,paragraph}")] = None
    """What of a txt file is one document; by default the file in a folder of them, else what stands between
    blank lines."""
    held_out: Annotated[int | float | None, named("SHARE|INT")] = None
    """Share of the documents, the last ones, to hold out (below 1), or how many (1 is one document); 0.05 by
    default where there is no validation or test file. Giving it reads all files as one text, 0 holds out
    none."""

    def run(self) -> int:
        from bd3lm.data import load_corpus, prepare

        corpus = load_corpus(
            self.source,
            folder=self.folder,
            field=self.field,
            text_unit=self.text_unit,
            held_out=self.held_out,
        )
        shards = prepare(
            corpus,
            self._tokenizer(),
            self.out,
            workers=self.workers,
            eos_between_documents=self.eos,
            bos_before_documents=self.bos,
        )
        for name in shards.splits:
            split = shards.split(name)
            print(f"{name}: {split.documents:,} documents, {split.tokens:,} tokens")
        held_out = sum(shards.split(name).documents for name in shards.splits if name != "train")
        print(f"held out: {held_out:,} documents" if held_out else "held out: none")
        print(f"wrote {self.out}")
        return 0

    def _tokenizer(self) -> "Tokenizer":
        from bd3lm.data import load_tokenizer

        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer)
        default = "bert-base-uncased" if self.source == "lm1b" else "gpt2"
        try:
            return load_tokenizer(default)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}. {default} is the default here: --tokenizer names another, such as bytes, or a "
                "folder that `bd3lm data train-tokenizer` made"
            ) from error


@dataclass(frozen=True)
class TrainTokenizer:
    """Train a byte-level BPE on a corpus."""

    source: Positional[Annotated[str, named("SOURCE")]]
    """A file, a folder or a named corpus; its training split is used, a single document whole."""
    out: NewFolder
    """The folder to write: a new or empty one, or one with nothing but a tokenizer, which is replaced."""
    vocabulary: int = 8192
    """Number of tokens, the special ones included; fewer where the text is too small for so many."""
    folder: OptionalFolder = None
    """A local copy of a named corpus."""
    field: FieldFlag = None

    def run(self) -> int:
        from bd3lm.data import FileCorpus, load_corpus, train_bpe
        from bd3lm.data.tokenizers import CONFIG_FILE, SMALLEST_BPE, TOKENIZER_FILE

        if self.vocabulary < SMALLEST_BPE:
            raise ValueError(
                f"--vocabulary must be at least {SMALLEST_BPE} (256 bytes and two special tokens), "
                f"got {self.vocabulary}"
            )
        # Shards, and a model, are of no use with another tokenizer than theirs.
        _check_folder(self.out, may_hold=(TOKENIZER_FILE, CONFIG_FILE))
        corpus = load_corpus(self.source, folder=self.folder, field=self.field)
        if isinstance(corpus, FileCorpus) and corpus.too_small_to_share:
            corpus = load_corpus(self.source, field=self.field, held_out=0)
        tokenizer = train_bpe(corpus.documents("train"), self.vocabulary)
        tokenizer.save(self.out)
        fewer = ""
        if tokenizer.vocab_size < self.vocabulary:
            why = "no further pair of them occurs twice inside the words of the text"
            fewer = f" of {self.vocabulary:,} asked for: {why}"
        print(f"wrote {self.out}: {tokenizer.vocab_size:,} tokens{fewer}")
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

    source: Positional[Annotated[str, named("SOURCE")]]
    """A folder, a Lightning .ckpt file, or a hub id such as owner/name."""
    out: NewFolder
    """The folder to write, a new or empty one."""
    context: OptionalInt = None
    """Context length; a .ckpt file does not say, so give it there."""
    block_size: OptionalInt = None
    """Block size, for a .ckpt of a block diffusion model; by default one block (MDLM)."""
    causal: bool = False
    """Whether a .ckpt is of an autoregressive model."""
    time_conditioning: Annotated[bool, FlagCreatePairsOff] = False
    """The network of a .ckpt is told the noise level. One with a noise embedding (sigma_map) does not say, so
    give this there, or the next."""
    no_time_conditioning: Annotated[bool, FlagCreatePairsOff] = False
    """It is told a constant instead, as published models are."""
    weights: Annotated[Literal["ema", "raw"] | None, named("{ema,raw}")] = None
    """Which weights of a .ckpt to take; by default the EMA's where there are any."""
    dtype: Annotated[DType | None, named(DTYPES)] = None
    """Precision to write; by default that of the weights."""
    to: Literal["bd3lm", "reference"] = "bd3lm"
    """The layout to write: this project's, or that of the paper's published weights, for its own code."""

    def run(self) -> int:
        import torch

        from bd3lm import interop
        from bd3lm.commands.sources import one_model
        from bd3lm.data import saved_tokenizer
        from bd3lm.lm import LanguageModel

        lightning = None
        if self.source.endswith(".ckpt"):
            if self.context is None:
                raise ValueError("--context must be given for a .ckpt, which does not say it")
            lightning = interop.LightningFacts(
                context=self.context,
                block_size=self.context if self.block_size is None and not self.causal else self.block_size,
                causal=self.causal,
                time_conditioning=self._is_told_the_noise(),
                weights=self.weights,
            )
        elif self.causal or any(
            given is not None
            for given in (self.context, self.block_size, self._is_told_the_noise(), self.weights)
        ):
            raise ValueError(
                "--context, --block-size, --causal, --[no-]time-conditioning and --weights are for a .ckpt "
                f"file, got {self.source}"
            )
        _check_folder(self.out)
        path = interop.resolve(one_model(self.source))
        # Not as a model to be used, which would compute in another precision than it is stored in.
        dtype = getattr(torch, self.dtype) if self.dtype else None
        network, config = interop.load(path, lightning=lightning, dtype=dtype)
        tokenizer = saved_tokenizer(path)
        if self.to == "reference":
            interop.save_reference(network, config, self.out)
            if tokenizer is not None:
                tokenizer.save(self.out)
        else:
            LanguageModel(network, config, tokenizer).save_pretrained(self.out)
        parameters = sum(p.numel() for p in network.parameters())
        print(f"wrote {self.out}: {config.title}, {parameters:,} parameters")
        return 0

    def _is_told_the_noise(self) -> bool | None:
        """What the two flags say; None where neither is given, which a pair of one field could not tell."""
        if self.time_conditioning and self.no_time_conditioning:
            raise ValueError("--time-conditioning and --no-time-conditioning must not both be given")
        return self.time_conditioning if self.time_conditioning or self.no_time_conditioning else None


def _check_folder(out: Path, *, may_hold: Sequence[str] = ()) -> None:
    """Refuse, before there is work to lose, an OUT that holds what would be overwritten or mixed up."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"OUT must be a folder, and {out} is a file")
    others = sorted(each.name for each in out.iterdir() if each.name not in may_hold) if out.exists() else []
    if others:
        besides = ", or hold nothing but a tokenizer" if may_hold else ""
        raise ValueError(f"OUT must be a new or empty folder{besides}, and {out} holds {others[0]}")
