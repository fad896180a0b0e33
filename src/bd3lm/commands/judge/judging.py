"""Draws or reads samples, and lets a judge score them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from bd3lm.commands.judge import Judge
from bd3lm.commands.shared.progress import tracked
from bd3lm.commands.shared.records import keep, model_and_title, new_record, record_name
from bd3lm.commands.shared.sample_files import Samples
from bd3lm.commands.shared.subjects import Subject
from bd3lm.data import load_corpus
from bd3lm.evaluation import HuggingFaceJudge, judge_texts, mauve_score
from bd3lm.evaluation.judges import GGUF, JUDGE_SOURCES
from bd3lm.evaluation.judging import check_windows, mean_and_error
from bd3lm.evaluation.mauve import FeatureJudge
from bd3lm.interop import hub_id
from bd3lm.io.console import Console
from bd3lm.io.extras import require
from bd3lm.io.files import local_path
from bd3lm.lm import Settings
from bd3lm.reports import with_error

ENTROPY_WINDOW = Settings().entropy_window
_UNKNOWN = "?"
_PROMPTED = "after_prompts"  # set in records whose texts begin with a prompt


def check_flags(flags: Judge) -> None:
    """Refuse flags with which no sample could be drawn or judged, before any model is opened."""
    if flags.entropy_floor and min(flags.length) < ENTROPY_WINDOW:
        raise ValueError(
            f"--length {min(flags.length)} is shorter than the {ENTROPY_WINDOW} tokens of the entropy rule: "
            "add --entropy-floor 0"
        )
    if flags.mauve is not None:
        try:  # try its first document now: the file is read last, after all samples are drawn and judged
            next(_human_texts(flags), None)
        except ValueError as error:
            raise ValueError(f"--mauve must be a file of human texts: {error}") from error
        require("mauve", "mauve", "MAUVE")


def _human_texts(flags: Judge) -> Iterator[str]:
    assert flags.mauve is not None
    return load_corpus(flags.mauve, held_out=0, max_document=flags.max_document).documents("train")


def settings_of(flags: Judge, subject: Subject, length: int) -> Settings:
    """How samples are drawn: as in the paper, all of one length, not stopping at end tokens."""
    method = subject.model.config.method
    settings = Settings(
        length=length,
        seed=flags.seed,
        batch_size=flags.batch_size,
        top_p=flags.top_p,
        top_p_rule=flags.top_p_rule,
        steps=flags.steps,
        stop_at_eos=False,
        entropy_floor=flags.entropy_floor or None,
        redraws=flags.redraws if flags.entropy_floor else 0,
    )
    return method.settled(settings)


def open_judge(source: str, **options: Any) -> HuggingFaceJudge:
    """Load a judge. A path that does not exist is an error, not a name on the hub."""
    is_path = "/" in source or source.endswith(GGUF)
    if is_path and not local_path(source).exists():
        asked = hub_id("judge", source, allowed=JUDGE_SOURCES, needs_owner=False)
        return HuggingFaceJudge.load(asked, from_hub=True, **options)
    return HuggingFaceJudge.load(source, **options)


def run_judge(
    sources: Sequence[Subject | Samples],
    flags: Judge,
    *,
    load_judge: Callable[[], FeatureJudge],
    console: Console | None = None,
    notes: Console | None = None,
) -> list[dict[str, Any]]:
    """Judge each source, print a table, and return its rows as records.

    Before any sample is drawn, the settings are tried on all models, files are checked and the judge is
    loaded, so mistakes are reported at once.
    """
    console = console or Console()
    notes = notes or console
    for source in sources:
        if isinstance(source, Samples):
            if any(source.prompts()) and flags.mauve is not None:
                raise ValueError(
                    f"--mauve compares whole texts with human ones, and the samples of {source.name} begin "
                    "with prompts: leave --mauve out, or judge samples written from scratch"
                )
        else:
            for length in flags.length:  # stream checks its arguments before it writes
                source.model.stream([""], settings_of(flags, source, length))
    judge = load_judge()
    check_windows(judge, flags.window, flags.stride)
    records = []
    for source in sources:
        for samples in _samples_of(source, flags, notes):
            record = judge_samples(samples, judge, flags, notes)
            records.append(record)
            notes.print(Text(_line(record)), soft_wrap=True)
    title = f"Generative perplexity under {judge.name}, {judge.dtype}"
    console.print(
        Text(f"{title}, window {flags.window:,}, stride {flags.stride:,}", style="bold"), soft_wrap=True
    )
    console.print(_table(records))
    console.print(_legend(records), soft_wrap=True)
    return records


def _samples_of(source: Subject | Samples, flags: Judge, notes: Console) -> Iterator[Samples]:
    if isinstance(source, Samples):
        yield source
    else:
        for length in flags.length:
            settings = settings_of(flags, source, length)
            yield Samples.draw(source, flags.count, settings, kind=f"samples-{length}", notes=notes)


def judge_samples(samples: Samples, judge: FeatureJudge, flags: Judge, notes: Console) -> dict[str, Any]:
    """Judge samples and return a record, stored next to the run of their model."""
    texts, prompts = samples.values("documents"), samples.prompts()
    _check_there_is_text(samples)
    options = {"window": flags.window, "batch_size": flags.judge_batch_size}
    found = judge_texts(
        judge,
        texts,
        given=prompts,
        stride=flags.stride,
        watch=lambda batches: tracked(batches, f"judging {samples.name}", total=len(batches), console=notes),
        **options,
    )
    likeness = None
    if flags.mauve is not None:
        likeness = mauve_score(judge, texts, _human_texts(flags), **options)
    result = {
        "samples": len(texts),
        "tokens": int(found.tokens.sum()),
        "characters": found.characters,
        "nats": found.nats_per_token,
        "standard_error": found.standard_error,
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "bits_per_character": found.bits_per_character,
        **_of_writing(samples),
        "mauve": likeness,
    }
    settings = _settings(samples, judge, flags) | ({_PROMPTED: True} if any(prompts) else {})
    record = new_record(
        samples.origin, "judgement", settings=settings, result=result, weights=samples.weights
    )
    keep(samples.origin, record_name("judgement", settings, judge.name, str(samples.length)), record)
    return record


def _check_there_is_text(samples: Samples) -> None:
    texts = samples.values("documents")
    if any(map(any, texts)):
        return
    if samples.is_of_other_code:
        raise ValueError(f"{samples.name} must hold a text to judge, got {len(texts)} empty ones")
    degenerate = samples.values("stopped_by").count("entropy")
    raise ValueError(
        f"nothing is left of the samples of {samples.name}: {degenerate} of {len(texts)} stayed below the "
        f"entropy floor of {samples.settings.get('entropy_floor')}; --entropy-floor 0 cuts none"
    )


_OF_WRITING = (
    "entropy",
    "entropy_error",
    "evaluations",
    "evaluations_per_token",
    "redraws",
    "redrawn_passes",
    "degenerate",
)


def _of_writing(samples: Samples) -> dict[str, Any]:
    """Figures shown next to a perplexity; None for texts of other software, whose tokens are unknown."""
    if samples.is_of_other_code:
        return dict.fromkeys(_OF_WRITING)
    evaluations = sum(samples.values("evaluations"))
    written = sum(samples.values("length")) - sum(samples.values("given"))
    figures = (
        *mean_and_error(samples.values("entropy")),
        evaluations / len(samples.records),
        evaluations / written if written else None,
        sum(samples.values("redraws")),
        sum(samples.values("redrawn_passes")),
        samples.values("stopped_by").count("entropy"),
    )
    return dict(zip(_OF_WRITING, figures, strict=True))


def _settings(samples: Samples, judge: FeatureJudge, flags: Judge) -> dict[str, Any]:
    """The settings that the figures depend on."""
    drawn = ("top_p", "unmasking", "steps", "entropy_floor", "redraws", "seed")
    return {
        "judge": judge.name,
        "judge_dtype": judge.dtype,
        "window": flags.window,
        "stride": flags.stride,
        "mauve_reference": flags.mauve,
        "count": len(samples.records),
        "length": samples.length,
        **{name: samples.settings.get(name) for name in drawn},
        **samples.other_drawing,
        "law": samples.law,
        "lean": samples.lean,
        "dtype": samples.records[0]["dtype"],
    }


def _table(records: Sequence[dict[str, Any]]) -> Table:
    """A table that fits into 80 columns, so no figure is cut off next to its perplexity."""
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("samples of", overflow="fold", min_width=10)
    for heading in ("length", "perplexity", "entropy", "passes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("drawn", min_width=12)
    for record in records:
        settings, result = record["settings"], record["result"]
        under_judge = [
            with_error(result["perplexity"], result["perplexity_error"]),
            f"{result['bits_per_character']:.3f} bits/char",
        ]
        if result["mauve"] is not None:
            under_judge.append(f"MAUVE {result['mauve']:.3f}")
        drawn = [f"{result['samples']:,} samples" + (" after prompts" if settings.get(_PROMPTED) else "")]
        if _is_of_other_code(record):
            table.add_row(
                Text(model_and_title(record)),
                _UNKNOWN,
                "\n".join(under_judge),
                _UNKNOWN,
                _UNKNOWN,
                ", ".join(drawn),
            )
            continue
        drawn += [settings["dtype"], f"{result['redraws']:,} redrawn"]
        passes = [f"{result['evaluations']:,.0f}"]
        if result["redrawn_passes"]:
            passes.append(f"+ {result['redrawn_passes'] / result['samples']:,.0f}")
        if record["title"] is None and settings.get("law"):  # otherwise the title says it
            drawn.insert(1, f"{settings['law']} law")
        if settings["top_p"] is not None:  # a greedy projection has no nucleus
            rule = f" {settings['top_p_rule']}" if "top_p_rule" in settings else ""
            drawn.insert(1, f"nucleus {settings['top_p']:g}{rule}")
        drawn += [
            f"{name.replace('_', ' ')} {settings[name]:g}"
            for name in ("temperature", "top_k")
            if settings.get(name)
        ]
        table.add_row(
            Text(model_and_title(record)),
            f"{settings['length']:,}",
            "\n".join(under_judge),
            with_error(result["entropy"], result["entropy_error"]),
            "\n".join(passes),
            ", ".join(drawn),
        )
    return table


def _legend(records: Sequence[dict[str, Any]]) -> Text:
    lines = [
        "± is one standard error over samples. Entropy is that of the tokens in a sample, in nats; passes "
        "are the network evaluations that wrote a sample."
    ]
    if any(map(_is_of_other_code, records)):
        lines.append(f"{_UNKNOWN}: unknown, because a file of texts does not say how they were written.")
    if any(record["settings"].get(_PROMPTED) for record in records):
        lines.append(
            "After prompts: only the text after a prompt is scored, given the prompt; the entropy is of both."
        )
    if any(record["result"]["redrawn_passes"] for record in records):
        lines[0] += (
            " The number after + counts passes of rejected attempts, which are not included; a mean over "
            "samples."
        )
    for record in records:
        floor, left = record["settings"]["entropy_floor"], record["result"]["degenerate"]
        if left:
            lines.append(
                f"{left} samples of {record['model']} stayed below the entropy floor of {floor:g} and were "
                "cut short."
            )
    return Text("\n".join(lines))


def _line(record: dict[str, Any]) -> str:
    settings, result = record["settings"], record["result"]
    perplexity = with_error(result["perplexity"], result["perplexity_error"])
    length = "" if _is_of_other_code(record) else f", {settings['length']:,} tokens"
    return f"{record['model']}{length}: {perplexity}"


def _is_of_other_code(record: dict[str, Any]) -> bool:
    return record["settings"]["length"] is None
