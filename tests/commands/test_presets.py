"""`bd3lm presets`."""

import pytest

from bd3lm.cli import main
from bd3lm.runs.presets import PRESETS, how_to_prepare


def test_presets_are_listed(capsys):
    assert main(["presets"]) == 0
    listed, data = capsys.readouterr().out.split("\n\n")
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert all(PRESETS[line.split()[0]].description in line for line in lines)
    reporting = {line.split()[0] for line in lines if line.endswith("writes report.html")}
    assert reporting == {name for name, preset in PRESETS.items() if preset.report}
    folders = {stage.recipe["data"]["path"] for preset in PRESETS.values() for stage in preset.stages}
    assert folders - {"builtin"} == {line.split()[0] for line in data.splitlines()[1:]}


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        (
            "lm1b-ar",
            "make it with `bd3lm data prepare lm1b data/lm1b --workers 4`; if it has moved, name it",
        ),
        (
            "wikipedia-ar",
            "`bd3lm data prepare ARTICLES data/wikipedia --tokenizer gpt2`, where ARTICLES is any",
        ),
    ],
)
def test_a_preset_without_its_text_says_how_to_get_it(preset, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", preset, "--out", "run"]) == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_text_that_no_preset_reads_is_made_of_any_source():
    assert how_to_prepare("data/mine") == "`bd3lm data prepare SOURCE data/mine`"
