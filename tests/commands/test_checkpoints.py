"""Other people's checkpoints in the commands: a Hugging Face folder and a GGUF file are models like any."""

import json
from pathlib import Path

import pytest

import bd3lm
from bd3lm.cli import main
from tests.commands import fails
from tests.data_room.documents import random_texts
from tests.data_room.test_checkpoints import beside
from tests.interop.checkpoints import saved, tiny
from tests.interop.test_gguf import add_tokenizer, original, write

VOCABULARY = 333  # more rows than the tokenizer has tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In shards, with a tokenizer that begins texts with nothing."""
    path = saved(
        tiny("qwen2", vocab_size=VOCABULARY),
        tmp_path_factory.mktemp("theirs") / "qwen",
        max_shard_size="20KB",
    )
    beside(path, VOCABULARY, config=json.loads((path / "config.json").read_text()))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "llama.gguf"
    backend = original("gpt-2", begin=True)
    model = tiny("llama", vocab_size=backend.get_vocab_size())
    write(path, model, extra=lambda writer: add_tokenizer(writer, "gpt-2", backend, True))
    return path


@pytest.fixture(params=["folder", "file"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(" ".join(random_texts(30)))
    return str(tmp_path / "text.txt")


def test_sample(model: str, capsys) -> None:
    assert main(["sample", model, "the noise", "--length", "20", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("the noise")


def test_an_empty_prompt_is_one_line_where_texts_begin_with_nothing(folder: Path, file: Path, capsys) -> None:
    said = fails(capsys, "sample", str(folder), "--length", "20", "--device", "cpu")
    assert "the first token of a text must be given: this model was not trained to predict it" in said
    assert main(["sample", str(file), "--length", "20", "--device", "cpu"]) == 0


def test_score(model: str, text: str, capsys) -> None:
    assert main(["score", model, text, "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["estimator"] == "exact"
    assert record["tokens"] > 100  # in several windows
    assert len(record["weights"]) == 64


def test_eval_and_zeroshot(folder: Path, file: Path, text: str, tmp_path: Path, capsys) -> None:
    both = [str(folder), str(file)]
    assert main(["eval", *both, "--data", text, "--device", "cpu"]) == 0
    assert "exact" in capsys.readouterr().out
    out = tmp_path / "zero.json"
    assert main(["zeroshot", *both, "--data", text, "--device", "cpu", "--out", str(out)]) == 0
    assert out.is_file()


def test_lengths(file: Path, folder: Path, capsys) -> None:
    words = ["--count", "2", "--length", "30", "--entropy-floor", "0", "--device", "cpu"]
    assert main(["lengths", str(file), *words]) == 0
    capsys.readouterr()
    assert main(["lengths", str(folder), *words]) == 1
    assert "the first token of a text must be given" in capsys.readouterr().err


def test_the_harness_scores_as_its_own_models_do(model: str, folder: Path, file: Path) -> None:
    """Contexts, an empty one, and whole documents, with and without a token that texts begin with."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bd3lm.interop.harness import HarnessLM

    ours = HarnessLM(model, device="cpu")
    out = folder.parent / f"out-{Path(model).name}"
    if not out.exists():
        assert main(["export", model, str(out), "--to", "huggingface"]) == 0
    theirs = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(out),
        tokenizer=AutoTokenizer.from_pretrained(out),
        device="cpu",
        batch_size=1,
        add_bos_token=ours.text_tokenizer.bos_id is not None,
    )
    texts = random_texts(12)
    pairs = [(texts[0][:40], f" {texts[1][:20]}"), ("a", " b c"), ("", "the noise"), (texts[2][:20], " x")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    for mine, expected in zip(
        ours.loglikelihood(requests, disable_tqdm=True),
        theirs.loglikelihood(requests, disable_tqdm=True),
        strict=True,
    ):
        assert mine[0] == pytest.approx(expected[0], abs=1e-3)
        assert mine[1] == expected[1]
    if ours.text_tokenizer.bos_id is None:  # else it takes two of them before a whole text
        whole = [Instance("loglikelihood_rolling", {}, (texts[3][:60],), 0)]
        expected = theirs.loglikelihood_rolling(whole, disable_tqdm=True)
        assert ours.loglikelihood_rolling(whole, disable_tqdm=True) == pytest.approx(expected, abs=1e-3)


def test_convert_keeps_all(model: str, tmp_path: Path, capsys) -> None:
    assert main(["convert", model, str(tmp_path / "ours")]) == 0
    theirs, ours = bd3lm.load(model, device="cpu"), bd3lm.load(tmp_path / "ours", device="cpu")
    assert (ours.config, ours.tokenizer) == (theirs.config, theirs.tokenizer)
    prompt = theirs.tokenizer.encode("the noise")
    assert ours.log_likelihood([prompt]) == theirs.log_likelihood([prompt])


def test_mistyped_files_are_told(file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(file.parent)
    said = fails(capsys, "sample", "lama.gguf", "a")
    assert "there is no file 'lama.gguf' here" in said
    (tmp_path / "m.txt").write_text("x")
    said = fails(capsys, "eval", str(tmp_path / "m.txt"))
    assert "source must be a folder, a .ckpt or .gguf file or a hub id" in said
