"""`bd3lm variance MODEL...`: how noisy each way of drawing masks is on trained models."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from bd3lm.commands.corpora import check_texts, open_sequences
from bd3lm.commands.records import keep, new_record, record_name
from bd3lm.commands.subjects import Subject
from bd3lm.config import BlockDiffusionMethod
from bd3lm.diffusion import (
    ClippedTimes,
    Cosine,
    Counts,
    Logarithmic,
    MaskingRule,
    Square,
    SquareRoot,
    Times,
)
from bd3lm.evaluation import gradient_variance, nelbo_variance
from bd3lm.lm import block_loss
from bd3lm.models import Transformer
from bd3lm.objectives import TokenBatch
from bd3lm.reports import with_error
from bd3lm.reports.trainings import NO_FINITE_VARIANCE
from bd3lm.runs.plan import held_out_batches
from bd3lm.runs.recipe import DataRecipe


def _clipped(low: float, high: float) -> dict[str, MaskingRule]:
    """A range as in section 5.2, and with masks drawn again until their own rate lies in it as well, which
    is how the reference implementation and our presets of the paper's runs train."""
    rule, rates = ClippedTimes(low=low, high=high), f"U[{low:g}, {high:g}]"
    return {f"clipped {rates}": rule, f"redrawn {rates}": replace(rule, redraw=True)}


# The rows of the paper's tables of mask ranges and of noise schedules, and ours.
RULES: dict[str, MaskingRule] = {
    "counts": Counts(),
    **_clipped(0.45, 0.95),
    **_clipped(0.5, 1.0),
    **_clipped(0.3, 0.8),
    **_clipped(0.0, 0.5),
    "fully masked": ClippedTimes(low=1.0, high=1.0),
    "linear U[0, 1]": Times(),
    "logarithmic": Times(Logarithmic()),
    "square root": Times(SquareRoot()),
    "square": Times(Square()),
    "cosine": Times(Cosine()),
}


def measurable_rules(network: Transformer) -> dict[str, MaskingRule]:
    """The rules whose masks a network can be asked about: one that is told the noise level needs rules that
    draw a time, and counts draw none."""
    return {
        name: rule for name, rule in RULES.items() if not (network.uses_noise and isinstance(rule, Counts))
    }


def measure_variances(
    subject: Subject,
    *,
    data: str | None = None,
    field: str | None = None,
    batches: int = 20,
    gradients: int = 0,
    batch_size: int | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """The variance of the loss over blocks and of the gradient over batches (eq. 10), as a record; it has a
    row for each of `measurable_rules`.

    It is measured on what a run held out, and then kept beside the run, or on `data`. By default a batch is
    as large as those that the run validates on.
    """
    if batches < 1 or gradients < 0 or gradients == 1:
        raise ValueError(
            f"batches must be at least 1 and gradients 0 or at least 2, got {batches}, {gradients}"
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch must be at least 1, got {batch_size}")
    method, network = subject.model.config.method, subject.model.network
    if not isinstance(method, BlockDiffusionMethod):
        raise ValueError(f"{subject.name} must hold a block diffusion model, got {method.kind}")
    validated = DataRecipe() if subject.recipe is None else subject.recipe.data
    rows = batch_size or validated.validation_batch
    some = _batches(subject, data, field, rows, max(batches, gradients))
    # A gradient over fewer sequences varies more, so the last batch does not count where it is smaller.
    full = [batch for batch in some[:gradients] if len(batch.tokens) == rows]
    if gradients and len(full) < 2:
        raise ValueError(
            f"{data or f'the data of {subject.name}'} must have at least 2 batches of {rows} sequences to "
            f"measure gradients on, got {len(full)}; --batch says how many sequences a batch has, by default "
            "data.validation_batch of a run, else 16"
        )
    found = []
    rules = measurable_rules(network)
    for name, rule in track(rules.items(), subject.title, console=console or Console(), transient=True):
        objective = block_loss(method, rule)
        loss = nelbo_variance(network, objective, some[:batches], block_size=method.block_size, seed=seed)
        gradient = gradient_variance(network, objective, full, seed=seed) if gradients else None
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
        "block_size": method.block_size,
        "batches": len(some[:batches]),
        "gradients": len(full),  # 0: not asked for
        "batch_size": rows,
        "sequences": sum(len(batch.tokens) for batch in some[:batches]),
        "seed": seed,
        **({} if data is None else {"data": data}),
        **({} if field is None else {"field": field}),
    }
    record = new_record(subject, "variance", settings=settings, result={"rows": found})
    if data is None:  # a report compares runs on what they held out
        keep(subject, record_name("variance", settings), record)
    return record


def _batches(
    subject: Subject, data: str | None, field: str | None, rows: int, number: int
) -> list[TokenBatch]:
    """At most so many batches of `rows` sequences of `data`, or of what the subject's run held out."""
    if data is not None:
        with open_sequences(subject, data, field=field, limit=rows * number) as text:
            return list(text.batches(subject, rows))
    shards = subject.shards()  # an error where there is no run
    assert subject.recipe is not None
    held_out = held_out_batches(replace(subject.recipe.data, validation_batch=rows), shards)
    if not len(held_out):
        raise ValueError(f"the data of {subject.name} has no sequence held out to measure on")
    score_first = subject.model.config.method.score_first
    return [
        TokenBatch.of(held_out[index].to(subject.device), score_first=score_first)
        for index in range(min(number, len(held_out)))
    ]


def report_variances(
    models: Sequence[str | Path],
    *,
    data: str | None = None,
    field: str | None = None,
    batches: int = 20,
    gradients: int = 0,
    batch_size: int | None = None,
    seed: int = 0,
    tokenizer: str | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure each model, and print a row for each way of drawing masks, a column for each model."""
    console = console or Console()
    if not models:
        raise ValueError("models must name at least one run, model folder or hub id, got none")
    subjects = [Subject.open(model, tokenizer=tokenizer, device=device) for model in models]
    check_texts([data], field)
    records = [
        measure_variances(
            subject,
            data=data,
            field=field,
            batches=batches,
            gradients=gradients,
            batch_size=batch_size,
            seed=seed,
            console=console,
        )
        for subject in subjects
    ]
    table = Table(title=f"Variance, seed {seed}")
    table.add_column("masks", no_wrap=True)
    for record in records:
        settings = record["settings"]
        name = Text(f"{record['model']}\nblocks of {settings['block_size']}\n")
        table.add_column(name + Text(f"loss of {settings['sequences']:,} sequences"), justify="right")
        if gradients:
            of = f"gradient of {settings['gradients']} × {settings['batch_size']} sequences"
            table.add_column(name + Text(of), justify="right")
    table.add_column("unbiased")
    has_errors = False
    by_rule = [{row["masks"]: row for row in record["result"]["rows"]} for record in records]
    for masks in RULES:
        rows = [found.get(masks) for found in by_rule]
        cells = [
            "–" if row is None else with_error(row[what], row[f"{what}_error"])
            for row in rows
            for what in ("loss", *(("gradient",) if gradients else ()))
        ]
        has_errors |= any("±" in cell for cell in cells)
        table.add_row(masks, *cells, _unbiased([row for row in rows if row is not None]))
    console.print(table)
    if any(len(found) < len(RULES) for found in by_rule):
        console.print("–: counts draw no time, which a network that is told the noise level needs.")
    console.print(_note(errors=has_errors, gradients=bool(gradients)), soft_wrap=True)
    return records


def _note(*, errors: bool, gradients: bool) -> str:
    """What the figures are, as far as the table has them."""
    over = "Redrawn: a clipped range whose masks are drawn again until their own rate lies in it. "
    over += "Variance over blocks"
    if gradients:
        over += " for the loss, over batches for the gradient, where it depends on the size of a batch"
    error = " ± is one standard error over batches, a rough one." if errors else ""
    theirs = "that of this sample" + (", and so is its error" if errors else "")
    return (
        f"{over}; lower is quieter.{error} These have no finite variance, since rates near 0 weigh too much: "
        f"{', '.join(NO_FINITE_VARIANCE)}. Theirs is {theirs}."
    )


def _unbiased(rows: Sequence[dict[str, Any]]) -> str:
    """Whether a rule's loss has the bound as its mean on all the runs that it was measured on."""
    if not rows:
        return "–"
    return "yes" if all(row["unbiased"] for row in rows) else "no"
