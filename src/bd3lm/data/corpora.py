"""Find a corpus from what a user writes: a built-in name, a name from the paper, a file or a folder."""

from pathlib import Path

from bd3lm.data.corpus import Corpus
from bd3lm.data.files import FileCorpus, TextUnit
from bd3lm.data.hub import RECIPES, NamedCorpus
from bd3lm.data.topics import PYDOC, PydocCorpus
from bd3lm.io.files import local_path

CORPORA = (PYDOC, *RECIPES)


def load_corpus(
    source: str | Path,
    *,
    folder: str | Path | None = None,
    field: str | None = None,
    text_unit: TextUnit | None = None,
    held_out: float | None = None,
    max_document: int | None = None,
) -> Corpus:
    """The corpus that `source` names: one of `CORPORA`, or a path (write ./lm1b for a folder of that name).

    `folder` is a local copy of a named corpus. The other options say how to read files (see `FileCorpus`).
    """
    named = isinstance(source, str) and source in CORPORA
    of_files = {"field": field, "text_unit": text_unit, "held_out": held_out, "max_document": max_document}
    given = {"folder": folder, **of_files}
    allowed = {"folder"} if named and source != PYDOC else set() if named else set(of_files)
    for option, value in given.items():
        if value is not None and option not in allowed:
            raise ValueError(f"{option} does not apply to corpus {str(source)!r}, got {value!r}")
    if source == PYDOC:
        return PydocCorpus()
    if named:
        return NamedCorpus(str(source), folder=folder)
    if not local_path(source).exists():
        raise FileNotFoundError(f"{source} is neither a file or folder nor one of {', '.join(CORPORA)}")
    return FileCorpus(
        source,
        field=field or "text",
        text_unit=text_unit,
        held_out=held_out,
        max_document=max_document,
    )
