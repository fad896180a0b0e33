"""Fixed steps over a block at a time or a whole context: the loop that SEDD's and D3PM's samplers share."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from bd3lm.diffusion import (
    Absorbing,
    ForwardProcess,
    NoiseSchedule,
    Purpose,
    conditioning_noise,
    counter_uniform,
)
from bd3lm.models import Bidirectional, BlockReading, Denoiser, send
from bd3lm.sampling.blocks import BlockwiseWriter
from bd3lm.sampling.denoising import Evaluate
from bd3lm.sampling.drawing import RowSharpening, Sharpening, or_mask
from bd3lm.sampling.request import Request
from bd3lm.sampling.rows import Reveal, Rows

_NONE = Sharpening()


class StepwiseWriter(BlockwiseWriter):
    """Steps from noise at t = 1 to text at t = 0, one block after another, each after clean text.

    Without a `block_size` the block is the context, and longer texts are refused. A block sees the `context −
    block_size` tokens before it.

    Given tokens are kept. If a text ends inside a block, the absorbing process leaves the places past its end
    masked. Uniform noise has no mask, so there the whole block is written, then cut.

    A step first decides for each token whether it changes, then what the changed tokens become. This samples
    the same distribution as one draw from the step, without a random number for every token of the
    vocabulary. A network that ignores time runs again only for texts that the last step has changed.
    """

    sharpens_steps: ClassVar[bool] = True
    """Whether a request's sharpening applies to what tokens become in a step, or else to the network's
    guess."""

    def __init__(
        self,
        model: Denoiser,
        *,
        process: ForwardProcess,
        mask_id: int,
        context: int,
        steps: int,
        schedule: NoiseSchedule,
        block_size: int | None,
        cache: bool,
    ) -> None:
        """`steps` counts all steps down to t = 0."""
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        if not 0 <= mask_id < process.vocab_size:
            raise ValueError(f"mask_id must lie in 0..{process.vocab_size - 1}, got {mask_id}")
        size = context if block_size is None else block_size
        if size < 1 or context % size:
            raise ValueError(f"block_size must be a positive divisor of context {context}, got {size}")
        reading = BlockReading(block_size=size, mask_id=mask_id)
        super().__init__(model, reading, window=context - size, cache=cache)
        self.process, self.steps = process, steps
        rate = schedule.mask_rate(torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64))
        rate[0], rate[-1] = 1.0 - schedule.last_alpha, 0.0
        self.mask_rates = rate

    @abstractmethod
    def moves(
        self, logits: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor, sharpening: RowSharpening
    ) -> tuple[Tensor, Tensor]:
        """P(x_s ≠ x_t) (rows, n) and log p(x_s | x_s ≠ x_t) (rows, n, V); α_s and α_t are (rows, n).

        `sharpening` is for a method that sharpens its network's guess instead of its steps.

        At α_s = 1 a chance of 1 may come with the whole log p(x_s): the draw may then be x_t itself.
        """

    def check(self, request: Request) -> None:
        if not self.window and request.length > self.block_size:
            raise ValueError(
                f"length must be at most {self.block_size}, the network's whole context, got {request.length}"
            )

    def write(self, rows: Rows) -> Iterator[Reveal]:
        gaps, places = rows.masked(rows.start, self.block_size)
        evaluators = self.evaluators(rows, gaps)
        if gaps.any():
            yield from self._steps(rows, gaps, places, evaluators)
        rows.start += self.block_size

    def _steps(
        self, rows: Rows, gaps: Tensor, places: Tensor, evaluators: tuple[Evaluate, ...]
    ) -> Iterator[Reveal]:
        """All steps over the next block of every row; `gaps` (rows, n) are the places to write."""
        seeds, absorbing = rows.noise_seeds, isinstance(self.process, Absorbing)
        # Noise without masks extends past the end of a text, in rows that write in this block.
        past_end = gaps.any(1, keepdim=True) & (places >= rows.stop.unsqueeze(1))
        inside, free, positions = (
            send(each, rows.device) for each in (gaps, gaps if absorbing else gaps | past_end, places)
        )
        text = rows.text.gather(1, positions)
        if not absorbing:
            text = torch.where(free, self._prior(seeds, positions), text)
            yield Reveal(positions, text, inside)
        stale = torch.ones(len(text), dtype=torch.bool, device=rows.device)
        logits: Tensor | None = None
        for step in range(1, self.steps + 1):
            waiting = free & (text == self.mask_id) if absorbing else free
            if not waiting.any():
                break
            asked = waiting.any(1) & stale
            rate_t, rate_s = self.mask_rates[step - 1], self.mask_rates[step]
            if logits is None or asked.any():
                # The first pass also reads the block before.
                evaluate = evaluators[0] if logits is None else evaluators[-1]
                logits = self._logits(evaluate, positions, text, rate_t)
            rows.evaluations += asked.cpu()
            alpha_s, alpha_t = ((1.0 - rate).to(text.device).expand(text.shape) for rate in (rate_s, rate_t))
            chance, log_p = self.moves(logits, text, alpha_s, alpha_t, rows.sharpening)
            uniform = counter_uniform(seeds.unsqueeze(1), positions, Purpose.ORDER, 1, repeat=step)
            moved = waiting & ~(uniform.squeeze(-1) > chance)  # so that NaN moves, and is detected
            drawn = text.masked_scatter(moved, self._draw(rows, log_p, moved, positions, step))
            changed = drawn != text
            text = drawn
            stale = changed.any(1) | self.model.uses_noise
            yield Reveal(positions, text, changed & inside)
        rows.write(positions, text, where=free)

    def _prior(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Tokens (rows, n) of uniform noise from each row's own numbers. Steps count from 1."""
        uniform = counter_uniform(seeds.unsqueeze(1), positions, Purpose.TOKEN, 1).squeeze(-1)
        everywhere = torch.ones_like(uniform)
        return self.process.corrupt_at(torch.zeros_like(positions), everywhere, uniform)

    def _logits(self, evaluate: Evaluate, positions: Tensor, text: Tensor, mask_rate: Tensor) -> Tensor:
        logits = self.model.head(evaluate(positions, text, mask_rate.to(text.device).expand(len(text))))
        if logits.shape[-1] != self.process.vocab_size:
            raise ValueError(
                f"process must be over the network's {logits.shape[-1]} tokens, got {self.process.vocab_size}"
            )
        return logits

    def _alone(self, positions: Tensor, block: Tensor, mask_rate: Tensor) -> Tensor:
        """A whole context, as in training: nothing is clean, and a text has a single noise level."""
        noise = conditioning_noise(mask_rate) if self.model.uses_noise else None
        return self.model(block, layout=Bidirectional(self.block_size), noise=noise)

    def _draw(self, rows: Rows, log_p: Tensor, moved: Tensor, positions: Tensor, step: int) -> Tensor:
        """New values (moved,) for the tokens that change."""
        row = moved.nonzero()[:, 0]
        log_moved = log_p[moved].unsqueeze(1)
        places = positions[moved].unsqueeze(1)
        sharpening = rows.sharpening.at(row) if self.sharpens_steps else _NONE.rows(1, places.device)
        drawn = sharpening.draw(log_moved, rows.noise_seeds[row], places, repeat=step)
        return or_mask(drawn, log_moved, self.mask_id).squeeze(1)


def split(p: Tensor, x_t: Tensor) -> tuple[Tensor, Tensor]:
    """A step's distribution p (..., V) as the chance to leave x_t, and the log probabilities of where to."""
    leaving = p.scatter(-1, x_t.unsqueeze(-1), 0.0)
    chance = leaving.sum(-1)
    total = p.sum(-1)
    return chance / total, torch.log(leaving / chance.unsqueeze(-1).clamp_min(torch.finfo(p.dtype).tiny))
