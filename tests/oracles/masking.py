"""The NELBO of one block, by brute force: every mask, every order, every step.

A network that ignores time is a table `c[M, i]` = −log p(x_i | x outside M), one row for each masked set M of
the block's tokens (as bits: token i is masked when M >> i & 1), zero where i is not masked.
"""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from math import comb

import numpy as np

from .orders import law_of_orders

Array = np.ndarray


def random_table(n: int, rng: np.random.Generator) -> Array:
    """Cross-entropies (2^n, n) with no structure at all."""
    masked = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    return masked * rng.exponential(2.0, (2**n, n))


def as_bits(tokens: Sequence[int]) -> int:
    return sum(1 << i for i in tokens)


def gauss_legendre(low: float, high: float, nodes: int = 64) -> tuple[Array, Array]:
    x, w = np.polynomial.legendre.leggauss(nodes)
    return low + (high - low) * (x + 1) / 2, w * (high - low) / 2


# --- the NELBO, three ways. `tokens` are the maskable ones; the others are never masked. ---


def nelbo_by_orders(table: Array, tokens: Sequence[int], lean: float = 0.0) -> float:
    """Reveal the tokens one by one; average over all orders, by how likely they are."""
    return sum(
        probability * table[as_bits(order[k:]), order[k]]
        for order, probability in law_of_orders(tokens, lean).items()
        for k in range(len(order))
    )


def nelbo_by_counts(table: Array, tokens: Sequence[int]) -> float:
    """Σ_k (1/k) · the mean over all sets of k tokens of their summed cross-entropies."""
    total = 0.0
    for k in range(1, len(tokens) + 1):
        sets = list(combinations(tokens, k))
        total += sum(table[as_bits(masked)].sum() for masked in sets) / (k * len(sets))
    return total


def nelbo_by_times(
    table: Array,
    tokens: Sequence[int],
    mask_rate: Callable[[Array], Array],
    elbo_weight: Callable[[Array], Array],
) -> float:
    """∫ weight(t) Σ_M q_t(M) Σ_{i in M} c(M, i) dt, the definition (eq. 8)."""
    u, du = gauss_legendre(0.0, 1.0)
    t, dt = u * u, 2 * u * du  # in u even the square-root schedule is smooth at 0
    rate, weight = mask_rate(t), elbo_weight(t)
    total = 0.0
    for k in range(1, len(tokens) + 1):
        for masked in combinations(tokens, k):
            probability = rate**k * (1 - rate) ** (len(tokens) - k)
            total += float((dt * weight * probability).sum()) * table[as_bits(masked)].sum()
    return total


# --- the law of a rule: the expected weight of every masked set, which decides for all tables at once. ---


def nelbo_set_weights(n: int) -> Array:
    """What each masked set (2^n,) must be worth in expectation: ∫ r^(k−1) (1−r)^(n−k) dr."""
    r, dr = gauss_legendre(0.0, 1.0)
    weights = np.zeros(2**n)
    for masked in range(1, 2**n):
        k = masked.bit_count()
        weights[masked] = (dr * r ** (k - 1) * (1 - r) ** (n - k)).sum()
    return weights


def count_law(n: int, rate: float, low: float, high: float) -> Array:
    """How many tokens are masked (n + 1,) once masks outside [low, high] have been rejected.

    By enumerating the masks. All zeros where every mask is rejected.
    """
    law = np.zeros(n + 1)
    for mask in product((0, 1), repeat=n):
        k = sum(mask)
        if low - 1e-9 <= k / n <= high + 1e-9:
            law[k] += rate**k * (1 - rate) ** (n - k)
    return law / law.sum() if law.sum() else law


def clipped_set_weights(n: int, low: float, high: float, weight: str, redraw: bool) -> Array:
    """Expected weights (2^n,) of training with mask rates U[low, high]."""
    width = high - low
    named = {
        "reference": lambda r: 1 / r,
        "derivative": lambda r: width / r,
        "paper": lambda r: 1 / (width * r),
        "flat": lambda r: 1.0,
    }[weight]
    rates, probabilities = gauss_legendre(low, high)
    if width == 0:
        rates, probabilities = np.array([low]), np.array([1.0])
    else:
        probabilities = probabilities / width
    weights = np.zeros(2**n)
    for rate, probability in zip(rates, probabilities, strict=True):
        law = count_law(n, rate, low, high) if redraw else np.zeros(n + 1)
        if not law.any():  # no redrawing, or nothing fits: the plain Bernoulli mask
            law = count_law(n, rate, 0.0, 1.0)
        for masked in range(1, 2**n):
            k = masked.bit_count()
            weights[masked] += probability * named(rate) * law[k] / comb(n, k)
    return weights


# --- T discrete steps, from the definition (eq. 3): explicit matrices and divergences. ---


def absorbing_matrix(alpha: float, vocab: int, mask_id: int) -> Array:
    """Q[i, j] = q(x_t = j | x_s = i) (Suppl. B)."""
    q = np.diag(np.full(vocab, alpha))
    q[:, mask_id] += 1 - alpha
    return q


def bayes(before: Array, after: Array, x_t: int, x_0: int) -> Array:
    """q(x_s | x_t, x_0) from q(x_s | x_0) = before[x_0, x_s] and q(x_t | x_s) = after[x_s, x_t]."""
    joint = before[x_0] * after[:, x_t]
    return joint / joint.sum()


def discrete_nelbo(
    network: Array, x: Sequence[int], alphas: Sequence[float], mask_id: int
) -> tuple[float, float]:
    """(reconstruction, diffusion) for steps with keep probabilities `alphas`, the first of which is α_0 = 1.

    `network[M, i]` is the distribution of token i when M is masked; a clean token is carried over.
    The diffusion term is Σ_{j=2..T} E_q KL[q(x_s | x_t, x) ‖ Σ_x' q(x_s | x_t, x') p(x' | x_t)].
    """
    n, vocab = len(x), network.shape[-1]
    reconstruction = diffusion = 0.0
    for j in range(1, len(alphas)):
        alpha_s, alpha_t = alphas[j - 1], alphas[j]
        before = absorbing_matrix(alpha_s, vocab, mask_id)
        after = absorbing_matrix(alpha_t / alpha_s, vocab, mask_id)
        for masked in range(2**n):
            k = masked.bit_count()
            probability = (1 - alpha_t) ** k * alpha_t ** (n - k)
            if probability == 0:
                continue
            for i in range(n):
                is_masked = masked >> i & 1
                p_x = network[masked, i] if is_masked else np.eye(vocab)[x[i]]
                if j == 1:
                    reconstruction -= probability * np.log(p_x[x[i]])
                    continue
                x_t = mask_id if is_masked else x[i]
                truth = bayes(before, after, x_t, x[i])
                model = sum(p_x[v] * bayes(before, after, x_t, v) for v in range(vocab) if p_x[v] > 0)
                support = truth > 0
                diffusion += probability * float(
                    (truth * np.log(truth, where=support, out=np.zeros(vocab))).sum()
                )
                diffusion -= probability * float((truth[support] * np.log(model[support])).sum())
    return reconstruction, diffusion


def random_network(n: int, vocab: int, mask_id: int, rng: np.random.Generator) -> Array:
    """A distribution over the clean tokens for every masked set and position (2^n, n, vocab)."""
    p = rng.exponential(1.0, (2**n, n, vocab))
    p[..., mask_id] = 0.0
    return p / p.sum(-1, keepdims=True)


def table_of(network: Array, x: Sequence[int]) -> Array:
    """c[M, i] = −log p(x_i | x outside M), zero where i is not in M."""
    n = len(x)
    masked = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
    return -masked * np.log(network[:, np.arange(n), list(x)])
