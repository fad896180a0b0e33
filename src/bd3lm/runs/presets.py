"""Named recipes: the paper's, the experiments', the demo's.

A preset has one or more stages, and each stage is a recipe that starts from the stage before it. The paper
trains block diffusion in two stages: at L' = L first, then at L' with a search of the clip range (Suppl.
C.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bd3lm.parsing import did_you_mean, parse
from bd3lm.runs.adapting import DATA as ADAPT_DATA
from bd3lm.runs.adapting import Choices
from bd3lm.runs.merging import ONLY, merge

if TYPE_CHECKING:
    from bd3lm.models import TransformerConfig


def network_config(size: str, *, vocab_size: int, context: int, **overrides: Any) -> "TransformerConfig":
    """A network of a named size; `overrides` are fields of TransformerConfig, the size's own included."""
    from bd3lm.models import TransformerConfig

    sizes = TransformerConfig.sizes
    if size not in sizes:
        raise ValueError(f"size must be one of {', '.join(sizes)}, got {size!r}{did_you_mean(size, sizes)}")
    values = {**sizes[size], "vocab_size": vocab_size, "context": context, **overrides}
    return parse(TransformerConfig, values, where=f"network (size {size})")


DATA: Mapping[str, str] = MappingProxyType(
    {
        "data/lm1b": "`bd3lm data prepare lm1b data/lm1b --workers 4`",
        "data/openwebtext": "`bd3lm data prepare openwebtext data/openwebtext --workers 4`",
        "data/wikipedia": "`bd3lm data prepare ARTICLES data/wikipedia --tokenizer gpt2`, where ARTICLES is "
        "any text of Wikipedia, such as the parquet files of wikimedia/wikipedia on the Hugging Face hub",
        ADAPT_DATA: f"`bd3lm data prepare TEXT {ADAPT_DATA} --tokenizer MODEL`, for the MODEL to start from; "
        "`bd3lm adapt MODEL` does that itself",
        "data/box": "`bd3lm data prepare ARTICLES data/box --tokenizer box`, where ARTICLES is such text",
    }
)
"""How to prepare the token folders that presets read; this package includes none of them."""


def how_to_prepare(path: str) -> str:
    """The command that prepares a token folder, as far as it is known."""
    return DATA.get(path, f"`bd3lm data prepare SOURCE {path}`")


@dataclass(frozen=True)
class Stage:
    """A recipe as plain values, and the name of its folder in the run."""

    name: str
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class Preset:
    """A named recipe, of one stage or several."""

    description: str
    stages: tuple[Stage, ...]
    report: bool = False
    """Small enough to be measured right after training: `bd3lm train` then writes a report."""


def preset(name: str) -> Preset:
    """A preset by name."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or "."
        raise ValueError(f"there is no preset {name!r}{hint} `bd3lm presets` lists the presets")
    return PRESETS[name]


_AR = {"method": {"kind": "autoregressive"}}
_MDLM = {"method": {"kind": "block_diffusion"}, "objective": {"masking": "times"}}
_COUNTS = {"method": {"kind": "block_diffusion"}, "objective": {"masking": "counts"}}
_SEARCHED = {
    "method": {"kind": "block_diffusion"},
    "objective": {"masking": {"kind": "clipped", "redraw": True, "search": {}}},
}
# The baselines see the noise level, as their authors' networks do.
_TIMED = {"network": {"adaln": True, "time_conditioning": True}}
_SEDD = merge(_TIMED, {"method": {"kind": "score_entropy"}})
_D3PM = merge(_TIMED, {"method": {"kind": "d3pm", "steps": 1000}})
_SSD_LM = merge(_TIMED, {"method": {"kind": "simplex", "block_size": 25}})
# The case study of single tokens (section 4.2): the four ways of training in its figure.
_CASES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "ar-random-batch": (
        {"method": {"kind": "autoregressive"}, "objective": {"random_batch": True}},
        "autoregressive, with a random part of each batch",
    ),
    "bd3lm-1": (
        {"method": {"kind": "block_diffusion", "block_size": 1}, "objective": {"masking": "times"}},
        "block diffusion with blocks of 1, times drawn uniformly",
    ),
    "bd3lm-1-full": (
        {
            "method": {"kind": "block_diffusion", "block_size": 1},
            "objective": {"masking": {"kind": "clipped", "low": 1.0, "high": 1.0}},
        },
        "block diffusion with blocks of 1, fully masked",
    ),
}
_NEXT_TOKEN = {
    "method": {"kind": "block_diffusion", "causal_clean": True},
    "objective": {"next_token": 1.0},
}
_PREVIOUS_TOKEN = {"method": {"kind": "block_diffusion", "previous_token": True}}


# The best way to train blocks in docs/results.md, in uniform and in leaning orders: start from a model
# trained autoregressively for a quarter of the steps; two complementary copies of masks by count with weight
# 1 for each masked token; four times the next-token loss; the token before masked ones shown; tied embeddings
# in both stages; text in an order that leans to the left. Compared at 33 M tokens.
_TIED = {"network": {"tied": True}}
_RECOMMENDED = merge(
    _NEXT_TOKEN,
    _PREVIOUS_TOKEN,
    _TIED,
    {
        "method": {"lean": 4.0},
        "objective": {
            "masking": {"kind": "counts", "complementary": True, "weight": "flat"},
            "next_token": 4.0,
        },
    },
)
_MEASURED = (("wikipedia", 4), ("wikipedia", 16))
# For a stage that another stage follows.
_AT_FULL_RATE = {"optimizer": {"decay": "constant", "decay_steps": None}}


def _steps(steps: int, **settings: Any) -> dict[str, Any]:
    return {"train": {"steps": steps, **settings}}


def _block(size: int) -> dict[str, Any]:
    return {"method": {"kind": "block_diffusion", "block_size": size}}


@dataclass(frozen=True, kw_only=True)
class _Corpus:
    """What the presets of a corpus share; `pretraining` and `tuning` are the paper's two stages."""

    common: Mapping[str, Any]
    pretraining: int
    tuning: int
    search: Mapping[str, int]
    ar: Mapping[str, Any] = field(default_factory=dict)
    """Overrides for autoregressive runs."""
    later: Mapping[str, Any] = field(default_factory=dict)
    """Overrides for stages that start from an earlier stage."""
    method: Mapping[str, Any] = field(default_factory=dict)
    """Overrides for every method."""
    case_steps: int | None = None
    """Steps of the case study; by default those of both stages together."""
    case: Mapping[str, Any] = field(default_factory=dict)
    """Overrides for the case study."""

    def stage(self, name: str, steps: int, *parts: Mapping[str, Any]) -> Stage:
        return Stage(name, merge(self.common, *parts, {"method": self.method, "train": {"steps": steps}}))


# Suppl. C.2 and C.3: 12 x 768, AdamW at 3e-4 after 2,500 steps of warm-up, 512 sequences a step.
_PAPER = {
    "network": {"size": "small", "dropout": 0.1},
    "optimizer": {"lr": 3e-4, "warmup_steps": 2500, "clip_norm": 1.0},
    "train": {
        "global_batch": 512,
        "ema_decay": 0.9999,
        "log_every": 100,
        "validate_every": 5000,
        "checkpoint_every": 5000,
    },
}
_PAPERS_STAGES: Mapping[str, Any] = {
    "pretraining": 850_000,
    "tuning": 150_000,
    "search": {"every": 5000},
}
# The experiments of this project, whose results are in docs/results.md: 8 x 512, 128 sequences of 256 tokens
# a step, 33 M tokens in all.
_EXPERIMENTS = {
    "data": {
        "path": "data/wikipedia",
        "context": 256,
        "validation_sequences": 512,
        "validation_batch": 64,
    },
    "network": {"layers": 8, "hidden": 512, "heads": 8, "dropout": 0.0, "initialisation": "identity"},
    "optimizer": {
        "lr": 2e-3,
        "betas": [0.9, 0.95],
        "warmup_steps": 100,
        "decay": "linear",
        "decay_steps": 300,
        "min_lr_ratio": 0.0,
        "clip_norm": 1.0,
    },
    "train": {
        "global_batch": 128,
        "ema_decay": 0.99,
        "log_every": 20,
        "validate_every": 250,
        "checkpoint_every": 250,
    },
}
_CORPORA = {
    # [CLS], 126 tokens, [SEP]: the paper leaves them out on OpenWebText only (Suppl. C.1).
    "lm1b": _Corpus(
        common=merge(_PAPER, {"data": {"path": "data/lm1b", "context": 128, "bos_eos": True}}),
        # 16B tokens, of which figure 2 shows the loss of every step.
        case_steps=250_000,
        case={"train": {"log_every": 1}},
        **_PAPERS_STAGES,
    ),
    "owt": _Corpus(
        common=merge(
            _PAPER,
            {
                "data": {"path": "data/openwebtext", "context": 1024},
                "train": {"micro_batch": 16},  # fits on one GPU of 24 GB; up to 32 of them can share a batch
            },
        ),
        **_PAPERS_STAGES,
    ),
    "wikipedia": _Corpus(
        common=_EXPERIMENTS,
        pretraining=850,
        tuning=150,
        search={"every": 45, "batches": 3},
        ar={"network": {"initialisation": "gpt2"}},
        later={"optimizer": {"warmup_steps": 25}},
        method={"score_first": True},  # so that all methods are scored on the same tokens
    ),
}


def _corpus_presets(name: str) -> dict[str, Preset]:
    corpus = _CORPORA[name]
    total = corpus.pretraining + corpus.tuning
    ar = merge(_AR, corpus.ar)

    def single(recipe: Mapping[str, Any], description: str) -> Preset:
        return Preset(description, (corpus.stage(ONLY, total, recipe),))

    presets = {
        f"{name}-ar": single(ar, f"autoregressive on {name}"),
        f"{name}-mdlm": single(_MDLM, f"MDLM (one block, linear schedule) on {name}"),
        f"{name}-sedd": single(_SEDD, f"SEDD (absorbing, log-linear noise) on {name}"),
        f"{name}-d3pm": single(_D3PM, f"D3PM (absorbing, 1,000 steps) on {name}"),
        f"{name}-ssd-lm": single(_SSD_LM, f"SSD-LM (blocks of 25 on the simplex) on {name}"),
    }
    for case, (method, description) in _CASES.items():
        start = corpus.ar if method["method"]["kind"] == "autoregressive" else {}
        stage = corpus.stage(ONLY, corpus.case_steps or total, method, start, corpus.case)
        presets[f"{name}-{case}"] = Preset(f"{description}, on {name}", (stage,))
    searched = {
        **merge(_SEARCHED, {"objective": {"masking": {"search": corpus.search}}}),
        "train": {"validate_every": corpus.search["every"]},
    }
    quarter = total // 4
    for size in (4, 8, 16):
        presets[f"{name}-bd3lm-{size}"] = Preset(
            f"BD3-LM with blocks of {size} on {name}, the paper's two stages",
            (
                corpus.stage("base", corpus.pretraining, _MDLM, _AT_FULL_RATE),
                corpus.stage("finetune", corpus.tuning, searched, _block(size), corpus.later),
            ),
        )
        presets[f"{name}-block-{size}"] = Preset(
            f"recommended{'' if (name, size) in _MEASURED else ', untested at this size'}: blocks of {size} "
            f"on {name}, after a quarter of the steps autoregressively",
            (
                corpus.stage("ar", quarter, ar, _TIED, _AT_FULL_RATE),
                corpus.stage("block", total - quarter, _RECOMMENDED, _block(size), corpus.later),
            ),
        )
    return presets


# Small enough for two cores and a few minutes. Budgets are in steps, so a slow machine gets the same model
# later, not another model.
_DEMO = {
    "data": {"path": "builtin", "context": 128, "validation_batch": 32},
    "network": {
        "size": "tiny",
        "layers": 4,
        "hidden": 128,
        "heads": 4,
        "dropout": 0.1,
        "initialisation": "identity",
    },
    "optimizer": {
        "lr": 4e-3,
        "betas": [0.9, 0.95],
        "warmup_steps": 30,
        "decay": "cosine",
        "weight_decay": 0.1,
        "clip_norm": 0.5,
    },
    "train": {
        "global_batch": 8,
        "ema_decay": 0.98,
        "compile": False,  # a GPU finishes training in less time than compiling takes
        "log_every": 20,
        "validate_every": 10_000,
        "checkpoint_every": 200,
    },
}

# For so few steps the paper's two stages work better from small weights (docs/decisions.md). The baselines
# have not been tried with others.
_SMALL_WEIGHTS = {"network": {"initialisation": "gpt2"}}
_FASTER = {"optimizer": {"lr": 6e-3}}  # the best of those tried, for both later stages of the demo
_DEMO_TIED = merge(_DEMO, _SMALL_WEIGHTS, _TIED)

# With many steps, the last ones pay for every token that is not copied from the input, and a network learns
# to copy before anything else: at T = 1,000 the bound is still at 13 to 18 nats after 200 steps.
_UNIFORM_BLOCKS = {
    "method": {"process": "uniform", "block_size": 4, "steps": 8},
    "network": {"layers": 2, "dropout": 0.0},
    "optimizer": {"lr": 6e-3},
}

# One noise level per text makes a noisy gradient: at 8 texts a step, SEDD and D3PM stay at the token
# frequencies for a thousand steps. A larger batch, no dropout and untied embeddings help.
_DEMO_WHOLE_TEXTS = merge(
    _DEMO,
    _SMALL_WEIGHTS,
    {
        "network": {"layers": 2, "dropout": 0.0},
        "optimizer": {"lr": 2e-3, "clip_norm": 1.0},
        "train": {"global_batch": 64, "ema_decay": 0.95},
    },
)

# A small model to ship: 15.8 MB in bfloat16 with a vocabulary of 6,144. Only the second stage decays the
# learning rate, so it continues where the first stopped.
_BOX = {
    "data": {"path": "data/box", "context": 256, "validation_sequences": 512, "validation_batch": 64},
    "network": {"size": "tiny", "heads": 4, "dropout": 0.0, "tied": True, "initialisation": "identity"},
    "optimizer": {
        "lr": 3e-3,
        "betas": [0.9, 0.95],
        "warmup_steps": 200,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
    },
    "train": {
        "global_batch": 256,
        "ema_decay": 0.995,
        "log_every": 50,
        "validate_every": 500,
        "checkpoint_every": 500,
    },
}
_TO_ZERO = {"optimizer": {"warmup_steps": 50, "decay": "linear", "min_lr_ratio": 0.0}}
# For the released model; training treats all orders alike. At lean 2, a third of the blocks of 4 are still
# revealed in another order than left to right, which makes it interesting to watch.
_LEANING = {"method": {"kind": "block_diffusion", "lean": 2.0}}


def _adapt(outcome: str) -> tuple[Stage, ...]:
    return tuple(Stage(name, recipe) for name, recipe in Choices(to=outcome).stages().items())


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "demo": Preset(
            "autoregressive; then twice from there: autoregressive again, and block diffusion by counts with "
            "a next-token loss and the token before masked ones shown, written in an order that leans to the "
            "left; built-in corpus",
            (
                Stage("ar", merge(_DEMO, _steps(420), _AR)),
                Stage("ar_longer", merge(_DEMO, _steps(420), _AR, _FASTER)),
                Stage(
                    "block",
                    merge(
                        _DEMO,
                        _steps(420),
                        {"start_from": "ar"},
                        _COUNTS,
                        _NEXT_TOKEN,
                        _PREVIOUS_TOKEN,
                        _LEANING,
                        _block(4),
                        _FASTER,
                    ),
                ),
            ),
            report=True,
        ),
        "demo-paper": Preset(
            "the paper's two stages at the demo's size: one block, then blocks of 4 with the clip search",
            (
                Stage("base", merge(_DEMO_TIED, _steps(560), _MDLM)),
                Stage(
                    "finetune",
                    merge(
                        _DEMO_TIED,
                        _steps(350, validate_every=100),
                        _SEARCHED,
                        {"objective": {"masking": {"search": {"every": 100, "batches": 4}}}},
                        _block(4),
                    ),
                ),
            ),
            report=True,
        ),
        "demo-sedd": Preset(
            "SEDD, small, on the built-in corpus",
            (Stage(ONLY, merge(_DEMO_WHOLE_TEXTS, _steps(300), _SEDD)),),
        ),
        "demo-d3pm": Preset(
            "D3PM, small, on the built-in corpus",
            (Stage(ONLY, merge(_DEMO_WHOLE_TEXTS, _steps(300), _D3PM)),),
        ),
        "demo-d3pm-uniform-4": Preset(
            "block diffusion under uniform noise: D3PM in blocks of 4, small, on the built-in corpus",
            (Stage(ONLY, merge(_DEMO, _steps(800), _D3PM, _UNIFORM_BLOCKS)),),
        ),
        "demo-ssd-lm": Preset(
            "SSD-LM, small, on the built-in corpus",
            (Stage(ONLY, merge(_DEMO_TIED, _steps(350), _SSD_LM)),),
        ),
        "demo-ar": Preset(
            "autoregressive, small, on the built-in corpus", (Stage(ONLY, merge(_DEMO, _steps(560), _AR)),)
        ),
    }
    | {
        f"demo-{case}": Preset(
            f"{description}, small, on the built-in corpus",
            (Stage(ONLY, merge(_DEMO, _steps(560), method)),),
        )
        for case, (method, description) in _CASES.items()
    }
    | _corpus_presets("lm1b")
    | _corpus_presets("owt")
    | _corpus_presets("wikipedia")
    | {
        "box": Preset(
            "small enough to ship: autoregressive, then blocks of 4 from it, with a next-token loss and the "
            "token before masked ones shown; written in an order that leans to the left",
            (
                Stage("ar", merge(_BOX, _steps(1500), _AR)),
                Stage(
                    "block",
                    merge(
                        _BOX,
                        _steps(2000),
                        _COUNTS,
                        _NEXT_TOKEN,
                        _PREVIOUS_TOKEN,
                        _LEANING,
                        _block(4),
                        _TO_ZERO,
                    ),
                ),
            ),
        )
    }
    | {
        f"adapt-{outcome}": Preset(
            f"{description}; needs --start_from MODEL, as `bd3lm adapt` sets it", _adapt(outcome)
        )
        for outcome, description in (
            (
                "drafter",
                "low-rank additions that draft the next tokens of an unchanged model: soft targets, then "
                "overlap",
            ),
            ("joint", "all weights: blocks of 4, and the causal law that the model had before"),
            ("block", "all weights: blocks of 2, then of 4, without a causal law"),
        )
    }
)
