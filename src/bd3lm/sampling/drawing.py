"""How a token is drawn from the network's distribution: sharpened or not, with each row's own noise."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from bd3lm.diffusion import Purpose, counter_uniform, gumbel_max, nucleus, subs_at_masks, temper, top_k
from bd3lm.diffusion.categorical import NucleusRule
from bd3lm.limits import check_temperature
from bd3lm.models import runs_kernels


@dataclass(frozen=True, kw_only=True)
class Sharpening:
    """Temperature, then top-k, then nucleus. The default changes nothing: tokens follow the model itself.

    The temperature 0 always takes the likeliest token, and becomes top_k=1, which does that.
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

    def draw(self, log_p: Tensor, seeds: Tensor, positions: Tensor, *, repeat: int | Tensor = 0) -> Tensor:
        """Tokens (rows, k) for log_p (rows, k, vocabulary) at text positions (rows, k)."""
        uniform = counter_uniform(
            seeds.unsqueeze(1), positions, Purpose.TOKEN, log_p.shape[-1], repeat=repeat
        )
        return gumbel_max(self(log_p), uniform)

    def draw_logits(
        self, logits: Tensor, mask_id: int, seeds: Tensor, positions: Tensor, *, repeat: int | Tensor = 0
    ) -> Tensor:
        """As `draw` of `subs_at_masks(logits, mask_id)`; on CUDA by a kernel, unless top_k is asked for.
        Where only the likeliest token is left, it is looked up.

        `repeat` may be an int64 tensor of one element on the device of the logits. The kernel's tokens are
        those of `draw` but where rounding decides; float64 logits go to `draw`.
        """
        if self.top_k == 1:
            return _likeliest(logits, mask_id)
        by_kernel = runs_kernels(logits.device) and self.top_k is None and logits.dtype != torch.float64
        if not by_kernel:
            log_p = subs_at_masks(logits, mask_id)
            return or_mask(self.draw(log_p, seeds, positions, repeat=repeat), log_p, mask_id)
        from bd3lm.models.kernels import drawing as kernel  # elsewhere there may be no Triton

        if not isinstance(repeat, Tensor):
            repeat = _constant(repeat, logits.device)
        rows, places, vocabulary = logits.shape
        with torch.cuda.device(logits.device):  # Triton's is the current one
            tokens = kernel.draw(
                logits.reshape(rows * places, vocabulary),
                seeds.unsqueeze(1).expand(rows, places).reshape(-1),
                positions.expand(rows, places).reshape(-1),
                repeat.reshape(1),
                mask_id=mask_id,
                temperature=self.temperature,
                top_p=self.top_p,
                inclusive=self.top_p_rule == "inclusive",
            )
        return tokens.view(rows, places)


def _likeliest(logits: Tensor, mask_id: int) -> Tensor:
    """The token of the highest logit, of equal ones the first; not the mask."""
    vocabulary = logits.shape[-1]
    if mask_id < vocabulary:
        column = torch.arange(vocabulary, device=logits.device)
        logits = logits.masked_fill(column == mask_id, -torch.inf)
    return or_mask(logits.argmax(-1), logits, mask_id)


def or_mask(tokens: Tensor, log_p: Tensor, mask_id: int) -> Tensor:
    """Tokens, with the mask in place of those whose log_p (..., vocabulary) is NaN.

    A softmax is NaN everywhere or nowhere, so one entry tells. No text may end with a mask, which the loop
    sees when it reads a finished one: nobody has to ask the device sooner. The drawing kernel of a GPU has no
    softmax, and tells where all logits are NaN, as those of a hidden state that is.
    """
    return torch.where(log_p[..., int(mask_id == 0)].isnan(), mask_id, tokens)


@lru_cache(maxsize=64)
def _constant(number: int, device: torch.device) -> Tensor:
    """A number on a device, made once: a pass of few tokens notices every launch."""
    return torch.full((1,), number, device=device)
