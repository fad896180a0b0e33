"""Likelihoods and other measurements of a trained network."""

from bd3lm.evaluation.exact import (
    ExactLikelihood,
    exact_likelihood,
    importance_weighted_nll,
    order_log_likelihood,
)
from bd3lm.evaluation.likelihood import Likelihood, loss_sums, monte_carlo_likelihood
from bd3lm.evaluation.variance import block_moments, gradient_variance, nelbo_variance, variance

__all__ = [
    "ExactLikelihood",
    "Likelihood",
    "block_moments",
    "exact_likelihood",
    "gradient_variance",
    "importance_weighted_nll",
    "loss_sums",
    "monte_carlo_likelihood",
    "nelbo_variance",
    "order_log_likelihood",
    "variance",
]
