"""How often drafts are accepted, computed from the draft distribution q and the law p that verifies drafts.

Each mask of a group behind a text gives a distribution q of one token. A causal pass over the text gives the
distribution p that the token should have. Places are counted from the first token after the text. p gives
that token exactly and it needs no draft, so drafts begin at place 2. Two schemes accept drafts and preserve
the law:

- `rejection`: a draft y from q is accepted with probability min(1, p(y)/q(y)), in total Σ min(p, q).
- `coupled`: draft and token are the argmax of log q and of log p plus the same Gumbel noise. The draft is
  accepted if they are equal: Σ_v 1/Σ_w max(p_w/p_v, q_w/q_v). The text is the one that its seed gives without
  drafts.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import subs_at_masks
from bd3lm.evaluation.likelihood import clustered_error, ratio_error
from bd3lm.models import (
    BlockDiffusion,
    Causal,
    Denoiser,
    DraftReading,
    KVTape,
    embed_with_previous,
    require_evaluation_mode,
    send,
)
from bd3lm.objectives import TokenBatch
from bd3lm.sampling import SCHEMES, Scheme, Sharpening

_ENTRIES = 2**23  # of a distribution over the vocabulary, for all positions in a chunk


class Pairs(NamedTuple):
    """Some drafts, with the distributions that verify them."""

    rows: Tensor
    """The row of each draft's text, (n,)."""
    places: Tensor
    """Places from 2 on, (n,)."""
    log_p: Tensor
    """(n, vocabulary), like `log_q`."""
    log_q: Tensor


@dataclass(frozen=True, kw_only=True)
class Drafts(DraftReading):
    """Groups of masks behind a text that draft its tokens, for its causal law to verify.

    Groups are next to each other: a text of 12 tokens has three groups of 4 masks, behind its first 0, 4 and
    8 tokens. A mask sees the text before its group, and its group.
    """

    @torch.no_grad()
    def pairs(self, model: Denoiser, batch: TokenBatch) -> Iterator[Pairs]:
        """The drafts of scored tokens in chunks, so that distributions never exist for all positions at once.

        If a text is not a whole number of groups, the tokens left at its end are only verified.
        """
        if model.cache_shape is None:
            raise ValueError("drafts need a network that stores keys and values, got one that keeps none")
        if batch.documents is not None:
            raise ValueError("documents must be None: acceptance is measured text by text")
        scored = send(batch.scored, model.device)
        length = scored.shape[1] // self.masks * self.masks
        if not length:
            raise ValueError(
                f"masks must be at most {scored.shape[1]}, the tokens of a text, got {self.masks}"
            )
        tokens = send(batch.tokens, model.device)[:, :length]
        tape = KVTape()
        verifying = model(tokens, layout=Causal(length), cache=tape).flatten(0, 1)
        layout = BlockDiffusion(length, self.masks, causal_clean=True, adds=self.adds)
        states = model(self._shown(model, tokens), layout=layout, cache=tape.replay()).flatten(0, 1)
        mask = torch.arange(length, device=tokens.device) % self.masks
        if self.shifted:
            drafted, back = F.pad(scored[:, 1:], (0, 1))[:, :length], 0
        else:
            drafted, back = scored[:, :length] & (mask > 0), 1
        chunk = max(1, _ENTRIES // model.vocab_size)
        for some in drafted.flatten().nonzero().squeeze(1).split(chunk):
            yield Pairs(
                some // length,
                mask[some % length] + 1 + self.shifted,
                subs_at_masks(model.head(verifying[some - back]), self.mask_id),
                subs_at_masks(model.head(states[some]), self.mask_id),
            )

    def _shown(self, model: Denoiser, tokens: Tensor) -> Tensor:
        """The masks as the network's input: ids, or embedding vectors."""
        masks = torch.full_like(tokens, self.mask_id)
        if not self.previous_token:
            return masks
        begins = torch.arange(tokens.shape[1], device=tokens.device) % self.masks == 0
        of_text = F.pad(tokens[:, :-1], (1, 0), value=self.mask_id)
        return embed_with_previous(model, masks, torch.where(begins, of_text, masks), blank=self.mask_id)


def rejection_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ min(p, q) over the last dimension, float64."""
    return torch.minimum(log_p, log_q).double().exp().sum(-1)


def coupled_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ_v 1/Σ_w max(p_w/p_v, q_w/q_v) over the last dimension, float64: how often two argmaxes agree.

    p_w/p_v is the larger of the two ratios if p_w/q_w ≥ p_v/q_v. So with tokens sorted by p/q, those up to v
    add their p and those after it their q, which takes V log V steps.
    """
    ratio = (log_p - log_q).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    order = ratio.argsort(dim=-1, descending=True)
    p, q = (each.gather(-1, order).double().exp() for each in (log_p, log_q))
    p_before = p.cumsum(-1)
    q_after = F.pad(q.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))
    both = p * q
    return torch.where(both > 0, both / (q * p_before + p * q_after), 0.0).sum(-1)


def greedy_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1 if the likeliest tokens are the same, else 0, float64."""
    return (log_p.argmax(-1) == log_q.argmax(-1)).double()


def acceptances(log_p: Tensor, log_q: Tensor, sharpening: Sharpening) -> Tensor:
    """(..., schemes): acceptance rates with p and q sharpened in the same way."""
    if sharpening.top_k == 1:  # without noise, both schemes compare the likeliest tokens
        same = greedy_acceptance(log_p, log_q)
        return torch.stack((same, same), dim=-1)
    log_p, log_q = sharpening(log_p), sharpening(log_q)
    return torch.stack((rejection_acceptance(log_p, log_q), coupled_acceptance(log_p, log_q)), dim=-1)


class Estimate(NamedTuple):
    """A figure and its standard error, None for a single text."""

    value: float
    error: float | None


@dataclass(frozen=True)
class Place:
    """The acceptance of drafts at one place."""

    place: int
    drafts: int
    """How many drafts were measured."""
    accepted: Estimate
    """How often a draft is accepted if all before it were."""
    tokens: Estimate
    """Tokens per round that drafts up to this place: the one that needs no draft, and all accepted ones."""


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of drafts by place, for one sharpening and one scheme."""

    sharpening: Sharpening
    scheme: Scheme
    places: tuple[Place, ...]
    sequences: int


def measure_acceptance(
    model: Denoiser, drafts: Drafts, batches: Iterable[TokenBatch], sharpenings: Sequence[Sharpening]
) -> list[Acceptance]:
    """The acceptance of drafts over texts, for each sharpening and scheme.

    Errors are clustered by text, as in `corpus_likelihood`. Tokens per round are computed from the mean of
    each place, as if places were independent and a round could begin anywhere in a text.
    """
    require_evaluation_mode(model)
    totals, numbers = [], []
    for index, batch in enumerate(batches):
        found = _totals(model, drafts, batch, sharpenings)
        if found[0].isnan().any():
            raise FloatingPointError(
                f"acceptance must be a number, got NaN in batch {index}: the network's weights or "
                "activations are not finite"
            )
        totals.append(found[0])
        numbers.append(found[1])
    every = torch.cat(numbers) if numbers else torch.zeros(1, len(drafts.places))
    if not every.sum(0).all():
        raise ValueError(f"batches must hold drafts at every place up to {drafts.places[-1]}, got none")
    counted = every.sum(1) > 0
    sizes, accepted = every[counted], torch.cat(totals)[counted]
    return [
        Acceptance(sharpening, scheme, _by_place(drafts, accepted[:, :, index, at], sizes), len(sizes))
        for index, sharpening in enumerate(sharpenings)
        for at, scheme in enumerate(SCHEMES)
    ]


def _totals(
    model: Denoiser, drafts: Drafts, batch: TokenBatch, sharpenings: Sequence[Sharpening]
) -> tuple[Tensor, Tensor]:
    """Acceptances (rows, places, sharpenings, schemes) and the number of drafts (rows, places), summed."""
    rows, places = len(batch.tokens), len(drafts.places)
    figures = len(sharpenings) * len(SCHEMES)
    total = torch.zeros(rows * places, figures, dtype=torch.float64, device=model.device)
    number = torch.zeros(rows * places, dtype=torch.float64, device=model.device)
    for pairs in drafts.pairs(model, batch):
        found = [acceptances(pairs.log_p, pairs.log_q, each) for each in sharpenings]
        cell = pairs.rows * places + pairs.places - drafts.places[0]
        total.index_add_(0, cell, torch.stack(found, dim=1).flatten(1))
        number.index_add_(0, cell, torch.ones_like(cell, dtype=torch.float64))
    shape = (rows, places, len(sharpenings), len(SCHEMES))
    return total.view(shape).cpu(), number.view(rows, places).cpu()


def _by_place(drafts: Drafts, totals: Tensor, sizes: Tensor) -> tuple[Place, ...]:
    """The figures of each place, from sums over texts (texts, places)."""
    neighbours = round(len(sizes) ** (1 / 3))
    means = totals.sum(0) / sizes.sum(0)
    residuals = (totals - sizes * means) / sizes.sum(0)
    found = []
    for index, place in enumerate(drafts.places):
        tokens, slopes = tokens_a_round(means[: index + 1].tolist())
        error = clustered_error(
            residuals[:, : index + 1] @ torch.tensor(slopes, dtype=torch.float64), neighbours=neighbours
        )
        own = ratio_error(totals[:, index], sizes[:, index], neighbours=neighbours)
        found.append(
            Place(
                place,
                int(sizes[:, index].sum()),
                Estimate(means[index].item(), own),
                Estimate(tokens, error),
            )
        )
    return tuple(found)


def tokens_a_round(accepted: Sequence[float]) -> tuple[float, list[float]]:
    """1 + Σ_k Π_{i≤k} a_i, and its derivative with respect to each a_i."""
    reached = [math.prod(accepted[:stop]) for stop in range(1, len(accepted) + 1)]
    slopes = [
        sum(
            math.prod(a for other, a in enumerate(accepted[:stop]) if other != index)
            for stop in range(index + 1, len(accepted) + 1)
        )
        for index in range(len(accepted))
    ]
    return 1.0 + sum(reached), slopes
