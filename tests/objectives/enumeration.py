"""The expected loss of an objective with one noise level a block: every corruption, no chance."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch

from bd3lm.diffusion import Absorbing, Draws
from bd3lm.objectives import TokenBatch, TokenLoss
from bd3lm.objectives.corruption import CorruptionObjective
from tests.oracles.languages import VOCAB, Array, Text

Level = tuple[float, float, float]  # a level, the mask rate it stands for, its share of all levels


def continuous_levels(
    mask_rate: Callable[[Array], Array], *, nodes: int = 40, power: int = 1, low: float = 0.0
) -> list[Level]:
    """Gauss-Legendre over t in (low, 1), in u = t^(1/power): a power makes an integrand smooth at 0."""
    x, w = np.polynomial.legendre.leggauss(nodes)
    first = low ** (1 / power)
    u, du = first + (1 - first) * (x + 1) / 2, w * (1 - first) / 2
    t, dt = u**power, power * u ** (power - 1) * du
    return list(zip(t.tolist(), mask_rate(t).tolist(), dt.tolist(), strict=True))


def discrete_levels(rates: Sequence[float]) -> list[Level]:
    """Steps 1..T, each with all its levels at once; rates[j] is the mask rate after step j."""
    steps = len(rates) - 1
    return [((j - 0.5) / steps, rates[j], 1 / steps) for j in range(1, steps + 1)]


def losses(
    objective: CorruptionObjective, network: object, texts: Sequence[Text], levels: Sequence[Level], **batch
) -> tuple[TokenLoss, Array, Array]:
    """The loss of every text at every level under every corruption, its probability, and whose it is."""
    rows, tokens, level_of, chances, owners = [], [], [], [], []
    for owner, text in enumerate(texts):
        for level, rate, share in levels:
            for fates in product(_fates(objective, rate), repeat=len(text)):
                chance = share * np.prod([p for _, p in fates])
                if chance > 0:
                    rows.append(text)
                    tokens.append([u for u, _ in fates])
                    level_of.append([level])
                    chances.append(chance)
                    owners.append(owner)
    draws = Draws(
        levels=torch.tensor(level_of, dtype=torch.float64),
        spare=torch.full((len(rows), 1), 0.5, dtype=torch.float64),
        tokens=torch.tensor(tokens, dtype=torch.float64),
    )
    given = {name: flags[torch.tensor(owners)] for name, flags in batch.items()}
    given = given or {"scored": torch.ones(len(rows), len(texts[0]), dtype=torch.bool)}
    loss = objective.loss(network, TokenBatch(tokens=torch.tensor(rows), **given), draws)
    return loss, np.array(chances), np.array(owners)


def expected(
    objective: CorruptionObjective, network: object, texts: Sequence[Text], levels: Sequence[Level], **batch
) -> Array:
    """The expected nats of each text (texts, length)."""
    loss, chances, owners = losses(objective, network, texts, levels, **batch)
    total = np.zeros((len(texts), len(texts[0])))
    np.add.at(total, owners, chances[:, None] * loss.nats.detach().numpy())
    return total


def expected_in_blocks(
    objective: CorruptionObjective, network: object, texts: Sequence[Text], levels: Sequence[Level], size: int
) -> Array:
    """The expected nats of each text (texts, length), a whole number of blocks of which each has a level.

    A block's loss may depend on no other block's noise. Every block goes through all its corruptions, side by
    side with corruptions of the others that were put together at random: were they seen, sums would be wrong.
    """
    fates = [
        (level, [u for u, _ in each], share * np.prod([p for _, p in each]))
        for level, rate, share in levels
        for each in product(_fates(objective, rate), repeat=size)
    ]
    level, tokens, chances = (np.array(each) for each in zip(*fates, strict=True))
    blocks = len(texts[0]) // size
    order = np.stack([np.random.default_rng(b).permutation(len(fates)) for b in range(blocks)], 1)
    draws = Draws(
        levels=torch.from_numpy(level[order]),
        spare=torch.full(order.shape, 0.5, dtype=torch.float64),
        tokens=torch.from_numpy(tokens[order].reshape(len(fates), -1)),
    )
    found = []
    for text in texts:
        batch = TokenBatch.of(torch.tensor([text] * len(fates)), score_first=True)
        nats = objective.loss(network, batch, draws).nats.detach().numpy()
        found.append((np.repeat(chances[order], size, axis=1) * nats).sum(0))
    return np.stack(found)


def _fates(objective: CorruptionObjective, rate: float) -> list[tuple[float, float]]:
    """What may become of a token: a uniform number that does it, and its probability."""
    kept = [((1 + rate) / 2, 1 - rate)]
    if isinstance(objective.process, Absorbing):
        return [*kept, (rate * (1 - 1e-9), rate)]
    return kept + [(rate * (v + 0.5) / VOCAB, rate / VOCAB) for v in range(VOCAB)]
