"""Passes with drafts, groups of masks and copies of a block: each part behaves as if it came alone."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bd3lm.models import (
    BlockCausal,
    BlockCopies,
    BlockDecoding,
    Causal,
    Drafting,
    KVCache,
    Layout,
    Transformer,
    TransformerConfig,
)
from bd3lm.models.layouts import Span

MASK = 10


@dataclass(frozen=True)
class Behind(Layout):
    """Clean tokens see everything before them; masks see all of it and one another."""

    clean: int

    @property
    def added(self) -> Span:
        return self.clean, self.length

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | (query >= self.clean)


def network(*, kv_heads: int = 2, additions: int = 2, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    config = TransformerConfig(
        vocab_size=11, hidden=16, layers=2, heads=4, kv_heads=kv_heads, context=32, additions=additions
    )
    made = Transformer(config).double().eval()
    for name, parameter in made.named_parameters():
        if "additions" in name:
            torch.nn.init.normal_(parameter)
    return made


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, MASK, shape, generator=torch.Generator().manual_seed(seed))


def read_text(model: Transformer, text: Tensor, layout: Layout, *, segment: int, window: int) -> KVCache:
    cache = model.new_cache(len(text), segment=segment, window=window)
    if text.shape[1]:
        model(text, layout=layout, cache=cache)
        cache.advance(text.shape[1])
    return cache


@pytest.mark.parametrize("masks", [0, 1, 3])
@pytest.mark.parametrize("parents", [(), (0,), (0, 1, 2), (0, 0, 1, 2, 2)])
@pytest.mark.parametrize("text", [0, 5])
@torch.no_grad()
def test_every_draft_and_every_group_is_as_if_it_alone_followed(
    parents: tuple[int, ...], masks: int, text: int
) -> None:
    model, layout = network(), Drafting.of(parents, masks)
    before = tokens(2, text)
    clean = tokens(2, layout.clean, seed=2)
    cache = read_text(model, before, Causal(max(text, 1)), segment=24, window=20)
    shown = torch.cat((clean, torch.full((2, layout.clean * masks), MASK)), 1)
    states = model(shown, layout=layout, cache=cache)
    for position, path in enumerate(layout.behind()):
        prefix = torch.cat((before, clean[:, path]), 1)
        whole = torch.cat((prefix, torch.full((2, masks), MASK)), 1)
        alone = model(whole, layout=Behind(whole.shape[1], prefix.shape[1]))[:, prefix.shape[1] - 1 :]
        group = slice(layout.clean + position * masks, layout.clean + (position + 1) * masks)
        torch.testing.assert_close(states[:, position], alone[:, 0], rtol=0, atol=1e-12)
        torch.testing.assert_close(states[:, group], alone[:, 1:], rtol=0, atol=1e-12)


@torch.no_grad()
def test_accepted_drafts_of_a_tree_are_kept_and_the_text_continues() -> None:
    """Even if the window slides, and rows keep different numbers of drafts."""
    model, layout = network(), Drafting.of((0, 0, 1, 2, 2), 2)
    window, text = 6, tokens(2, 5)
    cache = read_text(model, text, Causal(5), segment=18, window=window)
    rows = [text[0], text[1]]
    for turn in range(6):
        clean = tokens(2, layout.clean, seed=10 + turn)
        shown = torch.cat((clean, torch.full((2, layout.clean * 2), MASK)), 1)
        model(shown, layout=layout, cache=cache)
        path = torch.tensor([[0, 2, 5], [0, 1, 3]])
        kept = torch.tensor([3, turn % 3 + 1])
        cache.advance_along(path, kept)
        for row in range(2):
            rows[row] = torch.cat((rows[row], clean[row, path[row, : kept[row]]]))
    last = tokens(2, 1, seed=99)
    got = model(last, layout=Causal(1), cache=cache)
    for row in range(2):
        plain = model.new_cache(1, segment=1, window=window)
        for token in rows[row]:
            model(token.view(1, 1), layout=Causal(1), cache=plain)
            plain.advance(1)
        alone = model(last[row : row + 1], layout=Causal(1), cache=plain)
        torch.testing.assert_close(got[row : row + 1], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [4, 12])
@torch.no_grad()
def test_copies_of_a_block_and_the_next_are_as_if_each_came_alone(causal: bool, window: int) -> None:
    model, n, copies = network(additions=0), 4, 3
    before = tokens(2, 8)
    clean, after, states = tokens(2, n, seed=3), torch.full((2, n), MASK), tokens(2, copies * n, seed=4)
    finished = BlockDecoding(8, n, causal_clean=causal, keys_only=True)
    caches = [read_text(model, before, finished, segment=20, window=window) for _ in range(3)]
    layout = BlockCopies.of(n, copies, causal_clean=causal)
    read = model(torch.cat((clean, after, states), 1), layout=layout, cache=caches[0])
    both = BlockDecoding(2 * n, n, causal_clean=causal)
    follows = model(torch.cat((clean, after), 1), layout=both, cache=caches[1])
    torch.testing.assert_close(read[:, :n], follows, rtol=0, atol=1e-12)
    for copy in range(copies):
        part = slice(copy * n, (copy + 1) * n)
        alone = model(states[:, part], layout=BlockDecoding(n, n, causal_clean=causal), cache=caches[2])
        torch.testing.assert_close(read[:, n:][:, part], alone, rtol=0, atol=1e-12)
    for cache in caches[:2]:
        cache.advance(n)
    block = tokens(2, n, seed=5)
    one, other = (model(block, layout=BlockDecoding(n, n), cache=cache) for cache in caches[:2])
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_first_block_has_none_before_it() -> None:
    """A new row leads in with a finished block that nothing sees, and its copies are finite."""
    model, n = network(additions=0), 4
    cache = model.new_cache(1, segment=16, window=12)
    cache.lead_in(torch.tensor([n]))
    read = model(tokens(1, 4 * n), layout=BlockCopies.of(n, 2, causal_clean=False), cache=cache)
    alone = model(tokens(1, 4 * n)[:, n : 2 * n], layout=BlockCausal(n, n))
    torch.testing.assert_close(read[:, :n], alone, rtol=0, atol=1e-12)
    assert read.isfinite().all()


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parents must be .* got \(1,\)"):
        Drafting.of((1,), 2)
    with pytest.raises(ValueError, match="length must be 3 clean positions and 2 masks behind each, got 8"):
        Drafting(8, (0, 1), 2)
    with pytest.raises(ValueError, match="length must be 4 blocks of 4"):
        BlockCopies(12, 4, 2)
