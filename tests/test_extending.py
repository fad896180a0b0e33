"""What docs/extending.md says, with its own code: each addition is one file outside bd3lm, and no more."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tiny_recipes import plain, prepared

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text("utf-8")
LEFT_FIRST, RULES, FROM_PYTHON, TWINS, NETWORK, LOOP, COMMAND = re.findall(
    r"```python\n(.*?)```", PAGE, flags=re.DOTALL
)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "my_rules.py"
    file.write_text(RULES)
    (tmp_path / "left_first.py").write_text(LEFT_FIRST)
    return file


def bd3lm(folder: Path, *words: str, path: Path | None = None) -> str:
    """What a command prints, in a process of its own, where nothing of the tests is loaded."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(path), *filter(None, [environment.get("PYTHONPATH")])]
        )
    done = subprocess.run(
        [sys.executable, "-m", "bd3lm", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def recipe(folder: Path, data: Path, *changes: dict[str, object]) -> str:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(plain(data, *changes)))
    return str(file)


BLOCKS = {"method": {"kind": "block_diffusion", "block_size": 4}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masking", "is_bound"),
    [({"kind": "tails", "least": 2}, False), ({"kind": "times", "schedule": "cubic"}, True)],
    ids=["a masking rule", "a noise schedule"],
)
def test_a_rule_in_a_file_trains(
    masking: dict[str, object], is_bound: bool, rules: Path, data: Path, tmp_path: Path
) -> None:
    config = recipe(tmp_path, data, BLOCKS, {"objective": {"masking": masking}})
    printed = bd3lm(tmp_path, "train", "--plugin", "my_rules.py", "--config", config, "--out", "run")
    assert "loss (no bound)" in printed or is_bound
    kept = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    kind = masking.get("schedule", masking["kind"])
    assert kept["objective"]["masking"] == masking
    assert kept["plugins"] == {kind: "my_rules.py"}
    again = [sys.executable, "-m", "bd3lm", "train", "--resume", "--out", "run"]
    refused = subprocess.run(again, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert refused.returncode == 1
    assert f"got '{kind}'; {kind} is of the plugin my_rules.py: give --plugin my_rules.py" in refused.stderr
    bd3lm(tmp_path, "train", "--resume", "--out", "run", "--plugin", "my_rules.py")


def test_an_unmasking_rule_in_a_file_writes(rules: Path, tmp_path: Path) -> None:
    words = (
        "sample box Once --lean 0 --length 16 --plugin left_first.py --out texts.jsonl --unmasking left_first"
    )
    bd3lm(tmp_path, *words.split(), "tokens=2")
    (line,) = map(json.loads, (tmp_path / "texts.jsonl").read_text("utf-8").splitlines())
    assert line["settings"]["unmasking"] == {"kind": "left_first", "tokens": 2}
    assert len(line["tokens"]) == 16
    assert line["evaluations"] <= 10  # two tokens a pass


@pytest.mark.slow
def test_the_code_from_python_runs(
    rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        FROM_PYTHON + "\nassert all(each.grad is not None for each in lm.network.parameters())\n"
    )
    loop = tmp_path / "loop.py"
    loop.write_text(LOOP)
    for file in (script, loop):
        done = subprocess.run(
            [sys.executable, str(file)], cwd=tmp_path, capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "tuned" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_method_in_a_package_trains_writes_is_measured_and_reported(data: Path, tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "twins.py").write_text(TWINS)
    (source / "pyproject.toml").write_text(PROJECT)
    install = "-m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check --target"
    subprocess.run(
        [sys.executable, *install.split(), str(site), str(source)], check=True, capture_output=True
    )
    config = recipe(tmp_path, data, {"method": "twins"})
    bd3lm(tmp_path, "train", "--config", config, "--out", "run", path=site)
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (saved["method"]["kind"], saved["plugins"]) == ("twins", {"twins": "twins"})
    printed = bd3lm(tmp_path, "eval", "run", path=site)
    assert "exact" in printed
    written = bd3lm(tmp_path, "sample", "run", "a", "--length", "12", "--out", "texts.jsonl", path=site)
    assert written is not None
    (line,) = map(json.loads, (tmp_path / "texts.jsonl").read_text("utf-8").splitlines())
    assert line["evaluations"] <= 6  # two tokens a pass
    bd3lm(tmp_path, "report", "run", "--out", "report", path=site)
    assert "twins" in (tmp_path / "report" / "report.md").read_text("utf-8")
    missing = subprocess.run(
        [sys.executable, "-m", "bd3lm", "sample", "run"], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert missing.returncode == 1
    assert "got 'twins'; twins is of the plugin twins: give --plugin twins" in missing.stderr


def test_the_likelihood_of_twins_is_that_of_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumerated: over all texts of two blocks it sums to one."""
    from itertools import product

    import torch

    from bd3lm.lm import LanguageModel
    from bd3lm.methods import LanguageModelConfig, Method
    from tests.oracles.networks import MASK, tiny_transformer

    room: dict[str, object] = {"__name__": "twins_of_a_test"}
    monkeypatch.setitem(sys.modules, "twins_of_a_test", type(sys)("twins_of_a_test"))
    monkeypatch.setattr(Method, "_members", dict(Method._members))  # forgotten after the test
    exec(compile(TWINS.replace('kind = "twins"', 'kind = "twins_of_a_test"'), "twins.py", "exec"), room)
    network = tiny_transformer(0, vocab_size=4, context=4)
    method = room["Twins"](score_first=True)  # type: ignore[operator]
    model = LanguageModel(network, LanguageModelConfig(network=network.config, method=method, mask_id=MASK))
    texts = [list(text) for text in product((0, 1, 3), repeat=4)]
    with pytest.raises(ValueError, match="estimator must be 'exact' for twins"):
        model.log_likelihood(texts, estimator="iw:3")
    with pytest.raises(ValueError, match="estimator must be auto, paper"):
        model.log_likelihood(texts, estimator="mine")
    monkeypatch.setattr(type(method), "own_estimators", frozenset({"mine"}))  # now the method is asked
    with pytest.raises(ValueError, match=r"estimator must be 'exact' for twins, .*, got 'mine'"):
        model.log_likelihood(texts, estimator="mine")
    total = sum(torch.tensor(each.log_p).exp().item() for each in model.log_likelihood(texts))
    assert total == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_a_network_in_a_file_trains_resumes_writes_and_is_measured(data: Path, tmp_path: Path) -> None:
    (tmp_path / "my_network.py").write_text(NETWORK)
    plugin = ("--plugin", "my_network.py")
    network = {"network": {"kind": "linear", "layers": 1, "hidden": 16}}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**plain(data, BLOCKS), **network}))
    bd3lm(tmp_path, "train", *plugin, "--config", str(file), "--out", "run")
    kept = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert kept["network"] == network["network"]
    assert kept["plugins"] == {"linear": "my_network.py"}
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (saved["network"]["kind"], saved["plugins"]) == ("linear", {"linear": "my_network.py"})
    assert "already trained" in bd3lm(tmp_path, "train", *plugin, "--resume", "--out", "run")
    bd3lm(tmp_path, "sample", "run", "a", "--length", "12", "--out", "texts.jsonl", *plugin)
    (line,) = map(json.loads, (tmp_path / "texts.jsonl").read_text("utf-8").splitlines())
    assert len(line["tokens"]) == 12
    assert "exact" in bd3lm(tmp_path, "eval", "run", *plugin)
    # What a preset says of another kind is dropped, and a start gives the shape where nothing does.
    words = "train demo-bd3lm-1 --show --network.kind linear --network.layers 3"
    assert yaml.safe_load(bd3lm(tmp_path, *words.split(), *plugin))["network"] == {
        "kind": "linear",
        "layers": 3,
    }
    file.write_text(yaml.safe_dump({k: v for k, v in plain(data, BLOCKS).items() if k != "network"}))
    bd3lm(tmp_path, "train", *plugin, "--config", str(file), "--out", "again", "--from", "run")
    kept = yaml.safe_load((tmp_path / "again" / "recipe.yaml").read_text())
    assert kept["network"] == network["network"]
    missing = subprocess.run(
        [sys.executable, "-m", "bd3lm", "sample", "run"], cwd=tmp_path, capture_output=True, encoding="utf-8"
    )
    assert missing.returncode == 1
    assert (
        "network.kind: must be one of 'transformer', got 'linear'; linear is of the plugin" in missing.stderr
    )


def test_a_command_in_a_file_runs(tmp_path: Path) -> None:
    (tmp_path / "my_command.py").write_text(COMMAND)
    assert bd3lm(tmp_path, "--plugin", "my_command.py", "shout", "hello", "--times", "2") == "HELLO\nHELLO\n"
    assert "Print a text in capitals." in bd3lm(tmp_path, "--plugin", "my_command.py", "--help")
