"""Every kernel gives the same attention under the same rule."""

import sys
from dataclasses import astuple, dataclass
from types import SimpleNamespace

import pytest
import torch

from bd3lm.models import Bidirectional, BlockCausal, BlockDiffusion, Causal
from bd3lm.models.attention import (
    _FineTiles,
    _has_fine_tiles,
    attend,
    render,
)
from bd3lm.models.layouts import _block_mask, _dense
from tests.oracles.networks import logits_of, tiny_transformer

pytestmark = pytest.mark.sweep(3)

CPU = torch.device("cpu")
LAYOUTS = [
    Causal(12),
    Bidirectional(100),
    BlockCausal(130, 5),
    BlockDiffusion(12, 4),
    BlockDiffusion(132, 4),
    BlockDiffusion(130, 10, copies=2, causal_clean=True),
    BlockDiffusion(260, 20, read_clean=True),
]


def written_out(q, k, v, mask):
    """softmax(q kᵀ / √d) v over the visible keys, one query at a time."""
    out = torch.zeros_like(q)
    for i in range(q.shape[2]):
        scores = (q[:, :, i : i + 1] * k[:, :, mask[i]]).sum(-1) / q.shape[-1] ** 0.5
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        out[:, :, i] = (weights.unsqueeze(-1) * v[:, :, mask[i]]).sum(2)
    return out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["auto", "dense", "flex"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_attention_is_the_softmax_over_what_the_layout_allows(layout, backend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, layout.size, 8, generator=generator, dtype=torch.float64)
    start, stop = layout.read
    attended = attend(q[:, :, start:stop], k, v, render(layout, (start, stop), CPU, backend))
    expected = written_out(q[:, :, start:stop], k, v, layout.dense((start, stop)))
    torch.testing.assert_close(attended, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "layout",  # read whole and in part; the tests above show that each kind and size attends alike
    [Causal(12), BlockDiffusion(12, 4)],
    ids=str,
)
def test_a_network_gives_the_same_logits_with_either_backend(layout):
    model = tiny_transformer(1)
    tokens = torch.randint(0, 4, (2, layout.size), generator=torch.Generator().manual_seed(0))
    outputs = {}
    with torch.no_grad():
        for backend in ("auto", "dense", "flex"):
            model.attention_backend = backend
            outputs[backend] = logits_of(model, tokens, layout)
    torch.testing.assert_close(outputs["flex"], outputs["dense"], rtol=0, atol=1e-10)
    torch.testing.assert_close(outputs["auto"], outputs["dense"], rtol=0, atol=1e-10)


def test_layouts_with_a_kernel_of_their_own_need_no_mask():
    assert render(Bidirectional(5), (0, 5), CPU).dense is None
    causal = render(Causal(5), (0, 5), CPU)
    assert causal.causal
    assert causal.dense is None
    assert render(Causal(5), (2, 5), CPU).dense is not None  # the kernel would align it to the start


def test_renderings_are_kept():
    assert BlockDiffusion(6, 2).dense() is BlockDiffusion(6, 2).dense()
    assert BlockDiffusion(6, 2).block_mask() is BlockDiffusion(6, 2).block_mask()
    assert BlockDiffusion(6, 2).dense() is not BlockDiffusion(6, 3).dense()
    assert not torch.equal(Causal(6).dense(), Bidirectional(6).dense())  # equal fields, different layout


def test_a_mask_first_made_in_inference_mode_can_be_kept_for_training():
    _dense.cache_clear()
    _block_mask.cache_clear()
    layout = BlockDiffusion(6, 3)
    with torch.inference_mode():
        dense, blocks = layout.dense(), layout.block_mask()
    assert not dense.is_inference()
    assert not blocks.kv_indices.is_inference()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend must be 'auto', 'dense' or 'flex', got 'fast'"):
        render(Causal(3), (0, 3), CPU, "fast")


# --- tiles of 64, which torch does not offer by default ---


@dataclass
class Cut:
    block_m1: int
    block_n1: int
    block_m2: int
    block_n2: int
    num_stages: int
    num_warps: int


COARSE, NARROW = Cut(64, 128, 128, 64, 3, 8), Cut(32, 64, 64, 32, 2, 4)
FINE = (64, 64, 64, 64, 3, 4)
HOPPER = torch.device("cuda", 7)


@pytest.fixture
def insides(monkeypatch):
    """Replaces the internals of torch's compiler, which are slow to import, as if on a Hopper GPU."""

    class Choices:
        other = "another choice"

        def get_flex_attention_bwd_configs(self, head_dim, dtype):
            return [COARSE] if head_dim == 64 else [COARSE, NARROW]

    modules = {
        "choices": SimpleNamespace(InductorChoices=Choices),
        "compile_fx": SimpleNamespace(compile_fx_inner=None),
        "virtualized": SimpleNamespace(V=SimpleNamespace(set_choices_handler=None)),
        "template_heuristics": SimpleNamespace(),
        "template_heuristics.triton": SimpleNamespace(FlexBwDConfig=Cut),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"torch._inductor.{name}", module)
        monkeypatch.setattr(
            torch._inductor, name.partition(".")[0], modules[name.partition(".")[0]], raising=False
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _has_fine_tiles.cache_clear()
    yield Choices
    _has_fine_tiles.cache_clear()


def test_fine_tiles_are_for_hopper(insides):
    assert _has_fine_tiles(HOPPER)
    assert not _has_fine_tiles(CPU)


def test_an_unknown_torch_has_no_fine_tiles(insides):
    del insides.get_flex_attention_bwd_configs
    assert not _has_fine_tiles(HOPPER)


def test_fine_tiles_are_offered_only_if_torch_offers_none(insides):
    offered = _FineTiles(insides())
    coarse, fine = offered.get_flex_attention_bwd_configs(64, dtype=torch.bfloat16)
    assert (coarse, astuple(fine)) == (COARSE, FINE)
    assert offered.get_flex_attention_bwd_configs(128, dtype=torch.bfloat16) == [COARSE, NARROW]
    assert offered.other == "another choice"


@pytest.mark.parametrize(("queries", "fine"), [((0, 512), True), ((0, 127), False)])
def test_a_mask_is_fine_for_many_queries_and_changes_nothing_in_torch(insides, monkeypatch, queries, fine):
    """Rendered on a CPU, with the answer for a Hopper GPU."""
    before = insides.get_flex_attention_bwd_configs
    monkeypatch.setattr("bd3lm.models.attention._has_fine_tiles", lambda device: True)
    mask = render(BlockDiffusion(256, 4), queries, CPU, "flex")
    assert mask.fine == fine
    assert mask.blocks.BLOCK_SIZE == ((64, 64) if fine else (128, 128))
    assert insides.get_flex_attention_bwd_configs is before


@pytest.mark.slow
@pytest.mark.parametrize("hopper", [True, False])
def test_both_passes_of_a_graph_are_compiled_with_fine_tiles_where_its_tensors_are(hopper, monkeypatch):
    """By torch's own compiler, which compiles a backward pass when that is first run. The trainer compiles a
    network before it moves it to the GPU, so where the network is then says nothing: here its place becomes
    a Hopper GPU, by name, after it was compiled."""
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    kinds, compile_one = [], compile_fx.compile_fx_inner

    def watched(*args, **kwargs):
        kinds.append(type(V.choices))
        return compile_one(*args, **kwargs)

    model = tiny_transformer(vocab_size=7)
    tokens = torch.arange(6).unsqueeze(0)

    def loss_and_gradients():
        loss = logits_of(model, tokens, Causal(6)).square().sum()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    expected = loss_and_gradients()
    model.compile_trunk()
    monkeypatch.setattr(compile_fx, "compile_fx_inner", watched)
    monkeypatch.setattr("bd3lm.models.attention._has_fine_tiles", lambda device: hopper)
    with torch._inductor.config.patch(force_disable_caches=True):
        found = loss_and_gradients()
    assert len(kinds) == (2 if hopper else 0), (
        "torch's own compiler is called as it is where nothing is offered"
    )
    assert set(kinds) <= {_FineTiles}
    assert type(V.choices) is not _FineTiles
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
