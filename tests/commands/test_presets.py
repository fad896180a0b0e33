"""`bd3lm presets`."""

from bd3lm.cli import main
from bd3lm.runs.presets import PRESETS


def test_presets_are_listed(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert all(PRESETS[line.split()[0]].description in line for line in lines)
