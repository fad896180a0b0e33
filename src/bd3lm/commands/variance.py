"""`bd3lm variance`: variance of the loss under each masking rule, on trained models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    DeviceFlag,
    FieldFlag,
    Models,
    RecordsFlag,
    SeedFlag,
    TokenizerFlag,
    named,
)

if TYPE_CHECKING:
    from rich.table import Table

    from bd3lm.commands.shared.subjects import Subject
    from bd3lm.diffusion import MaskingRule
    from bd3lm.io.console import Console
    from bd3lm.models import Denoiser
    from bd3lm.objectives import TokenBatch


@dataclass(frozen=True)
class Variance(Command):
    """Measure the variance of the training loss under each masking rule.

    Works for trained block diffusion models; the table has a column for each, with its block size.
    """

    kind = "variance"

    models: Models = ()
    data: Annotated[
        str | None,
        named(
            "DATA",
            help="Text to measure on: a folder of token shards, a file, a folder of files or a named corpus. "
            "Default: the text that each run held out.",
        ),
    ] = None
    field: FieldFlag = None
    batches: int = 20
    """Held-out batches to measure the loss on."""
    gradients: int = 0
    """Held-out batches to measure the gradient on. 0: do not measure it."""
    batch_size: Annotated[
        int | None,
        named(
            "INT",
            help="Sequences per batch; the variance of the gradient depends on it. Default: "
            "data.validation_batch of the run, else 16.",
        ),
    ] = None
    seed: SeedFlag = 0
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    out: RecordsFlag = None

    def run(self) -> int:
        from bd3lm.commands.shared.corpora import check_texts
        from bd3lm.commands.shared.models import check_models
        from bd3lm.commands.shared.records import check_new_file, write_records

        check_new_file(self.out)
        check_models(self.models, device=self.device)
        self.check()
        check_texts([self.data], self.field)
        write_records(self.out, report_variances(self))
        return 0

    def check(self) -> None:
        """Refuse numbers of batches that give no variance."""
        from bd3lm.limits import check_counts

        check_counts(batches=self.batches, batch_size=self.batch_size)
        if self.gradients < 0 or self.gradients == 1:
            raise ValueError(f"--gradients must be 0 or at least 2, got {self.gradients}")


@cache
def rules() -> "dict[str, MaskingRule]":
    """By name: the rows of the paper's tables of mask ranges and of noise schedules, and our own rules."""
    from bd3lm.diffusion import (
        ClippedTimes,
        Cosine,
        Counts,
        Logarithmic,
        Square,
        SquareRoot,
        Times,
    )

    found: dict[str, MaskingRule] = {"counts": Counts()}
    # A clipped range as in section 5.2, and the same with masks redrawn until their own rate lies in the
    # range, as the reference implementation and our presets of the paper's runs train.
    for low, high in ((0.45, 0.95), (0.5, 1.0), (0.3, 0.8), (0.0, 0.5)):
        rule, rates = ClippedTimes(low=low, high=high), f"U[{low:g}, {high:g}]"
        found |= {f"clipped {rates}": rule, f"redrawn {rates}": replace(rule, redraw=True)}
    return found | {
        "fully masked": ClippedTimes(low=1.0, high=1.0),
        "linear U[0, 1]": Times(),
        "logarithmic": Times(Logarithmic()),
        "square root": Times(SquareRoot()),
        "square": Times(Square()),
        "cosine": Times(Cosine()),
    }


def measurable_rules(network: "Denoiser") -> "dict[str, MaskingRule]":
    """The rules that a network can be measured under. A network that sees the noise level needs rules that
    draw a time, and counts draw none."""

    return {name: rule for name, rule in rules().items() if not (network.uses_noise and not rule.draws_times)}


def measure_variances(
    subject: "Subject", flags: Variance, *, console: "Console | None" = None
) -> dict[str, Any]:
    """The variance of the loss over blocks and of the gradient over batches (eq. 10), as a record with a row
    for each of `measurable_rules`.

    It is measured on --data, or on the text that a run held out; then the record is stored next to the run.
    The default batch size is that of the run's validation.
    """
    from bd3lm.commands.shared.progress import tracked
    from bd3lm.commands.shared.records import keep, new_record, record_name
    from bd3lm.evaluation import gradient_variance, nelbo_variance
    from bd3lm.runs.sections import DataRecipe

    batches, gradients, data = flags.batches, flags.gradients, flags.data
    flags.check()
    config, network = subject.model.record, subject.model.network
    if not config.method.masks_by_rule:
        raise ValueError(f"{subject.name} must hold a block diffusion model, got {config.method.kind}")
    block_size = config.method.piece(config.network.context)
    validated = DataRecipe() if subject.recipe is None else subject.recipe.data
    rows = flags.batch_size or validated.validation_batch
    some = _batches(subject, data, flags.field, rows, max(batches, gradients))
    # A gradient over fewer sequences varies more, so a smaller last batch does not count.
    full = [batch for batch in some[:gradients] if len(batch.tokens) == rows]
    if gradients and len(full) < 2:
        raise ValueError(
            f"{data or f'the data of {subject.name}'} must have at least 2 batches of {rows} sequences to "
            f"measure gradients on, got {len(full)}; set the batch size with --batch-size (default: "
            "data.validation_batch of a run, else 16)"
        )
    found = []
    measurable = measurable_rules(network)
    steps = tracked(measurable.items(), subject.title, total=len(measurable), console=console)
    for name, rule in steps:
        objective = config.method.judging(rule, config.frame)
        loss = nelbo_variance(network, objective, some[:batches], block_size=block_size, seed=flags.seed)
        gradient = gradient_variance(network, objective, full, seed=flags.seed) if gradients else None
        found.append(
            {
                "masks": name,
                "loss": loss.variance,
                "loss_error": loss.error,
                "gradient": gradient and gradient.variance,
                "gradient_error": gradient and gradient.error,
                "unbiased": objective.bounds(network),
            }
        )
    settings = {
        "block_size": block_size,
        "batches": len(some[:batches]),
        "gradients": len(full),  # 0: not requested
        "batch_size": rows,
        "sequences": sum(len(batch.tokens) for batch in some[:batches]),
        "seed": flags.seed,
        **({} if data is None else {"data": data}),
        **({} if flags.field is None else {"field": flags.field}),
    }
    record = new_record(subject, "variance", settings=settings, result={"rows": found})
    if data is None:  # a report compares runs on held-out text
        keep(subject, record_name("variance", settings), record)
    return record


def _batches(
    subject: "Subject", data: str | None, field: str | None, rows: int, number: int
) -> "list[TokenBatch]":
    """Batches of `rows` sequences, at most this many, from `data` or from the run's held-out text."""
    from bd3lm.commands.shared.corpora import open_sequences
    from bd3lm.runs.texts import held_out_batches

    if data is not None:
        with open_sequences(subject, data, field=field, limit=rows * number) as text:
            return list(text.batches(subject, rows))
    shards = subject.shards()  # raises an error if there is no run
    assert subject.recipe is not None
    method = subject.model.config.method
    held_out = held_out_batches(replace(subject.recipe.data, validation_batch=rows), shards, method)
    if not len(held_out):
        raise ValueError(f"the data of {subject.name} has no held-out sequences to measure on")
    return [held_out[index].to(subject.device) for index in range(min(number, len(held_out)))]


def report_variances(flags: Variance, *, console: "Console | None" = None) -> list[dict[str, Any]]:
    """Measure each model, and print a table: a row per masking rule, a column per model."""
    from bd3lm.commands.shared.subjects import Subject, tell_what_is_not_kept
    from bd3lm.io.console import Console

    console = console or Console()
    if not flags.models:
        raise ValueError("models must name at least one run, model folder, GGUF file or hub id, got none")
    subjects = [Subject.open(model, tokenizer=flags.tokenizer, device=flags.device) for model in flags.models]
    if flags.data is None:
        tell_what_is_not_kept(subjects)
    records = [measure_variances(subject, flags, console=console) for subject in subjects]
    for table in _tables(records, flags, console):
        console.print(table)
    if any(len(record["result"]["rows"]) < len(rules()) for record in records):
        console.print("–: counts draw no time, and a network that sees the noise level needs one.")
    has_errors = any(
        row[f"{what}_error"]
        for record in records
        for row in record["result"]["rows"]
        for what in ("loss", "gradient")
    )
    console.print(_note(errors=has_errors, gradients=bool(flags.gradients)), soft_wrap=True)
    return records


def _tables(records: Sequence[Mapping[str, Any]], flags: Variance, console: "Console") -> "list[Table]":
    """One table of all models, or several tables of some models each if it would not fit on the screen."""
    endless = console.options.update(width=10_000)

    def fits(some: Sequence[Mapping[str, Any]]) -> bool:
        narrow = _table(some, flags, narrow=True)
        return console.measure(narrow, options=endless).maximum <= console.width

    groups: list[list[Mapping[str, Any]]] = []
    for record in records:
        if groups and fits([*groups[-1], record]):
            groups[-1].append(record)
        else:
            groups.append([record])
    return [_table(group, flags) for group in groups]


def _table(records: Sequence[Mapping[str, Any]], flags: Variance, *, narrow: bool = False) -> "Table":
    """A row per masking rule, a column per model; `narrow` if the figures need less room."""
    from rich.table import Table
    from rich.text import Text

    from bd3lm.reports import with_error

    table = Table(title=f"Variance, seed {flags.seed}")
    table.add_column("masks", no_wrap=True)
    columns: list[Sequence[str]] = [list(rules())]
    by_rule = [{row["masks"]: row for row in record["result"]["rows"]} for record in records]
    for record, found in zip(records, by_rule, strict=True):
        settings = record["settings"]
        name = Text(f"{record['model']}\nblocks of {settings['block_size']}\n")
        headings = {"loss": f"loss of {settings['sequences']:,} sequences"}
        if flags.gradients:
            batches = f"{settings['gradients']} × {settings['batch_size']}"
            headings["gradient"] = f"gradient of {batches} sequences"
        for what, heading in headings.items():
            cells = [
                with_error(found[masks][what], found[masks][f"{what}_error"]) if masks in found else "–"
                for masks in rules()
            ]
            width = max(map(len, ("sequences", *cells)))
            table.add_column(
                name + Text(heading),
                justify="right",
                overflow="fold",
                width=width if narrow else None,
                min_width=width,
            )
            columns.append(cells)
    table.add_column("unbiased", no_wrap=True)
    columns.append([_unbiased([found[masks] for found in by_rule if masks in found]) for masks in rules()])
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    return table


def _note(*, errors: bool, gradients: bool) -> str:
    """The meaning of the figures, as far as the table has them."""
    from bd3lm.reports.trainings import NO_FINITE_VARIANCE

    over = "Redrawn: a clipped range whose masks are drawn again until their own rate lies in it. "
    over += "Variance over blocks"
    if gradients:
        over += " for the loss, over batches for the gradient, which depends on the batch size"
    error = " ± is one standard error over batches, a rough estimate." if errors else ""
    theirs = "that of this sample" + (", and so is its error" if errors else "")
    return (
        f"{over}; lower is quieter.{error} These have no finite variance, since rates near 0 weigh too much: "
        f"{', '.join(NO_FINITE_VARIANCE)}. Theirs is {theirs}."
    )


def _unbiased(rows: Sequence[dict[str, Any]]) -> str:
    """Whether the bound is the mean of a rule's loss in all the runs it was measured on."""
    if not rows:
        return "–"
    return "yes" if all(row["unbiased"] for row in rows) else "no"
