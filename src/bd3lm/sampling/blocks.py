"""The block loop (the paper's Algorithm 2): one block at a time, after what the KV cache remembers.

The pass that writes a finished block into the cache is the first pass over the next: a block of n masked
tokens costs n passes with first-hitting steps, not n + 1.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import conditioning_noise
from bd3lm.models import BlockDecoding, BlockReading, Denoiser, KVCache, send
from bd3lm.sampling.denoising import Denoising, Evaluate
from bd3lm.sampling.request import Request
from bd3lm.sampling.rows import Reveal, Rows
from bd3lm.sampling.unmasking import FirstHitting, UnmaskingRule
from bd3lm.sampling.writer import FILL_CHUNK, Writer, fill_cache


class BlockwiseWriter(Writer):
    """What block loops share: where blocks begin, what a block sees, and how finished ones are remembered.

    A block sees the `window` tokens before it. Past that the cache slides: see `KVCache`. Without `cache`
    what a block sees is computed afresh in every pass, which within the window gives the same tokens, and
    past it another distribution: that of a network that never saw what has left the window. So it is for
    every network that keeps no keys and values.
    """

    def __init__(self, model: Denoiser, reading: BlockReading, *, window: int, cache: bool = True) -> None:
        super().__init__(model, reading.mask_id)
        self.reading, self.block_size = reading, reading.block_size
        self.window, self.cached = window, cache and model.cache_shape is not None

    def first_start(self, given: int) -> int:
        return given // self.block_size * self.block_size

    def piece_end(self, start: int) -> int:
        return start + self.block_size

    @property
    def longest_pass(self) -> int:
        """How many positions a pass has that writes."""
        return 2 * self.block_size

    def check(self, request: Request) -> None:
        if not self.window and request.length > self.block_size:
            raise ValueError(
                f"length must be at most the block size {self.block_size}, which is the network's whole "
                f"context, got {request.length}"
            )

    def unread(self, request: Request) -> int:
        return request.prompt_length(self.mask_id) if self.cached and self.window else 0

    def remember(self, rows: Rows) -> Iterator[None]:
        """Read all given blocks but the last, which the first pass over the next block reads."""
        n = self.block_size
        if not self.cached or not self.window:
            return
        window = min(self.window, rows.text.shape[1])  # short texts need no more memory than they have tokens
        chunk = max(min(FILL_CHUNK, window) // n, 2) * n
        rows.cache = self.model.new_cache(
            len(rows.start), segment=max(chunk, self.longest_pass), window=window
        )
        rows.cache.lead_in(torch.where(rows.start == 0, n, 0).to(rows.device))
        counts = (rows.start - n).clamp_min(0)
        rows.fill_passes += -(-counts // chunk)
        yield from fill_cache(self.model, rows.cache, rows.text, counts, chunk=chunk, layout=self._finished)

    def evaluators(self, rows: Rows, masked: Tensor) -> tuple[Evaluate, ...]:
        """The network over the next block of every row, of which `masked` (rows, n) is to be written."""
        if not self.window:
            return (self._alone,)
        if rows.cache is None:
            return (partial(self._recomputed, rows),)
        rows.fill_passes += ~masked.any(1)
        if not masked.any():  # all given: the block before has to be read all the same
            self._read_before(rows, rows.cache)
        return partial(self._after_reading, rows, rows.cache), partial(self._cached, rows.cache)

    def _alone(self, positions: Tensor, block: Tensor, mask_rate: Tensor) -> Tensor:
        """A block that sees nothing but itself."""
        return self.model(block, layout=self._written(self.block_size), noise=self._noise(mask_rate))

    def _after_reading(
        self, rows: Rows, cache: KVCache, positions: Tensor, block: Tensor, mask_rate: Tensor
    ) -> Tensor:
        """A pass that reads the block before too; with it that block enters the cache."""
        n, noise = self.block_size, self._noise(mask_rate)
        before = self._as(block, self._block_before(rows, positions))
        noise = None if noise is None else F.pad(noise, (n, 0))  # finished text has none
        states = self.model(
            torch.cat((before, block), dim=1), layout=self._written(2 * n), noise=noise, cache=cache
        )
        cache.advance(n)
        return states

    def _cached(self, cache: KVCache, positions: Tensor, block: Tensor, mask_rate: Tensor) -> Tensor:
        """A pass over the block alone, after what the cache holds."""
        return self.model(
            block, layout=self._written(self.block_size), noise=self._noise(mask_rate), cache=cache
        )

    def _read_before(self, rows: Rows, cache: KVCache) -> None:
        before = self._block_before(rows, send(rows.masked(rows.start, self.block_size)[1], rows.device))
        noise = torch.zeros(before.shape, device=before.device) if self.model.uses_noise else None
        self.model(before, layout=self._finished(self.block_size), noise=noise, cache=cache)
        cache.advance(self.block_size)

    def _block_before(self, rows: Rows, positions: Tensor) -> Tensor:
        """The block before these positions; anything for the first block of a text, as nothing sees it."""
        return rows.text.gather(1, (positions - self.block_size).clamp_min(0))

    def _recomputed(self, rows: Rows, positions: Tensor, block: Tensor, mask_rate: Tensor) -> Tensor:
        """A pass over all that a block sees, row by row: plain, and slow."""
        noise, states = self._noise(mask_rate), []
        for row, start in enumerate(rows.start.tolist()):
            seen = rows.text[row, max(start - self.window, 0) : start]
            tokens = torch.cat((self._as(block, seen), block[row])).unsqueeze(0)
            told = None if noise is None else F.pad(noise[row : row + 1], (len(seen), 0))
            states.append(self.model(tokens, layout=self._written(tokens.shape[1]), noise=told))
        return torch.cat(states)

    def _as(self, block: Tensor, finished: Tensor) -> Tensor:
        """Finished tokens in the form of the block that they precede: ids, or the vectors that embed them."""
        return self.model.embed(finished) if block.is_floating_point() else finished

    def _noise(self, mask_rate: Tensor) -> Tensor | None:
        """What a time-conditioned network is told of each token of a block, (rows, n)."""
        if not self.model.uses_noise:
            return None
        return conditioning_noise(mask_rate).unsqueeze(1).expand(-1, self.block_size)

    def _written(self, length: int) -> BlockDecoding:
        return BlockDecoding(length, self.block_size, causal_clean=self.reading.causal_clean)

    def _finished(self, length: int) -> BlockDecoding:
        return BlockDecoding(length, self.block_size, causal_clean=self.reading.causal_clean, keys_only=True)


class BlockWriter(BlockwiseWriter):
    """Block diffusion for any block size.

    With first-hitting steps, unsharpened and within the network's context, this is the law whose likelihood
    `evaluation.exact_likelihood` computes, of the same lean; with ancestral steps it is that of lean 0, in
    the limit of many. A given token inside a block is kept and the orders of reveal run over the others; a
    text that ends inside a block leaves what lies past its end masked.

    A block sees the `context − block_size` tokens before it.
    """

    knows_chances = True

    def __init__(
        self,
        model: Denoiser,
        *,
        reading: BlockReading,
        context: int,
        unmasking: UnmaskingRule | None = None,
        cache: bool = True,
    ) -> None:
        block_size = reading.block_size
        if context < 1 or context % block_size:
            raise ValueError(f"block_size must be a positive divisor of context {context}, got {block_size}")
        super().__init__(model, reading, window=context - block_size, cache=cache)
        self.unmasking = unmasking or FirstHitting()
        self.denoising = Denoising(model, reading, self.unmasking)

    def check(self, request: Request) -> None:
        try:
            super().check(request)
        except ValueError as error:
            raise ValueError(f"{error}; SlidingWriter goes further") from None

    def write(self, rows: Rows) -> Iterator[Reveal]:
        masked, _ = rows.masked(rows.start, self.block_size)
        recomputes = bool(self.window) and rows.cache is None
        yield from self.denoising.fill(
            rows,
            rows.start,
            self.evaluators(rows, masked),
            replay=not recomputes,
            alternatives=self.alternatives,
        )
        rows.start += self.block_size
