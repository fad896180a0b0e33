"""Texts packed into a row are each read as if alone, in every rendering and through every network."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import BlockMask

from bd3lm.models import (
    Bidirectional,
    BlockCausal,
    BlockCopies,
    BlockDecoding,
    BlockDiffusion,
    Causal,
    Drafting,
    KVTape,
    Layout,
    Packed,
    Transformer,
    document_begins,
    packed,
)
from tests.oracles.networks import FAMILIES, logits_of, network_of
from tests.oracles.strangers import KeepingConfig, PlainConfig, stranger

NETWORKS = {family: network_of(family, 3) for family in FAMILIES}
ROWS = ((8, 4, 12), (4, 20), (24,))  # lengths of the texts of each row
DOCUMENTS = torch.tensor([[n for n, size in enumerate(row) for _ in range(size)] for row in ROWS])
LENGTH = DOCUMENTS.shape[1]


def texts() -> list[tuple[int, int, int]]:
    """(row, start, stop) of each text."""
    found = []
    for row, sizes in enumerate(ROWS):
        start = 0
        for size in sizes:
            found.append((row, start, start + size))
            start += size
    return found


def written(layout: Layout, documents: Tensor) -> Tensor:
    """The rule pair by pair: (rows, size, size)."""
    rule, numbers, length = layout.dense(), documents.tolist(), layout.length
    return torch.tensor(
        [
            [
                [bool(rule[i, j]) and row[i % length] == row[j % length] for j in range(layout.size)]
                for i in range(layout.size)
            ]
            for row in numbers
        ]
    )


def expanded(mask: BlockMask, row: int, queries: int, keys: int) -> Tensor:
    """What a kernel that trusts the block mask computes in a row: it skips squares, checks pairs, or takes
    all."""
    tile_q, tile_k = mask.BLOCK_SIZE
    q, k = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    asked = mask.mask_mod(torch.tensor(row), torch.tensor(0), q, k)
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for line in range(-(-queries // tile_q)):
        some = slice(line * tile_q, (line + 1) * tile_q)
        for i in mask.kv_indices[row, 0, line, : mask.kv_num_blocks[row, 0, line]].tolist():
            tile = slice(i * tile_k, (i + 1) * tile_k)
            seen[some, tile] = asked[some, tile]
        for i in mask.full_kv_indices[row, 0, line, : mask.full_kv_num_blocks[row, 0, line]].tolist():
            seen[some, i * tile_k : (i + 1) * tile_k] = True
    return seen


LAYOUTS: list[Callable[[int], Layout]] = [
    Causal,
    Bidirectional,
    lambda n: BlockCausal(n, 4),
    lambda n: BlockDecoding(n, 2, causal_clean=True),
    lambda n: BlockDiffusion(n, 1, causal_clean=True),
    lambda n: BlockDiffusion(n, 4),
    lambda n: BlockDiffusion(n, 4, copies=2, causal_clean=True, read_clean=True),
    lambda n: BlockDiffusion(n, n, copies=2, causal_clean=True),  # a single block, in each text
]


@st.composite
def layouts_and_documents(draw: st.DrawFn) -> tuple[Layout, Tensor]:
    blocks, n, rows = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 3))
    layout = draw(
        st.sampled_from(
            [
                Causal(blocks * n),
                Bidirectional(blocks * n),
                BlockCausal(blocks * n, n),
                BlockDiffusion(blocks * n, n),
                BlockDiffusion(blocks * n, n, copies=2, causal_clean=True),
            ]
        )
    )
    steps = st.lists(st.integers(0, 2), min_size=blocks, max_size=blocks)  # numbers may be skipped
    numbers = torch.tensor([draw(steps) for _ in range(rows)]).cumsum(1) - 2
    return layout, numbers.repeat_interleave(n, 1)


@given(layouts_and_documents(), st.sampled_from([2, 4, 5, 128]), st.data())
def test_every_rendering_is_the_written_rule(case: tuple[Layout, Tensor], tile: int, data: st.DataObject):
    inner, documents = case
    layout, expected = Packed(inner, documents), written(inner, documents)
    start = data.draw(st.integers(0, layout.size - 1))
    assert torch.equal(layout.dense(), expected)
    place = torch.arange(layout.size)
    assert torch.equal(layout.allows(place.unsqueeze(1), place), expected)
    for queries in ((0, layout.size), (start, layout.size)):
        some = expected[:, slice(*queries)]
        assert torch.equal(layout.dense(queries), some)
        mask = layout.block_mask(queries, granularity=tile)
        assert mask.shape == (len(documents), 1, *some.shape[1:])
        for row in range(len(documents)):
            assert torch.equal(expanded(mask, row, *some.shape[1:]), some[row])


def test_squares_of_two_texts_are_skipped_and_those_of_one_are_taken_whole():
    """At training size: as few squares as if each text had a mask of its own."""
    documents = torch.arange(4).repeat_interleave(256).repeat(2, 1)
    alone = BlockDiffusion(256, 4).block_mask(granularity=64)
    mask = Packed(BlockDiffusion(1024, 4), documents).block_mask(granularity=64)
    for found, expected in (
        (mask.kv_num_blocks, alone.kv_num_blocks),
        (mask.full_kv_num_blocks, alone.full_kv_num_blocks),
        (mask.q_num_blocks, alone.q_num_blocks),
    ):
        noisy, clean = expected[0, 0].chunk(2)
        assert torch.equal(found[1, 0], torch.cat((noisy.repeat(4), clean.repeat(4))))


def test_positions_in_the_text_are_counted_from_0_in_each_also_in_noisy_copies():
    layout = Packed(BlockDiffusion(6, 2, copies=2), torch.tensor([[3, 3, 3, 3, 7, 7], [0, 0, 1, 1, 2, 2]]))
    assert layout.text_positions().tolist() == [[0, 1, 2, 3, 0, 1] * 3, [0, 1] * 9]
    assert document_begins(layout.documents).int().tolist() == [[1, 0, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0]]


def test_other_properties_come_from_the_inner_layout():
    for inner in (BlockDiffusion(24, 4, adds=True), Causal(24, keys_only=True), BlockDecoding(24, 4)):
        layout = Packed(inner, DOCUMENTS)
        for name in ("length", "size", "read", "added", "keys_only"):
            assert getattr(layout, name) == getattr(inner, name)
    assert packed(inner, None, "cpu") is inner
    assert Packed(inner, DOCUMENTS) != Packed(inner, DOCUMENTS)  # it holds tensors, so it is not a cache key


# --- through networks ---


def random_ids(model: Transformer, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, model.config.input_vocab_size, (len(ROWS), size), generator=generator)


def of_text(values: Tensor, layout: Layout, row: int, start: int, stop: int) -> Tensor:
    """The part of values (rows, positions, ...) that belongs to one text, in each copy; of a pass or of what
    it reads."""
    copies = values[row : row + 1].unflatten(1, (-1, layout.length))
    return copies[:, :, start:stop].flatten(1, 2)


@pytest.mark.sweep(11)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: str(make(24)))
@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_has_the_logits_and_the_gradient_that_it_has_alone(family, make, backend, monkeypatch):
    """FlexAttention has no gradient on a CPU."""
    model, layout = NETWORKS[family], make(LENGTH)
    if isinstance(layout, BlockDecoding):
        layout = BlockDecoding(LENGTH, 2, causal_clean=True, keys_only=True)  # it reads one text
    monkeypatch.setattr(model, "attention_backend", backend)
    tokens = random_ids(model, layout.size)
    if layout.keys_only:
        return through_a_tape(model, tokens, layout)
    with torch.set_grad_enabled(backend != "flex"):
        found = logits_of(model, tokens, Packed(layout, DOCUMENTS))
        assert found.shape[1] == layout.read[1] - layout.read[0]
        expected = []
        for row, start, stop in texts():
            alone = make(stop - start)
            expected.append(logits_of(model, of_text(tokens, layout, row, start, stop), alone))
            here = of_text(found, layout, row, start, stop)
            torch.testing.assert_close(here, expected[-1], rtol=0, atol=1e-10)
    if backend == "flex":
        return None
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = (
        torch.autograd.grad(total, parameters, allow_unused=True)
        for total in (found.square().sum(), sum(each.square().sum() for each in expected))
    )
    for name, one, other in zip(names, *gradients, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-9, atol=1e-9, msg=lambda said, of=name: f"{of}: {said}"
        )
    return None


def through_a_tape(model: Transformer, tokens: Tensor, layout: Layout) -> None:
    """A pass that reads nothing records the same keys and values as each text alone."""
    tape = KVTape()
    with torch.no_grad():
        model(tokens, layout=Packed(layout, DOCUMENTS), cache=tape)
        for row, start, stop in texts():
            alone = KVTape()
            model(
                tokens[row : row + 1, start:stop],
                layout=BlockDecoding(stop - start, 2, causal_clean=True, keys_only=True),
                cache=alone,
            )
            for layer, pair in enumerate(alone.layers):
                for found, expected in zip(tape.layers[layer], pair, strict=True):
                    torch.testing.assert_close(
                        found[row : row + 1, :, start:stop], expected, rtol=0, atol=1e-10
                    )


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_tape_is_the_single_pass(family):
    model, layout = NETWORKS[family], Packed(BlockDiffusion(LENGTH, 4, causal_clean=True), DOCUMENTS)
    tokens, tape = random_ids(model, layout.size), KVTape()
    model(tokens[:, LENGTH:], layout=Packed(Causal(LENGTH, keys_only=True), DOCUMENTS), cache=tape)
    replayed = model(tokens[:, :LENGTH], layout=layout, cache=tape.replay())
    torch.testing.assert_close(replayed, model(tokens, layout=layout), rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", ["GPT", "Qwen3"])
def test_noisy_blocks_are_those_of_each_text_written_alone_with_a_cache(family, size):
    model = NETWORKS[family]
    tokens = random_ids(model, 2 * LENGTH)
    found = model.head(model(tokens, layout=Packed(BlockDiffusion(LENGTH, size), DOCUMENTS)))
    for row, start, stop in texts():
        cache = model.new_cache(1, segment=size)
        for begin in range(start, stop, size):
            noisy, clean = (tokens[row : row + 1, at + begin : at + begin + size] for at in (0, LENGTH))
            written_alone = logits_of(model, noisy, Bidirectional(size), cache=cache)
            here = found[row : row + 1, begin : begin + size]
            torch.testing.assert_close(here, written_alone, rtol=0, atol=1e-10)
            model(clean, layout=Bidirectional(size, keys_only=True), cache=cache)
            cache.advance(size)


@torch.no_grad()
@pytest.mark.parametrize(
    "config", [PlainConfig(vocab_size=4, width=6), KeepingConfig(vocab_size=4)], ids=repr
)
def test_custom_networks_need_no_support_for_packing(config):
    """One network that asks the layout for its mask, and one that asks a store."""
    model, layout = stranger(config), BlockDiffusion(LENGTH, 4)
    tokens = torch.randint(0, 4, (len(ROWS), layout.size), generator=torch.Generator().manual_seed(0))
    found = model(tokens, layout=Packed(layout, DOCUMENTS))
    for row, start, stop in texts():
        alone = model(of_text(tokens, layout, row, start, stop), layout=BlockDiffusion(stop - start, 4))
        here = of_text(found, layout, row, start, stop)
        torch.testing.assert_close(here, alone, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_compiled_trunk_is_not_compiled_again_for_other_texts(monkeypatch):
    """The tensors of a batch's mask enter a graph as inputs."""
    model, other, counter = network_of("GPT", 1), network_of("GPT", 1), CompileCounter()
    model.attention_backend = "flex"
    monkeypatch.setattr(model, "_trunk", torch.compile(model._run_trunk, dynamic=False, backend=counter))
    tokens = random_ids(model, 2 * LENGTH)
    with torch.no_grad():
        for shift in range(3):
            layout = Packed(BlockDiffusion(LENGTH, 4), DOCUMENTS.roll(shift, 0))
            expected = other(tokens, layout=layout)  # not compiled, with the dense mask
            found = model(tokens, layout=layout)  # a compiled GELU is computed in single precision
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert counter.frame_count == 1


# --- what is refused ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Packed(BlockDiffusion(24, 3), DOCUMENTS),
            "documents must begin at multiples of the block size 3, got one .* at token 8 of row 0",
        ),
        (
            lambda: Packed(BlockCausal(24, 12), DOCUMENTS),
            "documents must begin at multiples of the block size 12, got one that begins at token 8 of row 0",
        ),
        (
            lambda: Packed(Causal(23), DOCUMENTS),
            r"documents must be an int64 tensor \(rows, 23\), got .*3, 24",
        ),
        (lambda: Packed(Causal(24), DOCUMENTS.int()), "documents must be an int64 tensor .*torch.int32"),
        (lambda: Packed(Causal(24), -DOCUMENTS), "documents must not decrease along a row"),
        (lambda: Packed(Packed(Causal(24), DOCUMENTS), DOCUMENTS), "inner must be a layout for one text"),
        (lambda: Packed(Drafting.of([0, 1], 7), DOCUMENTS), "inner must be a layout for one text"),
        (
            lambda: Packed(BlockCopies.of(4, 4, causal_clean=False), DOCUMENTS),
            "inner must be a layout for one text",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_wrong_number_of_rows_or_a_cache_is_refused():
    model, layout = NETWORKS["GPT"], Packed(Causal(24), DOCUMENTS)
    tokens = torch.zeros(2, 24, dtype=torch.long)
    with pytest.raises(ValueError, match=r"tokens must have 3 rows for Packed\(Causal.*3 rows\), got 2"):
        model(tokens, layout=layout)
    tape = KVTape()
    model(tokens, layout=Causal(24), cache=tape)
    noisy = Packed(BlockDiffusion(24, 4), DOCUMENTS)
    with pytest.raises(ValueError, match=r"tokens must have 3 rows .* got 2"):
        model(tokens, layout=noisy, cache=tape.replay())
    cache = model.new_cache(3, segment=24)
    with pytest.raises(ValueError, match=r"layout must hold one text per row, .* got Packed\(Causal"):
        model(tokens[:1].expand(3, -1), layout=layout, cache=cache)
