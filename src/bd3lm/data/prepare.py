"""Text to token shards: parallel, bounded in memory, reproducible to the byte, and resumable.

This process reads documents in order. They are tokenized in batches, by worker processes if there are more
than one. Results are taken in the order of the documents, so the number of workers changes nothing. At most a
few batches per worker are in memory. A shard ends at the first document end after `shard_tokens` tokens; then
meta.json is rewritten. After an interruption the finished shards stay, their documents are skipped (read, not
tokenized), and the result is bit for bit that of an uninterrupted run.
"""

import io
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bd3lm.data.answers import ChatFormat, ConversationEncoder
from bd3lm.data.corpus import Corpus
from bd3lm.data.encoding import DocumentEncoder, Encode, Encoded, Encoder, encoding
from bd3lm.data.meta import META_FILE, Inputs, Meta, Shard, Split, dtype_for
from bd3lm.data.shards import TokenShards, load_lengths, open_answers, open_shard
from bd3lm.data.tokenizer_files import load_tokenizer
from bd3lm.data.tokenizers import CONFIG_FILE, Tokenizer
from bd3lm.io.console import Console
from bd3lm.io.files import (
    AtomicFile,
    full_disk_explained,
    local_path,
    make_folder,
    only_writer,
    remove_leftovers,
    write_atomically,
)

SHARD_TOKENS = 1 << 26  # 128 MB of uint16; an interruption repeats the tokenizing of at most this many tokens


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    splits: Sequence[str] | None = None,
    workers: int = 1,
    eos_between_documents: bool = True,
    bos_before_documents: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool | None = None,
    chat: ChatFormat | None = None,
) -> TokenShards:
    """Tokenize the `splits` of a corpus (all by default) into shards in the folder `out`, and open it.

    EOS follows every document, and BOS precedes it if requested. `chat` says how a corpus of conversations
    becomes tokens. The shards then record which tokens belong to answers, and the template is saved with the
    tokenizer. If a document turns out to be unusable before the first shard is finished, a new folder is
    removed.

    A finished folder with the same inputs is left alone; only a missing or different tokenizer is written
    again. If the work was interrupted, or shards are missing or cut off, it continues. If a finished shard
    was made from other inputs, that is an error.

    More than one worker spawns processes, so a script needs multiprocessing's `if __name__ == "__main__":`.
    `progress` shows a bar, by default only on a terminal.
    """
    splits = tuple(corpus.splits if splits is None else splits)
    for split in splits:
        corpus.check_split(split)
    if not splits or len(set(splits)) < len(splits):
        raise ValueError(f"splits must name at least one split, each once, got {splits}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, got {shard_tokens}")
    if eos_between_documents and tokenizer.eos_id is None:
        raise ValueError(
            "eos_between_documents must be False for a tokenizer without an end-of-sequence token"
        )
    if bos_before_documents and tokenizer.bos_id is None:
        raise ValueError(
            "bos_before_documents must be False for a tokenizer without a beginning-of-sequence token"
        )
    if (chat is not None) != corpus.holds_conversations:
        raise ValueError(
            f"chat must be given for conversations and only for them, but {corpus.name} holds "
            f"{'conversations' if corpus.holds_conversations else 'text'}"
        )
    if chat is not None:
        eos_between_documents = bos_before_documents = False  # a conversation already has all of its tokens
        if chat.template is not None:
            tokenizer = replace(tokenizer, chat_template=chat.template)
    out = local_path(out)
    inputs = Inputs(
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        source=corpus.description,
        source_fingerprint=corpus.fingerprint,
        eos_between_documents=eos_between_documents,
        bos_before_documents=bos_before_documents,
        splits=splits,
        shard_tokens=shard_tokens,
        chat=None if chat is None else chat.record,
    )
    encoder: DocumentEncoder
    if chat is not None:
        encoder = ConversationEncoder(tokenizer, dtype_for(tokenizer.vocab_size), chat)
    else:
        encoder = Encoder(
            tokenizer,
            dtype=dtype_for(tokenizer.vocab_size),
            before=(tokenizer.bos_id,) if bos_before_documents and tokenizer.bos_id is not None else (),
            after=(tokenizer.eos_id,) if eos_between_documents and tokenizer.eos_id is not None else (),
            holds_ids=corpus.holds_ids,
        )
    is_new = chat is not None and not out.exists()
    make_folder(out)
    with _nothing_left(out, is_new), only_writer(out) as alone, full_disk_explained(out):
        if alone:
            remove_leftovers(out)
        meta = _begin(out, inputs)
        if not (meta.complete and _holds_tokenizer(out, tokenizer)):
            tokenizer.save(out)
        if not meta.complete:
            with _bar(progress) as bar, encoding(encoder, workers) as encode:
                for split in splits:
                    if not meta.splits[split].complete:
                        meta = _prepare_split(out, meta, split, corpus, encode, bar)
    return TokenShards(out)


@contextmanager
def _nothing_left(out: Path, is_new: bool) -> Iterator[None]:
    """Remove a new folder if one of its documents cannot be used, unless a shard is finished."""
    try:
        yield
    except ValueError:
        if is_new and not any(out.glob("*.bin")):
            shutil.rmtree(out, ignore_errors=True)
        raise


def _begin(out: Path, inputs: Inputs) -> Meta:
    """The current state of the work: shards that earlier calls finished and that are still whole."""
    empty = {split: Split.of((), complete=False) for split in inputs.splits}
    new = Meta(dtype=dtype_for(inputs.vocab_size), inputs=inputs, splits=empty)
    if not (out / META_FILE).exists():
        if any(out.glob("*.bin")):
            raise FileExistsError(f"{out} holds .bin files but no {META_FILE}: choose another folder")
        new.write(out)
        return new
    meta = Meta.read(out)
    if differences := meta.inputs.differences(inputs):
        if any(split.shards for split in meta.splits.values()):
            raise ValueError(
                f"{out} was prepared from other inputs: {'; '.join(differences)}; choose another folder"
            )
        new.write(out)  # no finished work is lost, for example after an unreadable line was corrected
        return new
    kept = {name: _kept(out, meta.splits.get(name, nothing), meta) for name, nothing in empty.items()}
    return replace(meta, splits=kept)


def _holds_tokenizer(out: Path, tokenizer: Tokenizer) -> bool:
    """Whether the right tokenizer is next to its shards, which cannot be used without it."""
    try:
        there = load_tokenizer(out)
    except (FileNotFoundError, ValueError):  # missing, or damaged
        return False
    same = (there.fingerprint, there.chat_template) == (tokenizer.fingerprint, tokenizer.chat_template)
    return same and (out / CONFIG_FILE).is_file()


def _kept(out: Path, split: Split, meta: Meta) -> Split:
    """As many of the first shards as are whole."""
    kept: list[Shard] = []
    for shard in split.shards:
        try:
            open_shard(out, shard, meta)
            load_lengths(out, shard, meta.inputs.around_documents)
            if meta.inputs.chat is not None:
                open_answers(out, shard)
        except (FileNotFoundError, ValueError):
            return Split.of(kept, complete=False)
        kept.append(shard)
    return split


def _prepare_split(out: Path, meta: Meta, name: str, corpus: Corpus, encode: Encode, bar: "_Bar") -> Meta:
    shards = list(meta.splits[name].shards)
    done = meta.splits[name].documents
    bar.start(name, meta.splits[name], count=lambda: corpus.count(name))
    documents = islice(corpus.documents(name), done, None)
    writer: _ShardWriter | None = None

    def finish(shard: "_ShardWriter | None", *, complete: bool) -> Meta:
        if shard is not None:
            shards.append(shard.commit())
        now = replace(meta, splits={**meta.splits, name: Split.of(shards, complete=complete)})
        now.write(out)
        return now

    try:
        for batch in encode(documents):
            bar.advance(batch)
            while len(batch.lengths):
                if writer is None:
                    writer = _ShardWriter(out / f"{name}-{len(shards):05d}.bin", meta.inputs.shard_tokens)
                batch = writer.take(batch)
                if writer.full:
                    meta, writer = finish(writer, complete=False), None
        if writer is None and not shards:
            raise ValueError(f"split {name!r} of corpus {corpus.name!r} has no documents")
        meta, writer = finish(writer, complete=True), None
    finally:
        if writer is not None:
            writer.discard()
    return meta


class _ShardWriter:
    """The shard being written. Tokens go to disk as they come; document lengths wait until the end."""

    def __init__(self, path: Path, shard_tokens: int) -> None:
        self._file = AtomicFile(path)
        self._hash = sha256()
        self._room = shard_tokens
        self._tokens = 0
        self._text_bytes = 0
        self._lengths: list[NDArray[np.uint32]] = []
        self._answers: list[NDArray[np.bool_]] = []

    @property
    def full(self) -> bool:
        return self._tokens >= self._room

    def take(self, batch: Encoded) -> Encoded:
        """Write documents until the shard is full; return the rest."""
        fitting = int(np.searchsorted(batch.ends, self._room - self._tokens)) + 1
        mine, rest = batch.split_at(min(fitting, len(batch.ends)))
        data = mine.tokens.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._tokens += len(mine.tokens)
        self._text_bytes += int(mine.text_bytes.sum())
        self._lengths.append(mine.lengths)
        if mine.answers is not None:
            self._answers.append(mine.answers)
        return rest

    def commit(self) -> Shard:
        lengths = np.concatenate(self._lengths)
        answers = np.packbits(np.concatenate(self._answers), bitorder="little") if self._answers else None
        shard = Shard(
            file=self._file.path.name,
            documents=len(lengths),
            tokens=self._tokens,
            text_bytes=self._text_bytes,
            sha256=self._hash.hexdigest(),
            answers_sha256=None if answers is None else sha256(answers.tobytes()).hexdigest(),
        )
        if answers is not None:
            write_atomically(self._file.path.with_name(shard.answers_file), answers.tobytes())
        array = io.BytesIO()
        np.save(array, lengths.astype("<u4"), allow_pickle=False)
        write_atomically(self._file.path.with_name(shard.lengths_file), array.getvalue())
        self._file.commit()
        return shard

    def discard(self) -> None:
        self._file.discard()


class _Bar:
    """Progress by documents, with the text read and the tokens written; does nothing if no bar is wanted."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tokens = self._text_bytes = 0

    def start(self, split: str, done: Split, *, count: Callable[[], int | None]) -> None:
        self._tokens, self._text_bytes = done.tokens, done.text_bytes
        self._task = self._progress.add_task(
            f"tokenizing {split}", total=None, completed=done.documents, counts="counting"
        )
        self._progress.update(self._task, total=count(), counts="")  # counting may read the whole text

    def advance(self, batch: Encoded) -> None:
        self._tokens += len(batch.tokens)
        self._text_bytes += int(batch.text_bytes.sum())
        counts = f"{self._text_bytes / 1e6:,.1f} MB, {self._tokens / 1e6:,.2f} M tokens"
        self._progress.update(self._task, advance=len(batch.lengths), counts=counts)


@contextmanager
def _bar(wanted: bool | None) -> Iterator[_Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("documents  {task.fields[counts]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    wanted = sys.stderr.isatty() if wanted is None else wanted
    with Progress(*columns, console=Console(stderr=True), disable=not wanted) as progress:
        yield _Bar(progress)
