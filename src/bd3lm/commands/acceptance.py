"""`bd3lm acceptance`: how often a model accepts its own drafts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from bd3lm.commands.eval import recorded_data, text_name
from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    BosEosFlag,
    DeviceFlag,
    DTypeFlag,
    EosFlag,
    FieldFlag,
    Models,
    RecordsFlag,
    SequencesFlag,
    SplitFlag,
    TextsFlag,
    TokenizerFlag,
    named,
)

if TYPE_CHECKING:
    from rich.table import Table

    from bd3lm.commands.shared.subjects import Subject
    from bd3lm.evaluation import Acceptance as Measured
    from bd3lm.evaluation import Drafts
    from bd3lm.io.console import Console

USUAL = ((1.0, 1.0), (1.0, 0.9), (0.6, 0.9), (0.0, 1.0))
"""Pairs of temperature and top-p that are measured by default."""


@dataclass(frozen=True)
class Acceptance(Command):
    """Measure how often a model accepts its own drafts, by position of the draft.

    Works for drafters and joint models. Masks after a text draft the next tokens, and the causal law accepts
    or rejects each draft, so speculation does not change the distribution of the text. The rates are computed
    from probabilities, for both schemes: rejection, and coupled, which compares two draws with the same
    noise.
    """

    kind = "acceptance"

    models: Annotated[
        Models,
        arg(
            help="Runs, model folders or hub ids: drafters, or joint models, which draft with masks and "
            "verify with their causal law."
        ),
    ] = ()
    data: TextsFlag = ()
    masks: Annotated[
        int | None,
        named(
            "INT",
            help="Masks after a text. A drafter drafts one token per mask, a joint model one token less. "
            "Default: as many as in training.",
        ),
    ] = None
    temperature: Annotated[
        tuple[float, ...],
        named(
            "FLOAT ...",
            help="Temperatures, each combined with each --top-p; 0 is greedy. Default, in pairs of "
            "temperature and top-p: 1 and 1, 1 and 0.9, 0.6 and 0.9, greedy.",
        ),
    ] = ()
    top_p: Annotated[tuple[float, ...], named("FLOAT ...")] = ()
    """Values of top-p, each combined with each --temperature. 1: all tokens."""
    split: SplitFlag = None
    field: FieldFlag = None
    eos: EosFlag = True
    bos_eos: BosEosFlag = False
    sequences: SequencesFlag = None
    context: Annotated[
        int | None,
        named(
            "INT",
            help="Tokens per sequence, up to the context of the network. Default: that context; a drafter "
            "has the context of its base model, which is often far longer than the texts it was trained "
            "on.",
        ),
    ] = None
    batch_size: int = 16
    """Sequences per batch."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: DTypeFlag = None
    out: RecordsFlag = None

    def run(self) -> int:
        from bd3lm.commands.shared.records import write_records
        from bd3lm.io.console import Console

        self._check()
        write_records(self.out, report_acceptance(self, console=Console()))
        return 0

    def _check(self) -> None:
        """Refuse what is wrong before torch is loaded."""
        from bd3lm.commands.shared.corpora import check_texts
        from bd3lm.commands.shared.models import check_models
        from bd3lm.commands.shared.records import check_new_file
        from bd3lm.limits import check_counts, check_temperature

        check_new_file(self.out)
        if not self.models:
            raise ValueError("models must name at least one run, model folder or hub id, got none")
        check_models(self.models, device=self.device)
        check_counts(
            masks=self.masks,
            batch_size=self.batch_size,
            sequences=self.sequences,
            context=self.context,
        )
        for temperature in self.temperature:
            check_temperature(temperature, "--temperature")
        for top_p in self.top_p:
            if not 0.0 < top_p <= 1.0:
                raise ValueError(f"--top-p must lie in (0, 1], got {top_p}")
        check_texts(self.data or (None,), self.field)

    @property
    def drawn(self) -> tuple[tuple[float, float], ...]:
        """Pairs of temperature and top-p. Greedy decoding is one pair, whatever the top-p."""
        if not self.temperature and not self.top_p:
            return USUAL
        pairs = [(t, p if t else 1.0) for t in self.temperature or (1.0,) for p in self.top_p or (1.0,)]
        return tuple(dict.fromkeys(pairs))


def report_acceptance(flags: Acceptance, *, console: "Console") -> list[dict[str, Any]]:
    """Measure every model on every text, and print a table of each."""
    from bd3lm.commands.shared.subjects import Subject, tell_what_is_not_kept

    opened = [
        Subject.open(model, device=flags.device, dtype=flags.dtype, tokenizer=flags.tokenizer)
        for model in flags.models
    ]
    drafting = [_drafting(subject, flags.masks) for subject in opened]
    tell_what_is_not_kept(opened)
    records: list[dict[str, Any]] = []
    try:
        for source in flags.data or (None,):
            for subject, drafts in drafting:
                record = measure_drafts(subject, drafts, flags, source, console=console)
                records.append(record)
                console.print(_table(record))
    finally:  # the legend is printed even after an error or Ctrl-C
        if records:
            console.print(_LEGEND, soft_wrap=True, markup=False)
    return records


def _drafting(subject: "Subject", masks: int | None) -> "tuple[Subject, Drafts]":
    """A model under its causal law, which verifies drafts, and its drafting part."""
    config = subject.model.record
    try:
        drafts = config.method.drafts(config.frame, masks)
    except ValueError as error:
        raise ValueError(f"{subject.name}: {error}") from None
    return subject.under("causal"), drafts


def measure_drafts(
    subject: "Subject",
    drafts: "Drafts",
    flags: Acceptance,
    data: str | None = None,
    *,
    console: "Console | None" = None,
) -> dict[str, Any]:
    """The acceptance of a model's drafts on one text (default: its run's own), as a record stored next to the
    run."""
    from bd3lm.commands.shared.corpora import open_sequences, settings_of_reading
    from bd3lm.commands.shared.progress import tracked
    from bd3lm.commands.shared.records import keep, new_record, record_name
    from bd3lm.evaluation import measure_acceptance
    from bd3lm.sampling import Sharpening

    with open_sequences(
        subject,
        data,
        split=flags.split,
        field=flags.field,
        eos_between_documents=None if flags.eos else False,
        bos_eos=flags.bos_eos,
        limit=flags.sequences,
        context=flags.context,
        alone=True,
    ) as text:
        batches = tracked(
            text.batches(subject, flags.batch_size),
            f"{subject.title} on {text.name}",
            total=-(-text.number // flags.batch_size),
            console=console,
        )
        sharpenings = [Sharpening(temperature=t, top_p=p) for t, p in flags.drawn]
        found = measure_acceptance(subject.model.network, drafts, batches, sharpenings)
        drawn = dict(zip(sharpenings, flags.drawn, strict=True))
        settings = {
            "data": recorded_data(data),
            "text": text.fingerprint,
            "split": text.split,
            "law": subject.law,
            "masks": drafts.masks,
            "drawn": [{"temperature": t, "top_p": p} for t, p in flags.drawn],
            **settings_of_reading(text, subject, flags),
        }
        result = {
            "sequences": found[0].sequences,
            "figures": [_figure(each, *drawn[each.sharpening]) for each in found],
        }
    record = new_record(subject, "acceptance", settings=settings, result=result)
    words = (record["settings"]["data"], text.split)
    keep(subject, record_name("acceptance", record["settings"], *words), record)
    return record


def _figure(found: "Measured", temperature: float, top_p: float) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "top_p": top_p,
        "scheme": found.scheme,
        "places": [
            {
                "place": each.place,
                "drafts": each.drafts,
                "accepted": each.accepted.value,
                "accepted_error": each.accepted.error,
                "tokens_a_round": each.tokens.value,
                "tokens_a_round_error": each.tokens.error,
            }
            for each in found.places
        ],
    }


_LEGEND = (
    "Place 1 needs no draft: the causal law writes it. Tokens a round: that token plus the accepted drafts, "
    "for rounds that draft up to this place; computed from mean acceptances at starts spread evenly over the "
    "text. ± is one standard error (neighboring sequences treated as dependent). See docs/evaluation.md."
)


def _table(record: dict[str, Any]) -> "Table":
    """A row per place and way of drawing; fits into 80 columns for any number of drafts."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    from bd3lm.reports import with_error

    settings, result = record["settings"], record["result"]
    size = f"{result['sequences']:,} sequences of {settings['context']:,}"
    of = f"{record['model']} ({record['title']}), {settings['masks']} masks"
    table = Table(title=Text(f"{of}; {text_name(settings)}: {size}"), box=SIMPLE, padding=0, pad_edge=False)
    table.add_column("drawn", no_wrap=True)
    table.add_column("place", justify="right")
    for heading in ("accepted,", "accepted,", "tokens a round,", "tokens a round,"):
        scheme = ("rejection", "coupled")[(len(table.columns) - 2) % 2]
        table.add_column(f"{heading}\n{scheme}", justify="right", no_wrap=True)
    by_way: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for figure in result["figures"]:
        by_way.setdefault((figure["temperature"], figure["top_p"]), []).append(figure)
    for (temperature, top_p), figures in by_way.items():
        name = _way(temperature, top_p)
        for places in zip(*(figure["places"] for figure in figures), strict=True):
            cells = [
                with_error(each[what], each[f"{what}_error"])
                for what in ("accepted", "tokens_a_round")
                for each in places
            ]
            table.add_row(name, f"{places[0]['place']}", *cells)
            name = ""
        table.add_section()
    return table


def _way(temperature: float, top_p: float) -> str:
    if temperature == 0.0:
        return "greedy"
    return f"T {temperature:g}" + (f", p {top_p:g}" if top_p < 1.0 else "")
