"""Drafts of masks behind a text: each group written out by itself, what learns, and what is reported."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bd3lm.models import Causal, Layout, Transformer
from bd3lm.models.layouts import Span
from bd3lm.objectives import Drafting, TokenBatch
from tests.oracles.networks import logits_of, tiny_transformer

MASK = 4  # past the vocabulary of 4


@dataclass(frozen=True)
class Behind(Layout):
    """A text, and masks behind it that see it and each other; additions apply to the masks."""

    text: int = 0

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | (query >= self.text)

    @property
    def added(self) -> Span:
        return self.text, self.length


def drafter(**config: object) -> Transformer:
    shape = {"norm": "rms", "mlp": "swiglu", "mlp_width": 10, "heads": 4, "kv_heads": 2, "head_dim": 4}
    return tiny_transformer(6, additions=3, mask_vector=True, **shape | config)


def texts(rows: int = 2, length: int = 6) -> Tensor:
    return torch.randint(0, 4, (rows, length), generator=torch.Generator().manual_seed(3))


def by_hand(model: Transformer, tokens: Tensor, masks: int) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """For each row and token that has a draft: p by the whole text before it, and q by a group of masks."""
    found = {}
    for row, text in enumerate(tokens):
        p = logits_of(model, text[None], Causal(len(text)))[0].softmax(-1)
        for start in range(0, len(text), masks):
            shown = torch.cat((text[:start], torch.full((masks,), MASK)))
            q = logits_of(model, shown[None], Behind(len(shown), text=start))[0].softmax(-1)
            for place in range(start, min(start + masks, len(text) - 1)):
                found[row, place + 1] = p[place], q[place]
    return found


@torch.no_grad()
@pytest.mark.parametrize("masks", [1, 2, 3, 6])
@pytest.mark.parametrize("aim", ["hard", "soft", "overlap"])
def test_each_group_is_as_if_it_stood_alone_behind_its_text(aim, masks):
    model, tokens = drafter(), texts()
    batch = TokenBatch.of(tokens, lengths=torch.tensor([6, 4]))
    loss = Drafting(mask_id=MASK, masks=masks, aim=aim).loss(model, batch)
    expected, accepted, drafts = 0.0, dict.fromkeys(range(masks), 0.0), dict.fromkeys(range(masks), 0)
    for (row, token), (p, q) in by_hand(model, tokens, masks).items():
        if not batch.scored[row, token]:
            assert loss.weight[row, token] == 0
            continue
        hard = -q[tokens[row, token]].log()
        overlap = torch.minimum(p, q).sum()
        assert loss.nats[row, token].item() == pytest.approx(hard.item(), abs=1e-10)
        assert loss.weight[row, token] == 1
        expected += {"hard": hard, "soft": -(p * q.log()).sum(), "overlap": 1 - overlap}[aim]
        place = (token - 1) % masks
        accepted[place] += overlap.item()
        drafts[place] += 1
    assert not loss.weight[:, 0].any()  # no mask stands before the text
    assert loss.minimised.item() == pytest.approx(expected.item(), abs=1e-9)
    figures = Drafting(mask_id=MASK, masks=masks).figures(
        {name: value.item() for name, value in loss.statistics.items()}
    )
    for place in range(masks):
        if drafts[place]:
            assert figures[f"accepted_{place + 2}"] == pytest.approx(accepted[place] / drafts[place])


def test_what_is_given_decides_nothing_but_what_it_shows():
    """Only additions and the mask's vector learn; of the frozen weights none has a gradient."""
    model = drafter()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".additions." in name or name == "mask_vector")
    Drafting(mask_id=MASK, masks=2, aim="overlap").loss(model, TokenBatch.of(texts())).minimised.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    assert model.mask_vector.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Drafting(mask_id=MASK, masks=0), "masks must be at least 1, got 0"),
        (lambda: Drafting(mask_id=MASK, masks=2, aim="best"), "aim must be one of hard, soft, overlap, got"),
        (
            lambda: Drafting(mask_id=MASK, masks=4).loss(drafter(), TokenBatch.of(texts())),
            "tokens must be a multiple of 4, the masks of a group, got 6",
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
