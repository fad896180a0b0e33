"""Speculation under the block law: copies of a block along the order in which its places are revealed.

The order and the noise of a block are fixed before the network runs. So one pass can hold the block as it is,
and copies of it as it will be if the next draft in order is right, the next two, and so on. Each copy gives
the token of the place that is revealed next, drawn with that place's noise. The tokens are the same as those
of `BlockWriter` with the same seed.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bd3lm.models import BlockCopies, BlockReading, Denoiser, KVCache, embed_with_previous
from bd3lm.sampling.blocks import BlockWriter
from bd3lm.sampling.chances import Chances
from bd3lm.sampling.request import Request
from bd3lm.sampling.rows import TALLY, Reveal, Rows
from bd3lm.sampling.speculation import Speculation
from bd3lm.sampling.unmasking import Adaptive, Ancestral, FirstHitting, Planned, Remasking, UnmaskingRule

# Names of the rows' extras. All are on the device: only the device knows how far a text has come.
_AT = "at"  # (rows,) the start of the current block; in a new text the given block before it, perhaps at −n
_KNOWN = "known"  # (rows,) how many places of that block, in their order, have their tokens
_END = "end"  # (rows,) the end of the finished blocks
_UNTIL = "until"  # (rows,) everything from here on is given
_FREE = "free"  # (rows, width) whether a token is to be written
_RANK = "rank"  # (rows, width) each place's number in the order of its block; given places come last
_DRAFTS = "drafts"  # (rows, n) guessed tokens at the places of the current block
_SPENT = "spent"  # (rows, 2) passes that wrote, and passes that only read

_BURST = 4  # passes between two reads of a GPU: about one block, and a read costs a fraction of a pass
_MOST_BY_ITSELF = 7  # copies if no number is given: more drafts are hardly ever right in a row


class SpeculativeBlockWriter(BlockWriter):
    """Writes the texts of `BlockWriter` in fewer passes.

    A pass reads the current block as if all its drafts were right, the next block fully masked behind it, and
    copies of the current block that hold none of its drafts, the first one in order, the first two, and so
    on. Each copy gives a token. The tokens up to and including the first that differs from its draft are
    written. The rest is guessed again, from the last right copy. If all drafts are right, the block is
    finished and cached, and the same pass has the first token of the next block and its drafts. So with as
    many copies as a block has drafts, a block takes one pass, and one more for each wrong draft.

    Only the device knows how far each text has come. The host reads it once per burst of passes.
    """

    def __init__(
        self,
        model: Denoiser,
        *,
        reading: BlockReading,
        context: int,
        speculation: Speculation,
        unmasking: UnmaskingRule | None = None,
        cache: bool = True,
    ) -> None:
        rule = FirstHitting() if unmasking is None else unmasking
        check_speculation(speculation, rule, cache=cache)
        if model.uses_noise:
            raise ValueError(
                "speculation must be off for a network that is told the noise level: the copies of a block "
                "have different levels, and a pass can tell only one"
            )
        super().__init__(model, reading=reading, context=context, unmasking=rule, cache=cache)
        if not self.window:
            raise ValueError(
                "speculation must be off for a network of one block, which caches no earlier text, got "
                f"block_size {self.block_size}, its whole context"
            )
        if not self.cached:
            raise ValueError("speculation must be off for a network that keeps no keys and values")
        if self.block_size == 1:
            raise ValueError(
                "speculation must be off for blocks of one token, which leave nothing to draft, got "
                "block_size 1"
            )
        self.copies = copies_for(speculation, self.block_size)
        self.layout = BlockCopies.of(self.block_size, self.copies, causal_clean=reading.causal_clean)

    @property
    def longest_pass(self) -> int:
        return self.layout.size

    def burst(self, device: torch.device) -> int:
        """Passes between two reads of a device. On a CPU reading costs nothing."""
        return _BURST if device.type == "cuda" else 1

    def check(self, request: Request) -> None:
        super().check(request)
        self.model.check_room(1, self.longest_pass)
        if not isinstance(self.unmasking, FirstHitting):  # whose plan always reveals one token a pass
            self._ranks(super().begin([request], width=self.width(request.length)))

    def begin(self, requests: Sequence[Request], *, width: int) -> Rows:
        rows = super().begin(requests, width=-(-width // self.block_size) * self.block_size)
        number, device = len(rows), rows.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(number, *shape, dtype=torch.long, device=device)

        ranks, free = self._ranks(rows)
        rows.extras = {
            _AT: (rows.start - self.block_size).to(device),
            _KNOWN: zeros(),
            # Copies, even if the device is the CPU.
            _END: rows.start.to(device, copy=True),
            _UNTIL: rows.written_to.to(device, copy=True),
            _FREE: free.to(device),
            _RANK: ranks.to(device),
            _DRAFTS: zeros(self.block_size),
            _SPENT: zeros(2),
            TALLY: zeros(2, self.copies),
        }
        return rows

    def _ranks(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Each place's number in the order of its block, and whether it is revealed: (rows, width)."""
        n, rule = self.block_size, self.unmasking
        if not isinstance(rule, Planned):
            raise RuntimeError(f"{rule} has no plan")
        masked = rows.gaps.view(-1, n)
        blocks = masked.shape[0] // len(rows)
        positions = torch.arange(blocks * n).view(blocks, n).repeat(len(rows), 1)
        ranks = torch.full_like(positions, -1)
        revealed = torch.zeros_like(ranks[:, 0])
        for step in rule.plan(rows.seeds.repeat_interleave(blocks), positions, masked):
            number = step.active.long().sum(1)
            if step.masked_again is not None or int(number.max()) > 1:
                raise ValueError(
                    "unmasking must reveal one token a pass, and mask none again, for speculation, which "
                    f"verifies tokens one after another in their order, got {rule}"
                )
            place = step.places.gather(1, step.active.long().argmax(1, keepdim=True))
            before = ranks.gather(1, place)
            ranks.scatter_(1, place, torch.where(number.unsqueeze(1) > 0, revealed.unsqueeze(1), before))
            revealed += number
        free = ranks >= 0
        given = revealed.unsqueeze(1) + (~free).long().cumsum(1) - 1
        return torch.where(free, ranks, given).view(len(rows), -1), free.view(len(rows), -1)

    def write(self, rows: Rows) -> Iterator[Reveal]:
        if rows.cache is None:
            raise RuntimeError("remember comes before write")
        before = rows.extras[_SPENT].clone()
        for _ in range(self.burst(rows.device)):
            yield rows.replay("round", partial(self._pass, rows, rows.cache))
        spent = rows.extras[_SPENT] - before
        # The only time the host waits for the device.
        end, evaluations, fills = torch.cat((rows.extras[_END].unsqueeze(1), spent), 1).cpu().unbind(1)
        rows.start.copy_(end)
        rows.evaluations += evaluations
        rows.fill_passes += fills

    def _pass(self, rows: Rows, cache: KVCache) -> Reveal:
        """Verify the drafts of every row, write the right ones, and draft again."""
        state, n = rows.extras, self.block_size
        here, after = (self._block(rows, state[_AT] + ahead) for ahead in (0, n))
        states = self.model(self._shown(rows, here, after), layout=self.layout, cache=cache)
        verdict = self._verdict(rows, here, states)
        rows.write(verdict.positions, verdict.tokens, where=verdict.written)
        is_last = state[_AT] + n >= state[_UNTIL]
        moves = verdict.is_all & ~is_last
        cache.advance(n * moves)
        # The next block if this one is finished, else this one, from the last right copy.
        block = _Block(*(torch.where(_like(moves, b), a, b) for a, b in zip(after, here, strict=True)))
        source = torch.where(moves, 0, 1 + verdict.accepted.clamp_max(self.copies - 1))
        places = (source * n).unsqueeze(1) + torch.arange(n, device=rows.device)
        drafts, logits = self._draw(rows, states, places, block.positions)
        # The first token of a block needs no draft.
        opens = (moves & (block.masks > 0)).unsqueeze(1)
        opening = block.order[:, :1]
        first = block.positions.gather(1, opening), drafts.gather(1, opening)
        rows.write(*first, where=opens)
        known = torch.where(moves, opens.long().squeeze(1), state[_KNOWN] + verdict.number)
        state[_AT].add_(n * moves)
        state[_KNOWN].copy_(known)
        state[_END].copy_(state[_AT] + n * (known == block.masks))
        state[_DRAFTS].copy_(drafts)
        has_written = (verdict.number > 0) | opens.squeeze(1)
        reads = moves & ~has_written
        state[_SPENT].add_(torch.stack((~reads, reads), 1))  # includes passes past the end of a text
        state[TALLY].add_(verdict.tally)
        chances = verdict.chances
        if chances is not None:
            opened = logits.gather(1, opening.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))
            also = Chances.of_logits(opened, self.mask_id, first[1], self.alternatives)
            chances = chances if also is None else chances.joined(also)
        return Reveal(
            torch.cat((verdict.positions, first[0]), 1),
            torch.cat((verdict.tokens, first[1]), 1),
            torch.cat((verdict.written, opens), 1),
            drafted=(block.positions, drafts, (block.rank >= known.unsqueeze(1)) & block.is_free),
            chances=chances,
        )

    def _block(self, rows: Rows, at: Tensor) -> "_Block":
        """The blocks that begin at `at` (rows,). Outside of a text there is nothing to write."""
        n, width = self.block_size, rows.text.shape[1]
        places = torch.arange(n, device=rows.device)
        positions = at.unsqueeze(1) + places
        is_inside = (positions >= 0) & (positions < width)
        positions = positions.clamp(0, width - 1)
        rank = rows.extras[_RANK].gather(1, positions)
        rank = torch.where(is_inside, rank, places)  # any order, so that it stays a permutation
        order = torch.zeros_like(rank).scatter_(1, rank, places.expand_as(rank))
        masks = (rows.extras[_FREE].gather(1, positions) & is_inside).sum(1)
        return _Block(positions, rows.text.gather(1, positions), rank, order, masks)

    def _shown(self, rows: Rows, here: "_Block", after: "_Block") -> Tensor:
        """The network's inputs, ids or vectors: the block with its drafts, the next block, and the copies."""
        known, drafts = rows.extras[_KNOWN].unsqueeze(1), rows.extras[_DRAFTS]
        held = (here.rank >= known) & here.is_free
        finished = torch.where(held, drafts, here.text)
        upto = known.unsqueeze(2) + torch.arange(self.copies, device=rows.device).view(1, -1, 1)
        in_copy = held.unsqueeze(1) & (here.rank.unsqueeze(1) < upto)
        copies = torch.where(in_copy, drafts.unsqueeze(1), here.text.unsqueeze(1))
        tokens = torch.cat((finished.unsqueeze(1), after.text.unsqueeze(1), copies), 1)
        if not self.reading.previous_token:
            return tokens.flatten(1)
        # If the first token of a text is masked, there is no token before it: use the mask itself.
        last = rows.text.gather(1, (here.positions[:, :1] - 1).clamp_min(0))
        first = torch.cat((last, finished[:, -1:], last.expand(-1, self.copies)), 1)
        before = torch.cat((first.unsqueeze(2), tokens[:, :, :-1]), 2)
        return embed_with_previous(
            self.model, tokens.flatten(1), before.flatten(1), blank=self.reading.mask_id
        )

    def _verdict(self, rows: Rows, here: "_Block", states: Tensor) -> "_Verdict":
        """Compare each copy's token, at the place that is revealed next, with its draft."""
        n, known = self.block_size, rows.extras[_KNOWN]
        copy = torch.arange(self.copies, device=rows.device)
        rank = known.unsqueeze(1) + copy
        # Past the end of the order, places repeat from its beginning, so that no place comes twice in a
        # write.
        place = here.order.gather(1, rank % n)
        positions = here.positions.gather(1, place)
        tokens, logits = self._draw(rows, states, (1 + copy) * n + place, positions)
        is_asked = rank < here.masks.unsqueeze(1)
        is_right = (is_asked & (tokens == rows.extras[_DRAFTS].gather(1, place))).long().cumprod(1)
        accepted = is_right.sum(1)
        left = here.masks - known
        number = torch.minimum(accepted + 1, left.clamp_max(self.copies))
        written = copy < number.unsqueeze(1)  # to be written, and all before it are right
        return _Verdict(
            positions,
            tokens,
            written,
            accepted,
            number,
            accepted == left,
            torch.stack((written, is_right), 1),
            Chances.of_logits(logits, self.mask_id, tokens, self.alternatives),
        )

    def _draw(self, rows: Rows, states: Tensor, places: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (rows, k) at text positions (rows, k), from the states at these places of the pass, and
        their logits."""
        asked = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        logits = self.model.head(asked)
        drawn = rows.sharpening.draw_logits(logits, self.mask_id, rows.noise_seeds, positions, repeat=0)
        return drawn, logits


class _Block(NamedTuple):
    """A block of every row: tensors (rows, n), except `masks`, the number of places to write (rows,)."""

    positions: Tensor
    text: Tensor
    rank: Tensor
    order: Tensor
    masks: Tensor

    @property
    def is_free(self) -> Tensor:
        return self.rank < self.masks.unsqueeze(1)


class _Verdict(NamedTuple):
    """What a pass finds about drafts: tensors (rows, copies) or (rows,)."""

    positions: Tensor
    tokens: Tensor
    written: Tensor
    accepted: Tensor
    """The number of right drafts, from the first in order."""
    number: Tensor
    """The number of tokens to write."""
    is_all: Tensor
    """Whether the whole block is now known to be right."""
    tally: Tensor
    """(rows, 2, copies)"""
    chances: Chances | None


def copies_for(speculation: Speculation, block_size: int) -> int:
    """How many drafts of a block a pass verifies. The first token of a block needs none.

    By default all of a small block and a few of a large one.
    """
    asked = _MOST_BY_ITSELF if speculation.drafts is None else speculation.drafts
    return min(asked, block_size - 1)


def check_speculation(speculation: Speculation, rule: UnmaskingRule, *, cache: bool) -> None:
    """Refuse settings with which the block law cannot be speculated."""
    if not speculation.is_on:
        raise ValueError("speculation.drafts must be at least 1, or None to choose a number, got 0")
    if speculation.scheme != "coupled":
        raise ValueError(
            "speculation.scheme must be coupled for blocks, since their drafts are verified with the noise "
            f"of their places, got {speculation.scheme!r}"
        )
    if speculation.candidates != 1:
        raise ValueError(
            "speculation.candidates must be 1 for blocks, since their copies hold one draft for each "
            f"place, got {speculation.candidates}"
        )
    if speculation.passes != 1:
        raise ValueError(
            "speculation.passes must be 1 for blocks, since the pass that verifies drafts also begins the "
            f"next block, got {speculation.passes}"
        )
    if not cache:
        raise ValueError("cache must be on for speculation, which needs it to verify drafts, got False")
    if isinstance(rule, Adaptive):
        raise ValueError(
            "unmasking must have an order that is known beforehand for speculation, such as first-hitting "
            f"with any lean: drafts are verified in that order, and what {rule} reveals depends on them"
        )
    if isinstance(rule, Remasking):
        raise ValueError(
            "unmasking must not mask tokens again for speculation: a draft is verified against the block "
            f"at the time when its place is revealed, which remasking would undo, got {rule}"
        )
    if isinstance(rule, Ancestral) or (isinstance(rule, FirstHitting) and rule.tokens_per_pass != 1):
        raise ValueError(
            "unmasking must reveal one token a pass for speculation, which verifies tokens one after "
            f"another in their order, got {rule}"
        )
    if not isinstance(rule, Planned):
        raise ValueError(f"unmasking must be a Planned rule for speculation, got {rule!r}")


def _like(flags: Tensor, other: Tensor) -> Tensor:
    """Flags (rows,), shaped to broadcast with (rows, n) or (rows,)."""
    return flags.unsqueeze(1) if other.ndim > 1 else flags
