"""`bd3lm train`: recipes and their flags, runs and what stops them."""

import errno
import os
import re
import signal
from pathlib import Path

import pytest
import yaml

from bd3lm.cli import main
from bd3lm.commands.train import Train
from bd3lm.interop import load
from bd3lm.runs import presets
from bd3lm.runs.presets import PRESETS, Preset, Stage
from bd3lm.runs.stages import resolve_stages
from bd3lm.training import Trainer, tensor_files
from tests.commands import fails
from tests.tiny_recipes import plain, prepared, two_stages

pytestmark = pytest.mark.sweep(3)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture
def two(monkeypatch, shards) -> None:
    """A preset `two`, in the way of `demo`."""
    monkeypatch.setattr(presets, "PRESETS", {**PRESETS, "two": two_stages(shards)})


# --- recipes ---


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
        error == "bd3lm: there is no preset 'dmeo', did you mean 'demo'? `bd3lm presets` lists the presets\n"
    )
    assert "does not exist" in fails(capsys, "train", "demo", "--config", "/no/such.yaml")
    assert "block" in fails(capsys, "train", "demo", "--show", "--block", "3")


def test_a_flag_that_one_stage_has_says_which(capsys):
    words = ["train", "demo", "--show", "--objective.masking.kind", "counts", "--optimizer.lr", "0.1"]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert "objective.masking: unknown key, allowed are random_batch\n" in error
    assert error.endswith("\n  the stage block has it: --block.objective.masking.kind\n")
    assert main(["train", "demo", "--show", "--optimizer.lrr", "0.1"]) == 1
    assert "the stage" not in capsys.readouterr().err  # which none has


def test_a_flag_that_every_stage_knows_is_of_no_single_one(capsys):
    """Though only one may find its value wrong; and a value may be wrong for the one that knows a flag."""
    assert main(["train", "demo", "--show", "--data.context", "30"]) == 1
    error = capsys.readouterr().err
    assert "method.block_size must divide the context 30, got 4" in error
    assert "the stage" not in error.partition("\n")[2]
    assert main(["train", "demo", "--show", "--method.block_size", "5"]) == 1
    assert capsys.readouterr().err.endswith("\n  the stage block has it: --block.method.block_size\n")


def test_a_misspelt_stage_suggests_the_right_one(capsys):
    error = fails(capsys, "train", "demo", "--show", "--blok.method.block_size", "8")
    assert (
        "blok: unknown key, did you mean 'block'? allowed are the stages ar, ar_longer, block, and " in error
    )
    assert "did you mean 'train'? " in fails(capsys, "train", "demo", "--show", "--trian.steps", "8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--block.start_from /nowhere",
            "block.start_from must be an earlier stage (ar, ar_longer; default: the last of them)",
        ),
        (
            "--block.parallel fsdp",
            "parallel must be the same for all stages, which share their processes, got ",
        ),
        (
            "--from a --ar.method.kind foo",
            "with --from only the stage block runs, got flags --ar.any.field",
        ),
        (
            "--from a --start_from b",
            "--from and --start_from both set the start of training: give only one of them",
        ),
        (
            "--from a --block.start_from b",
            "--from and --start_from both set the start of training: give only one ",
        ),
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


def test_train_writes_a_model_and_says_where(two, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "two", "--out", str(out), "--device", "cpu", "--train.steps", "3"]) == 0
    assert f"wrote {out / 'block' / 'model'}" in capsys.readouterr().out
    network, config = load(out / "block" / "model")
    assert config.network.vocab_size == 258
    assert network.config.layers == 1
    for stage in ("ar", "block"):
        capsys.readouterr()
        assert main(["sample", str(out / stage), "hello"]) == 0
        assert capsys.readouterr().out.startswith("hello")


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
    assert "holds a run already; use --resume" in fails(capsys, *words)
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
    assert "--resume needs a run to continue" in fails(capsys, *words)
    assert main(["train", "two", *words[1:3], "--device", "cpu", "--train.steps", "2"]) == 0
    assert "--from starts a new run" in fails(capsys, *words, "--from", "box")
    assert "Different: optimizer.lr" in fails(capsys, *words, "--optimizer.lr", "0.5")
    assert "did you mean 'block'" in fails(capsys, *words, "--blok.train.steps", "4")
    assert main([*words, "--block.train.micro_batch", "2"]) == 0


@pytest.mark.parametrize("report", [True, False])
def test_a_preset_says_whether_training_ends_with_a_report(report, shards, tmp_path, monkeypatch, capsys):
    short = Preset("", (Stage("run", plain(shards, {"train": {"steps": 2}})),), report=report)
    monkeypatch.setattr(presets, "PRESETS", {**PRESETS, "short": short})
    assert main(["train", "short", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert ("Perplexity of held-out text" in capsys.readouterr().out) is report
    assert (tmp_path / "run" / "report.html").is_file() is report


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
