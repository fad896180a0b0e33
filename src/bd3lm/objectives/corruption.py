"""Whole texts, corrupted at one noise level each: what SEDD and D3PM share, over masks or uniform noise."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bd3lm.diffusion import (
    Absorbing,
    Draws,
    ForwardProcess,
    LevelSampler,
    Linear,
    Masks,
    NoiseSchedule,
    conditioning_noise,
)
from bd3lm.models import Bidirectional, Denoiser, send
from bd3lm.objectives.base import Objective, TokenBatch, check_scored
from bd3lm.objectives.places import Places


@dataclass(frozen=True, kw_only=True)
class CorruptionObjective(Objective):
    """One noise level a text, a network that sees all of it, and a forward process of either kind.

    `process` is over the network's whole vocabulary. To the uniform process the mask is a token like any
    other, into which text may turn, and which is never the text itself.

    The batch and its draws may be on the host while the network is on a GPU: texts are then corrupted there,
    and nothing waits for the GPU.
    """

    process: ForwardProcess
    mask_id: int
    schedule: NoiseSchedule = field(default_factory=Linear)
    levels: LevelSampler = field(default_factory=LevelSampler)

    def __post_init__(self) -> None:
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
        return self.levels.draw(rows, length, length, generator=generator, device=device)

    def checked(self, batch: TokenBatch, draws: Draws | None) -> Draws:
        """The draws, once they and the batch are known to fit."""
        if draws is None:
            raise ValueError("draws must be given: diffusion corrupts at random")
        rows, length = batch.tokens.shape
        if draws.levels.shape != (rows, 1) or draws.tokens.shape != (rows, length):
            raise ValueError(
                f"draws must be for {rows} rows of one block of {length} tokens, got levels of shape "
                f"{tuple(draws.levels.shape)} and tokens of shape {tuple(draws.tokens.shape)}"
            )
        check_scored(batch, self.mask_id)
        if batch.tokens.device.type == "cpu":  # looking at values would stall an accelerator
            self.process.check_ids(batch.tokens)
        if batch.absent is not None and not isinstance(self.process, Absorbing):
            raise ValueError(
                "absent tokens need the absorbing process: under uniform noise nothing says that a position "
                "is past the end of a text"
            )
        return draws

    def logits_at_masks(self, model: Denoiser, batch: TokenBatch, masks: Masks) -> tuple[Tensor, Places]:
        """Logits (masked tokens, V) of the one noisy copy, and where those tokens are."""
        if masks.mask_rate is None:
            raise RuntimeError("a masking rule that draws no time has no noise level")
        masked = masks.masked[:, 0]
        unseen = masked if batch.absent is None else masked | batch.absent
        noisy = torch.where(unseen, self.mask_id, batch.tokens)
        places = Places.of(masked, model.device)
        return self.logits(model, noisy, masks.mask_rate, places), places

    def logits(self, model: Denoiser, noisy: Tensor, mask_rate: Tensor, asked: Places) -> Tensor:
        """Logits (asked tokens, V) of noisy texts at mask rates (rows, 1)."""
        noise = send(conditioning_noise(mask_rate.squeeze(1)), model.device) if model.uses_noise else None
        states = model(send(noisy, model.device), layout=Bidirectional(noisy.shape[1]), noise=noise)
        logits = model.head(asked.pick(states))
        if logits.shape[-1] != self.process.vocab_size:
            raise ValueError(
                f"process must be over the network's {logits.shape[-1]} tokens, got {self.process.vocab_size}"
            )
        return logits
