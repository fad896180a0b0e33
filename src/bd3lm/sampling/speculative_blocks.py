"""The block law, several tokens a pass: copies of a block along the order in which its places are revealed.

Order and noise of a block are fixed before the network is asked. So one pass can hold the block as it stands
and, beside it, as it will stand if the next draft in order is right, the next two, and so on: each copy gives
the token of the place that is revealed next after it, drawn with the noise of that place. The tokens are
those of `BlockWriter` from the same seed.
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

# Rows' extras, all of them on the device, which alone knows how far a text is.
_AT = "at"  # (rows,) where the block under way begins; of a new text the given one before it, perhaps at −n
_KNOWN = "known"  # (rows,) how many places of that block, in their order, hold their tokens
_END = "end"  # (rows,) up to where blocks are finished
_UNTIL = "until"  # (rows,) from here on everything is given
_FREE = "free"  # (rows, width) where a token is to be written
_RANK = "rank"  # (rows, width) the number of each place in the order of its block; given places come last
_DRAFTS = "drafts"  # (rows, n) tokens guessed at the places of the block under way
_SPENT = "spent"  # (rows, 2) passes that wrote, and passes that only read

_BURST = 4  # passes between two looks at a GPU: about a block's, and a look costs a part of one
_MOST_BY_ITSELF = 7  # copies where no number is asked for: so many drafts in a row are hardly ever right


class SpeculativeBlockWriter(BlockWriter):
    """The texts of `BlockWriter`, in fewer passes.

    A pass reads the block under way as if all its drafts were right, the next block all masked behind it, and
    copies of the first that hold none of its drafts, the first one in order, the first two, and so on. Each
    copy gives a token; those up to the first that is not its draft are the block's, that one included. What
    follows is guessed again, from the last copy that is right. If all drafts were right, the block is
    finished and kept, and the pass has the first token of the next one and its drafts. So with as many copies
    as a block has drafts, it takes one pass, and one more for each wrong draft.

    How far each text is the device knows; the host looks once in a burst of passes.
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
                "stand at different levels, and a pass is told one"
            )
        super().__init__(model, reading=reading, context=context, unmasking=rule, cache=cache)
        if not self.window:
            raise ValueError(
                "speculation must be off for a network of one block, which keeps nothing of the text before, "
                f"got block_size {self.block_size}, its whole context"
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
        """Passes between two looks at a device. Elsewhere than on a GPU looking costs nothing."""
        return _BURST if device.type == "cuda" else 1

    def check(self, request: Request) -> None:
        super().check(request)
        self.model.check_room(1, self.longest_pass)
        if not isinstance(self.unmasking, FirstHitting):  # whose plan reveals one token a pass
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
            # Copies, also where the device is the host's own.
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
        """Of every place its number in the order of its block, and whether it is revealed: (rows, width)."""
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
                    f"verifies tokens one after another along their order, got {rule}"
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
        # The one look at the device.
        end, evaluations, fills = torch.cat((rows.extras[_END].unsqueeze(1), spent), 1).cpu().unbind(1)
        rows.start.copy_(end)
        rows.evaluations += evaluations
        rows.fill_passes += fills

    def _pass(self, rows: Rows, cache: KVCache) -> Reveal:
        """Verify the drafts of every row, write what is right, and draft again."""
        state, n = rows.extras, self.block_size
        here, after = (self._block(rows, state[_AT] + ahead) for ahead in (0, n))
        states = self.model(self._shown(rows, here, after), layout=self.layout, cache=cache)
        verdict = self._verdict(rows, here, states)
        rows.write(verdict.positions, verdict.tokens, where=verdict.written)
        is_last = state[_AT] + n >= state[_UNTIL]
        moves = verdict.is_all & ~is_last
        cache.advance(n * moves)
        # The next block, where this one is finished; else this one, from the last copy that is right.
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
        state[_SPENT].add_(torch.stack((~reads, reads), 1))  # one behind the end of a text was made too
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
        """The blocks that begin at `at` (rows,); before and behind a text there is nothing to write."""
        n, width = self.block_size, rows.text.shape[1]
        places = torch.arange(n, device=rows.device)
        positions = at.unsqueeze(1) + places
        is_inside = (positions >= 0) & (positions < width)
        positions = positions.clamp(0, width - 1)
        rank = rows.extras[_RANK].gather(1, positions)
        rank = torch.where(is_inside, rank, places)  # an order all the same
        order = torch.zeros_like(rank).scatter_(1, rank, places.expand_as(rank))
        masks = (rows.extras[_FREE].gather(1, positions) & is_inside).sum(1)
        return _Block(positions, rows.text.gather(1, positions), rank, order, masks)

    def _shown(self, rows: Rows, here: "_Block", after: "_Block") -> Tensor:
        """What the network reads: the block with its drafts, the next one, and the copies; ids or vectors."""
        known, drafts = rows.extras[_KNOWN].unsqueeze(1), rows.extras[_DRAFTS]
        held = (here.rank >= known) & here.is_free
        finished = torch.where(held, drafts, here.text)
        upto = known.unsqueeze(2) + torch.arange(self.copies, device=rows.device).view(1, -1, 1)
        in_copy = held.unsqueeze(1) & (here.rank.unsqueeze(1) < upto)
        copies = torch.where(in_copy, drafts.unsqueeze(1), here.text.unsqueeze(1))
        tokens = torch.cat((finished.unsqueeze(1), after.text.unsqueeze(1), copies), 1)
        if not self.reading.previous_token:
            return tokens.flatten(1)
        # Where the first token of a text is masked, a mask stands before it: itself.
        last = rows.text.gather(1, (here.positions[:, :1] - 1).clamp_min(0))
        first = torch.cat((last, finished[:, -1:], last.expand(-1, self.copies)), 1)
        before = torch.cat((first.unsqueeze(2), tokens[:, :, :-1]), 2)
        return embed_with_previous(
            self.model, tokens.flatten(1), before.flatten(1), blank=self.reading.mask_id
        )

    def _verdict(self, rows: Rows, here: "_Block", states: Tensor) -> "_Verdict":
        """Each copy's token, at the place that is revealed next after it, against its draft."""
        n, known = self.block_size, rows.extras[_KNOWN]
        copy = torch.arange(self.copies, device=rows.device)
        rank = known.unsqueeze(1) + copy
        # Past the end of the order stand others from its beginning: no place comes twice, and writes are one
        # for each.
        place = here.order.gather(1, rank % n)
        positions = here.positions.gather(1, place)
        tokens, logits = self._draw(rows, states, (1 + copy) * n + place, positions)
        is_asked = rank < here.masks.unsqueeze(1)
        is_right = (is_asked & (tokens == rows.extras[_DRAFTS].gather(1, place))).long().cumprod(1)
        accepted = is_right.sum(1)
        left = here.masks - known
        number = torch.minimum(accepted + 1, left.clamp_max(self.copies))
        written = copy < number.unsqueeze(1)  # asked, and all before it right
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
        """Tokens (rows, k) at text positions (rows, k), from the states at these places of the pass; and the
        logits that they were drawn from."""
        asked = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        logits = self.model.head(asked)
        drawn = rows.sharpening.draw_logits(logits, self.mask_id, rows.noise_seeds, positions, repeat=0)
        return drawn, logits


class _Block(NamedTuple):
    """A block of every row: (rows, n), but for the number of places that are to be written, (rows,)."""

    positions: Tensor
    text: Tensor
    rank: Tensor
    order: Tensor
    masks: Tensor

    @property
    def is_free(self) -> Tensor:
        return self.rank < self.masks.unsqueeze(1)


class _Verdict(NamedTuple):
    """What a pass says of drafts: (rows, copies), or (rows,)."""

    positions: Tensor
    tokens: Tensor
    written: Tensor
    accepted: Tensor
    """How many drafts are right, from the first in order on."""
    number: Tensor
    """How many tokens that gives."""
    is_all: Tensor
    """Whether no place of the block is left whose draft is not known to be right."""
    tally: Tensor
    """(rows, 2, copies)"""
    chances: Chances | None


def copies_for(speculation: Speculation, block_size: int) -> int:
    """How many drafts of a block a pass verifies. The first token of a block needs none.

    Where no number is asked for, all of a small block, and a few of a large one.
    """
    asked = _MOST_BY_ITSELF if speculation.drafts is None else speculation.drafts
    return min(asked, block_size - 1)


def check_speculation(speculation: Speculation, rule: UnmaskingRule, *, cache: bool) -> None:
    """Refuse what the block law cannot be speculated in."""
    if not speculation.is_on:
        raise ValueError("speculation.drafts must be at least 1, or None for as many as suit, got 0")
    if speculation.scheme != "coupled":
        raise ValueError(
            "speculation.scheme must be coupled for blocks, whose drafts are verified by the noise of their "
            f"places, got {speculation.scheme!r}"
        )
    if speculation.candidates != 1:
        raise ValueError(
            "speculation.candidates must be 1 for blocks, whose copies hold one draft a place, got "
            f"{speculation.candidates}"
        )
    if speculation.passes != 1:
        raise ValueError(
            "speculation.passes must be 1 for blocks, where what verifies drafts begins the next block too, "
            f"got {speculation.passes}"
        )
    if not cache:
        raise ValueError("cache must be on for speculation, which verifies drafts behind it, got False")
    if isinstance(rule, Adaptive):
        raise ValueError(
            "unmasking must have an order that is known beforehand for speculation, as first-hitting has "
            f"with any lean: drafts are verified along it, and what {rule} reveals depends on them"
        )
    if isinstance(rule, Remasking):
        raise ValueError(
            "unmasking must mask nothing again for speculation: a draft is verified by what stands when its "
            f"place is revealed, and that would have to be undone, got {rule}"
        )
    if isinstance(rule, Ancestral) or (isinstance(rule, FirstHitting) and rule.tokens_per_pass != 1):
        raise ValueError(
            "unmasking must reveal one token a pass for speculation, which verifies them one after another "
            f"along their order, got {rule}"
        )
    if not isinstance(rule, Planned):
        raise ValueError(f"unmasking must be a Planned rule for speculation, got {rule!r}")


def _like(flags: Tensor, other: Tensor) -> Tensor:
    """Flags (rows,) that broadcast with (rows, n), or with (rows,)."""
    return flags.unsqueeze(1) if other.ndim > 1 else flags
