"""`bd3lm lengths`: how long the documents are that models write, beside those they were trained on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bd3lm.commands.judgements import Samples
from bd3lm.commands.records import FOLDER, keep, new_record
from bd3lm.commands.samples import run_sample, sample_record
from bd3lm.commands.subjects import Subject
from bd3lm.data import TokenShards
from bd3lm.evaluation import LengthStatistics, document_length, evenly_spaced, stop_counts
from bd3lm.lm import Settings
from bd3lm.lm.generation import build_writer
from bd3lm.sampling.contexts import ContextWriter

SPLIT = "train"
DOCUMENTS_FILE = "documents.jsonl"
_CONTEXTS = 16  # the longest document of the paper's block diffusion model is 9.7 contexts of 1,024
_KEPT = 10_000  # training documents whose lengths a record holds


@dataclass(frozen=True)
class Writing:
    """How documents are written: from nothing, until an end token, low entropy or the limit ends them."""

    count: int = 500
    length: int | None = None
    """The limit; by default 16 contexts."""
    entropy_floor: float = 4.0
    """0 is none."""
    entropy_window: int = 256
    nucleus_p: float | None = None
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")

    def settings(self, subject: Subject, notes: Console) -> Settings:
        """For a model, within what it can do; says so where that is less than was asked for."""
        model = subject.model
        context, vocabulary = model.config.network.context, model.config.network.vocab_size
        highest = math.log(min(self.entropy_window, vocabulary - 1))  # the mask is never written
        if self.entropy_floor > highest:
            raise ValueError(
                f"entropy_floor must be at most {highest:.2f}, the most that {self.entropy_window} tokens out "
                f"of the {vocabulary - 1} of {subject.name} can have, or every document ends, got "
                f"{self.entropy_floor:g}"
            )
        settings = Settings(
            length=self.length or _CONTEXTS * context,
            seed=self.seed,
            batch_size=self.batch_size,
            nucleus_p=self.nucleus_p,
            entropy_floor=self.entropy_floor or None,
            entropy_window=self.entropy_window,
        ).for_method(model.config.method)
        one_context = isinstance(build_writer(model.network, model.config, settings), ContextWriter)
        if one_context and (settings.length or 0) > context:
            settings = replace(settings, length=context)
            notes.print(
                Text(f"{subject.name} ({subject.title}) cannot write past its context of {context:,} tokens"),
                soft_wrap=True,
            )
        return settings


@dataclass(frozen=True)
class Documents:
    """The lengths of a source's documents, what ended each, and how they were written."""

    name: str
    lengths: list[int]
    stopped_by: list[Any]
    settings: Mapping[str, Any]
    subject: Subject | None = None

    @classmethod
    def of(cls, samples: Samples) -> "Documents":
        """From samples that were written from nothing."""
        marks = {record["tokens"][-1] for record in samples.records if record["stopped_by"] == "eos"}
        if samples.subject is not None and samples.subject.model.tokenizer is not None:
            marks.add(samples.subject.model.tokenizer.bos_id)
        lengths = []
        for number, record in enumerate(samples.records, 1):
            given, stopped_by = record["given"], record["stopped_by"]
            try:
                lengths.append(
                    document_length(record["tokens"], given=given, stopped_by=stopped_by, marks=marks)
                )
            except ValueError as error:
                raise ValueError(f"{samples.name} line {number}: {error}") from None
        return cls(samples.name, lengths, samples.values("stopped_by"), samples.settings, samples.subject)

    @property
    def title(self) -> str:
        return self.name if self.subject is None else f"{self.name} ({self.subject.title})"


def report_lengths(
    sources: Sequence[Subject | Samples],
    writing: Writing,
    *,
    data: Path | None = None,
    console: Console | None = None,
    notes: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure each source and print a table under the lengths of what was trained on; returns records.

    `data` is a folder of shards; by default each run is held against its own. What is wrong with it, or with
    the settings for one of the models, is said before anything is written.
    """
    console = console or Console()
    notes = notes or console
    subjects = [source for source in sources if isinstance(source, Subject)]
    given = None if data is None else TokenShards(data)
    for subject in subjects:
        if given is not None and subject.model.tokenizer is not None:
            given.require_tokenizer(subject.model.tokenizer)
    shards = {subject.name: given or _own_shards(subject, notes) for subject in subjects}
    settings = {subject.name: writing.settings(subject, notes) for subject in subjects}
    sets = [each for each in (given, *shards.values()) if each is not None]
    training = {each.folder: _training(each) for each in sets}
    records, rows = [], []
    for source in sources:
        samples = source
        if isinstance(source, Subject):
            samples = _draw(source, writing.count, settings[source.name], notes)
        ...
    return records
