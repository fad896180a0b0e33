"""Full-sequence diffusion beyond its context: MDLM's strided decoding (Sahoo et al.)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bd3lm.diffusion import conditioning_noise
from bd3lm.models import Bidirectional, BlockReading, Denoiser
from bd3lm.sampling.denoising import Denoising
from bd3lm.sampling.rows import Reveal, Rows
from bd3lm.sampling.unmasking import FirstHitting, UnmaskingRule
from bd3lm.sampling.writer import Writer


class SlidingWriter(Writer):
    """Writes one context first, then `stride` tokens at a time, given the `context − stride` tokens before
    them.

    The network was trained only on whole contexts, so each stride is denoised inside a whole context, without
    a cache. Up to one context this samples MDLM's own distribution. The default stride is half a context,
    which for the paper's 1,024 tokens is its 512.
    """

    knows_chances = True

    def __init__(
        self,
        model: Denoiser,
        *,
        reading: BlockReading,
        context: int,
        stride: int | None = None,
        unmasking: UnmaskingRule | None = None,
    ) -> None:
        super().__init__(model, reading.mask_id)
        if reading.block_size != context:
            raise ValueError(
                f"reading must have one block of the whole context {context}, got blocks of "
                f"{reading.block_size}"
            )
        stride = -(-context // 2) if stride is None else stride
        if not 1 <= stride <= context:
            raise ValueError(f"stride must lie in 1..{context}, the context, got {stride}")
        if reading.previous_token and stride == context > 1:
            raise ValueError(
                f"stride must be below the context {context} for a network that sees the token before a "
                "masked one: it never saw a token before the first of a context"
            )
        self.context, self.stride = context, stride
        self.unmasking = unmasking or FirstHitting()
        self.denoising = Denoising(model, reading, self.unmasking)

    def first_start(self, given: int) -> int:
        if given < self.context:
            return 0
        return self.context + (given - self.context) // self.stride * self.stride

    def piece_end(self, start: int) -> int:
        return start + self.stride if start else self.context

    def write(self, rows: Rows) -> Iterator[Reveal]:
        end = rows.start + torch.where(rows.start == 0, self.context, self.stride)
        yield from self.denoising.fill(
            rows, end - self.context, (self._evaluate,), alternatives=self.alternatives
        )
        rows.start.copy_(end)

    def _evaluate(self, positions: Tensor, tokens: Tensor, mask_rate: Tensor) -> Tensor:
        noise = conditioning_noise(mask_rate) if self.model.uses_noise else None
        return self.model(tokens, layout=Bidirectional(self.context), noise=noise)
