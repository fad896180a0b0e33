"""Commands of docs/reproduce.md, run as they stand: only the models and the judge are tiny."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bd3lm.cli import main
from tests.commands import documents
from tests.evaluation.judges import save_judge
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


def section(title: str, index: int = 0) -> str:
    """A block of commands of a section of the page."""
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {title}.*?(?=^## )", page, flags=re.DOTALL | re.MULTILINE)
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return blocks[index]


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
    monkeypatch.setenv("COLUMNS", "200")  # names of estimators on one line
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
    words = [word for word in words if word != "paper" and "owt-ar" not in word]
    assert main([*words, "nelbo:ordered", "--data", str(news), *FEW]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"nelbo:ordered │ +≈ \d", printed)
    assert "nelbo has no finite variance" in printed
    assert main([*words, "nelbo:reference", "--data", str(news), *FEW]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"nelbo:reference │ +≈ \d", printed)
    assert "no finite variance" not in printed  # whose rates are not near 0


def test_samples_of_ssd_lm_as_other_code_writes_them_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of made-up texts, in the shapes of the reference's script and of the authors' code."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    texts = [f"text {number} about the sea</s>and another" for number in range(3)]
    (tmp_path / "generated_samples").mkdir()
    for seed, pair in enumerate((texts[:2], texts[2:]), 1):
        samples = [
            {"sampled_sequences": text, "context_sequences": "<s>", "total_seq_time": 1.5} for text in pair
        ]
        written = {
            "seed": seed,
            "generated_samples": [{f"sample_{i}": each} for i, each in enumerate(samples)],
        }
        file = tmp_path / "generated_samples" / f"samples_openwebtext-valid_bs25_l1025_t1000_SEED{seed}"
        file.write_text(json.dumps(written, indent=2), encoding="utf-8")
    line = {"context_len": 1, "context_string": "<s>", "tokens": [[1], [2], [3]], "string": texts}
    (tmp_path / "ssdlm-decoded.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")

    block = section("Table 7", 1)
    convert, _, judge = block.partition("bd3lm judge")
    subprocess.run(["bash", "-ec", f'python() {{ "{sys.executable}" "$@"; }}\n{convert}'], check=True)
    tiny = ["--judge", str(save_judge(tmp_path / "judge")), "--window", "32", "--stride", "16"]
    results = []
    for number, words in enumerate(_commands(f"bd3lm judge{judge}", tmp_path)):
        assert main([*words, *tiny, "--device", "cpu", "--out", f"{number}.json"]) == 0
        (record,) = json.loads((tmp_path / f"{number}.json").read_text(encoding="utf-8"))
        results.append(record["result"])
    assert [(each["samples"], each["characters"]) for each in results] == [(3, sum(map(len, texts)))] * 2
    assert results[0] == results[1]
    capsys.readouterr()
    assert main(["judge", "ssdlm-decoded.jsonl", "--field", "strings", *tiny]) == 1
    assert "line 1 must have a text in its field strings" in capsys.readouterr().err
    assert main(["judge", "nothing.txt", "--field", "string", *tiny]) == 1
    assert "--field is for texts in .jsonl files, and no source is one" in capsys.readouterr().err
