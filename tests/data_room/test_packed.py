"""Conversations that share sequences: each whole and exactly once, filled and hidden as the method
requires."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bd3lm.data import (
    BatchStream,
    ChatFormat,
    ConversationCorpus,
    PackedConversations,
    Packing,
    TokenShards,
    byte_tokenizer,
    prepare,
)
from bd3lm.data.packed import hide_rests, pack
from bd3lm.data.templates import PLAIN
from tests.data_room.chats import chats, written

BYTES = byte_tokenizer()
CONTEXT = 512
PACKINGS = [Packing(), Packing(unit=3), Packing(unit=4, in_blocks=True), Packing(unit=32, in_blocks=True)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = tmp_path_factory.mktemp("packed")
    file = written(folder / "chats.jsonl", chats(80, words=6))
    return prepare(
        ConversationCorpus(file, held_out=9), BYTES, folder / "out", chat=ChatFormat(template=PLAIN)
    )


def conversations(shards: TokenShards, split: str = "train") -> list[tuple[list[int], list[bool]]]:
    found, place = [], 0
    for length in shards.lengths(split).tolist():
        here = (split, place, place + length)
        found.append((shards.read(*here).tolist(), shards.answers(*here).tolist()))
        place += length
    return found


@given(st.lists(st.integers(1, 24), max_size=60), st.integers(1, 24))
def test_each_size_that_fits_is_packed_once(sizes: list[int], context: int) -> None:
    found = pack(np.array(sizes, np.int64), context)
    assert sorted(place for each in found for place in each) == [
        place for place, size in enumerate(sizes) if size <= context
    ]
    assert all(sum(sizes[place] for place in each) <= context for each in found)
    assert found == sorted(found)
    assert all(list(each) == sorted(each) for each in found)
    fullest = [sum(sizes[place] for place in each) for each in found]
    assert sum(2 * full <= context for full in fullest) <= 1  # two half-empty sequences would have been one


def test_packing_wastes_little() -> None:
    """Sizes like those of real conversations: about the fewest possible sequences."""
    chance = np.random.default_rng(0)
    sizes = np.minimum(np.exp(chance.normal(5.0, 0.8, 5000)).astype(np.int64) + 8, 1024)
    found = pack(sizes, 1024)
    assert len(found) <= 1.01 * math.ceil(sizes.sum() / 1024)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_every_conversation_is_whole_and_filled(shards: TokenShards, packing: Packing) -> None:
    """The reference result: each row is cut where its document numbers change."""
    size = CONTEXT - CONTEXT % packing.unit
    packed = PackedConversations(shards, "train", size, packing=packing)
    said = conversations(shards)
    met: list[int] = []
    for place in range(len(packed)):
        batch = packed.batch([place])
        (tokens,), (scored,), (absent,), (numbers,) = (
            each.tolist() for each in (batch.tokens, batch.scored, batch.absent, batch.documents)
        )
        begin = 0
        for number, document in enumerate(packed.documents(place)):
            met.append(document)
            ids, learned = said[document]
            filled = math.ceil(len(ids) / packing.unit) * packing.unit
            end = begin + filled
            assert begin % packing.unit == 0
            assert numbers[begin:end] == [number] * filled
            assert tokens[begin:end] == ids + [BYTES.eos_id] * (filled - len(ids))
            if not packing.in_blocks:
                assert scored[begin:end] == learned + [False] * (filled - len(ids))
                assert not any(absent[begin:end])
            begin = end
        assert all(absent[begin:])
        assert not any(scored[begin:])
        assert numbers[begin:] == [len(packed.documents(place))] * (size - begin)
    assert sorted(met) == list(range(len(said)))
    assert len(packed) < len(said)
    assert packed.waste == pytest.approx(1 - sum(len(ids) for ids, _ in said) / (size * len(packed)))


def by_hand(learned: list[bool], unit: int) -> tuple[list[bool], list[bool]]:
    """Each block in turn, as in sampling: one answer, and nothing after it yet."""
    scored, absent = [], []
    for begin in range(0, len(learned), unit):
        block = learned[begin : begin + unit]
        runs, run = [], []
        for place, flag in enumerate([*block, False]):
            if flag:
                run.append(place)
            elif run:
                runs.append(run)
                run = []
        best: list[int] = []
        for each in runs:
            if len(each) >= len(best):
                best = each
        scored += [place in best for place in range(len(block))]
        absent += [bool(best) and place > best[-1] for place in range(len(block))]
    return scored, absent


@pytest.mark.parametrize("packing", PACKINGS[2:], ids=str)
def test_the_rest_of_a_block_after_an_answer_is_hidden(shards: TokenShards, packing: Packing) -> None:
    packed = PackedConversations(shards, "train", CONTEXT, packing=packing)
    said, lost, hidden = conversations(shards), 0, 0
    for place in range(len(packed)):
        batch = packed.batch([place])
        begin = 0
        for document in packed.documents(place):
            _, learned = said[document]
            learned = learned + [True] * (-len(learned) % packing.unit)
            scored, absent = by_hand(learned, packing.unit)
            end = begin + len(learned)
            assert batch.scored[0, begin:end].tolist() == scored
            assert batch.absent is not None
            assert batch.absent[0, begin:end].tolist() == absent
            lost += sum(learned) - sum(scored)
            hidden += sum(absent)
            begin = end
    assert hidden
    assert lost == 0 or packing.unit > 4  # an answer and the next do not fit in a small block


def test_alone_each_conversation_has_its_own_sequence(shards: TokenShards) -> None:
    rows = PackedConversations(shards, "train", CONTEXT, alone=True)
    said = conversations(shards)
    assert len(rows) == len(said)
    batch = rows.batch(range(len(rows)))
    assert batch.documents is None
    assert batch.absent is None
    for place, (ids, learned) in enumerate(said):
        assert batch.tokens[place].tolist() == ids + [BYTES.eos_id] * (CONTEXT - len(ids))
        assert batch.scored[place].tolist() == learned + [False] * (CONTEXT - len(ids))


def test_hiding_keeps_the_longest_answer_of_a_block() -> None:
    scored = np.array([*map(int, "01100111 00110110 00000000 11111111".replace(" ", ""))], np.bool_)
    absent = np.zeros_like(scored)
    hide_rests(scored, absent, 8)
    assert "".join(map(str, scored.astype(int))) == "00000111" + "00000110" + "00000000" + "11111111"
    assert "".join(map(str, absent.astype(int))) == "00000000" + "00000001" + "00000000" + "00000000"


def test_an_epoch_holds_every_conversation_once_and_never_in_two_ways(shards: TokenShards) -> None:
    packed, again = (PackedConversations(shards, "train", CONTEXT, packing=PACKINGS[2]) for _ in range(2))
    stream = BatchStream(packed, rows=1, seed=3)
    for epoch in range(3):
        steps = range(epoch * len(packed), (epoch + 1) * len(packed))
        places = [int(stream.indices(step)[0]) for step in steps]
        assert sorted(places) == list(range(len(packed)))
    for place in range(len(packed)):
        one, two = packed.batch([place]), again.batch([place])
        for name in ("tokens", "scored", "absent", "documents"):
            assert torch.equal(getattr(one, name), getattr(two, name))
    several = packed.batch([2, 0])
    assert torch.equal(several.tokens, torch.cat([packed.batch([each]).tokens for each in (2, 0)]))
    with pytest.raises(IndexError, match=f"sequence {len(packed)} is not within the {len(packed)} of"):
        packed.batch([len(packed)])


def test_a_conversation_that_is_too_long_is_named_or_left_out(tmp_path: Path) -> None:
    rows = chats(20, words=2, answers=1)
    for place in (7, 9):
        rows[place]["messages"][1]["content"] = "x" * 200
    corpus = ConversationCorpus(written(tmp_path / "chats.jsonl", rows), held_out=0)
    shards = prepare(corpus, BYTES, tmp_path / "out", chat=ChatFormat(template=PLAIN))
    tokens = shards.lengths("train")[7]
    said = f"conversation 8 of split 'train' has {tokens} tokens, more than the context of 100, and so has 1"
    with pytest.raises(ValueError, match=said):
        PackedConversations(shards, "train", 100)
    packed = PackedConversations(shards, "train", 100, skip_long=True)
    assert packed.skipped == 2
    assert sorted(each for place in range(len(packed)) for each in packed.documents(place)) == [
        each for each in range(20) if each not in (7, 9)
    ]
    with pytest.raises(ValueError, match="context must be a multiple of 8, where every conversation begins"):
        PackedConversations(shards, "train", 100, packing=Packing(unit=8))
    nothing = PackedConversations(shards, "train", 8, skip_long=True)
    with pytest.raises(ValueError, match="split 'train' has no conversation that fits in a sequence of 8"):
        BatchStream(nothing, rows=1, seed=0)
    with pytest.raises(ValueError, match="unit must be at least 1, got 0"):
        Packing(unit=0)
