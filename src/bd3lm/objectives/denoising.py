"""p(x^b | x_t^b, x^{<b}) for all blocks of a batch at once, the quantity that every block objective weighs.

Two algorithms give the same numbers: the vectorized single pass over x_noisy ⊕ x, and the paper's Algorithm
1, which first fills a KV store from the clean text and then denoises all blocks against it. The second can
denoise the same text many times after one clean pass.
"""

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import Masks, blocks_in
from bd3lm.models import (
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    BlockReading,
    Causal,
    Denoiser,
    KVTape,
    Layout,
    embed_with_previous,
    packed,
    send,
)
from bd3lm.objectives.base import TokenBatch, check_scored, token_nats

Algorithm = Literal["single_pass", "two_pass"]


class BlockDenoiser:
    """A network and a batch of texts in blocks, which computes the nats of masked tokens."""

    def __init__(
        self,
        model: Denoiser,
        batch: TokenBatch,
        reading: BlockReading,
        *,
        algorithm: Algorithm = "single_pass",
        next_token: bool = False,
    ) -> None:
        """With `next_token`, which needs causal clean text, clean outputs are kept for `next_token_nats`."""
        check_scored(batch, reading.mask_id)
        self.model, self.batch, self.reading, self.next_token = model, batch, reading, next_token
        self.blocks = blocks_in(batch.tokens.shape[1], reading.block_size)
        self._layouts: dict[tuple[Layout, int], Layout] = {}
        self._clean_states: Tensor | None = None
        self._tape: KVTape | None = None
        if algorithm == "two_pass" and model.cache_shape is None:
            raise ValueError(
                "algorithm must be single_pass for a network that does not store keys and values, got "
                "two_pass"
            )
        if algorithm == "two_pass" and (self.blocks > 1 or next_token):
            self._tape = self._record_clean()

    def nats(self, masked: Tensor, *, noise: Tensor | None = None) -> Tensor:
        """−log p(x_i | visible tokens of its block, x^{<b}) at masked tokens, 0 elsewhere.

        `masked` and the result are (rows, copies, length); `noise` is (rows, length). Output head and
        cross-entropy run at masked positions only: under SUBS a visible token has probability one.
        """
        batch = self.batch
        logits = self.model.head(self._states(_noisy(batch, masked, self.reading.mask_id), noise)[masked])
        targets = batch.tokens.unsqueeze(1).expand_as(masked)[masked]
        nats = token_nats(logits, targets, self.reading.mask_id)
        return nats.new_zeros(masked.shape).masked_scatter(masked, nats)

    def weighted_nats(self, masks: Masks, *, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Σ weight·nats, differentiable, and the nats (rows, copies, length), without gradient.

        The batch and the masks may be on the host while the network is on a GPU. Then the masked positions
        are known without reading from the GPU, and nothing waits for it.
        """
        number = int(masks.masked.sum())
        batch = self.batch.to(self.model.device)
        masked, weight = (send(each, self.model.device) for each in (masks.masked, masks.weight))
        index = torch.nonzero_static(masked.flatten(), size=number).squeeze(1)
        targets = batch.tokens.unsqueeze(1).expand_as(masked).flatten()[index]
        states = (
            self._states(_noisy(batch, masked, self.reading.mask_id), noise)
            .flatten(0, 2)
            .index_select(0, index)
        )
        total, nats = self.model.cross_entropy(
            states, targets, weight.flatten()[index], excluded=self.reading.mask_id
        )
        spread = nats.new_zeros(masked.numel()).index_copy(0, index, nats)
        return total, spread.view(masked.shape)

    def next_token_nats(self, weight: float) -> tuple[Tensor, Tensor]:
        """weight·Σ −log p(x^ℓ | x^{<ℓ}) over scored tokens, from the causal clean text of the last pass.

        The sum is differentiable. Its weighted terms (rows, length) have no gradient. The first token of a
        text has no term.
        """
        if self._clean_states is None:
            raise RuntimeError("next_token_nats needs next_token=True and a pass before it")
        tokens, scored = self._clean, send(self.batch.scored & ~self.batch.begins, self.model.device)
        states = self._clean_states[:, :-1].flatten(0, 1)
        weights = weight * scored[:, 1:].flatten().to(torch.promote_types(states.dtype, torch.float32))
        total, nats = self.model.cross_entropy(
            states, tokens[:, 1:].flatten(), weights, excluded=self.reading.mask_id
        )
        return total, F.pad((nats * weights).masked_fill(weights == 0, 0.0).view(tokens.shape[0], -1), (1, 0))

    def _states(self, noisy: Tensor, noise: Tensor | None) -> Tensor:
        """Hidden states of the noisy tokens (rows, copies, length, width)."""
        rows, copies, length = noisy.shape
        noise = None if noise is None else send(noise, self.model.device)
        shown = self._shown(noisy)
        if self.blocks == 1 and not self.next_token:  # no clean text to see: copies are just more rows
            repeated = None if noise is None else noise.repeat_interleave(copies, dim=0)
            layout = self._within_texts(Bidirectional(length), copies)
            states = self.model(shown.flatten(0, 1), layout=layout, noise=repeated)
            return states.unflatten(0, (rows, copies))
        inner = BlockDiffusion(
            length,
            self.reading.block_size,
            copies=copies,
            causal_clean=self.reading.causal_clean,
            read_clean=self.next_token and self._tape is None,
        )
        layout = self._within_texts(inner)
        shown = shown.flatten(1, 2)
        repeated = None if noise is None else noise.repeat(1, copies)
        if self._tape is None:
            clean = self.model.embed(self._clean) if self.reading.previous_token else self._clean
            with_clean = None if repeated is None else F.pad(repeated, (0, length))  # the clean text has none
            states = self.model(torch.cat((shown, clean), dim=1), layout=layout, noise=with_clean)
            if self.next_token:
                states, self._clean_states = states.split((inner.noisy, length), dim=1)
        else:
            states = self.model(shown, layout=layout, noise=repeated, cache=self._tape.replay())
        return states.unflatten(1, (copies, length))

    def _within_texts(self, layout: Layout, copies: int = 1) -> Layout:
        """The layout restricted to each text of the batch, cached for further passes. Copies are more
        rows."""
        documents = self.batch.documents
        if documents is None:
            return layout
        if (layout, copies) not in self._layouts:
            repeated = documents.repeat_interleave(copies, dim=0)
            self._layouts[layout, copies] = packed(layout, repeated, self.model.device)
        return self._layouts[layout, copies]

    @cached_property
    def _clean(self) -> Tensor:
        return send(self.batch.tokens, self.model.device)

    def _shown(self, noisy: Tensor) -> Tensor:
        """Noisy tokens (rows, copies, length) as the network's input: ids, or embedding vectors."""
        if not self.reading.previous_token:
            return noisy
        blank = self.reading.mask_id  # stands before a text
        begins = send(self.batch.begins, self.model.device)
        of_text = self._clean.roll(1, 1).masked_fill(begins, blank).unsqueeze(1)
        of_block = noisy.roll(1, -1).masked_fill(begins.unsqueeze(1), blank)
        new_block = torch.arange(noisy.shape[-1], device=noisy.device) % self.reading.block_size == 0
        return embed_with_previous(self.model, noisy, torch.where(new_block, of_text, of_block), blank=blank)

    def _record_clean(self) -> KVTape:
        """∅, K^{1:B}, V^{1:B} ← x_θ(x): the first pass of Algorithm 1."""
        clean = self._clean
        length = clean.shape[1]
        tape = KVTape()
        keys_only = not self.next_token
        layout = (
            Causal(length, keys_only=keys_only)
            if self.reading.causal_clean
            else BlockCausal(length, self.reading.block_size, keys_only=keys_only)
        )
        noise = torch.zeros_like(clean, dtype=torch.float32) if self.model.uses_noise else None
        states = self.model(clean, layout=self._within_texts(layout), noise=noise, cache=tape)
        self._clean_states = states if self.next_token else None
        return tape


def _noisy(batch: TokenBatch, masked: Tensor, mask_id: int) -> Tensor:
    """The text (rows, copies, length) with the mask in place of masked and absent tokens."""
    unseen = masked if batch.absent is None else masked | batch.absent.unsqueeze(1)
    return torch.where(unseen, mask_id, batch.tokens.unsqueeze(1))
