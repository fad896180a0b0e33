"""Shards on disk: the contents of meta.json, reading across shards, and errors that name the file."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bd3lm.data import TokenShards, byte_tokenizer, prepare, train_bpe
from bd3lm.data.meta import dtype_for, on_disk
from tests.data_room.documents import ListCorpus, random_texts, small_corpus

BYTES = byte_tokenizer()
CORPUS = small_corpus()
STREAM = {
    split: [token for text in CORPUS.documents(split) for token in [*BYTES.encode(text), BYTES.eos_id]]
    for split in CORPUS.splits
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    prepare(CORPUS, BYTES, out, shard_tokens=700)
    return out


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_meta_counts_everything(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["format"], meta["version"], meta["dtype"]) == ("bd3lm-tokens", 1, "uint16")
    assert meta["inputs"]["tokenizer_fingerprint"] == BYTES.fingerprint
    assert meta["inputs"]["source_fingerprint"] == CORPUS.fingerprint
    assert meta["inputs"]["source"] == "list"
    for split in CORPUS.splits:
        texts = list(CORPUS.documents(split))
        counts = meta["splits"][split]
        assert counts["complete"]
        assert counts["documents"] == len(texts)
        assert counts["text_bytes"] == sum(len(text.encode()) for text in texts)
        assert counts["tokens"] == len(STREAM[split]) == counts["text_bytes"] + len(texts)
        for key in ("documents", "tokens", "text_bytes"):
            assert sum(shard[key] for shard in counts["shards"]) == counts[key]
    assert len(meta["splits"]["train"]["shards"]) > 3


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made = prepare(CORPUS, BYTES, "~/shards", splits=["valid"])
    assert made.folder == TokenShards("~/shards").folder == tmp_path / "shards"
    assert list(tmp_path.iterdir()) == [tmp_path / "shards"]


def test_files_are_raw_little_endian_integers(folder: Path) -> None:
    files = sorted(folder.glob("train-*.bin"))
    assert files[1].name == "train-00001.bin"
    tokens = b"".join(file.read_bytes() for file in files)
    assert np.frombuffer(tokens, "<u2").tolist() == STREAM["train"]


def test_a_shard_ends_with_a_document(folder: Path) -> None:
    """And the document that fills a shard is its last."""
    for split in TokenShards(folder).meta.splits.values():
        for shard in split.shards:
            ends = np.cumsum(np.load(folder / shard.lengths_file) + 1)
            tokens = np.fromfile(folder / shard.file, "<u2")
            assert np.flatnonzero(tokens == BYTES.eos_id).tolist() == (ends - 1).tolist()
            assert (ends[:-1] < 700).all()
            assert ends[-1] >= 700 or shard is split.shards[-1]


@given(st.data())
def test_reading_spans_borders(folder: Path, data: st.DataObject) -> None:
    shards = TokenShards(folder)
    split = data.draw(st.sampled_from(shards.splits))
    start = data.draw(st.integers(0, len(STREAM[split])))
    stop = data.draw(st.integers(start, len(STREAM[split])))
    assert shards.read(split, start, stop).tolist() == STREAM[split][start:stop]


def test_lengths_are_those_of_the_texts(folder: Path) -> None:
    shards = TokenShards(folder)
    for split in shards.splits:
        assert shards.lengths(split).tolist() == [len(text.encode()) for text in CORPUS.documents(split)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(258, "uint16"), (65536, "uint16"), (65537, "uint32"), (200_000, "uint32")]
)
def test_integers_are_as_wide_as_the_vocabulary_needs(vocab_size: int, dtype: str) -> None:
    assert dtype_for(vocab_size) == dtype
    assert np.iinfo(on_disk(dtype_for(vocab_size))).max >= vocab_size - 1
    assert on_disk(dtype_for(vocab_size)).str[0] == "<"


def test_wide_tokens_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["bd3lm.data.prepare"]  # in the package, this name is the function
    monkeypatch.setattr(module, "dtype_for", lambda _: "uint32")
    shards = prepare(CORPUS, BYTES, tmp_path)
    assert (tmp_path / "train-00000.bin").stat().st_size == 4 * len(STREAM["train"])
    assert shards.read("train", 0, 99).tolist() == STREAM["train"][:99]


def test_the_tokenizer_comes_with_the_shards(folder: Path) -> None:
    assert TokenShards(folder).tokenizer == BYTES


def test_another_tokenizer_is_refused(folder: Path) -> None:
    shards = TokenShards(folder)
    shards.require_tokenizer(BYTES)
    shards.require_tokenizer(BYTES.fingerprint)
    for other in (train_bpe(random_texts(9), 300), "0123456789abcdef"):
        with pytest.raises(ValueError, match="were made with another tokenizer"):
            shards.require_tokenizer(other)


def test_a_tokenizer_swapped_in_the_folder_is_noticed(copy: Path) -> None:
    train_bpe(random_texts(9), 300).save(copy)
    with pytest.raises(ValueError, match="were made with another tokenizer"):
        _ = TokenShards(copy).tokenizer


def test_fingerprints_follow_tokens_and_not_names(folder: Path, tmp_path: Path) -> None:
    renamed = ListCorpus({split: list(CORPUS.documents(split)) for split in CORPUS.splits})
    renamed.name = "another name"
    same = prepare(renamed, BYTES, tmp_path / "same", shard_tokens=700)
    assert same.fingerprint == TokenShards(folder).fingerprint
    other = prepare(small_corpus(seed=1), BYTES, tmp_path / "other", shard_tokens=700)
    assert other.fingerprint != same.fingerprint


def test_opening_touches_no_shard(copy: Path) -> None:
    (copy / "train-00000.bin").unlink()
    shards = TokenShards(copy)
    assert shards.split("train").tokens == len(STREAM["train"])
    assert shards.read("valid", 0, 5).tolist() == STREAM["valid"][:5]


# --- errors -----------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "train-00001.bin").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"^shard .*train-00001\.bin is missing: prepare the folder again"
    ):
        TokenShards(copy).read("train", 0, len(STREAM["train"]))


@pytest.mark.parametrize("change", [-2, 2])
def test_a_shard_of_another_size_is_named(copy: Path, change: int) -> None:
    path = copy / "valid-00000.bin"
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"\0" * change)
    message = rf"^shard .*valid-00000\.bin is damaged: it has {len(data) + change} bytes, not {len(data)}"
    with pytest.raises(ValueError, match=message):
        TokenShards(copy).read("valid", 0, 1)


def test_missing_and_damaged_lengths_are_named(copy: Path) -> None:
    path = copy / "train-00000.lengths.npy"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"train-00000\.lengths\.npy is damaged"):
        TokenShards(copy).lengths("train")
    np.save(path, np.zeros(1, np.uint32))
    with pytest.raises(ValueError, match="has 1 lengths for"):
        TokenShards(copy).lengths("train")
    np.save(path, np.array([object()]), allow_pickle=True)  # nothing is unpickled
    with pytest.raises(ValueError, match="is damaged"):
        TokenShards(copy).lengths("train")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"lengths\.npy is missing"):
        TokenShards(copy).lengths("train")


def test_no_shards_here(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no token shards: there is no meta\.json"):
        TokenShards(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format: Input should be 'bd3lm-tokens'"),
        ({"version": 2}, "version: Input should be 1"),
        ({"dtype": "float8"}, "dtype: Input should be 'uint16' or 'uint32'"),
        ({"inputs": {}}, "inputs.tokenizer_fingerprint: Field required"),
    ],
)
def test_another_meta_is_refused(copy: Path, change: dict[str, object], message: str) -> None:
    meta = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(ValueError, match=message):
        TokenShards(copy)


def test_a_meta_that_is_no_json_is_refused(copy: Path) -> None:
    (copy / "meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json does not describe token shards that can be read here"):
        TokenShards(copy)


def test_an_unfinished_folder_is_refused(copy: Path) -> None:
    meta = json.loads((copy / "meta.json").read_text())
    meta["splits"]["valid"]["complete"] = False
    (copy / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="was interrupted: prepare it again"):
        TokenShards(copy)


def test_unknown_splits_and_places_are_refused(folder: Path) -> None:
    shards = TokenShards(folder)
    with pytest.raises(ValueError, match=r"split must be one of train, valid for .*, got 'test'"):
        shards.split("test")
    for start, stop in ((-1, 2), (3, 2), (0, len(STREAM["train"]) + 1)):
        with pytest.raises(IndexError, match="are not within the"):
            shards.read("train", start, stop)
