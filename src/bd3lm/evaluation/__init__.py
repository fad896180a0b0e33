"""Likelihoods and other measurements of trained networks."""

from bd3lm.evaluation.acceptance import (
    Acceptance,
    Drafts,
    acceptances,
    coupled_acceptance,
    measure_acceptance,
    rejection_acceptance,
    tokens_a_round,
)
from bd3lm.evaluation.estimators import Enumerated, Estimator, Figure, ImportanceWeighted, Sampled
from bd3lm.evaluation.exact import (
    ExactLikelihood,
    draw_orders,
    exact_likelihood,
    exact_likelihoods,
    importance_weighted_nll,
    order_log_likelihood,
)
from bd3lm.evaluation.fills import CausalFills, EnumeratedFills, OrderedFills
from bd3lm.evaluation.judges import HuggingFaceJudge
from bd3lm.evaluation.judging import Judge, Judgement, judge_texts
from bd3lm.evaluation.lengths import LengthStatistics, document_length, evenly_spaced, stop_counts
from bd3lm.evaluation.likelihood import (
    CorpusLikelihood,
    corpus_likelihood,
    loss_sums,
    perplexity,
    ratio_error,
)
from bd3lm.evaluation.mauve import mauve_score
from bd3lm.evaluation.variance import Spread, block_moments, gradient_variance, nelbo_variance, variance

__all__ = [
    "Acceptance",
    "CausalFills",
    "CorpusLikelihood",
    "Drafts",
    "Enumerated",
    "EnumeratedFills",
    "Estimator",
    "ExactLikelihood",
    "Figure",
    "HuggingFaceJudge",
    "ImportanceWeighted",
    "Judge",
    "Judgement",
    "LengthStatistics",
    "OrderedFills",
    "Sampled",
    "Spread",
    "acceptances",
    "block_moments",
    "corpus_likelihood",
    "coupled_acceptance",
    "document_length",
    "draw_orders",
    "evenly_spaced",
    "exact_likelihood",
    "exact_likelihoods",
    "gradient_variance",
    "importance_weighted_nll",
    "judge_texts",
    "loss_sums",
    "mauve_score",
    "measure_acceptance",
    "nelbo_variance",
    "order_log_likelihood",
    "perplexity",
    "ratio_error",
    "rejection_acceptance",
    "stop_counts",
    "tokens_a_round",
    "variance",
]
