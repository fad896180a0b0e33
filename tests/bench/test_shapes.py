"""The arithmetic of a step, against what torch counts while it is made, and against the masks themselves."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bd3lm.bench import AttentionCase, Shape, TrainingCase
from bd3lm.models import Transformer, TransformerConfig
from bd3lm.objectives import TokenBatch

BATCH = 16
TINY = {"layers": 3, "hidden": 32, "heads": 2, "context": 16, "vocabulary": 128, "dropout": 0.0}
SHAPES = {
    "ar": Shape(method="ar", **TINY),
    "mdlm": Shape(method="mdlm", **TINY),
    "blocks of 1": Shape(block_size=1, **TINY),
    "blocks of 4": Shape(block_size=4, **TINY),
    "one block": Shape(block_size=16, **TINY),
    "joint": Shape(method="joint", **TINY),
}
GROUPED = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": "swiglu"}


@pytest.fixture
def named(monkeypatch):
    """A size of today's type, small enough to be counted."""
    monkeypatch.setattr(TransformerConfig, "sizes", {"grouped": GROUPED | {"mlp_width": 24, "norm": "rms"}})


def products_of_a_step(shape: Shape) -> int:
    """FLOPs of the linear layers and the head, forward and backward, as torch meets them.

    Every token is scored, since the formula knows of no given ones; the vocabulary is a multiple of 64, to
    which the head fills it up. Attention on a CPU is not among what torch counts.
    """
    torch.manual_seed(0)
    network, objective = Transformer(shape.config().network), TrainingCase(shape=shape).objective()
    tokens = torch.randint(shape.vocabulary - 1, (BATCH, shape.context))
    batch = TokenBatch.of(tokens, score_first=shape.method != "ar")
    with FlopCounterMode(display=False) as counter:
        objective.loss(network, batch, objective.seeded_draws(batch, 0)).minimised.backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(flops for name, flops in counts.items() if str(name) in ("aten.mm", "aten.addmm", "aten.bmm"))


def attention_flops(shape: Shape) -> float:
    """Two products of 2·d each for every pair that the mask shows, three times for the backward pass.

    The last layer asks only for the positions that are read.
    """
    layout = AttentionCase(shape=shape).layout()
    every, read = (int(layout.dense(span).sum()) for span in ((0, layout.size), layout.read))
    width = shape.network.attention_width
    return 3.0 * BATCH * 4 * width * ((shape.layers - 1) * every + read)


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_costs_what_torch_counts_and_the_pairs_that_the_mask_shows(name):
    """Exactly where chance decides nothing; elsewhere the number of hidden tokens is only near its mean."""
    shape = SHAPES[name]
    expected = products_of_a_step(shape) + attention_flops(shape)
    exact = name in ("ar", "blocks of 1")
    assert shape.training_flops(BATCH) == pytest.approx(expected, rel=1e-12 if exact else 0.01)


@pytest.mark.parametrize("method", ["ar", "bd3lm", "joint"])
def test_heads_that_share_keys_and_a_gated_mlp_cost_what_torch_counts(method, named):
    shape = Shape(method=method, size="grouped", **{**TINY, "hidden": 999})
    assert (shape.hidden, shape.heads) == (32, 4)
    expected = products_of_a_step(shape) + attention_flops(shape)
    assert shape.training_flops(BATCH) == pytest.approx(expected, rel=1e-12 if method == "ar" else 0.01)
    assert shape.title.endswith(", grouped, 3 x 32, context 16")


def test_a_batch_costs_in_proportion():
    shape = SHAPES["blocks of 4"]
    assert shape.training_flops(8) == 8 * shape.training_flops(1)


def test_the_config_is_that_of_the_method():
    ar, mdlm, _, block, _, joint = (shape.config() for shape in SHAPES.values())
    assert joint.method.joint
    assert (ar.method.kind, ar.mask_id) == ("autoregressive", 127)
    assert (mdlm.method.block_size, block.method.block_size) == (16, 4)
    assert (block.network.layers, block.network.vocab_size, block.network.context) == (3, 128, 16)


def test_titles_name_the_method_and_the_size():
    assert Shape().title == "BD3-LM, blocks of 4, 12 x 768, context 1,024"
    assert SHAPES["ar"].title == "AR, 3 x 32, context 16"
    assert SHAPES["mdlm"].method_title == "MDLM"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 5}, "block_size must divide the context 16, got 5"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"heads": 5}, "hidden must be a multiple of heads .* got hidden 32 and heads 5"),
        ({"size": "huge"}, "size must be one of tiny, small, medium, .* got 'huge'"),
        ({"vocabulary": 1}, "vocabulary must be at least 2, a token and the mask, got 1"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"dropout": 1.5}, r"dropout must lie in \[0, 1\), got 1.5"),
    ],
)
def test_a_shape_that_no_network_has_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Shape(**{**TINY, **change})
