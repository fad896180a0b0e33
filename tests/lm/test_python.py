"""The library as somebody meets it in a notebook: what is offered, what editors know, what is printed."""

import ast
import inspect
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import get_type_hints

import pytest

import bd3lm
from bd3lm.lm import Gap, LanguageModel, Settings
from bd3lm.methods import SettingsKeywords, settings
from bd3lm.sampling import BlockFinished, Redrawn, Remasking, Started, Stopped, TokenHidden, TokenRevealed
from tests.lm import of_bytes, of_four_tokens, tokens_of

ROOT = Path(bd3lm.__file__).parents[2]

READS_THE_MODULE = """
import rlcompleter, sys, bd3lm
print("torch" in sys.modules, dir(bd3lm), rlcompleter.Completer({"bd3lm": bd3lm}).complete("bd3lm.Lang", 0))
"""

OF_A_USER = """
import bd3lm

lm = bd3lm.load("box")
settings: bd3lm.Settings = bd3lm.Settings(top_p=0.9)
texts: list[bd3lm.Generation] = lm.generate(["a", bd3lm.Gap(2)], settings, count=2, top_p=0.9, stop="x")
shown: list[str | None] = [event.text for event in lm.stream("a", tokens_per_pass=2)]
lm.generate("a", max_length=3)
lm.generate("a", top_p="high")
"""


def test_dir_shows_what_there_is_without_importing_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READS_THE_MODULE], capture_output=True, text=True, check=True
    )
    names = ["Gap", "Generation", "LanguageModel", "Settings", "TextLikelihood", "__version__", "load"]
    loaded, rest = done.stdout.split(" ", 1)
    assert loaded == "False"
    assert set(ast.literal_eval(rest.rpartition("]")[0] + "]")) >= set(names)
    assert rest.endswith(" bd3lm.LanguageModel(\n")
    assert all(getattr(bd3lm, name) for name in names)


def test_the_keywords_of_generate_are_the_fields_of_settings() -> None:
    declared, own = get_type_hints(SettingsKeywords), get_type_hints(Settings)
    assert list(declared) == [each.name for each in fields(Settings)]
    assert {name for name in declared if declared[name] != own[name]} == {
        "stop",  # also one string
        "speculation",  # also a number or a word
        "json_schema",  # also a mapping
        "logit_bias",  # a mapping
    }
    for method in (LanguageModel.generate, LanguageModel.stream):
        shown = inspect.signature(method).parameters
        assert {name: shown[name].default for name in own} == {
            each.name: each.default for each in fields(Settings)
        }
        assert "changes" not in shown


def test_every_setting_says_what_it_is() -> None:
    (body,) = (
        node.body
        for node in ast.parse(Path(settings.__file__).read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign):
            assert isinstance(after, ast.Expr), ast.unparse(node)


@pytest.mark.slow
def test_a_type_checker_knows_the_keywords(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(OF_A_USER)
    words = ["-m", "mypy", "--strict", "--no-incremental", "--config-file=", str(file)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line.partition("user.py:")[2] for line in done.stdout.splitlines() if ": error: " in line]
    assert len(found) == 2, done.stdout
    assert 'Unexpected keyword argument "max_length" for "generate"' in found[0]
    assert 'Argument "top_p" to "generate" of "LanguageModel" has incompatible type "str"' in found[1]


def test_a_generation_prints_its_text() -> None:
    model = of_bytes(end_logit=-50.0)
    (text,) = model.generate("naïve ", length=12, seed=1)
    assert str(text) == text.text
    assert repr(text) == f"Generation({text.text!r}, 12 tokens, stopped by length)"
    assert text.stopped_by == text.sample.stopped_by == "length"
    (bare,) = of_four_tokens().generate([[0]], length=3)
    assert str(bare) == repr(bare) == f"Generation({bare.tokens}, 3 tokens, stopped by length)"


def test_a_count_writes_so_many_texts_for_each_prompt() -> None:
    model = of_bytes()
    expected = model.generate(["a", "a", "a", "bc", "bc", "bc"], seed=3)
    assert tokens_of(model.generate(["a", "bc"], count=3, seed=3)) == tokens_of(expected)
    assert tokens_of(model.generate("a", count=2, seeds=[5, 6])) == tokens_of(
        model.generate(["a", "a"], seeds=[5, 6])
    )
    with pytest.raises(ValueError, match="seeds must hold one seed for each of 4 texts, got "):
        model.generate(["a", "b"], count=2, seeds=[1, 2])
    for count in (0, -1, 1.5, "2", True, None):
        with pytest.raises(ValueError, match=f"count must be a whole number from 1 on, got {count!r}"):
            model.generate("a", count=count)  # type: ignore[arg-type]


def test_events_tell_the_text_by_then() -> None:
    model = of_bytes(4, end_logit=-50.0)
    events = list(model.stream(["ab", ["x", Gap(2), "y"]], length=8, top_k=1, seed=2))
    own = [event for event in events if event.index == 0]
    assert isinstance(own[0], Started)
    assert own[0].text == "ab"
    assert own[1].text == "ab░"  # one token begins the text, and a block has four
    revealed = [event for event in own if isinstance(event, TokenRevealed)]
    assert [(event.text or "").count("░") for event in revealed] == [0, 3, 2, 1, 0]
    ends = [event.text for event in own if isinstance(event, BlockFinished)]
    (stopped,) = (event for event in own if isinstance(event, Stopped))
    assert ends[-1] == stopped.text == model.generation(stopped.sample).text
    assert next(event.text for event in events if event.index == 1) == "x░░y"


def test_events_tell_of_masks_that_come_back_and_of_texts_that_begin_again() -> None:
    model = of_bytes(4)
    events = list(model.stream("ab", stop_at_eos=False, unmasking=Remasking(steps=9, eta=1.0)))
    masks = [(event.text or "").count("░") for event in events]
    hidden = [place for place, event in enumerate(events) if isinstance(event, TokenHidden)]
    assert hidden
    assert all(masks[place] == masks[place - 1] + 1 for place in hidden)
    words = {"length": 8, "stop_at_eos": False, "entropy_floor": 1.3, "entropy_window": 4, "redraws": 1}
    texts = {type(event): event.text for event in model.stream("aa", Settings(**words))}
    assert texts[Started] == "aa"
    assert len(texts[Redrawn] or "") > 2


def test_events_of_a_model_without_a_tokenizer_have_no_text() -> None:
    events = list(of_four_tokens().stream([[0]], length=3))
    assert {event.text for event in events} == {None}


def test_what_is_not_watched_tells_only_how_it_ended() -> None:
    model = of_bytes()
    (event,) = model.stream("ab", length=6, watch=False)
    assert isinstance(event, Stopped)
    assert event.text == model.generate("ab", length=6)[0].text


def test_a_loss_is_of_tokens() -> None:
    with pytest.raises(
        ValueError, match=r"batch must be token ids \(rows, length\) or a TokenBatch, got 'ab'"
    ):
        of_bytes().loss("ab")  # type: ignore[arg-type]
