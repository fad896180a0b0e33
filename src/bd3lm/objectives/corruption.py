"""One noise level for each block: what SEDD and D3PM share, for masks or uniform noise."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import (
    Absorbing,
    Draws,
    ForwardProcess,
    LevelSampler,
    Linear,
    Masks,
    NoiseSchedule,
    blocks_in,
    conditioning_noise,
)
from bd3lm.models import Bidirectional, BlockDiffusion, Denoiser, packed, send
from bd3lm.objectives.base import Objective, TokenBatch, check_scored
from bd3lm.objectives.places import Places


@dataclass(frozen=True, kw_only=True)
class CorruptionObjective(Objective):
    """A noise level for each block, and a forward process of either kind (section 3.1): the sum of block
    bounds.

    The network sees all of a noisy block, and the clean text before it. One pass covers all blocks: the noisy
    ones next to the clean text, under the layout `BlockDiffusion`. Without a `block_size` a text is one
    block.

    `process` covers the network's whole vocabulary. For the uniform process the mask is an ordinary token,
    which noise can produce but which never occurs in the text itself.

    The batch and its draws may be on the host while the network is on a GPU. Then texts are corrupted on the
    host, and nothing waits for the GPU.
    """

    process: ForwardProcess
    mask_id: int
    schedule: NoiseSchedule = field(default_factory=Linear)
    levels: LevelSampler = field(default_factory=LevelSampler)
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if not 0 <= self.mask_id < self.process.vocab_size:
            raise ValueError(f"mask_id must lie in 0..{self.process.vocab_size - 1}, got {self.mask_id}")
        if not isinstance(self.process, Absorbing):
            return
        if self.process.mask_id != self.mask_id:
            raise ValueError(f"mask_id must be the process's, {self.process.mask_id}, got {self.mask_id}")
        if self.schedule.last_alpha > 0.0:
            raise ValueError(
                "schedule must end at α = 0 under the absorbing process, whose prior is all masks (the bound "
                f"would be infinite), got {self.schedule}"
            )

    @property
    def is_bound(self) -> bool:
        return self.levels.is_uniform

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> Draws:
        size = length if self.block_size is None else self.block_size
        return self.levels.draw(rows, length, size, generator=generator, device=device)

    def block_of(self, context: int) -> int:
        return context if self.block_size is None else self.block_size

    def checked(self, batch: TokenBatch, draws: Draws | None) -> Draws:
        """The draws, after checking that they fit the batch."""
        if draws is None:
            raise ValueError("draws must be given: diffusion corrupts at random")
        rows, length = batch.tokens.shape
        size = length if self.block_size is None else self.block_size
        blocks = blocks_in(length, size)
        if draws.levels.shape != (rows, blocks) or draws.tokens.shape != (rows, length):
            wanted = (
                f"one block of {length} tokens" if blocks == 1 else f"{length} tokens in blocks of {size}"
            )
            raise ValueError(
                f"draws must be for {rows} rows of {wanted}, got levels of shape "
                f"{tuple(draws.levels.shape)} and tokens of shape {tuple(draws.tokens.shape)}"
            )
        check_scored(batch, self.mask_id)
        if batch.tokens.device.type == "cpu":  # reading values would stall an accelerator
            self.process.check_ids(batch.tokens)
        if batch.absent is not None and not isinstance(self.process, Absorbing):
            absent = batch.absent.unflatten(1, (blocks, size))
            if blocks == 1 or bool((absent.any(-1) != absent.all(-1)).any()):
                raise ValueError(
                    "absent tokens need the absorbing process, or must be whole blocks: uniform noise cannot "
                    "mark that a position is past the end of a text"
                )
        return draws

    def logits_at_masks(self, model: Denoiser, batch: TokenBatch, masks: Masks) -> tuple[Tensor, Places]:
        """Logits (masked tokens, V) of the single noisy copy, and the places of those tokens."""
        if masks.mask_rate is None:
            raise RuntimeError("a masking rule that draws no time has no noise level")
        masked = masks.masked[:, 0]
        unseen = masked if batch.absent is None else masked | batch.absent
        noisy = torch.where(unseen, self.mask_id, batch.tokens)
        places = Places.of(masked, model.device)
        return self.logits(model, batch, noisy, masks.mask_rate, places), places

    def logits(
        self, model: Denoiser, batch: TokenBatch, noisy: Tensor, mask_rate: Tensor, asked: Places
    ) -> Tensor:
        """Logits (asked tokens, V) of the noisy blocks of texts, at mask rates (rows, blocks)."""
        logits = model.head(asked.pick(self._states(model, batch, noisy, mask_rate)))
        if logits.shape[-1] != self.process.vocab_size:
            raise ValueError(
                f"process must be over the network's {logits.shape[-1]} tokens, got {self.process.vocab_size}"
            )
        return logits

    def _states(self, model: Denoiser, batch: TokenBatch, noisy: Tensor, mask_rate: Tensor) -> Tensor:
        """Hidden states of the noisy tokens (rows, length, width)."""
        noise = send(conditioning_noise(mask_rate), model.device) if model.uses_noise else None
        length, blocks = noisy.shape[1], mask_rate.shape[1]
        noisy = send(noisy, model.device)
        if blocks == 1:  # there is no clean text to see, and all tokens share one noise level
            noise = None if noise is None else noise.squeeze(1)
            whole = packed(Bidirectional(length), batch.documents, model.device)
            return model(noisy, layout=whole, noise=noise)
        if noise is not None:  # the clean text has no noise
            noise = F.pad(per_token(noise, length), (0, length))
        layout = packed(BlockDiffusion(length, length // blocks), batch.documents, model.device)
        clean = send(batch.tokens, model.device)
        return model(torch.cat((noisy, clean), dim=1), layout=layout, noise=noise)


def per_token(per_block: Tensor, length: int) -> Tensor:
    """Per-block values (rows, blocks) repeated for each token (rows, length)."""
    return per_block.repeat_interleave(length // per_block.shape[1], dim=1)
