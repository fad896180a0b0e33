"""SSD-LM's decoding (Han et al., arXiv 2210.17432, section 3.2): T steps of Gaussian diffusion for each
block."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from bd3lm.diffusion import (
    Projection,
    Purpose,
    SamplingProjection,
    SquaredCosine,
    add_noise,
    almost_one_hot,
    counter_uniform,
    subs_at_masks,
)
from bd3lm.models import BlockReading, Denoiser, send
from bd3lm.sampling.blocks import BlockwiseWriter
from bd3lm.sampling.drawing import or_mask
from bd3lm.sampling.rows import Reveal, Rows


class SimplexWriter(BlockwiseWriter):
    """Writes block by block, all tokens of a block together, with `steps` passes for each block.

    A block starts as noise. A pass at step t gives distributions over tokens. These are projected onto almost
    one-hot vectors, which together with the noise of step t − 1 form the next input. The tokens are the
    likeliest ones of the last pass, for every projection, as in SSD-LM's code. By then they are nearly
    decided; texts differ because of the noise and the sampling projection. All tokens are written at once.

    The distribution of texts has no tractable likelihood. A given token is kept and enters its block as its
    almost one-hot vector, and places past the end of a text are masks, both as in `SimplexDiffusionLoss`.
    `steps` may differ from training. They count as evaluations of a row for each block with tokens to write,
    even if the text ends inside it.

    `context` need not be a multiple of the block size. A block sees as many blocks before it as the last one
    of a context does: 40 for a context of 1,024 tokens and blocks of 25.
    """

    def __init__(
        self,
        model: Denoiser,
        *,
        block_size: int,
        mask_id: int,
        context: int,
        steps: int = 1000,
        projection: Projection | None = None,
        simplex_scale: float = 5.0,
        schedule: SquaredCosine | None = None,
        cache: bool = True,
    ) -> None:
        for name, value in (("context", context), ("steps", steps)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0.0 < simplex_scale < math.inf:
            raise ValueError(f"simplex_scale must be positive and finite, got {simplex_scale}")
        reading = BlockReading(block_size=block_size, mask_id=mask_id)
        super().__init__(model, reading, window=(context - 1) // block_size * block_size, cache=cache)
        self.steps, self.simplex_scale = steps, simplex_scale
        self.projection = projection or SamplingProjection()
        self.schedule = schedule or SquaredCosine()

    def write(self, rows: Rows) -> Iterator[Reveal]:
        gaps, places = rows.masked(rows.start, self.block_size)
        first, *again = self.evaluators(rows, gaps)
        if gaps.any():
            masked, positions = (send(each, rows.device) for each in (gaps, places))
            block = rows.text.gather(1, positions)
            fixed = self._fixed(block)
            times = torch.arange(self.steps, -1, -1, dtype=torch.float64, device=block.device) / self.steps
            alpha_bar = self.schedule.alpha_bar(times)
            w = self.simplex_scale * self._normal(rows, positions, step=0)
            for step in range(1, self.steps + 1):
                noisy = torch.where(masked.unsqueeze(-1), self.model.embed(w.softmax(-1)), fixed)
                evaluate = again[0] if again and step > 1 else first
                states = evaluate(positions, noisy, (1.0 - alpha_bar[step - 1]).expand(len(block)))
                log_p = subs_at_masks(self.model.head(states), self.mask_id)
                rows.evaluations += gaps.any(1)
                if step < self.steps:
                    w = self._step(rows, positions, log_p, alpha_bar[step], step)
            block = torch.where(masked, or_mask(log_p.argmax(-1), log_p, self.mask_id), block)
            rows.text.scatter_(1, positions, block)
            yield Reveal(positions, block, masked)
        rows.start += self.block_size

    def _step(self, rows: Rows, positions: Tensor, log_p: Tensor, alpha_bar: Tensor, step: int) -> Tensor:
        """w̃_{t−1} = √ᾱ_{t−1} · ŵ + √(1 − ᾱ_{t−1}) · z."""
        uniform = None
        if self.projection.draws:
            uniform = self._uniform(rows, positions, Purpose.TOKEN, step)
        w_hat = self.projection(log_p, self.simplex_scale, uniform)
        normal = self._normal(rows, positions, step=step)
        return add_noise(w_hat, alpha_bar.expand(positions.shape), normal, self.simplex_scale)

    def _normal(self, rows: Rows, positions: Tensor, *, step: int) -> Tensor:
        """Standard normal numbers (rows, n, vocabulary) from each row's own stream."""
        return torch.special.ndtri(self._uniform(rows, positions, Purpose.NOISE, step))

    def _uniform(self, rows: Rows, positions: Tensor, purpose: Purpose, step: int) -> Tensor:
        return counter_uniform(
            rows.noise_seeds.unsqueeze(1), positions, purpose, self.model.vocab_size, repeat=step
        )

    def _fixed(self, block: Tensor) -> Tensor:
        """The inputs for tokens that are not written: almost one-hot given tokens, and masks past the end.

        Tokens to be written are masks here too, which noise replaces.
        """
        given = almost_one_hot(block, self.model.vocab_size, self.simplex_scale).softmax(-1)
        is_mask = (block == self.mask_id).unsqueeze(-1)
        return torch.where(is_mask, self.model.embed(block), self.model.embed(given))
