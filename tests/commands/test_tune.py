"""`bd3lm tune`: from conversations to a model that answers as they do, through the command."""

import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from bd3lm.cli import main
from bd3lm.data import TokenShards
from bd3lm.data.chat import user_message
from bd3lm.data.templates import PLAIN
from bd3lm.interop import load
from bd3lm.interop.beside import digest
from bd3lm.lm import LanguageModel
from bd3lm.runs.plan import plan_run
from bd3lm.training import Trainer
from tests.commands import fails
from tests.data_room.chats import chats, written
from tests.tiny_recipes import BLOCK, prepared, tiny_recipe

LONG = {"data": {"context": 96}}
WIDE = {"network": {"layers": 2, "hidden": 64, "heads": 2, "dropout": 0.0}, "train": {"ema_decay": 0.0}}
JOINT = {
    "method": {"kind": "block_diffusion", "block_size": 4, "causal_clean": True},
    "objective": {"next_token": 1.0},
}
FEW = ("--steps", "4", "--device", "cpu", "--train.global_batch", "4", "--optimizer.lr", "0.01")
PLAINLY = ("--chat-template", "plain")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


def trained(out: Path, shards: Path, *changes: dict[str, Any]) -> Path:
    run = plan_run(tiny_recipe(shards, LONG, *changes), out).build()
    run.trainer.run()
    run.export()
    return out


@pytest.fixture(scope="module")
def models(shards, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {
        "ar": trained(folder / "ar", shards),
        "block": trained(folder / "block", shards, BLOCK),
        "joint": trained(folder / "joint", shards, JOINT),
    }
    words = ["--to", "drafter", "--rank", "4", "--masks", "3", "--aim", "hard", "--data", str(shards), *FEW]
    assert main(["adapt", str(found["ar"]), *words, "--out", str(folder / "drafter")]) == 0
    return found | {"drafter": folder / "drafter"}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("chats") / "chats.jsonl", chats(40, words=2, answers=1))


def tune(*words: object) -> int:
    return main(["tune", *map(str, words)])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load(folder)[0].named_parameters())


# --- what comes out ---


@pytest.mark.parametrize("kind", ["ar", "block", "joint", "drafter"])
def test_each_kind_of_model_stays_what_it_is_and_learns(kind, models, file, tmp_path, capsys):
    out = tmp_path / "run"
    assert tune(models[kind], file, *PLAINLY, "--out", out, *FEW) == 0
    said = capsys.readouterr().out
    assert f"conversations in {out / 'data'}: train 38, valid 2" in said
    assert f"next: bd3lm eval {out} measures " in said
    before, after = load(models[kind])[1], load(out)[1]
    assert (after.method, after.base) == (before.method, before.base)
    assert after.network == replace(before.network, dropout=0.0)
    old, new = weights(models[kind]), weights(out)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    beside = {name for name in old if "additions" in name or name == "mask_vector"}
    assert changed == beside if kind == "drafter" else len(changed) > len(old) / 2
    model = LanguageModel.from_pretrained(out, device="cpu")
    assert model.tokenizer is not None
    assert model.tokenizer.chat_template == PLAIN
    assert main(["eval", str(out)]) == 0
    if kind in ("joint", "drafter"):
        assert main(["acceptance", str(out), "--temperature", "1"]) == 0
        assert f"      bd3lm acceptance {out} measures how often its drafts" in said


@pytest.mark.parametrize("kind", ["ar", "block", "joint"])
def test_additions_are_saved_alone_and_merged_into_their_model(kind, models, file, tmp_path, capsys):
    """In PEFT's layout, beside the name and hash of the model: what is loaded is a model like any other."""
    words = [file, *PLAINLY, "--rank", "4", *FEW]
    assert tune(models[kind], *words, "--out", tmp_path / "run") == 0
    assert "which is exactly that of" not in capsys.readouterr().out
    folder = tmp_path / "run" / "model"
    names = {each.name for each in folder.iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "config.json", "tokenizer.json"}
    assert "model.safetensors" not in names
    said = json.loads((folder / "config.json").read_text())
    assert (said["network"]["additions"], said["network"]["additions_at"]) == (4, "all")
    assert said["base"] == {"source": str(models[kind]), "sha256": digest(models[kind] / "model")}
    (network, config), (base, before) = load(tmp_path / "run"), load(models[kind])
    assert config.network == network.config == replace(before.network, dropout=0.0)
    assert (config.method, config.base) == (before.method, None)
    added = {name.split(".lora_")[0] for name in load_file(folder / "adapter_model.safetensors")}
    changed = [
        name
        for (name, one), other in zip(base.named_parameters(), network.parameters(), strict=True)
        if not torch.equal(one, other)
    ]
    assert len(changed) == 4  # the matrices of its one layer: q, k and v are one
    assert len(added) == 6
    for name in changed:
        difference = network.get_parameter(name) - base.get_parameter(name)
        assert torch.linalg.matrix_rank(difference.detach(), rtol=1e-3) <= (12 if "qkv" in name else 4)
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "full")]) == 0
    for one, other in zip(network.parameters(), weights(tmp_path / "full").values(), strict=True):
        assert torch.equal(one, other)
    assert tune(tmp_path / "run", *words, "--out", tmp_path / "again") == 0  # additions to a merged model
    assert load(tmp_path / "again")[1] == config
    (models[kind] / "model").rename(tmp_path / "moved")
    try:
        assert tune(tmp_path / "run", *words, "--out", tmp_path / "third") == 1
    finally:
        (tmp_path / "moved").rename(models[kind] / "model")
    assert "model.safetensors" in {each.name for each in (models[kind] / "model").iterdir()}


def test_steps_are_what_reads_each_conversation_three_times(models, file, tmp_path, capsys):
    words = ["--out", tmp_path / "run", "--device", "cpu", "--train.global_batch", "2"]
    assert tune(models["ar"], file, *PLAINLY, *words, "--show") == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    first, line, memory, *recipe = shown.splitlines()
    assert first == "conversations: train 38, valid 2"
    assert memory.startswith("# run: at least ")
    sequences, steps = (int(line.split()[place]) for place in (0, -2))
    assert steps == -(-3 * sequences // 2)
    settings = yaml.safe_load("\n".join(recipe))
    assert settings["train"]["steps"] == steps
    assert settings["data"]["context"] == 96
    assert tune(models["ar"], file, *PLAINLY, *words, "--epochs", "0.5") == 0
    saved = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert saved["train"]["steps"] == -(-sequences // 4)


def test_a_context_that_is_not_needed_is_kept_for_what_comes_later(shards, file, tmp_path):
    """Sequences in training are as long as conversations need, and the model reads as much as before."""
    base = trained(
        tmp_path / "base", shards, {"data": {"context": 768}, "train": {"steps": 1, "global_batch": 1}}
    )
    assert tune(base, file, *PLAINLY, "--out", tmp_path / "run", *FEW) == 0
    saved = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert (saved["data"]["context"], saved["data"]["most_context"]) == (512, 768)
    assert load(tmp_path / "run")[1].network.context == 768
    assert main(["eval", str(tmp_path / "run")]) == 0


def test_a_prompt_and_its_completion_need_no_template(models, tmp_path):
    texts = written(tmp_path / "t.jsonl", [{"prompt": "One, two,", "completion": " three."}] * 8)
    assert tune(models["block"], texts, "--out", tmp_path / "run", *FEW) == 0
    model = LanguageModel.from_pretrained(tmp_path / "run", device="cpu")
    assert model.tokenizer is not None
    assert model.tokenizer.chat_template is None
    data = TokenShards(tmp_path / "run" / "data")
    assert data.read("train", 0, 10).tolist() == [model.tokenizer.bos_id, *b"One, two,"]


def test_what_is_prepared_apart_trains_the_same(models, file, tmp_path, capsys):
    assert tune(models["ar"], file, *PLAINLY, "--out", tmp_path / "whole", *FEW) == 0
    prepare = ["data", "prepare", file, tmp_path / "data", "--tokenizer", models["ar"], "--chat", *PLAINLY]
    capsys.readouterr()
    assert main([*map(str, prepare), "--workers", "2"]) == 0
    assert "train: 38 conversations, " in capsys.readouterr().out
    assert main(["data", "verify", str(tmp_path / "data")]) == 0
    assert tune(models["ar"], "--data", tmp_path / "data", "--out", tmp_path / "apart", *FEW) == 0
    assert tune(models["ar"], file, *PLAINLY, "--out", tmp_path / "only", "--only-text", *FEW) == 0
    assert [each.name for each in (tmp_path / "only").iterdir()] == ["data"]
    assert tune(models["ar"], "--data", tmp_path / "only" / "data", "--out", tmp_path / "then", *FEW) == 0
    for name in ("apart", "then"):
        for one, other in zip(
            weights(tmp_path / "whole").values(), weights(tmp_path / name).values(), strict=True
        ):
            assert torch.equal(one, other)


def interrupt_at(patch: pytest.MonkeyPatch, step: int) -> None:
    train_step = Trainer.train_step

    def interrupted(trainer: Trainer) -> None:
        train_step(trainer)
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    patch.setattr(Trainer, "train_step", interrupted)


@pytest.mark.parametrize(("by_its_recipe", "rank"), [(True, ()), (False, ()), (True, ("--rank", "4"))])
def test_what_goes_on_is_what_was_not_interrupted(by_its_recipe, rank, models, file, tmp_path, monkeypatch):
    words = [models["block"], file, *PLAINLY, *FEW, *rank, "--out"]
    assert tune(*words, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert tune(*words, tmp_path / "parts") == 130
    on = ["--out", tmp_path / "parts", "--device", "cpu"] if by_its_recipe else [*words, tmp_path / "parts"]
    assert tune(*on, "--resume") == 0
    model = Path("model", "adapter_model.safetensors" if rank else "model.safetensors")
    assert (tmp_path / "parts" / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


def questions(number: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices("abcdefgh", k=3)) for _ in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "steps"), [({}, 200), (BLOCK, 240), (JOINT, 160)], ids=["ar", "block", "joint"]
)
def test_a_tuned_model_answers_as_it_was_taught(change, steps, shards, tmp_path, capsys):
    """Answers begin with a word of their own, whatever is asked; and end."""
    base = trained(tmp_path / "base", shards, change, WIDE)
    rows = [{"question": each, "answer": f"ok {each[0].upper()}"} for each in questions(400, seed=0)]
    words = ["--steps", steps, "--optimizer.lr", "0.005", "--train.global_batch", "16", "--device", "cpu"]
    assert tune(base, written(tmp_path / "a.jsonl", rows), *PLAINLY, "--out", tmp_path / "run", *words) == 0
    model = LanguageModel.from_pretrained(tmp_path / "run", device="cpu")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    assert tokenizer.chat_template is not None
    asked = [user_message(tokenizer.chat_template, each, tokenizer) for each in questions(100, seed=1)]
    for law in model.record.method.laws:
        found = model.with_law(law).generate(asked, max_new_tokens=24, seed=0)
        follow = [each.stopped_by == "eos" and each.completion.split()[:1] == ["ok"] for each in found]
        assert sum(follow) >= 90, (law, [each.completion for each in found[:10]])


# --- bad input ---


def rows_of(*rows: Any) -> Sequence[Any]:
    return [*chats(3, words=2, answers=1), *rows]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            rows_of({"text": "hello"}),
            "bad.jsonl, line 4, must have the fields of a conversation (messages; ",
        ),
        (
            rows_of({"messages": [{"content": "q"}]}),
            "bad.jsonl, line 4, must have a role and content, or from ",
        ),
        (
            rows_of({"messages": [{"role": "user", "content": "q"}]}),
            "line 4, has no message of the assistant",
        ),
        (
            rows_of({"question": "q", "answer": "x" * 300}),
            "line 4: has 322 tokens, more than the limit of 96",
        ),
        ([], "split 'train' of corpus 'bad.jsonl' has no documents"),
    ],
)
@pytest.mark.parametrize("kind", ["ar", "block"])
def test_bad_conversations_are_one_line_and_nothing_is_written(kind, rows, said, models, tmp_path, capsys):
    bad = written(tmp_path / "bad.jsonl", rows)
    words = [models[kind], bad, *PLAINLY, "--held-out", "0", "--out", tmp_path / "run", *FEW]
    assert said in fails(capsys, "tune", *map(str, words))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for", "chats.jsonl, line 1: the chat template of the model cannot be used: "),
        (
            "{{ raise_exception('Not you.') }}",
            "line 1: the chat template of the model cannot be used: Not you.",
        ),
        (
            "{{ ''.__class__.__mro__ }}",
            "cannot be used: access to attribute '__class__' of 'str' object is unsafe",
        ),
        (
            "hello",
            "line 1: the chat template of the model must write each message once, got message 0 written 0",
        ),
        ("{{ messages | length }}" + PLAIN, "differently when it asks for the answer than afterwards; "),
    ],
)
def test_bad_templates_are_one_line_and_nothing_is_written(template, said, models, file, tmp_path, capsys):
    (tmp_path / "t.jinja").write_text(template)
    words = [models["ar"], file, "--chat-template", tmp_path / "t.jinja", "--out", tmp_path / "run", *FEW]
    assert said in fails(capsys, "tune", *map(str, words))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{ar}"], "there are no conversations to train on: give files, or --data FOLDER"),
        ([], "MODEL must be given, or --resume with the --out of a run; MODEL comes first, then the files"),
        (["{ar}", "none.jsonl"], "there is no file or folder none.jsonl"),
        (
            ["{ar}", "{file}", "--steps", "2", "--epochs", "2"],
            "--steps and --epochs both set the length of training",
        ),
        (["{ar}", "{file}", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["{ar}", "{file}", "--rank", "0"], "--rank must be at least 1, got 0"),
        (
            ["{drafter}", "{file}", *PLAINLY, "--rank", "2"],
            "--rank is for models whose weights are trained, and ",
        ),
        (["{ar}", "{file}", *PLAINLY, "--rank", "17"], "additions must be a rank up to hidden 16, or 0"),
        (["{ar}", "{file}", "--epochs", "0"], "--epochs must be above 0 and at most 10,000, got 0"),
        (
            ["{ar}", "{file}"],
            "needs a chat template, which this tokenizer does not have: give one with --chat-template FILE",
        ),
        (["{ar}", "{file}", "--chat-template", "none"], "chats.jsonl, line 1: needs a chat template"),
        (
            ["{ar}", "{file}", "--chat-template", "no.jinja"],
            "--chat-template must be plain or a file, but there is no file",
        ),
        (
            ["{ar}", "{file}", "--data", "{text}"],
            "--data is conversations that are already tokenized, and files",
        ),
        (["{ar}", "--data", "{text}"], "--data must hold conversations, and "),
        (["{ar}", "--data", "nowhere"], "--data must be a folder that `bd3lm data prepare --chat` wrote"),
        (
            ["{ar}", "--data", "{text}", "--answers", "last"],
            "--answers needs files of conversations, got --data",
        ),
        (
            ["{ar}", "{file}", *PLAINLY, "--data.context", "500"],
            "data.context must be at most the context of",
        ),
        (["{ar}", "{file}", *PLAINLY, "--data.context", "16"], "more than the context of 16, and so have"),
        (
            ["{ar}", "{file}", *PLAINLY, "--start_from", "x"],
            "--start_from is MODEL in this command: MODEL comes first",
        ),
    ],
    ids=lambda each: " ".join(each)[:40] if isinstance(each, list) else "",
)
def test_a_mistake_is_one_line_and_nothing_is_written(words, said, models, file, shards, tmp_path, capsys):
    places = {"ar": models["ar"], "drafter": models["drafter"], "file": file, "text": shards}
    given = [word.format(**places) for word in words]
    assert said in fails(capsys, "tune", *given, "--out", str(tmp_path / "run"))
    left = [each.name for each in (tmp_path / "run").iterdir()] if (tmp_path / "run").exists() else []
    assert left in ([], ["data"]), left  # conversations that are whole, and can be used by the next try


@pytest.mark.parametrize("words", [("--train.stepz", "3"), ("--method.kind", "sedd")])
def test_a_field_that_no_recipe_has_is_said_before_anything_is_written(words, models, file, tmp_path, capsys):
    assert tune(models["ar"], file, *PLAINLY, *words, "--out", tmp_path / "run") == 1
    assert f"{words[0].removeprefix('--')}: " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_left_alone(models, file, tmp_path, capsys):
    words = [models["ar"], file, *PLAINLY, "--out", tmp_path / "run", *FEW]
    assert tune(*words) == 0
    assert "holds a run already; use --resume" in fails(capsys, "tune", *map(str, words))


def test_long_conversations_are_left_out_where_asked(models, tmp_path, capsys):
    rows = rows_of({"question": "q", "answer": "x" * 300}, {"question": "q", "answer": "y"})
    words = [
        written(tmp_path / "a.jsonl", rows),
        *PLAINLY,
        "--held-out",
        "0",
        "--out",
        tmp_path / "run",
        *FEW,
    ]
    assert tune(models["ar"], *words, "--skip-long") == 0
    assert "left out 1 of 5 conversations, which are longer than the context of 96" in capsys.readouterr().err


def test_what_stands_behind_the_last_answer_is_said_to_be_left_out(models, tmp_path, capsys):
    rows = chats(6, words=2, answers=1)
    rows[1]["messages"].append({"role": "user", "content": "and?"})
    file = written(tmp_path / "a.jsonl", rows)
    assert tune(models["ar"], file, *PLAINLY, "--out", tmp_path / "run", *FEW) == 0
    assert "left out the messages after the last answer in 1 conversation\n" in capsys.readouterr().err


def test_text_that_is_a_conversation_is_told_of_the_flag(file, tmp_path, capsys):
    said = fails(capsys, "data", "prepare", str(file), str(tmp_path / "d"), "--tokenizer", "bytes")
    assert "has no text in a field 'text': it has messages; use --chat to read conversations" in said
    words = ["data", "prepare", str(file), str(tmp_path / "e"), "--tokenizer", "bytes"]
    assert "--answers needs --chat" in fails(capsys, *words, "--answers", "last")
    for flag in (["--bos"], ["--no-eos"], ["--field", "x"], ["--text-unit", "line"]):
        assert f"{flag[0]} is for text, and --chat is given" in fails(capsys, *words, "--chat", *flag)
    assert not (tmp_path / "e").exists()
