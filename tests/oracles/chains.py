"""T-step diffusion chains (Austin et al. 2021) with explicit matrices, every state, every token.

`noise` (V,) is where a corrupted token goes; `alphas` are the keep probabilities α_0 = 1, α_1, …, α_T.
`network[j]` (V^n, n, V) is p(x_0 | x_t) at step j (one table for all steps may be given).
"""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from .languages import Array, Text, states

Network = Sequence[Array]  # index 0 is not used


def keep_matrix(alpha: float, noise: Array) -> Array:
    """Q[i, j] = q(x_t = j | x_s = i)."""
    return alpha * np.eye(len(noise)) + (1 - alpha) * np.outer(np.ones(len(noise)), noise)


def step_matrices(alphas: Sequence[float], noise: Array) -> tuple[list[Array], list[Array]]:
    """Q_j for every step, and their products Q_1 … Q_j; both start with the identity."""
    steps = [np.eye(len(noise))]
    steps += [keep_matrix(alphas[j] / alphas[j - 1], noise) for j in range(1, len(alphas))]
    products = [steps[0]]
    for step in steps[1:]:
        products.append(products[-1] @ step)
    return steps, products


def reverse_law(guess: Array, x_t: int, before: Array, step: Array) -> Array:
    """Σ_x q(x_s | x_t, x) p(x), p being the guess among the x from which x_t can be reached."""
    law, total = np.zeros(len(guess)), 0.0
    for x, p in enumerate(guess):
        joint = before[x] * step[:, x_t]  # q(x_s | x) q(x_t | x_s)
        if p > 0 and joint.sum() > 0:
            law += p * joint / joint.sum()
            total += p
    return law / total


def divergence(p: Array, q: Array) -> float:
    support = p > 0
    return float((p[support] * np.log(p[support] / q[support])).sum())


def bound(x_0: Text, network: Network, alphas: Sequence[float], noise: Array) -> dict[str, float]:
    """The three terms of L_vb (eq. 1), each an expectation over every x_t."""
    steps, products = step_matrices(alphas, noise)
    n, last = len(x_0), len(alphas) - 1
    terms = {
        "prior": sum(divergence(products[-1][token], noise) for token in x_0),
        "diffusion": 0.0,
        "reconstruction": 0.0,
    }
    for j in range(1, last + 1):
        for row, x_t in enumerate(states(n, len(noise))):
            chance = np.prod([products[j][x, y] for x, y in zip(x_0, x_t, strict=True)])
            if chance == 0:
                continue
            for i in range(n):
                model = reverse_law(network[j][row, i], x_t[i], products[j - 1], steps[j])
                truth = reverse_law(np.eye(len(noise))[x_0[i]], x_t[i], products[j - 1], steps[j])
                kind = "reconstruction" if j == 1 else "diffusion"
                terms[kind] += chance * divergence(truth, model)
    return terms


def sampled(
    network: Network,
    alphas: Sequence[float],
    noise: Array,
    length: int,
    start: Array | None = None,
    *,
    kept: Sequence[bool] | None = None,
) -> Array:
    """The law (V^n,) of the sampler that takes all T steps from `start`, by default from the noise.

    Places that are `kept` stay what they are.
    """
    steps, products = step_matrices(alphas, noise)
    kept = kept or [False] * length
    law = reduce(np.kron, [noise] * length) if start is None else start
    for j in range(len(alphas) - 1, 0, -1):
        following = np.zeros_like(law)
        for row, x_t in enumerate(states(length, len(noise))):
            if law[row] > 0:
                tokens = [
                    np.eye(len(noise))[x_t[i]]
                    if kept[i]
                    else reverse_law(network[j][row, i], x_t[i], products[j - 1], steps[j])
                    for i in range(length)
                ]
                following += law[row] * reduce(np.kron, tokens)
        law = following
    return law
