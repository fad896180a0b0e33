"""The ways to find −log p of a text: by the chain rule, by enumeration, from drawn masks, from drawn orders.

An estimator says what its figures mean. An "exact" figure is −log p itself; a "bound" is at least −log p in
expectation; a figure that is "neither" may lie on either side. The random numbers are drawn apart from their
use, as for objectives, so that several draws of one text can be spread evenly.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bd3lm.diffusion import Draws
from bd3lm.evaluation.exact import draw_orders, exact_likelihood, importance_weighted_nll
from bd3lm.models import BlockReading, Denoiser
from bd3lm.objectives import Objective, TokenBatch

Meaning = Literal["exact", "bound", "neither"]


@dataclass(frozen=True)
class Figure:
    """One of the numbers that an estimator gives for a text."""

    name: str
    meaning: Meaning


class Estimator(ABC):
    """−log p of each row of a batch, over its scored tokens."""

    usual_draws: ClassVar[int] = 16
    """How many draws of a text make an estimate, where nothing is said and it is random."""

    @property
    def passes(self) -> int:
        """How many passes over a text it takes, the clean one aside."""
        return 1

    @property
    @abstractmethod
    def name(self) -> str:
        """What a user calls it."""

    @property
    @abstractmethod
    def is_random(self) -> bool:
        """Whether it draws random numbers."""

    @abstractmethod
    def figures(self, model: Denoiser) -> tuple[Figure, ...]:
        """The figures it gives for a network, the most informative first."""

    @abstractmethod
    def draw(
        self, rows: int, length: int, *, generator: torch.Generator, device: torch.device
    ) -> tuple[Draws, ...]:
        """The random numbers for a batch; empty where nothing is random."""

    @abstractmethod
    def parts(self, model: Denoiser, batch: TokenBatch, draws: tuple[Draws, ...]) -> Tensor:
        """(figures, rows, parts), float64: what the equal parts of each row, its tokens or its blocks, add to
        its nats. A deterministic function of the batch and the draws."""

    def nats(self, model: Denoiser, batch: TokenBatch, draws: tuple[Draws, ...]) -> Tensor:
        """(figures, rows), float64: a deterministic function of the batch and the draws."""
        return self.parts(model, batch, draws).sum(2)


@dataclass(frozen=True)
class Sampled(Estimator):
    """The loss of an objective with one draw for each text, as in the paper (Suppl. C.4).

    For an objective that draws nothing, such as the autoregressive one, that is −log p itself.
    """

    label: str
    objective: Objective

    @property
    def name(self) -> str:
        return self.label

    @property
    def is_random(self) -> bool:
        return self.objective.is_random

    def figures(self, model: Denoiser) -> tuple[Figure, ...]:
        if not self.objective.bounds(model):
            return (Figure(self.name, "neither"),)
        return (Figure(self.name, "bound" if self.is_random else "exact"),)

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator, device: torch.device
    ) -> tuple[Draws, ...]:
        draws = self.objective.draw(rows, length, generator=generator, device=device)
        return () if draws is None else (draws,)

    @torch.no_grad()
    def parts(self, model: Denoiser, batch: TokenBatch, draws: tuple[Draws, ...]) -> Tensor:
        loss = self.objective.loss(model, batch, *draws or (None,))
        return loss.nats.double().unsqueeze(0)


@dataclass(frozen=True, kw_only=True)
class _OfBlocks(Estimator):
    """An estimator that takes a text block by block."""

    reading: BlockReading
    lean: float = 0.0
    """How much the order in which the tokens of a block are revealed leans to the left."""


@dataclass(frozen=True, kw_only=True)
class Enumerated(_OfBlocks):
    """The sum over all orders of reveal; the same passes give the NELBO without Monte-Carlo noise."""

    @property
    def name(self) -> str:
        return "exact"

    @property
    def passes(self) -> int:
        return 2**self.reading.block_size - 1

    @property
    def is_random(self) -> bool:
        return False

    def figures(self, model: Denoiser) -> tuple[Figure, ...]:
        return Figure("exact", "exact"), Figure("nelbo", "bound")

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator, device: torch.device
    ) -> tuple[Draws, ...]:
        return ()

    def parts(self, model: Denoiser, batch: TokenBatch, draws: tuple[Draws, ...]) -> Tensor:
        exact = exact_likelihood(model, batch, self.reading, lean=self.lean)
        return torch.stack((exact.nll, exact.nelbo))


@dataclass(frozen=True, kw_only=True)
class ImportanceWeighted(_OfBlocks):
    """−log of the mean probability along `orders` random orders of each block: tighter than the NELBO."""

    orders: int
    usual_draws = 1  # it draws all its orders itself

    @property
    def is_random(self) -> bool:
        return True

    @property
    def passes(self) -> int:
        return self.orders * self.reading.block_size

    @property
    def name(self) -> str:
        return f"iw:{self.orders}"

    def figures(self, model: Denoiser) -> tuple[Figure, ...]:
        return (Figure(self.name, "bound"),)

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator, device: torch.device
    ) -> tuple[Draws, ...]:
        block_size = self.reading.block_size
        return draw_orders(self.orders, rows, length, block_size, generator=generator, device=device)

    def parts(self, model: Denoiser, batch: TokenBatch, draws: tuple[Draws, ...]) -> Tensor:
        return importance_weighted_nll(model, batch, self.reading, draws, lean=self.lean).unsqueeze(0)
