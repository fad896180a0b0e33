"""The sequences of LM1B, [CLS] + 126 tokens + [SEP]: trained, measured and written alike."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from bd3lm.cli import main
from bd3lm.commands.eval import Eval, measure_perplexity
from bd3lm.commands.shared.corpora import open_sequences
from bd3lm.commands.shared.subjects import Subject
from bd3lm.data import Corpus, Tokenizer, load_tokenizer, prepare
from bd3lm.lm import Settings, load
from bd3lm.runs.merging import merge
from bd3lm.runs.presets import PRESETS, preset
from bd3lm.runs.recipe import recipe_from_dict
from bd3lm.runs.stages import resolve_stages
from bd3lm.runs.texts import held_out_batches
from bd3lm.runs.train import train_stages

CLS, SEP, MASK, A, B, C = 2, 3, 4, 5, 6, 7
VOCABULARY = {"[PAD]": 0, "[UNK]": 1, "[CLS]": CLS, "[SEP]": SEP, "[MASK]": MASK, "a": A, "b": B, "c": C}
QUIET = Console(quiet=True)


class _Sentences(Corpus):
    """100 times a, 90 times b, 170 times c, held out and to train on."""

    name = description = fingerprint = "sentences"
    splits = ("train", "test")

    def documents(self, split: str) -> Iterator[str]:
        yield from (" ".join("a" * 100), " ".join("b" * 90), " ".join("c" * 170))

    def count(self, split: str) -> int:
        return 3


# Of the 363 tokens, with a [SEP] after each sentence, 126 go into each context between [CLS] and [SEP].
BY_HAND = [
    [CLS, *[A] * 100, SEP, *[B] * 25, SEP],
    [CLS, *[B] * 65, SEP, *[C] * 60, SEP],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Of words, with BERT's special tokens: the first ids, and the mask not the last."""
    backend = Backend(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    folder = tmp_path_factory.mktemp("words")
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def run(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`lm1b-mdlm` but for its size: the context and the frame are the preset's."""
    folder = tmp_path_factory.mktemp("lm1b")
    prepare(_Sentences(), tokenizer, folder / "data", progress=False)
    small = {
        "data": {"path": str(folder / "data")},
        "network": {"size": "tiny", "layers": 1, "hidden": 16, "heads": 2},
        "train": {"steps": 2, "global_batch": 2, "validate_every": 2, "checkpoint_every": 2},
    }
    recipe = merge(preset("lm1b-mdlm").stages[0].recipe, small)
    train_stages(resolve_stages(None, overrides=recipe), folder / "run", console=QUIET, device="cpu")
    return folder / "run"


def test_on_lm1b_alone_presets_frame_their_sequences() -> None:
    for name, each in PRESETS.items():
        for stage in each.stages:
            recipe = recipe_from_dict(stage.recipe, where=name)
            assert recipe.data.bos_eos == name.startswith("lm1b-"), name


def test_a_run_validates_and_is_measured_on_the_128_tokens_written_by_hand(run: Path) -> None:
    subject = Subject.open(run, device="cpu")
    assert subject.recipe is not None
    held_out = held_out_batches(subject.recipe.data, subject.shards(), subject.recipe.method)
    assert [row for batch in held_out for row in batch.tokens.tolist()] == BY_HAND
    with open_sequences(subject, None) as text:
        (batch,) = text.batches(subject, 2)
    assert batch.tokens.tolist() == BY_HAND
    assert batch.scored.tolist() == [[False] + [True] * 127] * 2  # [CLS] is given, [SEP] is not


def test_a_released_model_is_told_how_it_was_trained(run: Path, tmp_path: Path) -> None:
    subject = Subject.open(run, device="cpu")
    subject.model.save_pretrained(tmp_path / "released")
    alone = Subject.open(tmp_path / "released", device="cpu")
    data = str(run.parent / "data")

    def measured(of: Subject, **flags: bool) -> tuple[object, int, float]:
        record = measure_perplexity(of, Eval(batch_size=2, **flags), data, console=QUIET)
        figure = record["result"]["figures"][0]
        return record["settings"].get("bos_eos"), record["result"]["sequences"], figure["nats"]

    trained = measured(subject)
    assert trained[:2] == (True, 2)
    assert measured(alone, bos_eos=True) == measured(subject, bos_eos=True) == trained
    assert measured(alone)[0] is None
    assert measured(alone)[2] != trained[2]


def test_texts_are_written_from_the_token_that_sequences_begin_with(run: Path) -> None:
    model = load(run, device="cpu")
    settings = Settings(stop_at_eos=False)
    for prompt, begun in (("", [CLS]), ("a b", [CLS, A, B])):
        (text,) = model.generate(prompt, settings)
        assert len(text.tokens) == 128
        assert text.tokens[: len(begun)] == begun
        assert text.sample.given == len(begun)


def test_a_model_that_learned_the_frame_writes_it(run: Path) -> None:
    """Nothing but the model puts [SEP] at the end: weights that always say so have texts end there."""
    model = load(run, device="cpu")
    with torch.no_grad():
        model.network.output.bias[SEP] = 100.0
    (text,) = model.generate("", Settings())
    assert text.tokens == [CLS, SEP]
    assert text.text == ""


def test_commands_that_write_begin_texts_so_too(run: Path, tmp_path: Path) -> None:
    written, lengths = tmp_path / "texts.jsonl", tmp_path / "lengths.json"
    cpu = ["--device", "cpu"]
    assert main(["sample", str(run), "--no-stop-at-eos", "--out", str(written), *cpu]) == 0
    (record,) = map(json.loads, written.read_text().splitlines())
    assert (record["tokens"][0], len(record["tokens"]), record["given"]) == (CLS, 128, 1)
    words = ["lengths", str(run), "--count", "2", "--length", "128", "--entropy-floor", "0"]
    assert main([*words, "--out", str(lengths), *cpu]) == 0
    (record,) = json.loads(lengths.read_text())
    assert record["result"]["training"]["lengths"] == [90, 100, 170]  # of sentences, without [SEP]
