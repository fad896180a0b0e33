"""Preparing: the same bytes for any number of workers and after any interruption, in bounded memory."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bd3lm.data import Tokenizer, TokenShards, byte_tokenizer, prepare, train_bpe
from bd3lm.data import encoding as encoding_module
from bd3lm.data.encoding import Encoder
from bd3lm.data.meta import Meta
from bd3lm.io.files import AtomicFile
from tests.data_room.documents import (
    EndlessCorpus,
    ListCorpus,
    contents,
    die,
    random_texts,
    run_python,
    small_corpus,
    start_python,
)

pytestmark = pytest.mark.sweep(3)

BYTES = byte_tokenizer()
CORPUS = small_corpus()
DOCUMENTS = sum(len(list(CORPUS.documents(split))) for split in CORPUS.splits)
SHARD_TOKENS = 3000


class Interrupted(BaseException):
    """Like a KeyboardInterrupt: nothing in between may catch it."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_module, "BATCH_CHARACTERS", 400)


def run(out: Path, corpus: ListCorpus = CORPUS, **options: Any) -> TokenShards:
    return prepare(corpus, BYTES, out, **{"shard_tokens": SHARD_TOKENS, **options})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The result of an uninterrupted run in one process."""
    out = tmp_path_factory.mktemp("expected")
    run(out)
    files = contents(out)
    assert len([name for name in files if name.startswith("train-") and name.endswith(".bin")]) >= 3
    return files


# --- what is written --------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_documents_are_framed_as_asked(tmp_path: Path, eos: bool, bos: bool) -> None:
    tokenizer = Tokenizer(BYTES.spec, BYTES.mask_id, eos_id=256, bos_id=7)
    shards = prepare(CORPUS, tokenizer, tmp_path, eos_between_documents=eos, bos_before_documents=bos)
    expected: list[int] = []
    for text in CORPUS.documents("train"):
        expected += [7] * bos + list(text.encode()) + [256] * eos
    assert shards.read("train", 0, shards.split("train").tokens).tolist() == expected
    assert shards.lengths("train").tolist() == [len(text.encode()) for text in CORPUS.documents("train")]


def test_batches_and_shards_do_not_change_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for characters, shard_tokens in ((1, 2000), (500, 1), (500, 2000), (10**6, 300), (10**6, 10**6)):
        monkeypatch.setattr(encoding_module, "BATCH_CHARACTERS", characters)
        shards = run(tmp_path / f"{characters}-{shard_tokens}", shard_tokens=shard_tokens)
        tokens = shards.read("train", 0, shards.split("train").tokens).tobytes()
        seen.add((tokens, shards.lengths("train").tobytes()))
    assert len(seen) == 1
    one_each = TokenShards(tmp_path / "500-1").split("train")
    assert len(one_each.shards) == one_each.documents


def test_some_splits_can_be_chosen(tmp_path: Path) -> None:
    assert run(tmp_path, splits=["valid"]).splits == ("valid",)
    assert not list(tmp_path.glob("train*"))


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, expected: dict[str, bytes], workers: int
) -> None:
    run(tmp_path, workers=workers)
    assert contents(tmp_path) == expected


def test_the_tokenizer_s_own_threads_are_off_for_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Spy(ListCorpus):
        def documents(self, split: str) -> Iterator[str]:
            seen.append(os.environ["TOKENIZERS_PARALLELISM"])
            return super().documents(split)

    for before in (None, "true"):
        if before is None:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        else:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        run(tmp_path / str(before), Spy({"train": ["a"]}))
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before
    assert len(seen) == 2


def test_a_bpe_goes_the_same_way(tmp_path: Path) -> None:
    tokenizer = train_bpe(random_texts(50), 300)
    shards = prepare(CORPUS, tokenizer, tmp_path, shard_tokens=300)
    ids = [tokenizer.encode(text) for text in CORPUS.documents("valid")]
    flat = [token for document in ids for token in [*document, tokenizer.eos_id]]
    assert shards.read("valid", 0, shards.split("valid").tokens).tolist() == flat


# --- interruptions ----------------------------------------------------------------------------------


def test_a_finished_folder_is_left_alone(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("something was written"))
    monkeypatch.setattr(CORPUS, "documents", lambda _: pytest.fail("something was read"), raising=False)
    run(tmp_path)
    assert contents(tmp_path) == expected


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> list[int]:
    """Make the call-th call of a function raise. Returns a list that counts the calls."""
    calls = [0]
    real: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == call + 1:
            raise Interrupted
        return real(*arguments)

    monkeypatch.setattr(owner, name, counted)
    return calls


def documents_done(out: Path) -> int:
    if not (out / "meta.json").exists():
        return 0
    return sum(split.documents for split in Meta.read(out).splits.values())


def count_texts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that counts the texts that are tokenized."""
    counted = [0]
    real = Encoder.__call__

    def counting(encoder: Encoder, texts: list[str]) -> Any:
        counted[0] += len(texts)
        return real(encoder, texts)

    monkeypatch.setattr(Encoder, "__call__", counting)
    return counted


@pytest.mark.parametrize("tidy", [True, False], ids=["tidied", "abrupt"])
@pytest.mark.parametrize(
    ("owner", "name"), [(os, "replace"), (os, "fsync"), (AtomicFile, "write"), (Encoder, "__call__")]
)
def test_an_interruption_at_any_point_loses_nothing_finished(
    tmp_path: Path, expected: dict[str, bytes], owner: object, name: str, tidy: bool
) -> None:
    """Each write, fsync, rename and batch is the last operation once, with and without cleanup after it."""
    point = 0
    while True:
        out = tmp_path / str(point)
        with pytest.MonkeyPatch.context() as patch:
            if not tidy:
                patch.setattr(AtomicFile, "discard", lambda _: None)
            calls = interrupt(patch, owner, name, point)
            try:
                run(out)
            except Interrupted:
                pass
            else:
                break
            assert calls[0] == point + 1
        finished = {file: data for file, data in contents(out).items() if file.endswith(".bin")}
        assert finished.items() <= expected.items()
        done = documents_done(out)
        with pytest.MonkeyPatch.context() as patch:
            tokenized = count_texts(patch)
            run(out)
        assert tokenized[0] == DOCUMENTS - done
        assert contents(out) == expected
        point += 1
    assert point > 10


def test_an_interruption_while_reading_keeps_the_finished_shards(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    texts = {split: list(CORPUS.documents(split)) for split in CORPUS.splits}

    class Breaking(ListCorpus):
        def documents(self, split: str) -> Iterator[str]:
            yield from texts[split][:45]
            raise Interrupted

    with pytest.raises(Interrupted):
        run(tmp_path, Breaking(texts))
    finished = {file: data for file, data in contents(tmp_path).items() if file.endswith(".bin")}
    assert 0 < len(finished) < sum(file.endswith(".bin") for file in expected)
    with pytest.raises(ValueError, match="was interrupted"):
        TokenShards(tmp_path)
    stamps = {file: (tmp_path / file).stat().st_mtime_ns for file in finished}
    run(tmp_path)
    assert contents(tmp_path) == expected
    assert stamps == {file: (tmp_path / file).stat().st_mtime_ns for file in finished}


def test_an_interrupted_run_can_go_on_with_more_workers(tmp_path: Path, expected: dict[str, bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, Encoder, "__call__", 5)
        with pytest.raises(Interrupted):
            run(tmp_path)
    run(tmp_path, workers=2)
    assert contents(tmp_path) == expected


@pytest.mark.parametrize("file", ["train-00001.bin", "train-00001.lengths.npy", "valid-00000.bin"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_missing_and_cut_files_are_made_again(
    tmp_path: Path, expected: dict[str, bytes], file: str, damage: str
) -> None:
    run(tmp_path)
    if damage == "missing":
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(expected[file][:-4])
    run(tmp_path)
    assert contents(tmp_path) == expected


def test_half_written_files_of_a_killed_writer_are_removed(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    (tmp_path / ".meta.json.4711.tmp").write_bytes(b"{")
    (tmp_path / ".notes.tmp").write_bytes(b"somebody's")
    run(tmp_path)
    assert contents(tmp_path) == {**expected, ".notes.tmp": b"somebody's"}


def test_without_locks_half_written_files_of_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".meta.json.4711.tmp").write_bytes(b"{")
    monkeypatch.setattr("fcntl.flock", flock)
    run(tmp_path)
    assert (tmp_path / ".meta.json.4711.tmp").exists()


KILLED = """
import sys
from bd3lm.data import byte_tokenizer, encoding, prepare
from tests.data_room.documents import SlowCorpus, small_corpus

if __name__ == "__main__":
    encoding.BATCH_CHARACTERS = 400
    corpus = small_corpus()
    corpus = SlowCorpus({s: list(corpus.documents(s)) for s in corpus.splits}, seconds=0.02)
    prepare(corpus, byte_tokenizer(), sys.argv[1], shard_tokens=3000, workers=int(sys.argv[2]))
"""


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.slow
def test_kill_9_loses_nothing_finished_and_leaves_no_worker(
    tmp_path: Path, expected: dict[str, bytes], workers: int
) -> None:
    process = start_python(KILLED, tmp_path, workers)
    wait_until(lambda: (tmp_path / "train-00000.bin").exists())
    orphans = children(process.pid)
    assert len(orphans) >= workers - 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{orphan}").exists() for orphan in orphans))
    killed = contents(tmp_path)
    assert killed != expected
    run(tmp_path)
    assert contents(tmp_path) == expected


def test_a_worker_that_dies_is_one_clear_line(tmp_path: Path, expected: dict[str, bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding_module, "_encode_in_worker", die)
        with pytest.raises(ChildProcessError, match="a worker process ended before its work was done"):
            run(tmp_path, workers=2)
    run(tmp_path)
    assert contents(tmp_path) == expected


def test_processes_that_cannot_start_are_one_clear_line(tmp_path: Path) -> None:
    """Workers of a script from standard input have no file to start from."""
    script = (
        "from bd3lm.data import PydocCorpus, prepare, train_bpe\n"
        "tokenizer = train_bpe(['some words'], 260)\n"
        f"prepare(PydocCorpus(), tokenizer, {str(tmp_path / 'out')!r}, workers=2, progress=False)\n"
    )
    command = [sys.executable, "-"]
    ended = subprocess.run(command, input=script, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert "ChildProcessError: a worker process ended before its work was done" in ended.stderr


# --- other inputs, other folders --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": small_corpus(seed=1)}, "source 'list', whose text has changed since"),
        ({"eos_between_documents": False}, "eos_between_documents True, not False"),
        ({"bos_before_documents": True}, "bos_before_documents False, not True"),
        ({"shard_tokens": 3001}, "shard_tokens 3000, not 3001"),
        ({"splits": ["train"]}, r"splits \('train', 'valid'\), not \('train',\)"),
    ],
)
def test_other_inputs_into_the_same_folder_are_refused(
    tmp_path: Path, expected: dict[str, bytes], options: dict[str, Any], message: str
) -> None:
    run(tmp_path)
    with pytest.raises(ValueError, match=f"was prepared from other inputs: {message}"):
        run(tmp_path, **options)
    assert contents(tmp_path) == expected


def test_another_tokenizer_into_the_same_folder_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ValueError, match="other inputs: tokenizer_fingerprint"):
        prepare(CORPUS, train_bpe(random_texts(50), 300), tmp_path, shard_tokens=SHARD_TOKENS)


@pytest.mark.parametrize("finished", [False, True])
def test_other_inputs_start_over_only_where_no_shard_is_finished(
    tmp_path: Path, expected: dict[str, bytes], finished: bool
) -> None:
    """As after an unreadable line was corrected, which changes the source."""

    class BadLine(ListCorpus):
        def documents(self, split: str) -> Iterator[str]:
            yield from list(super().documents(split))[: 50 if finished else 5]
            raise ValueError("a bad line")

    with pytest.raises(ValueError, match="a bad line"):
        run(tmp_path, BadLine({split: [*CORPUS.documents(split), "bad"] for split in CORPUS.splits}))
    if finished:
        with pytest.raises(ValueError, match="was prepared from other inputs"):
            run(tmp_path)
    else:
        run(tmp_path)
        assert contents(tmp_path) == expected


@pytest.mark.parametrize("damage", ["missing", "no configuration", "cut", "another"])
def test_the_tokenizer_of_a_finished_folder_is_restored(
    tmp_path: Path, expected: dict[str, bytes], damage: str
) -> None:
    run(tmp_path)
    if damage == "another":
        train_bpe(random_texts(50), 300).save(tmp_path)
    elif damage == "cut":
        (tmp_path / "tokenizer.json").write_bytes(expected["tokenizer.json"][:100])
    else:
        (tmp_path / ("tokenizer.json" if damage == "missing" else "tokenizer_config.json")).unlink()
    if damage == "missing":
        with pytest.raises(FileNotFoundError, match="is missing: prepare the folder again"):
            _ = TokenShards(tmp_path).tokenizer
    assert run(tmp_path).tokenizer == BYTES
    assert contents(tmp_path) == expected


def test_a_source_may_change_its_name(tmp_path: Path, expected: dict[str, bytes]) -> None:
    run(tmp_path)
    renamed = small_corpus()
    renamed.name = "moved"
    run(tmp_path, renamed)
    assert contents(tmp_path) == expected


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    class Nested(ListCorpus):
        def documents(self, split: str) -> Iterator[str]:
            run(tmp_path)
            return super().documents(split)

    with pytest.raises(BlockingIOError, match="another process is writing to this folder"):
        run(tmp_path, Nested({"train": ["a"]}))


def test_a_folder_with_foreign_bin_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(FileExistsError, match=r"holds \.bin files but no meta\.json"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"shard_tokens": 0}, "shard_tokens must be at least 1, got 0"),
        ({"splits": []}, "splits must name at least one"),
        ({"splits": ["train", "train"]}, "splits must name at least one split, each once"),
        ({"splits": ["test"]}, "split must be one of train, valid for corpus 'list', got 'test'"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["eos_between_documents", "bos_before_documents"])
def test_a_tokenizer_without_the_token_is_refused(tmp_path: Path, option: str) -> None:
    bare = Tokenizer(BYTES.spec, BYTES.mask_id, eos_id=None, bos_id=None)
    options = {"eos_between_documents": False, option: True}
    with pytest.raises(ValueError, match=f"^{option} must be False"):
        prepare(CORPUS, bare, tmp_path, **options)


def test_a_split_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split 'valid' of corpus 'list' has no documents"):
        run(tmp_path, ListCorpus({"train": ["a"], "valid": []}))


# --- the disk, the memory, the terminal -------------------------------------------------------------


def test_a_full_disk_is_one_clear_line_and_the_work_goes_on_after(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    written = [0]

    def full(file: AtomicFile, data: bytes) -> None:
        written[0] += len(data)
        if written[0] > 12_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        file._file.write(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AtomicFile, "write", full)
        with pytest.raises(OSError, match="the disk is full; finished files are safe") as raised:
            run(tmp_path)
    assert raised.value.filename == str(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    run(tmp_path)
    assert contents(tmp_path) == expected


def test_a_file_system_that_refuses_leaves_the_folder_usable(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """A real write failure of the system, through a limit on file size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3800, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            run(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*.tmp"))
    run(tmp_path)
    assert contents(tmp_path) == expected


MEASURED = """
import resource, sys
from bd3lm.data import Tokenizer, byte_tokenizer, prepare
from tests.data_room.documents import EndlessCorpus

class Quick(Tokenizer):
    def encode_batch(self, texts):
        return [list(text.encode()) for text in texts]

b = byte_tokenizer()
quick = Quick(b.spec, b.mask_id, b.eos_id, b.bos_id)
prepare(EndlessCorpus(int(sys.argv[2])), quick, sys.argv[1], shard_tokens=1_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    unit = 1 if sys.platform == "darwin" else 1024
    small, large = (
        unit * int(run_python(MEASURED, tmp_path / str(size), size)) for size in (2_000_000, 20_000_000)
    )
    assert (tmp_path / "20000000" / "train-00018.bin").exists()
    assert large - small < 6_000_000  # of 18 MB more text, 36 MB more tokens


def test_documents_are_read_no_further_ahead_than_needed(tmp_path: Path) -> None:
    """Work in progress is bounded: with two workers a few batches, not the whole corpus."""
    read = [0]
    furthest = [0]

    class Counting(ListCorpus):
        def documents(self, split: str) -> Iterator[str]:
            for document in super().documents(split):
                read[0] += len(document)
                yield document

    corpus = Counting({"train": ["x" * 100] * 200})
    tokenizer = byte_tokenizer()
    encoder = Encoder(tokenizer, "uint16", (), ())
    with encoding_module.encoding(encoder, 2) as encode:
        taken = 0
        for batch in encode(corpus.documents("train")):
            furthest[0] = max(furthest[0], read[0] - taken)
            taken += len(batch.tokens)
    assert taken == 20_000
    assert furthest[0] <= 400 * (2 * encoding_module.BATCHES_AHEAD + 2)


def test_progress_is_quiet_unless_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    run(tmp_path / "shown", progress=True)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "train" in printed.err
    assert "tokens" in printed.err


def test_invalid_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        run(tmp_path, ListCorpus({"train": ["a \ud800"]}))


def test_tokens_of_an_endless_corpus(tmp_path: Path) -> None:
    shards = prepare(EndlessCorpus(5000), BYTES, tmp_path)
    text = "".join(f"{i:010d}" * 100 for i in range(5))
    tokens = shards.read("train", 0, shards.split("train").tokens)
    assert bytes(np.delete(tokens, np.flatnonzero(tokens == 256)).astype(np.uint8)).decode() == text
