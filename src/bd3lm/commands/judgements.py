"""`bd3lm judge`: generative perplexity of a model's samples, or of samples in a file, under a judge."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

import bd3lm
from bd3lm.commands.records import FOLDER, keep, new_record, slug, write_record
from bd3lm.commands.samples import check_out, run_sample, sample_record, settings_record
from bd3lm.commands.subjects import Subject
from bd3lm.data import load_corpus
from bd3lm.data.corpus import digest
from bd3lm.evaluation import judge_texts, mauve_score
from bd3lm.evaluation.judges import require
from bd3lm.evaluation.judging import check_windows, mean_and_error
from bd3lm.evaluation.mauve import FeatureJudge
from bd3lm.lm import Settings
from bd3lm.sampling import Ancestral, FirstHitting

SAMPLES_SUFFIX = ".jsonl"
ENTROPY_WINDOW = Settings().entropy_window

# What is used of a line of `bd3lm sample --out`.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "documents": list,
    "length": int,
    "given": int,
    "evaluations": int,
    "redraws": int,
    "stopped_by": str,
    "entropy": (int, float),
    "dtype": str,
    "settings": dict,
}
_MAY_DIFFER = ("seed", "batch_size")  # in a file put together from several


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn: as the paper does, all of one length, whatever end tokens come in them."""

    count: int = 300
    lengths: tuple[int, ...] = (1024, 2048)
    nucleus_p: float | None = None
    steps: int | None = None
    entropy_floor: float = 4.0
    redraws: int = 20
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}")
        if not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"length must be one or more different lengths, got {self.lengths}")
        if self.entropy_floor and min(self.lengths) < ENTROPY_WINDOW:
            raise ValueError(
                f"length must be at least {ENTROPY_WINDOW}, the tokens whose entropy has a floor, got "
                f"{min(self.lengths)}; an entropy floor of 0 is none"
            )
        if not self.entropy_floor and self.redraws != Drawing.redraws:
            raise ValueError(f"redraws needs an entropy floor above 0, got {self.redraws} without one")

    def settings(self, subject: Subject, length: int) -> Settings:
        method = subject.model.config.method
        in_blocks = method.kind == "block_diffusion"
        return Settings(
            length=length,
            seed=self.seed,
            batch_size=self.batch_size,
            nucleus_p=self.nucleus_p,
            unmasking=FirstHitting() if self.steps is None or not in_blocks else Ancestral(self.steps),
            steps=None if in_blocks else self.steps,
            stop_at_eos=False,
            entropy_floor=self.entropy_floor or None,
            redraws=self.redraws if self.entropy_floor else 0,
        ).for_method(method)


@dataclass(frozen=True)
class Judging:
    """How samples are judged; `reference` is a file of human text that MAUVE compares them with."""

    window: int = 1024
    stride: int = 512
    batch_size: int = 8
    reference: Path | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"judge-batch must be at least 1, got {self.batch_size}")
        if self.reference is not None and not self.reference.is_file():
            raise ValueError(f"mauve must be a file of human text, and {self.reference} is none")


@dataclass(frozen=True)
class Samples:
    """Texts to judge, as `bd3lm sample --out` records them, and the model they were drawn from, if it was."""

    name: str
    records: Sequence[Mapping[str, Any]]
    subject: Subject | None = None

    @classmethod
    def read(cls, file: Path) -> "Samples":
        """The samples in a file, all of which must have been written in one way."""
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
        with file.open(encoding="utf-8") as lines:
            records = [_parse(line, f"{file} line {number}") for number, line in enumerate(lines, 1)]
        if not records:
            raise ValueError(f"{file} must hold at least one sample, got none")
        ways = {json.dumps(_way(record), sort_keys=True) for record in records}
        if len(ways) > 1:
            raise ValueError(
                f"{file} must hold samples written in one way, got {len(ways)} different settings"
            )
        return cls(str(file), records)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of all; None for those in which they differ."""
        first: Mapping[str, Any] = self.records[0]["settings"]
        return {
            name: value if all(record["settings"].get(name) == value for record in self.records) else None
            for name, value in first.items()
        }

    @property
    def length(self) -> int:
        """The length that was asked for, else that of the longest."""
        return self.settings.get("length") or max(self.values("length"))

    def values(self, field: str) -> list[Any]:
        return [record[field] for record in self.records]


def run_judge(
    sources: Sequence[str],
    drawing: Drawing,
    judging: Judging,
    *,
    open_subject: Callable[[str], Subject],
    load_judge: Callable[[], FeatureJudge],
    out: Path | None = None,
    console: Console | None = None,
    notes: Console | None = None,
) -> list[dict[str, Any]]:
    """Judge each source, a model or a .jsonl file of samples, and print a table; returns its rows as records.

    All sources and the judge are opened before anything is drawn, so that what is wrong is said at once.
    """
    console = console or Console()
    notes = notes or console
    if out is not None:
        check_out(out)
    if judging.reference is not None:
        require("mauve", "mauve", "MAUVE")
    opened = [
        Samples.read(Path(source)) if source.endswith(SAMPLES_SUFFIX) else open_subject(source)
        for source in sources
    ]
    for source in opened:
        if isinstance(source, Subject):
            for length in drawing.lengths:  # a stream complains before it writes
                source.model.stream([""], drawing.settings(source, length))
    judge = load_judge()
    check_windows(judge, judging.window, judging.stride)
    records = []
    for source in opened:
        for samples in _samples_of(source, drawing, notes):
            record = judge_samples(samples, judge, judging, notes)
            records.append(record)
            notes.print(Text(_line(record)), soft_wrap=True)
    title = f"Generative perplexity under {judge.name}, {judge.dtype}"
    console.print(
        Text(f"{title}, window {judging.window:,}, stride {judging.stride:,}", style="bold"), soft_wrap=True
    )
    console.print(_table(records))
    console.print(_legend(records), soft_wrap=True)
    if out is not None:
        write_record(out, {"judgements": records})
        notes.print(Text(f"wrote {out}"), soft_wrap=True)
    return records


def _samples_of(source: Samples | Subject, drawing: Drawing, notes: Console) -> Iterator[Samples]:
    if isinstance(source, Samples):
        yield source
    else:
        yield from (draw_samples(source, drawing, length, notes) for length in drawing.lengths)


def draw_samples(subject: Subject, drawing: Drawing, length: int, notes: Console) -> Samples:
    """Samples of a model; those of a run are kept beside it, and drawn once.

    The name of the file holds a digest of all that decides them, so that other weights or settings give
    another file, and none is ever written over.
    """
    settings, model = drawing.settings(subject, length), subject.model
    file = None
    if subject.run is not None:
        decides = {name: value for name, value in settings_record(settings).items() if name != "batch_size"}
        spoken = None if model.tokenizer is None else model.tokenizer.fingerprint
        key = digest([bd3lm.__version__, subject.weights, subject.dtype, spoken, drawing.count, decides])
        file = subject.run / FOLDER / f"samples-{length}-{key[:8]}{SAMPLES_SUFFIX}"
        if file.is_file():
            notes.print(Text(f"judging {file}, drawn before"), soft_wrap=True)
            return Samples(subject.name, Samples.read(file).records, subject)
        file.parent.mkdir(exist_ok=True)
        file.with_name(file.name + ".partial").unlink(missing_ok=True)  # of a run that was interrupted
    prompts = [""] * drawing.count
    texts = run_sample(model, prompts, settings, out=file, show=False, console=notes)
    return Samples(subject.name, [sample_record(text, "", settings, model) for text in texts], subject)


def judge_samples(samples: Samples, judge: FeatureJudge, judging: Judging, notes: Console) -> dict[str, Any]:
    """The judgement of samples as a record, which is kept beside the run of their model."""
    texts = samples.values("documents")
    degenerate = samples.values("stopped_by").count("entropy")
    if not any(map(any, texts)):
        raise ValueError(
            f"nothing is left of the samples of {samples.name}: {degenerate} of {len(texts)} stayed below "
            f"the entropy floor of {samples.settings.get('entropy_floor')}; a floor of 0 cuts none"
        )
    options = {"window": judging.window, "batch_size": judging.batch_size}
    found = judge_texts(
        judge,
        texts,
        stride=judging.stride,
        watch=lambda batches: track(
            batches,
            f"judging {samples.name}",
            console=notes,
            transient=True,
            disable=not notes.is_terminal,
        ),
        **options,
    )
    likeness = None
    if judging.reference is not None:
        documents = load_corpus(judging.reference, held_out=0).documents("train")
        likeness = mauve_score(judge, texts, documents, **options)
    entropy, entropy_error = mean_and_error(samples.values("entropy"))
    evaluations = sum(samples.values("evaluations"))
    written = sum(samples.values("length")) - sum(samples.values("given"))
    result = {
        "samples": len(texts),
        "tokens": int(found.tokens.sum()),
        "characters": found.characters,
        "nats": found.nats_per_token,
        "standard_error": found.standard_error,
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "bits_per_character": found.bits_per_character,
        "entropy": entropy,
        "entropy_error": entropy_error,
        "evaluations": evaluations / len(texts),
        "evaluations_per_token": evaluations / written if written else None,
        "redraws": sum(samples.values("redraws")),
        "degenerate": degenerate,
        "mauve": likeness,
    }
    record = _record(samples, _settings(samples, judge, judging), result)
    if samples.subject is not None:
        keep(samples.subject, slug("judgement", judge.name, str(samples.length)), record)
    return record


def _settings(samples: Samples, judge: FeatureJudge, judging: Judging) -> dict[str, Any]:
    """What the figures depend on."""
    drawn = ("nucleus_p", "unmasking", "steps", "entropy_floor", "seed")
    return {
        "judge": judge.name,
        "judge_dtype": judge.dtype,
        "window": judging.window,
        "stride": judging.stride,
        "count": len(samples.records),
        "length": samples.length,
        **{name: samples.settings.get(name) for name in drawn},
        "dtype": samples.records[0]["dtype"],
    }


def _record(samples: Samples, settings: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    if samples.subject is not None:
        return new_record(samples.subject, "judgement", settings=settings, result=result)
    return {  # a file does not say which weights its samples came from
        "kind": "judgement",
        "model": samples.name,
        "title": None,
        "weights": None,
        "dtype": settings["dtype"],
        "bd3lm": bd3lm.__version__,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": dict(settings),
        "result": dict(result),
    }


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} must be JSON, as `bd3lm sample --out` writes it: {error}") from None
    fields = record if isinstance(record, dict) else {}
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(fields.get(name), kind)]
    if wrong or not all(isinstance(document, str) for document in fields["documents"]):
        raise ValueError(
            f"{where} must be a sample as `bd3lm sample --out` writes it; missing or of another kind: "
            f"{', '.join(wrong) or 'documents'}"
        )
    return fields


def _way(record: Mapping[str, Any]) -> list[Any]:
    """How a sample was written, as far as samples judged together must agree."""
    settings = {name: value for name, value in record["settings"].items() if name not in _MAY_DIFFER}
    return [settings, record["dtype"]]


def _table(records: Sequence[dict[str, Any]]) -> Table:
    """Narrow enough for 80 columns: nothing that a perplexity must stand beside may fall off the edge."""
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("samples of", overflow="fold", min_width=10)
    for heading in ("length", "perplexity", "entropy", "passes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("drawn", min_width=11)
    for record in records:
        settings, result = record["settings"], record["result"]
        under_judge = [_perplexity(result), f"{result['bits_per_character']:.3f} bits/char"]
        if result["mauve"] is not None:
            under_judge.append(f"MAUVE {result['mauve']:.3f}")
        drawn = [f"{result['samples']:,} samples", settings["dtype"], f"{result['redraws']:,} redrawn"]
        if settings["nucleus_p"] is not None:  # a greedy projection has none
            drawn.insert(1, f"nucleus {settings['nucleus_p']:g}")
        table.add_row(
            Text(record["model"] if record["title"] is None else f"{record['model']} ({record['title']})"),
            f"{settings['length']:,}",
            "\n".join(under_judge),
            _with_error(result["entropy"], result["entropy_error"], 2),
            f"{result['evaluations']:,.0f}",
            ", ".join(drawn),
        )
    return table


def _legend(records: Sequence[dict[str, Any]]) -> Text:
    lines = [
        "± is one standard error over samples. Entropy is of the tokens of a sample, in nats; passes are the "
        "evaluations of the network that wrote one."
    ]
    for record in records:
        floor, left = record["settings"]["entropy_floor"], record["result"]["degenerate"]
        if left:
            lines.append(
                f"{left} samples of {record['model']} stayed below the entropy floor of {floor:g}, and were "
                f"cut short."
            )
    return Text("\n".join(lines))


def _line(record: dict[str, Any]) -> str:
    return f"{record['model']}, {record['settings']['length']:,} tokens: {_perplexity(record['result'])}"


def _perplexity(result: Mapping[str, Any]) -> str:
    value = result["perplexity"]
    if value is None:
        return "∞"
    return _with_error(value, result["perplexity_error"], 1 if value < 1000 else 0)


def _with_error(value: float, error: float | None, digits: int) -> str:
    return f"{value:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")
