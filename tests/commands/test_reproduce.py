"""The commands of docs/reproduce.md for tables 3, 4 and 5, run as they stand: only the models are tiny."""

import json
import re
from pathlib import Path

import pytest

from bd3lm.cli import main
from tests.commands import documents
from tests.test_docs import ROOT, _commands
from tests.tiny_recipes import prepared

TINY = {
    "data.context": 32,
    "data.validation_sequences": 4,
    "data.validation_batch": 4,
    "data.skip": 0,
    "network.layers": 1,
    "network.hidden": 16,
    "network.heads": 2,
    "train.global_batch": 4,
    "train.micro_batch": "null",
    "train.steps": 1,
}
FEW = ["--sequences", "4", "--device", "cpu"]


def section(title: str) -> str:
    """The commands of a section of the page."""
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {title}.*?(?=^## )", page, flags=re.DOTALL | re.MULTILINE)
    (block,) = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return block


def figures(file: Path) -> dict[str, list[tuple[str, str]]]:
    """(Name, meaning) of the figures of each model."""
    found: dict[str, list[tuple[str, str]]] = {}
    for record in json.loads(file.read_text(encoding="utf-8")):
        names = found.setdefault(record["model"].removeprefix("runs/"), [])
        names += [(each["name"], each["meaning"]) for each in record["result"]["figures"]]
    return found


@pytest.mark.sweep(1)
def test_tables_3_4_and_5_are_one_command_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for corpus in ("lm1b", "openwebtext"):
        prepared(Path("data") / corpus)
    tiny = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    evaluations = []
    for words in _commands(section("Tables 3 and 4"), empty):
        if words[0] == "eval":
            out = Path(f"table-{3 + len(evaluations)}.json")
            assert main([*words, *FEW, "--out", str(out)]) == 0
            evaluations.append((" ".join(capsys.readouterr().out.split()), figures(out)))
        else:
            assert main([*words, *tiny, "--device", "cpu"]) == 0, words
            capsys.readouterr()
    exact, bound, drawn = [("exact", "exact")], [("nelbo", "bound")], [("counts", "bound")]
    baselines = {"owt-ar": exact, "owt-sedd": bound, "owt-mdlm": bound + drawn}
    blocks = {
        "owt-bd3lm-16/finetune": bound + drawn,
        **{f"owt-bd3lm-{size}/finetune": bound + exact + bound for size in (8, 4)},
    }
    (_, table_3), (printed, table_4) = evaluations
    assert table_4 == baselines | blocks
    assert table_3 == {"lm1b-d3pm": bound} | {
        name.replace("owt", "lm1b"): each for name, each in (baselines | blocks).items()
    }
    assert re.search(r"exact, the paper's │ \d", printed)  # the autoregressive row
    assert re.search(r"nelbo, the paper's │ ≤ \d", printed)
    assert "less noise" not in printed  # which stands beside each that has it
    (words,) = _commands(section("Table 5"), empty)
    news = documents(tmp_path)
    assert main([*words, "--data", str(news), *FEW, "--out", "table-5.json"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert figures(Path("table-5.json")) == baselines | {"owt-bd3lm-4/finetune": bound + exact + bound}
    for row in (r"exact, the paper's │ \d", r"nelbo, the paper's │ ≤ \d", r"│ exact │ \d"):
        assert re.search(row, printed)
