"""The loss of drafts against the verifying distribution: formulas, gradients, and the best drafts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bd3lm.models import draft_loss
from bd3lm.models.draft_loss import plain_draft_loss, weighted_draft_loss

EXCLUDED = 3


def inputs(positions: int, *, vocabulary: int = 11, width: int = 6, bias: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(positions)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    return {
        "states": normal(positions, width),
        "verifying": normal(positions, width),
        "weight": normal(vocabulary, width),
        "bias": normal(vocabulary) if bias else None,
        "targets": torch.randint(4, vocabulary, (positions,), generator=generator),
        "position_weights": torch.rand(positions, generator=generator, dtype=torch.float64),
    }


def distributions(given: dict[str, Any], excluded: int) -> tuple[Tensor, Tensor]:
    """p, detached, and q."""
    found = []
    for name in ("verifying", "states"):
        logits = given[name] @ given["weight"].T + (0 if given["bias"] is None else given["bias"])
        if excluded < logits.shape[1]:
            logits = logits.index_fill(1, torch.tensor([excluded]), -torch.inf)
        found.append(logits.softmax(1))
    return found[0].detach(), found[1]


@pytest.mark.parametrize("excluded", [EXCLUDED, 11])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("aim", ["hard", "soft", "overlap"])
def test_values_and_gradients_are_those_of_the_definition(aim, chunk, bias, excluded, monkeypatch):
    monkeypatch.setattr(draft_loss, "_CHUNK", chunk)
    given = inputs(9, bias=bias)
    total, nats, overlaps = weighted_draft_loss(**given, aim=aim, excluded=excluded)
    p, q = distributions(given, excluded)
    expected = torch.minimum(p, q).sum(1)
    torch.testing.assert_close(overlaps, expected)
    possible = [token for token in range(11) if token != excluded]
    hard = -q.gather(1, given["targets"].unsqueeze(1)).squeeze(1).log()
    torch.testing.assert_close(nats, hard)
    soft = -(p[:, possible] * q[:, possible].log()).sum(1)
    each = {"hard": hard, "soft": soft, "overlap": 1 - expected}[aim]
    torch.testing.assert_close(total, (each * given["position_weights"]).sum())
    learned = [given[name] for name in ("states", "weight", "bias") if given[name] is not None]
    found = torch.autograd.grad(3.0 * total, learned)
    right = torch.autograd.grad(3.0 * (each * given["position_weights"]).sum(), learned)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().max() > 0.01
    assert not nats.requires_grad
    assert not overlaps.requires_grad


@pytest.mark.parametrize("aim", ["hard", "soft", "overlap"])
def test_a_network_without_one_matrix_for_a_head_has_the_same_loss(aim):
    given = inputs(9)
    states, verifying, weight, bias = (given[name] for name in ("states", "verifying", "weight", "bias"))
    logits = [each @ weight.T + bias for each in (states, verifying)]
    options = {"aim": aim, "excluded": EXCLUDED}
    found = plain_draft_loss(*logits, given["targets"], given["position_weights"], **options)
    expected = weighted_draft_loss(**given, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    gradients = (torch.autograd.grad(each.total, (states, weight, bias)) for each in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_verifying_states_get_no_gradient_and_a_frozen_head_costs_nothing():
    given = inputs(5)
    frozen = given | {"weight": given["weight"].detach(), "bias": given["bias"].detach()}
    total, _, _ = weighted_draft_loss(**frozen, aim="overlap", excluded=EXCLUDED)
    total.backward()
    assert given["verifying"].grad is None
    assert given["states"].grad.abs().max() > 0.01
    with torch.no_grad():
        again, _, _ = weighted_draft_loss(**given, aim="overlap", excluded=EXCLUDED)
    assert not again.requires_grad
    torch.testing.assert_close(again, total)


def test_the_overlap_is_how_often_a_draft_is_accepted():
    """Σ_y q(y) min(1, p(y)/q(y)), the acceptance rate of rejection sampling."""
    given = inputs(7)
    _, _, overlaps = weighted_draft_loss(**given, aim="soft", excluded=EXCLUDED)
    p, q = distributions(given, EXCLUDED)
    accepted = torch.where(q > 0, q * (p / q).clamp(max=1.0), 0.0).sum(1)
    torch.testing.assert_close(overlaps, accepted)


@pytest.mark.parametrize("aim", ["soft", "overlap"])
def test_each_aim_has_the_best_draft_that_a_search_finds(aim):
    """Two contexts that a draft cannot tell apart, whose tokens differ: one draft for both.

    In the first the token is 0 or 1, in the second it is 2 or 0. The cross-entropy wants the mean of the two,
    the overlap the draft that is taken most often. Drafts are searched over a grid of distributions.
    """
    p = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.0, 0.9]], dtype=torch.float64)
    grid = [
        torch.tensor([a, b, 50 - a - b], dtype=torch.float64) / 50 for a in range(51) for b in range(51 - a)
    ]

    def loss(q: Tensor) -> float:
        overlap = torch.minimum(p, q).sum(1)
        each = -(p * q.log()).nan_to_num().sum(1) if aim == "soft" else 1 - overlap
        return math.inf if (aim == "soft" and not (q[p.sum(0) > 0] > 0).all()) else float(each.mean())

    searched = min(loss(q) for q in grid)
    # A head that is the identity: states are logits. The draft's are learned, the same for both contexts.
    draft = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([draft], lr=0.05)
    eye, half = torch.eye(3, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    none = torch.zeros(2, dtype=torch.long)
    for _ in range(2000):
        total, _, _ = weighted_draft_loss(
            draft.expand(2, 3), p.log().clamp_min(-60), eye, None, none, half, aim=aim, excluded=3
        )
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert total.item() == pytest.approx(searched, abs=0.01)


def test_bad_input_is_refused():
    given = inputs(4)
    with pytest.raises(ValueError, match="aim must be one of hard, soft, overlap, got 'mean'"):
        weighted_draft_loss(**given, aim="mean", excluded=EXCLUDED)
    with pytest.raises(ValueError, match=r"verifying must have the shape of states, \(4, 6\), got \(3, 6\)"):
        weighted_draft_loss(**given | {"verifying": given["verifying"][:3]}, aim="soft", excluded=EXCLUDED)
