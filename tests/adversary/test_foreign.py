"""Hugging Face folders and GGUF files by somebody who means harm: one line, in little time and memory, or a
model that works."""

import json
import random
import shutil
from pathlib import Path

import pytest

import bd3lm
from tests.adversary.test_models import CONFIG, ODD, fuzz, fuzzed, read
from tests.data_room.test_checkpoints import beside
from tests.interop.checkpoints import saved, tiny
from tests.interop.test_gguf import add_tokenizer, original, write

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    saved(tiny("llama, llama3 scaling", vocab_size=310), folder, max_shard_size="20KB")
    config = json.loads((folder / CONFIG).read_text())
    beside(folder, 310, config=config, tokenizer_config={"eos_token": "a", "chat_template": "A"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "model"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("foreign") / "m.gguf"
    backend = original("smollm")
    model = tiny("llama", vocab_size=backend.get_vocab_size())
    write(path, model, extra=lambda writer: add_tokenizer(writer, "smollm", backend))
    return path.read_bytes()


def use(source: Path) -> str:
    model = bd3lm.load(source, device="cpu")
    if model.tokenizer is not None:
        model.tokenizer.decode(model.tokenizer.encode("the noise 12"), skip_special=False)
    model.generate([[3, 4]], max_new_tokens=3)
    return "writes"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("batch", range(24))
@pytest.mark.parametrize("name", [CONFIG, INDEX, "tokenizer_config.json", "generation_config.json"])
def test_fuzzed_files(name: str, batch: int, folder: Path) -> None:
    begun = read(folder, name)

    def change(draw: random.Random) -> None:
        (folder / name).write_text(json.dumps(fuzzed(begun, draw, lambda _: draw.choice(ODD))))

    fuzz(batch, change, lambda: use(folder))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("batch", range(24))
def test_fuzzed_gguf_files(batch: int, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    header = whole.index(b"token_embd.weight") + 2000

    def change(draw: random.Random) -> None:
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 5])):
            place = draw.randrange(header)
            size = draw.choice([1, 1, 4, 8])
            data[place : place + size] = draw.choice([bytes(size), b"\xff" * size, draw.randbytes(size)])
        path.write_bytes(data[: draw.choice([len(data), len(data), draw.randrange(len(data))])])

    fuzz(batch, change, lambda: use(path))


def test_a_tokenizer_of_another_model_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bd3lm.cli import main

    config = read(folder, CONFIG) | {"vocab_size": 309}
    (folder / CONFIG).write_text(json.dumps(config))
    assert main(["sample", str(folder), "a", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "model.embed_tokens.weight is (310, 32) but must be (309, 32)" in said


def test_a_text_longer_than_the_context_is_one_line(folder: Path) -> None:
    model = bd3lm.load(folder, device="cpu")
    with pytest.raises(ValueError, match=r"text 0 must have 2 to 64 tokens \(the network's context"):
        model.log_likelihood([list(range(3, 70))])


def test_a_context_that_no_memory_holds_is_one_line(folder: Path) -> None:
    config = read(folder, CONFIG) | {"max_position_embeddings": 2**40}
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"context must be at most 16,777,216"):
        bd3lm.load(folder, device="cpu")
