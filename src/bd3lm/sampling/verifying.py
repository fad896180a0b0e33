"""Which drafts of a pass are right, and what follows them: the two schemes that change no law.

A pass verifies a tree of drafts behind the last token of a text: a chain, a draft a place, and beside each of
its drafts other candidates for that place, which have nothing behind them. Of each clean position, the last
token's and the drafts', the network gives the distribution p of the next token; each draft was drawn from a
distribution q of its place.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bd3lm.counter import Purpose, counter_uniform
from bd3lm.diffusion import gumbel_max, subs_at_masks
from bd3lm.sampling.drawing import RowSharpening, or_mask

# A position's noise in these repeats is nobody else's, so that a draft that was never looked at may be drawn
# again with the same: nothing that stands in the text depends on it.
_DRAFTS = 2**20
_CHANCES = 2**20 + 2**10


@dataclass(frozen=True)
class Tree:
    """The drafts of a pass by what each follows: first the chain, then the other candidates, place by place.

    Clean positions are numbered from 0, the last token of the text; a draft's depth is its place behind that.
    """

    drafts: int
    candidates: int = 1

    @property
    def parents(self) -> tuple[int, ...]:
        """For each draft the clean position that it follows."""
        chain = range(self.drafts)
        return *chain, *(place for place in chain for _ in range(self.candidates - 1))

    @property
    def size(self) -> int:
        """How many drafts there are."""
        return self.drafts * self.candidates

    def draft(self, place: int, candidate: int) -> int:
        """The clean position of a candidate for a place, both counted from 0."""
        if candidate == 0:
            return place + 1
        return self.drafts + place * (self.candidates - 1) + candidate

    @property
    def order(self) -> list[tuple[int, int]]:
        """Place and candidate of each draft."""
        chain = [(place, 0) for place in range(self.drafts)]
        return chain + [(p, c) for p in range(self.drafts) for c in range(1, self.candidates)]

    def on(self, device: torch.device) -> "TreeTables":
        return _tables(self, device)


class TreeTables(NamedTuple):
    """A tree, clean position by clean position."""

    parents: Tensor  # (drafts,)
    depths: Tensor  # (1 + drafts,)
    paths: Tensor  # (1 + drafts, places + 1): from the last token on; behind its end the position itself
    behind: Tensor  # (1 + drafts, drafts): whether a draft lies on the path
    places: Tensor  # (drafts,) of each draft, from 0
    candidates: Tensor  # (drafts,)


@cache  # and never dropped: a recorded pass reads it where it lies
def _tables(tree: Tree, device: torch.device) -> TreeTables:
    paths = [[0]]
    for index, parent in enumerate(tree.parents):
        paths.append([*paths[parent], index + 1])
    behind = torch.zeros(len(paths), tree.size, dtype=torch.bool)
    for position, path in enumerate(paths):
        behind[position, [each - 1 for each in path[1:]]] = True
    filled = [path + path[-1:] * (tree.drafts + 1 - len(path)) for path in paths]
    order = torch.tensor(tree.order, dtype=torch.long).view(-1, 2)
    with torch.inference_mode(False):
        return TreeTables(
            torch.tensor(tree.parents, dtype=torch.long).to(device),
            torch.tensor([len(path) - 1 for path in paths]).to(device),
            torch.tensor(filled).to(device),
            behind.to(device),
            order[:, 0].to(device),
            order[:, 1].to(device),
        )


class Ahead(NamedTuple):
    """The places behind a text that a pass may fill, the first of which needs no draft (rows, places + 1)."""

    positions: Tensor
    free: Tensor
    """Whether a token is to be written there; elsewhere it is given, and no draft of it can be wrong."""
    given: Tensor
    have: Tensor
    """Of how many places each row has drafts, (rows,)."""


class Verdict(NamedTuple):
    """How far the drafts of each row are right."""

    reached: Tensor
    """The clean position of the last right draft, 0 for none, (rows,)."""
    tokens: Tensor
    """The text's next tokens, one more than drafts are right, (rows, places + 1)."""


class Drawing(NamedTuple):
    """How tokens are drawn."""

    sharpening: RowSharpening
    seeds: Tensor
    mask_id: int

    def log_p(self, logits: Tensor) -> Tensor:
        """What tokens are drawn from, (rows, k, vocabulary)."""
        return self.sharpening(subs_at_masks(logits, self.mask_id))

    def uniform(self, positions: Tensor, entries: int, repeat: int) -> Tensor:
        return counter_uniform(self.seeds.unsqueeze(1), positions, Purpose.TOKEN, entries, repeat=repeat)


# --- coupled: draft and token are drawn with the same noise, that of sampling without speculation ---


def coupled_drafts(drawing: Drawing, logits: Tensor, positions: Tensor, candidates: int) -> Tensor:
    """For each place (rows, places) the tokens of highest log q + noise, (rows, places, candidates)."""
    if candidates == 1:
        drawn = drawing.sharpening.draw_logits(logits, drawing.mask_id, drawing.seeds, positions, repeat=0)
        return drawn.unsqueeze(-1)
    plain = subs_at_masks(logits, drawing.mask_id).double()
    log_q = drawing.sharpening(plain)
    noise = -torch.log(-torch.log(drawing.uniform(positions, log_q.shape[-1], 0)))
    # What sharpening leaves out may be in p all the same: likely tokens come next.
    score = torch.where(log_q > -torch.inf, log_q + noise, plain - 1e9)
    return score.nan_to_num(-torch.inf).topk(candidates, dim=-1).indices


def coupled_verdict(drawing: Drawing, tree: Tree, logits: Tensor, drafts: Tensor, ahead: Ahead) -> Verdict:
    """Drafts (rows, drafts) against what the logits (rows, 1 + drafts, V) of clean positions draw."""
    tables = tree.on(logits.device)
    drawn = drawing.sharpening.draw_logits(
        logits, drawing.mask_id, drawing.seeds, ahead.positions[:, tables.depths], repeat=0
    )
    tokens = torch.where(ahead.free[:, tables.depths], drawn, ahead.given[:, tables.depths])
    drafted = tables.depths[1:] <= ahead.have.unsqueeze(1)
    right = (drafts == tokens[:, tables.parents]) & drafted
    whole = (right.unsqueeze(1) | ~tables.behind).all(2)
    # The longest path that is right; of two, where a given token stands for all candidates, the chain.
    rank = tables.depths * len(tables.depths) - torch.arange(len(tables.depths), device=logits.device)
    reached = torch.where(whole, rank, -len(tables.depths)).argmax(1)
    return Verdict(reached, tokens.gather(1, tables.paths[reached]))


# --- rejection: drafts of q, accepted with probability min(1, p/q) ---


def rejection_drafts(
    drawing: Drawing, logits: Tensor, positions: Tensor, candidates: int
) -> tuple[Tensor, Tensor]:
    """For each place candidates drawn from q one by one, (rows, places, candidates), and log q."""
    log_q = drawing.log_p(logits)
    drawn = [
        gumbel_max(log_q, drawing.uniform(positions, log_q.shape[-1], _DRAFTS + each))
        for each in range(candidates)
    ]
    return or_mask(torch.stack(drawn, -1), log_q.unsqueeze(-2), drawing.mask_id), log_q


def acceptance_chance(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(y)/q(y)) of drafts y (...) of q (..., V)."""
    at = token.unsqueeze(-1)
    return (p.gather(-1, at) / q.gather(-1, at)).squeeze(-1).clamp_max(1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a token follows whose draft of q was rejected: the positive part of p − q, normalised. Where
    rounding leaves nothing of that, p."""
    left = (p - q).clamp_min(0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0.0, left / total.clamp_min(torch.finfo(left.dtype).tiny), p)


def rejection_verdict(
    drawing: Drawing, tree: Tree, logits: Tensor, drafts: Tensor, log_q: Tensor, ahead: Ahead
) -> Verdict:
    """As `coupled_verdict`; log_q (rows, places, V) is what the drafts of each place were drawn from."""
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
            # Where nothing is to be written the mask may stand, which need not be a token of the vocabulary.
            draft = torch.where(ahead.free[:, place], drafts[:, position - 1], 0)
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
    # Behind each place of the path stands the draft of the next one, and behind the last what was drawn.
    following = torch.cat((path[:, 1:], path[:, -1:]), 1)
    chosen = drafts.gather(1, (following - 1).clamp_min(0)) if tree.size else drawn.expand_as(path)
    places = torch.arange(path.shape[1], device=logits.device)
    return Verdict(reached, torch.where(places < depth, chosen, drawn))
