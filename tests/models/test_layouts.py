"""Layouts say who may attend to whom exactly as the paper writes it, in every rendering."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from bd3lm.models import Bidirectional, BlockCausal, BlockDecoding, BlockDiffusion, Causal, Layout
from tests.oracles.formula import written_out_logits
from tests.oracles.networks import FAMILIES, logits_of, mask_of, network_of


def written(layout: Layout) -> Tensor:
    """The rule of a layout, pair by pair, from the paper's definitions (Suppl. B.6)."""
    match layout:
        case Bidirectional():
            sees = lambda i, j: True  # noqa: E731
        case Causal():
            sees = lambda i, j: j <= i  # noqa: E731
        case BlockDecoding():
            sees = lambda i, j: _sees_while_decoding(layout, i, j)  # noqa: E731
        case BlockCausal(block_size=n):
            sees = lambda i, j: j // n <= i // n  # noqa: E731
        case BlockDiffusion():
            sees = lambda i, j: _sees_full(layout, i, j)  # noqa: E731
    size = layout.size
    return torch.tensor([[sees(i, j) for j in range(size)] for i in range(size)])


def _sees_full(layout: BlockDiffusion, i: int, j: int) -> bool:
    """[[M_BD, M_OBC], [0, M_BC]], with a row of M_BD and M_OBC for each noisy copy."""
    (copy_i, i), (copy_j, j) = divmod(i, layout.length), divmod(j, layout.length)
    block_i, block_j = i // layout.block_size, j // layout.block_size
    clean = layout.copies
    if copy_i == clean and copy_j == clean:
        return j <= i if layout.causal_clean else block_j <= block_i  # M_BC
    if copy_i == clean:
        return False
    if copy_j == clean:
        return block_j < block_i  # M_OBC
    return copy_i == copy_j and block_i == block_j  # M_BD


def _sees_while_decoding(layout: BlockDecoding, i: int, j: int) -> bool:
    """M_BC; with `causal_clean` finished blocks are causal, and the last is finished if nothing is read."""
    n = layout.block_size
    being_written = i // n == layout.length // n - 1 and not layout.keys_only
    if layout.causal_clean and not being_written:
        return j <= i
    return j // n <= i // n


SMALL = [
    Causal(5),
    Bidirectional(5),
    BlockCausal(6, 1),
    BlockCausal(6, 2),
    BlockCausal(6, 6),
    *(
        BlockDecoding(length, n, causal_clean=causal, keys_only=keys_only)
        for length, n in ((1, 1), (4, 1), (6, 2), (9, 3), (4, 4))
        for causal in (False, True)
        for keys_only in (False, True)
    ),
    *(
        BlockDiffusion(length, n, copies=copies, causal_clean=causal)
        for length, n in ((1, 1), (4, 1), (6, 2), (6, 3), (4, 4))
        for copies in (1, 2, 3)
        for causal in (False, True)
    ),
]
ODD = [  # none is a multiple of 128
    Causal(130),
    Bidirectional(100),
    BlockCausal(100, 4),
    BlockCausal(260, 13),
    BlockDecoding(130, 10, causal_clean=True),
    BlockDiffusion(12, 4),
    BlockDiffusion(100, 5, copies=2),
    BlockDiffusion(130, 1, causal_clean=True),
    BlockDiffusion(132, 4),
    BlockDiffusion(132, 4, copies=2, causal_clean=True),
    BlockDiffusion(260, 20),
]


@pytest.mark.parametrize("layout", SMALL + ODD, ids=str)
def test_dense_mask_is_the_written_rule(layout):
    assert torch.equal(layout.dense(), written(layout))


def test_figure_of_the_paper_with_six_tokens_in_blocks_of_two():
    figure = """
        ##..........
        ##..........
        ..##..##....
        ..##..##....
        ....######..
        ....######..
        ......##....
        ......##....
        ......####..
        ......####..
        ......######
        ......######"""
    drawn = torch.tensor([[cell == "#" for cell in line.strip()] for line in figure.strip().splitlines()])
    assert torch.equal(BlockDiffusion(6, 2).dense(), drawn)


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_dense_mask_of_a_span_is_a_slice_of_the_whole(layout):
    start, stop = layout.size // 3, layout.size
    assert torch.equal(layout.dense((start, stop)), written(layout)[start:stop])
    assert layout.dense((0, 0)).shape == (0, layout.size)


def expanded(mask: BlockMask, queries: int, keys: int) -> Tensor:
    """What a kernel that trusts the block mask computes: it skips squares, checks pairs, or takes whole
    tiles."""
    tile_q, tile_k = mask.BLOCK_SIZE
    q, k = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    asked = mask.mask_mod(torch.tensor(0), torch.tensor(0), q, k)
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for row in range(-(-queries // tile_q)):
        rows = slice(row * tile_q, (row + 1) * tile_q)
        for i in mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist():
            tile = slice(i * tile_k, (i + 1) * tile_k)
            seen[rows, tile] = asked[rows, tile]
        for i in mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].tolist():
            seen[rows, i * tile_k : (i + 1) * tile_k] = True
    return seen


@pytest.mark.parametrize("layout", [*ODD, BlockDiffusion(256, 64), BlockCausal(384, 128)], ids=str)
def test_block_mask_skips_no_pair_and_adds_none(layout):
    for start, stop in ((0, layout.size), layout.read, (layout.size // 3, layout.size)):
        seen = expanded(layout.block_mask((start, stop)), stop - start, layout.size)
        assert torch.equal(seen, layout.dense((start, stop)))


def test_block_mask_skips_most_of_a_long_layout():
    assert BlockDiffusion(1024, 4).block_mask().sparsity() > 60


def test_text_positions_start_again_in_every_copy():
    assert BlockDiffusion(3, 1, copies=2).text_positions().tolist() == [0, 1, 2] * 3
    for layout in (Causal(4), Bidirectional(4), BlockCausal(4, 2), BlockDecoding(4, 2)):
        assert layout.text_positions().tolist() == [0, 1, 2, 3]


def test_only_what_is_needed_is_read():
    assert BlockDiffusion(6, 2, copies=2).read == (0, 12)
    assert BlockDiffusion(6, 2, copies=2, read_clean=True).read == (0, 18)
    assert BlockDiffusion(6, 2, keys_only=True).read == (0, 0)
    assert BlockCausal(6, 2).read == (0, 6)
    assert BlockCausal(6, 2, keys_only=True).read == (0, 0)
    assert BlockDecoding(6, 2).read == (4, 6)
    assert BlockDecoding(6, 2, causal_clean=True).read == (4, 6)
    assert BlockDecoding(6, 6).read == (0, 6)
    assert BlockDecoding(6, 2, keys_only=True).read == (0, 0)


def test_masks_of_finished_blocks_and_of_the_block_being_written():
    """Six tokens in blocks of two, `causal_clean`: read, the last block sees all of itself."""
    written_last = """
        #.....
        ##....
        ###...
        ####..
        ######
        ######"""
    all_finished = """
        #.....
        ##....
        ###...
        ####..
        #####.
        ######"""
    for figure, keys_only in ((written_last, False), (all_finished, True)):
        drawn = torch.tensor([[cell == "#" for cell in line.strip()] for line in figure.split()])
        assert torch.equal(BlockDecoding(6, 2, causal_clean=True, keys_only=keys_only).dense(), drawn)


@pytest.mark.parametrize(
    ("layout", "starts"),
    [
        (Causal(6), [0, 1, 2, 3, 4, 5]),
        (Bidirectional(6), [0, 0, 0, 0, 0, 0]),
        (BlockCausal(6, 1), [0, 1, 2, 3, 4, 5]),
        (BlockCausal(6, 3), [0, 0, 0, 3, 3, 3]),
        (BlockDecoding(6, 2), [0, 0, 2, 2, 4, 4]),
        (BlockDecoding(6, 2, causal_clean=True), [0, 0, 2, 2, 4, 4]),
        (BlockDecoding(6, 2, causal_clean=True, keys_only=True), [0, 0, 2, 2, 4, 4]),
    ],
    ids=str,
)
def test_positions_written_together_share_a_group_start(layout, starts):
    assert layout.group_start(torch.arange(6)).tolist() == starts
    assert layout.group_start(torch.tensor([[3], [5]])).tolist() == [[starts[3]], [starts[5]]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Causal(0), "length must be at least 1, got 0"),
        (lambda: BlockCausal(6, 4), "block_size must be a positive divisor of the length 6, got 4"),
        (lambda: BlockCausal(6, 0), "block_size must be .* got 0"),
        (lambda: BlockDecoding(6, 4), "block_size must be a positive divisor of the length 6, got 4"),
        (lambda: BlockDiffusion(6, 12), "block_size must be .* got 12"),
        (lambda: BlockDiffusion(6, 2, copies=0), "copies must be at least 1, got 0"),
    ],
)
def test_impossible_layouts_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- through a whole network ---

NETWORKS = {family: network_of(family, 3) for family in FAMILIES}


def random_ids(family: str, rows: int, length: int, seed: int) -> Tensor:
    """Random tokens from everything the network reads, including its mask."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, NETWORKS[family].config.input_vocab_size, (rows, length), generator=generator)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["auto", "dense", pytest.param("flex", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_network_under_a_layout_is_its_formula_under_the_written_rule(family, backend, monkeypatch):
    """Every layout, pair by pair, and the positions that it reads."""
    model = NETWORKS[family]
    monkeypatch.setattr(model, "attention_backend", backend)
    for layout in SMALL if backend != "flex" else SMALL[::4]:
        tokens = random_ids(family, 2, layout.size, seed=layout.size)
        expected = written_out_logits(model, tokens, written(layout), layout.text_positions())
        found = logits_of(model, tokens, layout)
        read = expected[:, slice(*layout.read)]
        torch.testing.assert_close(
            found, read, rtol=0, atol=1e-10, msg=lambda said, of=layout: f"{of}: {said}"
        )


# --- how far a change of one token reaches ---


@st.composite
def block_diffusion_layouts(draw):
    n, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    copies, causal = draw(st.integers(1, 3)), draw(st.booleans())
    return BlockDiffusion(n * blocks, n, copies=copies, causal_clean=causal, read_clean=True)


families = st.sampled_from(list(FAMILIES))


def changed_positions(layout: Layout, position: int, seed: int, family: str) -> Tensor:
    """Which logits change when the token at `position` changes."""
    tokens, mask = random_ids(family, 1, layout.size, seed), mask_of(NETWORKS[family])
    other = tokens.clone()
    other[0, position] = mask if tokens[0, position] != mask else 0
    with torch.no_grad():
        before, after = (logits_of(NETWORKS[family], t, layout) for t in (tokens, other))
    return (before - after).abs().amax(-1)[0] > 1e-12


@given(block_diffusion_layouts(), families, st.data())
def test_a_noisy_token_reaches_its_own_block_of_its_own_copy_only(layout, family, data):
    position = data.draw(st.integers(0, layout.noisy - 1))
    changed = changed_positions(layout, position, layout.size, family)
    block = position // layout.block_size  # blocks are counted through all copies
    expected = torch.arange(layout.size) // layout.block_size == block
    assert torch.equal(changed, expected)


@given(block_diffusion_layouts(), families, st.data())
def test_a_clean_token_reaches_later_blocks_only(layout, family, data):
    text = data.draw(st.integers(0, layout.length - 1))
    changed = changed_positions(layout, layout.noisy + text, layout.size, family)
    place = torch.arange(layout.length)
    later = place // layout.block_size > text // layout.block_size
    clean = place >= (text if layout.causal_clean else text // layout.block_size * layout.block_size)
    assert torch.equal(changed, torch.cat((later.repeat(layout.copies), clean)))


@given(st.integers(1, 4), st.integers(1, 4), families, st.data())
def test_a_token_under_block_causal_attention_reaches_its_block_and_later_ones(n, blocks, family, data):
    layout = BlockCausal(n * blocks, n)
    position = data.draw(st.integers(0, layout.size - 1))
    expected = torch.arange(layout.size) >= position // n * n
    assert torch.equal(changed_positions(layout, position, n, family), expected)
