"""Which drafts of a pass are right, and which token follows them, by two schemes that preserve the law.

A pass verifies a tree of drafts behind the last token of a text: a chain with one draft for each place, and
for each place other candidates, which have nothing behind them. At each clean position (the last token and
the drafts) the network gives the distribution p of the next token. Each draft was drawn from its place's
distribution q.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bd3lm.counter import Purpose, counter_uniform
from bd3lm.diffusion import gumbel_max, subs_at_masks
from bd3lm.sampling.drawing import RowSharpening, or_mask

# No other draw uses a position's noise at these repeats. So a draft that was never verified may be drawn
# again with the same noise: nothing in the text depends on it.
_DRAFTS = 2**20
_CHANCES = 2**20 + 2**10


@dataclass(frozen=True)
class Tree:
    """The drafts of a pass: first the chain, then the other candidates, place by place.

    Clean positions are numbered from 0, the last token of the text. The depth of a draft is its distance from
    it.
    """

    drafts: int
    candidates: int = 1

    @property
    def parents(self) -> tuple[int, ...]:
        """The clean position that each draft follows."""
        chain = range(self.drafts)
        return *chain, *(place for place in chain for _ in range(self.candidates - 1))

    @property
    def size(self) -> int:
        """The number of drafts."""
        return self.drafts * self.candidates

    def draft(self, place: int, candidate: int) -> int:
        """The clean position of a candidate for a place, both counted from 0."""
        if candidate == 0:
            return place + 1
        return self.drafts + place * (self.candidates - 1) + candidate

    @property
    def order(self) -> list[tuple[int, int]]:
        """The place and candidate of each draft."""
        chain = [(place, 0) for place in range(self.drafts)]
        return chain + [(p, c) for p in range(self.drafts) for c in range(1, self.candidates)]

    def on(self, device: torch.device) -> "TreeTables":
        return _tables(self, device)


class TreeTables(NamedTuple):
    """A tree as tensors over its clean positions."""

    parents: Tensor  # (drafts,)
    depths: Tensor  # (1 + drafts,)
    paths: Tensor  # (1 + drafts, places + 1) from the last token; past the end the position itself
    behind: Tensor  # (1 + drafts, drafts) whether a draft lies on the path
    places: Tensor  # (drafts,) the place of each draft, from 0
    candidates: Tensor  # (drafts,)


@cache  # never dropped, since a recorded pass reads it at its address
def _tables(tree: Tree, device: torch.device) -> TreeTables:
    paths = [[0]]
    for index, parent in enumerate(tree.parents):
        paths.append([*paths[parent], index + 1])
    filled = [path + path[-1:] * (tree.drafts + 1 - len(path)) for path in paths]
    with torch.inference_mode(False):
        behind = torch.zeros(len(paths), tree.size, dtype=torch.bool)
        for position, path in enumerate(paths):
            behind[position, [each - 1 for each in path[1:]]] = True
        order = torch.tensor(tree.order, dtype=torch.long).view(-1, 2)
        return TreeTables(
            torch.tensor(tree.parents, dtype=torch.long).to(device),
            torch.tensor([len(path) - 1 for path in paths]).to(device),
            torch.tensor(filled).to(device),
            behind.to(device),
            order[:, 0].to(device),
            order[:, 1].to(device),
        )


class Ahead(NamedTuple):
    """The places after a text that a pass may fill (rows, places + 1). The first needs no draft."""

    positions: Tensor
    free: Tensor
    """Whether a token is to be written there. Elsewhere it is given, and any draft of it counts as right."""
    given: Tensor
    have: Tensor
    """The number of places with drafts in each row, (rows,)."""


class Verdict(NamedTuple):
    """How many drafts of each row are right."""

    reached: Tensor
    """The clean position of the last right draft, (rows,); 0 for none."""
    tokens: Tensor
    """The next tokens of the text (rows, places + 1): the right drafts and one more."""


class Drawing(NamedTuple):
    """How tokens are drawn."""

    sharpening: RowSharpening
    seeds: Tensor
    mask_id: int

    def log_p(self, logits: Tensor) -> Tensor:
        """The distributions that tokens are drawn from, (rows, k, vocabulary)."""
        return self.sharpening(subs_at_masks(logits, self.mask_id))

    def uniform(self, positions: Tensor, entries: int, repeat: int) -> Tensor:
        return counter_uniform(self.seeds.unsqueeze(1), positions, Purpose.TOKEN, entries, repeat=repeat)


# --- coupled: drafts and tokens are drawn with the same noise, that of sampling without speculation ---


def coupled_drafts(drawing: Drawing, logits: Tensor, positions: Tensor, candidates: int) -> Tensor:
    """For each place (rows, places) the tokens with the highest log q + noise, (rows, places, candidates)."""
    if candidates == 1:
        drawn = drawing.sharpening.draw_logits(logits, drawing.mask_id, drawing.seeds, positions, repeat=0)
        return drawn.unsqueeze(-1)
    plain = subs_at_masks(logits, drawing.mask_id).double()
    log_q = drawing.sharpening(plain)
    noise = -torch.log(-torch.log(drawing.uniform(positions, log_q.shape[-1], 0)))
    # p may hold tokens that sharpening removed from q: take the likeliest of those next.
    score = torch.where(log_q > -torch.inf, log_q + noise, plain - 1e9)
    return score.nan_to_num(-torch.inf).topk(candidates, dim=-1).indices


def coupled_verdict(drawing: Drawing, tree: Tree, logits: Tensor, drafts: Tensor, ahead: Ahead) -> Verdict:
    """Compare drafts (rows, drafts) with the tokens drawn from logits (rows, 1 + drafts, V) of clean
    positions."""
    tables = tree.on(logits.device)
    drawn = drawing.sharpening.draw_logits(
        logits, drawing.mask_id, drawing.seeds, ahead.positions[:, tables.depths], repeat=0
    )
    tokens = torch.where(ahead.free[:, tables.depths], drawn, ahead.given[:, tables.depths])
    drafted = tables.depths[1:] <= ahead.have.unsqueeze(1)
    right = (drafts == tokens[:, tables.parents]) & drafted
    whole = (right.unsqueeze(1) | ~tables.behind).all(2)
    # The longest right path. If two are equally long, since a given token makes all candidates right, the
    # chain.
    rank = tables.depths * len(tables.depths) - torch.arange(len(tables.depths), device=logits.device)
    reached = torch.where(whole, rank, -len(tables.depths)).argmax(1)
    return Verdict(reached, tokens.gather(1, tables.paths[reached]))


# --- rejection: drafts from q, accepted with probability min(1, p/q) ---


def rejection_drafts(
    drawing: Drawing, logits: Tensor, positions: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """For each place, candidates drawn independently from q, (rows, places, candidates), and log q."""
    log_q = drawing.log_p(logits)
    drawn = [
        gumbel_max(log_q, drawing.uniform(positions, log_q.shape[-1], _DRAFTS + each))
        for each in range(candidates)
    ]
    return or_mask(torch.stack(drawn, -1), log_q.unsqueeze(-2), drawing.mask_id), log_q


def acceptance_chance(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(y)/q(y)) for drafts y (...) from q (..., V)."""
    at = token.unsqueeze(-1)
    return (p.gather(-1, at) / q.gather(-1, at)).squeeze(-1).clamp_max(1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The distribution of a token after its draft from q was rejected: the positive part of p − q,
    normalized. If rounding leaves nothing of it, p."""
    left = (p - q).clamp_min(0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0.0, left / total.clamp_min(torch.finfo(left.dtype).tiny), p)


def rejection_verdict(
    drawing: Drawing, tree: Tree, logits: Tensor, drafts: Tensor, log_q: Tensor, ahead: Ahead
) -> Verdict:
    """Like `coupled_verdict`. log_q (rows, places, V) has the distributions of the drafts."""
    log_p = drawing.log_p(logits)
    rows = len(log_p)
    reached = torch.zeros(rows, dtype=torch.long, device=logits.device)
    on_chain = torch.ones(rows, dtype=torch.bool, device=logits.device)
    rejected = torch.zeros_like(on_chain)
    left = torch.zeros_like(log_p[:, 0], dtype=torch.float64)
    for place in range(tree.drafts):
        p, q = log_p[:, place].double().exp(), log_q[:, place].double().exp()
        asked = on_chain & (ahead.have > place)
        accepted = torch.zeros_like(on_chain)
        for candidate in range(tree.candidates):
            position = tree.draft(place, candidate)
            # The mask, which may be outside of the vocabulary, marks places with nothing to write, and drafts
            # with NaN probabilities, for which the acceptance chance is NaN too.
            draft = drafts[:, position - 1]
            draft = torch.where(draft < p.shape[-1], draft, 0)
            chance = acceptance_chance(p, q, draft)
            drawn = drawing.uniform(ahead.positions[:, place : place + 1], 1, _CHANCES + candidate)
            is_right = torch.where(ahead.free[:, place], drawn.view(-1) < chance, True)
            now = asked & ~accepted & is_right
            reached = torch.where(now, position, reached)
            on_chain = now if candidate == 0 else on_chain
            accepted = accepted | now
            p = residual(p, q)
        newly = asked & ~accepted
        rejected = rejected | newly
        left = torch.where(newly.unsqueeze(1), p, left)
    tables = tree.on(logits.device)
    path = tables.paths[reached]
    follows = log_p.gather(1, reached.view(-1, 1, 1).expand(-1, 1, log_p.shape[-1])).squeeze(1).double()
    log_left = torch.where(rejected.unsqueeze(1), left.log(), follows)
    depth = tables.depths[reached].unsqueeze(1)
    last = ahead.positions.gather(1, depth)
    drawn = gumbel_max(log_left.unsqueeze(1), drawing.uniform(last, log_p.shape[-1], 0))
    drawn = or_mask(drawn, log_left.unsqueeze(1), drawing.mask_id)
    drawn = torch.where(ahead.free.gather(1, depth), drawn, ahead.given.gather(1, depth))
    # Each place of the path takes the draft of the next place, and the last one takes the drawn token.
    following = torch.cat((path[:, 1:], path[:, -1:]), 1)
    chosen = drafts.gather(1, (following - 1).clamp_min(0)) if tree.size else drawn.expand_as(path)
    places = torch.arange(path.shape[1], device=logits.device)
    return Verdict(reached, torch.where(places < depth, chosen, drawn))
