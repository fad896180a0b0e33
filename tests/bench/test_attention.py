"""What an attention benchmark times: one layer under the layout of training, forward or there and back."""

import pytest
import torch

from bd3lm.bench import AttentionCase, Shape, attention, measure_attention
from bd3lm.models import Bidirectional, BlockDiffusion, Causal, attend

CPU = torch.device("cpu")
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "context": 8, "vocabulary": 11}


def test_attention_is_under_the_layout_of_training():
    layouts = [
        AttentionCase(shape=Shape(method=method, **SHAPE)).layout() for method in ("ar", "mdlm", "bd3lm")
    ]
    assert layouts == [Causal(8), Bidirectional(8), BlockDiffusion(8, 4)]
    assert AttentionCase(shape=Shape(block_size=8, **SHAPE)).layout() == Bidirectional(8)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_goes_back_only_when_asked(timed, monkeypatch, backward):
    asked, gradients = [], []
    differentiate = torch.autograd.grad

    def watched_attend(query, key, value, mask):
        asked.append((query.shape, mask.dense is not None, query.requires_grad))
        return attend(query, key, value, mask)

    def watched_grad(outputs, inputs, slope):
        gradients.extend(differentiate(outputs, inputs, slope))

    monkeypatch.setattr(attention, "attend", watched_attend)
    monkeypatch.setattr(torch.autograd, "grad", watched_grad)
    measure_attention(
        AttentionCase(shape=Shape(**SHAPE), batch_size=3, backend="dense", backward=backward), device=CPU
    )
    timed[-1]()
    assert asked == [((3, 2, 16, 8), True, backward)]
    assert len(gradients) == (3 if backward else 0)
    assert all(slope.abs().max() > 0 for slope in gradients)


def test_what_attention_cannot_do_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        AttentionCase(batch_size=0)
    with pytest.raises(ValueError, match="backend must be 'auto' or 'dense' on a CPU"):
        measure_attention(AttentionCase(shape=Shape(**SHAPE), batch_size=1, backend="flex"), device=CPU)


def test_the_title_of_attention_says_its_heads():
    assert AttentionCase(batch_size=4).title == "BD3-LM, blocks of 4, 12 heads of 64, context 1,024, batch 4"
