"""The text to measure a model on, as wrapped sequences: the run's own data, token shards or a corpus."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from bd3lm.commands.shared.skipped import say_skipped
from bd3lm.data import (
    CORPORA,
    OrderedBatches,
    PackedConversations,
    Packing,
    Tokenizer,
    TokenShards,
    WrappedTokens,
    load_corpus,
    prepare,
)
from bd3lm.data.folders import find_files, split_by_name
from bd3lm.data.meta import META_FILE
from bd3lm.io.files import local_path
from bd3lm.io.reading import DocumentTooLong

if TYPE_CHECKING:  # texts are checked before torch is loaded, and these imports load it
    from bd3lm.commands.shared.subjects import Subject
    from bd3lm.objectives import TokenBatch


@dataclass(frozen=True)
class Sequences:
    """A text as sequences of one length, by default the model's context, without the incomplete last one."""

    name: str
    split: str
    rows: WrappedTokens | PackedConversations
    number: int
    eos_between_documents: bool
    bos_eos: bool = False
    """Whether BOS and EOS surround each sequence. Both count toward the context."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokens: equal for runs that read the same data."""
        return self.rows.shards.fingerprint

    def batches(self, subject: "Subject", batch_size: int) -> "Iterator[TokenBatch]":
        """Batches on the model's device, scored as in training."""
        for batch in OrderedBatches(self.rows, rows=batch_size, limit=self.number):
            yield batch.to(subject.device)

    def text_bytes(self, subject: "Subject") -> int | None:
        """The number of bytes of the scored tokens; None without a tokenizer."""
        tokenizer = subject.model.tokenizer
        if tokenizer is None:
            return None
        if isinstance(self.rows, PackedConversations):
            return self._answer_bytes(self.rows, tokenizer)
        first = int(not subject.model.config.method.score_first)
        found, before = 0, np.empty(0, np.int64)
        for index in range(self.number):
            row = self.rows[[index]][0]
            found += tokenizer.text_bytes(row[first:], before=[*before, *row[:first]])
            before = row
        return found

    def _answer_bytes(self, rows: PackedConversations, tokenizer: "Tokenizer") -> int:
        """The number of bytes of the answers, each decoded after the text before it."""
        found = 0
        for index in range(self.number):
            batch = rows.batch([index])
            tokens, scored = batch.tokens[0].numpy(), batch.scored[0].numpy()
            edges = np.flatnonzero(np.diff(scored, prepend=False, append=False)).tolist()
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                found += tokenizer.text_bytes(tokens[begin:end], before=tokens[max(0, begin - 16) : begin])
        return found


def check_texts(data: Iterable[str | None], field: str | None = None) -> None:
    """Refuse paths that hold no text, before any text is measured; also a `field` if no text comes from a
    file."""
    files = [source for source in data if source is not None and _is_of_files(source)]
    for source in files:
        say_skipped(load_corpus(source))  # finds the files without reading them
    if field is not None and not files:
        raise ValueError(f"--field is for text files, and no text to measure on is one, got {field!r}")


def _is_of_files(data: str) -> bool:
    return data not in CORPORA and not _is_shards(data)


def _is_shards(data: str) -> bool:
    return (local_path(data) / META_FILE).is_file()


@contextmanager
def open_sequences(
    subject: "Subject",
    data: str | None,
    *,
    split: str | None = None,
    field: str | None = None,
    eos_between_documents: bool | None = None,
    bos_eos: bool = False,
    limit: int | None = None,
    context: int | None = None,
    alone: bool = False,
) -> Iterator[Sequences]:
    """Open a text to measure a model on.

    `data` is a folder of token shards, or a corpus as files or by name, which is tokenized on the fly with
    EOS after each document, unless told otherwise. None means the held-out text of the model's own run.
    `split` defaults to held-out text, else to everything. `field` names the text in JSON lines and parquet.
    `limit` takes only the first sequences; `context` is their length, by default the network's. Of
    conversations only the answers are scored, with several conversations in a sequence, or with `alone` one.

    A run that was trained on sequences between BOS and EOS is measured on such sequences, whatever the text.
    A model without its run does not know how it was trained: `bos_eos` says that it was trained this way.
    """
    from bd3lm.reports.content import HELD_OUT

    if limit is not None and limit < 1:
        raise ValueError(f"sequences must be at least 1, got {limit}")
    with TemporaryDirectory() as scratch:
        if data is None:
            shards = subject.shards()
        elif _is_shards(data):
            shards = TokenShards(data)
        else:
            eos = eos_between_documents is not False
            shards, split = _tokenize(subject, data, split, field, eos, Path(scratch))
        name = data or f"the data of {subject.name}"
        _check_tokenizer(subject, shards, name)
        _check_eos(shards, eos_between_documents, name)
        split = split or next((each for each in HELD_OUT if each in shards.splits), shards.splits[0])
        if context is None and shards.meta.inputs.chat is not None and subject.recipe is not None:
            context = subject.recipe.data.context  # the size that conversations were packed into
        context = _length(subject, context)
        bos_eos = bos_eos or (subject.recipe is not None and subject.recipe.data.bos_eos)
        rows = _rows(subject, shards, split, context, bos_eos, alone)
        if not len(rows) and shards.meta.inputs.chat is not None:
            raise ValueError(f"{name} cannot be measured on: {rows.why_empty}")
        if not len(rows):
            frame = " less BOS and EOS" if bos_eos else ""
            is_shorter = context < subject.model.config.network.context
            what = f"--context{frame}" if is_shorter else f"the network's context{frame} (or give --context)"
            raise ValueError(
                f"{name} must hold at least one sequence of {context - 2 * bos_eos} tokens, {what}, got "
                f"{shards.split(split).tokens} tokens in split {split!r}"
            )
        number = len(rows) if limit is None else min(limit, len(rows))
        yield Sequences(name, split, rows, number, shards.meta.inputs.eos_between_documents, bos_eos)


def settings_of_reading(text: Sequences, subject: "Subject", flags: Any) -> dict[str, Any]:
    """How a command read a text, for its record: `eval` and `acceptance` say it in the same way."""
    return {
        "eos_between_documents": text.eos_between_documents,
        "context": text.rows.context,
        "batch_size": flags.batch_size,
        "dtype": subject.dtype,
        "tokenizer": subject.tokenizer,
        "limit": flags.sequences,
        **({"bos_eos": True} if text.bos_eos else {}),
        **({} if flags.field is None else {"field": flags.field}),
    }


def _rows(
    subject: "Subject", shards: TokenShards, split: str, context: int, bos_eos: bool, alone: bool
) -> WrappedTokens | PackedConversations:
    """Documents wrapped end to end, or conversations with scored answers."""
    method = subject.model.config.method
    if shards.meta.inputs.chat is None:
        return WrappedTokens(shards, split, context, bos_eos=bos_eos, score_first=method.score_first)
    if bos_eos:
        raise ValueError("BOS and EOS around sequences need text, and the data holds conversations")
    skip_long = subject.recipe is not None and subject.recipe.data.skip_long
    packing = Packing() if alone else method.packing(context)
    return PackedConversations(shards, split, context, packing=packing, skip_long=skip_long, alone=alone)


def _length(subject: "Subject", asked: int | None) -> int:
    """The length of sequences: the network's context or less, in whole blocks."""
    config = subject.model.config
    most = config.network.context
    if asked is None:
        return most
    unit = max(config.method.scoring_unit(most), config.method.scored_multiple(most))
    if not max(unit, 2) <= asked <= most or asked % unit:
        blocks = f", a multiple of its blocks of {unit}" if unit > 1 else ""
        raise ValueError(
            f"--context must lie in {max(unit, 2)}..{most}, the context of {subject.name}{blocks}, "
            f"got {asked}"
        )
    return asked


def _tokenize(
    subject: "Subject",
    data: str,
    split: str | None,
    field: str | None,
    eos_between_documents: bool,
    folder: Path,
) -> tuple[TokenShards, str]:
    """One split of a corpus as shards; a file that belongs to no split is taken whole."""
    from bd3lm.reports.content import HELD_OUT

    tokenizer = subject.model.tokenizer
    if tokenizer is None:
        raise ValueError(f"{subject.name} was saved without a tokenizer; name one with --tokenizer")
    # Text without splits in its file names is measured whole.
    path = local_path(data)
    whole = path.exists() and (path.is_file() or not split_by_name(path, find_files(path)))
    corpus = load_corpus(data, field=field if _is_of_files(data) else None, held_out=0 if whole else None)
    split = split or next((each for each in HELD_OUT if each in corpus.splits), corpus.splits[0])
    try:
        return prepare(
            corpus, tokenizer, folder, splits=[split], eos_between_documents=eos_between_documents
        ), split
    except DocumentTooLong as error:
        hint = (
            "prepare the text with `bd3lm data prepare --max-document`, which can allow more, and measure on "
            "that folder"
        )
        raise DocumentTooLong(error.where, error.most, hint) from None


def _check_eos(shards: TokenShards, wanted: bool | None, name: str) -> None:
    """Refuse shards whose EOS tokens differ from what the measurement needs."""
    has = shards.meta.inputs.eos_between_documents
    if wanted is not None and wanted != has:
        raise ValueError(
            f"{name} was prepared {'with' if has else 'without'} an end token after each document, and the "
            f"measurement needs text {'with' if wanted else 'without'} it: prepare it that way, or pass the "
            "text itself"
        )


def _check_tokenizer(subject: "Subject", shards: TokenShards, name: str) -> None:
    """Refuse text whose tokens mean something else to the model than when it was tokenized."""
    tokenizer, inputs = subject.model.tokenizer, shards.meta.inputs
    if tokenizer is not None:
        try:
            shards.require_tokenizer(tokenizer)
        except ValueError as error:
            raise ValueError(f"{subject.name} cannot be measured on {name}: {error}") from None
    config = subject.model.config
    most = config.network.input_vocab_size
    if inputs.vocab_size > most or inputs.mask_id != config.mask_id:
        raise ValueError(
            f"{subject.name} cannot be measured on {name}: its {most} tokens (mask "
            f"{config.mask_id}) are not the {inputs.vocab_size} (mask {inputs.mask_id}) of the text"
        )
