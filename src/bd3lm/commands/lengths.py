"""`bd3lm lengths`: compare the lengths of generated documents with the training set's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    DeviceFlag,
    EntropyWindowFlag,
    LawFlag,
    LeanFlag,
    MaxDocumentFlag,
    ModelsOrFiles,
    OptionalFolder,
    RecordsFlag,
    SamplingDTypeFlag,
    SeedFlag,
    TokenizerFlag,
    TopPFlag,
    TopPRuleFlag,
    check_sources,
    named,
)

if TYPE_CHECKING:
    from rich.table import Table

    from bd3lm.commands.shared.sample_files import Samples
    from bd3lm.commands.shared.subjects import Subject
    from bd3lm.data import TokenShards
    from bd3lm.io.console import Console
    from bd3lm.lm import Settings

SPLIT = "train"
_CONTEXTS = 16  # the longest document of the paper's block diffusion model has 9.7 contexts of 1,024
_KEPT = 10_000  # lengths of training documents stored in a record
_ENDS = {"EOS": "eos", "entropy": "entropy", "limit": "length"}  # headings; no document ends at a string


@dataclass(frozen=True)
class Lengths(Command):
    """Measure how long generated documents are, and compare with the training set.

    The table also counts what ended them: an end-of-text token, low entropy or the length limit.
    """

    kind = "lengths"

    sources: Annotated[
        ModelsOrFiles,
        arg(
            help="Runs, model folders, GGUF files or hub ids, which write the documents; or .jsonl files "
            "that `bd3lm sample --out` wrote without a prompt."
        ),
    ] = ()
    count: int = 500
    """Documents per model."""
    length: Annotated[
        int | None,
        named(
            "INT",
            help="Most tokens of a document, the token that begins a text included. Default: 16 contexts. "
            "SEDD and uniform noise reach one context.",
        ),
    ] = None
    entropy_floor: float = 4.0
    """End a document when the entropy of its last tokens falls below this, in nats. 0: never."""
    entropy_window: EntropyWindowFlag = 256
    top_p: TopPFlag = None
    top_p_rule: TopPRuleFlag = "inclusive"
    law: LawFlag = None
    lean: LeanFlag = None
    seed: SeedFlag = 0
    batch_size: int = 32
    """Documents written in parallel."""
    data: OptionalFolder = None
    """Token shards to compare with. Default: the data that each run was trained on."""
    max_document: MaxDocumentFlag = None
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: SamplingDTypeFlag = None
    out: RecordsFlag = None

    def run(self) -> int:
        from bd3lm.commands.shared.records import check_new_file, write_records
        from bd3lm.io.console import Console
        from bd3lm.limits import check_counts

        check_new_file(self.out)
        check_sources(self, for_files=("data", "max_document", "out"))
        check_counts(count=self.count)

        from bd3lm.commands.shared.sample_files import open_sources  # this import loads torch

        write_records(self.out, report_lengths(open_sources(self), self, notes=Console(stderr=True)))
        return 0


def settings_of(flags: Lengths, subject: "Subject", notes: "Console | None" = None) -> "Settings":
    """How a model writes: without a prompt, until an end token, low entropy or the limit ends the text.

    If the limit is more than the model can write, it is lowered, and `notes` says so.
    """
    from rich.text import Text

    from bd3lm.lm import Settings

    model, method = subject.model, subject.model.config.method
    context = model.config.network.context
    settings = Settings(
        length=_CONTEXTS * context if flags.length is None else flags.length,
        seed=flags.seed,
        batch_size=flags.batch_size,
        top_p=flags.top_p,
        top_p_rule=flags.top_p_rule,
        entropy_floor=flags.entropy_floor or None,
        entropy_window=flags.entropy_window,
    )
    settings = method.settled(settings)
    if not method.writes_past_context and (settings.length or 0) > context:
        settings = replace(settings, length=context)
        if notes is not None:
            limit = f"{subject.name} ({subject.title}) cannot write past its context of {context:,} tokens."
            notes.print(Text(limit), soft_wrap=True)
    model.stream("", settings)  # raises errors now, not after another model has written for an hour
    return settings


def report_lengths(
    sources: "Sequence[Subject | Samples]",
    flags: Lengths,
    *,
    console: "Console | None" = None,
    notes: "Console | None" = None,
) -> list[dict[str, Any]]:
    """Measure each source, print a table that starts with the training set, and return the records.

    Errors in --data, in a file or in the settings of any model are raised before anything is written.
    """
    from rich.text import Text

    from bd3lm.commands.shared.sample_files import Samples
    from bd3lm.commands.shared.subjects import Subject
    from bd3lm.data import TokenShards
    from bd3lm.io.console import Console

    console = console or Console()
    notes = notes or console
    given = None if flags.data is None else TokenShards(flags.data)
    against = [_shards(source, given, notes) for source in sources]
    for source in sources:
        if isinstance(source, Samples):
            _document_lengths(source)
        else:
            settings_of(flags, source, notes)
    records = []
    for source, shards in zip(sources, against, strict=True):
        if isinstance(source, Subject):
            settings = settings_of(flags, source)
            source = Samples.draw(source, flags.count, settings, kind="documents", notes=notes)
        records.append(measure_lengths(source, shards))
    console.print(_table(records))
    console.print(Text(_legend(records)), soft_wrap=True)
    return records


def measure_lengths(samples: "Samples", shards: "TokenShards | None") -> dict[str, Any]:
    """The lengths of documents and of the training set, as a record stored next to the run."""
    from bd3lm.commands.shared.records import keep, new_record, record_name
    from bd3lm.evaluation import LengthStatistics, stop_counts

    lengths = _document_lengths(samples)
    result = {
        "samples": {
            **asdict(LengthStatistics.of(lengths)),
            "stopped_by": stop_counts(samples.values("stopped_by")),
            "lengths": lengths,
        },
        "training": None if shards is None else _training(shards),
    }
    drawn = ("entropy_floor", "entropy_window", "top_p", "seed")
    settings = {
        "count": len(lengths),
        "length": samples.length,
        **{name: samples.settings.get(name) for name in drawn},
        **samples.other_drawing,
        "law": samples.law,
        "lean": samples.lean,
        "data": None if shards is None else str(shards.folder),
        "split": None if shards is None else SPLIT,
        "dtype": samples.records[0].get("dtype"),
    }
    record = new_record(samples.origin, "lengths", settings=settings, result=result, weights=samples.weights)
    keep(samples.origin, record_name("lengths", settings, str(len(lengths))), record)
    return record


def _shards(
    source: "Subject | Samples", given: "TokenShards | None", notes: "Console"
) -> "TokenShards | None":
    """The training set to compare a source with; None for a run whose data no longer exists."""
    from rich.text import Text

    from bd3lm.commands.shared.sample_files import Samples

    if isinstance(source, Samples):
        return given
    if given is not None:
        if source.model.tokenizer is not None:
            given.require_tokenizer(source.model.tokenizer)
        return given
    try:
        return source.shards()
    except (ValueError, OSError) as error:
        notes.print(Text(f"no training set to compare {source.name} with: {error}"), soft_wrap=True)
        return None


def _document_lengths(samples: "Samples") -> list[int]:
    """The lengths of samples that are whole documents, without begin and end tokens."""
    from bd3lm.evaluation import document_length

    samples.require_from_nothing()
    if samples.settings.get("stop_at_eos") is False:
        raise ValueError(
            f"{samples.name} must hold documents, and its samples continue past their end tokens, as `bd3lm "
            "sample --no-stop-at-eos` writes them"
        )
    if stop := samples.settings.get("stop"):
        raise ValueError(
            f"{samples.name} must hold documents, and its samples end at the strings {stop}, as `bd3lm "
            "sample --stop` writes them"
        )
    for index, record in enumerate(samples.records):
        if not isinstance(record.get("tokens"), list):
            raise ValueError(
                f"sample {index} of {samples.name} must have tokens, as `bd3lm sample --out` writes them, "
                "got none"
            )
    marks = {record["tokens"][-1] for record in samples.records if record["stopped_by"] == "eos"}
    tokenizer = None if samples.subject is None else samples.subject.model.tokenizer
    if tokenizer is not None and tokenizer.bos_id is not None:
        marks.add(tokenizer.bos_id)
    return [
        document_length(record["tokens"], given=record["given"], stopped_by=record["stopped_by"], marks=marks)
        for record in samples.records
    ]


def _training(shards: "TokenShards") -> dict[str, Any]:
    from bd3lm.evaluation import LengthStatistics, evenly_spaced

    lengths = shards.lengths(SPLIT)
    statistics = asdict(LengthStatistics.of(lengths))
    return {
        "documents": statistics.pop("number"),
        **statistics,
        "lengths": evenly_spaced(lengths, _KEPT),
    }


def _table(records: Sequence[Mapping[str, Any]]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from bd3lm.commands.shared.records import model_and_title

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
                f"{settings['length']:,} tokens and might have been longer."
            )
        if stops["entropy"]:
            lines.append(
                f"{stops['entropy']:,} documents of {record['model']} were stopped because their entropy "
                f"fell below {settings['entropy_floor']:g} nats; their last {settings['entropy_window']} "
                "tokens are dropped."
            )
    return "\n".join(lines)
