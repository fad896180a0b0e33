"""What users ask for is what is written: prompts, seeds, lengths, and events on the way."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from bd3lm.data import Tokenizer, train_bpe
from bd3lm.lm import Gap, Generation, LanguageModel, Settings, load
from bd3lm.sampling import (
    Ancestral,
    BlockFinished,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Redrawn,
    Remasking,
    Started,
    Stopped,
    TokenRevealed,
    UnmaskingRule,
)
from tests.lm import (
    BYTES,
    CONTEXT,
    END,
    PROMPTS,
    entropy_by_hand,
    every_method,
    of_bytes,
    of_four_tokens,
    replay,
    tokens_of,
)

pytestmark = pytest.mark.sweep(2)


def texts_of(generations: Iterable[Generation]) -> list[str | None]:
    return [generation.text for generation in generations]


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


# --- prompts ---


@every_method
def test_texts_go_on_from_their_prompts(block_size):
    for prompt, found in zip(PROMPTS, of_bytes(block_size).generate(PROMPTS, stop_at_eos=False), strict=True):
        given = [END, *bytes_of(prompt)]
        assert found.tokens[: len(given)] == given
        assert BYTES.mask_id not in found.tokens
        assert len(found.tokens) == CONTEXT
        assert (found.sample.given, found.sample.written) == (len(given), CONTEXT - len(given))
        assert found.text == bytes(b for b in found.tokens if b < 256).decode(errors="replace")
        assert found.text.startswith(prompt)


@pytest.mark.parametrize(
    "prompts",
    [
        ["ab"],
        ("ab",),
        [[END, 97, 98]],
        [(END, 97, 98)],
        [torch.tensor([END, 97, 98])],
        [torch.tensor([END, 97, 98], dtype=torch.int32)],
        torch.tensor([[END, 97, 98]]),
        [["ab"]],
        [["a", "", "b"]],
        [END, 97, 98],
        (END, 97, 98),
        torch.tensor([END, 97, 98]),
        np.array([END, 97, 98]),
        np.array([[END, 97, 98]], dtype=np.int16),
        [np.array([END, 97, 98], dtype=np.uint16)],
        list(np.array([END, 97, 98])),
        [[97, "b"]],  # ids among texts: the token that texts begin with stands before them
        ["a", 98],
    ],
    ids=str,
)
def test_a_prompt_may_be_given_in_many_ways(prompts):
    model = of_bytes()
    assert tokens_of(model.generate(prompts)) == tokens_of(model.generate("ab"))


def test_a_list_of_texts_is_several_prompts():
    model = of_bytes()
    for prompts in (["a", "b"], ("a", "b"), np.array(["a", "b"])):
        found = model.generate(prompts, seeds=[1, 2])
        assert tokens_of(found) == [model.generate(p, seeds=[s])[0].tokens for p, s in (("a", 1), ("b", 2))]
    assert len(model.generate([[END, 1], [END, 2], [END, 3]])) == 3
    assert len(model.generate(torch.tensor([[END, 1], [END, 2]]))) == 2


@every_method
def test_one_template_needs_no_list_around_it(block_size):
    model = of_bytes(block_size)
    for alone, listed in (
        (["a", Gap(2), "b"], [["a", Gap(2), "b"]]),
        (("a", Gap(2), "b"), [["a", Gap(2), "b"]]),
        (["", Gap(3)], [["", Gap(3)]]),
        ([END, Gap(2), 3], [[END, Gap(2), 3]]),
        ([END, 97, Gap(2), 98], [["a", Gap(2), "b"]]),
    ):
        assert tokens_of(model.generate(alone)) == tokens_of(model.generate(listed))
        events = [event for event in model.stream(alone) if isinstance(event, Stopped)]
        assert [event.sample.tokens.tolist() for event in events] == tokens_of(model.generate(listed))


@every_method
def test_ids_with_gaps_need_no_tokenizer(block_size):
    bare = of_bytes(block_size, tokenizer=None)
    (found,) = bare.generate([1, Gap(2), 3])
    assert (found.tokens[0], found.tokens[3], len(found.tokens)) == (1, 3, 4)
    assert (found.text, found.sample.given) == (None, 2)
    with_one = of_bytes(block_size).generate([1, Gap(2), 3], stop_at_eos=False)
    assert tokens_of(with_one) == [found.tokens]  # nothing is put before ids


def test_no_prompt_is_the_empty_one():
    model = of_bytes()
    (found,) = model.generate()
    assert found.sample.given == 1
    assert found.tokens == model.generate("")[0].tokens == model.generate([""])[0].tokens


@every_method
@pytest.mark.parametrize(
    "template",
    [
        ["ab", Gap(3), "cd"],
        [Gap(2), "cd"],
        ["a", Gap(1), "b", Gap(6), "c"],
        ["a", Gap(2), Gap(1)],
        ["", Gap(5)],
    ],
    ids=str,
)
def test_templates_keep_what_is_given_and_fill_their_gaps(template, block_size):
    given: list[int | None] = [END]
    for part in template:
        given += [None] * part.tokens if isinstance(part, Gap) else bytes_of(part)
    model = of_bytes(block_size)
    for length, reached in ((None, len(given)), (len(given), len(given)), (CONTEXT, CONTEXT), (24, 24)):
        (found,) = model.generate([template], length=length, stop_at_eos=False)
        assert (len(found.tokens), found.sample.stopped_by) == (reached, "length")
        assert BYTES.mask_id not in found.tokens
        kept = [
            (token, written) for token, written in zip(given, found.tokens, strict=False) if token is not None
        ]
        assert all(token == written for token, written in kept)
        assert (found.sample.given, found.sample.written) == (len(kept), reached - len(kept))


@every_method
def test_a_template_may_be_longer_than_the_context(block_size):
    before = "x" * 30
    (found,) = of_bytes(block_size).generate([before, Gap(2), "cd"], stop_at_eos=False)
    assert (len(found.tokens), found.sample.written) == (35, 2)
    assert found.tokens[:31] == [END, *bytes_of(before)]
    assert found.tokens[33:] == bytes_of("cd")


def test_templates_and_prompts_side_by_side_have_each_their_length():
    model = of_bytes()
    prompts: list[Any] = ["ab", ["ab", Gap(3), "c"], ["x", Gap(1)]]
    found = model.generate(prompts, seeds=[1, 2, 3], stop_at_eos=False)
    assert [len(each.tokens) for each in found] == [CONTEXT, 7, 3]
    alone = [model.generate([p], seeds=[s], stop_at_eos=False)[0] for s, p in enumerate(prompts, 1)]
    assert tokens_of(found) == tokens_of(alone)


def test_one_fill_sees_what_stands_after_a_gap_in_its_block_and_nothing_of_a_later_block():
    def fillings(block_size: int | None, before: str, fills: int | None = 1) -> set[int]:
        templates = [[before, Gap(1), end] for end in ascii_lowercase]
        place = 1 + len(before)
        found = of_bytes(block_size).generate(
            templates, length=place + 2, seeds=[0] * len(templates), fills=fills
        )
        return {each.tokens[place] for each in found}

    assert len(fillings(4, "a")) > 1
    assert len(fillings(4, "ab")) == 1  # the gap ends its block
    assert len(fillings(CONTEXT, "ab")) > 1
    assert len(fillings(None, "a")) == 1
    for block_size, before in ((4, "ab"), (None, "a")):  # one of several fills goes with what follows
        assert len(fillings(block_size, before, fills=None)) > 1


@every_method
def test_models_that_predict_first_tokens_put_nothing_before_a_text(block_size):
    model = of_bytes(block_size, score_first=True)
    empty, prompted = model.generate(["", "ab"], stop_at_eos=False)
    assert (empty.sample.given, empty.sample.written) == (0, CONTEXT)
    assert prompted.tokens[:2] == bytes_of("ab")
    assert prompted.sample.given == 2
    for prompts in ([[Gap(2), "ab"]], [Gap(2), "ab"], [Gap(2), 97, 98]):
        (template,) = model.generate(prompts, stop_at_eos=False)
        assert template.tokens[2:] == bytes_of("ab")
    (ids,) = model.generate([[]], stop_at_eos=False)
    assert ids.tokens == model.generate("", stop_at_eos=False)[0].tokens


def test_a_tokenizer_without_a_first_token_puts_nothing_before_a_text():
    nothing_first = replace(BYTES, bos_id=None)
    (found,) = of_bytes(None, tokenizer=nothing_first).generate("ab")
    assert found.tokens[:2] == bytes_of("ab")
    assert found.sample.given == 2


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([], r'prompts must hold at least one prompt \("" starts from nothing\), got none'),
        (["a", [BYTES.mask_id]], "prompt 1: it must not hold the mask token 257; a Gap leaves"),
        ([[258]], r"prompt 0: token ids must lie in 0\.\.257, got 258"),
        ([[-1]], r"prompt 0: token ids must lie in 0\.\.257, got -1"),
        ([[True]], "prompt 0: it must be a text, token ids, or a list of texts and Gaps, got True"),
        ([[1.0]], "prompt 0: it must be a text, token ids, or a list of texts and Gaps, got 1.0"),
        ([torch.tensor([1.0])], "prompt 0: it must be a text, token ids, or a list"),
        ([torch.tensor([[1, 2]])], "prompt 0: it must be a text, token ids, or a list"),
        ([[97, 1.5]], "prompt 0: it must be a text, token ids, or a list of texts and Gaps, got 1.5"),
        (
            ["a", Gap(1), None],
            "prompt 0: it must be a text, token ids, or a list of texts and Gaps, got None",
        ),
        ([1, [2, 3]], r"prompt 0: it must be a text, token ids, or a list of texts and Gaps, got \[2, 3\]"),
        ([1, 258], r"prompt 0: token ids must lie in 0\.\.257, got 258"),
        (torch.tensor([1, BYTES.mask_id]), "prompt 0: it must not hold the mask token 257"),
        ([1, BYTES.mask_id, Gap(1)], "prompt 0: it must not hold the mask token 257"),
        (b"ab", "prompts must be a text, token ids, a template, or a list of these, got b'ab'"),
        ([b"ab"], "prompt 0: it must be a text, token ids, or a list of texts and Gaps, got b'ab'"),
        (5, "prompts must be a text, token ids, a template, or a list of these, got 5"),
        (torch.tensor(5), "prompts must be a text, token ids, a template, or a list of these, got 5"),
        (None, "prompts must be a text, token ids, a template, or a list of these, got None"),
        ({"a"}, "prompts must be a text, token ids, a template, or a list of these, got {'a'}"),
        ([None], "prompt 0: it must be a text, token ids, or a list of texts and Gaps, got None"),
        ([True, False], "prompt 0: it must be a text, token ids, or a list of texts and Gaps, got True"),
        ([["a", None]], "prompt 0: it must be a text, token ids, or a list"),
    ],
    ids=str,
)
def test_bad_prompts(prompts, said):
    with pytest.raises(ValueError, match=said):
        of_bytes().generate(prompts)


@pytest.mark.parametrize("tokens", [0, -2])
def test_gaps_have_tokens(tokens):
    with pytest.raises(ValueError, match=f"a Gap must have at least 1 token, got {tokens}"):
        Gap(tokens)


@every_method
@pytest.mark.parametrize(
    "prompt",
    ["", [Gap(2)], [], [Gap(1), "a"], [Gap(1), 5]],
    ids=["text", "gap", "ids", "template", "ids gap"],
)
def test_a_model_that_does_not_predict_first_tokens_needs_one(prompt, block_size):
    said = "prompt 0: the first token of a text must be given: this model was not trained to predict it"
    with pytest.raises(ValueError, match=f"^{said}"):
        of_bytes(block_size, tokenizer=replace(BYTES, bos_id=None)).stream([prompt])
    if prompt in ([], [Gap(1), 5]):  # nothing is put before ids, whatever the tokenizer
        for tokenizer in (BYTES, None):
            with pytest.raises(ValueError, match=f"^{said}"):
                of_bytes(block_size, tokenizer=tokenizer).stream([prompt])


# --- each text on its own ---


@every_method
def test_a_text_is_the_same_alone_and_in_any_batch(block_size):
    model = of_bytes(block_size, end_logit=4.0)
    prompts, seeds = [*PROMPTS, "a", ["x", Gap(3), "y"]], list(range(7))
    alone = [model.generate([p], seeds=[s], length=24)[0] for p, s in zip(prompts, seeds, strict=True)]
    assert len({len(one.tokens) for one in alone}) > 2  # they end at different times
    for batch_size in (1, 2, 3, 32):
        together = model.generate(prompts, seeds=seeds, batch_size=batch_size, length=24)
        for one, other in zip(together, alone, strict=True):
            assert one.tokens == other.tokens
            assert one.text == other.text
            assert one.sample.stopped_by == other.sample.stopped_by
            assert one.sample.evaluations == other.sample.evaluations


@pytest.mark.parametrize(
    "unmasking",
    [
        Ancestral(3),
        Remasking(steps=6, eta=0.5),
        MostConfident(threshold=0.2),
        EntropyBound(2.0),
        FirstHitting(3),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [4, CONTEXT])
def test_neither_does_it_depend_on_the_batch_under_other_rules(block_size, unmasking):
    model = of_bytes(block_size, end_logit=4.0)
    settings = Settings(length=24, unmasking=unmasking)
    together = model.generate(PROMPTS, settings, seeds=range(5), batch_size=2)
    alone = [model.generate(p, settings, seeds=[s])[0] for s, p in enumerate(PROMPTS)]
    assert tokens_of(together) == tokens_of(alone)
    assert [g.sample.evaluations for g in together] == [g.sample.evaluations for g in alone]


def test_seeds_belong_to_texts_and_not_to_places():
    model = of_bytes()
    forwards = model.generate(PROMPTS, seeds=[1, 2, 3, 4, 5])
    backwards = model.generate(PROMPTS[::-1], seeds=[5, 4, 3, 2, 1])
    assert tokens_of(forwards) == tokens_of(backwards[::-1])
    assert [found.sample.seed for found in forwards] == [1, 2, 3, 4, 5]


def test_the_seed_of_the_settings_gives_every_text_its_own():
    model = of_bytes()
    first, second = model.generate(["ab", "ab"]), model.generate(["ab", "ab"], seed=1)
    assert len({tuple(found.tokens) for found in (*first, *second)}) == 4
    assert tokens_of(model.generate(["ab", "ab"], seed=1)) == tokens_of(second)
    assert model.generate("ab", seed=1)[0].tokens == second[0].tokens  # the first of more is the only one
    for found in first:  # the seed that is written down is enough to write it again
        assert model.generate("ab", seeds=[found.sample.seed])[0].tokens == found.tokens


def test_as_many_seeds_as_prompts():
    for seeds, shown in (([1, 2, 3], r"\[1, 2, 3\]"), ([1], r"\[1\]"), (3, "3"), ([], r"\[\]")):
        with pytest.raises(ValueError, match=f"seeds must hold one seed for each of 2 texts, got {shown}"):
            of_bytes().stream(["a", "b"], seeds=seeds)


@pytest.mark.parametrize("seed", [2**63, -1, -(2**63) - 1, 1.0, "1", None, True])
def test_seeds_that_do_not_fit_are_refused_at_the_call(seed):
    with pytest.raises(ValueError, match=r"seeds must be whole numbers from 0 to 2\^63 − 1, got \[5, "):
        of_bytes().stream(["a", "b"], seeds=[5, seed])


def test_the_largest_seed_and_those_of_numpy_are_seeds():
    model = of_bytes()
    assert model.generate("a", seeds=[2**63 - 1])[0].sample.seed == 2**63 - 1
    found = model.generate(["a", "b"], seeds=list(np.array([3, 4])))
    assert tokens_of(found) == tokens_of(model.generate(["a", "b"], seeds=[3, 4]))


@every_method
def test_results_come_in_the_order_of_the_prompts(block_size):
    model = of_bytes(block_size, end_logit=4.0)
    prompts = [f"{number:02}" for number in range(12)]
    events = model.stream(prompts, batch_size=4, length=20, watch=False)
    finished = [event.index for event in events if isinstance(event, Stopped)]
    assert finished != sorted(finished)  # otherwise this says nothing
    found = model.generate(prompts, batch_size=4, length=20)
    assert [each.sample.index for each in found] == list(range(12))
    assert [each.text[:2] for each in found] == prompts


# --- length ---


@every_method
@pytest.mark.parametrize(("length", "reached"), [(None, CONTEXT), (5, 5), (16, 16), (17, 17), (50, 50)])
def test_length(block_size, length, reached):
    (found,) = of_bytes(block_size).generate("abc", length=length, stop_at_eos=False)
    assert len(found.tokens) == reached
    assert found.sample.stopped_by == "length"
    assert found.sample.evaluations == reached - 4  # a pass for each written token
    assert BYTES.mask_id not in found.tokens


@every_method
def test_prompts_may_be_longer_than_the_context(block_size):
    prompt = "a prompt that is longer than the context"
    (found,) = of_bytes(block_size).generate(prompt, length=50, stop_at_eos=False)
    assert found.text.startswith(prompt)
    assert found.sample.written == 50 - 1 - len(prompt)


@every_method
def test_where_nothing_is_left_to_write_nothing_is_done(block_size):
    (found,) = of_bytes(block_size).generate("abc", length=4)
    assert found.text == "abc"
    assert (found.sample.written, found.sample.evaluations, found.sample.stopped_by) == (0, 0, "length")


@every_method
def test_a_length_that_does_not_hold_the_prompt(block_size):
    begun = ", including the start token"
    open_ = "got 16, the default of one context; give a length"
    for model, prompts, length, said in (
        (
            of_bytes(block_size),
            ["a", "abcde"],
            5,
            f"prompt 1: length must be at least the prompt's 6 tokens{begun}, got 5",
        ),
        (
            of_bytes(block_size),
            "x" * 17,
            None,
            f"prompt 0: length must be at least the prompt's 18 tokens{begun}, {open_}",
        ),
        (
            of_bytes(block_size),
            ["a", Gap(5)],
            6,
            f"prompt 0: length must be at least the prompt's 7 tokens{begun}, got 6",
        ),
        (
            of_bytes(block_size),
            [1] * 17,
            None,
            f"prompt 0: length must be at least the prompt's 17 tokens, {open_}",
        ),
        (
            of_bytes(block_size),
            [1, Gap(5)],
            5,
            "prompt 0: length must be at least the prompt's 6 tokens, got 5",
        ),
        (
            of_bytes(block_size, score_first=True),
            "abc",
            2,
            "prompt 0: length must be at least the prompt's 3 tokens, got 2",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{said}$"):
            model.stream(prompts, length=length)


# --- events ---


RULES: list[UnmaskingRule] = [
    FirstHitting(),
    FirstHitting(3),
    Ancestral(3),
    Remasking(steps=9, eta=0.7),
    MostConfident(threshold=0.3),
    EntropyBound(1.0),
]


@pytest.mark.parametrize(
    ("block_size", "unmasking"),
    [
        (None, None),
        (1, Remasking(steps=9)),
        *((size, rule) for size in (4, CONTEXT) for rule in RULES),
    ],
    ids=str,
)
def test_events_replay_to_what_generate_gives(block_size, unmasking):
    model = of_bytes(block_size, end_logit=4.0)
    settings = Settings(length=24, unmasking=unmasking, seed=7, batch_size=2)
    prompts: list[Any] = ["ab", "", ["x", Gap(5), "y"], "hello", "naïve ☂"]
    texts: dict[int, list[int]] = {}
    stopped: dict[int, Generation] = {}
    for event in model.stream(prompts, settings):
        assert event.index not in stopped
        replay(texts, event)
        if isinstance(event, Stopped):
            stopped[event.index] = model.generation(event.sample)
    expected = model.generate(prompts, settings)
    for index, found in enumerate(expected):
        assert texts[index][: len(found.tokens)] == found.tokens == stopped[index].tokens
        assert stopped[index].text == found.text
        assert stopped[index].sample.evaluations == found.sample.evaluations
    assert len(stopped) == len(prompts)


def test_blocks_are_written_one_after_the_other():
    events = list(of_bytes(4).stream("ab", length=10, stop_at_eos=False))
    frame = [event for event in events if not isinstance(event, TokenRevealed)]
    assert [(type(event).__name__, getattr(event, "start", None)) for event in frame] == [
        ("Started", None),
        ("BlockStarted", 0),
        ("BlockFinished", 0),
        ("BlockStarted", 4),
        ("BlockFinished", 4),
        ("BlockStarted", 8),
        ("BlockFinished", 8),
        ("Stopped", None),
    ]
    assert [event.stop for event in frame if isinstance(event, BlockFinished)] == [4, 8, 10]
    places = [event.position for event in events if isinstance(event, TokenRevealed)]
    assert sorted(places) == list(range(3, 10))


def test_redrawn_texts_start_again():
    settings = Settings(length=8, stop_at_eos=False, entropy_floor=math.log(4), entropy_window=4, redraws=2)
    texts: dict[int, list[int]] = {}
    names = []
    for event in of_bytes(4).stream("aa", settings):  # a first block of which is never high enough
        replay(texts, event)
        if isinstance(event, Started | Redrawn | Stopped):
            names.append(type(event).__name__)
    assert names == ["Started", "Redrawn", "Started", "Redrawn", "Started", "Stopped"]


@every_method
def test_without_watching_only_ends_are_told(block_size):
    model = of_bytes(block_size)
    settings = Settings(
        entropy_floor=1.85, entropy_window=8, redraws=15, stop_at_eos=False, length=24, top_p=1.0
    )
    quiet = list(model.stream(["ab"] * 8, settings, watch=False))
    assert {type(event) for event in quiet} == {Redrawn, Stopped}
    watched = [e for e in model.stream(["ab"] * 8, settings) if isinstance(e, Redrawn | Stopped)]
    assert [(type(e), e.index) for e in quiet] == [(type(e), e.index) for e in watched]
    ends = [
        [e.sample.tokens.tolist() for e in events if isinstance(e, Stopped)] for events in (quiet, watched)
    ]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("prompts", "changes"),
    [
        ("x" * 17, {}),
        ([], {}),
        ([[999]], {}),
        ("a", {"lenght": 3}),
        ("a", {"stride": 3}),
        ("a", {"top_k": 0}),
    ],
    ids=str,
)
def test_errors_come_at_the_call(prompts, changes):
    """Not when the first event is asked for."""
    with pytest.raises(ValueError, match=r"."):
        of_bytes().stream(prompts, **changes)


# --- tokenizers ---


@every_method
def test_without_a_tokenizer_ids_go_in_and_come_out(block_size):
    bare, model = of_bytes(block_size, tokenizer=None), of_bytes(block_size)
    (found,) = bare.generate([[END, 97, 98]])
    assert found.text is None
    assert found.tokens == model.generate("ab", stop_at_eos=False)[0].tokens
    assert found.entropy == pytest.approx(entropy_by_hand(found.tokens))


@pytest.mark.parametrize("prompt", ["ab", "", ["ab", Gap(2)]], ids=str)
def test_without_a_tokenizer_texts_are_refused(prompt):
    with pytest.raises(
        ValueError, match="prompt 0: text needs a tokenizer, and this model was saved without one"
    ):
        of_bytes(tokenizer=None).generate([prompt])


def test_without_a_tokenizer_nothing_is_an_end_token():
    model = of_bytes(end_logit=9.0, tokenizer=None)
    (found,) = model.generate([[END]], length=12)
    assert END in found.tokens[1:-1]
    assert len(found.tokens) == 12


def test_a_tokenizer_is_saved_and_loaded_with_its_model(tmp_path: Path):
    model = of_bytes()
    model.save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer == BYTES
    assert texts_of(load(tmp_path).generate(PROMPTS)) == texts_of(model.generate(PROMPTS))


def test_a_tokenizer_can_be_named_for_a_model_saved_without_one(tmp_path: Path):
    of_bytes(tokenizer=None).save_pretrained(tmp_path / "model")
    BYTES.save(tmp_path / "tokenizer")
    assert load(tmp_path / "model").tokenizer is None
    expected = texts_of(of_bytes().generate(PROMPTS))
    for tokenizer in (tmp_path / "tokenizer", str(tmp_path / "tokenizer"), "bytes"):
        assert texts_of(load(tmp_path / "model", tokenizer=tokenizer).generate(PROMPTS)) == expected
    with pytest.raises(FileNotFoundError, match="there is no tokenizer folder"):
        load(tmp_path / "model", tokenizer=tmp_path / "nowhere")


def test_tokens_of_several_characters():
    tokenizer = train_bpe(["hello there, hello world"] * 3, 270)
    bare = of_four_tokens(4, vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id, context=CONTEXT)
    model = LanguageModel(bare.network, bare.config, tokenizer)
    prompt = "hello hello, ☂"
    assert len(tokenizer.encode(prompt)) < len(prompt)
    (found,) = model.generate(prompt, stop_at_eos=False)
    assert found.text.startswith(prompt)
    assert found.text == tokenizer.decode(found.tokens)
    assert found.sample.given == 1 + len(tokenizer.encode(prompt))
    assert model.log_likelihood("hello")[0].tokens == len(tokenizer.encode("hello"))


def test_a_tokenizer_of_another_mask_is_refused():
    model = of_bytes()
    with pytest.raises(ValueError, match="tokenizer must have the model's mask token 257, got 256"):
        LanguageModel(model.network, model.config, replace(BYTES, mask_id=256))


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path):
    of_four_tokens().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="tokenizer must have at most 4 tokens, as many as the network, got 258"
    ):
        load(tmp_path, tokenizer="bytes")


# --- what follows the prompt ---


@every_method
def test_a_completion_is_the_text_without_its_prompt(block_size):
    model = of_bytes(block_size, end_logit=2.0)
    for settings in (Settings(), Settings(stop_at_eos=False, length=24), Settings(stop="a", length=24)):
        for prompt, found in zip(PROMPTS, model.generate(PROMPTS, settings), strict=True):
            assert found.text == prompt + found.completion
    (full,) = model.generate("abc", length=4)
    assert (full.text, full.completion) == ("abc", "")
    (nothing,) = of_bytes(block_size, tokenizer=None).generate([[END, 97]])
    assert nothing.completion is None


@every_method
def test_the_completion_of_a_template_follows_its_first_text(block_size):
    for model, template, given in (
        (of_bytes(block_size), ["ab", Gap(3), "cd", Gap(2), "é"], "ab"),
        (of_bytes(block_size), [Gap(3), "cd"], ""),
        (of_bytes(block_size), ["ab", "cd", Gap(3)], "abcd"),
        (of_bytes(block_size, score_first=True), [Gap(3), "cd"], ""),
        (of_bytes(block_size, score_first=True), ["ab", Gap(3), "cd"], "ab"),
    ):
        (found,) = model.generate([template], stop_at_eos=False)
        begin = 0 if model.config.method.score_first else 1
        assert found.text == given + found.completion
        assert found.completion == BYTES.decode(found.tokens[begin + len(given) :])
        assert len(found.completion) >= 3


def test_a_character_that_a_prompt_begins_is_of_the_completion():
    first, second, third = "☂".encode()
    model = of_bytes(4)
    with torch.no_grad():
        model.network.output.bias[third] += 1e3
    (found,) = model.generate([[END, 97, first, second, Gap(1), 98]])
    assert (found.text, found.completion) == ("a☂b", "☂b")
    (broken,) = model.generate([[END, 97, first, Gap(1), 98]])
    assert (broken.text, broken.completion) == ("a�b", "b")
    (found,) = model.generate([[END, 97, first, second]], length=6, stop="☂")  # which the prompt begins
    assert (found.text, found.completion, found.sample.stopped_by) == ("a☂�", "☂�", "length")


def test_a_completion_keeps_the_space_it_begins_with():
    """Which its tokens alone, decoded as a text of their own, would not have."""
    words = ["▁a", "▁b", "c", "</s>", "<mask>"]
    backend = Backend(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(words[3:])
    tokenizer = Tokenizer(backend.to_str(), mask_id=4, eos_id=3, bos_id=None)
    bare = of_four_tokens(4, vocab_size=5, mask_id=4, context=CONTEXT)
    model = LanguageModel(bare.network, bare.config, tokenizer)
    with torch.no_grad():
        model.network.output.bias[1] += 1e3
    (found,) = model.generate([[0]], length=4)
    assert tokenizer.decode(found.tokens[1:]) == "b b b"
    assert (found.text, found.completion) == ("a b b b", " b b b")
    (found,) = model.generate([[0]], length=4, stop=" b b")
    assert (found.text, found.completion, found.tokens) == ("a", "", [0, 1, 1])


# --- the writer that is kept ---


def test_a_writer_serves_as_long_as_it_would_be_the_same():
    model = of_bytes(4)
    plain = model._writer(Settings())
    assert model._writer(Settings(seed=5, length=20, batch_size=2, stop_at_eos=False)) is plain
    assert model._writer(Settings(temperature=0.5, top_k=3, top_p=0.7)) is plain  # a request's own
    assert model._writer(Settings(tokens_per_pass=2)) is not plain
    assert model._writer(Settings(unmasking=Ancestral(3))) is not plain


def test_another_network_writes_its_own_texts():
    model, other = of_bytes(4), of_bytes(4)
    with torch.no_grad():
        for weight in other.network.parameters():
            weight.mul_(-0.7)
    before, expected = model.generate("ab", seed=3), other.generate("ab", seed=3)
    model.network = other.network
    assert texts_of(model.generate("ab", seed=3)) == texts_of(expected) != texts_of(before)


# --- kinds of numbers and of prompts, and what is no distribution ---


def test_numpys_seeds_write_the_same_texts():
    model = of_bytes()
    (plain,) = model.generate("a", seed=7)
    (found,) = model.generate("a", seed=np.int64(7))
    assert (found, type(found.sample.seed)) == (plain, int)
    (again,) = model.generate("a", seeds=[np.int64(plain.sample.seed)])
    assert (again, type(again.sample.seed)) == (plain, int)


def test_a_seed_is_not_for_texts_that_have_their_own():
    model = of_bytes()
    with pytest.raises(
        ValueError, match="seed is for texts that have no seeds of their own, got 5 with seeds"
    ):
        model.generate("a", seed=5, seeds=[1])
    assert model.generate("a", Settings(seed=5), seeds=[1]) == model.generate("a", seeds=[1])


def test_generations_are_compared_by_what_they_hold():
    model = of_bytes()
    one, other = model.generate(["a", "b"], length=9)
    assert model.generate(["a", "b"], length=9) == [one, other]
    assert one != other
    assert hash(model.generate("a", length=9)[0]) == hash(one)
    started = [next(iter(model.stream(prompt, length=9))) for prompt in ("a", "a", "b")]
    assert started[0] == started[1] != started[2]


def test_a_full_text_is_started_before_it_is_stopped():
    started, stopped = of_bytes().stream("abc", length=4)
    assert (type(started), type(stopped)) == (Started, Stopped)


def test_an_array_of_texts_is_the_list_of_them():
    parts = ["The ", "city"]
    assert tokens_of(of_bytes().generate([np.array(parts)])) == tokens_of(of_bytes().generate([parts]))


@pytest.mark.parametrize("length", [10**12, 2**30 + 1])
def test_texts_that_no_memory_holds_are_refused(length):
    with pytest.raises(ValueError, match=f"request 0: length must be at most 134,217,728, .* got {length:,}"):
        of_bytes().stream("a", length=length)
    with pytest.raises(ValueError, match="request 0: length must be at most 67,108,864, or rows for 2 texts"):
        of_bytes().stream(["a", "a"], length=length)


# --- how much follows a prompt ---


@every_method
def test_new_tokens_are_counted_after_each_prompt(block_size):
    model, prompts = of_bytes(block_size), ["", "a", "hello", [1, 2, 3], ["a", Gap(2), "b"]]
    found = model.generate(prompts, max_new_tokens=np.int64(5), stop_at_eos=False, seed=2)
    assert [len(each.tokens) for each in found] == [6, 7, 11, 8, 10]
    for index, (prompt, text) in enumerate(zip(prompts, found, strict=True)):
        seeds = [found[index].sample.seed]
        alone = model.generate([prompt], length=len(text.tokens), stop_at_eos=False, seeds=seeds)
        assert tokens_of(alone) == [text.tokens]
    stopped = [event.sample for event in model.stream("a", max_new_tokens=3) if isinstance(event, Stopped)]
    assert len(stopped[0].tokens) <= 5


@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True])
def test_bad_numbers_of_new_tokens(value):
    with pytest.raises(ValueError, match=f"max_new_tokens must be a whole number from 1 on, got {value!r}"):
        of_bytes().generate("a", max_new_tokens=value)


def test_a_length_and_new_tokens_exclude_each_other():
    for options in ({"length": 9}, {"settings": Settings(length=9)}):
        with pytest.raises(ValueError, match="give either length or max_new_tokens, not both, got 9 and 4"):
            of_bytes().generate("a", max_new_tokens=4, **options)
