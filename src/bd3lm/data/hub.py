"""The paper's corpora by name, through Hugging Face `datasets`, read as their papers read them.

`datasets` no longer runs scripts. If the main revision of a data set has a script, we read the parquet files
that the hub makes from it (revision refs/convert/parquet). They lie under configuration/split/. If any split
of a configuration is larger than the hub converts (5 GB), all its splits lie under
configuration/partial-split/. Everything is streamed and pinned to a commit, which is part of the fingerprint.

What the hub's pages and public code say about the files, looked up in 2026:

- lm1b, ptb: plain_text/{train,test}/ and penn_treebank/{train,validation,test}/ of the converted revision.
- pubmed: not partial, since its splits are below 5 GB. arxiv: arxiv/partial-{train,validation,test}/ (renamed
  by commit 80db6a9 of that revision), so validation and test are whole and **train ends after 5 GB**.
- openwebtext: plain_text/train-*-of-00080.parquet on main, which was a script until late in 2025. Its
  converted revision is partial and is refused: it would be the first 5 GB of 40.
- wikitext103, ag_news: parquet on main (wikitext-103-raw-v1/, data/).
- lambada: not certain. Some code reads parquet on main (default/test/), some says that there is a script too.
  So we check main for a script, as for every corpus read from it.

**Untested against the hub**: these loaders are tested on small local files with the same schemas. To read
your own copy, give its `folder` of parquet files, with the split in file or folder names; the same code reads
it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from bd3lm.data import detokenizers
from bd3lm.data.corpus import Corpus, digest
from bd3lm.data.detokenizers import Detokenizer
from bd3lm.data.files import fingerprint_files
from bd3lm.data.folders import files_by_name, find_files
from bd3lm.io.extras import require
from bd3lm.io.files import local_path
from bd3lm.io.hub import hub_reason

_READING = 1  # increase this when the code below makes other documents from the same rows and recipe
CONVERTED = "refs/convert/parquet"
PARTIAL = "partial-"
_THREE = {"train": "train", "valid": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where a data set is, what its columns are called, and how to restore its text."""

    repo: str
    config: str
    field: str = "text"
    splits: Mapping[str, str]  # our names to theirs
    detokenize: Detokenizer | None = None
    script: bool = False  # the main revision is known to be a script: use the converted one without checking
    held_out: int = 0  # this many last rows of train are valid
    articles: bool = False  # rows are lines, to be joined into articles

    def as_json(self) -> dict[str, Any]:
        """Every field, with the detokenizer's rules instead of the object."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        rules = None if self.detokenize is None else self.detokenize.rules
        return plain | {"splits": dict(self.splits), "detokenize": rules}


RECIPES = {
    # LM1B has no validation split; the paper reports the test split.
    "lm1b": Recipe(
        repo="billion-word-benchmark/lm1b",
        config="plain_text",
        splits={"train": "train", "valid": "test", "test": "test"},
        detokenize=detokenizers.lm1b,
        script=True,
    ),
    "openwebtext": Recipe(
        repo="Skylion007/openwebtext",
        config="plain_text",
        splits={"train": "train", "valid": "train"},
        held_out=100_000,
    ),
    "ptb": Recipe(
        repo="ptb-text-only/ptb_text_only",
        config="penn_treebank",
        splits=_THREE,
        field="sentence",
        detokenize=detokenizers.ptb,
        script=True,
    ),
    "wikitext103": Recipe(
        repo="Salesforce/wikitext",
        config="wikitext-103-raw-v1",
        splits=_THREE,
        detokenize=detokenizers.wikitext,
        articles=True,
    ),
    "lambada": Recipe(
        repo="EleutherAI/lambada_openai",
        config="default",
        splits={"test": "test"},
        detokenize=detokenizers.lambada,
    ),
    "ag_news": Recipe(
        repo="fancyzhx/ag_news",
        config="default",
        splits={"train": "train", "test": "test"},
    ),
    "pubmed": Recipe(
        repo="armanc/scientific_papers",
        config="pubmed",
        splits=_THREE,
        field="article",
        detokenize=detokenizers.scientific_papers,
        script=True,
    ),
    "arxiv": Recipe(
        repo="armanc/scientific_papers",
        config="arxiv",
        splits=_THREE,
        field="article",
        detokenize=detokenizers.scientific_papers,
        script=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class _State:
    """A revision of a data set: its commit and the paths of its files."""

    commit: str
    files: tuple[str, ...]
    converted: bool


class NamedCorpus(Corpus):
    """A corpus of the paper, from the hub or from a `folder` of parquet files with the same columns."""

    def __init__(self, name: str, *, folder: str | Path | None = None) -> None:
        if name not in RECIPES:
            raise ValueError(f"name must be one of {', '.join(RECIPES)}, got {name!r}")
        self.name = name
        self._recipe = RECIPES[name]
        self._folder = None if folder is None else local_path(folder)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._recipe.splits)

    @cached_property
    def fingerprint(self) -> str:
        if self._folder is None:
            rows = self._state.commit
        else:
            rows = fingerprint_files(self._folder, find_files(self._folder))
        return digest([_READING, self.name, self._recipe.as_json(), rows])

    def documents(self, split: str) -> Iterator[str]:
        self.check_split(split)
        recipe = self._recipe
        rows: Iterator[str] = (row[recipe.field] or "" for row in self._part(split))
        if recipe.detokenize is not None:
            rows = map(recipe.detokenize, rows)
        if recipe.articles:
            rows = join_articles(rows)
        return (row for row in rows if row.strip())

    def count(self, split: str) -> int | None:
        """The number on the data set's card, which counts rows instead of articles."""
        self.check_split(split)
        if self._recipe.articles or self._folder is not None:
            return None
        rows = self._stated_rows(self._dataset(self._recipe.splits[split]), self._recipe.splits[split])
        if rows is None or not self._recipe.held_out:
            return rows
        return self._recipe.held_out if split == "valid" else rows - self._recipe.held_out

    def _part(self, split: str) -> Iterable[dict[str, Any]]:
        theirs = self._recipe.splits[split]
        rows = self._dataset(theirs)
        held_out = self._recipe.held_out
        if not held_out:
            return rows
        total = self._stated_rows(rows, theirs) or sum(1 for _ in rows)
        if total <= held_out:
            raise ValueError(f"{self.name} holds out its last {held_out} rows, but has only {total}")
        return rows.skip(total - held_out) if split == "valid" else islice(rows, total - held_out)

    @staticmethod
    def _stated_rows(rows: Any, theirs: str) -> int | None:
        stated = (rows.info.splits or {}).get(theirs)
        return stated.num_examples if stated is not None and stated.num_examples else None

    def _dataset(self, theirs: str) -> Any:
        load_dataset = require("datasets", "data", f"corpus {self.name!r}").load_dataset
        recipe = self._recipe
        what: tuple[str, ...] = ("parquet",)
        where: dict[str, Any]
        if self._folder is not None:
            where = {"data_files": {theirs: [str(file) for file in self._local_files(theirs)]}}
        elif self._state.converted:
            folder = f"hf://datasets/{recipe.repo}@{self._state.commit}/{self._converted(theirs)}"
            where = {"data_files": {theirs: f"{folder}/*.parquet"}}
        else:
            what, where = (recipe.repo, recipe.config), {"revision": self._state.commit}
        try:
            rows = load_dataset(*what, **where, split=theirs, streaming=True)
        except Exception as error:  # from the library, from its network library, or from the system
            raise self._unreachable(error) from error
        if rows.column_names is not None and recipe.field not in rows.column_names:
            raise ValueError(
                f"{self._folder or recipe.repo} has no column {recipe.field!r}, which {self.name} reads: "
                f"it has {', '.join(rows.column_names)}"
            )
        return rows.select_columns([recipe.field])

    def _local_files(self, theirs: str) -> list[Path]:
        assert self._folder is not None
        by_split = files_by_name(self._folder, find_files(self._folder))
        ours = next(split for split in ("train", "valid", "test") if _THREE[split] == theirs)
        if not by_split.get(ours):
            raise FileNotFoundError(f"{self._folder} holds no parquet file whose name says {theirs}")
        return by_split[ours]

    def _converted(self, theirs: str) -> str:
        """The folder of a split in the converted revision, whole or partial."""
        recipe = self._recipe
        whole, partial = f"{recipe.config}/{theirs}", f"{recipe.config}/{PARTIAL}{theirs}"
        folders = {file.rpartition("/")[0] for file in self._state.files if file.endswith(".parquet")}
        if whole in folders:
            return whole
        failed = (
            f"corpus {self.name!r} could not be read from {recipe.repo} on the Hugging Face hub: {CONVERTED}"
        )
        if partial not in folders:
            has = ", ".join(sorted(folders)) or "none"
            raise FileNotFoundError(f"{failed} holds no parquet files in {whole} or {partial}, only in {has}")
        if recipe.held_out:
            raise FileNotFoundError(
                f"{failed} holds only {partial}, and not the last {recipe.held_out} rows of {theirs}, which "
                "are held out"
            )
        return partial

    @cached_property
    def _state(self) -> "_State":
        """The current state on the hub. It is fetched once, so that one preparation reads one state of the
        data set."""
        if self._recipe.script:
            return self._state_of(CONVERTED)
        main = self._state_of(None)
        return (
            self._state_of(CONVERTED) if f"{self._recipe.repo.rpartition('/')[2]}.py" in main.files else main
        )

    def _state_of(self, revision: str | None) -> "_State":
        from huggingface_hub import HfApi

        try:
            info = HfApi().dataset_info(self._recipe.repo, revision=revision)
        except Exception as error:  # not all network errors are OSErrors
            raise self._unreachable(error) from error
        if info.sha is None:
            raise FileNotFoundError(f"the hub names no commit of {self._recipe.repo}")
        files = tuple(file.rfilename for file in info.siblings or ())
        return _State(commit=info.sha, files=files, converted=revision == CONVERTED)

    def _unreachable(self, error: Exception) -> FileNotFoundError:
        where = self._folder or f"{self._recipe.repo} on the Hugging Face hub"
        return FileNotFoundError(f"corpus {self.name!r} could not be read from {where}: {hub_reason(error)}")


def join_articles(lines: Iterable[str]) -> Iterator[str]:
    """Join WikiText's rows, which are lines, into articles. An article starts at its title, " = Title = "."""
    article: list[str] = []
    for line in lines:
        if _TITLE.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    if article:
        yield "".join(article)


_TITLE = re.compile(r" = (?!=)[^\n]*(?<!=) = ?\n?")
