"""Speculation as users ask for it: by a number, a word or all there is to say; and of models that cannot."""

from dataclasses import replace
from typing import Any

import pytest

from bd3lm import LanguageModel
from bd3lm.lm import Gap, Generation
from bd3lm.methods import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    DrafterMethod,
    LanguageModelConfig,
)
from bd3lm.sampling import Drafted, Speculation, Stopped, TokenRevealed
from tests.lm import SEDD, of_method
from tests.oracles.networks import network_of

JOINT = BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True)


def joint(**changes: Any) -> LanguageModel:
    return of_method(replace(JOINT, **changes)).with_law("causal")


def drafter() -> LanguageModel:
    network = network_of("Llama", 3, context=24, additions=2)
    config = LanguageModelConfig(network=network.config, method=DrafterMethod(masks=3), mask_id=3)
    return LanguageModel(network, config)


def texts(lm: LanguageModel, **settings: Any) -> list[Generation]:
    given = {"prompts": [1], "length": 24, "stop_at_eos": False, "count": 6, "seed": 3}
    return lm.generate(**given | settings)


@pytest.mark.parametrize(
    "lm", [joint(), joint(previous_token=True), drafter()], ids=["", "previous", "drafter"]
)
def test_texts_are_those_without_speculation_and_say_what_was_guessed(lm: LanguageModel) -> None:
    plain = texts(lm, speculation="off", temperature=0.7)
    assert not any(each.sample.drafted for each in plain)
    for asked in (1, 3, "auto", Speculation(drafts=2, candidates=2), Speculation(drafts=2, passes=2)):
        found = texts(lm, speculation=asked, temperature=0.7)
        assert [each.tokens for each in found] == [each.tokens for each in plain]
        if asked != "auto":
            most = asked if isinstance(asked, int) else 2
            assert all(len(each.sample.drafted) == most for each in found)
            assert sum(sum(each.sample.accepted) for each in found) > 0
            assert sum(each.sample.evaluations for each in found) < 6 * 24


@pytest.mark.parametrize("law", ["causal", "block"])
def test_fills_of_gaps_are_the_same_too(law: Any) -> None:
    """Every fill is drafted and weighed as without, and so is the draw of one."""
    lm = of_method(JOINT).with_law(law)
    template = ["ab", Gap(3), "c", Gap(2), "d"]
    plain, fast = (lm.generate(template, seed=5, speculation=asked, top_p=1.0)[0] for asked in ("off", 2))
    assert (fast.tokens, fast.sample.fills) == (plain.tokens, plain.sample.fills)
    assert fast.sample.fills > 1
    assert fast.sample.effective_fills == pytest.approx(plain.sample.effective_fills)
    assert sum(fast.sample.drafted) > 0


def test_a_drafter_drafts_unless_it_is_told_not_to() -> None:
    assert all(each.sample.drafted for each in texts(drafter()))
    assert not any(each.sample.drafted for each in texts(drafter(), cache=False))
    assert not any(each.sample.drafted for each in texts(joint()))


def test_by_rejection_texts_are_others() -> None:
    plain = [each.tokens for each in texts(joint(), speculation="off")]
    found = [each.tokens for each in texts(joint(), speculation=Speculation(drafts=3, scheme="rejection"))]
    assert found != plain
    assert found == [
        each.tokens for each in texts(joint(), speculation=Speculation(drafts=3, scheme="rejection"))
    ]


def test_drafts_are_told_while_a_text_is_watched_and_are_no_part_of_it() -> None:
    lm = joint()
    events = list(lm.stream([1], length=24, speculation=3, stop_at_eos=False, seed=4))
    assert sum(isinstance(event, Drafted) for event in events) > 3
    revealed = {event.position: event.token for event in events if isinstance(event, TokenRevealed)}
    last = events[-1]
    assert isinstance(last, Stopped)
    assert list(revealed.values()) == last.sample.tokens.tolist()[1:]
    assert last.text == lm.generation(last.sample).text


@pytest.mark.parametrize(
    ("lm", "asked", "said"),
    [
        (
            of_method(AutoregressiveMethod()),
            2,
            "speculation must be 'off' for a model of the method autoregressive",
        ),
        (of_method(SEDD), 2, "speculation must be 'off' for a model of the method SEDD"),
        (joint(), -1, "speculation must be a number of drafts, 'auto', 'off' or a Speculation, got -1"),
        (
            joint(),
            "fast",
            "speculation must be a number of drafts, 'auto', 'off' or a Speculation, got 'fast'",
        ),
        (joint(), 16, r"speculation\.drafts must be 1 to 15, less than the context, got 16"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_with_the_reason(lm: LanguageModel, asked: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        texts(lm, speculation=asked)
    with pytest.raises(ValueError, match="cache must be on for speculation"):
        texts(joint(), speculation=2, cache=False)


def test_settings_that_contradict_each_other_are_refused() -> None:
    for wrong, said in (
        ({"scheme": "rejection"}, r"speculation\.drafts must be a number with the scheme rejection"),
        (
            {"drafts": 1, "scheme": "argmax"},
            r"speculation\.scheme must be rejection or coupled, got 'argmax'",
        ),
        ({"candidates": 0}, r"speculation\.candidates must be a whole number from 1 on, got 0"),
        ({"passes": 3}, r"speculation\.passes must be 1 or 2, got 3"),
        ({"drafts": 1.5}, r"speculation\.drafts must be a whole number from 0 on, got 1\.5"),
    ):
        with pytest.raises(ValueError, match=said):
            Speculation(**wrong)
