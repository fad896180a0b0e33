"""Results of a small run after training: held-out perplexities, a text, and report.html."""

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bd3lm.commands.eval import Eval, measure_perplexity
from bd3lm.commands.report import Report, make_report
from bd3lm.commands.report.measuring import keep_box_film, keep_texts
from bd3lm.commands.report.runs import stages_of
from bd3lm.commands.shared.corpora import open_sequences
from bd3lm.commands.shared.records import keep, new_record
from bd3lm.commands.shared.subjects import Subject
from bd3lm.io.console import Console
from bd3lm.lm import Settings, build_estimator
from bd3lm.reports import perplexity_text
from bd3lm.reports.content import OWN
from bd3lm.reports.numbers import chain
from bd3lm.runs.folders import is_run
from bd3lm.runs.plan import Run
from bd3lm.runs.recipe import Recipe, recipe_from_dict
from bd3lm.runs.stages import resolve_stages

_DRAWS = 8  # draws per text, for an estimated bound
_BOX_PROMPT = "The city of"


def show_results(runs: list[Run], out: Path, *, console: Console | None = None) -> None:
    """Print held-out perplexities of every stage and of the unigram model, a sample of the last stage, and
    write report.html.

    Without held-out text there are no perplexities and no prompt for a sample.
    """
    console = console or Console()
    run = runs[-1]
    if without := [each.nothing_held_out for each in runs if each.nothing_held_out is not None]:
        console.print(
            f"{without[0]}, so nothing is measured: prepare the data with --held-out",
            soft_wrap=True,
            markup=False,
        )
    else:
        _print_perplexities(runs, out, console)
        _print_long_text(run, console)
    with _doing("letting the box model write", console):
        keep_box_film(_subject(run), _BOX_PROMPT)
    with _doing("writing the report", console):
        page = make_report(
            Report(runs=(out,), device=str(run.trainer.engine.device)), console=Console(quiet=True)
        )
    console.print(
        Text.assemble(
            "\n",
            (str(page), "bold"),
            " has the measurements, plots, and an animation of a text: open it in a browser.",
        ),
        soft_wrap=True,
    )
    console.print(
        Text.assemble(
            (f"Everything is in {out}", "bold"),
            f": recipes, metrics.csv, checkpoints, and the model in {run.out / 'model'}.",
        ),
        soft_wrap=True,
    )
    trained = run.trainer.step > run.trainer.resumed_at  # otherwise this was printed earlier
    if trained and (suggestions := _to_try(runs)):
        console.print("\n".join(["Try next:", *suggestions]), soft_wrap=True)


def _doing(what: str, console: Console) -> AbstractContextManager[object]:
    """Announce slow work: while it lasts on a terminal, once elsewhere."""
    if console.is_terminal:
        return console.status(what)
    console.print(f"{what} ...")
    return nullcontext()


def _print_perplexities(runs: list[Run], out: Path, console: Console) -> None:
    """Print a table of every stage, with token frequencies for comparison."""
    table = Table(title="Perplexity of held-out text (per token; lower is better)")
    for heading in ("model", "steps", "exact", "bound"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    titles = " and ".join(dict.fromkeys(each.config.title for each in runs))
    console.print(f"measuring on held-out text: {titles} ...", soft_wrap=True)
    table.add_row("unigram frequencies", "", f"{_unigram(runs[-1]):.1f}", "")
    trainings = {stage.folder: stage.training() for stage in stages_of(out)}
    for each in runs:
        made = trainings[each.out]
        table.add_row(each.config.title, chain(made.steps, made.start), *_perplexities(each, console))
    console.print()
    console.print(table)
    if any(len(each.steps) > 1 for each in trainings.values()):
        console.print(
            "A sum of steps: training continued from the first of these models, with a fresh optimizer.",
            soft_wrap=True,
        )
    if runs[-1].config.method.has_order:
        console.print(
            "Exact figures cover every order in which a block can be revealed; the bound is what papers "
            "report; ± is one standard error.",
            soft_wrap=True,
        )


def _to_try(runs: list[Run]) -> list[str]:
    """Commands to try that nobody has run in this folder yet, one per line.

    They fit the unchanged demo: with the user's own flags they might do something else, or fail.
    """
    if not _is_plain_demo(runs):
        return []
    ideas = (
        ("other masks", "demo", "pairs", "--block.objective.masking.complementary true"),
        ("larger blocks", "demo", "block8", f"--from {runs[0].out} --method.block_size 8"),
        ("the paper's way", "demo-paper", "demo-paper", ""),
    )
    command = sys.argv[0] if Path(sys.argv[0]).name == "bd3lm" else "bd3lm"
    return [
        f"  {what + ':':17}{command} train {preset} --out runs/{out} {flags}".rstrip()
        for what, preset, out, flags in ideas
        if not is_run(Path("runs") / out)
    ]


def _is_plain_demo(runs: list[Run]) -> bool:
    """Whether the runs are the unchanged stages of `demo`, apart from order and folder."""

    def own(recipe: Recipe) -> Recipe:
        return replace(recipe, start_from=None, data=replace(recipe.data, skip=None))

    trained = [recipe_from_dict(run.trainer.run_state["recipe"], where=str(run.out)) for run in runs]
    return list(map(own, trained)) == [own(recipe) for _, recipe in resolve_stages("demo")]


def _unigram(run: Run) -> float:
    """The unigram model's perplexity, stored next to the run for its report."""
    subject = _subject(run)
    with open_sequences(subject, None, limit=_validated(subject)) as text:
        settings = {"data": OWN, "text": text.fingerprint, "split": text.split}
    found, tokens = unigram_perplexity(run)
    record = new_record(subject, "unigram", settings=settings, result={"perplexity": found, "tokens": tokens})
    keep(subject, "unigram", record)
    return found


def unigram_perplexity(run: Run) -> tuple[float, int]:
    """Held-out perplexity of the training text's token counts, plus one each, and the number of tokens."""
    vocabulary = run.config.network.vocab_size
    train = torch.from_numpy(run.shards.read("train", 0, run.shards.split("train").tokens).astype("int64"))
    counts = torch.bincount(train, minlength=vocabulary).double() + 1
    counts[run.config.mask_id] = 0
    log_p = (counts / counts.sum()).log()
    nats, tokens = 0.0, 0
    for batch in run.held_out.batches:
        nats -= log_p[batch.tokens[batch.scored]].sum().item()
        tokens += int(batch.scored.sum())
    return math.exp(nats / tokens), tokens


def _perplexities(run: Run, console: Console) -> tuple[str, str]:
    """(exact, bound) of the released model on all held-out text, as the table prints them."""
    config = run.config
    if config.method.no_likelihood:
        return "", "no likelihood"
    subject = _subject(run)
    drawn = build_estimator(config, "auto").is_random
    record = measure_perplexity(
        subject,
        Eval(sequences=_validated(subject), replicates=_DRAWS if drawn else 1),
        console=console,
    )
    figures = {figure["meaning"]: perplexity_text(figure) for figure in record["result"]["figures"]}
    return figures.get("exact", ""), figures.get("bound", "")


def _subject(run: Run) -> Subject:
    """The model that the run released."""
    return Subject.open(run.out, device=str(run.trainer.engine.device))


def _validated(subject: Subject) -> int | None:
    """The number of held-out sequences in validation."""
    return subject.recipe.data.validation_sequences if subject.recipe else None


def _print_long_text(run: Run, console: Console, *, length_in_contexts: int = 2) -> None:
    """Write a text longer than the training context, from a held-out prompt; stored for the report.

    A method that cannot write past its context fills one context.
    """
    context = run.config.network.context
    prompt = run.held_out.batches[0].tokens[0, : context // 8]
    subject = _subject(run)
    method = subject.model.config.method
    if not method.writes_past_context:
        length_in_contexts = 1
    settings = method.settled(Settings(length=length_in_contexts * context, stop_at_eos=False, seed=7))
    written = subject.model.generate([prompt], settings)
    if length_in_contexts > 1:
        keep_texts(subject, "long_text", settings, written)
    console.print(
        Panel(
            Text.assemble((run.tokenizer.decode(prompt), "dim"), f" ▸ {written[0].completion or ''}"),
            title=f"{length_in_contexts * context} tokens, {length_in_contexts} contexts (prompt ▸ sample)",
        )
    )
