"""`bd3lm adapt`: from a trained model to each of its outcomes, through the command."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml

from bd3lm.cli import main
from bd3lm.commands.adapt import Adapt
from bd3lm.interop import load
from bd3lm.lm import LanguageModel
from bd3lm.runs.own_texts import Author
from bd3lm.runs.plan import plan_run
from bd3lm.training import Trainer
from tests.commands import fails
from tests.tiny_recipes import BLOCK, prepared, tiny_recipe
from tests.training.processes import run_processes

FEW = ("--steps", "6", "--device", "cpu", "--train.global_batch", "4", "--optimizer.lr", "0.01")
DRAFTER = ("--to", "drafter", "--rank", "4", "--masks", "2")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("ar") / "ar", tiny_recipe(shards))


@pytest.fixture(scope="module")
def blocks(shards, tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("blocks") / "blocks", tiny_recipe(shards, BLOCK))


@pytest.fixture(scope="module")
def drafter(base, shards, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("drafter") / "drafter"
    assert main(["adapt", str(base), *DRAFTER, "--data", str(shards), "--out", str(out), *FEW]) == 0
    return out


def trained(out: Path, recipe) -> Path:
    run = plan_run(recipe, out).build()
    run.trainer.run()
    run.export()
    return out


def weights(folder: Path) -> bytes:
    return next(folder.glob("*model.safetensors")).read_bytes()


def prompts(folder: Path) -> Path:
    file = folder / "prompts.txt"
    file.write_text("ab\nhello\nthe \n")
    return file


# --- outcomes ---


def test_a_drafter_keeps_the_law_of_its_model_and_reads_as_much(base, drafter, shards, capsys):
    assert [each.name for each in sorted(drafter.iterdir())] == ["overlap", "soft", "stages.yaml"]
    ours, theirs = (LanguageModel.from_pretrained(each, device="cpu") for each in (drafter / "overlap", base))
    assert ours.law == "causal"
    assert ours.record.network.context == theirs.record.network.context == 16
    texts = ["alpha beta", "gamma"]
    assert [each.log_p for each in ours.log_likelihood(texts)] == [
        each.log_p for each in theirs.log_likelihood(texts)
    ]
    assert main(["sample", str(drafter), "al", "--max-new-tokens", "4"]) == 0
    written = capsys.readouterr().out
    assert main(["sample", str(base), "al", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == written
    assert main(["eval", str(drafter), "--data", str(shards)]) == 0


def test_a_drafter_reads_as_much_as_its_model_though_it_is_trained_on_less(base, shards, tmp_path):
    words = ["adapt", str(base), *DRAFTER, "--data", str(shards), "--out", str(tmp_path / "run"), *FEW]
    assert main([*words, "--aim", "overlap", "--data.context", "8"]) == 0
    _, config = load(tmp_path / "run")
    assert config.network.context == 16
    assert main(["adapt", str(tmp_path / "run"), *words[2:-1], "0.02", "--out", str(tmp_path / "on")]) == 0
    _, again = load(tmp_path / "on" / "overlap")
    assert again.base == config.base


def test_what_is_said_at_the_end(base, shards, tmp_path, capsys):
    words = ["--data", str(shards), "--out", str(tmp_path / "run"), *FEW]
    assert main(["adapt", str(base), *DRAFTER, "--aim", "soft", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"wrote {tmp_path / 'run' / 'model'}" in said
    assert f"it writes under the causal law, which is exactly that of {base}" in said
    run = tmp_path / "run"
    assert (
        f"next: bd3lm sample {run} bd3lm acceptance {run} measures how often its drafts are accepted" in said
    )
    assert main(["acceptance", str(run), "--temperature", "1"]) == 0


def test_a_joint_model_has_two_laws_of_which_the_causal_is_its_own(base, shards, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["adapt", str(base), "--to", "joint", "--data", str(shards), "--out", str(out), *FEW]) == 0
    assert "it writes under the causal law, and also has the block law" in capsys.readouterr().out
    model = LanguageModel.from_pretrained(out, device="cpu")
    assert (model.law, model.record.method.laws) == ("causal", ("block", "causal"))
    assert main(["sample", str(out), "al", "--max-new-tokens", "4"]) == 0
    assert main(["eval", str(out)]) == 0


def test_blocks_grow_to_what_is_asked_for(base, shards, tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--data", str(shards), "--out", str(out), "--block-size", "8", *FEW]
    assert main(["adapt", str(base), "--to", "block", *words]) == 0
    assert "it writes under the block law\n" in capsys.readouterr().out
    sizes = [load(out / f"blocks{size}")[1].method.block_size for size in (2, 4, 8)]
    assert sizes == [2, 4, 8]
    saved = yaml.safe_load((out / "blocks4" / "recipe.yaml").read_text())
    assert saved["start_from"] == str(out / "blocks2" / "model")
    assert main(["sample", str(out), "al", "--max-new-tokens", "4"]) == 0
    assert main(["eval", str(out)]) == 0


# --- interruptions ---


def interrupt_at(patch: pytest.MonkeyPatch, step: int, stage: str) -> None:
    train_step = Trainer.train_step

    def interrupted(trainer: Trainer) -> None:
        train_step(trainer)
        if trainer.step == step and trainer.store.folder.parent.name == stage:
            os.kill(os.getpid(), signal.SIGINT)

    patch.setattr(Trainer, "train_step", interrupted)


@pytest.mark.parametrize(("stage", "step"), [("soft", 1), ("overlap", 2)])
@pytest.mark.parametrize("by_its_recipes", [True, False])
def test_what_goes_on_is_what_was_not_interrupted(
    stage, step, by_its_recipes, base, drafter, shards, tmp_path, monkeypatch
):
    words = ["adapt", str(base), *DRAFTER, "--data", str(shards), "--out", str(tmp_path / "run"), *FEW]
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, stage)
        assert main(words) == 130
    on = ["adapt", "--out", words[words.index("--out") + 1], "--device", "cpu"] if by_its_recipes else words
    assert main([*on, "--resume"]) == 0
    for each in ("soft", "overlap"):
        assert weights(tmp_path / "run" / each / "model") == weights(drafter / each / "model")


def test_own_texts_and_what_is_trained_on_them_are_the_same_after_an_interruption(
    base, tmp_path, monkeypatch, capsys
):
    own = ["--own", "--own-texts", "30", "--own-batch", "4", "--own-prompts", str(prompts(tmp_path))]
    words = ["adapt", str(base), *DRAFTER, *own, *FEW, "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    record = Author._record

    def interrupted(author, index, text):
        if index == 17:
            raise KeyboardInterrupt
        return record(author, index, text)

    with monkeypatch.context() as patch:
        patch.setattr(Author, "_record", interrupted)
        assert main([*words, str(tmp_path / "parts")]) == 130
    assert (tmp_path / "parts" / "own.jsonl.partial").is_file()
    capsys.readouterr()
    assert main([*words, str(tmp_path / "parts"), "--resume"]) == 0
    assert " of 30 texts to " in capsys.readouterr().out
    for name in (
        "own.jsonl",
        "data/train-00000.bin",
        "data/valid-00000.bin",
        "overlap/model/adapter_model.safetensors",
    ):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_own_texts_and_files_together(base, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one text\n\nand two\n\nand three\n")
    own = [
        "--own",
        "--own-texts",
        "20",
        "--own-prompts",
        str(prompts(tmp_path)),
        "--text",
        str(tmp_path / "a.txt"),
    ]
    assert main(["adapt", str(base), "--to", "joint", *own, "--out", str(tmp_path / "run"), *FEW]) == 0
    lines = (tmp_path / "run" / "own.jsonl").read_text("utf-8").splitlines()[1:]
    ids = [each for line in lines[:19] for each in json.loads(line)["tokens"]]
    tokens = torch.frombuffer(
        bytearray((tmp_path / "run/data/train-00000.bin").read_bytes()), dtype=torch.int16
    )
    assert tokens.tolist() == [*ids, *b"one text", 256, *b"and two", 256]


def test_text_alone_is_prepared_with_the_models_tokenizer_and_can_be_all(base, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one text\n\nand two\n\nand three\n")
    words = [
        "adapt",
        str(base),
        *DRAFTER,
        "--text",
        str(tmp_path / "a.txt"),
        "--out",
        str(tmp_path / "run"),
        *FEW,
    ]
    assert main([*words, "--only-text"]) == 0
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["data"]
    assert "text in " in capsys.readouterr().out
    assert main(words) == 0
    assert (tmp_path / "run" / "overlap" / "model").is_dir()


# --- what is shown and refused ---


def test_the_recipes_and_the_memory_are_shown(base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["adapt", str(base), *DRAFTER, "--show", "--soft.train.steps", "33"]) == 0
    shown = capsys.readouterr().out
    found = yaml.safe_load(shown)
    assert [each["train"]["steps"] for each in found.values()] == [33, 600]
    assert found["soft"]["start_from"] == str(base)
    assert found["soft"]["data"]["context"] == 16
    first = shown.splitlines()[0]
    assert first.startswith("# soft: at least 0.00 GiB before activations (weights ")
    assert first.endswith("; 1,152 of 12,866 parameters are trained")
    assert list(tmp_path.iterdir()) == []


def test_its_flags_are_its_own_and_others_overrides():
    words = ["m", "--to", "joint", "--text", "a", "b", "--own", "--resume"]
    overrides = ("--optimizer.lr", "1e-3", "--train.seed=3")
    kept, more = Adapt.set_aside([*words[:3], *overrides, *words[3:]])
    assert (kept, more) == (words, {"overrides": overrides})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "MODEL must be given, or --resume with the --out of a run"),
        ("AR", "--to must be given: drafter, joint or block"),
        (
            "AR --to drafter",
            "there is no text to train on: give --data FOLDER, --text FILE ... or, to let the model write "
            "it, --own",
        ),
        ("nowhere --to drafter --own", "there is no folder 'nowhere' here"),
        ("AR --to drafter --own --rank 0", "--rank must be at least 1, got 0"),
        ("AR --to drafter --own --rank 17", "additions must be a rank up to hidden 16"),
        ("AR --to drafter --own --masks 17", "--masks must be at most the 16 tokens"),
        ("AR --to drafter --own --block-size 4", "--block-size needs --to joint or block"),
        ("AR --to joint --own --block-size 32", "--block-size must be at most the 16 tokens"),
        (
            "AR --to joint --data nowhere",
            "--data must be a folder of token shards, and nowhere does not exist",
        ),
        (
            "AR --to joint --text nowhere",
            "--text must be files or folders of text, and nowhere does not exist",
        ),
        (
            "AR --to joint --data SHARDS --own",
            "--data is text that is already tokenized, and --own is given too",
        ),
        ("AR --to joint --data SHARDS --only-text", "--only-text needs --text or --own"),
        ("AR --to joint --data SHARDS --own-texts 4", "--own-texts needs --own, got 4 without it"),
        ("AR --to joint --own --own-texts 1", "--own-texts must be at least 2, got 1"),
        ("AR --to joint --own --own-top-p 0", "--own-top-p must lie in (0, 1], got 0"),
        ("AR --to joint --own --own-temperature -1", "--own-temperature must lie in "),
        ("AR --to joint --own --own-prompts nowhere", "--own-prompts nowhere could not be read"),
        ("AR --to joint --data SHARDS --device gpu", "--device must be cpu, cuda or cuda:N"),
        ("AR --to joint --data SHARDS --start_from x", "--start_from is MODEL in this command"),
        ("AR --to joint --data SHARDS --data.path x", "--data.path is --data in this command"),
        ("AR --to joint --data SHARDS --train.stepz 3", "train.stepz: unknown key, did you mean 'steps'?"),
        ("AR --to block --data SHARDS --soft.train.steps 3", "soft: unknown key"),
        ("AR --to block --data SHARDS --method.law causal", "law must be block, got 'causal'"),
        ("AR --to drafter --data OTHER --rank 4 --masks 2", "has its own tokenizer, and "),
        ("BLOCKS --to drafter --own", "a drafter needs a model that writes token by token"),
        ("DRAFTER --to block --own", "has no weights of its own to train, only additions to the weights of"),
        ("DRAFTER --to drafter --own --rank 3", "--rank must be 4, the rank of the additions that "),
        ("--to drafter --resume --out nowhere", "--to is for a new run, which needs a MODEL"),
        ("--resume --out nowhere", "--resume needs a run to continue, and nowhere holds none"),
        ("AR --to drafter --rank 4 --masks 2 --data SHARDS --out RUN", "holds a run already; use --resume"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(
    words, said, base, blocks, drafter, shards, other, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    places = {
        "AR": base,
        "BLOCKS": blocks,
        "DRAFTER": drafter / "overlap",
        "RUN": drafter,
        "SHARDS": shards,
        "OTHER": other,
    }
    typed = [str(places.get(word, word)) for word in words.split()]
    assert main(["adapt", *typed]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bd3lm: ")
    assert said in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Shards of another tokenizer, of as many tokens."""
    from dataclasses import replace

    from bd3lm.data import byte_tokenizer

    return prepared(tmp_path_factory.mktemp("other") / "shards", replace(byte_tokenizer(), bos_id=255))


def test_additions_for_other_weights_are_one_line(base, shards, tmp_path, capsys):
    own = trained(tmp_path / "base", tiny_recipe(shards))
    words = [*DRAFTER, "--data", str(shards), *FEW]
    assert main(["adapt", str(own), *words, "--aim", "soft", "--out", str(tmp_path / "first")]) == 0
    changed = trained(tmp_path / "changed", tiny_recipe(shards, {"train": {"seed": 9}}))
    (own / "model" / "model.safetensors").write_bytes(weights(changed / "model"))
    line = fails(capsys, "adapt", str(tmp_path / "first"), *words, "--out", str(tmp_path / "second"))
    assert "was trained with other weights than those in" in line
    assert not (tmp_path / "second").exists()


def test_a_model_without_a_tokenizer_needs_data_that_is_prepared(base, tmp_path, capsys):
    import shutil

    bare = shutil.copytree(base / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    line = fails(capsys, "adapt", str(bare), *DRAFTER, "--own", "--out", str(tmp_path / "run"))
    assert "was saved without a tokenizer, which --text and --own need" in line
    assert not (tmp_path / "run").exists()


def test_text_is_prepared_by_one_process(base, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--text and --own work in one process: first " in fails(
        capsys, "adapt", str(base), *DRAFTER, "--own"
    )


# --- several processes ---


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_two_processes_make_the_drafter_of_one(parallel, base, drafter, shards, tmp_path):
    words = ["adapt", str(base), *DRAFTER, "--data", str(shards), "--out", str(tmp_path / "run"), *FEW]
    for status in run_processes("tests.commands.test_adapt.typed", [*words, "--parallel", parallel], world=2):
        assert status == 0
    for stage in ("soft", "overlap"):
        ours, theirs = (load(each / stage)[0] for each in (tmp_path / "run", drafter))
        for (name, one), (_, two) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert torch.allclose(one, two, rtol=1e-4, atol=1e-5), name
            if "additions" not in name and name != "mask_vector":
                assert torch.equal(one, two), name


def typed(words: list[str]) -> int:
    return main(words)
