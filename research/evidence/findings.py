"""What the figures say, in sentences that are computed: the paper's orderings, and whether they hold here.

A finding begins with its verdict. Holds and does not hold are for differences that are large enough for
their standard errors; smaller ones are within noise. Where the noise is not known there is no such verdict,
and where a figure is missing it is not measured.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product

from bd3lm.reports.document import Table
from research.evidence import paper
from research.evidence.decoding import judged_difference
from research.evidence.figures import (
    OTHERS,
    WHOLE,
    Evidence,
    Written,
    is_decoding,
    shown,
)
from research.evidence.measures import ZERO_SHOT
from research.evidence.noise import NOT_MEASURED, Difference, Nats
from research.evidence.runs import (
    COMPARED,
    DECODED,
    LEANS,
    LONG,
    PRESET,
    PRESET_LEAN,
    TIED_AR,
    TIME,
    UNTIED,
    Run,
    is_used,
    range_name,
)
from research.evidence.tables import (
    CORPORA,
    by_setting,
    documents,
    ordered_names,
    paper_generative,
    past_names,
    tuned,
    tuned_label,
)

AIM = 0.05  # above AR, of an exact perplexity, at blocks of 4
UNKNOWN = "noise not known"


def verdict(ours: Difference | None, theirs: Sequence[float]) -> str:
    """Whether a difference has the sign of the paper's, or is none where the paper has none."""
    if ours is None:
        return NOT_MEASURED
    signs = {math.copysign(1, each) if each else 0 for each in theirs}
    if len(signs) > 1:
        return "the paper has both"
    if signs == {0} and ours.error is not None:
        return "holds" if ours.is_noise else "does not hold"
    return noise_word(ours) or ("holds" if {math.copysign(1, ours.value)} == signs else "does not hold")


def noise_word(ours: Difference) -> str:
    """Why a difference allows no verdict, if it does not."""
    return UNKNOWN if ours.error is None else "within noise" if ours.is_noise else ""


def said(verdict: str, sentence: str) -> str:
    return f"{verdict[0].upper()}{verdict[1:]}: {sentence}"


def ordering(
    name: str, other: str, ours: Difference | None, theirs: Mapping[str, Difference], what: str = ""
) -> str:
    """One against another, in the paper and here."""
    signs = [each.value for each in theirs.values()]
    relation = (
        "below"
        if max(signs) < 0
        else "above"
        if min(signs) > 0
        else "against"
        if any(signs)
        else "as good as"
    )
    here = "" if ours is None else f", here {ours}"
    return said(
        verdict(ours, signs), f"`{name}` {relation} `{other}`{what}{here}, in the paper {_list(theirs)}."
    )


def _list(theirs: Mapping[str, Difference]) -> str:
    return ", ".join(f"{each} ({where})" for where, each in theirs.items())


def compared(name: str, other: str, ours: Difference | None, what: str = "") -> str:
    """One against another where the paper has nothing."""
    if ours is None:
        return said(NOT_MEASURED, f"`{name}` against `{other}`{what}.")
    word = noise_word(ours) or ("lower" if ours.value < 0 else "higher")
    return said(word, f"`{name}` against `{other}`{what}, {ours}.")


def _printed(tables: Mapping[str, Mapping[str, float]], name: str, other: str) -> dict[str, Difference]:
    return {
        where: Difference.of(table[name], table[other])
        for where, table in tables.items()
        if name in table and other in table
    }


def alternatives_findings(evidence: Evidence) -> Iterator[str]:
    """The best setting of each method, once all are known, and how far it is from what is used; so are tied
    embeddings for all of them."""
    best, better = [], []
    for name in COMPARED:
        found = by_setting(evidence, name)
        known = {setting: nats.mean for setting, nats in found.items() if isinstance(nats, Nats) and nats}
        if not known or NOT_MEASURED in map(str, found.values()):
            yield "The best setting of each method is not measured yet."
            return
        least = min(known.values())
        settings = [setting for setting, nats in known.items() if nats == least]
        best.append(f"for `{name}` {' and '.join(settings)}")
        if not any(is_used(name, setting) for setting in settings):
            better += [(f"{name}-{setting}", name) for setting in settings]
    yield f"Best on validation text: {'; '.join(best)}."
    for run, name in dict.fromkeys((*better, *((f"{name}-tied", name) for name in COMPARED))):
        ours = evidence.difference(*(evidence.best(each, split="valid") for each in (run, name)))
        yield compared(run, name, ours, ", validation text")


def main_findings(evidence: Evidence) -> Iterator[str]:
    rising = ("ar", "bd3lm-4", "bd3lm-8", "bd3lm-16", "mdlm", "sedd", "d3pm")
    for low, high in (*pairwise(rising), ("bd3lm-4", "bd3lm-16")):
        ours = evidence.difference(evidence.as_in_paper(high), evidence.as_in_paper(low))
        yield ordering(high, low, ours, _printed(CORPORA, high, low), "" if low == "ar" else ", bounds")
    exact, bound = evidence.exact("bd3lm-4"), evidence.bound("bd3lm-4")
    yield (
        f"`bd3lm-4` over `ar`: exact {shown(evidence.above_ar(exact))}, bound "
        f"{shown(evidence.above_ar(bound))}, the paper's bound {_list(_printed(CORPORA, 'bd3lm-4', 'ar'))}."
    )
    looseness = evidence.difference(bound, exact, with_noise=False)
    yield f"The bound of `bd3lm-4` over its exact perplexity: {shown(looseness)}."
    for size, (least, most) in paper.CLIPS.items():
        yield f"{_clips(evidence, size)}; the paper's best are U[{least:g}, {most:g}]."
    for family in (WHOLE, OTHERS):
        own = (
            f"`{name}` {100 * statistics.stdev(nats.values):.2f} %"
            for name, nats in evidence.several_seeds.items()
            if nats.family == family and not nats.start
        )
        yield (
            f"Standard deviation of perplexity over seeds of {family}, pooled over models with several: "
            f"{shown(evidence.spreads.get(family))}. From the first step on: {', '.join(own) or 'none'}."
        )
    for start, spread in evidence.paired_spreads.items():
        yield f"The same of what starts from `{start}`, beyond what the checkpoint gives to all: {spread}."


def long_findings(evidence: Evidence) -> Iterator[str]:
    """The paper's orderings, and the aim, after twice the steps; one seed, so the noise is not known."""
    for low, high in pairwise(("ar", "bd3lm-4", "bd3lm-16", "mdlm")):
        nats = [evidence.as_in_paper(f"{LONG}{name}") for name in (high, low)]
        what = "" if low == "ar" else ", bounds"
        yield ordering(
            LONG + high, LONG + low, evidence.difference(*nats), _printed(CORPORA, high, low), what
        )
    starts = ("from-ar-copies-4", "from-ar-heavy-flat-4", f"{UNTIED}-4")
    for name, lean in product((f"{LONG}{start}" for start in starts), (0.0, *LEANS)):
        if nats_at := evidence.exact(name, lean=lean):
            yield _aim(evidence, name, nats_at, f" at lean {lean:g}")


def _clips(evidence: Evidence, size: int) -> str:
    name = f"bd3lm-{size}"
    found = [
        line["learned"] for run in evidence.named(name) for line in evidence.results.of(run, "trained")[-1:]
    ]
    ranges = ", ".join(f"U[{each['low']:g}, {each['high']:g}]" for each in found)
    return f"Mask rates that the search of `{name}` ended with, by seed: {ranges or NOT_MEASURED}"


def zero_shot_findings(evidence: Evidence) -> Iterator[str]:
    """Text by text for each pair; one seed, so the noise is not known."""
    for name, other in combinations(paper.ZERO_SHOT, 2):
        agree, differ = [], []
        for data, first, second in zip(
            ZERO_SHOT, *(paper.ZERO_SHOT[each] for each in (name, other)), strict=False
        ):
            nats = [evidence.as_in_paper(each, data) for each in (name, other)]
            ours, theirs = evidence.difference(*nats, with_noise=False), Difference.of(first, second)
            if ours is not None and ours.value * theirs.value > 0:
                agree.append(data)
            elif ours is not None:
                differ.append(f"{data} ({ours}, the paper {theirs})")
        if not agree and not differ:
            yield said(NOT_MEASURED, f"`{name}` against `{other}`.")
        else:
            same, another = (", ".join(each) or "none" for each in (agree, differ))
            yield f"`{name}` against `{other}`: the paper's order on {same}; another on {another}. One seed."
    name = f"{PRESET}-4"
    lower, higher = [], []
    for data in ZERO_SHOT:
        nats = evidence.exact(name, data, lean=PRESET_LEAN), evidence.exact(TIED_AR, data)
        ours = evidence.difference(*nats, with_noise=False)
        if ours is not None:
            (lower if ours.value < 0 else higher).append(f"{data} ({ours})")
    what = f"`{name}` at lean {PRESET_LEAN:g}, exact, against `{TIED_AR}`"
    if not lower and not higher:
        yield said(NOT_MEASURED, f"{what}.")
    else:
        less, more = (", ".join(each) or "none" for each in (lower, higher))
        yield f"{what}: lower on {less}; higher on {more}. One seed."


def case_findings(evidence: Evidence) -> Iterator[str]:
    for name, other in (
        ("ar-random-batch", "ar"),
        ("block-1", "ar-random-batch"),
        ("block-1-full", "block-1"),
        ("block-1-full", "ar"),
    ):
        ours = evidence.difference(evidence.best(name), evidence.best(other))
        yield ordering(name, other, ours, _printed({"LM1B": paper.CASE_STUDY}, name, other))
    ours = evidence.difference(evidence.best("block-1-full"), evidence.best("ar-identity"))
    yield compared("block-1-full", "ar-identity", ours, ", which begin with the same first weights")
    uniform, full = paper.CASE_VARIANCE
    for name in ("block-1", "block-1-full"):
        found = evidence.variances(name)
        ours = found[full].over(found[uniform]) if {full, uniform} <= set(found) else None
        here = "" if ours is None else f", here {ours}"
        theirs = Difference.of(paper.CASE_VARIANCE[full], paper.CASE_VARIANCE[uniform])
        yield said(
            verdict(ours, [theirs.value]),
            f"Var of `{name}` lower fully masked than at uniform rates{here}, in the paper {theirs}.",
        )


def range_findings(evidence: Evidence) -> Iterator[str]:
    for size in (None, 16, 4):
        theirs = {range_name(*key): figures for key, figures in paper.RANGES.items() if key[0] == size}
        yield from _tuning_findings(evidence, theirs)


def schedule_findings(evidence: Evidence) -> Iterator[str]:
    for size in (4, 16):
        theirs = {name: figures for name, figures in paper.SCHEDULES.items() if f"-{size}-" in name}
        yield from _tuning_findings(evidence, theirs)


def _tuning_findings(evidence: Evidence, theirs: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """The paper's claims: some masks have both the least variance and the best bound; and which these are."""
    yield _least_of_both(evidence, theirs)
    best, found = min(theirs, key=lambda name: theirs[name]), tuned(evidence, list(theirs))
    for name in theirs:
        if name != best:
            printed = {"LM1B": Difference.of(theirs[best][0], theirs[name][0])}
            ours = evidence.difference(found[best].bound, found[name].bound)
            yield ordering(tuned_label(best), tuned_label(name), ours, printed, ", bounds")


def _least_of_both(evidence: Evidence, theirs: Mapping[str, tuple[float, float]]) -> str:
    """Whether the masks with the least variance have the best bound, here and in the paper."""
    paper_best, paper_quiet = (min(theirs, key=lambda name: theirs[name][place]) for place in (0, 1))
    there = f"in the paper {tuned_label(paper_best)} and {tuned_label(paper_quiet)}"
    found = tuned(evidence, list(theirs))
    spreads = {name: row.spread for name, row in found.items() if row.spread is not None}
    if not all(row.bound for row in found.values()) or len(spreads) < len(theirs):
        return said(NOT_MEASURED, f"the best bound and the least Var are of the same masks; {there}.")
    best, second = sorted(theirs, key=lambda name: found[name].bound.mean)[:2]
    quiet = min(theirs, key=lambda name: spreads[name].value)
    gap = evidence.difference(found[second].bound, found[best].bound)
    return said(
        (gap and noise_word(gap)) or ("holds" if best == quiet else "does not hold"),
        "the best bound and the least Var are of the same masks; here the best bound is of "
        f"{tuned_label(best)} (the next {shown(gap)}), the least Var of {tuned_label(quiet)}; {there}.",
    )


PAIRS = (
    ("counts", "clipped"),
    ("counts", "linear"),
    ("proposal", "counts"),
    ("copies", "counts"),
    ("next", "counts"),
    ("previous", "counts"),
    ("both", "next"),
    ("both", "previous"),
    ("from-ar-next", "next"),
    ("from-ar", "both"),
    ("from-mdlm", "both"),
    ("from-ar", "from-mdlm"),
    ("from-ar", "from-ar-next"),
    ("from-ar-late", "from-ar"),
    ("from-ar-copies", "from-ar"),
    ("from-ar-clipped", "from-ar"),
    ("from-ar-flat", "from-ar-copies"),
    ("from-ar-lean", "from-ar"),
    ("from-ar-heavy", "from-ar-copies"),
    ("from-ar-late-heavy", "from-ar-heavy"),
    ("from-ar-heavy-flat", "from-ar-heavy"),
    ("from-ar-heavy-flat", "from-ar-flat"),
    ("from-ar-early", "from-ar-heavy-flat"),
    ("from-ar-early", "both-heavy-flat"),
    ("from-ar-early-tied", "from-ar-early"),
    ("time-copies", "counts"),
    ("time-next", "counts"),
    ("time-both", "counts"),
    ("time-from-mdlm", "counts"),
    ("time-from-ar", "counts"),
    ("time-from-ar-early-tied", "counts"),
    ("time-from-ar-early-tied", "time-from-ar"),
)
"""Variants against what they differ from in one thing, and against counts in its time."""


def past_findings(evidence: Evidence, size: int) -> Iterator[str]:
    known = past_names(evidence, size)
    for first, second in PAIRS:
        name, other = f"{first}-{size}", f"{second}-{size}"
        if name in known and other in known:
            what = ", equal time" if first.startswith(TIME) else ", equal tokens"
            yield compared(name, other, evidence.difference(evidence.best(name), evidence.best(other)), what)
    yield from _chosen(evidence, size, [name for name in known if not name.startswith((TIME, "bd3lm-"))])


def _chosen(evidence: Evidence, size: int, names: Sequence[str]) -> Iterator[str]:
    """The best by validation text, and what it is worth on the test split."""
    lost = [name for name in names if evidence.diverged(name)]
    if lost:
        yield f"Diverged, and left out of the choice: {_quoted(lost)}."
    names = [name for name in names if name not in lost]
    valid = {name: nats for name in names if (nats := evidence.best(name, split="valid"))}
    if not valid:
        yield said(NOT_MEASURED, "the best on validation text.")
        return
    so_far = "" if len(valid) == len(names) else f" so far, {len(valid)} of {len(names)} are known"
    best = min(valid, key=lambda name: valid[name].mean)
    gaps = {name: evidence.difference(nats, valid[best]) for name, nats in valid.items() if name != best}
    near = f"within noise of it: {_quoted(name for name, gap in gaps.items() if gap and gap.is_noise)}"
    if unknown := [name for name, gap in gaps.items() if gap and gap.error is None]:
        near += f"; {UNKNOWN} for {_quoted(unknown)}"
    test = evidence.best(best)
    ar = evidence.ar_beside(best)
    above = evidence.above_ar(test, ar=ar)
    kind = "bound" if test.is_bound else "exact"
    yield (
        f"Best on validation text{so_far}: `{best}`; {near}. On the test split it lies {shown(above)} over "
        f"`{ar}` ({kind})."
    )
    paper_recipe = evidence.best(f"bd3lm-{size}")
    yield compared(best, f"bd3lm-{size}", evidence.difference(test, paper_recipe), ", equal tokens")
    if size == 4:
        yield _aim(evidence, best, test)


def order_findings(evidence: Evidence, size: int) -> Iterator[str]:
    """What a lean is worth to the same weights, and how near to AR the largest brings them; of what the
    presets train, every lean. The aim is of equal tokens, so what was trained for a time has none."""
    for name in ordered_names(evidence, size):
        known = evidence.in_orders(name)
        if 0.0 not in known or len(known) < 2:
            continue
        most = max(known)
        leaning, uniform = (
            known[lean].of_trainings(known[other].trainings) for lean, other in ((most, 0.0), (0.0, most))
        )
        less = evidence.difference(leaning, uniform, with_noise=False)
        bounds = ", bounds, which are tighter the more an order leans" if known[most].is_bound else ""
        yield f"`{name}` at lean {most:g} against lean 0, the same weights{bounds}: {shown(less)}."
        if size == 4 and not name.startswith(TIME):
            for lean in sorted(known) if name in (f"{UNTIED}-4", f"{PRESET}-4") else (most,):
                yield _aim(evidence, name, known[lean], f" at lean {lean:g}")
    names = [f"{TIME}{name}-{size}" for name in (PRESET, DECODED)]
    there = [name for name in ordered_names(evidence, size) if PRESET_LEAN in evidence.in_orders(name)]
    if set(names) <= set(there):
        ours = evidence.difference(*(evidence.best(name, lean=PRESET_LEAN) for name in names))
        yield compared(*names, ours, f", equal time, both at lean {PRESET_LEAN:g}")


def tied_findings(evidence: Evidence) -> Iterator[str]:
    """What tying is worth to AR, and in every order to the presets' blocks that start from it."""
    yield compared(TIED_AR, "ar", evidence.difference(evidence.exact(TIED_AR), evidence.exact("ar")))
    for size, lean in product((4, 16), (0.0, *LEANS)):
        tied, untied = (evidence.best(f"{name}-{size}", lean=lean) for name in (PRESET, UNTIED))
        ours = evidence.difference(tied, untied)
        yield compared(f"{PRESET}-{size}", f"{UNTIED}-{size}", ours, f", both at lean {lean:g}")


def _aim(evidence: Evidence, name: str, nats: Nats, how: str = "") -> str:
    """Whether the aim is met, by the noise of the difference, and against AR of the same kind."""
    ar = evidence.ar_beside(name)
    above = evidence.above_ar(nats, ar=ar)
    return said(
        verdict(above and above.above(AIM), [-1.0]),
        f"the aim, `{name}`{how} less than {100 * AIM:g} % over `{ar}`, {shown(above)}.",
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def text_findings(evidence: Evidence) -> Iterator[str]:
    """The orders of generative perplexity that the paper has, at each length."""
    for contexts, words in ((1, "one context"), (2, "two contexts")):
        found = {
            _title(each): (each, theirs)
            for each in evidence.texts()
            if each.asked.contexts == contexts
            and not is_decoding(each.asked)
            and (theirs := paper_generative(each))
        }
        for low, high in pairwise(sorted(found, key=lambda name: found[name][1])):
            (first, theirs), (second, others) = found[low], found[high]
            printed = {"GPT2-Large": Difference.of(theirs, others)}
            what = f", {words}{_less_trained(first.run, second.run)}"
            yield ordering(low, high, judged_difference(first, second), printed, what)


def _title(written: Written) -> str:
    return written.run.name + (f", {written.asked.steps} steps" if written.run.name == "ssd-lm" else "")


def _less_trained(run: Run, other: Run) -> str:
    """That one of two has seen less, if so."""
    less, more = sorted((run, other), key=lambda each: each.tokens)
    share = less.tokens / more.tokens
    times = "half of" if share == 0.5 else f"{share:.2g} times"
    return "" if share == 1 else f" (`{less.name}` has seen {times} the tokens)"


def length_findings(evidence: Evidence) -> Iterator[str]:
    """The paper's AR writes far longer documents than it was trained on, its block diffusion does not."""
    for name, found in documents(evidence):
        if name in paper.LENGTHS:
            theirs = Difference.of(paper.LENGTHS[name][0], paper.TRAINING_LENGTHS[0])
            known = found is not None and evidence.real is not None
            ours = Difference.of(found["median"], evidence.real["median"]) if known else None
            yield (
                f"The median document of `{name}` over that of the training set: {shown(ours)}, in the paper "
                f"{theirs}."
            )


_OF_THE_PAPER: Mapping[str, Callable[[Evidence], Iterator[str]]] = {
    "test perplexity": main_findings,
    "the same after twice the steps": long_findings,
    "blocks of one token": case_findings,
    "mask ranges": range_findings,
    "noise schedules": schedule_findings,
    "texts": text_findings,
}
_VERDICTS = ("holds", "does not hold", "within noise", UNKNOWN, NOT_MEASURED)


def verdict_table(evidence: Evidence) -> Table:
    """How many of the findings that repeat one of the paper have which verdict."""
    counts = {
        section: Counter(each.partition(":")[0].lower() for each in found(evidence) if "in the paper" in each)
        for section, found in _OF_THE_PAPER.items()
    }
    used = [word for word in _VERDICTS if any(count[word] for count in counts.values())]
    rows = [[section, *(str(count[word]) for word in used)] for section, count in counts.items()]
    return Table("What the paper says, by whether it is so here.", ["in", *used], rows)
