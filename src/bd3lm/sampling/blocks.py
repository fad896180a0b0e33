"""The block loop (the paper's Algorithm 2): one block at a time, after the blocks in the KV cache.

One pass both writes a finished block into the cache and begins the next. So a block of n masked tokens takes
n passes with first-hitting steps, not n + 1.
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
    """What block loops share: where blocks begin, what a block sees, and how finished blocks are cached.

    A block sees the `window` tokens before it. Past that the cache slides (see `KVCache`). Without `cache`,
    or for a network that keeps no keys and values, each pass computes the window again. Within the window
    this gives the same tokens. Past it the distribution differs: it is that of a network that never saw the
    tokens that have left the window.
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
        """The number of positions in a writing pass."""
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
        """Read all given blocks except the last, which the first pass over the next block reads."""
        n = self.block_size
        if not self.cached or not self.window:
            return
        window = min(self.window, rows.text.shape[1])  # a short text needs no more memory than it has tokens
        chunk = max(min(FILL_CHUNK, window) // n, 2) * n
        rows.cache = self.model.new_cache(
            len(rows.start), segment=max(chunk, self.longest_pass), window=window
        )
        rows.cache.lead_in(torch.where(rows.start == 0, n, 0).to(rows.device))
        counts = (rows.start - n).clamp_min(0)
        rows.fill_passes += -(-counts // chunk)
        yield from fill_cache(self.model, rows.cache, rows.text, counts, chunk=chunk, layout=self._finished)

    def evaluators(self, rows: Rows, masked: Tensor) -> tuple[Evaluate, ...]:
        """The network over the next block of every row; `masked` (rows, n) are the places to write."""
        if not self.window:
            return (self._alone,)
        if rows.cache is None:
            return (partial(self._recomputed, rows),)
        rows.fill_passes += ~masked.any(1)
        if not masked.any():  # all given: the block before must still be read
            self._read_before(rows, rows.cache)
        return partial(self._after_reading, rows, rows.cache), partial(self._cached, rows.cache)

    def _alone(self, positions: Tensor, block: Tensor, mask_rate: Tensor) -> Tensor:
        """A pass over a block that sees only itself."""
        return self.model(block, layout=self._written(self.block_size), noise=self._noise(mask_rate))

    def _after_reading(
        self, rows: Rows, cache: KVCache, positions: Tensor, block: Tensor, mask_rate: Tensor
    ) -> Tensor:
        """A pass that also reads the block before, which enters the cache."""
        n, noise = self.block_size, self._noise(mask_rate)
        before = self._as(block, self._block_before(rows, positions))
        noise = None if noise is None else F.pad(noise, (n, 0))  # finished text has no noise
        states = self.model(
            torch.cat((before, block), dim=1), layout=self._written(2 * n), noise=noise, cache=cache
        )
        cache.advance(n)
        return states

    def _cached(self, cache: KVCache, positions: Tensor, block: Tensor, mask_rate: Tensor) -> Tensor:
        """A pass over the block alone, after the cache."""
        return self.model(
            block, layout=self._written(self.block_size), noise=self._noise(mask_rate), cache=cache
        )

    def _read_before(self, rows: Rows, cache: KVCache) -> None:
        before = self._block_before(rows, send(rows.masked(rows.start, self.block_size)[1], rows.device))
        noise = torch.zeros(before.shape, device=before.device) if self.model.uses_noise else None
        self.model(before, layout=self._finished(self.block_size), noise=noise, cache=cache)
        cache.advance(self.block_size)

    def _block_before(self, rows: Rows, positions: Tensor) -> Tensor:
        """The block before these positions. For the first block of a text it is arbitrary, since nothing sees
        it."""
        return rows.text.gather(1, (positions - self.block_size).clamp_min(0))

    def _recomputed(self, rows: Rows, positions: Tensor, block: Tensor, mask_rate: Tensor) -> Tensor:
        """A pass over everything that a block sees, row by row. Simple and slow."""
        noise, states = self._noise(mask_rate), []
        for row, start in enumerate(rows.start.tolist()):
            seen = rows.text[row, max(start - self.window, 0) : start]
            tokens = torch.cat((self._as(block, seen), block[row])).unsqueeze(0)
            told = None if noise is None else F.pad(noise[row : row + 1], (len(seen), 0))
            states.append(self.model(tokens, layout=self._written(tokens.shape[1]), noise=told))
        return torch.cat(states)

    def _as(self, block: Tensor, finished: Tensor) -> Tensor:
        """Finished tokens in the same form as the block after them: ids, or embedding vectors."""
        return self.model.embed(finished) if block.is_floating_point() else finished

    def _noise(self, mask_rate: Tensor) -> Tensor | None:
        """The noise levels (rows, n) that a time-conditioned network gets for the tokens of a block."""
        if not self.model.uses_noise:
            return None
        return conditioning_noise(mask_rate).unsqueeze(1).expand(-1, self.block_size)

    def _written(self, length: int) -> BlockDecoding:
        return BlockDecoding(length, self.block_size, causal_clean=self.reading.causal_clean)

    def _finished(self, length: int) -> BlockDecoding:
        return BlockDecoding(length, self.block_size, causal_clean=self.reading.causal_clean, keys_only=True)


class BlockWriter(BlockwiseWriter):
    """Block diffusion for any block size.

    Unsharpened first-hitting steps within the network's context sample the distribution that
    `evaluation.exact_likelihood` computes, for the same lean. Ancestral steps sample that of lean 0, in the
    limit of many. Given tokens inside a block are kept, and the order of reveal covers the others. If a text
    ends inside a block, the places past its end stay masked.

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
            raise ValueError(f"{error}; SlidingWriter can write longer texts") from None

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
