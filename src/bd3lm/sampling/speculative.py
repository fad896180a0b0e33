"""Speculation under the causal law: masks behind the text draft tokens, and the network itself verifies
them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from bd3lm.models import Causal, Denoiser, Drafting, DraftReading, KVCache, Layout
from bd3lm.sampling.autoregressive import AutoregressiveWriter
from bd3lm.sampling.chances import Chances
from bd3lm.sampling.pacing import Pacing
from bd3lm.sampling.request import Request
from bd3lm.sampling.rows import TALLY, Reveal, Rows
from bd3lm.sampling.speculation import Speculation
from bd3lm.sampling.verifying import (
    Ahead,
    Drawing,
    Tree,
    Verdict,
    coupled_drafts,
    coupled_verdict,
    rejection_drafts,
    rejection_verdict,
)

# Names of the rows' extras. All are on the device: only the device knows how far a text has come.
_AT = "at"  # (rows,) the position of the next token
_STOP = "stop"  # (rows,)
_FREE = "free"  # (rows, width) whether a token is to be written
_HAVE = "have"  # (rows,) the number of places with drafts
_DRAFTS = "drafts"  # (rows, drafts) in the order of a tree
_LOG_Q = "log_q"  # (rows, places, vocabulary) the distributions of the drafts, if needed
_SPENT = "spent"  # (rows, 2) passes that wrote, and passes that only read


_LONGEST_PASS = 1024  # positions, far more than pay off


@dataclass(frozen=True)
class _Shape:
    """The shape of a pass: the drafts that it verifies, and the masks behind each for the next drafts."""

    tree: Tree
    masks: int

    @property
    def layout(self) -> Layout:
        # Without drafts, use the layout of plain sampling, which has kernels of its own.
        return Drafting.of(self.tree.parents, self.masks) if self.tree.size or self.masks else Causal(1)


class SpeculativeWriter(AutoregressiveWriter):
    """Writes the texts of `AutoregressiveWriter`, or with the scheme rejection other texts of the same law.

    A round verifies the drafts of the round before, and makes new ones. In a single pass, masks stand behind
    the last token and behind every draft, so whichever draft is the last right one has new guesses behind it.
    With two passes a round, the first drafts and the second verifies.

    Only the device knows how far each text has come. The host reads it once per burst of rounds.
    """

    def __init__(
        self,
        model: Denoiser,
        *,
        reading: DraftReading,
        speculation: Speculation,
        context: int,
        score_first: bool = False,
    ) -> None:
        super().__init__(model, mask_id=reading.mask_id, context=context, score_first=score_first)
        if not self.cached:
            raise ValueError(
                "speculation must be off for a network that keeps no keys and values, or sees no earlier text"
            )
        if speculation.drafts is None:
            self._pacing: Pacing | None = Pacing(min(len(reading.places), context - 1))
            most = self._pacing.most
        else:
            self._pacing, most = None, speculation.drafts
        if not 1 <= most < context:
            raise ValueError(
                f"speculation.drafts must be 1 to {context - 1}, less than the context, got {most}"
            )
        if speculation.candidates >= model.vocab_size:
            raise ValueError(
                f"speculation.candidates must be less than the {model.vocab_size} tokens of the vocabulary, "
                f"got {speculation.candidates}"
            )
        self.reading, self.speculation = reading, speculation
        self.rejects = speculation.scheme == "rejection"
        self._most = Tree(most, speculation.candidates)
        if self.longest_pass > _LONGEST_PASS:
            raise ValueError(
                f"speculation must keep a pass to {_LONGEST_PASS:,} positions, which are drafts times "
                f"candidates times the masks behind each, got {self.longest_pass:,}; ask for fewer drafts"
            )

    def check(self, request: Request) -> None:
        super().check(request)
        self.model.check_room(1, self.longest_pass)

    def begin(self, requests: Sequence[Request], *, width: int) -> Rows:
        # A pass reads places past the end of a text; nothing is written there.
        rows = super().begin(requests, width=width + self._most.drafts + 1)
        number, device, most = len(rows), rows.device, self._most

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(number, *shape, dtype=torch.long, device=device)

        rows.extras = {
            # Copies, even if the device is the CPU.
            _AT: rows.start.to(device, copy=True),
            _STOP: rows.stop.to(device, copy=True),
            _FREE: rows.gaps.to(device, copy=True),
            _HAVE: zeros(),
            _DRAFTS: zeros(most.size),
            _SPENT: zeros(2),
            TALLY: zeros(2, most.drafts),
        }
        if self.rejects:
            is_double = self.model.embed(rows.text[:1, :1]).dtype == torch.float64
            rows.extras[_LOG_Q] = torch.zeros(
                (number, most.drafts, self.model.vocab_size),
                dtype=torch.float64 if is_double else torch.float32,
                device=device,
            )
        return rows

    @property
    def longest_pass(self) -> int:
        return max(shape.layout.size for shape in self._shapes(self._most))

    def write(self, rows: Rows) -> Iterator[Reveal]:
        if rows.cache is None:
            raise RuntimeError("remember comes before write")
        pacing = self._pacing
        tree = self._most if pacing is None else Tree(pacing.choose(len(rows)), self._most.candidates)
        shapes = self._shapes(tree)
        names = [("round", shape) for shape in shapes]
        is_typical = all(rows.is_ready(name) for name in names)
        before = torch.cat((rows.extras[_SPENT], rows.extras[TALLY].flatten(1)), 1)
        seconds = 0.0  # excluding the consumer of the reveals
        clock = time.perf_counter if pacing is None else pacing.clock
        for _ in range(_bursts(rows.device)):
            for name, shape in zip(names, shapes, strict=True):
                begin = clock()
                reveal = rows.replay(name, partial(self._pass, rows, rows.cache, shape))
                seconds += clock() - begin
                yield reveal
        begin = clock()
        spent = torch.cat((rows.extras[_SPENT], rows.extras[TALLY].flatten(1)), 1) - before
        # The only time the host waits for the device.
        found = torch.cat((rows.extras[_AT].unsqueeze(1), spent), 1).cpu()
        seconds += clock() - begin
        rows.start.copy_(found[:, 0])
        rows.evaluations += found[:, 1]
        rows.fill_passes += found[:, 2]
        if pacing is not None:
            asked, right = found[:, 3:].sum(0).view(2, -1).tolist()
            pacing.note(len(rows), tree.drafts, seconds if is_typical else None, asked, right)

    def _shapes(self, tree: Tree) -> tuple[_Shape, ...]:
        """The passes of a round that verifies this tree."""
        masks = self.reading.masks_for(tree.drafts)
        if self.speculation.passes == 1 or not tree.drafts:
            return (_Shape(tree, masks),)
        return _Shape(Tree(0), masks), _Shape(tree, 0)

    def _pass(self, rows: Rows, cache: KVCache, shape: _Shape) -> Reveal:
        """Verify the drafts of every row, write the right ones, and draft again."""
        state, tree = rows.extras, shape.tree
        ahead = self._ahead(rows, tree)
        shown, drafts = self._shown(rows, shape, ahead)
        states = self.model(shown, layout=shape.layout, cache=cache)
        drawing = Drawing(rows.sharpening, rows.noise_seeds, self.mask_id)
        logits = self.model.head(states[:, : 1 + tree.size])
        verdict = self._verdict(drawing, tree, logits, drafts, state, ahead)
        tables = tree.on(rows.device)
        right = tables.depths[verdict.reached]
        count = torch.minimum(right + 1, state[_STOP] - state[_AT]).clamp_min(0)
        places = torch.arange(tree.drafts + 1, device=rows.device)
        written = ahead.free & (places < count.unsqueeze(1))
        rows.write(ahead.positions, verdict.tokens, where=written)
        self._count(state, tree, verdict, ahead, count, written)
        if tree.candidates == 1:
            cache.advance(count)
        else:
            cache.advance_along(tables.paths[verdict.reached], count)
        state[_AT].add_(count)
        drafted = self._draft(drawing, states, rows, shape, verdict.reached)
        chances = None
        if self.alternatives is not None:  # a token's logits are at the token before it on the path
            path = tables.paths[verdict.reached].unsqueeze(-1)
            behind = logits.gather(1, path.expand(-1, -1, logits.shape[-1]))
            chances = Chances.of_logits(behind, self.mask_id, verdict.tokens, self.alternatives)
        return Reveal(ahead.positions, verdict.tokens, written, drafted=drafted, chances=chances)

    def _ahead(self, rows: Rows, tree: Tree) -> Ahead:
        at = rows.extras[_AT].unsqueeze(1)
        positions = at + torch.arange(tree.drafts + 1, device=rows.device)
        inside = positions < rows.extras[_STOP].unsqueeze(1)
        return Ahead(
            positions,
            rows.extras[_FREE].gather(1, positions) & inside,
            rows.text.gather(1, positions),
            rows.extras[_HAVE].clamp_max(tree.drafts),
        )

    def _shown(self, rows: Rows, shape: _Shape, ahead: Ahead) -> tuple[Tensor, Tensor]:
        """The network's inputs, ids or vectors, and the drafts (rows, drafts) among them."""
        tables = shape.tree.on(rows.device)
        drafts = rows.extras[_DRAFTS].index_select(1, self._columns(shape.tree, rows.device))
        drafts = torch.where(ahead.free[:, tables.places], drafts, ahead.given[:, tables.places])
        before = ahead.positions[:, :1] - 1
        last = torch.where(before < 0, self.mask_id, rows.text.gather(1, before.clamp_min(0)))
        clean = torch.cat((last, drafts), 1)
        masks = clean.new_full((len(clean), clean.shape[1] * shape.masks), self.mask_id)
        if not (self.reading.previous_token and shape.masks):
            return torch.cat((clean, masks), 1), drafts
        previous = masks.view(*clean.shape, shape.masks).clone()
        previous[..., 0] = clean
        vectors = self.model.embed(masks) + self.model.embed(previous.flatten(1))
        return torch.cat((self.model.embed(clean), vectors), 1), drafts

    def _columns(self, tree: Tree, device: torch.device) -> Tensor:
        """The columns of a tree's drafts among those of the largest tree."""
        return _columns(tree, self._most, device)

    def _verdict(
        self,
        drawing: Drawing,
        tree: Tree,
        logits: Tensor,
        drafts: Tensor,
        state: dict[str, Tensor],
        ahead: Ahead,
    ) -> Verdict:
        if self.rejects:
            return rejection_verdict(drawing, tree, logits, drafts, state[_LOG_Q], ahead)
        return coupled_verdict(drawing, tree, logits, drafts, ahead)

    def _count(
        self,
        state: dict[str, Tensor],
        tree: Tree,
        verdict: Verdict,
        ahead: Ahead,
        count: Tensor,
        written: Tensor,
    ) -> None:
        """Count passes, and drafts that were verified and right. A draft is verified if its chain is
        right."""
        has_written = written.any(1)
        reads = ~has_written & (count > 0)
        state[_SPENT].add_(torch.stack((~reads, reads), 1))  # includes passes past the end of a text
        if not tree.drafts:
            return
        tables = tree.on(count.device)
        places = torch.arange(tree.drafts, device=count.device)
        path = tables.paths[verdict.reached]
        free = ahead.free[:, :-1]
        asked = free & (path[:, :-1] == places) & (places < ahead.have.unsqueeze(1))
        right = asked & (places < tables.depths[verdict.reached].unsqueeze(1))
        state[TALLY][:, :, : tree.drafts].add_(torch.stack((asked, right), 1))

    def _draft(
        self, drawing: Drawing, states: Tensor, rows: Rows, shape: _Shape, reached: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Guess the tokens after the one just written, from the masks behind the last right draft."""
        state, most = rows.extras, self._most
        skipped = 0 if self.reading.shifted else 1  # the first mask is the place of the token just written
        number = max(shape.masks - skipped, 0)
        positions = state[_AT].unsqueeze(1) + torch.arange(number, device=rows.device)
        state[_HAVE].fill_(number)
        if not number:
            return positions, positions, positions < 0
        first = 1 + shape.tree.size + reached * shape.masks + skipped
        places = first.unsqueeze(1) + torch.arange(number, device=rows.device)
        asked = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        logits = self.model.head(asked)
        if self.rejects:
            tokens, log_q = rejection_drafts(drawing, logits, positions, most.candidates)
            state[_LOG_Q][:, :number].copy_(log_q)
        else:
            tokens = coupled_drafts(drawing, logits, positions, most.candidates)
        tree = Tree(number, most.candidates)
        tables = tree.on(rows.device)
        columns = self._columns(tree, rows.device)
        state[_DRAFTS].index_copy_(1, columns, tokens[:, tables.places, tables.candidates])
        free = state[_FREE].gather(1, positions.clamp_max(rows.text.shape[1] - 1))
        return positions, tokens[..., 0], free & (positions < state[_STOP].unsqueeze(1))


@cache  # never dropped, since a recorded pass reads it at its address
def _columns(tree: Tree, most: Tree, device: torch.device) -> Tensor:
    columns = [most.draft(place, candidate) - 1 for place, candidate in tree.order]
    with torch.inference_mode(False):
        return torch.tensor(columns, dtype=torch.long).to(device)


def _bursts(device: torch.device) -> int:
    """Rounds between two reads of the device. On a GPU a read costs about a tenth of a one-text pass."""
    return 4 if device.type == "cuda" else 1
