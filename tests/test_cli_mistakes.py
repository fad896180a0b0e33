"""A command line that cannot be read is answered in one line, and in full with --debug."""

import sys
from typing import Any

import pytest

from bd3lm import cli
from bd3lm.cli import main
from bd3lm.cli.mistakes import in_one_line
from bd3lm.commands.sample import Sample

pytestmark = pytest.mark.sweep(3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sample --lean abc", "bd3lm: --lean must be a number, got 'abc' (see bd3lm sample --help)"),
        (
            "sample --length abc",
            "bd3lm: --length must be a whole number, got 'abc' (see bd3lm sample --help)",
        ),
        (
            "bench train --steps x",
            "bd3lm: --steps must be a whole number, got 'x' (see bd3lm bench train --help)",
        ),
        (
            "sample --lenght 5",
            "bd3lm: bd3lm sample has no option --lenght, did you mean --length? (see bd3lm sample --help)",
        ),
        (
            "score box x.txt --folder f",
            "bd3lm: bd3lm score has no option --folder; it belongs to bd3lm data prepare and",
        ),
        (
            "score box x.txt --folderr f",
            "bd3lm: bd3lm score has no option --folderr (see bd3lm score --help)",
        ),
        ("demo --resume", "bd3lm: bd3lm demo has no option --resume; it belongs to bd3lm adapt and"),
        ("bench train --method foo", "bd3lm: --method must be one of bd3lm, joint, mdlm, ar, got 'foo'"),
        ("sample --length", "bd3lm: --length needs a value, got none (see bd3lm sample --help)"),
        ("data prepare", "bd3lm: bd3lm data prepare needs SOURCE and OUT (see bd3lm data prepare --help)"),
        (
            "export box",
            "bd3lm: bd3lm export needs OUT and --to {huggingface,transformers,sdar,reference} (see bd3lm "
            "export",
        ),
        ("judge a --length 5 x", "bd3lm: error parsing --length: Could not find valid parse for arguments"),
    ],
)
def test_a_mistake_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(said)
    assert told.err.count("\n") == 1
    with pytest.raises(SystemExit):
        main([*words.split(), "--debug"])
    assert capsys.readouterr().err.count("\n") > 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "bench train --variants eager --variants dense",
            "--variants takes several values after one flag, got the flag 2 times: write --variants A B\n",
        ),
        (
            "zeroshot x --data a --data b --data=c",
            "--data takes several values after one flag, got the flag 3 times: write --data A B\n",
        ),
    ],
)
def test_a_list_given_in_parts_is_refused_rather_than_cut(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"bd3lm: {said}"


@pytest.mark.parametrize(
    ("words", "prompts", "stop"),
    [
        (["--stop", "x", "The city"], ("The city",), ("x",)),
        (["The city", "--stop", "x", "--stop=y"], ("The city",), ("x", "y")),
        (["--stop", "x", "--stop", "y", "A cat", "A dog"], ("A cat", "A dog"), ("x", "y")),
    ],
)
def test_a_flag_with_one_value_leaves_the_prompts_alone_and_may_be_repeated(
    words: list[str], prompts: tuple[str, ...], stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    seen: list[Sample] = []
    monkeypatch.setattr(Sample, "run", lambda command: seen.append(command) or 0)
    assert main(["sample", "box", *words]) == 0
    assert [(each.model, each.prompts, each.stop) for each in seen] == [("box", prompts, stop)]


def test_what_is_said_of_a_command_that_can_be_read_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    read = cli.tyro.cli

    def talkative(*words: Any, **options: Any) -> Any:
        print("something to know", file=sys.stderr)
        return read(*words, **options)

    monkeypatch.setattr(cli.tyro, "cli", talkative)
    assert main(["presets"]) == 0
    assert capsys.readouterr().err == "something to know\n"


@pytest.mark.parametrize(
    "box",
    [
        "╭─ Value error ─╮\n│ Error parsing --a: no INT fits │\n│ instantiated from ['x']. │\n"
        "│ ──── │\n│ For more, see bd3lm sample --help │\n╰────╯\n",
        " Value error \n ----- \n  Error parsing --a: no INT fits \n  instantiated from ['x'].\n"
        "  -----\n  For more, see bd3lm sample --help\n \n",
    ],
)
def test_boxes_are_drawn_with_lines_or_with_dashes(box: str):
    assert in_one_line(box, "bd3lm sample") == "--a must be a whole number, got 'x' (see bd3lm sample --help)"


def test_what_is_no_box_is_told_as_it_is():
    assert in_one_line("something\nelse  happened") == "something else happened"
    assert in_one_line("╭─ New ─╮\n│ Never seen. │\n╰──╯\n") == "never seen"


def test_a_missing_extra_is_installed_by_the_pip_of_the_environment(monkeypatch, tmp_path, capsys):
    def missing(*_: Any) -> int:
        raise ImportError("bd3lm sample needs the package other: pip install 'bd3lm[judge]'")

    monkeypatch.setattr(Sample, "run", missing)
    own = tmp_path / ".venv" / "bin"
    own.mkdir(parents=True)
    (own / "pip").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    said = "bd3lm: bd3lm sample needs the package other: {} install 'bd3lm[judge]'\n"
    for path, folder, pip in (
        (own, tmp_path, "pip"),  # activated
        (tmp_path, tmp_path, ".venv/bin/pip"),
        (tmp_path, tmp_path / "elsewhere", f"{own}/pip"),
    ):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PATH", str(path))
        assert main(["sample"]) == 1
        assert capsys.readouterr().err == said.format(pip)
    (own / "pip").unlink()  # as of an environment that other tools install into
    assert main(["sample"]) == 1
    assert capsys.readouterr().err == said.format("pip")
