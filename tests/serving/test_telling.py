"""What is told of a text piece by piece is its completion, however it was cut."""

import random

import pytest
import torch

from bd3lm.lm import Generation
from bd3lm.lm.stops import StopStrings
from bd3lm.sampling import Sample
from bd3lm.serving.chances import Names, TokenChances
from bd3lm.serving.telling import Telling
from tests.lm import BYTES

TEXTS = ["plain text, and more", "naïve ☂ café 🌧️ end", "ab\u2028cd\n\nef", "stop here stop! and on", ""]


def sample_of(tokens: list[int], given: int, stop: str | None) -> Sample:
    return Sample(
        index=0,
        tokens=torch.tensor(tokens),
        given=given,
        prompt=given,
        written_from=given,
        seed=0,
        evaluations=1,
        fill_passes=0,
        stopped_by="string" if stop else "length",
        stop_string=stop,
    )


@pytest.mark.parametrize("stop", [(), ("stop!",), ("p here", "🌧")])
@pytest.mark.parametrize("text", TEXTS)
def test_all_pieces_together_are_the_completion(text: str, stop: tuple[str, ...]) -> None:
    given = [BYTES.bos_id or 0, *BYTES.encode("so: ")]
    tokens = given + BYTES.encode(text)
    found = StopStrings(BYTES, stop)(torch.tensor(tokens), len(given), len(given)) if stop else None
    end, string = found or (len(tokens), None)
    expected = Generation.of(sample_of(tokens[:end], len(given), string), BYTES).completion
    assert expected is not None
    for seed in range(20):
        chance, telling, place = random.Random(seed), Telling(BYTES, given, stop), len(given)
        told = []
        while (size := chance.randint(1, 4)) + place < end:  # the last piece is told with the end
            told.append(telling.more(place, tokens[place : place + size]))
            place += size
        assert not any(piece.endswith("\ufffd") for piece in told)
        assert expected.startswith("".join(told))
        assert "".join([*told, telling.rest(expected)]) == expected


def test_what_never_becomes_a_character_is_told_after_a_while() -> None:
    telling = Telling(BYTES, [65], ())
    told = "".join(telling.more(1 + place, [0xFF]) for place in range(20))
    assert set(told) == {"\ufffd"}
    assert len(told) >= 8


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_say_where_they_begin(text: str, size: int) -> None:
    given, written = [BYTES.bos_id or 0, *BYTES.encode("é: ")], BYTES.encode(text)
    told = TokenChances(Names(BYTES), BYTES, given, 1)
    found = []
    for start in range(0, len(written), size):
        tokens = written[start : start + size]
        place = len(given) + start
        others = [((65, -0.5), (66, -1.0))] * len(tokens)
        found += told.more(place - 1, [0, *tokens], [None, *[-2.0] * len(tokens)], [(), *others])
    assert [each["offset"] for each in found] == [
        place for place, sign in enumerate(text) for _ in sign.encode()
    ]
    assert bytes(byte for each in found for byte in each["bytes"]).decode() == text
    assert all([other["token"] for other in each["top"]] == ["A"] for each in found)


def test_what_was_no_part_of_a_character_is_behind_tokens_that_follow() -> None:
    told = TokenChances(Names(BYTES), BYTES, [65], 0)
    chances = [-1.0, float("-inf"), float("nan"), None, -3.0]
    found = told.more(1, [0xE2, 0x98, 66, 67, 68], chances, [()] * 5)
    assert [(each["token"], each["offset"]) for each in found[-2:]] == [("B", 1), ("D", 3)]
    assert [each["logprob"] for each in found] == [-1.0, -9999.0, -9999.0, -3.0]


def test_what_was_given_is_no_news() -> None:
    """A block that begins in the prompt is told from its beginning."""
    telling = Telling(BYTES, [65, 66], ())
    assert telling.more(0, [65, 66, 67, 68]) == "CD"
    assert telling.more(4, [69]) == "E"
