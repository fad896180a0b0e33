"""The base of all training objectives: the batch they take and the per-token loss they return."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from bd3lm.diffusion import ClipSearch, Draws, derive_seed, subs_at_masks
from bd3lm.models import Denoiser, check_targets, document_begins, send


@dataclass(frozen=True)
class TokenBatch:
    """Token ids, and which of them to predict.

    A position that is not `scored` is either given (the first token of a text, a prompt: always visible) or
    `absent` (past the end of a text: always masked, never seen). By default the first token of each row is
    given, for every method, so that perplexities cover the same tokens.

    With `documents` a row holds several texts one after another, which do not see each other. Tokens of one
    text have the same number, and numbers grow along a row. In this case tokens after a scored one in its
    block may be `absent` too: predictions in that block do not see them, but later blocks of their text do.
    """

    tokens: Tensor  # (rows, length) int64
    scored: Tensor  # (rows, length) bool
    absent: Tensor | None = None  # (rows, length) bool
    documents: Tensor | None = None  # (rows, length) int64

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape[0] < 1 or self.tokens.shape[1] < 1:
            raise ValueError(f"tokens must be (rows, length) and not empty, got {tuple(self.tokens.shape)}")
        for name, flags in (("scored", self.scored), ("absent", self.absent)):
            if flags is not None and (flags.shape != self.tokens.shape or flags.dtype != torch.bool):
                raise ValueError(
                    f"{name} must be a bool tensor of shape {tuple(self.tokens.shape)}, got {flags.dtype} "
                    f"of shape {tuple(flags.shape)}"
                )
        if self.tokens.dtype != torch.long:
            raise ValueError(f"tokens must be int64, got {self.tokens.dtype}")
        if self.documents is not None and (
            self.documents.shape != self.tokens.shape or self.documents.dtype != torch.long
        ):
            raise ValueError(
                f"documents must be an int64 tensor of shape {tuple(self.tokens.shape)}, got "
                f"{self.documents.dtype} of shape {tuple(self.documents.shape)}"
            )
        if self.tokens.device.type != "cpu":
            return
        if self.documents is not None and (self.documents[:, 1:] < self.documents[:, :-1]).any():
            raise ValueError("documents must not decrease along a row: a text is in one piece")
        if self.absent is None:
            return
        if (self.scored & self.absent).any():
            raise ValueError("a token cannot be both scored and absent")
        if self.documents is None and (self.absent[:, :-1] & ~self.absent[:, 1:]).any():
            raise ValueError("absent must be the end of a row: a token after it would see it")

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        *,
        score_first: bool = False,
        prompts: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> "TokenBatch":
        """A batch of texts. Row r begins with prompts[r] given tokens and ends after lengths[r] tokens.

        Without prompts one token is given, or none with `score_first`. Without lengths every row is full.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be (rows, length), got {tuple(tokens.shape)}")
        if score_first and prompts is not None:
            raise ValueError("score_first must be False with prompts, which decide the given tokens")
        rows, length = tokens.shape
        position = torch.arange(length, device=tokens.device)
        for name, limits in (("prompts", prompts), ("lengths", lengths)):
            if limits is not None and not (
                limits.shape == (rows,) and 0 <= int(limits.min()) and int(limits.max()) <= length
            ):
                raise ValueError(
                    f"{name} must hold one number in 0..{length} for each of {rows} rows, got {limits}"
                )
        given = position < (prompts.unsqueeze(1) if prompts is not None else int(not score_first))
        if lengths is None:
            return cls(tokens=tokens, scored=(~given).expand(rows, length))
        absent = position >= lengths.unsqueeze(1)
        return cls(tokens=tokens, scored=~given & ~absent, absent=absent)

    @property
    def begins(self) -> Tensor:
        """Whether each token is the first of its text, (rows, length)."""
        if self.documents is not None:
            return document_begins(self.documents)
        return (torch.arange(self.tokens.shape[1], device=self.tokens.device) == 0).expand_as(self.tokens)

    def to(self, device: torch.device | str) -> "TokenBatch":
        """The batch on another device."""
        return self._each(lambda tensor: send(tensor, device))

    def __getitem__(self, rows: slice) -> "TokenBatch":
        return self._each(lambda tensor: tensor[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TokenBatch":
        absent, documents = (None if each is None else change(each) for each in (self.absent, self.documents))
        return TokenBatch(change(self.tokens), change(self.scored), absent, documents)


@dataclass(frozen=True)
class TokenLoss:
    """Nats per token and the weight of each token, both (rows, length).

    A trainer divides the sums by the sum of `weight` over the global batch. It minimizes `nats` and
    `auxiliary` together and reports `nats`. `statistics` are also summed over the global batch, for
    objectives that learn from them (`Objective.adapt`).
    """

    nats: Tensor
    weight: Tensor
    auxiliary: Tensor | None = None
    total: Tensor | None = None  # the loss to minimize, if nats and auxiliary have no gradient
    statistics: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def minimised(self) -> Tensor:
        """The sum of nats and auxiliary nats, differentiable."""
        if self.total is not None:
            return self.total
        return self.nats.sum() + (0.0 if self.auxiliary is None else self.auxiliary.sum())

    def mean(self) -> Tensor:
        """The minimized loss per token of this batch; zero if no token counts."""
        return self.minimised / self.weight.sum().clamp_min(1.0)


class Objective(ABC):
    """A training objective, which turns a network and a batch into nats per token.

    `draw` draws random numbers beforehand, for the whole global batch. A rank or a micro-batch takes its rows
    of them. An objective that is not random ignores them.
    """

    @property
    @abstractmethod
    def is_bound(self) -> bool:
        """Whether the expected loss of a network that ignores time bounds its negative log-likelihood."""

    def bounds(self, model: Denoiser) -> bool:
        """Whether the expected loss of this network does, so that its figure may be called a bound."""
        return self.is_bound

    @property
    def is_random(self) -> bool:
        """Whether the loss depends on draws. If not, and if it is a bound, it is −log p itself."""
        return True

    def is_exact(self, model: Denoiser) -> bool:
        """Whether the loss of this network is its negative log-likelihood itself."""
        return self.bounds(model) and not self.is_random

    @property
    def search(self) -> ClipSearch | None:
        """The search for the range of mask rates during training, if any."""
        return None

    def in_range(self, low: float, high: float, *, to_compare: bool = False) -> Self:
        """The objective with another range of mask rates: to train with, or `to_compare` with other
        ranges."""
        raise ValueError(f"{type(self).__name__} has no range of mask rates, got low {low} and high {high}")

    @property
    def order_lean(self) -> float:
        """How much the order of reveal of its figures leans to the left."""
        return 0.0

    def block_of(self, context: int) -> int:
        """How many tokens share a noise level. The loss's variance is measured over such blocks."""
        return context

    @abstractmethod
    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> Draws | None:
        """The random numbers of a (global) batch."""

    @abstractmethod
    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None) -> TokenLoss:
        """Nats per token, a deterministic function of the batch and the draws."""

    def seeded_draws(self, batch: TokenBatch, *seed: int | str) -> Draws | None:
        """Draws for a batch, determined by a seed."""
        rows, length = batch.tokens.shape
        device = batch.tokens.device
        generator = torch.Generator(device).manual_seed(derive_seed(*seed))
        return self.draw(rows, length, generator=generator, device=device)

    def adapt(self, statistics: Mapping[str, Tensor]) -> Self:
        """The objective after learning from the summed statistics of some batches. Most learn nothing."""
        return self

    def figures(self, statistics: Mapping[str, float]) -> Mapping[str, float]:
        """Figures from the summed statistics of held-out text, logged along with the nats. Mostly none."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the objective has learned since it was configured, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`."""
        if state:
            raise ValueError(f"{type(self).__name__} has nothing to restore, got {dict(state)}")
        return self

    def __call__(
        self, model: Denoiser, batch: TokenBatch, *, generator: torch.Generator | None = None
    ) -> TokenLoss:
        """Draw and evaluate, for a batch that is the whole global batch."""
        rows, length = batch.tokens.shape
        draws = self.draw(rows, length, generator=generator, device=batch.tokens.device)
        return self.loss(model, batch, draws)


def check_scored(batch: TokenBatch, mask_id: int) -> None:
    """Refuse a scored mask token: no network predicts the mask, so its loss would be infinite."""
    tokens = batch.tokens
    if tokens.device.type == "cpu" and ((tokens == mask_id) & batch.scored).any():
        raise ValueError(f"tokens to be predicted must not be the mask {mask_id}")


def token_nats(logits: Tensor, targets: Tensor, mask_id: int) -> Tensor:
    """−log p(target), for a network that never predicts the mask."""
    check_targets(targets, logits.shape[-1])
    return -subs_at_masks(logits, mask_id).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
