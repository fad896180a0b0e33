"""What is measured of a trained model. Likelihoods and variances in float32, texts in bfloat16 on a GPU."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from bd3lm.commands.eval import figure_record
from bd3lm.commands.shared.writing import sample_record
from bd3lm.commands.variance import rules
from bd3lm.data import TokenShards, WrappedTokens
from bd3lm.diffusion import Draws
from bd3lm.evaluation import (
    Enumerated,
    Estimator,
    Figure,
    LengthStatistics,
    Sampled,
    corpus_likelihood,
    document_length,
    exact_likelihoods,
    nelbo_variance,
    stop_counts,
)
from bd3lm.lm import Generation, LanguageModel, Settings, build_estimator
from bd3lm.models import Denoiser
from bd3lm.objectives import Autoregressive, TokenBatch
from bd3lm.sampling import UnmaskingRule
from research.evidence.measures import (
    TRAINED_ON,
    Documents,
    Measure,
    Perplexity,
    Texts,
    Variance,
    rule_values,
)
from research.evidence.results import Results
from research.evidence.runs import Run
from research.evidence.train import Place, dense_attention

_ROWS = 64
_REDRAWS = 20


def alike(measures: Iterable[Measure]) -> list[list[Measure]]:
    """Measures in groups that are taken together: exact likelihoods that differ in the lean alone."""
    groups: dict[Measure, list[Measure]] = {}
    for what in measures:
        exact = isinstance(what, Perplexity) and what.estimator == "exact"
        groups.setdefault(replace(what, lean=0.0) if exact else what, []).append(what)
    return list(groups.values())


def measure_together(
    group: Sequence[Measure], run: Run, model: LanguageModel, place: Place, results: Results
) -> list[Mapping[str, Any]]:
    """The results of a group of measures."""
    asked = [what for what in group if isinstance(what, Perplexity)]
    if len(asked) < 2:
        return [measure(what, run, model, place, results) for what in group]
    with dense_attention(model.network):
        estimator, score_first = _estimator("exact", model)
        if not isinstance(estimator, Enumerated):
            raise ValueError(f"only blocks have orders that lean, got {run.key}")
        shape = {each.name: getattr(estimator, each.name) for each in fields(estimator)}
        leaning = _Leaning(**shape, leans=tuple(what.lean for what in asked))
        found = _likelihood(asked[0], model, place, leaning, score_first)
    number = len(found["figures"]) // len(asked)
    starts = range(0, len(found["figures"]), number)
    return [{**found, "figures": found["figures"][start : start + number]} for start in starts]


@dataclass(frozen=True, kw_only=True)
class _Leaning(Enumerated):
    """The figures of one lean after those of another."""

    leans: tuple[float, ...]

    def figures(self, model: Denoiser) -> tuple[Figure, ...]:
        return super().figures(model) * len(self.leans)

    def nats(self, model: Denoiser, batch: TokenBatch, draws: tuple[Draws, ...]) -> Tensor:
        found = exact_likelihoods(model, batch, self.reading, self.leans)
        return torch.stack([part.sum(1) for each in found for part in (each.nll, each.nelbo)])


def measure(
    what: Measure, run: Run, model: LanguageModel, place: Place, results: Results
) -> Mapping[str, Any]:
    """The result of one measure; texts are kept beside the results."""
    match what:
        case Perplexity():
            with dense_attention(model.network):
                return _perplexity(what, model, place)
        case Variance():
            with dense_attention(model.network):
                return _variance(what, run, model, place)
        case Texts():
            return _texts(what, run, _for_writing(model), results)
        case Documents():
            return _documents(what, run, _for_writing(model), results)


def _perplexity(what: Perplexity, model: LanguageModel, place: Place) -> dict[str, Any]:
    model = model.with_lean(what.lean) if what.lean else model
    return _likelihood(what, model, place, *_estimator(what.estimator, model))


def _likelihood(
    what: Perplexity, model: LanguageModel, place: Place, estimator: Estimator, score_first: bool
) -> dict[str, Any]:
    rows = WrappedTokens(TokenShards(place.data / what.data), what.split, model.config.network.context)
    number = min(what.sequences, len(rows))
    batches = _batches(rows, number, model, score_first=score_first)
    found = corpus_likelihood(model.network, estimator, batches, replicates=what.replicates)
    return {
        "sequences": found[0].sequences,
        "tokens": found[0].tokens,
        "figures": [figure_record(each, None) for each in found],
    }


def _estimator(name: str, model: LanguageModel) -> tuple[Estimator, bool]:
    """An estimator and whether it scores first tokens: the next-token loss is not trained on those."""
    if name != "next-token":
        return build_estimator(model.config, name), model.config.method.score_first
    return Sampled("exact", Autoregressive(mask_id=model.config.mask_id)), False


def _variance(what: Variance, run: Run, model: LanguageModel, place: Place) -> dict[str, Any]:
    method = model.config.method
    if not run.is_block_diffusion:
        raise ValueError(f"only block diffusion draws masks by rules, got {run.key}")
    rows = WrappedTokens(TokenShards(place.data / TRAINED_ON), "valid", model.config.network.context)
    batches = list(_batches(rows, what.batches * _ROWS, model, score_first=method.score_first))
    found, size = {}, method.piece(model.config.network.context)
    for name in what.rules:
        objective = method.judging(rules()[name], model.config.frame)
        found[name] = asdict(nelbo_variance(model.network, objective, batches, block_size=size))
    return {"block_size": size, "rules": found}


def _texts(what: Texts, run: Run, model: LanguageModel, results: Results) -> dict[str, Any]:
    settings = Settings(
        length=what.contexts * model.config.network.context,
        batch_size=_ROWS,
        unmasking=what.unmasking if run.is_block_diffusion else None,
        steps=what.steps,
        stop_at_eos=False,
        entropy_floor=what.floor,
        entropy_window=model.config.network.context,
        redraws=_REDRAWS if what.floor else 0,
    )
    settings = model.config.method.settled(settings)
    written = model.generate([""] * what.count, settings)
    name = _set_name(what)
    results.add_samples(run, name, [sample_record(text, "", settings, model) for text in written])
    return {"set": name, **_cost(written), "top_p": settings.top_p}


def _documents(what: Documents, run: Run, model: LanguageModel, results: Results) -> dict[str, Any]:
    """From an end token on, since what a model writes from nothing begins anywhere in a document."""
    settings = Settings(
        length=what.contexts * model.config.network.context,
        batch_size=what.count,
        entropy_floor=what.floor,
        entropy_window=model.config.network.context,
    )
    settings = model.config.method.settled(settings)
    end = None if model.tokenizer is None else model.tokenizer.eos_id
    if end is None:
        raise ValueError("documents need a tokenizer with an end token")
    written = model.generate([[end]] * what.count, settings)
    samples = [text.sample for text in written]
    lengths = [
        document_length(text.tokens, given=text.sample.given, stopped_by=text.sample.stopped_by, marks={end})
        for text in written
    ]
    some = [sample_record(text, "", settings, model) for text in written[:20]]
    results.add_samples(run, "documents", some)
    return {
        **_cost(written),
        **asdict(LengthStatistics.of(lengths)),
        "stopped_by": stop_counts([sample.stopped_by for sample in samples]),
        "lengths": sorted(lengths),
    }


def _cost(written: list[Generation]) -> dict[str, Any]:
    samples = [text.sample for text in written]
    tokens = sum(sample.written for sample in samples)
    evaluations = sum(sample.evaluations for sample in samples)
    return {
        "texts": len(samples),
        "tokens": tokens,
        "evaluations": evaluations,
        "evaluations_per_token": evaluations / max(tokens, 1),
        "entropy": sum(text.entropy for text in written) / len(written),
        "redraws": sum(sample.redraws for sample in samples),
    }


def _set_name(what: Texts) -> str:
    """A name for a file of samples: letters, digits, dots and dashes."""
    rule = f"{what.steps} steps" if what.steps is not None else _rule_name(what.unmasking)
    name = f"x{what.contexts}-{rule}{'-free' if what.floor is None else ''}"
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in name).strip("-")


def _rule_name(rule: UnmaskingRule) -> str:
    return "-".join(f"{name}-{value}" for name, value in rule_values(rule).items()).removeprefix("kind-")


def _for_writing(model: LanguageModel) -> LanguageModel:
    """In bfloat16 on a GPU, whose kernels are made for it; not what is told the noise level, exactly."""
    if model.network.device.type != "cuda" or model.network.uses_noise:
        return model
    return LanguageModel(deepcopy(model.network).to(torch.bfloat16), model.config, model.tokenizer)


def _batches(
    rows: WrappedTokens, number: int, model: LanguageModel, *, score_first: bool
) -> Iterator[TokenBatch]:
    number = min(number, len(rows))
    for start in range(0, number, _ROWS):
        tokens = torch.from_numpy(rows[start : min(start + _ROWS, number)])
        yield TokenBatch.of(tokens.to(model.network.device), score_first=score_first)
