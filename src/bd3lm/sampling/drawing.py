"""Drawing tokens from the network's distributions, sharpened or not, with each row's own noise."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bd3lm.diffusion import Purpose, counter_uniform, gumbel_max, nucleus, subs_at_masks, temper, top_k
from bd3lm.diffusion.categorical import NucleusRule
from bd3lm.limits import check_temperature
from bd3lm.models import runs_kernels


@dataclass(frozen=True, kw_only=True)
class Sharpening:
    """Temperature, then top-k, then nucleus. The default changes nothing: tokens follow the model itself.

    Temperature 0 always takes the likeliest token. It is stored as top_k=1, which does the same.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    top_p_rule: NucleusRule = "inclusive"

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_p_rule not in ("inclusive", "exclusive"):
            raise ValueError(f"top_p_rule must be 'inclusive' or 'exclusive', got {self.top_p_rule!r}")
        if self.temperature == 0.0:
            object.__setattr__(self, "temperature", 1.0)
            object.__setattr__(self, "top_k", 1)

    def __call__(self, log_p: Tensor) -> Tensor:
        log_p = temper(log_p, self.temperature)
        if self.top_k is not None:
            log_p = top_k(log_p, self.top_k)
        return nucleus(log_p, self.top_p, self.top_p_rule)

    @property
    def is_greedy(self) -> bool:
        """Whether it always takes the likeliest token."""
        return self.top_k == 1

    def rows(self, number: int = 1, device: torch.device | str = "cpu") -> "RowSharpening":
        """The same sharpening for `number` rows. One row broadcasts to any number."""
        return RowSharpening([self] * number, device)


class RowSharpening:
    """The sharpening of each row of a batch: one `Sharpening` a row, as tensors on the device.

    The host knows which kinds the rows use, and so which steps to skip. A view of the first rows shares
    memory with the whole.
    """

    def __init__(self, values: Sequence[Sharpening], device: torch.device | str) -> None:
        self._values = list(values)
        self._changes = [0]
        self._known: tuple[int, _Kinds] | None = None
        self.temperature, self.top_p = (
            torch.tensor([getattr(each, name) for each in values], dtype=torch.float64).to(device)
            for name in ("temperature", "top_p")
        )
        self.top_k = torch.tensor([each.top_k or _EVERY for each in values]).to(device)
        self.inclusive = torch.tensor([each.top_p_rule == "inclusive" for each in values]).to(device)

    def __len__(self) -> int:
        return len(self.temperature)

    def _with(self, take: Callable[[Tensor], Tensor]) -> "RowSharpening":
        other = copy(self)
        other._known = None
        for name in _OF_ROWS:
            setattr(other, name, take(getattr(self, name)))
        return other

    def first(self, rows: int) -> "RowSharpening":
        """A view of the first rows."""
        return self._with(lambda values: values[:rows])

    def put(self, rows: Sequence[int], other: "RowSharpening") -> None:
        """Replace some rows by all rows of another batch."""
        for place, value in zip(rows, other._values[: len(other)], strict=True):
            self._values[place] = value
        self._changes[0] += 1
        for name in _OF_ROWS:
            mine: Tensor = getattr(self, name)
            mine[torch.tensor(rows, device=mine.device)] = getattr(other, name)

    def move(self, source: int, target: int) -> None:
        """Copy a row to the place of another."""
        self._values[target] = self._values[source]
        self._changes[0] += 1
        for name in _OF_ROWS:
            mine: Tensor = getattr(self, name)
            mine[target] = mine[source]

    def at(self, rows: Tensor) -> "RowSharpening":
        """The sharpening of some rows, with repeats allowed."""
        other = self._with(lambda values: values[rows])
        other._known = self._changes[0], self.kinds  # a superset of its kinds
        return other

    @property
    def kinds(self) -> "_Kinds":
        """The kinds of sharpening among the rows. Recorded passes depend on them."""
        if self._known is None or self._known[0] != self._changes[0]:
            values = self._values[: len(self)]
            greedy = [each.is_greedy for each in values]
            kinds = _Kinds(
                tempered=any(each.temperature != 1.0 for each in values),
                top_k=any(each.top_k is not None and not each.is_greedy for each in values),
                nucleus=any(each.top_p < 1.0 and not each.is_greedy for each in values),
                some_greedy=any(greedy),
                all_greedy=all(greedy),
            )
            self._known = self._changes[0], kinds
        return self._known[1]

    def __call__(self, log_p: Tensor) -> Tensor:
        """log_p (rows, k, vocabulary), sharpened."""
        kinds = self.kinds
        if kinds.tempered:
            log_p = temper(log_p, _wide(self.temperature))
        if kinds.top_k or kinds.some_greedy:
            log_p = top_k(log_p, _wide(self.top_k))
        if kinds.nucleus:
            log_p = nucleus(log_p, _wide(self.top_p), inclusive=_wide(self.inclusive))
        return log_p

    def draw(self, log_p: Tensor, seeds: Tensor, positions: Tensor, *, repeat: int | Tensor = 0) -> Tensor:
        """Tokens (rows, k) for log_p (rows, k, vocabulary) at text positions (rows, k)."""
        uniform = counter_uniform(
            seeds.unsqueeze(1), positions, Purpose.TOKEN, log_p.shape[-1], repeat=repeat
        )
        return gumbel_max(self(log_p), uniform)

    def draw_logits(
        self, logits: Tensor, mask_id: int, seeds: Tensor, positions: Tensor, *, repeat: int | Tensor = 0
    ) -> Tensor:
        """Like `draw` of `subs_at_masks(logits, mask_id)`, but faster: on CUDA a kernel draws unless some row
        uses top_k, and a greedy row takes an argmax.

        `repeat` may be an int64 tensor of one element on the device of the logits. The kernel draws the same
        tokens as `draw` except where rounding decides. float64 logits always go to `draw`.
        """
        kinds = self.kinds
        if kinds.all_greedy:
            return _likeliest(logits, mask_id)
        by_kernel = runs_kernels(logits.device) and not kinds.top_k and logits.dtype != torch.float64
        if by_kernel:
            tokens = self._draw_by_kernel(logits, mask_id, seeds, positions, repeat)
        else:
            log_p = subs_at_masks(logits, mask_id)
            tokens = or_mask(self.draw(log_p, seeds, positions, repeat=repeat), log_p, mask_id)
        if kinds.some_greedy:
            greedy = (self.top_k == 1).unsqueeze(1)
            tokens = torch.where(greedy, _likeliest(logits, mask_id), tokens)
        return tokens

    def _draw_by_kernel(
        self, logits: Tensor, mask_id: int, seeds: Tensor, positions: Tensor, repeat: int | Tensor
    ) -> Tensor:
        from bd3lm.models.kernels import drawing as kernel  # Triton may be missing elsewhere

        if not isinstance(repeat, Tensor):
            repeat = _constant(repeat, logits.device)
        rows, places, vocabulary = logits.shape
        with torch.cuda.device(logits.device):  # Triton uses the current device
            tokens = kernel.draw(
                logits.reshape(rows * places, vocabulary),
                seeds.unsqueeze(1).expand(rows, places).reshape(-1),
                positions.expand(rows, places).reshape(-1),
                repeat.reshape(1),
                mask_id=mask_id,
                temperature=self.temperature,
                top_p=self.top_p if self.kinds.nucleus else None,
                inclusive=self.inclusive,
            )
        return tokens.view(rows, places)


class _Kinds(NamedTuple):
    """The kinds of sharpening among the rows of a batch."""

    tempered: bool
    top_k: bool
    nucleus: bool
    some_greedy: bool
    all_greedy: bool


_OF_ROWS = ("temperature", "top_p", "top_k", "inclusive")
_EVERY = 2**62  # more tokens than any vocabulary holds


def _wide(values: Tensor) -> Tensor:
    """One value a row, shaped to broadcast with (rows, k, vocabulary)."""
    return values.view(-1, 1, 1)


def _likeliest(logits: Tensor, mask_id: int) -> Tensor:
    """The token with the highest logit, the first of equal ones, and never the mask."""
    vocabulary = logits.shape[-1]
    if mask_id < vocabulary:
        column = torch.arange(vocabulary, device=logits.device)
        logits = logits.masked_fill(column == mask_id, -torch.inf)
    return or_mask(logits.argmax(-1), logits, mask_id)


def or_mask(tokens: Tensor, log_p: Tensor, mask_id: int) -> Tensor:
    """Tokens, with the mask in place of those with a NaN log_p (..., vocabulary).

    A softmax is NaN everywhere or nowhere, so one entry tells. No text may end with a mask in it: the loop
    checks this when it reads a finished text, so no pass has to ask the device. The GPU's drawing kernel
    computes no softmax; it reports logits that are all NaN, as those of a NaN hidden state are.
    """
    return torch.where(log_p[..., int(mask_id == 0)].isnan(), mask_id, tokens)


@cache  # never dropped, since a recorded pass reads it at its address
def _constant(number: int, device: torch.device) -> Tensor:
    """A number on a device, made once: in a pass over few tokens every launch counts."""
    return torch.full((1,), number, device=device)
