"""The command line: what it prints, how it ends, and that bad news is one line."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import yaml

import bd3lm
from bd3lm import presets
from bd3lm.cli import main
from bd3lm.data import TokenShards, load_tokenizer
from bd3lm.interop import load
from bd3lm.presets import PRESETS
from bd3lm.runs import resolve_stages
from bd3lm.training import Trainer, tensor_files
from tests.data_room.documents import random_texts
from tests.tiny_recipes import plain, prepared, two_stages

PARITY = Path(__file__).parent / "data" / "parity"


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
        ["presets"],
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


def test_no_command_shows_the_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("train", "data", "presets", "convert", "demo", "prove"))


def test_unknown_commands_and_flags_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
    for command in (["presets"], ["demo"], ["prove"], ["convert", "a", "b"]):
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
    assert "did you mean 'demo'" in fails(capsys, "train", "dmo")
    assert "which does not exist" in fails(capsys, "train", "demo", "--config", "/no/such.yaml")
    assert "block" in fails(capsys, "train", "demo", "--show", "--block", "3")


# --- training ---


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
    assert main([*words, "--resume"]) == 0
    other = [*words[:-1], "4", "--resume", "--optimizer.lr", "0.5"]
    assert "Different: optimizer.lr (0.01 then, 0.5 now)" in fails(capsys, *other)


def test_a_stopped_run_ends_with_130_and_resumes(two, tmp_path, capsys, monkeypatch):
    words = ["train", "two", "--out", str(tmp_path), "--device", "cpu"]
    step = Trainer._train_step

    def interrupted(trainer):
        step(trainer)
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", interrupted)
        assert main(words) == 130
    printed = capsys.readouterr()
    assert "stopped at step 4 of 6" in printed.out
    assert "--resume goes on" in " ".join(printed.out.split())
    assert main([*words, "--resume"]) == 0
    assert "resumed at step 4" in capsys.readouterr().out


def test_a_second_interrupt_is_one_line(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bd3lm.runs.train_stages", interrupted)
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


# --- data ---


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_data_prepare_and_train_tokenizer(tmp_path, capsys):
    texts = random_texts(40)
    source = str(write_jsonl(tmp_path / "corpus.jsonl", texts))
    assert main(["data", "train-tokenizer", source, str(tmp_path / "bpe"), "--vocabulary", "300"]) == 0
    assert f"wrote {tmp_path / 'bpe'}: 300 tokens" in capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path / "bpe")
    assert tokenizer.vocab_size == 300
    words = ["data", "prepare", source, str(tmp_path / "out"), "--tokenizer", str(tmp_path / "bpe")]
    assert main([*words, "--held-out", "0.25"]) == 0
    printed = capsys.readouterr().out
    assert "train: 30 documents," in printed
    assert "valid: 10 documents," in printed
    assert f"wrote {tmp_path / 'out'}" in printed
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


# --- convert, prove ---


@pytest.mark.parametrize("name", ["bd3lm-block4", "mdlm-noblocks"])
def test_convert_the_reference_layout(name, tmp_path, capsys):
    folder = next(p.parent for p in sorted((PARITY / name).rglob("config.json")))
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    assert "parameters" in capsys.readouterr().out
    theirs, ours = load(folder)[0].state_dict(), load(tmp_path / "ours")[0].state_dict()
    assert theirs.keys() == ours.keys()
    assert all(theirs[key].equal(ours[key]) for key in ours)


def test_convert_refuses_what_does_not_fit(tmp_path, capsys):
    assert "are for a .ckpt file" in fails(
        capsys, "convert", str(tmp_path), str(tmp_path / "o"), "--context", "8"
    )
    assert "--context must be given for a .ckpt" in fails(capsys, "convert", "a.ckpt", str(tmp_path / "o"))


def test_prove(capsys):
    assert main(["prove", "--samples", "500"]) == 0
    assert "Everything agrees." in capsys.readouterr().out
    assert "samples must be at least 100" in fails(capsys, "prove", "--samples", "5")
