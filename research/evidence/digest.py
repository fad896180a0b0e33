"""docs/results.md, the digest: for each question an answer with its figures, a plot and a table.

All are computed. The rules of the long version decide which words an answer has: below, above, or within
noise.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from bd3lm.reports.document import Part, Prose, Table
from bd3lm.sampling import FirstHitting
from research.evidence import paper, plots, tables
from research.evidence.account import conditions
from research.evidence.decoding import (
    ERRORS,
    LESS_ENTROPY,
    MORE_PERPLEXITY,
    breaks,
    decoding_sets,
    judged_difference,
    rule_family,
    rule_text,
)
from research.evidence.figures import NONE, Evidence, Written, number, shown
from research.evidence.findings import AIM, UNKNOWN, noise_word, verdict, verdict_table
from research.evidence.measures import ZERO_SHOT
from research.evidence.noise import NOT_MEASURED, Difference, Nats
from research.evidence.runs import (
    DECODED,
    LEANS,
    LONG,
    PRESET,
    PRESET_LEAN,
    TIED_AR,
    TIME,
    UNTIED,
    range_name,
)

Region = Callable[[Evidence], Iterator[Part | None]]
_PRESETS = {4: "wikipedia-block-4", 16: "wikipedia-block-16"}


# In a cell, a space at which no line breaks: a real one would be folded when cells become Markdown.
UNBROKEN = "\ue000"


def lies(name: str, other: str, ours: Difference | None) -> str:
    """One figure against another, in the middle of a sentence."""
    if ours is None:
        return f"{name} against {other} is not measured"
    where = "is within noise of" if ours.is_noise else "lies below" if ours.value < 0 else "lies above"
    return f"{name} {where} {other}, {ours}{f', {UNKNOWN}' if noise_word(ours) == UNKNOWN else ''}"


def brief(ours: Difference | None) -> str:
    """As a cell of a narrow table: of what is a hundred percent or more, no decimals."""
    told = shown(ours)
    if ours is None or abs(ours.value) < 1:
        return told
    return re.sub(r"\d+\.\d+", lambda figure: f"{float(figure[0]):.0f}", told)


def _narrow(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[int] = ()
) -> Table:
    """A table whose cells stay on one line each, but for the range after a figure."""
    table = Table(caption, headings, rows, text_columns)
    kept = [[re.sub(r" (?!\([+−])", UNBROKEN, cell) for cell in row] for row in rows]
    return replace(table, rows=kept)


def _best(evidence: Evidence, name: str, other: str) -> Difference | None:
    """Of the exact figures, or else of the bounds."""
    return evidence.difference(evidence.best(name), evidence.best(other))


def _bounds(evidence: Evidence, name: str, other: str) -> Difference | None:
    """As the paper compares them."""
    return evidence.difference(evidence.as_in_paper(name), evidence.as_in_paper(other))


def _above(evidence: Evidence, nats: Nats, name: str) -> str:
    return brief(evidence.above_ar(nats, ar=evidence.ar_beside(name)))


def _setting(evidence: Evidence) -> Iterator[Part | None]:
    yield conditions(evidence)


def _paper(evidence: Evidence) -> Iterator[Part | None]:
    table = verdict_table(evidence)
    counts = {
        heading: sum(int(row[place]) for row in table.rows)
        for place, heading in enumerate(table.headings)
        if place
    }
    *told, last = [f"{count} {_COUNTED[heading]}" for heading, count in counts.items() if count]
    yield Prose(f"Of {sum(counts.values())} orderings that the paper reports, {', '.join(told)} and {last}.")


_COUNTED = {
    "holds": "hold here",
    "does not hold": "do not",
    "within noise": "are within noise",
    UNKNOWN: "come from one seed, whose noise is not known",
    NOT_MEASURED: "are not measured",
}


_WHOLE = {
    "AR": "ar",
    "MDLM": "mdlm",
    "two stages, 16": "bd3lm-16",
    "two stages, 4": "bd3lm-4",
    "blocks of 4 only": "clipped-4",
}


def _whole(evidence: Evidence) -> Iterator[Part | None]:
    steps, more = (evidence.named(name)[0].steps for name in ("ar", f"{LONG}ar"))
    early, late, blocks = (
        lies(words, whole, _bounds(evidence, name, other))
        for words, name, whole, other in (
            (
                "the paper's two-stage model with blocks of 4",
                "bd3lm-4",
                "diffusion of whole contexts (MDLM)",
                "mdlm",
            ),
            ("it", f"{LONG}bd3lm-4", "MDLM", f"{LONG}mdlm"),
            ("a model trained on blocks of 4 from the first step", "clipped-4", "MDLM", "mdlm"),
        )
    )
    yield Prose(
        f"After {steps:,} steps {early}. After {more:,} steps {late}. After {steps:,} steps {blocks}. These "
        "are differences of bounds."
    )
    yield plots.digest_block_plot(evidence)
    rows = []
    for words, name in _WHOLE.items():
        cells = [_bound_above_ar(evidence, each) for each in (name, f"{LONG}{name}")]
        theirs = (
            brief(Difference.of(table[name], table["ar"])) if name in table and name != "ar" else NONE
            for table in tables.CORPORA.values()
        )
        figure = evidence.as_in_paper(name)
        rows.append([words, _with_seeds(figure), *cells, *theirs])
    yield _narrow(
        f"Test perplexity (seeds), a bound but for AR; distance from AR after {steps:,} steps, after "
        f"{more:,}, and in the paper.",
        [
            "trained as",
            "perplexity",
            "over AR",
            f"{more:,} steps",
            *(f"paper, {corpus}".replace("OpenWebText", "OWT") for corpus in tables.CORPORA),
        ],
        rows,
    )


def _with_seeds(nats: Nats) -> str:
    return f"{str(nats).partition(' ±')[0]} ({len(nats.values)})" if nats else NOT_MEASURED


def _bound_above_ar(evidence: Evidence, name: str) -> str:
    if name in ("ar", f"{LONG}ar") or not evidence.named(name):
        return NONE
    return _above(evidence, evidence.as_in_paper(name), name)


_MASKS = {
    "uniform rates": "linear",
    "the paper's clipped rates": "clipped",
    "by count": "counts",
    "by count, learned proposal": "proposal",
    "by count, two copies": "copies",
}


def _counts(evidence: Evidence) -> Iterator[Part | None]:
    uniform, clipped = (
        lies(words, other, _best(evidence, "counts-4", name))
        for words, other, name in (
            ("a model trained with counts", "one with uniform mask rates", "linear-4"),
            ("it", "one with the paper's clipped rates", "clipped-4"),
        )
    )
    copies = lies("it", "the one with clipped rates", _best(evidence, "copies-4", "clipped-4"))
    yield Prose(
        f"At blocks of 4 and equal tokens {uniform}; {clipped}. With two complementary copies of the noise, "
        f"which need counts, {copies}."
    )
    yield _rows_above_ar(
        evidence,
        "masks",
        {f"{words}": name for words, name in _MASKS.items()},
        "Perplexity above AR by how masks are drawn. Bars are one standard error.",
    )
    rows = []
    for words, name in _MASKS.items():
        sizes = (f"{name}-{size}" for size in (4, 16))
        known = [(each, evidence.best(each)) for each in sizes]
        rows.append(
            [words, *(cell for each, nats in known for cell in (str(nats), _above(evidence, nats, each)))]
        )
    yield _narrow(
        "Test perplexity after training on blocks only: exact for blocks of 4, a bound for blocks of 16.",
        ["masks", "blocks of 4", "over AR", "blocks of 16", "over AR"],
        rows,
    )


def _rows_above_ar(evidence: Evidence, title: str, names: Mapping[str, str], caption: str) -> Part | None:
    """A row for each label, blocks of 4 and of 16 in it."""
    rows: dict[str, dict[str, Difference]] = {}
    for label, name in names.items():
        for size in (4, 16):
            nats = evidence.best(f"{name}-{size}")
            if above := evidence.above_ar(nats, ar=evidence.ar_beside(f"{name}-{size}")):
                rows.setdefault(label, {})[f"blocks of {size}"] = above
    return plots.above_ar_rows(title, rows, "Perplexity above AR", "perplexity, % above AR", caption)


_RECIPES = {
    "the paper's two stages": "bd3lm-4",
    "clipped masks": "clipped-4",
    "masks by count": "counts-4",
    "by count, two copies": "copies-4",
    "by count, next-token loss": "next-4",
    "by count, loss and token before": "both-4",
    "half AR first (from-ar)": f"{DECODED}-4",
    "half AR first, two copies": "from-ar-copies-4",
    "quarter AR, two copies, loss × 4": f"{UNTIED}-4",
    f"{_PRESETS[4]}: the same, tied": f"{PRESET}-4",
}
"""From the paper's recipe to ours."""


def _near_ar(evidence: Evidence) -> Iterator[Part | None]:
    best = f"{PRESET}-4"
    uniform, timed = evidence.exact(best), evidence.exact(f"{TIME}{best}")
    yield Prose(
        f"At equal tokens `{_PRESETS[4]}` is at {_above(evidence, uniform, best)} over AR in the paper's "
        f"uniform order, and at {_above(evidence, tables.at_lean(evidence, best, PRESET_LEAN), best)} in the "
        f"order in which it writes (lean {PRESET_LEAN:g}). In the time that masks by count take for the same "
        f"tokens, it is at {_above(evidence, timed, best)}, and a start from half AR with one copy at "
        f"{_above(evidence, evidence.exact(f'{TIME}{DECODED}-4'), f'{DECODED}-4')}, both in uniform order."
    )
    rows: dict[str, dict[str, Difference]] = {}
    for label, name in _RECIPES.items():
        for when, each in (("equal tokens", name), ("equal time", f"{TIME}{name}")):
            nats = evidence.exact(each) if evidence.named(each) else Nats()
            if above := evidence.above_ar(nats, ar=evidence.ar_beside(name)):
                rows.setdefault(label, {})[when] = above
    yield plots.above_ar_rows(
        "recipes",
        rows,
        "Perplexity above AR by recipe, blocks of 4",
        "perplexity (exact, uniform order), % above AR",
        "From the paper's recipe to ours, blocks of 4. Equal time is that of masks by count.",
    )
    yield _recipe_table(evidence)


_TOLD = {
    "AR": "ar",
    "AR, tied": TIED_AR,
    "two stages": "bd3lm-4",
    "clipped masks": "clipped-4",
    "two copies": "copies-4",
    "half AR first": f"{DECODED}-4",
    "the preset": f"{PRESET}-4",
}
"""Those of them that the table has too."""


def _recipe_table(evidence: Evidence) -> Table:
    rows = []
    for words, name in _TOLD.items():
        nats = evidence.exact(name)
        leaning, timed = tables.at_lean(evidence, name, PRESET_LEAN), f"{TIME}{name}"
        in_time = evidence.exact(timed) if evidence.named(timed) else Nats()
        above = (
            _above(evidence, each, name) if each and name not in ("ar", TIED_AR) else NONE
            for each in (nats, leaning, in_time)
        )
        rows.append(
            [
                words,
                _with_seeds(nats),
                *above,
                tables.cost_cells(evidence, name)[1].replace("not timed", NONE),
            ]
        )
    return _narrow(
        "Exact test perplexity (seeds) in uniform order, its distance from AR (tied from tied), then at lean "
        f"{PRESET_LEAN:g} and in equal time; minutes of training.",
        ["trained as", "perplexity", "over AR", f"lean {PRESET_LEAN:g}", "equal time", "min"],
        rows,
    )


def _leans(evidence: Evidence) -> Iterator[Part | None]:
    small, large = (f"{PRESET}-{size}" for size in _PRESETS)
    gains = {name: _gain(evidence, name) for name in (small, large)}
    met: dict[str, list[str]] = {}
    for lean, nats in evidence.in_orders(small).items():
        above = evidence.above_ar(nats, ar=evidence.ar_beside(small))
        word = verdict(above and above.above(AIM), [-1.0])
        met.setdefault(_MET.get(word, f"is {word}"), []).append(f"{lean:g}")
    told = "; it ".join(f"{word} at lean {' and '.join(leans)}" for word, leans in reversed(met.items()))
    yield Prose(
        f"Lean {PRESET_LEAN:g} changes the perplexity of the same weights by {gains[small]} in blocks of 4 "
        f"(exact) and by {gains[large]} in blocks of 16 (bounds). The aim of less than {100 * AIM:g} % above "
        f"AR with blocks of 4 at equal tokens {told or f'is {NOT_MEASURED}'}."
    )
    yield plots.digest_order_plot(evidence)
    rows = []
    for lean in (0.0, *LEANS):
        cells = [f"{100 * left_to_right(4, lean):.0f} %"]
        cells += [
            _above(evidence, evidence.in_orders(name).get(lean, Nats()), name) for name in (small, large)
        ]
        cells += [_judged(_one_a_pass(evidence, name, lean)) for name in (small, large)]
        rows.append([f"{lean:g}", *cells])
    yield _narrow(
        f"The two presets by lean: how many blocks of 4 come from left to right; test perplexity over AR, "
        f"exact for blocks of 4 and a bound for blocks of 16; generative perplexity of texts under the "
        f"judge, where {_beside(evidence)}.",
        ["lean", "left to right", "blocks of 4", "blocks of 16", "texts, blocks of 4", "texts, blocks of 16"],
        rows,
    )


_MET = {"holds": "is met", "does not hold": "is missed", UNKNOWN: "cannot be judged"}


def _gain(evidence: Evidence, name: str) -> str:
    known = evidence.in_orders(name)
    if not {0.0, PRESET_LEAN} <= set(known):
        return NOT_MEASURED
    return shown(evidence.difference(known[PRESET_LEAN], known[0.0], with_noise=False))


def left_to_right(size: int, lean: float) -> float:
    """How likely the order of such a lean is to go through a block from left to right."""
    return math.prod(1 / sum(math.exp(-lean * step) for step in range(left)) for left in range(1, size + 1))


def _one_a_pass(evidence: Evidence, name: str, lean: float) -> Written | None:
    for each in decoding_sets(evidence).get(name, []):
        rule = each.asked.unmasking
        if isinstance(rule, FirstHitting) and (rule.lean, rule.tokens_per_pass) == (lean, 1):
            return each
    return None


def _judged(written: Written | None) -> str:
    if written is None:
        return NONE
    found = written.verdict
    return "not judged" if found is None else f"{found['perplexity']:.1f} ± {found['perplexity_error']:.1f}"


def _beside(evidence: Evidence) -> str:
    """The texts of AR, and real ones."""
    known = {
        name: _judged(
            next(
                (
                    each
                    for each in evidence.texts()
                    if each.run.name == name and each.asked.contexts == 1 and each.verdict
                ),
                None,
            )
        )
        for name in (TIED_AR,)
    }
    real = evidence.real_text(1)
    theirs = NOT_MEASURED if real is None else f"{real['perplexity']:.1f}"
    return f"tied AR has {known[TIED_AR]} and real text {theirs}"


def _passes(evidence: Evidence) -> Iterator[Part | None]:
    sets = decoding_sets(evidence).get(f"{PRESET}-4", [])
    two = next((each for each in sets if rule_text(each) == f"order of lean {PRESET_LEAN:g}, 2 a pass"), None)
    one = _one_a_pass(evidence, f"{PRESET}-4", PRESET_LEAN)
    worse = judged_difference(two, one) if two and one else None
    careful = _judged(_one_a_pass(evidence, f"{DECODED}-16", PRESET_LEAN))
    yield Prose(
        f"Texts of `{_PRESETS[4]}` stay unbroken at no fewer than {_fewest(evidence, f'{PRESET}-4')}. Two "
        f"tokens a pass at lean {PRESET_LEAN:g} change their generative perplexity by {shown(worse)}. Texts "
        f"of `{DECODED}-16`, in blocks of 16, stay unbroken at no fewer than "
        f"{_fewest(evidence, f'{DECODED}-16')}; one token a pass at lean {PRESET_LEAN:g} has {careful}."
    )
    plot = plots.decoding_plot(evidence, f"{PRESET}-4")
    yield plot and replace(
        plot,
        caption="From careful on the right to hasty on the left. Hollow marks: the texts break.",
    )
    yield Prose(
        f"Texts break where generative perplexity lies more than {100 * MORE_PERPLEXITY:g} % above the most "
        f"careful setting of the rule, or entropy more than {LESS_ENTROPY:g} nats below random order, one "
        f"token a pass; by at least {ERRORS:g} standard errors beyond that limit."
    )
    kept = set()
    for family in dict.fromkeys(map(rule_family, sets)):
        own = [each for each in sets if rule_family(each) == family]
        whole = [each for each in own if breaks(each, sets) is False]
        if family in ("confidence", "entropy"):
            own = [own[0], *whole[-1:], own[-1]]
        if len(own) > 1:
            kept |= set(map(id, own))
    yield _narrow(
        f"Texts of `{_PRESETS[4]}`: evaluations of the network a token, entropy, generative perplexity.",
        ["rule", "evaluations", "entropy", "perplexity", "breaks"],
        [
            [
                rule_text(each).replace("order of lean", "lean").replace("random order", "random"),
                *tables.text_cells(each.cost, each.verdict)[:3],
                {None: "not judged", True: "yes", False: "no"}[breaks(each, sets)],
            ]
            for each in sets
            if id(each) in kept
        ],
        text_columns=[4],
    )


def _fewest(evidence: Evidence, name: str) -> str:
    """The setting with the fewest evaluations a token of those whose texts do not break."""
    sets = decoding_sets(evidence).get(name, [])
    whole = [each for each in sets if breaks(each, sets) is False and each.evaluations is not None]
    if not whole:
        return NOT_MEASURED
    best = min(whole, key=lambda each: each.evaluations or math.inf)
    return (
        f"{number(best.evaluations)} evaluations a token ({rule_text(best)}; generative perplexity "
        f"{_judged(best)})"
    )


def _lengths(evidence: Evidence) -> Iterator[Part | None]:
    known = dict(tables.documents(evidence))
    told = []
    for name in ("ar", "bd3lm-16"):
        found, theirs = known.get(name), Difference.of(paper.LENGTHS[name][0], paper.TRAINING_LENGTHS[0])
        ours = Difference.of(found["median"], evidence.real["median"]) if found and evidence.real else None
        told.append(f"of `{name}` by {shown(ours)} (in the paper by {theirs})")
    yield Prose(f"The median document differs from that of the training text: {', '.join(told)}.")
    yield plots.length_rows_plot(evidence)
    table = tables.length_table(evidence)
    places = [place for place, heading in enumerate(table.headings) if heading not in ("number", "stopped")]
    yield _narrow(
        "Documents in tokens. The paper's are of OpenWebText.",
        [table.headings[place] for place in places],
        [[row[place] for place in places] for row in table.rows if set(row[1:5]) != {NONE}],
    )


def _single(evidence: Evidence) -> Iterator[Part | None]:
    uniform, full = paper.CASE_VARIANCE
    found = evidence.variances("block-1-full")
    quieter = found[full].over(found[uniform]) if {full, uniform} <= set(found) else None
    theirs = Difference.of(paper.CASE_VARIANCE[full], paper.CASE_VARIANCE[uniform])
    full_mask = lies(
        "`block-1-full`",
        "AR with the same first weights (`ar-identity`)",
        _best(evidence, "block-1-full", "ar-identity"),
    )
    uniform_rates = lies("`block-1`", "`block-1-full`", _best(evidence, "block-1", "block-1-full"))
    yield Prose(
        f"With every token masked, {full_mask}. At uniform mask rates, {uniform_rates}. Masking every token "
        f"changes the variance of the loss by {shown(quieter)}, in the paper by {theirs}."
    )
    yield plots.case_plot(evidence)
    table = tables.case_table(evidence)
    yield _narrow("Test perplexity, and the variance of the loss (Var).", table.headings, table.rows)
    yield Prose(f"Mask rates for larger blocks, bounds: {'; '.join(_ranges(evidence))}.")


def _ranges(evidence: Evidence) -> Iterator[str]:
    """The paper's best range of each block size against all rates."""
    for size, best in ((4, (0.5, 1.0)), (16, (0.3, 0.8))):
        mine, other = range_name(size, *best), range_name(size, 0.0, 1.0)
        found = tables.tuned(evidence, [range_name(*key) for key in paper.RANGES if key[0] == size])
        ours = evidence.difference(found[mine].bound, found[other].bound)
        yield "blocks of " + lies(
            tables.tuned_label(mine), tables.tuned_label(other).partition(", ")[2], ours
        )


_CHANGES: Sequence[tuple[str, str, str]] = (
    ("masks by count, not uniform rates", "counts", "linear"),
    ("masks by count, not clipped", "counts", "clipped"),
    ("learned proposal for counts", "proposal", "counts"),
    ("two complementary copies", "copies", "counts"),
    ("next-token loss", "next", "counts"),
    ("token before, without that loss", "previous", "counts"),
    ("token before, with that loss", "both", "next"),
    ("half AR first, then the loss", "from-ar-next", "next"),
    ("half AR first, then both", "from-ar", "both"),
    ("half MDLM first, then both", "from-mdlm", "both"),
    ("three quarters AR, not half", "from-ar-late", "from-ar"),
    ("two copies after half AR", "from-ar-copies", "from-ar"),
    ("clipped masks after half AR", "from-ar-clipped", "from-ar"),
    ("trained for lean 1, not 0", "from-ar-lean", "from-ar"),
    ("all masks weigh the same", "from-ar-flat", "from-ar-copies"),
    ("four times the next-token loss", "from-ar-heavy", "from-ar-copies"),
    ("a quarter AR, not half", "from-ar-early", "from-ar-heavy-flat"),
    ("a quarter AR, not none", "from-ar-early", "both-heavy-flat"),
    ("tied embeddings", "from-ar-early-tied", "from-ar-early"),
)
"""What was changed, the run with it, and the run without."""


def _changes(evidence: Evidence) -> Iterator[Part | None]:
    found: dict[str, dict[str, Difference]] = {}
    for words, name, other in _CHANGES:
        for size in (4, 16):
            if evidence.named(f"{name}-{size}") and evidence.named(f"{other}-{size}"):
                nats = (evidence.best(f"{each}-{size}") for each in (name, other))
                if ours := evidence.difference(*nats):
                    found.setdefault(words, {})[f"blocks of {size}"] = ours
    words = Counter(_change_word(each["blocks of 4"]) for each in found.values() if "blocks of 4" in each)
    told = ", ".join(f"{words[word]} {_CHANGED[word]}" for word in _CHANGED if words[word])
    yield Prose(
        f"Of {sum(words.values())} changes to the training of blocks of 4, {told or NOT_MEASURED}: exact "
        "test perplexity in uniform order, at equal tokens."
    )
    yield plots.change_rows(
        "changes",
        found,
        "Change of perplexity",
        "change of perplexity, % (left is better)",
        "What each change gives by itself: exact for blocks of 4, bounds for blocks of 16.",
    )
    yield _narrow(
        "What did not help at blocks of 4, in uniform order.",
        ["change", "blocks of 4", "blocks of 16", "verdict"],
        [
            [
                change,
                brief(each["blocks of 4"]),
                brief(each["blocks of 16"]) if "blocks of 16" in each else NONE,
                _change_word(each["blocks of 4"]),
            ]
            for change, each in found.items()
            if "blocks of 4" in each and _change_word(each["blocks of 4"]) != "lower"
        ],
        text_columns=[3],
    )


_CHANGED = {
    "lower": "lower the perplexity",
    "within noise": "are within noise",
    "higher": "raise it",
    UNKNOWN: "have a noise that is not known",
}


def _change_word(ours: Difference) -> str:
    return noise_word(ours) or ("lower" if ours.value < 0 else "higher")


def _other_text(evidence: Evidence) -> Iterator[Part | None]:
    name = f"{PRESET}-4"
    told = (
        ("MDLM, bound", "mdlm", {}),
        ("two stages, 4", "bd3lm-4", {}),
        ("preset, lean 0", name, {}),
        (f"preset, lean {PRESET_LEAN:g}", name, {"lean": PRESET_LEAN}),
    )
    rows = [[data] for data in ZERO_SHOT]
    for row in rows:
        for _, run, where in told:
            nats, beside = (
                evidence.best(run, row[0], **where),
                evidence.exact(evidence.ar_beside(run), row[0]),
            )
            row.append(brief(evidence.difference(nats, beside, with_noise=False)))
    known = [
        evidence.difference(
            evidence.exact(name, data, lean=PRESET_LEAN), evidence.exact(TIED_AR, data), with_noise=False
        )
        for data in ZERO_SHOT
    ]
    shares = [each.value for each in known if each is not None]
    spread = NOT_MEASURED
    if shares:
        least, most = (Difference(math.log1p(value)) for value in (min(shares), max(shares)))
        spread = f"{least} to {most}"
    yield Prose(
        f"On {len(shares)} other corpora `{_PRESETS[4]}` at lean {PRESET_LEAN:g} differs from tied AR by "
        f"{spread}, one seed."
    )
    yield _narrow(
        f"Zero-shot perplexity over AR (tied over tied), one seed; the preset is `{_PRESETS[4]}`.",
        ["corpus", *(words for words, _, _ in told)],
        rows,
    )


def _once(names: Sequence[str], region: Region) -> Region:
    """A region, or a line instead while none of these runs has a likelihood."""

    def short(evidence: Evidence) -> Iterator[Part | None]:
        if any(evidence.best(name) for name in names):
            yield from region(evidence)
        else:
            yield Prose("Not measured yet.")

    return short


REGIONS: Mapping[str, Region] = {
    "paper": _paper,
    "conditions": _setting,
    "whole-contexts": _once([*_WHOLE.values()], _whole),
    "counts": _once([f"{name}-4" for name in _MASKS.values()], _counts),
    "near-ar": _once([*_RECIPES.values()], _near_ar),
    "lean": _once([f"{PRESET}-4"], _leans),
    "passes": _once([f"{PRESET}-4"], _passes),
    "other-text": _once([f"{PRESET}-4"], _other_text),
    "lengths": _once(["ar"], _lengths),
    "single": _once(["block-1", "block-1-full"], _single),
    "changes": _once([f"{name}-4" for _, name, _ in _CHANGES], _changes),
}
