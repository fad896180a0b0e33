"""Likelihoods and other measurements of a trained network."""

from bd3lm.evaluation.exact import (
    ExactLikelihood,
    exact_likelihood,
    importance_weighted_nll,
    order_log_likelihood,
)

__all__ = ["ExactLikelihood", "exact_likelihood", "importance_weighted_nll", "order_log_likelihood"]
