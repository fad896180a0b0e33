"""From files of conversations to shards with marked answers: reproducible bytes, and bad input."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bd3lm.data import ChatFormat, ConversationCorpus, TokenShards, byte_tokenizer, prepare, verify
from bd3lm.data import encoding as encoding_module
from bd3lm.data.answers import ConversationEncoder
from bd3lm.data.chat import Message, answered
from bd3lm.data.templates import PLAIN
from bd3lm.io.files import AtomicFile
from tests.data_room.chats import chats, written
from tests.data_room.documents import contents, small_corpus

pytestmark = pytest.mark.sweep(3)

BYTES = byte_tokenizer()
CHAT = ChatFormat(template=PLAIN)
ROWS = chats(60)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_module, "BATCH_CHARACTERS", 900)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("chats") / "chats.jsonl", ROWS)


def run(file: Path, out: Path, **options: Any) -> TokenShards:
    return prepare(
        ConversationCorpus(file, held_out=9), BYTES, out, **{"chat": CHAT, "shard_tokens": 3000, **options}
    )


@pytest.fixture(scope="module")
def expected(file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected")
    run(file, out)
    files = contents(out)
    assert sum(name.startswith("train-") and name.endswith(".answers") for name in files) >= 3
    return files


def by_hand(row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    messages = [Message(each["role"], each["content"]) for each in row["messages"]]
    return answered(PLAIN, messages, BYTES)


def test_shards_hold_the_tokens_of_conversations_and_their_answers(file, tmp_path):
    shards = run(file, tmp_path / "out")
    for split, rows in (("train", ROWS[:-9]), ("valid", ROWS[-9:])):
        said = [by_hand(row) for row in rows]
        total = shards.split(split).tokens
        tokens = [token for each, _ in said for token in each]
        learned = np.array([flag for _, flags in said for flag in flags])
        assert shards.read(split, 0, total).tolist() == tokens
        assert (shards.answers(split, 0, total) == learned).all()
        assert shards.lengths(split).tolist() == [len(each) for each, _ in said]
        for start, stop in ((0, 0), (3, 5), (8, 16), (7, 3333), (2990, 3100), (total - 1, total)):
            if stop <= total:
                assert (shards.answers(split, start, stop) == learned[start:stop]).all()
    assert shards.tokenizer.chat_template == PLAIN
    text = "".join(each["content"] for row in ROWS[:-9] for each in row["messages"])
    assert shards.split("train").text_bytes == len(text.encode())


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_nothing(file, expected, workers, tmp_path):
    run(file, tmp_path, workers=workers)
    assert contents(tmp_path) == expected


class Interrupted(BaseException):
    """Like a KeyboardInterrupt: nothing in between may catch it."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [(os, "replace"), (AtomicFile, "write"), (ConversationEncoder, "__call__")],
)
def test_an_interruption_at_any_point_loses_nothing_finished(file, expected, owner, name, tmp_path):
    point = 0
    while True:
        out = tmp_path / str(point)
        real, calls = getattr(owner, name), [0]

        def counted(*arguments: Any, real: Any = real, calls: list[int] = calls, point: int = point) -> Any:
            calls[0] += 1
            if calls[0] == point + 1:
                raise Interrupted
            return real(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, counted)
            patch.setattr(AtomicFile, "discard", lambda _: None)
            try:
                run(file, out)
            except Interrupted:
                pass
            else:
                break
        finished = {name: data for name, data in contents(out).items() if name.endswith(".bin")}
        assert finished.items() <= expected.items()
        run(file, out)
        assert contents(out) == expected
        point += 1
    assert point > 5


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damaged_answers_are_found_and_made_again(file, expected, damage, tmp_path):
    run(file, tmp_path)
    path = tmp_path / "train-00001.answers"
    data = expected[path.name]
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(
        (ValueError, FileNotFoundError), match=r"train-00001\.answers .*prepare the folder again"
    ):
        TokenShards(tmp_path).check()
    wrong = [each for each in verify(tmp_path) if each.problem is not None]
    assert [each.file for each in wrong] == ["train-00001.bin"]
    assert "train-00001.answers" in str(wrong[0].problem)
    run(file, tmp_path)
    assert contents(tmp_path) == expected


def test_a_folder_has_one_template_and_one_choice_of_answers(file, expected, tmp_path):
    run(file, tmp_path)
    for other, said in (
        (ChatFormat(template=PLAIN + " "), "other inputs: another chat template"),
        (ChatFormat(template=PLAIN, answers="last"), "answers 'all', not 'last'"),
    ):
        with pytest.raises(ValueError, match=said):
            run(file, tmp_path, chat=other)
    with pytest.raises(ValueError, match="conversations, not text"):
        prepare(small_corpus(), BYTES, tmp_path)
    assert contents(tmp_path) == expected


def test_folders_of_texts_record_nothing_about_answers(tmp_path):
    """Folders prepared before this feature keep their fingerprints, which runs remember."""
    shards = prepare(small_corpus(train=40, valid=6), BYTES, tmp_path, progress=False)
    assert shards.fingerprint == "6233e8bf4b3dcdf838832cf81b2e708c16f757d94700dca50ea9859dace8378b"
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert "chat" not in meta["inputs"]
    assert "answers_sha256" not in meta["splits"]["train"]["shards"][0]
    with pytest.raises(ValueError, match="hold texts, which have no answers"):
        shards.answers("train", 0, 1)
    with pytest.raises(ValueError, match="chat must be given for conversations and only for them"):
        prepare(small_corpus(), BYTES, tmp_path / "other", chat=CHAT)


def test_a_meta_that_lies_about_answers_is_refused(file, expected, tmp_path):
    run(file, tmp_path)
    path = tmp_path / "meta.json"
    for where, name, value in (
        (("inputs",), "chat", None),
        (("splits", "train", "shards", 0), "answers_sha256", None),
        (("splits", "train", "shards", 0), "answers_sha256", "x"),
        (("inputs",), "eos_between_documents", True),
    ):
        meta = json.loads(expected["meta.json"])
        part = meta
        for key in where:
            part = part[key]
        part[name] = value
        path.write_text(json.dumps(meta))
        with pytest.raises(ValueError, match=r"does not describe token shards") as caught:
            TokenShards(tmp_path)
        assert "\n" not in str(caught.value)


# --- files ---


def test_packed_and_parquet_files_hold_the_same(file, tmp_path):
    import pyarrow
    from pyarrow import parquet

    written(tmp_path / "chats.jsonl.gz", ROWS)
    columns = {"messages": [row["messages"] for row in ROWS], "id": list(range(60))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "chats.parquet", row_group_size=7)
    expected = list(ConversationCorpus(file, held_out=0).documents("train"))
    for name in ("chats.jsonl.gz", "chats.parquet"):
        found = list(ConversationCorpus(tmp_path / name, held_out=0).documents("train"))
        assert [json.loads(each)[1:] for each in found] == [json.loads(each)[1:] for each in expected]


@pytest.mark.slow
def test_no_row_of_parquet_takes_much_memory(tmp_path):
    """A text stored once and used a million times: 20 KB that would become 20 GB."""
    import pyarrow
    from pyarrow import parquet

    turn = {"role": "user", "content": "x" * 20_000}
    rows = pyarrow.array(
        [[turn] * 100_000],
        pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])),
    )
    parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 200_000
    with pytest.raises(ValueError, match=r"a\.parquet, row 1, is longer than 10,000,000 characters"):
        list(ConversationCorpus(tmp_path / "a.parquet", held_out=0).documents("train"))


def test_names_say_splits_and_the_last_are_held_out(tmp_path):
    written(tmp_path / "train.jsonl", ROWS[:5])
    written(tmp_path / "valid.jsonl", ROWS[5:7])
    corpus = ConversationCorpus(tmp_path)
    assert [len(list(corpus.documents(split))) for split in corpus.splits] == [5, 2]
    assert ConversationCorpus(tmp_path, held_out=3).count("valid") == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3, is not JSON: "),
        ("[1, 2]", "line 3, must be an object with fields, got list"),
        ('{"text": "x"}', "line 3, must have the fields of a conversation"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "line 3, has no message of the assistant"),
        ('{"messages": [{"role": "x", "content": "q"}]}', "line 3, must have one of the roles "),
        ("[" * 100_000, "line 3, is JSON nested too deeply to be read"),
    ],
)
def test_an_invalid_line_is_named_and_nothing_is_written(line, said, tmp_path):
    file = written(tmp_path / "bad.jsonl", ROWS[:2])
    with file.open("a") as opened:
        opened.write(line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl") as caught:
        prepare(ConversationCorpus(file, held_out=0), BYTES, tmp_path / "out", chat=CHAT)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        (ChatFormat(template=None), "needs a chat template, which this tokenizer does not have"),
        (ChatFormat(template="{% for"), "the chat template of the model cannot be used"),
        (
            ChatFormat(template="{{ raise_exception('no') }}"),
            "the chat template of the model cannot be used: no",
        ),
        (ChatFormat(template=PLAIN, longest=10), "tokens, more than the limit of 10"),
    ],
)
def test_a_conversation_that_cannot_be_tokenized_is_named_and_nothing_is_written(chat, said, file, tmp_path):
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 1: ") as caught:
        prepare(ConversationCorpus(file, held_out=0), BYTES, tmp_path / "out", chat=chat)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_other_formats_cannot_hold_conversations(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"a\.txt must be \.jsonl or \.parquet, to hold conversations"):
        ConversationCorpus(tmp_path / "a.txt")


@pytest.mark.parametrize("begin", [True, False])
def test_a_text_and_its_continuation_need_no_template(begin, tmp_path):
    file = written(tmp_path / "texts.jsonl", [{"prompt": "One, two,", "completion": " three."}] * 2)
    shards = prepare(
        ConversationCorpus(file, held_out=0),
        BYTES,
        tmp_path / "out",
        chat=ChatFormat(template=None, begin=begin),
    )
    given = [BYTES.bos_id] * begin + list(b"One, two,")
    learned = [*b" three.", BYTES.eos_id]
    assert shards.read("train", 0, shards.split("train").tokens).tolist() == [*given, *learned] * 2
    flags = [False] * len(given) + [True] * len(learned)
    assert shards.answers("train", 0, 2 * len(flags)).tolist() == flags * 2
    assert shards.tokenizer.chat_template is None
