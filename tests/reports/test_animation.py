"""Films: whatever is sampled with whatever tokenizer, replaying gives the very text."""

import json

import pytest
import torch

from bd3lm.reports import Film, record_film
from bd3lm.reports.animation import LONGEST, Draft, Frame, split_text
from bd3lm.sampling import Ancestral, Drafted, MostConfident, Remasking, Started, TokenRevealed
from tests.lm import BYTES, D3PM, PROMPTS, SEDD, baseline, every_method, of_bytes, that_drafts
from tests.reports import DRAFTED, FILM


def filmed(model, prompt, **settings):
    """The film of a text after JSON, and the text."""
    events = list(model.stream([prompt], length=16, **settings))
    film = record_film(events, BYTES.decode, mask_id=BYTES.mask_id)
    return Film.from_json(json.loads(json.dumps(film.to_json()))), model.generation(events[-1].sample)


@every_method
@pytest.mark.parametrize("prompt", PROMPTS, ids=repr)
def test_the_last_frame_is_the_text(block_size, prompt):
    film, generation = filmed(of_bytes(block_size), prompt, seed=3)
    assert film.text == generation.text
    assert len([step for step in film.steps if step[0] == "show"]) == generation.sample.evaluations


@pytest.mark.parametrize(
    "unmasking", [Ancestral(7), MostConfident(threshold=0.1), Remasking(steps=9, eta=0.6)], ids=repr
)
def test_other_ways_of_unmasking(unmasking):
    film, generation = filmed(of_bytes(8), "ab", unmasking=unmasking, seed=1)
    assert film.text == generation.text


def test_hidden_again_and_shown_again():
    film, generation = filmed(of_bytes(8), "ab", unmasking=Remasking(steps=9, eta=0.9), seed=2)
    assert "hide" in {step[0] for step in film.steps}
    assert film.text == generation.text


def test_a_token_that_did_not_stay_is_shown_as_itself():
    model = of_bytes(8)
    events = list(model.stream(["ab"], length=16, unmasking=Remasking(steps=9, eta=0.9), seed=2))
    film = record_film(events, BYTES.decode, mask_id=BYTES.mask_id)
    final = events[-1].sample.tokens.tolist()
    revealed = [event for event in events if isinstance(event, TokenRevealed)]
    shown = [step[2] for step in film.steps if step[0] == "show"]
    replaced = [
        (piece, BYTES.decode([event.token]))
        for piece, event in zip(shown, revealed, strict=True)
        if final[event.position] != event.token
    ]
    assert replaced
    assert all(piece == own for piece, own in replaced)


@pytest.mark.parametrize("method", [SEDD, D3PM], ids=["SEDD", "D3PM"])
def test_baselines_with_masks(method):
    film, generation = filmed(baseline(method), "ab", steps=5)
    assert film.text == generation.text


def test_what_follows_the_end_token_is_cut():
    film, generation = filmed(of_bytes(8, end_logit=9.0), "", seed=0)
    assert generation.sample.stopped_by == "eos"
    assert film.steps[-1][0] == "cut"
    assert film.text == generation.text


def test_a_text_that_is_drawn_again_is_filmed_from_its_last_beginning():
    model = of_bytes(4)
    events = list(model.stream(["ab"], length=16, entropy_floor=2.6, entropy_window=16, redraws=3, seed=5))
    assert sum(isinstance(event, Started) for event in events) > 1
    film = record_film(events, BYTES.decode, mask_id=BYTES.mask_id)
    sample = events[-1].sample
    assert film.text == model.generation(sample).text
    assert len([step for step in film.steps if step[0] == "show"]) == sample.evaluations


def test_every_state_differs_from_the_one_before_by_its_step():
    states = list(Film.from_json(FILM).states())
    assert states[0] == ["", "The"]
    assert states[1] == ["", "The", None, None]
    assert states[2] == ["", "The", None, " sat"]
    assert states[3] == ["", "The", " cat", " sat"]
    assert states[-2] == ["", "The", " cat", " sat", ".", " <b>"]
    assert "".join(states[-1]) == "The cat sat."


def test_a_character_of_several_tokens_comes_whole_with_the_last():
    tokens = BYTES.encode("a☂é")
    assert len(tokens) == 6
    assert split_text(tokens, BYTES.decode) == ["a", "", "", "☂", "", "é"]


@pytest.mark.parametrize("tokens", [[0xE2, 0x61, 0xC3], [0xC3], [], [0x61, 0xFF, 0xFE, 0x62]], ids=str)
def test_bytes_that_are_no_text_are_kept_as_they_decode(tokens):
    pieces = split_text(tokens, BYTES.decode)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


def test_a_decoder_that_takes_back_what_it_said_still_gives_the_whole():
    words = ["do", "n't", ".", "go"]

    def decode(ids):
        return " ".join(words[index] for index in ids).replace(" n't", "n't").replace(" .", ".")

    assert "".join(split_text([0, 1, 2, 3], decode)) == decode([0, 1, 2, 3]) == "don't. go"
    waverer = {1: "ab", 2: "ax", 3: "abc"}
    assert split_text([0, 1, 2], lambda ids: waverer[len(ids)]) == ["ab", "", "c"]


def test_events_that_stop_nothing_are_refused():
    events = list(of_bytes(4).stream(["ab"], length=8))[:-1]
    with pytest.raises(ValueError, match="got none"):
        record_film(events, BYTES.decode, mask_id=BYTES.mask_id)


def test_nothing_to_write_is_a_film_without_steps():
    model = of_bytes(4)
    events = list(model.stream([torch.tensor(BYTES.encode("full"))], length=4))
    film = record_film(events, BYTES.decode, mask_id=BYTES.mask_id)
    assert film.steps == []


# --- drafts ---


def drafts_of(frame: Frame) -> dict[int, str]:
    return {place: each.piece for place, each in enumerate(frame) if isinstance(each, Draft)}


def test_nothing_is_seen_between_a_text_and_drafts_that_stand_apart_from_it():
    film = Film(["a", None], [["draft", [[1, "b"], [3, "c"]]], ["draft", []]])
    assert list(film.frames()) == [["a", None], ["a", Draft("b"), "", Draft("c")], ["a", None]]


def test_a_frame_of_a_film_with_drafts_is_a_pass():
    film = Film.from_json(DRAFTED)
    assert list(film.frames()) == [
        ["The"],
        ["The", " cat", Draft(" on"), Draft(" a")],
        ["The", " cat", " on", " the", Draft(" mat"), Draft(" was")],
        ["The", " cat", " on", " the", " mat", "."],
    ]
    assert film.text == "The cat on the mat."


def test_a_token_without_a_sign_of_its_own_hides_a_draft_too():
    film = Film([""], [["draft", [[0, "b"]]], ["draft", []]])
    assert list(film.frames()) == [[""], [""], [""]]


def test_a_film_without_drafts_has_a_frame_for_every_state():
    film = Film.from_json(FILM)
    assert list(film.frames()) == list(film.states())


def test_drafts_are_told_until_they_are_verified_or_replaced():
    """In every state, in the middle of a pass too: no token is ever hidden by a draft."""
    first, second = {2: " on", 3: " a"}, {4: " mat", 5: " was"}
    told = [{}, {}, {}, *[first] * 5, *[second] * 5, {}]
    film = Film.from_json(DRAFTED)
    assert len(told) == len(film.steps) + 1
    for done, drafts in enumerate(told):
        part = Film(film.given, [*film.steps[:done], ["draft", []]] if done < 3 else film.steps[:done])
        *_, frame = part.frames()
        *_, pieces = part.states()
        ahead = {place: piece for place, piece in drafts.items() if [*pieces, *[None] * 6][place] is None}
        assert drafts_of(frame) == ahead
        assert not any(isinstance(piece, Draft) for piece in pieces)


@pytest.mark.parametrize("seed", range(4))
def test_a_film_has_the_drafts_of_every_pass_but_the_last(seed):
    model = that_drafts()
    events = list(model.stream(["ab"], length=16, speculation=3, seed=seed))
    film = record_film(events, BYTES.decode, mask_id=BYTES.mask_id)
    assert Film.from_json(json.loads(json.dumps(film.to_json()))).steps == film.steps
    sample, told = events[-1].sample, [event for event in events if isinstance(event, Drafted)]
    assert film.text == model.generation(sample).text
    assert sum(sample.accepted) > 0
    assert len(film.moments) - 1 == sample.evaluations < sample.written
    *frames, last = film.frames()
    assert last == film.pieces
    for frame, event in zip(frames[1:], told, strict=False):
        guessed = zip(event.positions, event.tokens, strict=True)
        drafts = {place: BYTES.decode([token]) for place, token in guessed}
        assert drafts_of(frame) == drafts


def test_passes_after_the_end_of_a_text_are_no_part_of_its_film():
    """A GPU goes on for some of them before it is seen that there is nothing left to write."""
    events = list(that_drafts().stream(["ab"], length=16, speculation=3))
    film = record_film(events, BYTES.decode, mask_id=BYTES.mask_id)
    more = [*events[:-1], Drafted(0, (), ()), Drafted(0, (20,), (97,)), events[-1]]
    assert record_film(more, BYTES.decode, mask_id=BYTES.mask_id) == film
    assert film.steps[-1] == ["draft", []]


def test_a_draft_with_control_characters_is_readable():
    film = Film(["a"], [["draft", [[1, "\x1b"]]], ["block", 1, 2], ["show", 1, "b"], ["draft", []]])
    assert list(film.readable().frames())[1] == ["a", Draft("␛")]


@pytest.mark.parametrize(
    "step",
    [
        ["draft"],
        ["draft", None],
        ["draft", 1, "a"],
        ["draft", {"1": "a"}],
        ["draft", [], 2],
        ["draft", [1, "a"]],
        ["draft", [[1]]],
        ["draft", [["1", "a"]]],
        ["draft", [[1, None]]],
        ["draft", [[1, "a", "b"]]],
        ["draft", [[-1, "a"]]],
        ["draft", [[1.0, "a"]]],
        ["draft", [[2, "a"], [1, "b"]]],
        ["draft", [[1, "a"], [1, "b"]]],
        ["draft", [[LONGEST, "a"]]],
        ["guess", [[1, "a"]]],
    ],
    ids=repr,
)
def test_drafts_that_cannot_be_shown_are_refused(step):
    with pytest.raises(ValueError, match=r"steps\.1 must be a step that can follow the others"):
        Film.from_json({"given": [], "steps": [["draft", [[1, "a"], [7, "b"]]], step]})
