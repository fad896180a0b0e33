"""Acceptance of drafts: formulas against enumeration and simulation, drafts against groups written out."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import gumbel_max
from bd3lm.evaluation import (
    Drafts,
    acceptance,
    acceptances,
    coupled_acceptance,
    measure_acceptance,
    rejection_acceptance,
    tokens_a_round,
)
from bd3lm.evaluation.likelihood import ratio_error
from bd3lm.models import Causal, Transformer
from bd3lm.objectives import Drafting, TokenBatch
from bd3lm.sampling import Sharpening
from tests.objectives.test_drafting import MASK as APART
from tests.objectives.test_drafting import by_hand as drafts_by_hand
from tests.objectives.test_drafting import drafter
from tests.oracles.networks import (
    CLEAN,
    MASK,
    AfterPrevious,
    CopyNetwork,
    block_after_clean,
    log_probabilities,
    logits_of,
    tiny_transformer,
)

AS_IT_IS = Sharpening()
WAYS = (AS_IT_IS, Sharpening(top_p=0.8), Sharpening(temperature=0.5, top_p=0.9), Sharpening(temperature=0.0))


def pairs(number: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs of distributions, more and less alike."""
    generator = torch.Generator().manual_seed(seed)
    p, noise = torch.randn(2, number, vocabulary, generator=generator, dtype=torch.float64)
    alike = torch.linspace(0, 1, number, dtype=torch.float64).unsqueeze(1)
    return (2 * p).log_softmax(-1), (2 * (alike * p + (1 - alike) * noise)).log_softmax(-1)


def accepted_by_rejection(log_p: Tensor, log_q: Tensor) -> float:
    """Every draft y of q, accepted with probability min(1, p(y)/q(y))."""
    drawn = [(a.exp().item(), b.exp().item()) for a, b in zip(log_p, log_q, strict=True)]
    return sum(q * min(1.0, p / q) for p, q in drawn if q > 0)


def accepted_by_noise(log_p: Tensor, log_q: Tensor) -> float:
    """Σ_v 1/Σ_w max(p_w/p_v, q_w/q_v), as it is written."""
    p, q = log_p.exp().tolist(), log_q.exp().tolist()
    both = [v for v in range(len(p)) if p[v] > 0 and q[v] > 0]
    return sum(1 / sum(max(p[w] / p[v], q[w] / q[v]) for w in range(len(p))) for v in both)


# --- formulas ---


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 40])
@pytest.mark.parametrize("way", WAYS, ids=["as it is", "nucleus", "both", "greedy"])
def test_both_are_the_sums_that_they_stand_for(way, vocabulary):
    log_p, log_q = pairs(30, vocabulary)
    found = acceptances(log_p, log_q, way)
    for index in range(len(log_p)):
        p, q = way(log_p[index]), way(log_q[index])
        rejection, coupled = found[index].tolist()
        assert rejection == pytest.approx(accepted_by_rejection(p, q), abs=1e-12)
        assert coupled == pytest.approx(accepted_by_noise(p, q), abs=1e-12)
        assert rejection / (2 - rejection) - 1e-12 <= coupled <= rejection + 1e-12  # 1 − TV is the overlap
        if way.top_k == 1:
            assert rejection == float(log_p[index].argmax() == log_q[index].argmax())


def test_shared_noise_gives_the_same_token_as_often_as_the_formula_says():
    draws = 40_000
    log_p, log_q = pairs(5, 6, seed=3)
    log_p, log_q = Sharpening(top_p=0.9)(log_p), Sharpening(top_p=0.9)(log_q)
    uniform = torch.rand(draws, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    same = gumbel_max(log_p.expand(draws, -1, -1), uniform) == gumbel_max(log_q, uniform)
    expected = coupled_acceptance(log_p, log_q)
    error = (expected * (1 - expected) / draws).sqrt() + 1e-12
    assert ((same.double().mean(0) - expected).abs() < 4 * error).all()
    assert 0.01 < expected.min() < 0.9
    assert (expected < rejection_acceptance(log_p, log_q) - 1e-3).any()  # otherwise this says little


def test_rejection_accepts_as_often_when_it_is_run():
    draws = 40_000
    log_p, log_q = pairs(5, 6, seed=4)
    generator = torch.Generator().manual_seed(0)
    drafted = torch.multinomial(log_q.exp(), draws, replacement=True, generator=generator)
    ratio = (log_p - log_q).exp().gather(1, drafted)
    accepted = torch.rand(5, draws, generator=generator, dtype=torch.float64) < ratio
    expected = rejection_acceptance(log_p, log_q)
    error = (expected * (1 - expected) / draws).sqrt() + 1e-12
    assert ((accepted.double().mean(1) - expected).abs() < 4 * error).all()


def test_what_neither_draws_changes_nothing_and_distributions_apart_never_agree():
    low = -math.inf
    log_p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.2, 0.8, 0.0]]).log()
    log_q = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.2, 0.8, 0.0]]).log()
    assert (log_p == low).any()
    assert rejection_acceptance(log_p, log_q).tolist() == pytest.approx([0.5, 0.0, 1.0])
    assert coupled_acceptance(log_p, log_q).tolist() == pytest.approx([1 / 3, 0.0, 1.0])


def test_in_single_precision_a_large_vocabulary_costs_no_digits():
    log_p, log_q = pairs(3, 50_000, seed=1)
    for formula in (rejection_acceptance, coupled_acceptance):
        single = formula(log_p.float(), log_q.float())
        assert single.dtype == torch.float64
        assert torch.allclose(single, formula(log_p, log_q), atol=1e-6)


def test_tokens_a_round_are_those_of_every_outcome():
    accepted = [0.7, 0.4, 0.9]
    expected = 0.0
    for outcome in itertools.product((True, False), repeat=3):
        probability = math.prod(a if yes else 1 - a for a, yes in zip(accepted, outcome, strict=True))
        expected += probability * (1 + len(list(itertools.takewhile(bool, outcome))))
    tokens, slopes = tokens_a_round(accepted)
    assert tokens == pytest.approx(expected)
    for index, slope in enumerate(slopes):
        more = [a + 1e-6 * (other == index) for other, a in enumerate(accepted)]
        assert slope == pytest.approx((tokens_a_round(more)[0] - tokens) / 1e-6, rel=1e-4)


# --- drafts of networks ---


def texts(rows: int, length: int, vocabulary: tuple[int, ...], seed: int = 3) -> Tensor:
    drawn = torch.randint(len(vocabulary), (rows, length), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(vocabulary)[drawn]


Found = dict[tuple[int, int], tuple[Tensor, Tensor]]


def joint_by_hand(model: Transformer, tokens: Tensor, masks: int, *, previous_token: bool) -> Found:
    """For each row and token behind the first of its block: p by all before it, q by the block all masked."""
    shown = AfterPrevious(model) if previous_token else model
    found = {}
    for row, text in enumerate(tokens):
        p = log_probabilities(logits_of(model, text[None], Causal(len(text)))[0])
        for start in range(0, len(text) - masks + 1, masks):
            block = torch.cat((text[:start], torch.full((masks,), MASK)))
            layout = block_after_clean(start, masks, causal_clean=True)
            q = log_probabilities(logits_of(shown, block[None], layout)[0])
            for place in range(start + 1, start + masks):
                found[row, place] = p[place - 1], q[place]
    return found


def expected(
    found: Found, scored: Tensor, place_of: Callable[[int], int]
) -> dict[tuple[int, int, str], float]:
    """Mean acceptances by place, way of drawing and scheme, from p and q token by token."""
    sums: dict[tuple[int, int, str], list[float]] = {}
    for (row, token), (log_p, log_q) in found.items():
        if not scored[row, token]:
            continue
        for index, way in enumerate(WAYS):
            p, q = way(log_p), way(log_q)
            for scheme, by_hand in (("rejection", accepted_by_rejection), ("coupled", accepted_by_noise)):
                sums.setdefault((place_of(token), index, scheme), []).append(by_hand(p, q))
    return {key: sum(values) / len(values) for key, values in sums.items()}


def measured(model: Transformer, drafts: Drafts, batch: TokenBatch) -> dict[tuple[int, int, str], float]:
    return {
        (each.place, WAYS.index(found.sharpening), found.scheme): each.accepted.value
        for found in measure_acceptance(model, drafts, [batch[:1], batch[1:]], WAYS)
        for each in found.places
    }


@pytest.mark.parametrize("entries", [1, 10, 2**23])
@pytest.mark.parametrize("masks", [1, 2, 3])
def test_a_drafter_is_measured_as_by_hand(masks, entries, monkeypatch):
    monkeypatch.setattr(acceptance, "_ENTRIES", entries)  # how many are taken at a time changes nothing
    model, tokens = drafter(), texts(3, 6, (0, 1, 2, 3))
    batch = TokenBatch.of(tokens, lengths=torch.tensor([6, 4, 6]))
    drafts = Drafts(mask_id=APART, masks=masks, shifted=True, adds=True)
    by_hand = {key: (p.log(), q.log()) for key, (p, q) in drafts_by_hand(model, tokens, masks).items()}
    found = measured(model, drafts, batch)
    assert found == pytest.approx(
        expected(by_hand, batch.scored, lambda token: (token - 1) % masks + 2), abs=1e-10
    )
    assert sorted({place for place, _, _ in found}) == list(drafts.places)


@pytest.mark.parametrize("previous_token", [False, True])
@pytest.mark.parametrize("masks", [2, 3, 4])
def test_a_joint_model_is_measured_as_by_hand(masks, previous_token):
    model, tokens = tiny_transformer(3), texts(3, 7, CLEAN)  # what is left past the last block drafts nothing
    batch = TokenBatch.of(tokens, lengths=torch.tensor([7, 4, 6]))
    drafts = Drafts(mask_id=MASK, masks=masks, shifted=False, previous_token=previous_token)
    by_hand = joint_by_hand(model, tokens, masks, previous_token=previous_token)
    found = measured(model, drafts, batch)
    assert found == pytest.approx(expected(by_hand, batch.scored, lambda token: token % masks + 1), abs=1e-10)
    assert sorted({place for place, _, _ in found}) == list(range(2, masks + 1))


def test_it_is_what_training_shows():
    model, batch = drafter(), TokenBatch.of(texts(4, 6, (0, 1, 2, 3)))
    objective = Drafting(mask_id=APART, masks=3)
    shown = objective.figures({k: v.item() for k, v in objective.loss(model, batch).statistics.items()})
    (rejection, _) = measure_acceptance(
        model, Drafts(mask_id=APART, masks=3, shifted=True, adds=True), [batch], [AS_IT_IS]
    )
    assert {f"accepted_{each.place}": each.accepted.value for each in rejection.places} == pytest.approx(
        shown
    )


# --- errors ---


def test_errors_are_those_of_a_ratio_clustered_by_text_and_carried_over():
    model, drafts = tiny_transformer(3), Drafts(mask_id=MASK, masks=3, shifted=False)
    batch = TokenBatch.of(texts(30, 9, CLEAN), lengths=torch.tensor([9, 6, 7] * 10))
    found = measure_acceptance(model, drafts, [batch], [AS_IT_IS])[0]
    assert found.sequences == 30
    totals, sizes = (
        part[:, :, *at]
        for part, at in zip(acceptance._totals(model, drafts, batch, [AS_IT_IS]), ((0, 0), ()), strict=True)
    )
    for index, each in enumerate(found.places):
        assert each.drafts == sizes[:, index].sum()
        assert each.accepted.error == ratio_error(totals[:, index], sizes[:, index], neighbours=3)
    first, second = found.places
    assert first.tokens == (pytest.approx(1 + first.accepted.value), pytest.approx(first.accepted.error))
    assert second.tokens.value == pytest.approx(1 + first.accepted.value * (1 + second.accepted.value))
    # Alone, without neighbours, it is what leaving out a text at a time comes to.
    sums = torch.stack((totals, sizes)).sum(1)
    left = torch.stack((totals, sizes)).neg() + sums.unsqueeze(1)
    rates = (left[0] / left[1]).tolist()
    means = torch.tensor([tokens_a_round(rate)[0] for rate in rates], dtype=torch.float64)
    jackknife = math.sqrt(29 / 30 * (means - means.mean()).square().sum().item())
    assert second.tokens.error >= 0.95 * jackknife
    assert second.tokens.error <= 2.0 * jackknife


def test_one_text_has_no_error():
    drafts = Drafts(mask_id=MASK, masks=2, shifted=False)
    (found, _) = measure_acceptance(
        tiny_transformer(3), drafts, [TokenBatch.of(texts(1, 8, CLEAN))], [AS_IT_IS]
    )
    assert (found.places[0].accepted.error, found.places[0].tokens.error) == (None, None)


# --- what is refused ---


def test_groups_that_draft_nothing_are_refused():
    with pytest.raises(ValueError, match="masks must be at least 1, to draft at least one token, got 0"):
        Drafts(mask_id=MASK, masks=0, shifted=True)
    with pytest.raises(ValueError, match="masks must be at least 2, to draft at least one token, got 1"):
        Drafts(mask_id=MASK, masks=1, shifted=False)


def test_what_cannot_be_measured_is_refused():
    drafts, batch = Drafts(mask_id=MASK, masks=4, shifted=False), TokenBatch.of(texts(2, 8, CLEAN))
    model = tiny_transformer(3)
    with pytest.raises(ValueError, match="masks must be at most 8, the tokens of a text, got 9"):
        measure_acceptance(model, replace(drafts, masks=9), [batch], WAYS)
    with pytest.raises(ValueError, match="batches must hold drafts at every place up to 4, got none"):
        measure_acceptance(model, drafts, [], WAYS)
    short = TokenBatch.of(batch.tokens, lengths=torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="drafts at every place up to 4"):
        measure_acceptance(model, drafts, [short], WAYS)
    with torch.no_grad():
        model.final_norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="got NaN in batch 0"):
        measure_acceptance(model, drafts, [batch], WAYS)
    with pytest.raises(ValueError, match="evaluation mode"):
        measure_acceptance(tiny_transformer(3, dropout=0.1).train(), drafts, [batch], WAYS)
    with pytest.raises(ValueError, match="a network that stores keys and values"):
        measure_acceptance(CopyNetwork(), drafts, [batch], WAYS)
