"""The command line: what it prints, how it ends, and that bad news is one line."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import bd3lm
from bd3lm import kinds
from bd3lm.cli import main
from bd3lm.commands.train import Train
from bd3lm.data import TokenShards, load_tokenizer
from bd3lm.interop import load
from bd3lm.lm import LanguageModel, Settings
from bd3lm.models import Transformer
from bd3lm.runs import presets
from bd3lm.runs.presets import PRESETS
from bd3lm.runs.stages import resolve_stages
from bd3lm.sampling import Ancestral, EntropyBound, FirstHitting, MostConfident, Remasking
from bd3lm.training import Trainer, tensor_files
from tests.data_room.documents import random_texts
from tests.lm import (
    BYTES,
    CONTEXT,
    D3PM,
    D3PM_UNIFORM,
    SEDD,
    SEDD_UNIFORM,
    SSD,
    baseline,
    of_bytes,
    tokens_of,
)
from tests.tiny_recipes import plain, prepared, two_stages

pytestmark = pytest.mark.sweep(3)

PARITY = Path(__file__).parent / "data" / "parity"
BASELINE_FOLDERS = {
    "sedd": SEDD,
    "sedd_uniform": SEDD_UNIFORM,
    "d3pm": D3PM,
    "d3pm_uniform": D3PM_UNIFORM,
    "ssd": SSD,
}
COMMANDS = ("train", "data", "sample", "presets", "variance", "convert", "demo", "prove")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def two(monkeypatch, shards) -> None:
    """A preset `two`, in the way of `demo`."""
    monkeypatch.setattr(presets, "PRESETS", {**PRESETS, "two": two_stages(shards)})


def fails(capsys, *words: str) -> str:
    """The one line on standard error, after exit code 1."""
    assert main(words) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("bd3lm: ")
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


# --- the frame ---


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"bd3lm {bd3lm.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train"],
        ["data"],
        ["data", "prepare"],
        ["data", "train-tokenizer"],
        ["sample"],
        ["presets"],
        ["variance"],
        ["convert"],
        ["demo"],
        ["prove"],
    ],
    ids=" ".join,
)
def test_every_command_has_help(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    assert f"usage: {' '.join(['bd3lm', *words])}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("sample", "bd3lm sample [-h] [SAMPLE OPTIONS] [MODEL] [PROMPT ...]"),
        ("eval", "bd3lm eval [-h] [EVAL OPTIONS] MODEL ..."),
        ("score", "bd3lm score [-h] [SCORE OPTIONS] MODEL FILE ..."),
        ("train", "bd3lm train [-h] [TRAIN OPTIONS] [PRESET]"),
        ("judge", "bd3lm judge [-h] [JUDGE OPTIONS] MODEL|FILE ..."),
        ("data prepare", "bd3lm data prepare [-h] [PREPARE OPTIONS] SOURCE OUT"),
        ("convert", "bd3lm convert [-h] [CONVERT OPTIONS] SOURCE OUT"),
        ("harness", "bd3lm harness [-h] [HARNESS OPTIONS] MODEL"),
    ],
)
def test_help_names_what_is_asked_for(words, usage, capsys):
    with pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == f"usage: {usage}"
    assert not re.search(r"\bSTR\b|\bPATH\b|\{None|default: (None)?\)", printed)


def test_no_command_shows_the_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "bd3lm has no command 'trian', did you mean 'train'? Its commands are train, data, sample"),
        ("xyzzy --help", "bd3lm has no command 'xyzzy'. Its commands are train, data, sample, presets, "),
        (
            "data prepre a b",
            "bd3lm data has no command 'prepre', did you mean 'prepare'? Its commands are prepare, train-",
        ),
        (
            "bench trian",
            "bd3lm bench has no command 'trian', did you mean 'train'? Its commands are train, s",
        ),
        ("data", "bd3lm data needs a command, prepare or train-tokenizer; see bd3lm data --help"),
        ("bench", "bd3lm bench needs a command, train or sample or attention; see bd3lm bench --help"),
        ("sample runs/demo --prompt hello", "bd3lm sample takes prompts after the model, without a flag: "),
        ("sample runs/demo --prompts=hello", "bd3lm sample takes prompts after the model, without a flag: "),
    ],
)
def test_a_mistyped_command_is_one_line_with_the_nearest_and_all_there_are(words, said, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bd3lm: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "presets",
        pytest.param("prove --samples 100", marks=pytest.mark.slow),
        pytest.param("train --help", marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_has_seen_enough_is_no_failure(words):
    """Of plain lines, of rich's and of tyro's: the status of a closed pipe, and not a word."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "bd3lm", *words.split()], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_a_pipe_that_is_not_standard_output_is_a_failure(capsys, monkeypatch):
    def torn(*_, **__):
        raise BrokenPipeError(errno.EPIPE, "the worker is gone")

    monkeypatch.setattr("bd3lm.commands.prove.run_proof", torn)
    assert "the worker is gone" in fails(capsys, "prove")


def test_every_command_is_known(capsys):
    """None that has help is taken for a mistyped one, those with an underscore for a dash included."""
    for words in (*map(str.split, COMMANDS), ["data", "train_tokenizer"], ["bench", "attention"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0


@pytest.mark.parametrize(
    "words",
    [
        "sample runs/dmo",
        "eval runs/dmo",
        "zeroshot runs/dmo --data text.txt",
        "score runs/dmo text.txt",
        "judge runs/dmo",
        "lengths runs/dmo",
        "variance runs/dmo",
        "report runs/dmo",
        "harness runs/dmo --tasks any",
        "convert runs/dmo out",
        "train demo --from runs/dmo --out out",
    ],
)
def test_a_mistyped_run_is_not_asked_of_the_hub(words, tmp_path, capsys, monkeypatch):
    if words.startswith("harness"):
        pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'bd3lm[harness]'")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "bd3lm.interop.sources.snapshot_download", lambda *_, **__: pytest.fail("asked the hub")
    )
    assert ": there is no folder 'runs/dmo' here, did you mean 'runs/demo'? " in fails(capsys, *words.split())


def test_unknown_flags_are_refused(capsys):
    for command in (["presets"], ["demo"], ["prove"], ["convert", "a", "b"], ["sample", "a"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--nonsense"])
        assert ended.value.code == 2
        assert "--nonsense" in capsys.readouterr().err


# --- presets and recipes ---


def test_presets_are_listed(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert all(PRESETS[line.split()[0]].description in line for line in lines)


@pytest.mark.parametrize("name", ["demo", "demo-paper", "lm1b-ar", "owt-bd3lm-4"])
def test_what_is_shown_reads_back_as_the_same_recipe(name, capsys, tmp_path):
    assert main(["train", name, "--show", "--optimizer.lr", "1e-3"]) == 0
    shown = capsys.readouterr().out
    stages = resolve_stages(name, overrides={"optimizer": {"lr": 1e-3}})
    file = tmp_path / "shown.yaml"
    file.write_text(shown)
    assert resolve_stages(name, config=file) == stages
    if len(stages) == 1:  # then the file needs no preset
        assert resolve_stages(None, config=file)[0][1] == stages[0][1]
    assert all(recipe.optimizer.lr == 1e-3 for _, recipe in stages)


def test_a_misspelt_flag_suggests_the_right_one_and_all_come_at_once(capsys):
    assert main(["train", "demo", "--show", "--network.hiden", "3", "--ar.train.stepz", "3"]) == 1
    error = capsys.readouterr().err
    assert "bd3lm: preset demo (stage ar) has 2 problems:" in error
    assert "network.hiden: unknown key, did you mean 'hidden'?" in error
    assert "train.stepz: unknown key, did you mean 'steps'?" in error
    assert "Traceback" not in error


def test_a_train_without_anything_to_train_is_refused(capsys):
    assert "a preset or --config must be given" in fails(capsys, "train")
    error = fails(capsys, "train", "dmeo")
    assert (
        error
        == "bd3lm: there is no preset 'dmeo', did you mean 'demo'? `bd3lm presets` lists those there are\n"
    )
    assert "which does not exist" in fails(capsys, "train", "demo", "--config", "/no/such.yaml")
    assert "block" in fails(capsys, "train", "demo", "--show", "--block", "3")


def test_a_flag_that_one_stage_has_says_which(capsys):
    words = ["train", "demo", "--show", "--objective.masking.kind", "counts", "--optimizer.lr", "0.1"]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "method.masking: unknown key, allowed are kind, score_first, random_batch\n" in error
    assert error.endswith("\n  the stage block has it: --block.objective.masking.kind\n")
    assert main(["train", "demo", "--show", "--optimizer.lrr", "0.1"]) == 1
    assert "the stage" not in capsys.readouterr().err  # which none has


def test_a_flag_that_every_stage_knows_is_of_no_single_one(capsys):
    """Though only one may find its value wrong; and a value may be wrong for the one that knows a flag."""
    assert main(["train", "demo", "--show", "--data.context", "30"]) == 1
    error = capsys.readouterr().err
    assert "method.block_size must divide data.context 30, got 4" in error
    assert "the stage" not in error.partition("\n")[2]
    assert main(["train", "demo", "--show", "--method.block_size", "5"]) == 1
    assert capsys.readouterr().err.endswith("\n  the stage block has it: --block.method.block_size\n")


def test_a_misspelt_stage_suggests_the_right_one(capsys):
    error = fails(capsys, "train", "demo", "--show", "--blok.method.block_size", "8")
    assert "blok: unknown key, did you mean 'block'? allowed are the stages ar, block, and train, m" in error
    assert "did you mean 'train'? " in fails(capsys, "train", "demo", "--show", "--trian.steps", "8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--block.start_from /nowhere",
            "block.start_from is not for a stage that starts from the one before",
        ),
        (
            "--block.parallel fsdp",
            "parallel must be the same for all stages, which share their processes, got ",
        ),
        (
            "--from a --ar.method.kind foo",
            "with --from only the stage block is run, got flags --ar.any.field",
        ),
        ("--from a --start_from b", "--from says what to start from, got --start_from too: give one of them"),
        ("--from a --block.start_from b", "--from says what to start from, got --start_from too: give one "),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused(words, said, capsys):
    assert said in fails(capsys, "train", "demo", "--show", *words.split())


@pytest.mark.parametrize(
    "words",
    ["--ar.start_from a", "--start_from a", "--parallel fsdp", "--from a --block.train.steps 3"],
)
def test_a_flag_that_some_stage_heeds_is_taken(words, capsys):
    assert main(["train", "demo", "--show", *words.split()]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--train.steps true", "train.steps: must be a decimal number, got True"),
        ("--ar.train.steps 010", "train.steps: must be a decimal number, got '010'"),
        ("--data.validation_sequences 0", "validation_sequences must be at least 1, or null for all, got 0"),
        ("--data.builtin_vocabulary 100", "data: builtin_vocabulary must be at least 258"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_its_flag(words, said, capsys):
    assert main(["train", "demo", "--show", *words.split()]) == 1
    assert said in capsys.readouterr().err


# --- training ---


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
            "at 2.00 GiB more:",
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "out of memory: make"),
        (
            RuntimeError("[enforce fail at x.cpp:1] DefaultCPUAllocator: can't allocate 64 bytes."),
            "at 64 bytes more: make the batch smaller (--train.micro_batch",
        ),
        (MemoryError(), "out of memory: make"),
    ],
    ids=["torch", "driver", "CPU", "Python"],
)
def test_every_kind_of_too_little_memory_is_one_line(error, said, capsys, monkeypatch):
    def run(*_: Any) -> int:
        raise error

    monkeypatch.setattr("bd3lm.commands.presets.Presets.run", run)
    assert said in fails(capsys, "presets")
    with pytest.raises(type(error)):
        main(["presets", "--debug"])


def test_another_failure_keeps_its_traceback(monkeypatch):
    def run(*_: Any) -> int:
        raise RuntimeError("a mistake of ours, not for lack of memory")

    monkeypatch.setattr("bd3lm.commands.presets.Presets.run", run)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        main(["presets"])


def test_train_writes_a_model_and_says_where(two, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "two", "--out", str(out), "--device", "cpu", "--train.steps", "3"]) == 0
    assert f"wrote {out / 'block' / 'model'}" in capsys.readouterr().out
    network, config = load(out / "block" / "model")
    assert config.network.vocab_size == 258
    assert network.config.layers == 1


def test_train_from_a_file_alone(shards, tmp_path, capsys):
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(plain(shards, {"train": {"steps": 2}})))
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    saved = tmp_path / "run" / "recipe.yaml"
    assert main(["train", "--config", str(saved), "--out", str(tmp_path / "again"), "--device", "cpu"]) == 0
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "again")]
    assert models[0] == models[1]


def test_train_from_another_run(two, tmp_path, capsys):
    assert main(["train", "two", "--out", str(tmp_path / "a"), "--device", "cpu", "--train.steps", "2"]) == 0
    words = ["train", "two", "--out", str(tmp_path / "b"), "--device", "cpu", "--train.steps", "2"]
    assert main([*words, "--from", str(tmp_path / "a" / "ar")]) == 0
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "checkpoints",
        "metrics.csv",
        "model",
        "recipe.yaml",
    ]
    saved = yaml.safe_load((tmp_path / "b" / "recipe.yaml").read_text())
    assert saved["start_from"] == str(tmp_path / "a" / "ar")


def test_a_folder_that_holds_a_run(two, tmp_path, capsys):
    words = ["train", "two", "--out", str(tmp_path), "--device", "cpu", "--train.steps", "2"]
    assert main(words) == 0
    assert "holds a run; give --resume" in fails(capsys, *words)
    capsys.readouterr()
    assert main([*words, "--resume"]) == 0
    printed = capsys.readouterr().out
    for stage in ("ar", "block"):
        assert f"{tmp_path / stage}: already trained to step 2\n" in printed
    other = [*words[:-1], "4", "--resume", "--optimizer.lr", "0.5"]
    assert "Different: optimizer.lr (0.01 then, 0.5 now)" in fails(capsys, *other)


def test_a_stopped_run_ends_with_130_and_resumes(two, tmp_path, capsys, monkeypatch):
    words = ["train", "two", "--out", str(tmp_path), "--device", "cpu"]
    step = Trainer.train_step

    def interrupted(trainer):
        step(trainer)
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        assert main(words) == 130
    printed = capsys.readouterr()
    assert "stopped at step 4 of 6" in printed.out
    assert "train with --resume" in " ".join(printed.out.split())
    assert main(["train", "--out", str(tmp_path), "--resume", "--device", "cpu"]) == 0, "without the preset"
    assert "resumed at step 4" in capsys.readouterr().out
    assert (tmp_path / "block" / "model").is_dir()
    assert main([*words, "--resume"]) == 0
    assert "already trained to step 6" in capsys.readouterr().out


def test_a_run_that_is_resumed_without_its_preset_takes_flags_and_no_start(two, tmp_path, capsys):
    words = ["train", "--out", str(tmp_path / "run"), "--resume", "--device", "cpu"]
    assert "must be the folder of a run" in fails(capsys, *words)
    assert main(["train", "two", *words[1:3], "--device", "cpu", "--train.steps", "2"]) == 0
    assert "--from is for a new run" in fails(capsys, *words, "--from", "box")
    assert "Different: optimizer.lr" in fails(capsys, *words, "--optimizer.lr", "0.5")
    assert "did you mean 'block'" in fails(capsys, *words, "--blok.train.steps", "4")
    assert main([*words, "--block.train.micro_batch", "2"]) == 0


def test_a_second_interrupt_is_one_line(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bd3lm.runs.train.train_stages", interrupted)
    assert main(["train", "demo"]) == 130
    assert capsys.readouterr().err == "bd3lm: interrupted\n"


# --- three ways to go wrong ---


def spoil_loss(monkeypatch, at: int) -> None:
    draws = Trainer._draws

    def spoiled(trainer):
        if trainer.step == at:
            trainer.network.output.bias.data.fill_(float("nan"))
        return draws(trainer)

    monkeypatch.setattr(Trainer, "_draws", spoiled)


def fill_disk(monkeypatch, after: int) -> None:
    """No space left, from the checkpoint of step `after` on."""
    writer = tensor_files._write

    def full(path, *rest, **options):
        if "step-" in str(path) and int(str(path).split("step-")[1][:8]) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writer(path, *rest, **options)

    monkeypatch.setattr(tensor_files, "_write", full)


def remove_shard(monkeypatch, shards: Path, at: int) -> None:
    """The shards vanish, and nothing holds them open."""
    batch = Trainer._batch

    def vanish(trainer, rows):
        if trainer.step == at:
            for path in shards.glob("train-*.bin"):
                path.unlink()
            trainer.data.sequences.shards._open.clear()
        return batch(trainer, rows)

    monkeypatch.setattr(Trainer, "_batch", vanish)


@pytest.mark.parametrize("trouble", ["not finite", "disk full", "shard missing"])
def test_trouble_is_one_line_and_the_last_checkpoint_is_intact(trouble, tmp_path, capsys, monkeypatch):
    shards = prepared(tmp_path / "shards")
    monkeypatch.setattr(presets, "PRESETS", {"two": two_stages(shards)})
    words = ["train", "two", "--out", str(tmp_path / "run"), "--device", "cpu"]
    with monkeypatch.context() as patch:
        if trouble == "not finite":
            spoil_loss(patch, at=3)
        elif trouble == "disk full":
            fill_disk(patch, after=2)
        else:
            remove_shard(patch, shards, at=3)
        line = fails(capsys, *words)
        for shown in {
            "not finite": ("not finite (seen at step 4)", "the last checkpoint is intact"),
            "disk full": ("No space left on device", "step 4", "earlier checkpoints are intact"),
            "shard missing": ("train-00000.bin is missing", "prepare the folder again"),
        }[trouble]:
            assert shown in line
        if trouble == "shard missing":
            prepared(tmp_path / "shards")
        with pytest.raises((FloatingPointError, OSError)):  # the whole story, for whoever asks
            main([*words, "--resume", "--debug"])
    if trouble == "shard missing":
        prepared(tmp_path / "shards")
    capsys.readouterr()
    assert main([*words, "--resume"]) == 0
    assert "resumed at step 2" in capsys.readouterr().out


def test_data_that_are_not_there(tmp_path, capsys):
    words = ["train", "demo", "--out", str(tmp_path / "run"), "--data.path", str(tmp_path / "none")]
    assert "data.path must be a folder of token shards" in fails(capsys, *words)
    assert list(tmp_path.iterdir()) == []


# --- data ---


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_data_prepare_and_train_tokenizer(tmp_path, capsys):
    texts = random_texts(40)
    source = str(write_jsonl(tmp_path / "corpus.jsonl", texts))
    assert main(["data", "train-tokenizer", source, str(tmp_path / "bpe"), "--vocabulary", "300"]) == 0
    assert f"wrote {tmp_path / 'bpe'}: 300 tokens\n" in capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path / "bpe")
    assert tokenizer.vocab_size == 300
    words = ["data", "prepare", source, str(tmp_path / "out"), "--tokenizer", str(tmp_path / "bpe")]
    assert main([*words, "--held-out", "0.25"]) == 0
    printed = capsys.readouterr().out
    assert "train: 30 documents," in printed
    assert "valid: 10 documents," in printed
    assert f"wrote {tmp_path / 'out'}" in printed
    said = fails(capsys, *words, "--held-out", "0.5")
    assert (
        "with source 'corpus.jsonl (field text, a document a paragraph, held out 0.25)', not 'corpus" in said
    )
    assert "held out 0.5)': choose another folder" in said
    shards = TokenShards(tmp_path / "out")
    first = shards.read("train", 0, int(shards.lengths("train")[0]))
    assert shards.tokenizer.decode(first) == texts[0]


def test_data_prepare_says_what_is_wrong(tmp_path, capsys):
    assert "nowhere" in fails(
        capsys,
        "data",
        "prepare",
        str(tmp_path / "nowhere.jsonl"),
        str(tmp_path / "out"),
        "--tokenizer",
        "bytes",
    )


# --- sample ---


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return of_bytes(4, end_logit=2.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, model) -> str:
    folder = tmp_path_factory.mktemp("models")
    model.save_pretrained(folder / "model")
    of_bytes(4, end_logit=2.0, tokenizer=None).save_pretrained(folder / "bare")
    of_bytes(CONTEXT).save_pretrained(folder / "one_block")
    of_bytes(None).save_pretrained(folder / "autoregressive")
    for name, method in BASELINE_FOLDERS.items():
        baseline(method).save_pretrained(folder / name)
    BYTES.save(folder / "tokenizer")
    return str(folder / "model")


def records(out: Path) -> list[dict[str, Any]]:
    """The lines of a file, which are in the order of the prompts."""
    lines = out.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    found = [json.loads(line) for line in lines]
    assert [record["index"] for record in found] == list(range(len(found)))
    return found


def test_sample_prints_a_text_its_speed_and_its_cost(saved, model, capsys):
    assert main(["sample", saved, "hello", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    (found,) = model.generate("hello")
    assert printed.out == f"{found.text}\n"  # the text and nothing else: it may be piped on
    written, evaluations = found.sample.written, found.sample.evaluations
    assert re.fullmatch(
        rf"{written} tokens written in [\d.]+ s: [\d.,]+ tokens/s\. {evaluations} evaluations of the "
        rf"network\. Stopped: 1 by {found.sample.stopped_by}\.",
        printed.err.removesuffix("\n"),
    )
    assert "\x1b" not in printed.out


def test_sample_without_a_prompt_starts_from_nothing(saved, model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    assert main(["sample", saved, "--out", str(out)]) == 0
    (record,) = records(out)
    assert (record["prompt"], record["given"]) == ("", 1)
    assert record["text"] == model.generate("")[0].text


def test_sample_writes_a_line_a_text(saved, model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    words = ["hello", "naïve ☂", "--count", "3", "--seed", "4", "--batch", "2", "--length", "20"]
    assert main(["sample", saved, *words, "--out", str(out)]) == 0
    printed, notes = capsys.readouterr()
    assert notes.endswith(f"wrote {out}\n")
    assert "wrote" not in printed
    prompts = ["hello"] * 3 + ["naïve ☂"] * 3
    settings = Settings(seed=4, batch_size=2, length=20)
    expected = model.generate(prompts, settings)
    assert len({each.text for each in expected}) == 6  # a seed of its own for each
    for index, (record, found) in enumerate(zip(records(out), expected, strict=True)):
        assert record == {
            "index": index,
            "prompt": prompts[index],
            "template": None,
            "text": found.text,
            "completion": found.text.removeprefix(prompts[index]),
            "documents": [found.text],
            "tokens": found.tokens,
            "length": len(found.tokens),
            "given": found.sample.given,
            "evaluations": found.sample.evaluations,
            "fill_passes": found.sample.fill_passes,
            "stopped_by": found.sample.stopped_by,
            "redraws": 0,
            "redrawn_passes": 0,
            "entropy": pytest.approx(found.entropy, abs=1e-6),
            "seed": found.sample.seed,
            "model": saved,
            "weights": sha256((Path(saved) / "model.safetensors").read_bytes()).hexdigest(),
            "bd3lm": bd3lm.__version__,
            "dtype": "float64",
            "settings": {
                **asdict(settings),
                "nucleus_p": 0.9,
                "unmasking": {"kind": "first_hitting", "tokens_per_pass": 1, "lean": 0.0},
                "stop": [],
            },
        }
        assert f"text {index}: {len(found.tokens)} tokens, stopped by {found.sample.stopped_by} " in printed
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("", {}),
        ("--length 8", {"length": 8}),
        ("--length 40", {"length": 40}),
        ("--nucleus 0.5", {"nucleus_p": 0.5}),
        ("--nucleus 0.5 --nucleus-rule exclusive", {"nucleus_p": 0.5, "nucleus_rule": "exclusive"}),
        ("--temperature 0.7", {"temperature": 0.7}),
        ("--temperature 0", {"temperature": 0.0}),
        ("--top-k 3", {"top_k": 3}),
        ("--seed 5", {"seed": 5}),
        ("--batch 2", {"batch_size": 2}),
        ("--steps 5", {"unmasking": Ancestral(5)}),
        ("--steps 5 --remask 0.3", {"unmasking": Remasking(steps=5, eta=0.3)}),
        ("--steps 5 --remask 0", {"unmasking": Remasking(steps=5, eta=0.0)}),
        ("--tokens-per-pass 2", {"unmasking": FirstHitting(2)}),
        ("--confidence 0.4", {"unmasking": MostConfident(threshold=0.4)}),
        ("--entropy-bound 0", {"unmasking": EntropyBound(0.0)}),
        ("--no-eos", {"stop_at_eos": False}),
        ("--stop a", {"stop": "a"}),
        ("--stop a --stop bc", {"stop": ("a", "bc")}),
        ("--entropy-floor 0.5 --length 300", {"entropy_floor": 0.5, "length": 300}),
        (
            "--entropy-floor 1.9 --entropy-window 8 --redraws 2",
            {"entropy_floor": 1.9, "entropy_window": 8, "redraws": 2},
        ),
        ("--no-cache", {"cache": False}),
    ],
)
def test_every_flag_is_a_setting(words, changes, saved, model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    assert main(["sample", saved, "ab", "--out", str(out), *words.split()]) == 0
    settings = Settings(**changes)
    (record,) = records(out)
    used = settings.for_method(model.config.method)
    assert record["settings"] == {
        **asdict(used),
        "unmasking": kinds.plain(used.unmasking),
        "stop": list(used.stop),
    }
    assert record["settings"]["nucleus_p"] == changes.get("nucleus_p", 0.9)
    assert record["tokens"] == model.generate("ab", settings)[0].tokens


def test_sample_stops_before_a_string(saved, model, tmp_path, capsys):
    (whole,) = model.generate("ab", length=40, stop_at_eos=False)
    out, string = tmp_path / "texts.jsonl", next(c for c in whole.completion[3:] if c.isprintable())
    words = ["sample", saved, "ab", "--length", "40", "--no-eos", "--stop", string, "--out", str(out)]
    assert main(words) == 0
    (record,) = records(out)
    assert record["stopped_by"] == "string"
    assert record["text"] == "ab" + record["completion"] == "ab" + whole.completion.partition(string)[0]
    assert whole.tokens[: record["length"]] == record["tokens"]
    printed = capsys.readouterr()
    assert printed.out == f"{record['text']}\n"
    assert printed.err.splitlines()[0].endswith("Stopped: 1 by string.")
    assert "stop must hold strings, none of them empty, got ''" in fails(
        capsys, "sample", saved, "--stop", ""
    )


@pytest.mark.parametrize(
    ("words", "unmasking"),
    [
        ("--lean 2", FirstHitting(lean=2.0)),
        ("--lean 0", FirstHitting()),
        ("--lean 2 --tokens-per-pass 2", FirstHitting(2, lean=2.0)),
    ],
)
def test_lean_is_the_order_in_which_a_block_is_written(words, unmasking, saved, model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    assert main(["sample", saved, "ab", "--count", "3", "--out", str(out), *words.split()]) == 0
    found = records(out)
    assert [record["settings"]["unmasking"] for record in found] == [kinds.plain(unmasking)] * 3
    texts = [record["tokens"] for record in found]
    assert texts == tokens_of(model.generate(["ab"] * 3, unmasking=unmasking))
    assert (texts == tokens_of(model.generate(["ab"] * 3))) == (words == "--lean 0")


@pytest.mark.parametrize(
    ("words", "unmasking"),
    [
        ("", FirstHitting(lean=3.0)),
        ("--lean 0", FirstHitting()),
        ("--tokens-per-pass 2", FirstHitting(2, lean=3.0)),
        ("--lean 0 --steps 5", Ancestral(5)),
        ("--lean 0 --steps 5 --remask 0.3", Remasking(steps=5, eta=0.3)),
        ("--confidence 0.5", MostConfident(threshold=0.5)),
    ],
)
def test_a_model_that_leans_writes_in_its_own_order(words, unmasking, model, tmp_path, capsys):
    model.with_lean(3.0).save_pretrained(tmp_path / "model")
    out = tmp_path / "texts.jsonl"
    assert main(["sample", str(tmp_path / "model"), "ab", "--out", str(out), *words.split()]) == 0
    (record,) = records(out)
    assert record["settings"]["unmasking"] == kinds.plain(unmasking)
    assert record["tokens"] == model.generate("ab", unmasking=unmasking)[0].tokens


@pytest.mark.parametrize("words", ["--steps 5", "--steps 5 --remask 0.3"])
def test_steps_are_not_for_a_model_that_leans(words, model, tmp_path, capsys):
    model.with_lean(3.0).save_pretrained(tmp_path / "model")
    error = fails(capsys, "sample", str(tmp_path / "model"), "ab", *words.split())
    assert "has no order that leans, and the model's lean is 3: add --lean 0" in error


def test_one_token_a_pass_is_what_an_autoregressive_model_writes(saved, tmp_path, capsys):
    folder, texts = str(Path(saved).with_name("autoregressive")), []
    for index, flags in enumerate(([], ["--tokens-per-pass", "1"])):
        out = tmp_path / f"{index}.jsonl"
        assert main(["sample", folder, "ab", "--out", str(out), *flags]) == 0
        texts.append(records(out)[0]["tokens"])
    assert texts[0] == texts[1]


def test_stride_is_for_a_model_of_one_block(saved, tmp_path, capsys):
    one_block, out = str(Path(saved).with_name("one_block")), tmp_path / "texts.jsonl"
    assert main(["sample", one_block, "ab", "--stride", "3", "--length", "30", "--out", str(out)]) == 0
    assert records(out)[0]["settings"]["stride"] == 3
    assert records(out)[0]["tokens"] == of_bytes(CONTEXT).generate("ab", stride=3, length=30)[0].tokens


@pytest.mark.parametrize("name", BASELINE_FOLDERS)
@pytest.mark.parametrize("words", ["", "--count 2 --seed 3 --nucleus 0.7", "--length 9 --no-eos"])
def test_baselines_are_sampled_from_in_their_own_steps(name, words, saved, tmp_path, capsys):
    method, out = BASELINE_FOLDERS[name], tmp_path / "texts.jsonl"
    folder = str(Path(saved).with_name(name))
    assert main(["sample", folder, "ab", "--steps", "4", "--out", str(out), *words.split()]) == 0
    changes: dict[str, Any] = {
        "": {},
        "--count 2 --seed 3 --nucleus 0.7": {"seed": 3, "nucleus_p": 0.7},
        "--length 9 --no-eos": {"length": 9, "stop_at_eos": False},
    }[words]
    count = 2 if "--count" in words else 1
    expected = baseline(method).generate(["ab"] * count, steps=4, **changes)
    found = records(out)
    assert [record["tokens"] for record in found] == [each.tokens for each in expected]
    papers = {"score_entropy": 0.99, "simplex": 0.95}.get(method.kind, 0.9)
    for record in found:
        assert record["settings"]["steps"] == 4
        assert record["settings"]["nucleus_p"] == changes.get("nucleus_p", papers)
        assert record["settings"]["unmasking"] is None
    printed = capsys.readouterr()
    assert printed.out.count("text ") == (count if count > 1 else 0)
    assert len(printed.err.splitlines()) == 2


def test_d3pm_takes_as_many_steps_as_it_was_trained_for(saved, tmp_path, capsys):
    for name in ("d3pm", "d3pm_uniform"):
        out = tmp_path / f"{name}.jsonl"
        assert main(["sample", str(Path(saved).with_name(name)), "ab", "--out", str(out)]) == 0
        (record,) = records(out)
        assert record["settings"]["steps"] is None
        assert record["tokens"] == baseline(BASELINE_FOLDERS[name]).generate("ab", steps=6)[0].tokens


@pytest.mark.parametrize("projection", ["sampling", "greedy", "multi_hot"])
def test_projections_are_for_ssd_lm(projection, saved, tmp_path, capsys):
    out, folder = tmp_path / "texts.jsonl", str(Path(saved).with_name("ssd"))
    words = ["--projection", projection, "--steps", "6", "--no-cache", "--length", "20"]
    assert main(["sample", folder, "ab", "--out", str(out), *words]) == 0
    (found,) = baseline(SSD).generate("ab", projection=projection, steps=6, cache=False, length=20)
    assert records(out)[0]["tokens"] == found.tokens
    assert records(out)[0]["settings"]["projection"] == projection


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_precision_is_chosen_and_recorded(dtype, saved, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    assert main(["sample", saved, "ab", "--dtype", dtype, "--out", str(out)]) == 0
    assert records(out)[0]["dtype"] == dtype


def test_a_tokenizer_for_a_model_saved_without_one(saved, model, tmp_path, capsys):
    bare, tokenizer = (str(Path(saved).with_name(name)) for name in ("bare", "tokenizer"))
    out = tmp_path / "texts.jsonl"
    assert "saved without a tokenizer; name one with --tokenizer" in fails(capsys, "sample", bare, "ab")
    assert main(["sample", bare, "ab", "--tokenizer", tokenizer, "--out", str(out)]) == 0
    assert records(out)[0]["text"] == model.generate("ab")[0].text


def test_a_run_can_be_sampled_from(two, tmp_path, capsys):
    words = ["train", "two", "--out", str(tmp_path / "run"), "--device", "cpu", "--train.steps", "2"]
    assert main(words) == 0
    for stage in ("ar", "block"):
        out = tmp_path / f"{stage}.jsonl"
        assert main(["sample", str(tmp_path / "run" / stage), "hello", "--out", str(out)]) == 0
        assert records(out)[0]["text"].startswith("hello")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sample NOWHERE ab", "nowhere' here. It must be an existing folder, a .ckpt file, a hub id"),
        ("sample MODEL ab --tokenizer NOWHERE", "there is no tokenizer folder"),
        ("sample BARE ab", "the model was saved without a tokenizer; name one with --tokenizer"),
        (
            "sample MODEL a-prompt-longer-than-the-context",
            "prompt 0: length must hold its 33 tokens, the one that texts begin with included, got 16",
        ),
        (
            "sample MODEL a abcdef --length 5",
            "prompt 1: length must hold its 7 tokens, the one that texts begin with included, got 5",
        ),
        ("sample MODEL ab --length 0", "length must be a whole number from 1 on, got 0"),
        ("sample MODEL ab --count 0", "--count must be at least 1, got 0"),
        ("sample MODEL ab --batch 0", "must be a whole number from 1 on, got 0"),
        ("sample MODEL ab --nucleus 2", "must lie in (0, 1], got 2.0"),
        ("sample MODEL ab --nucleus 0", "must lie in (0, 1], got 0.0"),
        ("sample MODEL ab --temperature -1", "temperature must lie in [0.001, 1000], so that"),
        ("sample MODEL ab --top-k 0", "top_k must be a whole number from 1 on, got 0"),
        ("sample MODEL ab --steps 0", "steps must be at least 1, got 0"),
        (
            "sample MODEL ab --lean 2 --steps 5",
            "--lean is for an order that is drawn, and --steps has its own",
        ),
        (
            "sample MODEL ab --lean 2 --steps 5 --remask 0.5",
            "--lean is for an order that is drawn, and --steps has its own",
        ),
        ("sample MODEL ab --lean 0 --confidence 0.5", "an order that is drawn, and --confidence has its own"),
        ("sample MODEL ab --lean 2 --entropy-bound 1", "and --entropy-bound has its own"),
        ("sample MODEL ab --lean -1", "lean must be a number from 0 to 1e6, got -1.0"),
        (
            "sample AUTOREGRESSIVE ab --lean 2",
            "lean is for block diffusion, whose order can be chosen, got a",
        ),
        ("sample SEDD ab --lean 2", "lean is for block diffusion, whose order can be chosen, got score_ent"),
        ("sample MODEL ab --remask 0.5", "--remask needs --steps"),
        ("sample MODEL ab --steps 5 --remask 1.5", "must lie in [0, 1], got 1.5"),
        ("sample MODEL ab --remask 0.5 --confidence 0.5", "--remask needs --steps"),
        ("sample MODEL ab --steps 5 --confidence 0.5", "may be given, got --steps and --confidence"),
        (
            "sample MODEL ab --tokens-per-pass 2 --entropy-bound 1",
            "got --tokens-per-pass and --entropy-bound",
        ),
        ("sample MODEL ab --confidence 2", "must lie in (0, 1], got 2.0"),
        ("sample MODEL ab --entropy-bound -1", "must not be negative, got -1.0"),
        ("sample MODEL ab --redraws 2", "redraws needs an entropy_floor, got 2 with none"),
        ("sample MODEL ab --entropy-floor -1", "must be finite and not negative, got -1.0"),
        (
            "sample MODEL ab --entropy-floor 9 --length 300",
            "entropy_floor must be at most 5.55, the entropy of 256 tokens",
        ),
        (
            "sample MODEL ab --stride 4",
            "stride must be left at its default, got 4: this model writes blocks of 4",
        ),
        ("sample ONE_BLOCK ab --no-cache", "a network of one block has nothing to cache"),
        ("sample ONE_BLOCK ab --stride 17", "stride must lie in 1..16, the context, got 17"),
        ("sample AUTOREGRESSIVE ab --steps 4", "an autoregressive model writes token after token"),
        ("sample AUTOREGRESSIVE ab --tokens-per-pass 2", "an autoregressive model writes token after token"),
        (
            "sample MODEL ab --projection greedy",
            "projection must be left at its default, got greedy: it is SSD",
        ),
        ("sample MODEL ab --entropy-floor 4", "prompt 0: entropy_window must be within the length 16, or"),
        ("sample MODEL ab --device nonsense", "device must be cpu, cuda or cuda:N, got 'nonsense'"),
        ("sample SEDD ab --steps 0", "--steps must be at least 1, got 0"),
        (
            "sample SEDD ab --length 24 --steps 3",
            "length must be at most 16, the network's whole context, got 24",
        ),
        (
            "sample SEDD ab --no-cache",
            "cache must be left at its default, got False: SEDD writes a whole context",
        ),
        ("sample SEDD ab --confidence 0.5", "SEDD writes a whole context"),
        ("sample D3PM ab --remask 0.5 --steps 4", "D3PM takes its own steps"),
        ("sample D3PM ab --tokens-per-pass 2", "D3PM takes its own steps"),
        (
            "sample SSD ab --top-k 3",
            "top_k must be left at its default, got 3: SSD-LM draws by its projection",
        ),
        ("sample SSD ab --temperature 0.5", "SSD-LM draws by its projection"),
        ("sample SSD ab --nucleus-rule exclusive", "SSD-LM draws by its projection"),
        pytest.param(
            "sample MODEL ab --device cuda",
            "device must be cpu where there is no GPU that torch can use, got 'cuda'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_news_is_one_line_and_nothing_is_written(words, said, saved, tmp_path, capsys):
    folder = Path(saved).parent
    places = {
        name.upper(): str(folder / name)
        for name in ("model", "bare", "one_block", "autoregressive", "sedd", "d3pm", "ssd", "nowhere")
    }
    out = tmp_path / "texts.jsonl"
    given = [places.get(word, word) for word in words.split()]
    assert said in fails(capsys, *given, "--out", str(out))
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_written_over(saved, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    out.write_text("mine")
    assert f"--out must be a new file, and {out} exists" in fails(capsys, "sample", saved, "--out", str(out))
    assert out.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_a_file_in_a_folder_that_is_not_there(saved, tmp_path, capsys):
    said = f"--out must be in an existing folder, and {tmp_path / 'nowhere'} is none"
    assert said in fails(capsys, "sample", saved, "ab", "--out", str(tmp_path / "nowhere" / "texts.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_what_an_interrupted_run_left_is_not_written_over(saved, tmp_path, capsys):
    out, partial = tmp_path / "texts.jsonl", tmp_path / "texts.jsonl.partial"
    partial.write_text("theirs")
    line = fails(capsys, "sample", saved, "--out", str(out))
    assert f"--out {out} was begun before: move away {partial}" in line
    assert partial.read_text() == "theirs"


def test_where_to_write_is_checked_before_a_model_is_loaded(tmp_path, capsys):
    """Loading may take minutes; here there is no model at all."""
    (tmp_path / "there").write_text("mine")
    for out, said in ((tmp_path / "there", "must be a new file"), (tmp_path / "no" / "t", "existing folder")):
        assert said in fails(capsys, "sample", str(tmp_path / "no-model"), "--out", str(out))


def test_interrupted_sampling_keeps_what_was_finished(saved, model, tmp_path, capsys, monkeypatch):
    out, partial = tmp_path / "texts.jsonl", tmp_path / "texts.jsonl.partial"
    expected = model.generate(["ab"] * 5)
    forward = Transformer.forward

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if partial.exists() and partial.read_text().count("\n") == 2:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    monkeypatch.setattr(Transformer, "forward", interrupted)
    assert main(["sample", saved, "ab", "--count", "5", "--batch", "1", "--out", str(out)]) == 130
    printed = capsys.readouterr()
    assert printed.err == "bd3lm: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl.partial"]
    kept = records(partial)
    assert [record["text"] for record in kept] == [each.text for each in expected[:2]]
    assert re.findall(r"^text (\d):", printed.out, re.M) == ["0", "1"]


# --- convert, prove ---


@pytest.mark.parametrize("name", ["bd3lm-block4", "mdlm-noblocks"])
def test_convert_the_reference_layout(name, tmp_path, capsys):
    folder = next(p.parent for p in sorted((PARITY / name).rglob("config.json")))
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    title = {"bd3lm-block4": "block diffusion, blocks of 4", "mdlm-noblocks": "diffusion, one block (MDLM)"}
    assert re.search(rf": {re.escape(title[name])}, [\d,]+ parameters$", capsys.readouterr().out)
    theirs, ours = load(folder)[0].state_dict(), load(tmp_path / "ours")[0].state_dict()
    assert theirs.keys() == ours.keys()
    assert all(theirs[key].equal(ours[key]) for key in ours)


def test_convert_to_another_precision(tmp_path, capsys):
    of_bytes(4).save_pretrained(tmp_path / "saved")
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    before, half = (load(tmp_path / name)[0].state_dict() for name in ("saved", "half"))
    assert all(half[key].equal(before[key].to(torch.bfloat16)) for key in before | half)
    assert load_tokenizer(tmp_path / "half") == BYTES


def test_convert_refuses_what_does_not_fit(tmp_path, capsys):
    assert "are for a .ckpt file" in fails(
        capsys, "convert", str(tmp_path), str(tmp_path / "o"), "--context", "8"
    )
    assert "--context must be given for a .ckpt" in fails(capsys, "convert", "a.ckpt", str(tmp_path / "o"))


def test_prove(capsys):
    assert main(["prove", "--samples", "500"]) == 0
    assert "Everything agrees." in capsys.readouterr().out
    assert "samples must be at least 100" in fails(capsys, "prove", "--samples", "5")


def test_every_flag_of_train_is_its_own_and_any_other_an_override(capsys):
    """As --help lists them, so that a new flag cannot become a setting of the recipe by mistake."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    own = [name for line in lines if line.startswith("-") for name in re.findall(r"--[a-z][a-z-]*", line)]
    assert {"--out", "--from", "--resume", "--no-resume", "--help"} <= set(own)
    for name in own:
        assert Train.set_aside(["demo", name]) == (["demo", name], {"overrides": ()})
    words = ["--start_from", "x", "--train.steps=3"]
    assert Train.set_aside([*words, "demo"]) == (["demo"], {"overrides": tuple(words)})
