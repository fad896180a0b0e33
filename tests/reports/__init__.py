"""Reports made up of plain values, with every kind of record or with few."""

from functools import cache
from typing import Any

from bd3lm.commands.report.reproduction import repeatable
from bd3lm.reports import Report, Run
from bd3lm.reports.content import Record
from bd3lm.reports.document import Document
from bd3lm.reports.sections import build_document

RULES = {"counts": (1.5, True), "clipped U[0.5, 1]": (2.5, False), "linear U[0, 1]": (40.0, True)}
FILM = {
    "given": ["", "The"],
    "steps": [
        ["block", 2, 4],
        ["show", 3, " sat"],
        ["show", 2, " cat"],
        ["block", 4, 6],
        ["show", 4, "."],
        ["show", 5, " <b>"],
        ["cut", 5],
    ],
}

DRAFTED = {
    "given": ["The"],
    "steps": [
        *(["block", 1, 2], ["show", 1, " cat"], ["draft", [[2, " on"], [3, " a"]]]),
        *(["block", 2, 3], ["show", 2, " on"], ["block", 3, 4], ["show", 3, " the"]),
        ["draft", [[4, " mat"], [5, " was"]]],
        *(["block", 4, 5], ["show", 4, " mat"], ["block", 5, 6], ["show", 5, "."], ["draft", []]),
    ],
}
"""Three passes; of the two drafts that the first makes, as of those of the second, one is right."""


def record(kind: str, settings: dict[str, Any], result: dict[str, Any]) -> Record:
    common = {"model": "m", "title": "t", "weights": "0", "dtype": "float32", "bd3lm": "0.1.0"}
    return {
        "kind": kind,
        **common,
        "measured": "2026-11-15T12:00:00+00:00",
        "settings": settings,
        "result": result,
    }


def perplexity(
    *figures: tuple[str, float],
    data: str = "own",
    estimator: str = "exact",
    settings: dict[str, Any] | None = None,
    **result: Any,
) -> Record:
    """Figures as (meaning, perplexity), with an error of a tenth."""
    return record(
        "perplexity",
        {
            "data": data,
            "text": "f" if data == "own" else data,
            "split": "valid",
            "estimator": estimator,
            "replicates": 1,
            "seed": 0,
            "eos_between_documents": True,
            "context": 16,
            "batch_size": 16,
            "limit": None,
            **(settings or {}),
        },
        {
            "sequences": 8,
            "tokens": 120,
            "bytes": 300,
            "figures": [
                {
                    "meaning": meaning,
                    "perplexity": value,
                    "perplexity_error": value / 10,
                    "bits_per_byte": 1.25,
                }
                for meaning, value in figures
            ],
            **result,
        },
    )


def variance(gradient: float | None = None) -> Record:
    rows = [
        {
            "masks": name,
            "loss": loss,
            "loss_error": None,
            "gradient": gradient,
            "gradient_error": None,
            "unbiased": unbiased,
        }
        for name, (loss, unbiased) in RULES.items()
    ]
    return record(
        "variance",
        {"block_size": 4, "batches": 2, "gradients": 0 if gradient is None else 2, "seed": 0},
        {"rows": rows},
    )


def samples(*texts: tuple[str, str]) -> Record:
    return record(
        "samples",
        {"top_p": 0.9, "steps": None, "seed": 0},
        {
            "texts": [
                {"given": given, "written": written, "tokens": 3, "evaluations": 3, "stopped_by": "length"}
                for given, written in texts
            ]
        },
    )


def long_text() -> Record:
    """One text of 64 tokens."""
    of = samples(("Once", " upon a time"))
    return {**of, "kind": "long_text", "settings": {**of["settings"], "length": 64}}


def unigram(**settings: Any) -> Record:
    return record(
        "unigram",
        {"data": "own", "text": "f", "split": "valid", **settings},
        {"perplexity": 385.4321, "tokens": 120},
    )


def film() -> Record:
    return record("denoising", {"top_p": 0.9, "steps": None, "seed": 0}, FILM)


def lengths(training: bool = True) -> Record:
    figures = {"median": 5, "p90": 9, "max": 12, "mean": 5.5}
    return record(
        "lengths",
        {
            "count": 3,
            "length": 64,
            "entropy_floor": None,
            "entropy_window": 256,
            "top_p": 0.9,
            "seed": 0,
            "data": "data/mine" if training else None,
        },
        {
            "samples": {
                "number": 3,
                **figures,
                "stopped_by": {"eos": 2, "entropy": 0, "length": 1},
                "lengths": [2, 5, 12],
            },
            "training": {"documents": 4, **figures, "lengths": [1, 3, 9, 30]} if training else None,
        },
    )


def judgement(
    perplexity: float | None = 120.0,
    *,
    top_p: float | None = 0.9,
    evaluations: float = 1.0,
    settings: dict[str, Any] | None = None,
    **result: Any,
) -> Record:
    return record(
        "judgement",
        {
            "judge": "judge/one",
            "judge_dtype": "float32",
            "window": 1024,
            "stride": 512,
            "mauve_reference": None,
            "count": 30,
            "length": 64,
            "top_p": top_p,
            "unmasking": {"kind": "first_hitting", "tokens_per_pass": 1, "lean": 0.0},
            "steps": None,
            "entropy_floor": 4.0,
            "redraws": 20,
            "seed": 0,
            "dtype": "bfloat16",
            **(settings or {}),
        },
        {
            "samples": 30,
            "perplexity": perplexity,
            "perplexity_error": 4.0,
            "entropy": 5.25,
            "entropy_error": 0.05,
            "evaluations_per_token": evaluations,
            "redraws": 2,
            "degenerate": 1,
            "mauve": None,
            **result,
        },
    )


def log(rows: int = 6, *, start: float = 6.0, clipped: bool = False) -> list[dict[str, float]]:
    found = []
    for index in range(1, rows + 1):
        row = {"step": float(index), "tokens": 100.0 * index, "train_nats": start / index**0.2}
        if index % 3 == 0:
            row |= {"valid_nats": start / index**0.2 + 0.1}
            row |= {"clip_low": 0.1 * index, "clip_high": 0.95} if clipped else {}
        found.append(row)
    return found


def recipe(kind: str = "autoregressive", **method: Any) -> dict[str, Any]:
    return {
        "train": {"steps": 6},
        "method": {"kind": kind, **method},
        "data": {"path": "builtin", "context": 16},
        "start_from": None,
    }


OF_KIND: dict[str, dict[str, bool]] = {
    "autoregressive": {"validation_is_exact": True, "writes_in_order": True},
    "block_diffusion": {"masks_by_rule": True, "writes_blocks": True},
    "score_entropy": {},
    "d3pm": {},
    "simplex": {"has_likelihood": False, "uncovers": False},
}
"""In what the kinds of models differ for a report."""


def run(folder: str = "runs/ar", title: str = "autoregressive", **changes: Any) -> Run:
    of = changes.get("recipe", recipe())["method"]
    values: dict[str, Any] = {
        "folder": folder,
        "title": title,
        "recipe": recipe(),
        "parameters": 12_345,
        "steps": (6,),
        "tokens": (600,),
        "log": log(),
        "train_is_bound": True,
        "validation_is_exact": False,
        "has_likelihood": True,
        "masks_by_rule": False,
        "writes_in_order": False,
        "writes_blocks": False,
        "uncovers": True,
        "lean": of.get("lean", 0.0),
        **OF_KIND[of["kind"]],
        **changes,
    }
    records = [
        repeatable(each, values["recipe"], values.get("law", "")) for each in values.pop("records", ())
    ]
    return Run(**values, records=records)


CLIPPED = {"kind": "clipped", "low": 0.0, "high": 1.0, "search": {"every": 3}}


@cache
def whole_report() -> Report:
    """Two runs with all that can be measured of them."""
    block = run(
        "runs/block",
        "block diffusion, blocks of 2",
        recipe=recipe("block_diffusion", block_size=2, masking=CLIPPED),
        clip_range=(0.0, 1.0),
        steps=(6, 6),
        tokens=(600, 600),
        log=log(start=7.0, clipped=True),
        train_is_bound=False,
        records=[
            perplexity(("exact", 50.0), ("bound", 60.0)),
            perplexity(("bound", 90.0), data="corpora/wiki.txt", estimator="counts"),
            variance(gradient=0.5),
            samples(("Once", " upon <script>alert('&')</script> a `time`")),
            film(),
            lengths(),
            judgement(150.0),
            judgement(220.0, top_p=1.0, evaluations=0.5),
        ],
    )
    ar = run(
        records=[
            perplexity(("exact", 40.0)),
            perplexity(("exact", 80.0), data="corpora/wiki.txt"),
            samples(("", "From nothing.")),
            lengths(),
            judgement(),
        ]
    )
    return Report(runs=(ar, block), versions={"bd3lm": "0.1.0", "torch": "2.13.0"})


@cache
def whole_document() -> Document:
    return build_document(whole_report())
