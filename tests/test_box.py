"""The model that comes with the package: by its name, without a name, and what it is worth.

The slow tests are of the real weights, the others of a tiny model in their place.
"""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import bd3lm
from bd3lm import interop
from bd3lm.cli import main
from bd3lm.data import load_tokenizer
from bd3lm.io import places
from bd3lm.runs.presets import preset
from bd3lm.runs.recipe import recipe_from_dict
from tests.lm import of_bytes

# Pairs of words that make up 3 to 6 in 100 pairs of Wikipedia, and 1.5 of the same words in random order.
COMMON_PAIRS = {
    *(f"{first} the" for first in ("of", "in", "to", "and", "on", "for", "at", "by", "from", "with")),
    *(f"{first} a" for first in ("as", "was", "is", "in", "of")),
    *("it was", "he was", "to be", "has been", "have been", "had been"),
}


def in_a_fresh_interpreter(*words: str, cwd: Path, with_errors: bool = False) -> str:
    """What it prints, with no network; on standard error too, where that is asked for."""
    package = str(Path(bd3lm.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": package, "HF_HUB_OFFLINE": "1"}
    errors = subprocess.STDOUT if with_errors else subprocess.PIPE
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture
def box(tmp_path, monkeypatch) -> Path:
    """A tiny model of bytes in place of the one that ships, in its precision; and an empty working folder."""
    folder = tmp_path / "package" / "box"
    model = of_bytes(4, causal_clean=True)
    model.network.to(torch.bfloat16)
    model.save_pretrained(folder)
    for module in (places, interop):
        monkeypatch.setattr(module, "BOX_FOLDER", folder)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return folder


def test_the_name_is_the_model(box: Path) -> None:
    assert interop.resolve("box") == box
    written = [bd3lm.load(source).generate("ab", seed=1)[0].text for source in ("box", box)]
    assert written[0] == written[1]


@pytest.mark.parametrize("typed", ["bxo", "Box", "boxx"])
def test_its_name_may_be_misspelt(box: Path, typed: str) -> None:
    with pytest.raises(ValueError, match=f"there is no folder '{typed}' here, did you mean 'box'"):
        bd3lm.load(typed)


def test_a_revision_is_for_the_hub(box: Path) -> None:
    with pytest.raises(ValueError, match="revision must be None for a local path, got 'main'"):
        interop.resolve("box", revision="main")


def test_something_here_of_the_same_name_is_not_mistaken_for_it(box: Path, capsys) -> None:
    of_bytes(None).save_pretrained("box")
    with pytest.raises(ValueError, match=re.escape(f"use ./box for the local one, or {box} for the model")):
        interop.resolve("box")
    assert interop.resolve("./box") == interop.resolve(Path("box")) == Path("box")
    assert main(["sample"]) == 0  # whoever names no model means none that is here
    unnamed = capsys.readouterr().out
    assert main(["sample", str(box)]) == 0
    assert capsys.readouterr().out == unnamed


def test_sample_without_a_model(box: Path, capsys) -> None:
    texts = []
    for words in (["sample"], ["sample", "box"], ["sample", "--seed", "1"]):
        assert main(words) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert main(["sample", ""]) == 1
    assert "source" in capsys.readouterr().err


def test_it_is_measured_by_its_name(box: Path, capsys) -> None:
    text, out = Path("text.txt"), Path("eval.json")
    text.write_text("Blocks of four letters each, over and over. " * 4)
    assert main(["eval", "box", "--data", str(text), "--out", str(out)]) == 0
    (record,) = json.loads(out.read_text())
    assert (record["model"], record["dtype"]) == ("box", "float32")
    assert sorted(each.name for each in box.parent.rglob("*")) == sorted(
        ["box", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    )


def test_half_precision_is_computed_in_float32_on_a_cpu(box: Path, capsys) -> None:
    def dtype_of(**options) -> torch.dtype:
        return bd3lm.load("box", **options).network.embedding.weight.dtype

    assert dtype_of() == torch.float32
    assert dtype_of(dtype=torch.bfloat16) == torch.bfloat16
    # What is rewritten stays as it is stored, to the byte.
    assert main(["convert", "box", "copy"]) == 0
    weights = [(folder / interop.WEIGHTS_NAME).read_bytes() for folder in (box, Path("copy"))]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_first_text_waits_for_neither_training_nor_the_compiler(box: Path, tmp_path: Path) -> None:
    """Which take three seconds to be imported."""
    source = f"""
import sys
from bd3lm.cli import main
main(["sample", {str(box)!r}])
print([name for name in ("torch._dynamo", "torch.distributed.fsdp", "bd3lm.training") if name in sys.modules])
"""
    assert in_a_fresh_interpreter("-c", source, cwd=tmp_path).endswith("[]\n")


@pytest.mark.slow
def test_a_text_that_was_never_finished_says_nothing_when_the_interpreter_ends(
    box: Path, tmp_path: Path
) -> None:
    source = f"""
import sys, bd3lm
kept = bd3lm.load({str(box)!r}).stream("a")
print(type(next(kept)).__name__)
sys.modules["kept"] = type(sys)("kept")
sys.modules["kept"].kept = kept
"""
    assert in_a_fresh_interpreter("-c", source, cwd=tmp_path, with_errors=True) == "Started\n"


# --- the real weights ---

_SHA256 = {
    "config.json": "6ad24f8f9ccfff2119863894088436dbfc01ceeb5a56fb1fa7ce990e7e6ca034",
    "model.safetensors": "365ed829473996a233f4d81ae2e268e2460493ceea54cf899d2e44952d15e986",
    "tokenizer.json": "ff8adca2a3edd2032b6792055cae53b4bb4ecfb37d83cc6d14709ec3056fc0f3",
    "tokenizer_config.json": "3bc83b070b8193a7b2c759552ed485ad09d47f32b59f85b7e4a8def33ea8f1dc",
}


def test_the_box_is_what_its_card_says_byte_for_byte() -> None:
    """Whoever got these files elsewhere can compare them; nobody changes them unseen."""
    folder = Path(bd3lm.__file__).parent / "box"
    found = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in sorted(each.name for each in folder.iterdir() if each.suffix != ".md")
    }
    assert found == _SHA256
    card = (folder / "README.md").read_text()
    assert all(f"| `{name}` | `{digest}` |" in card for name, digest in found.items())


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def share_of_common_pairs(words: list[str]) -> float:
    pairs = [" ".join(pair) for pair in pairwise(words)]
    return sum(pair in COMMON_PAIRS for pair in pairs) / len(pairs)


@pytest.mark.slow
def test_the_box_writes_english() -> None:
    texts = [each.text or "" for each in bd3lm.load("box").generate([""] * 16, seed=0)]
    tokenizer = load_tokenizer(interop.BOX_FOLDER)
    written = re.findall("[A-Za-z]+", " ".join(texts))
    assert len(written) > 600
    assert sum(len(tokenizer.encode(f" {word}")) == 1 for word in written) > len(written) / 2
    words = words_of(" ".join(texts))
    assert share_of_common_pairs(words) > 0.027
    random.Random(0).shuffle(words)
    assert share_of_common_pairs(words) < 0.027  # so it is the order that was looked at


@pytest.mark.slow
def test_the_command_alone_writes_without_a_network(tmp_path: Path) -> None:
    assert len(words_of(in_a_fresh_interpreter("-m", "bd3lm", "sample", cwd=tmp_path))) >= 20
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_box_is_the_network_and_method_of_its_preset() -> None:
    recipe = recipe_from_dict(preset("box").stages[-1].recipe, where="box")
    config = bd3lm.load("box").config
    assert config.method == recipe.method.after(recipe.objective)
    assert config.network == recipe.network.config(vocab_size=6144, context=recipe.data.context)


def test_a_prompt_without_a_model_is_told_where_the_model_goes(box: Path, capsys) -> None:
    assert main(["sample", "The city of"]) == 1
    said = capsys.readouterr().err
    assert (
        "got 'The city of'; to continue a text, name the model first: bd3lm sample box \"The city"
        in " ".join(said.split())
    )
