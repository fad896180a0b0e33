"""`bd3lm eval`: perplexity of models on texts, exact or as a bound, with standard errors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    BosEosFlag,
    DeviceFlag,
    DTypeFlag,
    EosFlag,
    EstimatorFlag,
    FieldFlag,
    LawFlag,
    LeanFlag,
    Models,
    OptionalInt,
    RecordsFlag,
    SeedFlag,
    SequencesFlag,
    SplitFlag,
    TextsFlag,
    TokenizerFlag,
)

if TYPE_CHECKING:
    from bd3lm.commands.shared.subjects import Subject
    from bd3lm.evaluation import CorpusLikelihood, Estimator
    from bd3lm.io.console import Console
    from bd3lm.methods import Law


@dataclass(frozen=True, kw_only=True)
class Likelihoods(Command):
    """The flags and checks that `eval` and `zeroshot` share."""

    models: Models = ()
    estimator: EstimatorFlag = "auto"
    law: LawFlag = None
    lean: LeanFlag = None
    replicates: int = 1
    """Independent draws of a random estimate. More draws reduce the noise and measure it."""
    split: SplitFlag = None
    field: FieldFlag = None
    bos_eos: BosEosFlag = False
    sequences: SequencesFlag = None
    context: OptionalInt = None
    """Tokens per sequence, up to the context of the network. Default: that context."""
    seed: SeedFlag = 0
    batch_size: int = 16
    """Sequences per batch."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: DTypeFlag = None
    out: RecordsFlag = None

    def check(self, texts: Iterable[str | None]) -> None:
        """Refuse what is wrong before torch is loaded."""
        from bd3lm.commands.shared.corpora import check_texts
        from bd3lm.commands.shared.models import check_models
        from bd3lm.commands.shared.records import check_new_file
        from bd3lm.limits import check_counts

        check_new_file(self.out)
        if not self.models:
            raise ValueError("models must name at least one run, model folder, GGUF file or hub id, got none")
        check_models(self.models, device=self.device, lean=self.lean)
        check_counts(
            replicates=self.replicates,
            batch_size=self.batch_size,
            sequences=self.sequences,
            context=self.context,
        )
        check_texts(texts, self.field)

    def subjects(self) -> "list[Subject]":
        from bd3lm.commands.shared.subjects import Subject, check_lean_is_for, tell_what_is_not_kept

        opened = [
            Subject.open(model, device=self.device, dtype=self.dtype, tokenizer=self.tokenizer)
            for model in self.models
        ]
        tell_what_is_not_kept(opened)
        subjects = [subject.under(law, lean=self.lean) for subject in opened for law in self.laws_of(subject)]
        check_lean_is_for(subjects, self.lean)
        return subjects

    def laws_of(self, subject: "Subject") -> "Sequence[Law]":
        """The laws to measure a model under: --law, else its own."""
        return (self.law or subject.law,)

    def estimates(self, subjects: "Sequence[Subject]") -> "list[Estimate]":
        """What to measure of each model: one figure or, with --estimator paper, the paper's figure and our
        best one, unless they are the same.

        Replicates repeat random draws. A model that draws nothing is measured once next to models that draw;
        if no model draws, replicates are refused.
        """
        from bd3lm.lm import PAPER

        names = (PAPER, "auto") if self.estimator == PAPER else (self.estimator,)
        found, some_drawn = [], not subjects
        for subject in subjects:
            met = set()
            # The paper has no joint models; its figure is for the law that a model was made with.
            beside = self.estimator == PAPER and self.law is None and subject.law != subject.laws[0]
            for name in ("auto",) if beside else names:
                chosen = _estimator(subject, name)
                drawn = chosen is None or chosen.is_random
                some_drawn |= drawn
                if (known := name if chosen is None else chosen.name) not in met:
                    met.add(known)
                    own = replace(self, estimator=name, replicates=self.replicates if drawn else 1)
                    found.append(Estimate(subject, own, of_paper=name == PAPER))
        if self.replicates > 1 and not some_drawn:
            raise ValueError(f"replicates must be 1 for exact, which draws nothing, got {self.replicates}")
        return found


@dataclass(frozen=True)
class Estimate:
    """A measurement of a model, and whether it is the figure that the paper reports."""

    subject: "Subject"
    flags: Likelihoods
    of_paper: bool

    def name_of(self, figure_name: str) -> str:
        """The name of the figure in tables."""
        from bd3lm.reports import leaning

        law = f", {self.subject.law} law" if len(self.subject.laws) > 1 else ""
        return figure_name + leaning(self.subject.lean) + law + (", the paper's" if self.of_paper else "")


@dataclass(frozen=True, kw_only=True)
class Eval(Likelihoods):
    """Measure perplexity and bits per byte, exactly if possible, else as a bound.

    Each figure comes with its standard error.
    """

    kind = "eval"

    data: TextsFlag = ()
    eos: EosFlag = True

    def laws_of(self, subject: "Subject") -> "Sequence[Law]":
        """--law, else all laws of the model that the estimator can measure, its own first."""
        from bd3lm.lm import PAPER

        if self.law is not None:
            return (self.law,)
        if self.estimator == PAPER or len(subject.laws) == 1:
            return subject.laws
        fits = [law for law in subject.laws if _estimator(subject.under(law), self.estimator) is not None]
        return fits or subject.laws[:1]

    def run(self) -> int:
        from bd3lm.commands.shared.records import write_records
        from bd3lm.io.console import Console

        self.check(self.data or (None,))
        write_records(self.out, report_perplexities(self.subjects(), self, console=Console()))
        return 0


def measure_perplexity(
    subject: "Subject",
    flags: Likelihoods,
    data: str | None = None,
    *,
    eos_between_documents: bool | None = None,
    console: "Console | None" = None,
) -> dict[str, Any]:
    """The perplexity of one model on one text (default: its run's), as a record stored next to the run."""
    from bd3lm.commands.shared.corpora import open_sequences, settings_of_reading
    from bd3lm.commands.shared.progress import tracked
    from bd3lm.commands.shared.records import keep, new_record, record_name
    from bd3lm.evaluation import corpus_likelihood
    from bd3lm.lm import build_estimator

    network = subject.model.network
    chosen = build_estimator(subject.model.config, flags.estimator)
    with open_sequences(
        subject,
        data,
        split=flags.split,
        field=flags.field,
        eos_between_documents=eos_between_documents,
        bos_eos=flags.bos_eos,
        limit=flags.sequences,
        context=flags.context,
    ) as text:
        batches = tracked(
            text.batches(subject, flags.batch_size),
            f"{subject.title} on {text.name}",
            total=-(-text.number // flags.batch_size),
            console=console,
        )
        found = corpus_likelihood(network, chosen, batches, seed=flags.seed, replicates=flags.replicates)
        text_bytes = text.text_bytes(subject)
        record = new_record(
            subject,
            "perplexity",
            settings={
                "data": recorded_data(data),
                "text": text.fingerprint,
                "split": text.split,
                "estimator": chosen.name,
                "law": subject.law,
                "lean": subject.lean,
                "replicates": flags.replicates,
                "seed": flags.seed,
                **settings_of_reading(text, subject, flags),
            },
            result={
                "sequences": found[0].sequences,
                "tokens": found[0].tokens,
                "bytes": text_bytes,
                "figures": [figure_record(each, text_bytes) for each in found],
            },
        )
    settings = record["settings"]
    words = (settings["data"], settings["split"], chosen.name)
    keep(subject, record_name("perplexity", settings, *words), record)
    return record


def report_perplexities(
    subjects: "Sequence[Subject]", flags: Eval, *, console: "Console"
) -> list[dict[str, Any]]:
    """Measure every model on every text, and print a table of all figures."""
    estimates = flags.estimates(subjects)
    sources = flags.data or (None,)
    eos = None if flags.eos else False
    measured: list[Measured] = []
    try:
        for source in sources:
            for each in estimates:
                record = measure_perplexity(
                    each.subject, each.flags, source, eos_between_documents=eos, console=console
                )
                measured.append((each, record))
    finally:  # figures known so far are printed even after an error or Ctrl-C
        if measured:
            _print_tables(measured, subjects, console)
    return [record for _, record in measured]


def _print_tables(measured: "Sequence[Measured]", subjects: "Sequence[Subject]", console: "Console") -> None:
    """A table for each text, and the meaning of its signs."""
    from rich.table import Table

    for title, group in _by_text(measured):
        table = Table(title=title)
        table.add_column("model", overflow="fold")
        drawn = any(
            figure["monte_carlo_error"] for _, record in group for figure in record["result"]["figures"]
        )
        for heading in ("estimator", "perplexity", *_of_draws(drawn), "bits/token", "bits/byte"):
            table.add_column(heading, justify="right", no_wrap=True)
        above: Subject | None = None
        for each, record in group:
            for figure in record["result"]["figures"]:
                name = "" if each.subject is above else record["model"]
                table.add_row(name, each.name_of(figure["name"]), *_cells(figure, drawn))
                above = each.subject
        console.print(table)
    records = [record for _, record in measured]
    figures = [figure for record in records for figure in record["result"]["figures"]]
    console.print(legend(subjects, records, figures), soft_wrap=True, markup=False)


def _estimator(subject: "Subject", name: str) -> "Estimator | None":
    """The estimator for a model; None if the model does not have it, which measuring reports as an error."""
    from bd3lm.lm import build_estimator

    try:
        return build_estimator(subject.model.config, name)
    except ValueError:
        return None


def figure_record(found: "CorpusLikelihood", text_bytes: int | None) -> dict[str, Any]:
    """A figure as records store it. Without the bytes of its text it has no bits per byte."""
    return {
        "name": found.figure.name,
        "meaning": found.figure.meaning,
        "nats": found.nats,
        "standard_error": found.standard_error,
        "monte_carlo_error": found.monte_carlo_error,
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "bits_per_token": found.bits_per_token,
        "bits_per_byte": None if not text_bytes else found.bits_per_byte(text_bytes),
    }


def _of_draws(drawn: bool, cell: str = "of draws") -> list[str]:
    return [cell] if drawn else []


def _cells(figure: dict[str, Any], drawn: bool) -> list[str]:
    """The figures of one row. Records have null for non-finite figures and for unknown bits per byte."""
    from bd3lm.reports import perplexity_text, plain

    noise, bits = figure["monte_carlo_error"], figure["bits_per_token"]
    known = figure["bits_per_byte"] is not None
    return [
        perplexity_text(figure),
        *_of_draws(
            drawn, f"± {plain(noise * figure['perplexity'])}" if noise and figure["perplexity"] else ""
        ),
        "∞" if bits is None else f"{bits:.3f}",
        f"{figure['bits_per_byte']:.3f}" if known else "",
    ]


def _less_noise(subjects: "Sequence[Subject]", records: Sequence[dict[str, Any]]) -> str:
    """Advice to use counts instead of nelbo, for the models that can and have nothing better."""
    ways = {True: set[tuple[str, str]](), False: set[tuple[str, str]]()}
    for record in records:
        settings = record["settings"]
        ways[settings["estimator"] == "nelbo"].add((record["model"], settings["law"]))
    drawn = ways[True] - ways[False]
    allowed = {
        subject.name: _estimator(subject, "counts") is not None
        for subject in subjects
        if (subject.name, subject.law) in drawn
    }
    names = [name for name, has in allowed.items() if has]
    if not names:
        return ""
    which = "" if all(allowed.values()) else f" for {', '.join(names)}"
    return f"; counts is the same bound with less noise{which}"


def legend(
    subjects: "Sequence[Subject]", records: Sequence[dict[str, Any]], figures: Sequence[dict[str, Any]]
) -> str:
    """The meaning of the signs in a table, as far as it has them; docs/evaluation.md says more."""
    drawn = [figure for figure in figures if figure["monte_carlo_error"] != 0.0]
    with_draws = ", including the noise of the draws" if drawn else ""
    words = [f"± is one standard error (neighboring sequences treated as dependent{with_draws})."]
    met = {figure["meaning"] for figure in figures}
    if "bound" in met:
        words.append(f"≤ upper bound{', or an estimate of one' if drawn else ''}.")
    if "neither" in met:
        words.append("≈ neither exact nor a bound.")
    if any(figure["monte_carlo_error"] is None for figure in figures):
        words.append("--replicates 4 measures how much of it comes from the draws.")
    in_steps = {subject.name for subject in subjects if subject.model.config.method.weighs_in_steps}
    if any(
        figure["name"] in ("nelbo", "nelbo:ordered") and figure["monte_carlo_error"] != 0.0  # rates down to 0
        for record in records
        if record["model"] not in in_steps
        for figure in record["result"]["figures"]
    ):
        words.append(
            f"nelbo has no finite variance, so its ± may be too small{_less_noise(subjects, records)}."
        )
    explained = {
        "law": any(len(subject.laws) > 1 for subject in subjects),
        "lean": any(record["settings"]["lean"] for record in records),
    }
    if any(explained.values()):
        names = " and ".join(name for name, met in explained.items() if met)
        words.append(f"{names}: docs/sampling.md.")
    lines = [" ".join(words)]
    if len({subject.tokenizer for subject in subjects}) > 1:
        lines.append(
            "Tokenizers differ, so perplexities per token cannot be compared between these models: compare "
            "bits per byte."
        )
    return "\n".join(lines)


Measured = tuple[Estimate, dict[str, Any]]


def _by_text(measured: Sequence[Measured]) -> list[tuple[str, list[Measured]]]:
    """(Title, measurements) for each text; runs that held out the same text share a table.

    The title says how much was scored, and a table holds only models that were scored on the same amount.
    Another context, a scored first token, or BOS and EOS around each sequence makes another table, perhaps
    with the same name.
    """
    groups: dict[tuple[Any, ...], list[Measured]] = {}
    for each, record in measured:
        settings, result = record["settings"], record["result"]
        cut = (settings["context"], settings.get("bos_eos", False))
        key = (settings["text"], settings["split"], *cut, result["sequences"], result["tokens"])
        groups.setdefault(key, []).append((each, record))
    return [(_title(group[0][1]), group) for group in groups.values()]


def _title(record: dict[str, Any]) -> str:
    settings, result = record["settings"], record["result"]
    cut = f"{result['sequences']:,} sequences of {settings['context']:,}"
    frame = " with BOS and EOS" if settings.get("bos_eos") else ""
    return f"{text_name(settings)}: {cut}{frame}, {result['tokens']:,} tokens scored"


def recorded_data(data: str | None) -> str:
    """The name of a text in records: a path is never the bare word that stands for the run's own data."""
    from bd3lm.reports.content import OWN

    return OWN if data is None else f"./{data}" if data == OWN else data


def text_name(settings: dict[str, Any]) -> str:
    from bd3lm.reports.content import HELD_OUT, OWN

    data = settings["data"]
    split = "" if settings["split"] == "train" and Path(data).is_file() else f", split {settings['split']}"
    own = "held-out text" if settings["split"] in HELD_OUT else "training text"
    return f"{own if data == OWN else data}{split}"
