"""Decoding with a cache gives the logits of a network that sees the whole text at once."""

import re

import pytest
import torch
from torch import Tensor

from bd3lm.models import (
    Bidirectional,
    BlockCausal,
    BlockDecoding,
    BlockDiffusion,
    Causal,
    KVCache,
    KVTape,
    Transformer,
)
from tests.oracles.networks import MASK, Written, block_after_clean, logits_of, tiny_transformer

pytestmark = pytest.mark.sweep(3)

MODEL = tiny_transformer(7)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def random_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 4, (rows, length), generator=torch.Generator().manual_seed(seed))


def commit(cache: KVCache, tokens: Tensor, block_size: int, model: Transformer = MODEL) -> None:
    """Write finished blocks after the text."""
    length = tokens.shape[1]
    model(tokens, layout=BlockCausal(length, block_size, keys_only=True), cache=cache)
    cache.advance(length)


def sliding(length: int, block_size: int, window: int) -> Written:
    """Each block sees itself and the `window` positions before it, which in turn saw as much."""

    def sees(query: int, key: int) -> bool:
        start = query // block_size * block_size
        return start - window <= key < start + block_size

    return Written(length, sees)


def assert_same(cached: Tensor, uncached: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(cached, uncached, rtol=0, atol=atol)


def test_blocks_decoded_one_by_one_are_those_of_the_whole_text():
    """Several noisy passes over a block leave no trace; the finished block stays."""
    text, cache = random_tokens(2, 12), MODEL.new_cache(2, segment=3)
    for start in range(0, 12, 3):
        for seed in (1, 2):
            noisy = random_tokens(2, 3, seed)
            cached = logits_of(MODEL, noisy, Bidirectional(3), cache=cache)
            uncached = logits_of(MODEL, torch.cat((text[:, :start], noisy), 1), BlockCausal(start + 3, 3))
            assert_same(cached, uncached[:, start:])
        commit(cache, text[:, start : start + 3], 3)
    assert cache.lengths.tolist() == [12, 12]


def test_autoregressive_decoding_token_by_token():
    text, cache = random_tokens(2, 10), MODEL.new_cache(2, segment=1)
    whole = logits_of(MODEL, text, Causal(10))
    for i in range(10):
        assert_same(logits_of(MODEL, text[:, i : i + 1], Causal(1), cache=cache), whole[:, i : i + 1])
        cache.advance(1)


def test_causal_text_before_a_bidirectional_block():
    """Decoding with `causal_clean`: the finished block is written causally."""
    text, cache = random_tokens(2, 6), MODEL.new_cache(2, segment=6)
    MODEL(text, layout=Causal(6, keys_only=True), cache=cache)
    cache.advance(6)
    noisy = random_tokens(2, 3, seed=1)
    uncached = logits_of(MODEL, torch.cat((text, noisy), 1), block_after_clean(6, 3, causal_clean=True))
    assert_same(logits_of(MODEL, noisy, Bidirectional(3), cache=cache), uncached[:, 6:])


def test_rows_of_different_lengths_decode_as_if_alone():
    """Prompts of 0, 1, 2 and 3 blocks, filled in one padded pass, then three more blocks."""
    lengths = torch.tensor([0, 2, 4, 6])
    prompts = random_tokens(4, 6).masked_fill(torch.arange(6) >= lengths.unsqueeze(1), MASK)
    cache = MODEL.new_cache(4, segment=6)
    MODEL(prompts, layout=BlockCausal(6, 2, keys_only=True), cache=cache)
    cache.advance(lengths)
    texts = [prompts[row, :length] for row, length in enumerate(lengths)]
    for seed in (1, 2, 3):
        noisy, block = random_tokens(4, 2, seed), random_tokens(4, 2, seed + 10)
        cached = logits_of(MODEL, noisy, Bidirectional(2), cache=cache)
        for row, text in enumerate(texts):
            whole = torch.cat((text, noisy[row])).unsqueeze(0)
            assert_same(cached[row], logits_of(MODEL, whole, BlockCausal(whole.shape[1], 2))[0, -2:])
            texts[row] = torch.cat((text, block[row]))
        commit(cache, block, 2)
    assert cache.lengths.tolist() == [6, 8, 10, 12]


def test_rows_may_finish_different_numbers_of_tokens():
    """advance(tensor) keeps the given number for each row, even 0."""
    text, cache = random_tokens(3, 8), MODEL.new_cache(3, segment=1)
    done = torch.zeros(3, dtype=torch.long)
    for step in range(8):
        going = torch.tensor([True, step % 2 == 0, step % 3 == 0])
        cached = logits_of(MODEL, text.gather(1, done.unsqueeze(1)), Causal(1), cache=cache)
        for row in range(3):
            whole = logits_of(MODEL, text[row : row + 1, : done[row] + 1], Causal(int(done[row]) + 1))
            assert_same(cached[row], whole[0, -1:])
        cache.advance(going.long())
        done += going
    assert cache.ends.tolist() == done.tolist() == [8, 4, 3]


def test_the_pass_that_writes_a_block_can_be_the_first_over_the_next():
    text = random_tokens(2, 9)
    fused, plain = MODEL.new_cache(2, segment=6), MODEL.new_cache(2, segment=6)
    for start in (0, 3, 6):
        block, noisy = text[:, start : start + 3], random_tokens(2, 3, seed=start)
        both = logits_of(MODEL, torch.cat((block, noisy), 1), BlockCausal(6, 3), cache=fused)
        fused.advance(3)
        commit(plain, block, 3)
        assert_same(both[:, 3:], logits_of(MODEL, noisy, Bidirectional(3), cache=plain))
        assert_same(  # and a second pass over the next block sees the first one's result
            logits_of(MODEL, noisy, Bidirectional(3), cache=fused), both[:, 3:]
        )


@pytest.mark.parametrize(("block_size", "window"), [(1, 5), (2, 4), (2, 5), (3, 3)])
def test_a_full_ring_slides_on_as_a_window_over_the_whole_text(block_size, window):
    """Keys influence later keys after they leave the window, so we compare with a sliding mask over
    everything."""
    length = 24
    text, cache = random_tokens(2, length), MODEL.new_cache(2, segment=block_size, window=window)
    whole = logits_of(MODEL, text, sliding(length, block_size, window))
    for start in range(0, length, block_size):
        span = slice(start, start + block_size)
        noisy = random_tokens(2, block_size, seed=start)
        replaced = torch.cat((text[:, :start], noisy), 1)
        uncached = logits_of(MODEL, replaced, sliding(start + block_size, block_size, window))
        assert_same(logits_of(MODEL, noisy, Bidirectional(block_size), cache=cache), uncached[:, span])
        assert_same(logits_of(MODEL, text[:, span], Bidirectional(block_size), cache=cache), whole[:, span])
        cache.advance(block_size)
    assert cache.lengths.tolist() == [window, window]
    assert cache.keys.shape[3] == window + block_size  # it never grew
    assert (whole - logits_of(MODEL, text, BlockCausal(length, block_size))).abs().max() > 1e-3


def test_rows_of_different_lengths_slide_independently():
    text, cache = random_tokens(2, 20), MODEL.new_cache(2, segment=8, window=4)
    MODEL(text[:, :8], layout=BlockCausal(8, 2, keys_only=True), cache=cache)
    cache.advance(torch.tensor([8, 2]))
    seen = [[text[row, :count]] for row, count in enumerate((8, 2))]
    for step in range(6):
        block = random_tokens(2, 2, seed=step)
        cached = logits_of(MODEL, block, Bidirectional(2), cache=cache)
        for row in range(2):
            seen[row].append(block[row])
            whole = torch.cat(seen[row]).unsqueeze(0)
            # The prompt was one pass of four blocks; each saw what it would have seen alone.
            assert_same(cached[row], logits_of(MODEL, whole, sliding(whole.shape[1], 2, 4))[0, -2:])
        cache.advance(2)


CUTS = {"one by one": [2] * 12, "in pairs": [4] * 6, "in threes": [6] * 4, "unevenly": [2, 10, 4, 8]}


FINISHED = {  # the layout of a pass over finished text, what is written together, whether it is causal
    "causal": (lambda length: Causal(length, keys_only=True), 1, True),
    "block-causal": (lambda length: BlockCausal(length, 2, keys_only=True), 2, False),
    "decoding": (lambda length: BlockDecoding(length, 2, keys_only=True), 2, False),
    "decoding, causal": (lambda length: BlockDecoding(length, 2, causal_clean=True, keys_only=True), 2, True),
}


@pytest.mark.parametrize(("finished", "group", "causal"), FINISHED.values(), ids=FINISHED)
@pytest.mark.parametrize("window", [1, 3, 4, 9])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_what_a_token_sees_does_not_depend_on_how_the_text_was_cut(finished, group, causal, window, cut):
    """Even if a pass is longer than the window."""

    def sees(query: int, key: int) -> bool:
        if query >= 24:
            return key >= 24 - window
        start = query // group * group
        return start - window <= key <= (query if causal else start + group - 1)

    text, cache = random_tokens(2, 24), MODEL.new_cache(2, segment=10, window=window)
    done = 0
    for size in cut:
        MODEL(text[:, done : done + size], layout=finished(size), cache=cache)
        cache.advance(size)
        done += size
    noisy = random_tokens(2, 2, seed=1)
    whole = logits_of(MODEL, torch.cat((text, noisy), 1), Written(26, sees))
    assert_same(logits_of(MODEL, noisy, Bidirectional(2), cache=cache), whole[:, 24:])


def test_a_hundred_thousand_positions_later_the_same_text_has_the_same_logits():
    """In float32, through a sliding window, rows at different places."""
    model = tiny_transformer(7, dtype=torch.float32, hidden=64)
    text = random_tokens(2, 40)
    near, far = (model.new_cache(2, segment=2, window=10) for _ in range(2))
    far.advance(torch.tensor([100_000, 99_999]))
    far.starts.copy_(far.ends)  # nothing was written there
    for start in range(0, 40, 2):
        block = text[:, start : start + 2]
        here, there = (logits_of(model, block, Bidirectional(2), cache=cache) for cache in (near, far))
        assert_same(there, here, atol=1e-4)
        near.advance(2)
        far.advance(2)
    assert far.ends.tolist() == [100_040, 100_039]


def test_a_text_that_ends_at_position_100_000_decodes_as_the_uncached_text():
    model = tiny_transformer(7, dtype=torch.float32)
    text, cache = random_tokens(1, 6), model.new_cache(1, segment=2, window=4)
    cache.advance(99_994)
    cache.starts.copy_(cache.ends)  # nothing was written there
    for start in (0, 2, 4):
        commit(cache, text[:, start : start + 2], 2, model)
    assert (cache.starts.item(), cache.ends.item()) == (99_996, 100_000)
    noisy = random_tokens(1, 2, seed=1)
    whole = logits_of(model, torch.cat((text, noisy), 1), sliding(8, 2, 4))
    assert_same(logits_of(model, noisy, Bidirectional(2), cache=cache), whole[:, 6:], atol=1e-4)


def test_rows_can_leave_and_change_places():
    lengths = torch.tensor([2, 4, 6])
    text, cache = random_tokens(3, 6), MODEL.new_cache(3, segment=6)
    MODEL(text, layout=BlockCausal(6, 2, keys_only=True), cache=cache)
    cache.advance(lengths)
    noisy = random_tokens(3, 2, seed=1)
    before = logits_of(MODEL, noisy, Bidirectional(2), cache=cache)
    cache.move_row(2, 1)
    some = cache.first(2)
    assert some.rows == 2
    assert some.lengths.tolist() == [2, 6]
    assert_same(logits_of(MODEL, noisy[[0, 2]], Bidirectional(2), cache=some), before[[0, 2]])
    some.advance(1)
    assert cache.lengths.tolist() == [3, 7, 6]


# --- rows with and without a finished block in one pass ---


def decode(cache: KVCache, texts: list[Tensor], window: int, *, steps: int, first_seed: int = 0) -> None:
    """Write `steps` blocks of two after each row's text, and compare every pass with the whole texts."""
    for seed in range(first_seed, first_seed + steps):
        noisy, nothing = random_tokens(len(texts), 2, seed), random_tokens(len(texts), 2, seed + 100)
        before = torch.stack([text[-2:] if len(text) else nothing[row] for row, text in enumerate(texts)])
        cached = logits_of(MODEL, torch.cat((before, noisy), 1), BlockDecoding(4, 2), cache=cache)
        cache.advance(2)
        again = logits_of(MODEL, noisy, BlockDecoding(2, 2), cache=cache)
        for row, text in enumerate(texts):
            whole = torch.cat((text, noisy[row])).unsqueeze(0)
            expected = logits_of(MODEL, whole, sliding(whole.shape[1], 2, window))[0, -2:]
            assert_same(cached[row], expected)
            assert_same(again[row], expected)
        blocks = random_tokens(len(texts), 2, seed + 200)
        texts[:] = [torch.cat((text, blocks[row])) for row, text in enumerate(texts)]


def opened(texts: list[Tensor], window: int, segment: int) -> KVCache:
    """A cache of all blocks but the last of each text, filled in padded passes, with a lead-in for empty
    ones."""
    lengths = torch.tensor([len(text) for text in texts])
    cache, done = MODEL.new_cache(len(texts), segment=segment, window=window), (lengths - 2).clamp_min(0)
    cache.lead_in(torch.where(lengths == 0, 2, 0))
    for start in range(0, int(done.max()), segment):
        padded = torch.full((len(texts), segment), MASK)
        for row, text in enumerate(texts):
            piece = text[start : start + segment]
            padded[row, : len(piece)] = piece
        MODEL(padded, layout=BlockDecoding(segment, 2, keys_only=True), cache=cache)
        cache.advance((done - start).clamp(0, segment))
    return cache


@pytest.mark.parametrize("window", [2, 4, 6, 30])
@pytest.mark.parametrize("lengths", [(0, 0), (0, 2), (0, 4, 2), (20, 0, 6)], ids=str)
def test_empty_rows_share_their_first_pass_with_rows_that_have_a_finished_block(window, lengths):
    texts = [random_tokens(1, length, seed=length)[0] for length in lengths]
    cache = opened(texts, window, segment=6)
    assert cache.lengths.tolist() == [min(max(length - 2, 0), window) for length in lengths]
    decode(cache, texts, window, steps=8)
    assert cache.ends.tolist() == [length + 14 for length in lengths]


def test_nothing_in_the_text_sees_a_lead_in():
    """Bit for bit: two lead-ins, one text."""
    caches = [opened([random_tokens(1, 0)[0], random_tokens(1, 4)[0]], 4, segment=4) for _ in range(2)]
    noisy, block = random_tokens(2, 2, seed=1), random_tokens(1, 4)[:, 2:]
    logits = []
    for seed, cache in enumerate(caches):
        before = torch.cat((random_tokens(1, 2, seed=seed + 5), block))
        first = logits_of(MODEL, torch.cat((before, noisy), 1), BlockDecoding(4, 2), cache=cache)
        cache.advance(2)
        logits.append((first, logits_of(MODEL, noisy, BlockDecoding(2, 2), cache=cache)))
    assert not torch.equal(random_tokens(1, 2, seed=5), random_tokens(1, 2, seed=6))
    for one, other in zip(*logits, strict=True):
        assert torch.equal(one, other)
        assert_same(one[0], logits_of(MODEL, noisy[:1], Bidirectional(2))[0])


@pytest.mark.parametrize("layout", [BlockCausal(4, 2), BlockDecoding(4, 2), Causal(4)], ids=str)
def test_a_lead_in_gives_finite_numbers(layout):
    """A lead-in sees itself and nothing else, however far it lies before the text. If it saw nothing, its
    softmax would be NaN."""
    for lead, window in ((1, 1), (2, 1), (2, 4), (3, 2), (4, 4), (2, 20), (4, 20)):
        cache = MODEL.new_cache(2, segment=4, window=window)
        cache.lead_in(torch.tensor([lead, 0]))
        for _ in range(3):
            assert logits_of(MODEL, random_tokens(2, 4), layout, cache=cache).isfinite().all()
            assert cache.keys.isfinite().all()
            assert cache.values.isfinite().all()
            mask = cache.mask(layout, (0, 4), torch.device("cpu"), "dense").dense
            assert mask.any(-1).all()
            cache.advance(4)
        assert cache.ends.tolist() == [12 - lead, 12]


@pytest.mark.parametrize("lead", range(5))
def test_a_lead_in_may_be_any_part_of_a_pass(lead):
    """A causal text that begins in the middle of its first pass."""
    text, cache = random_tokens(1, 12), MODEL.new_cache(1, segment=4, window=20)
    cache.lead_in(torch.tensor([lead]))
    filled = torch.cat((random_tokens(1, lead, seed=9), text), 1)
    whole = logits_of(MODEL, text, Causal(12))
    for start in range(0, 12, 4):
        cached = logits_of(MODEL, filled[:, start : start + 4], Causal(4), cache=cache)
        cache.advance(4)
        first = max(lead - start, 0)
        begin = start + first - lead
        assert_same(cached[:, first:], whole[:, begin : start + 4 - lead])


def test_a_lead_in_is_for_an_empty_cache_and_no_longer_than_a_pass():
    cache = MODEL.new_cache(2, segment=4, window=4)
    for tokens in ([0, 5], [-1, 2], [-1, 5], [-3, -2]):
        message = rf"tokens of a lead-in must lie in 0\.\.4, got {re.escape(str(tokens))}"
        with pytest.raises(ValueError, match=message):
            cache.lead_in(torch.tensor(tokens))
        assert cache.ends.tolist() == [0, 0]
    commit(cache, random_tokens(2, 2), 2)
    with pytest.raises(ValueError, match=r"a lead-in needs an empty cache, got rows that end at \[2, 2\]"):
        cache.lead_in(torch.tensor([2, 0]))
    assert cache.ends.tolist() == [2, 2]


def test_only_one_lead_in_is_allowed():
    cache = MODEL.new_cache(2, segment=4, window=4)
    cache.lead_in(torch.tensor([2, 0]))
    with pytest.raises(ValueError, match=r"a lead-in needs an empty cache, got rows that end at \[-2, 0\]"):
        cache.lead_in(torch.tensor([0, 2]))
    assert cache.ends.tolist() == [-2, 0]


def test_a_lead_in_does_not_let_the_text_begin_before_itself():
    cache = MODEL.new_cache(3, segment=4, window=4)
    cache.lead_in(torch.tensor([4, 2, 0]))
    assert cache.starts.tolist() == [0, 0, 0]
    assert cache.lengths.tolist() == [0, 0, 0]
    noisy = torch.cat((random_tokens(3, 4), random_tokens(3, 2, seed=1)), 1)
    for start in range(0, 6, 2):
        cached = logits_of(MODEL, noisy[:, start : start + 2], Causal(2), cache=cache)
        cache.advance(2)
        for row, lead in enumerate((4, 2, 0)):
            text = noisy[row : row + 1, lead : start + 2]
            if lead <= start:
                whole = logits_of(MODEL, text, sliding(text.shape[1], 1, 4))
                assert_same(cached[row], whole[0, -2:])


# --- rows that replace others ---


@pytest.mark.parametrize("window", [2, 4, 30])
@pytest.mark.parametrize(
    ("seated", "steps", "entering"),
    [
        ((0, 2, 6), 1, (0,)),  # into a cache that has just begun
        ((0, 2, 6), 9, (0,)),  # into a ring that has wrapped
        ((0, 2, 6), 9, (4, 0)),
        ((2, 2, 2), 1, (26, 4)),  # from a ring that has wrapped into one that has not
        ((20, 0, 10), 3, (0, 22, 12)),  # every row leaves
    ],
)
def test_rows_put_in_the_place_of_others_decode_as_if_alone(window, seated, steps, entering):
    texts = [random_tokens(1, length, seed=length)[0] for length in seated]
    cache = opened(texts, window, segment=6)
    decode(cache, texts, window, steps=steps)
    fresh = [random_tokens(1, length, seed=length + 50)[0] for length in entering]
    places = [2, 0, 1][: len(entering)]
    cache.put_rows(torch.tensor(places), opened(fresh, window, segment=6))
    for place, text in zip(places, fresh, strict=True):
        texts[place] = text
    decode(cache, texts, window, steps=9, first_seed=20)


def test_rows_may_leave_and_others_enter_by_turns():
    window, texts = 4, [random_tokens(1, length, seed=length)[0] for length in (0, 12, 4)]
    cache = opened(texts, window, segment=4)
    decode(cache, texts, window, steps=2)
    cache.move_row(2, 1)
    texts = [texts[0], texts[2]]
    decode(cache.first(2), texts, window, steps=2, first_seed=10)
    texts.append(random_tokens(1, 6, seed=9)[0])
    cache.put_rows(torch.tensor([2]), opened(texts[2:], window, segment=4))
    decode(cache, texts, window, steps=4, first_seed=20)


def test_the_rows_put_in_place_are_copies():
    texts = [random_tokens(1, 4, seed=seed)[0] for seed in range(2)]
    cache, fresh = opened(texts, 4, segment=4), opened([texts[0]], 4, segment=4)
    cache.put_rows(torch.tensor([1]), fresh)
    decode(fresh, [texts[0]], 4, steps=3, first_seed=30)  # continues on its own
    decode(cache, [texts[0], texts[0]], 4, steps=3)


CACHE = {"layers": 4, "heads": 2, "head_dim": 8, "window": 4, "segment": 4, "dtype": torch.float32}


@pytest.mark.parametrize(
    "other",
    [
        {"layers": 1},
        {"heads": 1},
        {"head_dim": 1},
        {"window": 6},
        {"segment": 2},
        {"window": 6, "segment": 2},  # with the same number of slots
        {"dtype": torch.float64},
        {"rows": 2},
    ],
    ids=str,
)
def test_rows_of_another_kind_of_cache_are_refused(other):
    """torch would broadcast one layer or one head to all."""

    def described(rows=1, **kind):
        return f"{', '.join(f'{name} {value}' for name, value in kind.items())} and {rows} rows"

    cache, before = KVCache(rows=3, **CACHE), KVCache(rows=3, **CACHE).keys
    fresh = KVCache(**{"rows": 1} | CACHE | other)
    fresh.keys += 1
    with pytest.raises(
        ValueError, match=f"^other must have {described(**CACHE)}, got {described(**CACHE | other)}$"
    ):
        cache.put_rows(torch.tensor([0]), fresh)
    assert torch.equal(cache.keys, before)


# --- no more than is in use ---


class Watched(KVCache):
    """A cache that records how many slots each pass attends to."""

    in_use: list[int]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().extend(layer, key, value)
        assert keys.shape == values.shape
        self.in_use.append(keys.shape[2])
        return keys, values


def test_a_short_text_attends_to_few_slots_and_a_long_one_to_all():
    cache = Watched(layers=2, rows=2, heads=2, head_dim=8, window=10, segment=4, dtype=torch.float64)
    cache.in_use = []
    cache.lead_in(torch.tensor([2, 0]))
    texts = [random_tokens(1, length, seed=length)[0] for length in (0, 2)]
    decode(cache, texts, 10, steps=8)  # with the logits of the whole texts
    assert cache.in_use == sorted(cache.in_use)
    assert cache.in_use[0] < cache.capacity == 14
    assert len(set(cache.in_use)) > 3
    assert cache.in_use[-1] == cache.capacity
    assert cache.keys.shape[3] == cache.capacity


def test_the_default_window_leaves_room_for_the_segment_in_the_context():
    cache = tiny_transformer(context=64).new_cache(1, segment=16)
    assert (cache.window, cache.capacity) == (48, 64)


def test_a_network_whose_keys_are_rounded_keeps_its_cache_in_its_own_precision():
    model = tiny_transformer(7, dtype=torch.float32, gain=0.7)
    text, noisy, cache = random_tokens(2, 4), random_tokens(2, 2, seed=1), model.new_cache(2, segment=4)
    with torch.autocast("cpu", torch.bfloat16):
        commit(cache, text, 2, model)
        cached = logits_of(model, noisy, Bidirectional(2), cache=cache)
        whole = logits_of(model, torch.cat((text, noisy), 1), BlockCausal(6, 2))[:, 4:]
    assert cache.keys.dtype == torch.float32
    assert (cached - whole).abs().max() < 0.05 * whole.abs().max()


def test_a_replayed_tape_must_fill_the_layout():
    tape = KVTape()
    MODEL(random_tokens(2, 4), layout=BlockCausal(4, 2, keys_only=True), cache=tape)
    with pytest.raises(
        ValueError, match=r"tokens and tape must fill the 8 positions .* got 2 tokens and 4 recorded"
    ):
        MODEL(random_tokens(2, 2), layout=BlockDiffusion(4, 2), cache=tape.replay())
    with pytest.raises(RuntimeError, match="a KVTape records one pass"):
        MODEL(random_tokens(2, 4), layout=BlockCausal(4, 2), cache=tape)


@pytest.mark.parametrize("size", ["rows", "window", "segment"])
def test_empty_caches_are_refused(size):
    sizes = {"rows": 1, "window": 1, "segment": 1} | {size: 0}
    with pytest.raises(ValueError, match=f"{size} must be at least 1, got 0"):
        MODEL.new_cache(**sizes)


def test_a_pass_longer_than_the_segment_is_refused():
    with pytest.raises(ValueError, match="a pass through this cache has at most 2 tokens, got 3"):
        MODEL(random_tokens(1, 3), layout=Bidirectional(3), cache=MODEL.new_cache(1, segment=2))
    with pytest.raises(ValueError, match=r"tokens must have 2 positions .* got 1"):
        MODEL(random_tokens(1, 1), layout=Bidirectional(2), cache=MODEL.new_cache(1, segment=2))


@pytest.mark.parametrize(("cache_rows", "token_rows"), [(1, 3), (2, 3), (3, 2), (2, 1)])
def test_a_pass_with_other_rows_than_the_cache_is_refused(cache_rows, token_rows):
    cache = MODEL.new_cache(cache_rows, segment=2)
    with pytest.raises(
        ValueError, match=f"tokens must have {cache_rows} rows, like the cache, got {token_rows}"
    ):
        MODEL(random_tokens(token_rows, 2), layout=Bidirectional(2), cache=cache)
