"""Score-entropy diffusion (Lou et al. 2024) from rate matrices, matrix exponentials and every state.

`rates` Q[i, j] is the rate from token i to token j at σ' = 1, rows summing to 0, so that q_t = exp(σ Q).
Scores are tables s[x, i, y] over all states, as a function of α = e^{−σ}.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise

import numpy as np
from scipy.integrate import solve_ivp
from scipy.linalg import expm

from .languages import VOCAB, Array, Text, states

Scores = Callable[[float], Array]


def absorbing_rates(mask_id: int, vocab: int = VOCAB) -> Array:
    rates = -np.eye(vocab)
    rates[:, mask_id] += 1
    return rates


def uniform_rates(vocab: int = VOCAB) -> Array:
    return np.full((vocab, vocab), 1 / vocab) - np.eye(vocab)


def forward(rates: Array, alpha: float) -> Array:
    """q(x_t | x_0) (V, V)."""
    return expm(-np.log(alpha) * rates)


def token_terms(x_0: int, x_t: int, score: Array, rates: Array, alpha: float) -> float:
    """Σ_{y ≠ x_t} Q(y → x_t) (s_y − r log s_y + K(r)), r = q(y | x_0)/q(x_t | x_0), K(r) = r(log r − 1)."""
    law, total = forward(rates, alpha)[x_0], 0.0
    for y in range(len(rates)):
        if y == x_t or rates[y, x_t] == 0:
            continue
        r = law[y] / law[x_t]
        total += rates[y, x_t] * (score[y] - (r * np.log(score[y]) - r * (np.log(r) - 1) if r > 1e-14 else 0))
    return float(total)


def integrand(x_0: Text, scores: Array, rates: Array, alpha: float) -> float:
    """The expectation of the terms over every x_t, at σ' = 1 (Theorem 3.6 before its integral)."""
    law, total = forward(rates, alpha), 0.0
    for row, x_t in enumerate(states(len(x_0), len(rates))):
        chance = np.prod([law[x, y] for x, y in zip(x_0, x_t, strict=True)])
        if chance > 1e-15:
            total += chance * sum(
                token_terms(x_0[i], x_t[i], scores[row, i], rates, alpha) for i in range(len(x_0))
            )
    return total


def prior_divergence(x_0: Text, rates: Array, alpha: float) -> float:
    """KL(q(x_1 | x_0) ‖ uniform), summed over tokens."""
    law = forward(rates, alpha)
    return float(sum((law[x] * np.log(law[x] * len(rates))).sum() for x in x_0))


def jump_law(scores: Array, length: int, mask_id: int) -> Array:
    """Where the absorbing reverse process ends (V^n,), for ŝ that ignores time, normalised or not.

    From a state with masks, token y comes to position i at rate (−α'/(1 − α)) ŝ_y: the next jump is to it
    with probability ŝ_y over the sum of all, whenever it comes.
    """
    texts = states(length)
    place = {x: row for row, x in enumerate(texts)}
    reached = np.zeros(len(texts))
    reached[place[(mask_id,) * length]] = 1.0
    for masks in range(length, 0, -1):
        for row, x in enumerate(texts):
            if x.count(mask_id) != masks or reached[row] == 0:
                continue
            jumps = {
                place[(*x[:i], y, *x[i + 1 :])]: scores[row, i, y]
                for i in range(length)
                for y in range(VOCAB)
                if x[i] == mask_id != y
            }
            for target, rate in jumps.items():
                reached[target] += reached[row] * rate / sum(jumps.values())
    return np.array([p if mask_id not in x else 0.0 for p, x in zip(reached, texts, strict=True)])


def reverse_law(scores: Scores, length: int, rates: Array, least_alpha: float) -> Array:
    """The law (V^n,) at t = 0 of the reverse process from the uniform prior, by integrating its equation.

    In σ: dp/dσ = −(reverse generator)ᵀ p, with a rate Q(y → x) s_y(x) from x to y.
    """
    texts = states(length, len(rates))
    place = {x: row for row, x in enumerate(texts)}

    def slope(sigma: float, p: Array) -> Array:
        table, change = scores(float(np.exp(-sigma))), np.zeros_like(p)
        for row, x in enumerate(texts):
            for i in range(length):
                for y in range(len(rates)):
                    if y != x[i]:
                        flow = rates[y, x[i]] * table[row, i, y] * p[row]
                        change[row] -= flow
                        change[place[(*x[:i], y, *x[i + 1 :])]] += flow
        return -change

    start = np.full(len(texts), 1 / len(texts))
    solution = solve_ivp(slope, (-np.log(least_alpha), 0.0), start, rtol=1e-8, atol=1e-10)
    return solution.y[:, -1]


def tweedie_law(
    scores: Scores,
    alphas: Sequence[float],
    rates: Array,
    length: int,
    *,
    start: Array,
    mask_id: int,
    kept: Sequence[bool] | None = None,
) -> Array:
    """The law (V^n,) of Tweedie τ-leaping (Theorem 4.2) over falling noise: alphas rise to 1.

    x_s ∝ (exp(−Δσ Q) s)_y · exp(Δσ Q)(y → x_t), negative entries left out; the last step never ends in
    the mask. Places that are `kept` stay what they are.
    """
    kept = kept or [False] * length
    law, texts = start, states(length, len(rates))
    for alpha_t, alpha_s in pairwise(alphas):
        delta, table, following = np.log(alpha_s / alpha_t), scores(alpha_t), np.zeros_like(law)
        back, forth = expm(-delta * rates), expm(delta * rates)
        for row, x_t in enumerate(texts):
            if law[row] == 0:
                continue
            tokens = []
            for i in range(length):
                if kept[i]:
                    tokens.append(np.eye(len(rates))[x_t[i]])
                    continue
                # s is a vector of probability ratios over y, which the transposed matrix evolves.
                p = np.maximum(back.T @ table[row, i], 0) * forth[:, x_t[i]]
                if alpha_s == 1.0:
                    p[mask_id] = 0.0
                tokens.append(p / p.sum())
            following += law[row] * reduce(np.kron, tokens)
        law = following
    return law
