"""What is trained, and what is measured of it: the tables of the evidence, as data.

A run is changes to `COMMON`, a seed, perhaps a parent whose weights it starts from, and measures. All have
one size, one batch and one data order, in which a second stage goes on where the first stopped. The learning
rate is constant after a warm-up and falls at the very end; a stage that another one follows ends at the full
rate. Every token is scored, the first of a sequence included. The text is read 1.1 times, which needs no
dropout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bd3lm.runs.merging import merge
from bd3lm.sampling import EntropyBound, FirstHitting, MostConfident, UnmaskingRule
from research.evidence.measures import (
    ZERO_SHOT,
    Documents,
    Measure,
    Perplexity,
    Texts,
    Variance,
)
from research.evidence.settings import COMMON, Settings, digest_of, in_full

STEPS: int = COMMON["train"]["steps"]
LONG_STEPS = 2000  # of the table of longer trainings
TUNING_STEPS = 200  # of the tables of mask ranges and schedules
# Tried for the methods that are COMPARED, on validation text.
RATES = (1e-3, 2e-3, 4e-3)
INITIALISATIONS = ("gpt2", "identity")

# Of a stage that another follows. The paper's own second stage is the same, with less of a warm-up.
FIRST_STAGE: Mapping[str, Any] = {"optimizer": {"decay": "constant", "decay_steps": None}}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Something to train once. With `same_time_as` it and its parents get the training time of that run."""

    name: str
    table: str
    changes: Mapping[str, Any]
    seed: int = 0
    parent: "Run | None" = None
    measures: tuple[Measure, ...] = ()
    same_time_as: "Run | None" = None

    @property
    def key(self) -> str:
        return f"{self.name}/{self.seed}"

    @cached_property
    def settings(self) -> Settings:
        read = sum(each.steps * each.settings["train"]["global_batch"] for each in self.lineage[:-1])
        return in_full(self.changes, seed=self.seed, skip=read)

    @property
    def steps(self) -> int:
        """Of a run in the time of another, as many as it would have else."""
        return self.settings["train"]["steps"]

    @property
    def context(self) -> int:
        return self.settings["data"]["context"]

    @property
    def method(self) -> Settings:
        return self.settings["method"]

    @property
    def is_block_diffusion(self) -> bool:
        return self.method["kind"] == "block_diffusion"

    @property
    def block_size(self) -> int | None:
        """None where there are no blocks, or a whole context is one."""
        return self.method.get("block_size")

    @property
    def is_tied(self) -> bool:
        return self.settings["network"]["tied"]

    @property
    def tokens(self) -> int:
        """Read in training, in all stages."""
        return sum(
            each.steps * each.settings["train"]["global_batch"] * each.context for each in self.lineage
        )

    @cached_property
    def digest(self) -> str:
        """Of all that decides the weights but the data."""
        others = (self.parent, self.same_time_as)
        return digest_of(self.settings, *(other.digest for other in others if other is not None))

    @property
    def kind(self) -> str:
        """What decides the time of a step, about."""
        method = self.method
        if not self.is_block_diffusion:
            return method["kind"]
        if self.block_size is None:
            return "mdlm"
        copies = method["masking"].get("complementary", False)
        return "+".join(["block", *["copies"] * copies, *["next"] * (method["next_token"] > 0)])

    @property
    def shape(self) -> str:
        """What decides the compiled graph."""
        network = self.settings["network"].items()
        words = [f"{name}={value}" for name, value in network if name != "initialisation"]
        return " ".join([self.kind, f"block_size={self.block_size}", *words])

    @property
    def cost(self) -> str:
        """What decides the time of a step: the shape, which tokens the head is asked for, what is shown."""
        previous = " previous" * self.method.get("previous_token", False)
        return f"{self.shape} {self.method.get('masking')}{previous}"

    @property
    def lineage(self) -> list["Run"]:
        """The parents, the first first, and the run itself."""
        return [*(self.parent.lineage if self.parent else ()), self]


# What is compared with everything else has the first weights that are best for it.
AR = {"method": {"kind": "autoregressive"}, "network": {"initialisation": "gpt2"}}
MDLM = {"method": {"kind": "block_diffusion", "masking": {"kind": "times"}}}
TIMED = {"network": {"adaln": True, "time_conditioning": True}}
COUNTS = {"kind": "counts"}
NEXT = {"causal_clean": True, "next_token": 1.0}
HEAVY = {**NEXT, "next_token": 4.0}
PREVIOUS = {"previous_token": True}
TIED = {"network": {"tied": True}}


def clipped(low: float, high: float) -> dict[str, Any]:
    """As the paper's two-stage presets draw masks, at a fixed range."""
    return {"kind": "clipped", "low": low, "high": high, "redraw": True}


def block(size: int | None, masking: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"method": {"kind": "block_diffusion", "block_size": size, "masking": dict(masking), **more}}


def steps(number: int, **more: Any) -> dict[str, Any]:
    return {"train": {"steps": number, **more}}


def _later(number: int, **more: Any) -> dict[str, Any]:
    """A stage that starts from trained weights needs less of a warm-up."""
    return merge(steps(number, **more), {"optimizer": {"warmup_steps": 25}})


def perplexities(size: int | None) -> tuple[Measure, ...]:
    """Exact where that takes few passes, and the bound; None is a whole context."""
    if size in (1, 4):
        return EXACT
    bound = Perplexity(estimator="counts", replicates=4)
    if size is None:
        return (bound,)
    if size == 8:
        return bound, replace(PART, estimator="exact")  # with which comes the bound
    return (
        bound,
        replace(PART, estimator="counts", replicates=4),
        replace(PART, estimator="iw:8", replicates=2),
    )


def zero_shot(estimator: str, leans: Sequence[float] = (0.0,)) -> tuple[Measure, ...]:
    replicates = 1 if estimator == "exact" else 4
    return tuple(
        Perplexity(data=name, estimator=estimator, sequences=256, replicates=replicates, lean=lean)
        for name in ZERO_SHOT
        for lean in leans
    )


def validated(size: int | None) -> tuple[Measure, ...]:
    """What variants are chosen by."""
    estimator = "exact" if size in (1, 4) else "counts"
    replicates = 1 if size in (1, 4) else 4
    return (Perplexity(estimator=estimator, split="valid", sequences=256, replicates=replicates),)


PART = Perplexity(estimator="exact", sequences=128, part=True)
EXACT: tuple[Measure, ...] = (Perplexity(estimator="exact"),)
AR_MEASURES: tuple[Measure, ...] = (*EXACT, PART, *validated(1))
BOTH_LENGTHS = (Texts(), Texts(contexts=2, count=64))
NEXT_TOKEN = (Perplexity(estimator="next-token"),)


LEANS = (0.5, 1.0, 2.0, 4.0)  # beside none


def leaning(size: int, leans: Sequence[float] = LEANS) -> tuple[Measure, ...]:
    """Likelihoods in orders that lean to the left: exact for blocks of 4, else bounds."""
    return tuple(replace(perplexities(size)[0], lean=lean) for lean in leans)


def decoding(size: int, lean_of_several: float) -> tuple[Measure, ...]:
    """Rules that reveal a token a pass in other orders, or several, from the most careful to the least."""
    rules: list[UnmaskingRule] = [FirstHitting(k) for k in (1, 2, 4, 8) if k <= size]
    rules += [FirstHitting(1, lean) for lean in LEANS]
    rules += [FirstHitting(k, lean_of_several) for k in (2, 4, 8) if k <= size]
    rules += [MostConfident(threshold=threshold) for threshold in (0.95, 0.8, 0.5, 0.3)]
    rules += [EntropyBound(bound) for bound in (0.1, 0.3, 1.0, 3.0)]
    return tuple(Texts(unmasking=rule, floor=None, count=64) for rule in rules)


def leaning_texts() -> tuple[Measure, ...]:
    """One token a pass in the orders that a preset might write in."""
    return tuple(Texts(unmasking=FirstHitting(1, lean), floor=None, count=64) for lean in (0.0, 2.0, 4.0))


def _main() -> Iterator[Run]:
    """The paper's main tables."""
    for seed in (0, 1):
        first = seed == 0
        more = (*zero_shot("exact"), *BOTH_LENGTHS, Documents()) if first else ()
        yield Run(name="ar", table="main", changes=AR, seed=seed, measures=(*AR_MEASURES, *more))
        more = (*zero_shot("counts"), *BOTH_LENGTHS) if first else ()
        more = (*perplexities(None), *validated(None), *more)
        yield Run(name="mdlm", table="main", changes=MDLM, seed=seed, measures=more)
        base = _base(seed)
        yield base
        for size in (4, 16, 8):
            search = {"kind": "clipped", "redraw": True, "search": {"every": 45, "batches": 3}}
            changes = merge(block(size, search), _later(STEPS - base.steps, validate_every=45))
            more = (*zero_shot("exact" if size == 4 else "counts"), *BOTH_LENGTHS) if first else ()
            more += (Documents(),) if first and size != 8 else ()
            yield Run(
                name=f"bd3lm-{size}",
                table="main",
                changes=changes,
                seed=seed,
                parent=base,
                measures=(*perplexities(size), *more, *(leaning(4, _ENDS) if size == 4 else ())),
            )
    nelbo = Perplexity(estimator="nelbo", replicates=16)  # of a larger variance than counts
    baselines: dict[str, tuple[Mapping[str, Any], tuple[Measure, ...]]] = {
        "sedd": ({"method": {"kind": "score_entropy"}}, (Texts(steps=1000, count=32),)),
        "d3pm": ({"method": {"kind": "d3pm", "steps": 1000}}, (Texts(steps=1000, count=64),)),
    }
    for name, (method, texts) in baselines.items():
        for seed in (0, 1):
            measures = (nelbo, *zero_shot("nelbo"), *texts) if seed == 0 else (nelbo,)
            changes = merge(TIMED, method)
            yield Run(name=name, table="main", changes=changes, seed=seed, measures=measures)


LONG = "long-"
TIME = "time-"  # begins the names of runs that get the time of another


def _longer() -> Iterator[Run]:
    """Twice as many steps, which diffusion of whole contexts needs more than others do."""
    fall = {"optimizer": {"decay_steps": 600}}

    def of(name: str, changes: Mapping[str, Any], *measures: Measure, parent: Run | None = None) -> Run:
        return Run(name=LONG + name, table="long", changes=changes, parent=parent, measures=measures)

    base = of("base", merge(MDLM, steps(LONG_STEPS * 85 // 100), FIRST_STAGE))
    yield of("ar", merge(AR, steps(LONG_STEPS), fall), *EXACT)
    yield of("mdlm", merge(MDLM, steps(LONG_STEPS), fall), *perplexities(None))
    second = _later(LONG_STEPS - base.steps, validate_every=90)
    for size in (4, 16):
        search = {"kind": "clipped", "redraw": True, "search": {"every": 90, "batches": 3}}
        yield of(f"bd3lm-{size}", merge(block(size, search), second), perplexities(size)[0], parent=base)
    copies = {"kind": "counts", "complementary": True}
    heavy = block(4, {**copies, "weight": "flat"}, **HEAVY, **PREVIOUS)
    half, quarter = (
        of(f"ar-{part}", merge(AR, steps(number), FIRST_STAGE))
        for part, number in (("half", LONG_STEPS // 2), ("quarter", LONG_STEPS // 4))
    )
    for name, variant, start in (
        ("from-ar-copies-4", block(4, copies, **NEXT, **PREVIOUS), half),
        ("from-ar-heavy-flat-4", heavy, half),
        (f"{UNTIED}-4", heavy, quarter),
    ):
        second = merge(_later(LONG_STEPS - start.steps), fall)
        yield of(name, merge(variant, second), *EXACT, *leaning(4), parent=start)


def _base(seed: int) -> Run:
    """The paper's first stage, 85 % of the steps."""
    changes = merge(MDLM, steps(STEPS * 85 // 100), FIRST_STAGE)
    return Run(name="base", table="main", changes=changes, seed=seed, measures=perplexities(None))


def _case_study() -> Iterator[Run]:
    """Blocks of one token, beside `ar`."""
    variance = Variance(rules=("linear U[0, 1]", "fully masked", "counts"))
    for seed in (0, 1):
        random_batch = merge(AR, {"method": {"random_batch": True}})
        yield Run(name="ar-random-batch", table="case", changes=random_batch, seed=seed, measures=EXACT)
        for name, masking in (("block-1", {"kind": "times"}), ("block-1-full", clipped(1.0, 1.0))):
            measures = (*perplexities(1), variance)
            yield Run(name=name, table="case", changes=block(1, masking), seed=seed, measures=measures)


RANGES = ((0.0, 0.5), (0.3, 0.8), (0.5, 1.0), (0.0, 1.0))
SCHEDULES: Mapping[int, Sequence[str]] = {4: ("logarithmic", "square_root"), 16: ("square", "cosine")}


def range_name(size: int | None, low: float, high: float) -> str:
    return f"range-{size or 'L'}-{low:g}-{high:g}"


def rule_names(low: float, high: float) -> tuple[str, ...]:
    """What `bd3lm variance` calls a range: with masks drawn again, as it is trained, and without."""
    if (low, high) == (0.0, 1.0):
        return ("linear U[0, 1]",)  # in which every mask lies
    rates = f"U[{low:g}, {high:g}]"
    return f"redrawn {rates}", f"clipped {rates}"


def _ranges_and_schedules() -> Iterator[Run]:
    """Fine-tuned from one checkpoint a seed. The table of schedules shares two ranges with the other."""
    for size in (4, 16, None):
        rules: dict[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
            range_name(size, low, high): ("ranges", clipped(low, high), rule_names(low, high))
            for low, high in RANGES
        }
        if size is not None:
            best = (0.45, 0.95)
            rules[range_name(size, *best)] = ("schedules", clipped(*best), rule_names(*best))
            for name in SCHEDULES[size]:
                schedule = {"kind": "times", "schedule": name}
                rules[f"schedule-{size}-{name}"] = ("schedules", schedule, [name.replace("_", " ")])
        for name, (table, masking, measured) in rules.items():
            for seed in (0, 1):
                yield Run(
                    name=name,
                    table=table,
                    changes=merge(block(size, masking), _later(TUNING_STEPS)),
                    seed=seed,
                    parent=_base(seed),
                    measures=(perplexities(size)[0], *(Variance(rules=(rule,)) for rule in measured)),
                )


def _simplex() -> Iterator[Run]:
    """Half the tokens of the others, since a step takes several times as long, and no redrawing of texts."""
    method = {"method": {"kind": "simplex", "block_size": 25}}
    changes = merge(TIMED, method, steps(STEPS // 2, micro_batch=64))
    texts = tuple(Texts(count=16, steps=number, floor=None) for number in (25, 1000))
    yield Run(name="ssd-lm", table="ssd-lm", changes=changes, measures=texts)


# Seeds of each variant, by block size; the close ones have more.
_SEEDS: Mapping[str, Mapping[int, int]] = {
    "counts": {4: 2, 16: 1},
    "clipped": {4: 2, 16: 1},
    "linear": {4: 1, 16: 1},
    "proposal": {4: 1, 16: 1},
    "copies": {4: 1, 16: 1},
    "next": {4: 1, 16: 1},
    "previous": {4: 1, 16: 1},
    "both": {4: 1, 16: 1},
    "both-heavy-flat": {4: 1, 16: 0},
    "from-mdlm": {4: 1, 16: 1},
    "from-ar-next": {4: 1, 16: 0},
    "from-ar": {4: 3, 16: 1},
    "from-ar-late": {4: 1, 16: 0},
    "from-ar-copies": {4: 3, 16: 1},
    "from-ar-clipped": {4: 1, 16: 0},
    "from-ar-flat": {4: 1, 16: 0},
    "from-ar-lean": {4: 1, 16: 0},
    "from-ar-heavy": {4: 1, 16: 0},
    "from-ar-late-heavy": {4: 1, 16: 0},
    "from-ar-heavy-flat": {4: 2, 16: 0},
    "from-ar-early": {4: 4, 16: 1},
    "from-ar-early-tied": {4: 4, 16: 1},
    "time-copies": {4: 1, 16: 1},
    "time-next": {4: 1, 16: 1},
    "time-both": {4: 1, 16: 1},
    "time-from-mdlm": {4: 1, 16: 1},
    "time-from-ar": {4: 1, 16: 1},
    "time-from-ar-early-tied": {4: 1, 16: 0},
}
DECODED = "from-ar"  # the variant whose decoding is measured, beside the next but one
UNTIED = "from-ar-early"
PRESET = f"{UNTIED}-tied"  # what the presets *-block-* are
PRESET_LEAN = 4.0  # and the order in which they write
TIED_AR = "ar-tied"
# The variants whose likelihood is measured in other orders too, and how much these lean.
_ENDS = (1.0, 4.0)
_ORDERS: Mapping[str, Sequence[float]] = {
    "both": _ENDS,
    "from-ar-late": _ENDS,
    "from-ar-copies": LEANS,
    "from-ar-clipped": _ENDS,
    "from-ar-flat": _ENDS,
    "from-ar-lean": LEANS,
    "from-ar-heavy": _ENDS,
    "from-ar-late-heavy": _ENDS,
    "from-ar-heavy-flat": _ENDS,
    "both-heavy-flat": LEANS,
    UNTIED: LEANS,
    PRESET: LEANS,
    DECODED: LEANS,
    # In the order in which the presets write, what one copy gives in the same time.
    TIME + DECODED: (PRESET_LEAN,),
    TIME + PRESET: (PRESET_LEAN,),
}


def _past(size: int) -> Iterator[Run]:
    """At equal tokens, and against `counts` at equal time."""
    copies = {"kind": "counts", "complementary": True}
    papers_best = clipped(0.45, 0.95) if size == 4 else clipped(0.3, 0.8)
    variants: dict[str, Mapping[str, Any]] = {
        "counts": block(size, COUNTS),
        "clipped": block(size, papers_best),
        "linear": block(size, {"kind": "times"}),
        "copies": block(size, copies),
        "next": block(size, COUNTS, **NEXT),
        "previous": block(size, COUNTS, **PREVIOUS),
        "both": block(size, COUNTS, **NEXT, **PREVIOUS),
        "both-copies": block(size, copies, **NEXT, **PREVIOUS),
        "both-flat": block(size, {**copies, "weight": "flat"}, **NEXT, **PREVIOUS),
        "both-clipped": block(size, papers_best, **NEXT, **PREVIOUS),
        "both-heavy": block(size, copies, **HEAVY, **PREVIOUS),
        "both-heavy-flat": block(size, {**copies, "weight": "flat"}, **HEAVY, **PREVIOUS),
        "both-heavy-flat-tied": merge(block(size, {**copies, "weight": "flat"}, **HEAVY, **PREVIOUS), TIED),
        "both-lean": block(size, {"kind": "counts", "lean": 1.0}, **NEXT, **PREVIOUS),
        "proposal": block(size, {"kind": "counts", "learn_proposal": True}),
    }
    starts = {
        "from-mdlm": (_half_mdlm, "both"),
        "from-ar-next": (_half, "next"),
        "from-ar": (_half, "both"),
        "from-ar-late": (_most, "both"),
        "from-ar-copies": (_half, "both-copies"),
        "from-ar-clipped": (_half, "both-clipped"),
        "from-ar-flat": (_half, "both-flat"),
        "from-ar-lean": (_half, "both-lean"),
        "from-ar-heavy": (_half, "both-heavy"),
        "from-ar-late-heavy": (_most, "both-heavy"),
        "from-ar-heavy-flat": (_half, "both-heavy-flat"),
        "from-ar-early": (_quarter, "both-heavy-flat"),
        "from-ar-early-tied": (_tied_quarter, "both-heavy-flat-tied"),
    }
    by_name: dict[tuple[str, int], Run] = {}
    for name, seeds in _SEEDS.items():
        for seed in range(seeds[size]):
            parent = same = None
            if name in starts:
                start, variant = starts[name]
                parent = start(seed)
                changes = merge(variants[variant], _later(STEPS - parent.steps))
            elif name.startswith(f"{TIME}from-"):
                start, variant = starts[name.removeprefix(TIME)]
                same, parent = by_name["counts", seed], start(seed)
                changes = merge(variants[variant], _later(STEPS))
            elif name.startswith(TIME):
                variant, same = name.removeprefix(TIME), by_name["counts", seed]
                changes = dict(variants[variant])
            else:
                variant, changes = name, dict(variants[name])
            measures = (*perplexities(size), *validated(size))
            measures += NEXT_TOKEN if "next_token" in variants[variant]["method"] else ()
            measures += leaning(size, _ORDERS.get(name, ()))
            if name == DECODED and seed == 0:
                estimator = "exact" if size == 4 else "counts"
                measures += (*zero_shot(estimator), *BOTH_LENGTHS, Documents(), *decoding(size, 2.0))
            if (name, size, seed) == (PRESET, 4, 0):
                measures += (*zero_shot("exact", (0.0, PRESET_LEAN)), *decoding(4, PRESET_LEAN))
            elif name in (UNTIED, PRESET) and seed == 0:
                measures += leaning_texts()
            by_name[name, seed] = Run(
                name=f"{name}-{size}",
                table="past",
                changes=changes,
                seed=seed,
                parent=parent,
                same_time_as=same,
                measures=measures,
            )
            yield by_name[name, seed]


def _half(seed: int) -> Run:
    return Run(name="ar-half", table="past", changes=merge(AR, steps(STEPS // 2), FIRST_STAGE), seed=seed)


def _quarter(seed: int) -> Run:
    changes = merge(AR, steps(STEPS // 4), FIRST_STAGE)
    return Run(name="ar-quarter", table="past", changes=changes, seed=seed)


def _tied_quarter(seed: int) -> Run:
    """Beside `ar-tied`, as `ar-quarter` beside `ar`."""
    changes = merge(AR, TIED, steps(STEPS // 4), FIRST_STAGE)
    return Run(name="ar-quarter-tied", table="past", changes=changes, seed=seed)


def _half_mdlm(seed: int) -> Run:
    changes = merge(MDLM, steps(STEPS // 2), FIRST_STAGE)
    return Run(name="mdlm-half", table="past", changes=changes, seed=seed)


def _most(seed: int) -> Run:
    changes = merge(AR, steps(STEPS * 3 // 4), FIRST_STAGE)
    return Run(name="ar-most", table="past", changes=changes, seed=seed)


COMPARED: Mapping[str, Mapping[str, Any]] = {"ar": AR, "counts-4": block(4, COUNTS), "mdlm": MDLM}
# What might be used instead, one thing at a time.
ALTERNATIVES: Mapping[str, Mapping[str, Any]] = {
    **{f"rate-{rate:g}": {"optimizer": {"lr": rate}} for rate in RATES},
    **{start: {"network": {"initialisation": start}} for start in INITIALISATIONS},
    "tied": TIED,
}


# What is measured besides: AR with the first weights of blocks of one token, to be compared with them, and
# tied, to be compared with blocks that start from such a model; and in how many seeds.
_BESIDES: Mapping[tuple[str, str], tuple[Measure, ...]] = {("ar", "identity"): EXACT, ("ar", "tied"): EXACT}
# Tied AR beside the presets' recipe: zero-shot, in texts, and on the part that blocks of 16 are measured on.
_BESIDE_PRESETS = (PART, *zero_shot("exact"), Texts())
_SETTING_SEEDS: Mapping[tuple[str, str], int] = {
    ("ar", "identity"): 2,
    ("ar", "tied"): 4,
    ("mdlm", "rate-0.001"): 2,
}


def is_used(name: str, setting: str) -> bool:
    """Whether an alternative is what the run of that name has anyway."""
    used = merge(COMMON, COMPARED[name])
    return merge(used, ALTERNATIVES[setting]) == used


def _tried() -> Iterator[Run]:
    """Other settings, for the methods that everything else lies between."""
    for setting, other in ALTERNATIVES.items():
        for name, changes in COMPARED.items():
            if is_used(name, setting):
                continue
            for seed in range(_SETTING_SEEDS.get((name, setting), 1)):
                yield Run(
                    name=f"{name}-{setting}",
                    table="alternatives",
                    changes=merge(changes, other),
                    seed=seed,
                    measures=(
                        *validated(None if name == "mdlm" else 4),
                        *_BESIDES.get((name, setting), ()),
                        *(_BESIDE_PRESETS if (name, setting, seed) == ("ar", "tied", 0) else ()),
                    ),
                )


def all_runs() -> list[Run]:
    """In the order of their worth: what is cut for want of time is cut at the end."""
    first = [*_tried(), *_main(), *_longer(), *_past(4), *_case_study(), *_past(16)]
    return sorted([*first, *_ranges_and_schedules(), *_simplex(), *_more_seeds()], key=_rank)


def _more_seeds() -> Iterator[Run]:
    """Of what most others are compared with or begin as."""
    for seed in (2, 3):
        yield Run(name="ar", table="main", changes=AR, seed=seed, measures=AR_MEASURES)
        yield Run(name="mdlm", table="main", changes=MDLM, seed=seed, measures=perplexities(None))


def _rank(run: Run) -> int:
    """Without second seeds of what is compared most, no difference in the later tables has a measure."""
    if run.seed == 0 and run.table not in ("ranges", "schedules", "ssd-lm"):
        return 0
    if run.seed == 1 and run.name in ("ar", "base", "bd3lm-4", "counts-4", "from-ar-4"):
        return 1
    return 2 + run.seed
