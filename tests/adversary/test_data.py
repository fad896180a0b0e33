"""Data from anywhere: a meta.json that lies, shards that are damaged, also under a run, files that unpack to
gigabytes. Whatever it is, it is used as it should be or ends in one line, and in little memory."""

import gzip
import json
import lzma
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bd3lm.cli import main
from bd3lm.data import TokenShards, byte_tokenizer, prepare
from bd3lm.data.files import read_rows
from bd3lm.runs import presets
from bd3lm.training import Trainer
from tests.commands import fails, saved
from tests.data_room.documents import run_python, small_corpus
from tests.lm import of_bytes
from tests.tiny_recipes import plain, prepared, two_stages

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

BYTES = byte_tokenizer()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards")
    prepare(small_corpus(), BYTES, out, shard_tokens=1500)
    return out


@pytest.fixture(scope="module")
def scratch(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of which each test writes meta.json anew."""
    return Path(shutil.copytree(original, tmp_path_factory.mktemp("scratch") / "shards"))


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "shards"))


def use(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Everything that can be asked of a folder of shards; its tokens by split."""
    shards = TokenShards(folder)
    shards.check()
    assert shards.tokenizer == BYTES
    for split in shards.splits:
        assert len(shards.lengths(split)) == shards.split(split).documents
    return {split: shards.read(split, 0, shards.split(split).tokens) for split in shards.splits}


def one_line(error: BaseException) -> str:
    said = str(error)
    assert said
    assert "\n" not in said
    assert len(said) < 1000
    return said


def used_or_one_line(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What is in it; nothing if it is refused."""
    try:
        return use(folder)
    except (ValueError, FileNotFoundError) as error:
        one_line(error)
        return {}


def chances(turn: int) -> Iterator[random.Random]:
    """Of the cases of a test that has very many: so many at a time, since each test costs something."""
    return (random.Random(_CASES * turn + case) for case in range(_CASES))


_CASES = 25


# --- meta.json that lies --------------------------------------------------------------------------

NASTY: list[Any] = [
    *(None, True, "", 0, 1, -1, 2**31, 2**63, 2**64, 10**30, -(2**63), 0.5, 1e300, "NaN", "12", [], {}),
    *("../../../etc/passwd", "/etc/passwd", "..", ".", "a/b.bin", "C:\\a.bin", "train-00000.bin\0", "\n"),
    *("meta.json", "tokenizer.json", "valid-00000.bin", "train-00001.bin", "\x1b[2J", "é" * 5000, "0" * 64),
    *(
        [[]],
        [{}],
        {"a": {}},
        [1, 2],
        ["train", "train"],
        ["test"],
        "uint32",
        "uint16",
        "uint8",
        "bd3lm-tokens",
    ),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


def mutate(meta: dict[str, Any], chance: random.Random) -> None:
    """One to three lies, wherever."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        *parents, last = chance.choice(list(places(meta)))
        inside: Any = meta
        for key in parents:
            inside = inside[key]
        what = chance.randrange(6)
        if what == 0 and isinstance(inside, dict):
            del inside[last]
        elif what == 1 and isinstance(inside, list):
            inside.append(inside[last])
        elif what == 2 and isinstance(inside[last], int):
            inside[last] += chance.choice((-1, 1, 1000, -1000, 1 << 40))
        else:
            inside[last] = chance.choice(NASTY)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("turn", range(120))
def test_a_meta_that_lies_is_one_line_or_harmless(turn: int, original: Path, scratch: Path) -> None:
    for chance in chances(turn):
        meta = json.loads((original / "meta.json").read_text())
        mutate(meta, chance)
        (scratch / "meta.json").write_text(json.dumps(meta))
        tokens = used_or_one_line(scratch)
        assert all((found < BYTES.vocab_size).all() for found in tokens.values())


def with_damaged_bytes(original: bytes, chance: random.Random) -> bytes:
    data = bytearray(original)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data))
        what = chance.randrange(4)
        if what == 0:
            data[place] = chance.randrange(256)
        elif what == 1:
            del data[place : place + chance.randrange(40)]
        elif what == 2:
            data[place:place] = chance.choice(
                (b"[" * 100_000, b"-", b"9" * 400, b"\\ud800", b"\xff", b'{"a":')
            )
        else:
            del data[place:]
            data += b" "
    return bytes(data)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("turn", range(80))
def test_a_meta_of_damaged_bytes_is_one_line_or_harmless(turn: int, original: Path, scratch: Path) -> None:
    for chance in chances(turn):
        data = with_damaged_bytes((original / "meta.json").read_bytes(), chance)
        (scratch / "meta.json").write_bytes(data)
        used_or_one_line(scratch)


def lie(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def shard(meta: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = meta["splits"]["train"]["shards"][0]
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda meta: shard(meta).update(file="../../../etc/passwd"), "file must be the bare name of a .bin"),
        (lambda meta: shard(meta).update(file="/etc/passwd"), "file must be the bare name"),
        (lambda meta: shard(meta).update(file="train-00001.bin"), "file must differ from shard to shard"),
        (lambda meta: shard(meta).update(tokens=-5), "tokens: Input should be greater than or equal to 0"),
        (
            lambda meta: shard(meta).update(documents=0),
            "documents: Input should be greater than or equal to 1",
        ),
        (lambda meta: shard(meta).update(sha256="abc"), "sha256 must be 64 hexadecimal digits, got 'abc'"),
        (
            lambda meta: meta["splits"]["train"].update(tokens=7),
            "tokens must be .*, the sum over shards, got 7",
        ),
        (
            lambda meta: meta["splits"]["train"].update(shards=[]),
            "shards must not be empty in a complete split",
        ),
        (lambda meta: meta["inputs"].update(splits=[]), "splits must name at least one split"),
        (lambda meta: meta["inputs"].update(mask_id=5000), "mask_id must be below the vocab_size of 258"),
        (
            lambda meta: meta["inputs"].update(vocab_size=1 << 20),
            "dtype must have room for 1048576 tokens, got",
        ),
        (lambda meta: meta["inputs"].update(eos_id=None), "eos_id and bos_id must be set if"),
    ],
)
def test_what_is_wrong_with_a_meta_is_said(
    change: Callable[[dict[str, Any]], object], said: str, copy: Path, capsys: Capture
) -> None:
    line = fails(capsys, "data", "verify", str(lie(copy, change)))
    assert "meta.json does not describe token shards that can be read here" in line
    assert re.search(said, line)


def test_counts_that_disagree_with_the_files_are_said(copy: Path) -> None:
    def more(meta: dict[str, Any]) -> None:
        shard(meta)["tokens"] += 1
        meta["splits"]["train"]["tokens"] += 1

    with pytest.raises(ValueError, match=r"train-00000\.bin is damaged: it has \d+ bytes, not \d+; prepare"):
        use(lie(copy, more))


def test_lengths_that_disagree_with_the_tokens_are_said(copy: Path) -> None:
    path = copy / "valid-00000.lengths.npy"
    np.save(path, np.load(path)[::-1] + 1)
    with pytest.raises(ValueError, match=r"00000\.lengths\.npy is damaged: its lengths add up to \d+ tokens"):
        use(copy)


def test_a_token_outside_the_vocabulary_is_said_though_the_digest_is_right(copy: Path) -> None:
    import hashlib

    path = copy / "valid-00000.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[3] = 300
    tokens.tofile(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    lie(copy, lambda meta: meta["splits"]["valid"]["shards"][0].update(sha256=digest))
    with pytest.raises(ValueError, match="is damaged: it has token 300, but the vocabulary ends at 257"):
        use(copy)


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.lengths.npy"])
@pytest.mark.parametrize("what", ["pipe", "folder", "broken link"])
def test_what_is_no_file_is_not_waited_for(what: str, name: str, copy: Path) -> None:
    path = copy / name
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(copy / "nowhere")
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(name)):
        use(copy)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("turn", range(40))
def test_lengths_of_damaged_bytes_are_one_line_or_used(turn: int, copy: Path) -> None:
    """Where two lengths differ by as much, or a space of the header is a tab, no sum can tell."""
    path = copy / "train-00000.lengths.npy"
    whole = path.read_bytes()
    for chance in chances(turn):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        used_or_one_line(copy)


# --- shards that are damaged ----------------------------------------------------------------------


def zeros(path: Path) -> None:
    """Of the same size, in place."""
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, 10)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def flipped(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def disguised(path: Path) -> None:
    """With the time of the last change put back."""
    before = path.stat()
    flipped(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


DAMAGES = [zeros, cut, emptied, flipped, disguised]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_run_starts_on_a_damaged_shard(
    damage: Callable[[Path], None], tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    shards = prepared(tmp_path / "shards")
    monkeypatch.setattr(presets, "PRESETS", {"two": two_stages(shards)})
    damage(shards / "valid-00000.bin")
    line = fails(capsys, "train", "two", "--out", str(tmp_path / "run"), "--device", "cpu")
    assert "valid-00000.bin is damaged" in line
    assert "prepare the folder again" in line
    assert not (tmp_path / "run").exists()
    prepared(tmp_path / "shards")
    assert main(["train", "two", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0


def at_step(monkeypatch: Patch, step: int, do: Callable[[], object]) -> None:
    """Something happens while a run is trained."""
    batch = Trainer._batch

    def disturbed(trainer: Trainer, rows: Any) -> Any:
        if trainer.step == step:
            time.sleep(0.02)  # so that the clock of the file system has moved on
            do()
        return batch(trainer, rows)

    monkeypatch.setattr(Trainer, "_batch", disturbed)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_ends_in_a_line_when_a_shard_is_damaged_under_it(
    damage: Callable[[Path], None], tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    shards = prepared(tmp_path / "shards")
    monkeypatch.setattr(presets, "PRESETS", {"two": two_stages(shards)})
    words = ["train", "two", "--out", str(tmp_path / "run"), "--device", "cpu"]
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: damage(shards / "train-00000.bin"))
        line = fails(capsys, *words)
    assert re.search(r"train-00000\.bin is damaged: .*; it was intact when it was opened; prepare", line)
    prepared(tmp_path / "shards")
    assert main([*words, "--resume"]) == 0


def replaced(path: Path) -> None:
    path.with_name("other").write_bytes(bytes(9))
    os.replace(path.with_name("other"), path)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("harmless", [os.utime, lambda path: path.chmod(0o400), Path.unlink, replaced])
def test_a_run_goes_on_when_its_bytes_are_still_there(
    harmless: Callable[[Path], object], tmp_path: Path, monkeypatch: Patch
) -> None:
    """What was opened stays open, whatever becomes of its name."""
    config = tmp_path / "recipe.yaml"
    config.write_text(json.dumps(plain(prepared(tmp_path / "shards"))))
    at_step(monkeypatch, 3, lambda: harmless(tmp_path / "shards" / "train-00000.bin"))
    assert main(["train", "--config", str(config), "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0


# --- bd3lm data verify ----------------------------------------------------------------------------


def verified(folder: Path, capsys: Capture) -> tuple[int, str, str]:
    status = main(["data", "verify", str(folder)])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_whole_folder_is_said_to_be_whole(original: Path, capsys: Capture) -> None:
    status, out, err = verified(original, capsys)
    shards = TokenShards(original)
    total = sum(shards.split(name).tokens for name in shards.splits)
    assert (status, err) == (0, "")
    assert "not whole" not in out
    assert f"{original} is complete: {total:,} tokens" in out.splitlines()


def test_everything_that_is_damaged_is_named(copy: Path, capsys: Capture) -> None:
    zeros(copy / "train-00001.bin")
    (copy / "train-00002.bin").unlink()
    (copy / "valid-00000.lengths.npy").unlink()
    (copy / "tokenizer.json").unlink()
    status, out, err = verified(copy, capsys)
    files = len(list(copy.glob("*.bin"))) + 2
    assert status == 1
    assert err == f"bd3lm: {copy} is damaged: 4 of {files} checks failed\n"
    for said in (
        "train-00001.bin is damaged: its sha256 is",
        "train-00002.bin is missing",
        "valid-00000.lengths.npy is missing",
        "tokenizer.json is missing",
    ):
        assert said in out
    rows = [line.split() for line in out.splitlines()]
    assert ["train", "train-00000.bin"] in [row[:2] for row in rows if row[-1:] == ["whole"] != row[-2:-1]]


def test_what_was_not_finished_is_not_whole(copy: Path, capsys: Capture) -> None:
    status, out, _ = verified(lie(copy, lambda meta: meta["splits"]["valid"].update(complete=False)), capsys)
    assert status == 1
    assert "split valid was not prepared completely" in out


def test_preparing_again_restores_what_is_damaged_and_not_what_is_whole(
    original: Path, copy: Path, monkeypatch: Patch
) -> None:
    expected = {path.name: path.read_bytes() for path in original.iterdir()}
    flipped(copy / "train-00001.bin")
    (copy / "valid-00000.lengths.npy").write_bytes(b"")
    times = (copy / "train-00000.bin").stat().st_mtime_ns
    prepare(small_corpus(), BYTES, copy, shard_tokens=1500)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == expected
    assert (copy / "train-00000.bin").stat().st_mtime_ns == times


# --- documents that are too large -----------------------------------------------------------------

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data)),
}
_PIECE = 1 << 20


def bomb(path: Path, begin: bytes = b"", piece: bytes = b"a", size: int = 1 << 30) -> Path:
    """A few kilobytes that unpack to a gigabyte on one line: compressed files may be joined."""
    compress = COMPRESSIONS[path.suffix]
    path.write_bytes(compress(begin) + compress(piece * (_PIECE // len(piece))) * (size // _PIECE))
    return path


MEASURE = """
import json, resource, sys
from bd3lm.data import FileCorpus

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

def read(how, path):
    if how == "samples":
        Samples.read(Path(path))
    elif how == "prompts":
        read_prompts(path)
    elif how == "counted":
        FileCorpus(path).documents("train")
    else:
        for text in FileCorpus(path, held_out=0, text_unit=how or None).documents("train"):
            pass

tasks = [word.partition("=") for word in sys.argv[1:]]
if any(how in ("samples", "prompts") for how, _, _ in tasks):
    from pathlib import Path
    from bd3lm.commands.shared.prompts import read_prompts
    from bd3lm.commands.shared.sample_files import Samples
before, said = peak(), []
for how, _, path in tasks:
    try:
        read(how, path)
    except ValueError as error:
        said.append([str(error), peak() - before])
    else:
        said.append(["", peak() - before])
print(json.dumps(said))
"""
_TOO_LONG = (
    r"(line \d+|row 1|one of the rows from 1 on|as one document|the paragraph at line \d+), is longer than"
)


def refused(*tasks: str) -> list[str]:
    """What is said of each, all of them read by one new process in little memory."""
    said, growths = zip(*json.loads(run_python(MEASURE, *tasks)), strict=True)
    assert max(growths) < 200, list(zip(tasks, growths, strict=True))  # megabytes
    return list(said)


def test_no_document_takes_much_memory_however_well_it_is_packed(tmp_path: Path) -> None:
    """A gigabyte each, some of which would be ten in memory; the limit is that of the command."""
    tasks = []
    for suffix in COMPRESSIONS:
        packed = bomb(tmp_path / f"text.jsonl{suffix}", b'{"text": "')
        assert packed.stat().st_size < 5_000_000
        tasks += [f"={packed}", f"counted={packed}"]
    objects = bomb(tmp_path / "objects.jsonl.zst", b'{"text": [{}', b",{}")
    letters, lines = bomb(tmp_path / "letters.txt.zst"), bomb(tmp_path / "lines.txt.zst", piece=b"abcdefg\n")
    tasks += [f"={path}" for path in (objects, letters, lines)]
    tasks += [f"line={letters}", f"file={lines}"]
    tasks += [f"={path}" for path in large_parquet(tmp_path)]
    for task, said in zip(tasks, refused(*tasks), strict=True):
        name = Path(task.partition("=")[2]).name
        assert re.search(rf"/{name}, {_TOO_LONG} 10,000,000 characters, the limit for a document", said), task


def large_parquet(folder: Path) -> list[Path]:
    """A text of 40 MB that 200 rows name, and one that is alone."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = pyarrow.array(["a" * 40_000_000])
    named = pyarrow.DictionaryArray.from_arrays([0] * 200, text)
    paths = []
    for name, column in (("named.parquet", named), ("alone.parquet", text)):
        parquet.write_table(pyarrow.table({"text": column}), folder / name, compression="zstd")
        paths.append(folder / name)
    return paths


@pytest.mark.slow  # by the time that importing torch takes
def test_neither_do_samples_and_prompts(tmp_path: Path) -> None:
    (tmp_path / "large.jsonl").write_bytes(b'{"text": "' + bytes(60_000_000))
    (tmp_path / "many.txt").write_bytes(b"a\n" * 1_200_000)
    samples, endless, many = refused(
        f"samples={tmp_path / 'large.jsonl'}", "prompts=/dev/zero", f"prompts={tmp_path / 'many.txt'}"
    )
    assert re.search(f"large.jsonl, {_TOO_LONG} 10,000,000 characters", samples)
    assert "prompts of at most 10,000,000 characters, and /dev/zero, line 1, is longer" in endless
    assert "must have at most 1,000,000 lines, with 100,000,000 characters in total" in many
    assert "many.txt has more at line 1,000,001" in many


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(saved(of_bytes(4), tmp_path / "model"))


def long_text(folder: Path, name: str) -> str:
    line = (
        {"text": "a long text, said at length"} if name.endswith("jsonl") else "a long text, said at length"
    )
    (folder / name).write_text(f"{line if isinstance(line, str) else json.dumps(line)}\n")
    return str(folder / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize(
    "words",
    [
        ("data", "prepare", "FILE", "OUT", "--tokenizer", "bytes"),
        ("data", "train-tokenizer", "FILE", "OUT"),
        ("score", "MODEL", "FILE"),
        ("judge", "FILE"),
        ("lengths", "FILE", "--data", "OUT"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_the_line_names_the_file_the_line_and_the_flag(
    words: tuple[str, ...], name: str, model: str, tmp_path: Path, capsys: Capture
) -> None:
    meant = {"FILE": long_text(tmp_path, name), "MODEL": model, "OUT": str(tmp_path / "out")}
    line = fails(capsys, *(meant.get(word, word) for word in words), "--max-document", "9")
    assert f"{meant['FILE']}, " in line
    assert "line 1, is longer than 9 characters, the limit for a document" in line
    assert "--max-document can allow more" in line


def test_what_is_measured_on_says_how_to_prepare_it(
    model: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("bd3lm.io.reading.MAX_DOCUMENT", 9)
    line = fails(capsys, "eval", model, "--data", long_text(tmp_path, "a.jsonl"))
    assert "a.jsonl, line 1, is longer than 9 characters" in line
    assert "`bd3lm data prepare --max-document`, which can allow more" in line


def test_a_limit_of_nothing_is_refused(tmp_path: Path, capsys: Capture) -> None:
    words = ("data", "prepare", long_text(tmp_path, "a.txt"), str(tmp_path / "out"), "--tokenizer", "bytes")
    assert "max_document must be at least 1 character, got 0" in fails(capsys, *words, "--max-document", "0")


@pytest.mark.parametrize("suffix", ["", *COMPRESSIONS])
@pytest.mark.parametrize("kind", [".jsonl", ".txt"])
def test_a_document_at_the_limit_is_read_and_one_above_is_not(kind: str, suffix: str, tmp_path: Path) -> None:
    line = '{"text": "abcé"}' if kind == ".jsonl" else "line of text é"
    path = tmp_path / f"a{kind}{suffix}"
    data = f"{line}\n{line}".encode()
    path.write_bytes(COMPRESSIONS[suffix](data) if suffix else data)
    assert len(list(read_rows(path, text_unit="line", max_document=len(line)))) == 2
    with pytest.raises(ValueError, match="line 1, is longer than"):
        list(read_rows(path, text_unit="line", max_document=len(line) - 1))
    if kind == ".txt":
        assert len(list(read_rows(path, text_unit="file", max_document=2 * len(line) + 1))) == 1
        assert len(list(read_rows(path, text_unit="paragraph", max_document=2 * len(line) + 1))) == 1
        for unit in ("file", "paragraph"):
            with pytest.raises(ValueError, match="is longer than"):
                list(read_rows(path, text_unit=unit, max_document=2 * len(line)))


# --- files of text that are damaged ---------------------------------------------------------------


def text_file(suffix: str, texts: list[str], folder: Path) -> Path:
    if suffix == ".parquet":
        path = folder / "a.parquet"
        table = pytest.importorskip("pyarrow").table({"text": texts})
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
        return path
    path = folder / f"a.jsonl{suffix}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(COMPRESSIONS[suffix](lines) if suffix else lines)
    return path


@pytest.mark.sweep(8)
@pytest.mark.parametrize("turn", range(200))
def test_text_of_damaged_bytes_is_one_line_or_read(turn: int, tmp_path: Path) -> None:
    for chance in chances(turn):
        texts = [chance.choice(("a", "naïve 🙂", "x" * 500, "")) for _ in range(30)]
        path = text_file(chance.choice(("", *COMPRESSIONS, ".parquet")), texts, tmp_path)
        data = bytearray(path.read_bytes())
        for _ in range(chance.randint(1, 5)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.choice((len(data), chance.randrange(len(data))))])
        said = str(path)
        try:
            found = list(read_rows(path))
        except (ValueError, OSError) as error:
            said = one_line(error)
        else:
            assert all(isinstance(text, str) for text in found)
        assert str(path) in said
