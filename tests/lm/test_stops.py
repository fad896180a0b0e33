"""Strings that end a text: against texts that were written without them and cut by hand."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from bd3lm.data import Tokenizer, train_bpe
from bd3lm.lm import Gap, Generation, LanguageModel, Settings
from bd3lm.lm.generation import build_stopping
from bd3lm.lm.stops import StopStrings, written_text
from bd3lm.sampling import BlockFinished, Stopped
from tests.lm import BYTES, CONTEXT, END, baseline, every_baseline, every_method, of_bytes, replay, tokens_of

pytestmark = pytest.mark.sweep(2)

LETTERS = "ab é"  # of which the last is two bytes, that may also come alone
PROMPTS = [f"x{first}{second}" for first in LETTERS for second in LETTERS][::2]
DRAWN = Settings(top_p=1.0, length=20)
STOPS: list[tuple[str, ...]] = [
    ("b",),
    ("ab",),
    ("é",),
    ("ab a", "bb", "é "),
    ("aab", "aa"),
    ("ab", "b"),
    ("�",),
    ("a" * 30, "nowhere"),
]


def of_few_letters(model: LanguageModel, *, end: bool = False) -> LanguageModel:
    """The same model, that writes what strings are often found in."""
    written = {*LETTERS.encode(), *([END] if end else [])}
    with torch.no_grad():
        model.network.output.bias[ord("a")] += 0.5
        model.network.output.bias[[token for token in range(258) if token not in written]] = -1e3
    return model


@cache
def of_letters(block_size: int | None) -> LanguageModel:
    return of_few_letters(of_bytes(block_size, gain=0.3))


def cut_by_hand(whole: Generation, strings: Sequence[str], written_from: int) -> tuple[list[int], str, str]:
    """The tokens up to the first after which one of the strings is there, their text before it, and why."""
    tokens, given = whole.tokens, BYTES.decode(whole.tokens[:written_from])
    for end in range(written_from + 1, len(tokens) + 1):
        if tokens[end - 1] == END:
            return tokens[:end], BYTES.decode(tokens[:end]), "eos"
        written = BYTES.decode(tokens[written_from:end])
        found = [written.index(string) for string in strings if string in written]
        if found:
            return tokens[:end], given + written[: min(found)], "string"
    return tokens, BYTES.decode(tokens), "length"


def check_all(
    model: LanguageModel, prompts: Sequence[Any], stops: Sequence[tuple[str, ...]], **settings: Any
) -> set[str]:
    """Every text is the one that was written without strings, cut by hand; says what ended them."""
    whole = model.generate(prompts, DRAWN, stop_at_eos=False, **settings)
    reasons = set()
    for strings, batch_size in zip(stops, (3, 32) * len(stops), strict=False):
        found = model.generate(prompts, DRAWN, stop=strings, batch_size=batch_size, **settings)
        for each, long in zip(found, whole, strict=True):
            tokens, text, reason = cut_by_hand(long, strings, long.sample.given)
            assert (each.tokens, each.text, each.sample.stopped_by) == (tokens, text, reason)
            reasons.add(reason)
    return reasons


# --- what is written ---


@every_method
def test_a_text_is_the_one_without_strings_up_to_the_first_of_them(block_size):
    assert check_all(of_letters(block_size), PROMPTS, STOPS, seed=3) == {"string", "length"}


@every_baseline
def test_every_baseline_stops_at_strings(method):
    model = of_few_letters(baseline(method), end=True)
    reasons = check_all(model, PROMPTS, [(" ",), ("b", "  "), ("é",)], steps=4, length=CONTEXT)
    assert reasons >= {"string", "eos"}


def test_strings_are_found_past_the_context_in_strides():
    model = of_letters(CONTEXT)
    assert check_all(model, PROMPTS, [("bab",), ("aaa",)], length=40, stride=5) == {"string", "length"}


@every_method
def test_whichever_of_the_end_token_and_a_string_comes_first_ends_a_text(block_size):
    model = of_few_letters(of_bytes(block_size, gain=0.3, end_logit=-1.0), end=True)
    assert check_all(model, PROMPTS, STOPS[:4]) == {"string", "eos", "length"}


def test_where_the_end_token_is_the_string_it_is_the_end_token():
    model = of_letters(4)
    (both,) = model.generate("xa", DRAWN, eos_id=ord("b"), stop="b")
    assert (both.sample.stopped_by, both.text[-1]) == ("eos", "b")
    (string,) = model.generate("xa", DRAWN, stop="b")
    assert (string.sample.stopped_by, string.tokens) == ("string", both.tokens)


@every_method
def test_strings_of_what_was_given_do_not_count_nor_those_that_begin_there(block_size):
    """The text after the prompt begins with a b, so that "ab" is begun in the prompt."""
    model, prompts = of_letters(block_size), ["ab ab a"] * 12
    whole = model.generate(prompts, DRAWN, length=30, stop_at_eos=False)
    found = model.generate(prompts, DRAWN, length=30, stop=["ab"])
    begun = 0
    for each, long in zip(found, whole, strict=True):
        place = long.text.find("ab", 7)
        assert each.text == (long.text if place < 0 else long.text[:place])
        begun += long.text[7] == "b"
    assert begun  # otherwise this says little


def test_a_string_may_span_blocks():
    model, spans = of_letters(4), 0
    for whole in model.generate(PROMPTS, DRAWN, length=32, stop_at_eos=False):
        ids = whole.tokens
        for border in range(8, 32, 4):
            string = BYTES.decode(ids[border - 2 : border + 2])
            if whole.sample.given > 4 or "�" in string or string in BYTES.decode(ids[4 : border + 1]):
                continue
            (found,) = model.generate(
                [ids[:4]], DRAWN, seeds=[whole.sample.seed], length=border + 4, stop=string
            )
            assert (found.tokens, found.sample.stopped_by) == (ids[: border + 2], "string")
            spans += 1
    assert spans > 5  # otherwise this says nothing


@every_method
def test_strings_in_gaps_before_what_was_given_do_not_count(block_size):
    model, strings = of_letters(block_size), ("b", "é")
    template = ["x", Gap(6), "ab", Gap(3), "bx"]
    (whole,) = model.generate([template], DRAWN, length=40, stop_at_eos=False)
    (found,) = model.generate([template], DRAWN, length=40, stop=strings)
    last = 1 + 1 + 6 + 2 + 3 + 2
    assert (whole.sample.prompt, whole.sample.written_from) == (2, last)
    tokens, text, reason = cut_by_hand(whole, strings, last)
    assert (found.tokens, found.text, found.sample.stopped_by) == (tokens, text, reason)
    assert reason == "string"
    assert any(token in b"b" for token in whole.tokens[2:8])  # otherwise this says little
    (filled,) = model.generate([template], top_p=1.0, stop=strings)  # nothing follows what was given
    assert (filled.tokens, filled.sample.stopped_by) == (whole.tokens[:last], "length")


@every_method
def test_a_template_may_end_inside_its_last_gap(block_size):
    model = of_letters(block_size)
    (whole,) = model.generate(["xa", Gap(20)], top_p=1.0, stop_at_eos=False)
    (found,) = model.generate(["xa", Gap(20)], top_p=1.0, stop="b")
    assert (found.tokens, found.text, found.sample.stopped_by) == cut_by_hand(whole, ["b"], 3)
    assert len(found.tokens) < len(whole.tokens)


def test_new_tokens_are_at_most_so_many():
    model = of_letters(4)
    whole = model.generate(PROMPTS, max_new_tokens=6, stop_at_eos=False)
    found = model.generate(PROMPTS, max_new_tokens=6, stop=["b"])
    expected = [cut_by_hand(long, ["b"], long.sample.given) for long in whole]
    assert [(each.tokens, each.text, each.sample.stopped_by) for each in found] == expected
    assert {each.sample.stopped_by for each in found} == {"string", "length"}


def test_a_row_that_met_its_string_makes_room():
    """The passes of texts that stop are not paid for to the end."""
    model = of_letters(4)
    settings = Settings(length=60, stop="ab", batch_size=4, top_p=1.0)
    events = model.stream(PROMPTS, settings, watch=False)
    samples = [event.sample for event in events if isinstance(event, Stopped)]
    assert [sample.index for sample in samples] != sorted(sample.index for sample in samples)
    for sample in samples:
        assert sample.evaluations == -(-len(sample.tokens) // 4) * 4 - sample.given
    assert len({sample.evaluations for sample in samples}) > 3  # otherwise this says little


def test_low_entropy_keeps_its_meaning():
    """A text that has met its string in a block is not judged; until then it is, and is drawn again."""
    model = of_letters(4)
    settings = Settings(length=40, entropy_floor=1.0, entropy_window=8, redraws=2, top_p=1.0)
    prompts = PROMPTS * 2
    plain, found = (model.generate(prompts, settings, stop=stop) for stop in ((), ("ab",)))
    reasons = {each.sample.stopped_by for each in found}
    assert reasons == {"string", "entropy", "length"}  # otherwise this says little
    for each, without in zip(found, plain, strict=True):
        assert each.sample.stopped_by == "string" or each == without
    ended = [each for each in found if each.sample.stopped_by == "string"]
    begun = [each.tokens[: each.sample.given] for each in ended]
    again = model.generate(begun, DRAWN, length=40, seeds=[each.sample.seed for each in ended])
    for each, whole in zip(ended, again, strict=True):
        assert (each.tokens, each.text, "string") == cut_by_hand(whole, ["ab"], each.sample.given)
    assert any(each.sample.redraws and each.sample.stopped_by == "string" for each in found)


@every_method
def test_events_agree(block_size):
    model = of_letters(block_size)
    settings = Settings(length=20, stop=("ab", "é"), batch_size=3, top_p=1.0)
    texts: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    stopped: dict[int, Generation] = {}
    for event in model.stream(PROMPTS, settings):
        assert event.index not in stopped
        replay(texts, event)
        if isinstance(event, BlockFinished):
            ends[event.index] = event.stop
        if isinstance(event, Stopped):
            stopped[event.index] = model.generation(event.sample)
            assert texts[event.index][: len(event.sample.tokens)] == event.sample.tokens.tolist()
            assert len(event.sample.tokens) <= ends[event.index]
    assert [stopped[index] for index in range(len(PROMPTS))] == model.generate(PROMPTS, settings)


def test_a_sample_knows_the_string_that_stopped_it():
    model = of_letters(4)
    (found,) = model.generate("xa", DRAWN, stop=["zz", "b"])
    assert (found.sample.stopped_by, found.sample.stop_string) == ("string", "b")
    assert model.generation(found.sample) == found
    assert BYTES.decode(found.tokens) == found.text + "b"


def test_a_sample_that_no_string_stopped_has_none():
    for found in of_letters(4).generate(PROMPTS, DRAWN, stop=["zz"]):
        assert (found.sample.stopped_by != "string", found.sample.stop_string) == (True, None)


# --- the search itself, in long texts and of other tokenizers ---


def wordpieces() -> Tokenizer:
    """Words and their ends, of a decoder that puts spaces between words and takes some of them away again."""
    words = ["do", "n", "'", "t", ".", ",", "he", "##re", "##s", "a", "[SEP]", "[MASK]"]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="a"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["[SEP]", "[MASK]"])
    return Tokenizer(backend.to_str(), mask_id=11, eos_id=10, bos_id=None)


def pieces_with_spaces() -> Tokenizer:
    """Spaces belong to words, and the first one of a text is left out."""
    words = ["▁a", "▁b", "c", "▁", "a", "▁cab", "</s>", "<mask>"]
    backend = Backend(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>", "<mask>"])
    return Tokenizer(backend.to_str(), mask_id=7, eos_id=6, bos_id=None)


TOKENIZERS = {
    "bytes": (BYTES, [*"ab é☂ ".encode(), END]),
    "byte-level BPE": (train_bpe(["abé ☂ab ☂é a☂ " * 3], 275), None),
    "word pieces": (wordpieces(), list(range(11))),
    "spaces in words": (pieces_with_spaces(), list(range(7))),
}


@pytest.mark.parametrize(("tokenizer", "used"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_fewest_tokens_whose_text_holds_a_string(tokenizer, used):
    """All that came before is decoded anew for every token; what is asked is asked piece by piece."""
    draw, met, missed = random.Random(0), 0, 0
    if used is None:
        used = [*{*tokenizer.encode("abé ☂ab ☂é a☂ ")}, *"☂é".encode(), tokenizer.eos_id]
    for _ in range(60):
        tokens = draw.choices(used, k=draw.choice([5, 30, 90]))
        if draw.random() < 0.3:
            place = draw.randrange(len(tokens))
            tokens[place:place] = [tokenizer.eos_id] * 40
        given, piece = draw.randrange(4), draw.choice([1, 4, 7, 200])
        before, text = tokenizer.decode(tokens[:given]), tokenizer.decode(tokens)
        if not text.startswith(before) or "�" in before:
            continue  # where a prompt ends inside a character: see below
        starts = [draw.randrange(len(before), len(text) + 1) for _ in range(2)]
        strings = tuple(text[at : at + draw.choice([1, 2, 5, 12])] or "zz" for at in starts)
        strings = strings if draw.random() < 0.9 else ("zz",)
        texts = (tokenizer.decode(tokens[:end]) for end in range(given + 1, len(tokens) + 1))
        holds = [any(string in each[len(before) :] for string in strings) for each in texts]
        expected = given + 1 + holds.index(True) if True in holds else None
        search, found = StopStrings(tokenizer, strings), None
        for begin in range(given, len(tokens), piece):
            found = found or search(torch.tensor(tokens[: begin + piece]), given, begin)
        assert (found and found[0]) == expected, (tokens, given, piece, strings)
        assert found is None or found[1] in strings
        met, missed = met + (found is not None), missed + (found is None)
    assert met > 20
    assert missed > 0


def test_a_character_that_the_prompt_begins_is_not_written():
    search = StopStrings(BYTES, ("☂",))
    tokens = torch.tensor([97, *"☂".encode(), 97, *"☂".encode(), 97])
    found = [search(tokens, given, given) for given in (0, 1, 2, 3, 4)]
    assert found == [(end, "☂") for end in (4, 4, 8, 8, 8)]
    assert [written_text(BYTES, tokens[:5].tolist(), given) for given in (1, 2, 3, 4)] == [
        "☂a",
        "a",
        "a",
        "a",
    ]
    assert StopStrings(BYTES, ("�",))(tokens[:5], 2, 2) is None  # as its second half alone would read


def test_of_strings_that_one_token_completes_the_longest_begins_first():
    for strings in (("ab", "b"), ("b", "ab")):
        assert StopStrings(BYTES, strings).first("aab b") == "ab"
    assert StopStrings(BYTES, ("ab", "b")).first("aa") is None


def test_a_prefix_inside_a_character_holds_no_string():
    search = StopStrings(BYTES, ("é",))
    tokens = torch.tensor([97, *"é☂é".encode()])
    assert [search(tokens[:size], 1, 1) for size in range(1, 5)] == [None, None, (3, "é"), (3, "é")]
    assert search(torch.tensor([97, *"☂è".encode()]), 1, 1) is None


def test_long_texts_are_not_read_from_their_beginning(monkeypatch):
    decoded: list[int] = []
    decode = Tokenizer.decode

    def watched(tokenizer: Tokenizer, tokens: Any, **options: Any) -> str:
        decoded.append(len(tokens))
        return decode(tokenizer, tokens, **options)

    monkeypatch.setattr(Tokenizer, "decode", watched)
    assert StopStrings(BYTES, ("nowhere",))(torch.tensor([97] * 2000), 0, 0) is None
    assert max(decoded) < 50
    assert len(decoded) < 3 * 2000


def test_without_strings_nothing_is_asked(monkeypatch):
    """Neither the tokenizer nor, for it, the device."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("strings were looked for")

    monkeypatch.setattr(StopStrings, "__call__", refuse)
    assert build_stopping(Settings(), BYTES).find_end is None
    of_letters(4).generate("xa", length=20)
    with pytest.raises(AssertionError, match="strings were looked for"):
        of_letters(4).generate("xa", length=20, stop="b")


# --- how strings are given ---


@pytest.mark.parametrize("stop", ["ab", ["ab"], ("ab",), np.array(["ab"]), [np.str_("ab")]], ids=repr)
def test_one_string_or_a_sequence(stop):
    model = of_letters(4)
    assert Settings(stop=stop) == Settings(stop=("ab",))
    assert hash(Settings(stop=stop)) == hash(Settings(stop=("ab",)))
    assert type(Settings(stop=stop).stop[0]) is str
    assert Settings(stop=stop) != Settings()
    assert tokens_of(model.generate(PROMPTS, stop=stop)) == tokens_of(model.generate(PROMPTS, stop="ab"))


def test_no_strings():
    for stop in ((), []):
        assert Settings(stop=stop) == Settings()


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("", "stop must hold strings, none of them empty, got '' in ''"),
        (["a", ""], r"stop must hold strings, none of them empty, got '' in \['a', ''\]"),
        ([1], r"stop must hold strings, none of them empty, got 1 in \[1\]"),
        (b"ab", "stop must hold strings, none of them empty, got 97 in b'ab'"),
        (["a", None], r"stop must hold strings, none of them empty, got None in \['a', None\]"),
        (None, "stop must be a string or a sequence of strings, got None"),
        (5, "stop must be a string or a sequence of strings, got 5"),
        ({"a"}, "stop must be a string or a sequence of strings, got {'a'}"),
        ("a\ud800", r"stop must be valid Unicode, got 'a\\ud800'"),
    ],
    ids=ascii,
)
def test_strings_that_make_no_sense(stop, said):
    for give in (lambda: Settings(stop=stop), lambda: of_bytes().stream("a", stop=stop)):
        with pytest.raises(ValueError, match=f"^{said}$"):
            give()


def test_strings_need_a_tokenizer():
    with pytest.raises(
        ValueError, match=r"stop needs a tokenizer, and this model was saved without one, got"
    ):
        of_bytes(tokenizer=None).stream([[END]], stop="ab")


def test_strings_make_no_other_writer():
    model = of_bytes(4)
    assert model._writer(Settings(stop="ab")) is model._writer(Settings())
