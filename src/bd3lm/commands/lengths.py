"""`bd3lm lengths`: how long the documents of models are, beside those that they were trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bd3lm.commands.records import keep, model_and_title, new_record, record_name
from bd3lm.commands.sample_files import Samples
from bd3lm.commands.subjects import Subject
from bd3lm.data import TokenShards
from bd3lm.diffusion.categorical import NucleusRule
from bd3lm.evaluation import LengthStatistics, document_length, evenly_spaced, stop_counts
from bd3lm.lm import Settings

SPLIT = "train"
_CONTEXTS = 16  # the longest document of the paper's block diffusion model has 9.7 contexts of 1,024
_KEPT = 10_000  # training documents whose lengths a record holds
_ENDS = {"EOS": "eos", "entropy": "entropy", "limit": "length"}  # headings; no document ends at a string


@dataclass(frozen=True)
class Writing:
    """How documents are written: without a prompt, until an end token, low entropy or the limit ends them."""

    count: int = 500
    length: int | None = None
    """The limit in tokens, including the one that texts begin with; by default 16 contexts."""
    entropy_floor: float = 4.0
    """In nats; 0 means no floor."""
    entropy_window: int = 256
    nucleus_p: float | None = None
    nucleus_rule: NucleusRule = "inclusive"
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")

    def settings(self, subject: Subject, notes: Console | None = None) -> Settings:
        """The settings for a model. A limit beyond what it can write is lowered, and `notes` told so."""
        model, method = subject.model, subject.model.config.method
        context = model.config.network.context
        settings = Settings(
            length=_CONTEXTS * context if self.length is None else self.length,
            seed=self.seed,
            batch_size=self.batch_size,
            nucleus_p=self.nucleus_p,
            nucleus_rule=self.nucleus_rule,
            entropy_floor=self.entropy_floor or None,
            entropy_window=self.entropy_window,
        ).for_method(method)
        if not method.writes_past_context and (settings.length or 0) > context:
            settings = replace(settings, length=context)
            if notes is not None:
                limit = (
                    f"{subject.name} ({subject.title}) cannot write past its context of {context:,} tokens."
                )
                notes.print(Text(limit), soft_wrap=True)
        model.stream("", settings)  # raises errors now, before another model has written for an hour
        return settings


def report_lengths(
    sources: Sequence[Subject | Samples],
    writing: Writing,
    *,
    data: Path | None = None,
    console: Console | None = None,
    notes: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure each source, print a table that begins with the training set, and return the records.

    `data` is a folder of token shards; by default a run is compared with its own. Errors in it, in a file, or
    in the settings for any of the models are raised before anything is written.
    """
    console = console or Console()
    notes = notes or console
    given = None if data is None else TokenShards(data)
    against = [_shards(source, given, notes) for source in sources]
    for source in sources:
        if isinstance(source, Samples):
            _document_lengths(source)
        else:
            writing.settings(source, notes)
    records = []
    for source, shards in zip(sources, against, strict=True):
        if isinstance(source, Subject):
            settings = writing.settings(source)
            source = Samples.draw(source, writing.count, settings, kind="documents", notes=notes)
        records.append(measure_lengths(source, shards))
    console.print(_table(records))
    console.print(Text(_legend(records)), soft_wrap=True)
    return records


def measure_lengths(samples: Samples, shards: TokenShards | None) -> dict[str, Any]:
    """The lengths of documents and of the training set, as a record, which is kept in the folder of a run."""
    lengths = _document_lengths(samples)
    result = {
        "samples": {
            **asdict(LengthStatistics.of(lengths)),
            "stopped_by": stop_counts(samples.values("stopped_by")),
            "lengths": lengths,
        },
        "training": None if shards is None else _training(shards),
    }
    drawn = ("entropy_floor", "entropy_window", "nucleus_p", "seed")
    settings = {
        "count": len(lengths),
        "length": samples.length,
        **{name: samples.settings.get(name) for name in drawn},
        **samples.other_drawing,
        "lean": samples.lean,
        "data": None if shards is None else str(shards.folder),
        "split": None if shards is None else SPLIT,
        "dtype": samples.records[0].get("dtype"),
    }
    record = new_record(samples.origin, "lengths", settings=settings, result=result, weights=samples.weights)
    keep(samples.origin, record_name("lengths", settings, str(len(lengths))), record)
    return record


def _shards(source: Subject | Samples, given: TokenShards | None, notes: Console) -> TokenShards | None:
    """The training set to compare a source with; None for a run whose data is gone."""
    if isinstance(source, Samples):
        return given
    if given is not None:
        if source.model.tokenizer is not None:
            given.require_tokenizer(source.model.tokenizer)
        return given
    try:
        return source.shards()
    except (ValueError, OSError) as error:
        notes.print(Text(f"No training set to compare {source.name} with: {error}"), soft_wrap=True)
        return None


def _document_lengths(samples: Samples) -> list[int]:
    """The lengths of samples that are whole documents, without their begin and end tokens."""
    samples.require_from_nothing()
    if samples.settings.get("stop_at_eos") is False:
        raise ValueError(
            f"{samples.name} must hold documents, and its samples were written on past their end tokens: "
            f"`bd3lm sample --no-eos` writes no documents"
        )
    if stop := samples.settings.get("stop"):
        raise ValueError(
            f"{samples.name} must hold documents, and its samples were ended at strings, {stop}: "
            f"`bd3lm sample --stop` writes no documents"
        )
    for index, record in enumerate(samples.records):
        if not isinstance(record.get("tokens"), list):
            raise ValueError(
                f"sample {index} of {samples.name} must have tokens, as `bd3lm sample --out` writes "
                "them, got none"
            )
    marks = {record["tokens"][-1] for record in samples.records if record["stopped_by"] == "eos"}
    tokenizer = None if samples.subject is None else samples.subject.model.tokenizer
    if tokenizer is not None and tokenizer.bos_id is not None:
        marks.add(tokenizer.bos_id)
    return [
        document_length(record["tokens"], given=record["given"], stopped_by=record["stopped_by"], marks=marks)
        for record in samples.records
    ]


def _training(shards: TokenShards) -> dict[str, Any]:
    lengths = shards.lengths(SPLIT)
    statistics = asdict(LengthStatistics.of(lengths))
    return {
        "documents": statistics.pop("number"),
        **statistics,
        "lengths": evenly_spaced(lengths, _KEPT),
    }


def _table(records: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Lengths of documents in tokens, and what ended them", box=SIMPLE_HEAD, padding=0)
    table.add_column("documents of", overflow="fold", min_width=20)
    for heading in ("number", "median", "p90", "max", "mean", *_ENDS):
        table.add_column(heading, justify="right")
    sets = {record["settings"]["data"]: record["result"]["training"] for record in records}
    for folder, training in sets.items():
        if training is not None:
            table.add_row(Text(f"training set, {folder}"), *_figures(training, training["documents"]))
    for record in records:
        found = record["result"]["samples"]
        stops = [f"{found['stopped_by'][reason]:,}" for reason in _ENDS.values()]
        table.add_row(Text(model_and_title(record)), *_figures(found, found["number"]), *stops)
    return table


def _figures(found: Mapping[str, Any], number: int) -> list[str]:
    return [
        f"{number:,}",
        *(f"{found[name]:,}" for name in ("median", "p90", "max")),
        f"{found['mean']:,.0f}",
    ]


def _legend(records: Sequence[Mapping[str, Any]]) -> str:
    lines = ["Begin and end tokens are not counted. Median and p90 are lengths of actual documents."]
    for record in records:
        settings, stops = record["settings"], record["result"]["samples"]["stopped_by"]
        if stops["length"]:
            lines.append(
                f"{stops['length']:,} documents of {record['model']} reached the limit of "
                f"{settings['length']:,} tokens and might have gone on."
            )
        if stops["entropy"]:
            lines.append(
                f"{stops['entropy']:,} documents of {record['model']} were stopped because their entropy "
                f"fell below {settings['entropy_floor']:g} nats; their last {settings['entropy_window']} "
                "tokens are dropped."
            )
    return "\n".join(lines)
