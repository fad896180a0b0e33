"""What measures a model: `bd3lm eval`, `bd3lm zeroshot`, `bd3lm score` and `bd3lm variance`."""

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional

from bd3lm.cli.flags import (
    DeviceFlag,
    DTypeFlag,
    EstimatorFlag,
    FieldFlag,
    LeanFlag,
    Model,
    Models,
    OptionalFile,
    OptionalInt,
    Texts,
    TokenizerFlag,
    named,
)


@dataclass(frozen=True, kw_only=True)
class _Likelihoods:
    """What the commands that measure likelihoods have in common."""

    models: Models
    """Runs, model folders or hub ids."""
    estimator: EstimatorFlag = "auto"
    lean: LeanFlag = None
    replicates: int = 1
    """Independent draws of a drawn estimate: more are less noise, and say how much of the error is theirs."""
    split: Annotated[str | None, named("SPLIT")] = None
    """Of the data; by default valid, else test, else all there is."""
    field: FieldFlag = None
    sequences: OptionalInt = None
    """Measure only the first so many."""
    seed: int = 0
    batch: int = 16
    """Sequences side by side."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: DTypeFlag = None
    out: OptionalFile = None
    """Write the records, all figures and settings, to this new JSON file too."""

    def _subjects(self) -> list[Any]:
        from bd3lm.commands.subjects import Subject, check_lean_is_for

        if not self.models:
            raise ValueError("models must name at least one run, model folder or hub id, got none")
        subjects = [
            Subject.open(
                model, device=self.device, dtype=self.dtype, tokenizer=self.tokenizer, lean=self.lean
            )
            for model in self.models
        ]
        check_lean_is_for(subjects, self.lean)
        return subjects

    def _options(self) -> dict[str, Any]:
        return {
            "estimator": self.estimator,
            "replicates": self.replicates,
            "split": self.split,
            "field": self.field,
            "limit": self.sequences,
            "seed": self.seed,
            "batch_size": self.batch,
        }


@dataclass(frozen=True, kw_only=True)
class Eval(_Likelihoods):
    """Perplexity, bits per token and per byte, with standard errors: exact where it can be, else a bound."""

    data: Texts = ()
    """Texts to measure on: folders of token shards, files, folders of files or named corpora; by default what
    each run held out."""
    eos: bool = True
    """Put an end-of-text token after every document, where --data is text. Shards have it or have it not."""

    def run(self) -> int:
        from rich.console import Console

        from bd3lm.commands.perplexities import report_perplexities
        from bd3lm.commands.records import check_new_file, write_records

        check_new_file(self.out)
        data = self.data or (None,)
        options = {**self._options(), "eos_between_documents": None if self.eos else False}
        write_records(self.out, report_perplexities(self._subjects(), data, console=Console(), **options))
        return 0


@dataclass(frozen=True, kw_only=True)
class ZeroShot(_Likelihoods):
    """Perplexity on corpora the models were not trained on: a table of models against corpora.

    Documents are wrapped to the context without an end-of-text token between them, as the paper does. The
    status is 1 if a figure could not be measured; the others are shown and written all the same.
    """

    data: Texts = ()
    """Corpora: names, files or folders; by default the paper's seven, from the hub."""

    def run(self) -> int:
        import sys

        from rich.console import Console

        from bd3lm.commands.perplexities import ZERO_SHOT, report_zero_shot
        from bd3lm.commands.records import check_new_file, write_records

        check_new_file(self.out)
        data, subjects = self.data or ZERO_SHOT, self._subjects()
        records = report_zero_shot(subjects, data, console=Console(), **self._options())
        write_records(self.out, records)
        asked = len(subjects) * len(set(data))
        if missing := asked - len(records):
            print(f"bd3lm: {missing} of {asked} figures could not be measured", file=sys.stderr)
        return int(missing > 0)


@dataclass(frozen=True)
class Score:
    """How likely a model finds each document, one JSON line each: exact where it can be, else a bound.

    Documents longer than the context are scored in windows, each given what the one before it has scored.
    """

    model: Model
    """A run, model folder or hub id."""
    files: Positional[Annotated[tuple[str, ...], named("FILE ...")]]
    """Files or folders of text; the documents are those that `bd3lm data prepare` would take, and blank ones
    between them have a line too, without a figure."""
    field: FieldFlag = None
    estimator: EstimatorFlag = "auto"
    lean: LeanFlag = None
    samples: OptionalInt = None
    """Draws of a drawn estimate, whose spread is the error; by default 16, and 1 for iw:K."""
    stride: OptionalInt = None
    """Tokens that a window after the first scores, given the rest of a context; by default half a context."""
    seed: int = 0
    batch: int = 8
    """Documents, or windows of long ones, or draws, side by side."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: DTypeFlag = None
    out: OptionalFile = None
    """Write the lines to this new .jsonl file, and not to standard output. Until all are there it is called
    FILE.partial, from which the same command goes on."""

    def run(self) -> int:
        from bd3lm.commands.records import check_new_file
        from bd3lm.commands.scores import run_score
        from bd3lm.commands.subjects import Subject, check_lean_is_for

        check_new_file(self.out)
        subject = Subject.open(
            self.model, device=self.device, dtype=self.dtype, tokenizer=self.tokenizer, lean=self.lean
        )
        check_lean_is_for([subject], self.lean)
        run_score(
            subject,
            self.files,
            field=self.field,
            out=self.out,
            estimator=self.estimator,
            samples=self.samples,
            stride=self.stride,
            seed=self.seed,
            batch_size=self.batch,
        )
        return 0


@dataclass(frozen=True)
class Variance:
    """How noisy each way of drawing masks is on trained block diffusion models, by block size."""

    models: Models
    """Runs, model folders or hub ids."""
    data: Annotated[str | None, named("DATA")] = None
    """Text to measure on: a folder of token shards, a file, a folder of files or a named corpus; by default
    what each run held out."""
    field: FieldFlag = None
    batches: int = 20
    """Held-out batches to measure the loss on."""
    gradients: int = 0
    """Held-out batches to measure the gradient on; 0 does not."""
    batch: OptionalInt = None
    """Sequences a batch, on which the gradient's variance depends; by default data.validation_batch of the
    run, else 16."""
    seed: int = 0
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    out: OptionalFile = None
    """Write the records, all figures and settings, to this new JSON file too."""

    def run(self) -> int:
        from bd3lm.commands.records import check_new_file, write_records
        from bd3lm.commands.variances import report_variances

        check_new_file(self.out)
        records = report_variances(
            self.models,
            data=self.data,
            field=self.field,
            batches=self.batches,
            gradients=self.gradients,
            batch_size=self.batch,
            seed=self.seed,
            tokenizer=self.tokenizer,
            device=self.device,
        )
        write_records(self.out, records)
        return 0
