"""`bd3lm harness`: tasks from local files, run by the real harness, against figures by hand."""

import json
import math
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from bd3lm.cli import main
from bd3lm.lm import LanguageModel
from bd3lm.methods import BlockDiffusionMethod
from tests.lm import END, SSD, baseline, of_bytes, of_method

QUESTIONS = [
    {"question": "ab", "choices": ["cd", "x", "yy"], "answer": 1},
    {"question": "the", "choices": ["cat", "dog"], "answer": 0},
    {"question": "q", "choices": ["r", "s", "t", "u"], "answer": 3},
]
TEXTS = [{"text": "a cat"}, {"text": "longer than one context, naïve ☂"}]


def test_without_lm_eval_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["harness", "box", "--tasks", "arc_easy"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bd3lm: bd3lm harness needs the package lm_eval: ")
    assert error.endswith("pip install 'bd3lm[harness]'\n")


def test_the_harness_s_own_command_says_so_too(monkeypatch):
    for module in ("lm_eval", "lm_eval.api.instance"):  # the latter where it was imported before
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "bd3lm.interop.harness", raising=False)
    with pytest.raises(
        SystemExit, match=r"bd3lm.interop.harness needs the package lm_eval: pip install 'bd3lm\[harness"
    ):
        runpy.run_module("bd3lm.interop.harness", run_name="__main__")


@pytest.fixture
def model(tmp_path, monkeypatch) -> LanguageModel:
    """In the folder `model`; the harness is spared its thousands of task files and a look at the machine."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'bd3lm[harness]'")
    from lm_eval import evaluator, tasks

    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)
    model = of_bytes(2)
    model.save_pretrained(tmp_path / "model")
    return model


@pytest.fixture
def tasks(tmp_path) -> Path:
    """A folder of task files, one for each thing that the harness asks of a model."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    question = {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
    _task(
        folder,
        "choose",
        QUESTIONS,
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        metric_list=[{"metric": "acc"}],
        **question,
    )
    _task(
        folder,
        "follow",
        [{"question": each["question"], "answer": each["choices"][0]} for each in QUESTIONS],
        output_type="loglikelihood",
        metric_list=[{"metric": "perplexity"}, {"metric": "acc"}],
        **question,
    )
    _task(
        folder,
        "read",
        TEXTS,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )
    _task(
        folder,
        "write",
        QUESTIONS,
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="nobody writes this",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 4},
        metric_list=[{"metric": "exact_match"}],
    )
    return folder


def _task(folder: Path, name: str, rows: list[dict], **fields: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    for metric in fields["metric_list"]:
        metric |= {"aggregation": _AGGREGATIONS[metric["metric"]], "higher_is_better": True}
    task = {"task": f"own_{name}", "dataset_path": "json", "dataset_kwargs": source, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({**task, **fields}))


_AGGREGATIONS = {
    "acc": "mean",
    "perplexity": "perplexity",
    "bits_per_byte": "bits_per_byte",
    "exact_match": "mean",
}


def run(tmp_path: Path, *words: str) -> dict[str, Any]:
    """What the command wrote for the model and the tasks of this test."""
    out = tmp_path / "out.json"
    folder = ["--include-path", str(tmp_path / "tasks"), "--device", "cpu", "--out", str(out)]
    assert main(["harness", str(tmp_path / "model"), *words, *folder]) == 0
    return json.loads(out.read_text())


def log_p(model: LanguageModel, before: str, after: str) -> float:
    given = [END, *before.encode()]
    (found,) = model.log_likelihood([[*given, *after.encode()]], given=[len(given)])
    return found.log_p


def test_figures_are_those_by_hand(model, tasks, tmp_path, capsys):
    found = run(tmp_path, "--tasks", "own_*")
    results = found["results"]
    right, nats = 0, 0.0
    for each in QUESTIONS:
        # The harness puts a space before a choice, and nothing before what follows.
        scores = [log_p(model, each["question"], f" {choice}") for choice in each["choices"]]
        right += scores.index(max(scores)) == each["answer"]
        nats -= log_p(model, each["question"], each["choices"][0])
    assert results["own_choose"]["acc,none"] == pytest.approx(right / 3)
    assert results["own_follow"]["perplexity,none"] == pytest.approx(math.exp(nats / 3))
    texts = [each["text"] for each in TEXTS]
    tokens = texts[1].encode()
    windows = [[END, *tokens[:15]], [*tokens[14:30]], [*tokens[-16:]]]
    parts = model.log_likelihood(windows, given=[1, 1, 16 - (len(tokens) - 30)])
    nats = -model.log_likelihood(texts[:1])[0].log_p - sum(each.log_p for each in parts)
    size = sum(len(text.encode()) for text in texts)
    assert results["own_read"]["bits_per_byte,none"] == pytest.approx(nats / size / math.log(2))
    assert results["own_write"]["exact_match,none"] == 0.0
    assert (found["config"]["likelihoods"], found["config"]["estimator"]) == ("exact", "exact")
    printed = capsys.readouterr().out
    assert "|own_choose|" in printed.replace(" ", "")
    assert "Likelihoods are exact (estimator exact)." in printed
    assert f"wrote {tmp_path / 'out.json'}" in printed


def test_bounds_are_called_bounds_and_a_limit_is_a_limit(model, tasks, tmp_path, capsys):
    words = ["--tasks", "own_choose", "own_read", "--estimator", "counts", "--samples", "2", "--limit", "1"]
    found = run(tmp_path, *words)
    assert "Likelihoods are lower bounds in expectation (estimator counts)." in capsys.readouterr().out
    assert found["config"]["likelihoods"] == "bound"
    assert {name: each["effective"] for name, each in found["n-samples"].items()} == {
        "own_choose": 1,
        "own_read": 1,
    }


def test_a_lean_is_another_order_and_part_of_the_title(model, tasks, tmp_path, capsys):
    found = run(tmp_path, "--tasks", "own_follow", "--lean", "2")
    nats = [
        -sum(log_p(each, row["question"], row["choices"][0]) for row in QUESTIONS)
        for each in (model.with_lean(2.0), model)
    ]
    perplexity = found["results"]["own_follow"]["perplexity,none"]
    assert perplexity == pytest.approx(math.exp(nats[0] / 3))
    assert perplexity != pytest.approx(math.exp(nats[1] / 3), rel=1e-3)
    assert found["config"]["model_title"] == "block diffusion, blocks of 2, lean 2"


@pytest.mark.slow
def test_a_law_is_another_model_and_part_of_the_title(tasks, tmp_path, capsys):
    joint = of_method(BlockDiffusionMethod(block_size=2, causal_clean=True, joint=True))
    joint.save_pretrained(tmp_path / "model")
    for law, title in (("block", "blocks of 2"), ("causal", "blocks of 2, causal law")):
        found = run(tmp_path, "--tasks", "own_follow", "--law", law)
        view = joint.with_law(law)
        nats = -sum(log_p(view, row["question"], row["choices"][0]) for row in QUESTIONS)
        assert found["results"]["own_follow"]["perplexity,none"] == pytest.approx(math.exp(nats / 3))
        assert found["config"]["model_title"] == f"block diffusion, {title}"
        assert found["config"]["model_law"] == law
        (tmp_path / "out.json").unlink()


def test_few_shots_stand_before_a_question(model, tasks, tmp_path, capsys):
    found = run(tmp_path, "--tasks", "own_choose", "--num-fewshot", "1")
    assert found["n-shot"] == {"own_choose": 1}


def test_ssd_lm_writes_and_has_no_likelihood(model, tasks, tmp_path, capsys):
    baseline(SSD).save_pretrained(tmp_path / "model")
    found = run(tmp_path, "--tasks", "own_write", "--steps", "3")
    assert found["config"]["likelihoods"] is None
    assert "Likelihoods" not in capsys.readouterr().out
    words = ["--tasks", "own_choose", "--include-path", str(tasks), "--device", "cpu"]
    assert main(["harness", str(tmp_path / "model"), *words]) == 1
    assert "SSD-LM (method kind simplex) has neither a likelihood" in capsys.readouterr().err


def test_bad_input_is_one_line(model, tasks, tmp_path, capsys):
    for words, message in (
        (["--tasks", "own_chose"], "there is no task 'own_chose', did you mean 'own_choose'?"),
        (["--tasks", "own_choose", "--limit", "0"], "limit must be at least 1, got 0"),
        (["--tasks", "own_choose", "--num-fewshot", "-1"], "--num-fewshot must be at least 0, got -1"),
        (
            ["--tasks", "own_choose", "--batch-size", "0"],
            "batch_size must be a whole number from 1 on, got 0",
        ),
        (["--tasks", "own_choose", "--estimator", "best"], "estimator must be auto, paper, exact"),
        (["--tasks", "own_choose", "--steps", "0"], "steps must be a whole number from 1 on, got 0"),
    ):
        command = [
            "harness",
            str(tmp_path / "model"),
            *words,
            "--include-path",
            str(tasks),
            "--device",
            "cpu",
        ]
        assert main(command) == 1, words
        error = capsys.readouterr().err
        assert message in error, error
        assert error.count("\n") == 1, error
    command = ["harness", str(tmp_path / "model"), "--tasks", "a", "--include-path", str(tmp_path / "none")]
    assert main(command) == 1
    assert "--include-path must be a folder of task files" in capsys.readouterr().err


def test_the_yaml_of_the_docs_runs_as_written(model, tmp_path, capsys, monkeypatch):
    import lm_eval.__main__

    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", page, flags=re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (example,) = re.findall(r'`(\{"question".*?\})`', page)
    questions = [json.loads(example), {"question": "Madrid is", "choices": ["here", "in Spain"], "answer": 1}]
    Path("my-tasks/questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    model.save_pretrained("runs/block4")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    command = ["harness", "runs/block4", "--tasks", "my_task", "--include-path", "my-tasks/"]
    assert main([*command, "--device", "cpu", "--out", "out.json"]) == 0
    ours = json.loads(Path("out.json").read_text())
    assert ours["n-samples"]["my_task"]["effective"] == 2

    monkeypatch.setattr(lm_eval.__main__, "setup_logging", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bd3lm.interop.harness", "run", "--config", "harness.yaml"])
    lm_eval.__main__.cli_evaluate()
    (file,) = Path("results").rglob("*.json")
    theirs = json.loads(file.read_text())
    assert theirs["results"]["my_task"]["acc,none"] == ours["results"]["my_task"]["acc,none"]
    assert (theirs["config"]["model"], theirs["config"]["likelihoods"]) == ("bd3lm", "exact")
