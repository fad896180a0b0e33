"""Samples to measure: drawn from a model, or read from a file of `bd3lm sample` or other software."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

import bd3lm
from bd3lm.commands.shared.models import PLAIN_TEXT, SUFFIX, is_file_of_samples
from bd3lm.commands.shared.records import FOLDER
from bd3lm.commands.shared.subjects import Subject, check_lean_is_for, tell_what_is_not_kept
from bd3lm.commands.shared.writing import (
    Author,
    Bar,
    sample_record,
    sampling_dtype,
    settings_record,
    write_texts,
)
from bd3lm.data import load_corpus
from bd3lm.data.corpus import digest
from bd3lm.io.console import Console
from bd3lm.io.files import local_path
from bd3lm.io.reading import max_document_of, numbered_lines, open_text
from bd3lm.kinds import spelt_out
from bd3lm.lm import Settings

# The fields used from a line of `bd3lm sample --out`.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "documents": list,
    "length": int,
    "given": int,
    "evaluations": int,
    "redraws": int,
    "redrawn_passes": int,
    "stopped_by": str,
    "entropy": (int, float),
    "dtype": str,
    "settings": dict,
}
_MAY_DIFFER = ("seed", "batch_size")  # in a file merged from several


@dataclass(frozen=True)
class Samples:
    """Texts as `bd3lm sample --out` records them, with their model if it is known.

    Texts of other software have the same fields; all but their documents are None.
    """

    name: str
    records: Sequence[Mapping[str, Any]]
    subject: Subject | None = None

    @classmethod
    def read(cls, file: Path, *, field: str = "text", max_document: int | None = None) -> "Samples":
        """Read the samples in a file, all of which must have been written in one way.

        The file holds lines of `bd3lm sample --out`, or texts of other software: lines with a `field` that
        holds a text or a list of texts, or a .txt file with blank lines between texts.
        """
        if not file.is_file():
            raise ValueError(f"there is no file {file}")
        if file.name.endswith(PLAIN_TEXT):
            corpus = load_corpus(file, held_out=0, max_document=max_document)
            texts = [_of_other_code(text) for text in corpus.documents("train")]
            if not texts:
                raise ValueError(f"{file} must hold at least one text, got none")
            return cls(str(file), texts)
        try:
            with open_text(file) as text:
                records = [
                    record
                    for number, line in numbered_lines(text, file, max_document_of(max_document))
                    if line.strip()
                    for record in _parse(line, field, f"{file} line {number}")
                ]
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be text, as `bd3lm sample --out` writes it: {error}") from None
        if not records:
            raise ValueError(f"{file} must hold at least one sample, got none")
        ways = {json.dumps(_way(record), sort_keys=True) for record in records}
        if len(ways) > 1:
            raise ValueError(
                f"{file} must hold samples written in one way, got {len(ways)} different settings or models"
            )
        return cls(str(file), records)

    @classmethod
    def draw(
        cls, subject: Subject, count: int, settings: Settings, *, kind: str, notes: Console
    ) -> "Samples":
        """Let a model write from scratch. For a run, the samples are stored next to it and reused.

        The file name contains a digest of everything that determines the texts, so other weights or settings
        give another file, and no file is overwritten.
        """
        model, file = subject.model, None
        if subject.run is not None and subject.can_keep:
            key = _key(subject, count, settings)
            file = subject.run / FOLDER / f"{kind}-{key[:8]}{SUFFIX}"
            if file.is_file():
                notes.print(Text(f"measuring {file}, drawn earlier"), soft_wrap=True)
                drawn = sorted(cls.read(file).records, key=lambda record: record["index"])
                return cls(subject.name, drawn, subject)
            file.parent.mkdir(exist_ok=True)
        many = f"{count:,} texts" if count > 1 else "a text"
        notes.print(
            Text(f"writing {many} of up to {settings.length:,} tokens by {subject.name}"), soft_wrap=True
        )
        author = Author(subject.name, subject.weights)
        texts = write_texts(
            model,
            [""] * count,
            settings,
            author=author,
            out=file,
            displays=[Bar(notes, count, device=subject.device)],
            notes=notes,
        )
        if file is not None:  # some may have been written by an earlier command
            return cls(subject.name, cls.read(file).records, subject)
        records = [sample_record(text, "", settings, model, author) for text in texts]
        return cls(subject.name, records, subject)

    @property
    def origin(self) -> Subject | str:
        """The subject of their records: the model, or the name of a file."""
        return self.name if self.subject is None else self.subject

    @property
    def weights(self) -> str | None:
        """Digest of the weights that wrote them; None if an old file does not say."""
        weights: str | None = self.records[0].get("weights")
        return weights

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that all share; None for a setting that differs."""
        first: Mapping[str, Any] = self.records[0]["settings"]
        return {
            name: value if all(record["settings"].get(name) == value for record in self.records) else None
            for name, value in first.items()
        }

    @property
    def is_of_other_code(self) -> bool:
        """Whether only the texts are known, and not how they were written."""
        return self.records[0].get("settings") == {} and self.records[0].get("length") is None

    @property
    def length(self) -> int | None:
        """The requested length, else the length of the longest; None for texts of other software."""
        if self.is_of_other_code:
            return None
        return self.settings.get("length") or max(self.values("length"))

    @property
    def lean(self) -> float | None:
        """The lean of the unmasking rule; 0 for a rule without one, None for texts of other software."""
        if self.is_of_other_code:
            return None
        rule = spelt_out(self.settings.get("unmasking")) or {}
        return float(rule.get("lean", 0.0))

    @property
    def law(self) -> str | None:
        """The law that they were drawn under; None if the file does not say."""
        law: str | None = self.records[0].get("law")
        return law

    @property
    def other_drawing(self) -> dict[str, Any]:
        """The nucleus rule, temperature and top_k for a record, if they are not the usual ones.

        Records leave out usual values, so they stay equal to records from before these settings existed.
        """
        usual = {"top_p_rule": "inclusive", "temperature": 1.0, "top_k": None}
        return {
            name: value
            for name, default in usual.items()
            if (value := self.settings.get(name, default)) != default
        }

    def values(self, field: str) -> list[Any]:
        return [record[field] for record in self.records]

    def prompts(self) -> list[str]:
        """The prompt of each text; empty for a text written from scratch.

        Refuses samples whose prompt is unknown: the given text would be measured as if the model had written
        it.
        """
        return [self._prompt(index) for index in range(len(self.records))]

    def _prompt(self, index: int) -> str:
        record = self.records[index]
        where, documents, prompt = f"sample {index} of {self.name}", record["documents"], record.get("prompt")
        if record.get("template"):
            raise ValueError(
                f"{where} fills the gaps of a template, so given text stands between written text: judge "
                "texts that continue a prompt or were written from scratch"
            )
        text, written = record.get("text"), record.get("completion")
        if isinstance(text, str) and isinstance(written, str):
            prompt = text[: len(text) - len(written)]
        elif (record["given"] or 0) > 1 and not prompt:
            raise ValueError(
                f"{where} was given {record['given']} tokens and does not say which: write it again with "
                "`bd3lm sample --out`"
            )
        if prompt and not (isinstance(prompt, str) and documents and documents[0].startswith(prompt)):
            raise ValueError(f"{where} must begin with its prompt, {prompt!r:.80}, got {documents!r:.80}")
        return prompt or ""

    def require_from_nothing(self) -> None:
        """Refuse samples with a prompt: the given text would be measured as if the model had written it."""
        for index, record in enumerate(self.records):
            given = record["given"] or 0
            if given > 1 or record.get("prompt"):
                tokens = f"was given {given} tokens" if given else "has a prompt"
                raise ValueError(
                    f"sample {index} of {self.name} must be written from scratch, without a prompt, got one "
                    f"that {tokens}"
                )


def open_source(
    source: str, *, field: str = "text", max_document: int | None = None, **options: Any
) -> Subject | Samples:
    """Open a file of samples, with the texts in `field`, or a model, with `options`."""
    if is_file_of_samples(source):
        return Samples.read(local_path(source), field=field, max_document=max_document)
    if Path(source).is_file() and not source.endswith((".ckpt", ".gguf")):
        raise ValueError(
            f"sources must be runs, model folders, GGUF files, hub ids or files of texts ({SUFFIX} from "
            f"`bd3lm sample --out` or with a field text, or {PLAIN_TEXT}), got the file {source}"
        )
    return Subject.open(source, **options)


def open_sources(flags: Any, *, field: str = "text") -> list[Subject | Samples]:
    """Open the sources of a command: models with its --device, --dtype, --tokenizer, --law and --lean."""
    dtype = sampling_dtype(flags.dtype, flags.device)
    options = {
        "device": flags.device,
        "dtype": dtype,
        "tokenizer": flags.tokenizer,
        "law": flags.law,
        "lean": flags.lean,
    }
    of_files = {"field": field, "max_document": flags.max_document}
    sources = [open_source(source, **of_files, **options) for source in flags.sources]
    subjects = [each for each in sources if isinstance(each, Subject)]
    check_lean_is_for(subjects, flags.lean)
    tell_what_is_not_kept(subjects)
    return sources


def _parse(line: str, field: str, where: str) -> list[dict[str, Any]]:
    """The samples in a line: one, or each text of a list."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON, as `bd3lm sample --out` writes it: {error}") from None
    fields = record if isinstance(record, dict) else {}
    if not fields.keys() & {"documents", "settings"}:
        found = fields.get(field)
        texts: list[Any] = found if isinstance(found, list) else [found]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"{where} must have a text in its field {field}, or be a line of `bd3lm sample --out`, got "
                f"{line.strip():.80}"
            )
        return [_of_other_code(text, fields.get("prompt")) for text in texts]
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(fields.get(name), kind)]
    if wrong or not all(isinstance(document, str) for document in fields["documents"]):
        raise ValueError(
            f"{where} must be a sample as `bd3lm sample --out` writes it; missing or of the wrong type: "
            f"{', '.join(wrong) or 'documents'}"
        )
    return [fields]


def _of_other_code(text: str, prompt: Any = None) -> dict[str, Any]:
    """A text about which nothing else is known."""
    unknown = dict.fromkeys(_FIELDS)
    return {**unknown, "documents": [text], "prompt": prompt, "settings": {}}


def _key(subject: Subject, count: int, settings: Settings) -> str:
    """A digest of everything that determines the texts. The batch size does not."""
    decides = {name: value for name, value in settings_record(settings).items() if name != "batch_size"}
    tokenizer = subject.model.tokenizer
    spoken = None if tokenizer is None else tokenizer.fingerprint
    return digest([bd3lm.__version__, subject.weights, subject.dtype, subject.law, spoken, count, decides])


def _way(record: Mapping[str, Any]) -> list[Any]:
    """How a sample was written, as far as samples that are measured together must agree."""
    settings = {name: value for name, value in record["settings"].items() if name not in _MAY_DIFFER}
    return [settings, record["dtype"], record.get("weights"), record.get("law")]
