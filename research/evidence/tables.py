"""The results as tables, beside the paper's own figures; what is missing is told from what does not exist."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bd3lm.reports.document import Table
from research.evidence import paper
from research.evidence.figures import (
    DIVERGED,
    NONE,
    Evidence,
    Written,
    is_decoding,
    number,
    shown,
)
from research.evidence.measures import ZERO_SHOT, Documents, Variance
from research.evidence.noise import NOT_MEASURED, Difference, Estimate, Nats, comparable
from research.evidence.runs import (
    ALTERNATIVES,
    COMPARED,
    DECODED,
    LEANS,
    LONG,
    PRESET,
    PRESET_LEAN,
    TIED_AR,
    UNTIED,
    Run,
    is_used,
    range_name,
)
from research.evidence.settings import Settings

MAIN = ("ar", "d3pm", "sedd", "mdlm", "bd3lm-16", "bd3lm-8", "bd3lm-4")
CORPORA = {"LM1B": paper.LM1B, "OpenWebText": paper.OPENWEBTEXT}


def main_table(evidence: Evidence) -> Table:
    headings = ["model", "seeds", "bound", "over AR", "exact", "over AR"]
    for corpus in CORPORA:
        headings += [f"paper, {corpus}", "over AR"]
    rows = []
    for name in MAIN:
        theirs = [cell for table in CORPORA.values() for cell in _paper_cells(table, name)]
        rows.append([name, _seeds(evidence, name), *_both(evidence, name), *theirs])
    return Table(
        "Perplexity of the test split, and by how much it lies above the likelihood of AR. The paper's are "
        "bounds, but for AR. Exact figures of larger blocks are in a table below.",
        headings,
        rows,
    )


# What a reader wants to know first, in words, and the lean shown beside the uniform order.
SUMMARY: Sequence[tuple[str, str, float | None]] = (
    ("autoregressive", "ar", None),
    ("the paper's two stages, 85 % of the steps on whole contexts", "bd3lm-4", None),
    ("the paper's clipped masks on blocks from the first step on", "clipped-4", None),
    ("masks by count", "counts-4", None),
    ("masks by count, two complementary copies", "copies-4", None),
    ("half of the steps AR, then masks by count and a next-token loss", "from-ar-4", 2.0),
    ("half of the steps AR, then two copies and that loss", "from-ar-copies-4", 2.0),
    ("a quarter AR, then two copies and four times that loss", f"{UNTIED}-4", 4.0),
    ("autoregressive, embeddings tied", TIED_AR, None),
    (
        "`wikipedia-block-4`: a quarter AR, two copies, four times the next-token loss, tied",
        f"{PRESET}-4",
        PRESET_LEAN,
    ),
    ("autoregressive, twice the steps", f"{LONG}ar", None),
    ("a quarter AR, two copies, four times that loss, twice the steps", f"{LONG}{UNTIED}-4", 4.0),
)


def summary_table(evidence: Evidence) -> Table:
    """Of blocks of 4, exact."""
    rows = []
    for words, name, lean in SUMMARY:
        uniform = evidence.exact(name)
        leaning = [NONE, NONE]
        if lean:
            nats = at_lean(evidence, name, lean)
            figure, above = _cells(evidence, name, nats)
            leaning = [f"{figure} (lean {lean:g}, {len(nats.values)})", above]
        cells = _cells(evidence, name, uniform)
        rows.append([words, f"{cells[0]} ({len(uniform.values)})", cells[1], *leaning])
    tokens = evidence.named("ar")[0].tokens / 1e6
    return Table(
        "Exact perplexity of test text with blocks of 4, trained on Wikipedia for 1,000 steps "
        f"({tokens:.0f} M tokens) unless it says otherwise, with 77 M parameters, tied 51 M; ± is the "
        "standard deviation over seeds, whose number is in brackets. Over AR: against AR after as many "
        "steps, tied against tied, over the seeds that both have; ± there is a standard error, where it is "
        "known, or its interval where it is large.",
        ["trained as", "uniform order", "over AR", "leaning order", "over AR"],
        rows,
    )


def at_lean(evidence: Evidence, name: str, lean: float) -> Nats:
    """Of the trainings that were measured in uniform order too."""
    return evidence.exact(name, lean=lean).of_trainings(evidence.exact(name).trainings)


def long_table(evidence: Evidence) -> Table:
    """Beside what the same gave in half of the steps."""
    rows = []
    for name in _names(evidence, lambda run: run.table == "long"):
        short = name.removeprefix(LONG)
        rows.append([name, *_both(evidence, name), *_both(evidence, short)[1::2]])
    return Table(
        "Perplexity of the test split after twice the steps of the other tables, one seed, how far it lies "
        "above that of AR after as many, and how far the same lies above AR in the other tables.",
        ["model", "bound", "over AR", "exact", "over AR", "half the steps: bound, over AR", "exact, over AR"],
        rows,
    )


def _paper_cells(table: Mapping[str, float], name: str) -> list[str]:
    value = table.get(name)
    above = NONE if value is None or name == "ar" else str(Difference.of(value, table["ar"]))
    return [number(value, missing=NONE), above]


def _seeds(evidence: Evidence, name: str) -> str:
    known = f"{len(evidence.best(name).values)} of {len(evidence.named(name))}"
    return f"{known}, {DIVERGED}" if evidence.diverged(name) else known


def _both(evidence: Evidence, name: str) -> list[str]:
    """The bound and the exact figure, each with its distance from AR."""
    has_bound, has_exact = _has(evidence, name)
    least = _cells(evidence, name, evidence.bound(name)) if has_bound else [NONE, NONE]
    return least + (_cells(evidence, name, evidence.exact(name)) if has_exact else [NONE, NONE])


def _cells(evidence: Evidence, name: str, nats: Nats, *, part: bool = False) -> list[str]:
    """A figure and its distance from AR."""
    ar = evidence.ar_beside(name)
    above = NONE if name == ar else shown(evidence.above_ar(nats, part=part, ar=ar))
    return [str(nats), above]


def _has(evidence: Evidence, name: str) -> tuple[bool, bool]:
    """Whether a model has a bound that is not exact, and an exact likelihood of the whole test text."""
    run = evidence.named(name)[0]
    if run.kind == "autoregressive":
        return False, True
    return True, run.block_size in (1, 4)


def part_table(evidence: Evidence) -> Table:
    """What takes many passes, on fewer sequences: exact for blocks of 8, a tighter bound for blocks of 16."""
    rows = []

    def is_measured(run: Run) -> bool:
        return run.table != "long" and any(getattr(each, "part", False) for each in run.measures)

    for name in _names(evidence, is_measured):
        close = evidence.exact(name, part=True) or evidence.nats(name, "iw:8", part=True)
        bound = evidence.bound(name, part=True)
        least = [NONE, NONE] if name in ("ar", TIED_AR) else _cells(evidence, name, bound, part=True)
        rows.append([name, *least, *_cells(evidence, name, close, part=True)])
    return Table(
        "On the first sequences of the test split, which compare with each other only: the exact perplexity "
        "where it can be computed, else a bound from eight orders a block.",
        ["run", "NELBO", "over AR", "exact, or ≤ by iw:8", "over AR"],
        rows,
    )


def _names(evidence: Evidence, wanted: Callable[[Run], bool]) -> list[str]:
    return list(dict.fromkeys(run.name for run in evidence.runs if wanted(run)))


def alternatives_table(evidence: Evidence) -> Table:
    found = {name: by_setting(evidence, name) for name in COMPARED}
    rows = [
        [setting, *(shown(found[name][setting]) + " (used)" * is_used(name, setting) for name in COMPARED)]
        for setting in ALTERNATIVES
    ]
    title = (
        "Perplexity of validation text with other settings, one at a time, first seed; the differences below "
        "are over the seeds that both have."
    )
    return Table(title, ["setting", *COMPARED], rows)


def by_setting(evidence: Evidence, name: str) -> dict[str, Nats | str]:
    """The likelihood of validation text under the first seed, or why there is none."""
    found: dict[str, Nats | str] = {}
    for setting in ALTERNATIVES:
        run = name if is_used(name, setting) else f"{name}-{setting}"
        known = evidence.best(run, split="valid")
        first = [value for seed, value in zip(known.seeds, known.values, strict=True) if seed == 0]
        nats = Nats(tuple(first), known.is_bound)
        found[setting] = DIVERGED if evidence.diverged(run) else nats
    return found


def zero_shot_table(evidence: Evidence) -> Table:
    rows = []
    for name in (*MAIN, f"{DECODED}-4", f"{DECODED}-16", TIED_AR, f"{PRESET}-4"):
        rows.append([name, *(str(evidence.as_in_paper(name, data)) for data in ZERO_SHOT)])
        if _has(evidence, name) == (True, True):
            rows.append([f"{name}, exact", *(str(evidence.exact(name, data)) for data in ZERO_SHOT)])
        if name == f"{PRESET}-4":
            leaning = (evidence.exact(name, data, lean=PRESET_LEAN) for data in ZERO_SHOT)
            rows.append([f"{name}, exact, lean {PRESET_LEAN:g}", *map(str, leaning)])
        if name in paper.ZERO_SHOT:
            rows.append([f"{name}, the paper's", *map(number, paper.ZERO_SHOT[name]), NONE])
    return Table(
        "Perplexity of text that no model was trained on, first seed. The paper's under elife and acl are of "
        "PubMed and arXiv.",
        ["model", *ZERO_SHOT],
        rows,
    )


def case_table(evidence: Evidence) -> Table:
    rows = []
    for name, theirs in paper.CASE_STUDY.items():
        found = evidence.variances(name)
        draws = any(isinstance(each, Variance) for each in evidence.named(name)[0].measures)
        missing = NOT_MEASURED if draws else NONE
        spreads = [str(found.get(rule, missing)) for rule in paper.CASE_VARIANCE]
        rows.append([name, str(evidence.best(name)), number(theirs), *spreads])
        if name == "ar":
            rows.append(["ar-identity", str(evidence.best("ar-identity")), NONE, NONE, NONE])
    rows.append(["the paper's Var", NONE, NONE, *map(number, paper.CASE_VARIANCE.values())])
    return Table(
        "Perplexity of the test split, and the variance of the loss with masks at uniform rates and with all "
        "tokens masked.",
        ["model", "perplexity", "paper, LM1B", "Var, uniform rates", "Var, fully masked"],
        rows,
    )


def tuned_label(name: str) -> str:
    """A run of the next two tables: its block size, and its mask range or schedule."""
    kind, size, *rest = name.split("-")
    masks = f"U[{', '.join(rest)}]" if kind == "range" else rest[0].replace("_", " ")
    return f"{size}, {masks}"


_TUNED = ["blocks of, masks", "seeds", "bound", "Var", "Var, not redrawn", "paper's bound", "paper's Var"]
_TUNED_TITLE = (
    "the bound of the test split, and the variance of the loss under {}, with the masks of the training and, "
    "where these are drawn again until their own rate lies in a range, without that. All rows of a block "
    "size are of the same seeds: those in which they start from the same weights, if there are any."
)


def range_table(evidence: Evidence) -> Table:
    theirs = {range_name(*key): figures for key, figures in paper.RANGES.items()}
    title = "Fine-tuned from one checkpoint a seed under a range of mask rates: "
    return Table(title + _TUNED_TITLE.format("that range"), _TUNED, _tuned_rows(evidence, theirs))


def schedule_table(evidence: Evidence) -> Table:
    title = "Fine-tuned from one checkpoint a seed under a schedule: "
    rows = _tuned_rows(evidence, paper.SCHEDULES)
    return Table(title + _TUNED_TITLE.format("that schedule"), _TUNED, rows)


def _tuned_rows(evidence: Evidence, theirs: Mapping[str, tuple[float, float]]) -> list[list[str]]:
    rows = []
    for names in tuned_by_size(theirs).values():
        for name, row in tuned(evidence, names).items():
            cells = [str(len(row.bound.values)), str(row.bound), shown(row.spread)]
            cells.append(NONE if row.is_never_redrawn else shown(row.not_redrawn))
            rows.append([tuned_label(name), *cells, *map(number, theirs[name])])
    return rows


def tuned_by_size(names: Iterable[str]) -> dict[str, list[str]]:
    """Runs of the two tables, by block size."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.split("-")[1], []).append(name)
    return found


class Tuned(NamedTuple):
    """A row of the tables of mask ranges and schedules."""

    bound: Nats
    spread: Estimate | None
    """The variance of the loss with the masks of the training."""
    not_redrawn: Estimate | None
    """The same without drawing masks again until their rate lies in the range."""
    is_never_redrawn: bool


def tuned(evidence: Evidence, names: Sequence[str]) -> dict[str, Tuned]:
    """Rows that are compared, over the seeds in which they can be."""
    bounds = {name: evidence.bound(name) for name in names}
    measured = [nats for nats in bounds.values() if nats]
    seeds = comparable(measured) if measured else set()
    rows = {}
    for name, nats in bounds.items():
        measures = evidence.named(name)[0].measures
        rules = [rule for each in measures if isinstance(each, Variance) for rule in each.rules]
        found = evidence.variances(name, seeds)
        rows[name] = Tuned(
            nats.of_seeds(seeds), found.get(rules[0]), found.get(rules[-1]), is_never_redrawn=len(rules) == 1
        )
    return rows


def past_names(evidence: Evidence, size: int) -> list[str]:
    """The variants of a block size, the paper's recipe first."""

    def is_variant(run: Run) -> bool:
        return run.table == "past" and run.block_size == size

    return [f"bd3lm-{size}", *_names(evidence, is_variant)]


def variant_table(evidence: Evidence) -> Table:
    """What the names of the variants stand for, read off their recipes; other block sizes differ in the rates
    of clipped masks alone."""
    rows = []
    for name in past_names(evidence, 4)[1:]:
        run = evidence.named(name)[0]
        if run.same_time_as is not None:
            continue
        method, start = run.method, "nothing"
        if run.parent is not None:
            method_before = "MDLM" if run.parent.kind == "mdlm" else "AR"
            tied = ", tied" * run.parent.is_tied
            start = f"{run.parent.steps} steps of {method_before}{tied}"
        rows.append(
            [
                name.removesuffix("-4"),
                start,
                "; ".join(_masks_by_size(evidence, name)),
                "2" if method["masking"].get("complementary") else "1",
                f"{method['next_token']:g}" if method["next_token"] else NONE,
                "yes" if method.get("previous_token") else NONE,
            ]
        )
    headings = ["variant", "starts from", "masks", "copies", "next-token loss", "token before"]
    return Table("What the variants are.", headings, rows, text_columns=[1, 2])


def _masks_by_size(evidence: Evidence, name: str) -> list[str]:
    """How a variant draws masks at blocks of 4, and at those of 16 where that is otherwise."""
    words = {
        size: _mask_words(run.method["masking"])
        for size in (4, 16)
        for run in evidence.runs
        if run.key == f"{name.removesuffix('-4')}-{size}/0"
    }
    others = [f"blocks of {size}: {each}" for size, each in words.items() if each != words[4]]
    return [words[4], *others]


def _mask_words(masking: Settings) -> str:
    if masking["kind"] == "clipped":
        return f"rates in [{masking['low']:g}, {masking['high']:g}]"
    if masking["kind"] == "times":
        return "uniform rates"
    proposal = ", learned proposal" * masking["learn_proposal"]
    flat = ", flat weights" * (masking.get("weight") == "flat")
    lean = f", for lean {masking['lean']:g}" if "lean" in masking else ""
    return f"by count{proposal}{flat}{lean}"


def past_table(evidence: Evidence, size: int) -> Table:
    rows = []
    for name in ("ar", TIED_AR, *past_names(evidence, size)):
        is_candidate = name != f"bd3lm-{size}"
        valid = str(evidence.best(name, split="valid")) if is_candidate else NONE
        cells = [_seeds(evidence, name), valid, *_both(evidence, name), _head(evidence, name)]
        rows.append([name, *cells, *cost_cells(evidence, name)])
    return Table(
        f"Blocks of {size}: perplexity at equal tokens, of runs called time- in the time of counts-{size}. "
        "Variants are chosen by the validation column; the others are of the test split. The next-token head "
        "is the same network as an autoregressive one, first tokens aside. AR is tied where a run is. Steps "
        "are of the first seed, of all stages; minutes are those steps at the median pace of such alone on "
        "the device.",
        [
            *("run", "seeds", "validation", "bound", "over AR", "exact", "over AR"),
            *("next-token head", "steps", "minutes"),
        ],
        rows,
    )


def _head(evidence: Evidence, name: str) -> str:
    asked = any(getattr(each, "estimator", "") == "next-token" for each in evidence.named(name)[0].measures)
    return str(evidence.nats(name, "next-token", figure="exact")) if asked else NONE


def cost_cells(evidence: Evidence, name: str) -> list[str]:
    """Steps and minutes of a run and of what it starts from."""
    stages = evidence.named(name)[0].lineage
    trained = [evidence.results.of(each, "trained") for each in stages]
    if not all(trained):
        return [NOT_MEASURED, NOT_MEASURED]
    steps = [lines[-1]["steps"] for lines in trained]
    spent = [evidence.results.step_seconds(each.cost) for each in stages]
    known = [count * seconds for count, seconds in zip(steps, spent, strict=True) if seconds is not None]
    minutes = sum(known) / 60 if len(known) == len(stages) else None
    return [" + ".join(f"{count:,}" for count in steps), number(minutes, missing="not timed")]


def ordered_names(evidence: Evidence, size: int) -> list[str]:
    """What is measured in orders that lean, of a block size."""

    def is_ordered(run: Run) -> bool:
        own = run.table != "long" and run.block_size == size
        return own and any(getattr(each, "lean", 0.0) for each in run.measures)

    return _names(evidence, is_ordered)


def order_table(evidence: Evidence, size: int) -> Table:
    return Table(
        f"Blocks of {size}: perplexity of the test split, {'exact' if size == 4 else 'a bound'}, by how much "
        "the order of reveal leans to the left, and how far it lies above AR, tied where the row is; a row "
        "is of the trainings that were measured in all of its orders.",
        ["run", "seeds", *_LEAN_HEADINGS],
        [_order_row(evidence, name) for name in ordered_names(evidence, size)],
    )


_LEAN_HEADINGS = ["lean 0", *(f"{lean:g}" for lean in LEANS)]


def _order_row(evidence: Evidence, name: str) -> list[str]:
    asked = {getattr(each, "lean", 0.0) for run in evidence.named(name) for each in run.measures}
    ar = evidence.ar_beside(name)
    known = {
        lean: f"{nats} ({evidence.above_ar(nats, ar=ar)})" for lean, nats in evidence.in_orders(name).items()
    }
    missing = {lean: NOT_MEASURED if lean in asked else NONE for lean in (0.0, *LEANS)}
    seeds = "/".join(dict.fromkeys(str(len(nats.values)) for nats in evidence.in_orders(name).values()))
    return [name, seeds or NONE, *(missing | known).values()]


def tied_table(evidence: Evidence) -> Table:
    """The recipe of the presets and AR, as they are and tied, each beside its like."""
    rows = []
    for ar, recipe in (("ar", UNTIED), (TIED_AR, PRESET)):
        nats = evidence.exact(ar)
        rows.append([ar, str(len(nats.values)), str(nats), *[NONE] * len(LEANS)])
        rows += [_order_row(evidence, f"{recipe}-{size}") for size in (4, 16)]
    return Table(
        "Perplexity of the test split by how much the order of reveal leans to the left, exact for blocks of "
        "4 and a bound for those of 16, and how far it lies above that AR which is tied or not as they are.",
        ["run", "seeds", *_LEAN_HEADINGS],
        rows,
    )


TEXT_HEADINGS = ["evaluations a token", "entropy", "generative perplexity", "bits a character"]


def text_table(evidence: Evidence) -> Table:
    """Texts written as in the paper."""
    rows = [
        ["real text", f"{contexts}", NONE, NONE, *text_cells(None, evidence.real_text(contexts)), NONE]
        for contexts in (1, 2)
    ]
    for each in evidence.texts():
        if not is_decoding(each.asked):
            way = f"{each.asked.steps:,} steps" if each.asked.steps else "token by token"
            redrawn = NONE if each.asked.floor is None else shown(each.cost and each.cost["redraws"])
            theirs = number(paper_generative(each), ".1f", missing=NONE)
            cells = text_cells(each.cost, each.verdict)
            rows.append([each.run.name, f"{each.asked.contexts}", way, redrawn, *cells, theirs])
    return Table(
        f"Texts of one and two contexts{_judge(evidence)}. Entropy is of the tokens of a text, in nats: "
        "texts that repeat themselves have little. ± is one standard error over texts. The paper's figures "
        "are under GPT2-Large, of longer texts: their order compares, they do not.",
        ["model", "contexts", "written", "redrawn", *TEXT_HEADINGS, "paper"],
        rows,
        text_columns=[2],
    )


def text_cells(cost: Mapping[str, Any] | None, verdict: Mapping[str, Any] | None) -> list[str]:
    """What texts cost and what the judge found; real text has cost nothing."""
    if cost is None and verdict is None:
        return [NOT_MEASURED] * len(TEXT_HEADINGS)
    known = cost or verdict or {}
    drawn = [NONE if cost is None else number(cost["evaluations_per_token"]), number(known["entropy"])]
    if verdict is None:
        return [*drawn, "not judged", "not judged"]
    error = "" if verdict["perplexity_error"] is None else f" ± {verdict['perplexity_error']:.1f}"
    return [*drawn, f"{verdict['perplexity']:.1f}{error}", f"{verdict['bits_per_character']:.3f}"]


def _judge(evidence: Evidence) -> str:
    settings = [record["settings"] for record in evidence.verdicts.values()]
    judges = dict.fromkeys(f"{each['judge']} ({each['judge_dtype']})" for each in settings)
    return f" under the judge {' or '.join(judges)}" if judges else ""


def paper_generative(written: Written) -> float | None:
    asked, name = written.asked, written.run.name
    row = paper.SSD_LM.get(asked.steps or 0) if name == "ssd-lm" else paper.GENERATIVE.get(name)
    return row[asked.contexts - 1] if row else None


def length_table(evidence: Evidence) -> Table:
    columns = ("number", "median", "p90", "max")
    rows = []
    if evidence.real:
        counts = [f"{evidence.real[each]:,}" for each in columns]
        rows.append(["the training set", *counts, NONE, *(f"{each:,}" for each in paper.TRAINING_LENGTHS)])
    asked = dict(documents(evidence))
    for name in dict.fromkeys((*paper.LENGTHS, *asked)):
        theirs = [f"{each:,}" for each in paper.LENGTHS[name]] if name in paper.LENGTHS else [NONE, NONE]
        cells = [NOT_MEASURED if name in asked else NONE] * 5
        if found := asked.get(name):
            ends = ", ".join(f"{count} by {reason}" for reason, count in found["stopped_by"].items())
            cells = [*(f"{found[each]:,}" for each in columns), ends]
        rows.append([name, *cells, *theirs])
    return Table(
        "Lengths of documents in tokens, each from an end token to the next, to an entropy below the floor, "
        "or to the limit. The paper's are of OpenWebText.",
        [
            *("documents of", "number", "median", "p90", "longest", "stopped"),
            *("paper's median", "paper's longest"),
        ],
        rows,
        text_columns=[5],
    )


def documents(evidence: Evidence) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """What is known of the documents of every model that is to write some."""
    for run in evidence.runs:
        for measure in run.measures:
            if isinstance(measure, Documents):
                yield run.name, evidence.result(run, measure)
