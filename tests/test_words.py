"""Words of other libraries are answered with ours, which exist, in Python and on the command line."""

import inspect

import pytest

from bd3lm.cli import main
from bd3lm.commands import every_command
from bd3lm.commands.sample import Sample
from bd3lm.commands.score import Score
from bd3lm.commands.shared.command import flags_of, subcommands_of
from bd3lm.lm import LanguageModel, load
from bd3lm.runs.recipe import _types_at
from bd3lm.words import _ADVICE, _OF_COMMANDS, _OF_FLAGS, _OF_PYTHON, _OF_RECIPES, settings_in
from tests.lm import of_bytes

FLAGS = {flag.field for flag in flags_of(Sample)}
KEYWORDS = set(inspect.signature(LanguageModel.generate).parameters)


def test_what_is_advised_is_there_in_python_and_on_the_command_line() -> None:
    for word, advice in _ADVICE.items():
        assert settings_in(advice) <= KEYWORDS & FLAGS, word
    assert not (_ADVICE.keys() | _OF_PYTHON.keys()) & KEYWORDS
    commands = every_command()
    everywhere = {flag.field for command in commands.values() for flag in flags_of(command)}
    for word, advice in _OF_FLAGS.items():
        assert settings_in(advice) <= everywhere, word
    train = {flag.name for flag in flags_of(commands["train"])}
    for word, field in _OF_RECIPES.items():
        assert f"--{field}" in train or _types_at(field.split(".")), word
    assert not {f"--{word.replace('_', '-')}" for word in _OF_RECIPES} & train
    typed = {*commands, *(f"data {each}" for each in subcommands_of(commands["data"])), "--help", "--version"}
    assert set(_OF_COMMANDS.values()) <= typed
    assert not _OF_COMMANDS.keys() & commands.keys()


def test_the_command_and_python_use_the_same_words() -> None:
    assert KEYWORDS - FLAGS == {"self", "settings", "seeds"}  # of which one seed is the command's
    assert set(inspect.signature(load).parameters) - FLAGS == {"source", "lightning", "hub"}
    asked = {flag.field for flag in flags_of(Score)}
    likelihood = set(inspect.signature(LanguageModel.log_likelihood).parameters)
    assert likelihood - asked == {"self", "texts", "prompts", "given"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("max_length", "use length, which counts the prompt too, or max_new_tokens, which does not"),
        ("num_return_sequences", "use count"),
        ("num_beams", "there is no beam search; use temperature=0 to take the most likely token each time"),
        ("ignore_eos", "use stop_at_eos=False"),
        ("logprobs", "use alternatives"),
        ("lean", r"it belongs to the model: use with_lean\(...\).generate\(...\)"),
    ],
)
def test_a_keyword_of_another_library_is_answered_with_ours(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{word} is not a setting: {said}$"):
        of_bytes().generate("a", **{word: 1})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sample box a --max-length 9", "use --length, which counts the prompt too, or --max-new-tokens, "),
        ("sample box a --max_length=9", "use --length, which counts the prompt too, or --max-new-tokens, "),
        (
            "sample box a --num-beams 2",
            "there is no beam search; use --temperature 0 to take the most likely token",
        ),
        ("sample box a --ignore-eos", "use --no-stop-at-eos (see bd3lm sample --help)"),
        ("judge box --nucleus 0.5", "use --top-p (see bd3lm judge --help)"),
        ("score box x.txt --batch 4", "use --batch-size (see bd3lm score --help)"),
        ("sample box --prompt-file x.txt", "use --prompts-from (see bd3lm sample --help)"),
        ("sample box --gpu", "use --device cuda (see bd3lm sample --help)"),
        ("eval box --text x.txt", "use --data (see bd3lm eval --help)"),
        ("train demo --learning_rate 1e-3", "use --optimizer.lr (see bd3lm train --help)"),
        ("train demo --epochs=3", "use --train.steps (see bd3lm train --help)"),
    ],
)
def test_a_flag_of_another_library_is_answered_with_ours(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    name, flag = words.split()[0], next(each for each in words.split() if each.startswith("--"))
    told = capsys.readouterr().err
    assert told.startswith(f"bd3lm: bd3lm {name} has no option {flag.partition('=')[0]}: {said}")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate x", "bd3lm has no command 'generate', did you mean 'sample'? Its commands are train, "),
        (
            "prepare x",
            "bd3lm has no command 'prepare', did you mean 'data prepare'? Its commands ",
        ),
        ("help", "bd3lm has no command 'help', did you mean '--help'? Its commands are train, "),
        ("sample --model box x", "bd3lm sample takes MODEL without a flag, got --model (see"),
        ("eval --model box", "bd3lm eval takes MODELS without a flag, got --model (see bd3lm eval --help)"),
        ("train --preset=demo", "bd3lm train takes PRESET without a flag, got --preset (see bd3lm train"),
    ],
)
def test_what_has_another_name_or_none_is_told(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"bd3lm: {said}")


@pytest.mark.parametrize("preset", ["demo", "demo-ar"])
def test_a_field_of_a_recipe_is_found_one_level_down(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", preset, "--show", "--lr", "1e-3"]) == 1
    assert "lr: unknown key, did you mean 'optimizer.lr'? allowed are " in capsys.readouterr().err


def test_nothing_is_advised_that_a_command_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["judge", "box", "--num-beams", "2"])  # it has no --temperature
    assert (
        capsys.readouterr().err == "bd3lm: bd3lm judge has no option --num-beams (see bd3lm judge --help)\n"
    )
