"""Words of other libraries are answered with ours, which exist, in Python and on the command line."""

import inspect

import pytest

from bd3lm.cli import main
from bd3lm.commands.sample import Sample
from bd3lm.commands.score import Score
from bd3lm.commands.shared.command import flags_of
from bd3lm.lm import LanguageModel, load
from bd3lm.words import _ADVICE, _OF_PYTHON, settings_in
from tests.lm import of_bytes

FLAGS = {flag.field for flag in flags_of(Sample)}
KEYWORDS = set(inspect.signature(LanguageModel.generate).parameters)


def test_what_is_advised_is_there_in_python_and_on_the_command_line() -> None:
    for word, advice in _ADVICE.items():
        assert settings_in(advice) <= KEYWORDS & FLAGS, word
    assert not (_ADVICE.keys() | _OF_PYTHON.keys()) & KEYWORDS


def test_the_command_and_python_use_the_same_words() -> None:
    assert KEYWORDS - FLAGS == {"self", "settings", "seeds"}  # of which one seed is the command's
    assert set(inspect.signature(load).parameters) - FLAGS == {"source", "lightning", "hub"}
    asked = {flag.field for flag in flags_of(Score)}
    likelihood = set(inspect.signature(LanguageModel.log_likelihood).parameters)
    assert likelihood - asked == {"self", "texts", "prompts", "given"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("max_length", "say length, which counts the prompt too, or max_new_tokens, which does not"),
        ("num_return_sequences", "say count"),
        ("num_beams", "there is no beam search; temperature=0 takes the likeliest token each time"),
        ("ignore_eos", "say stop_at_eos=False"),
        ("lean", r"it is of a model: say with_lean\(...\).generate\(...\)"),
    ],
)
def test_a_keyword_of_another_library_is_answered_with_ours(word: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{word} is no setting: {said}$"):
        of_bytes().generate("a", **{word: 1})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sample box a --max-length 9", "say --length, which counts the prompt too, or --max-new-tokens, "),
        ("sample box a --max_length=9", "say --length, which counts the prompt too, or --max-new-tokens, "),
        ("sample box a --num-beams 2", "there is no beam search; --temperature 0 takes the likeliest token"),
        ("sample box a --ignore-eos", "say --no-stop-at-eos (see bd3lm sample --help)"),
        ("judge box --nucleus 0.5", "say --top-p (see bd3lm judge --help)"),
        ("score box x.txt --batch 4", "say --batch-size (see bd3lm score --help)"),
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


def test_nothing_is_advised_that_a_command_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["judge", "box", "--num-beams", "2"])  # it has no --temperature
    assert (
        capsys.readouterr().err == "bd3lm: bd3lm judge has no option --num-beams (see bd3lm judge --help)\n"
    )
