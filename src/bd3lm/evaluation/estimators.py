"""Estimators of −log p of a text: the chain rule, enumeration, drawn masks and drawn orders.

An estimator states what its figures mean. An "exact" figure is −log p itself. A "bound" is at least −log p in
expectation. A figure that is "neither" may lie on either side. As for objectives, random numbers are drawn
separately from their use, so that several draws for one text can be spread evenly.
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
    """Estimates −log p of each row of a batch, over its scored tokens."""

    usual_draws: ClassVar[int] = 16
    """How many draws of a text a random estimator averages by default."""

    @property
    def passes(self) -> int:
        """How many passes over a text it takes, not counting the clean one."""
        return 1

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name for users."""

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
        """The random numbers for a batch; empty if nothing is random."""

    @abstractmethod
    def parts(self, model: Denoiser, batch: TokenBatch, draws: tuple[Draws, ...]) -> Tensor:
        """(figures, rows, parts), float64: the nats of each row's equal parts, which are its tokens or its
        blocks. A deterministic function of the batch and the draws."""

    def nats(self, model: Denoiser, batch: TokenBatch, draws: tuple[Draws, ...]) -> Tensor:
        """(figures, rows), float64, a deterministic function of the batch and the draws."""
        return self.parts(model, batch, draws).sum(2)


@dataclass(frozen=True)
class Sampled(Estimator):
    """The loss of an objective with one draw for each text, as in the paper (Suppl. C.4).

    For an objective that draws nothing, such as the autoregressive one, this is −log p itself.
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
    """An estimator that processes a text block by block."""

    reading: BlockReading
    lean: float = 0.0
    """How much the order of reveal within a block leans to the left."""


@dataclass(frozen=True, kw_only=True)
class Enumerated(_OfBlocks):
    """The sum over all orders of reveal. The same passes give the NELBO without Monte-Carlo noise."""

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
    usual_draws = 1  # a draw already holds all its orders

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
