"""The named corpora on small local files with the same schemas, read by `datasets`; the hub is imitated."""

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bd3lm.data import NamedCorpus, hub
from bd3lm.data.detokenizers import Detokenizer
from bd3lm.data.hub import RECIPES, Recipe, join_articles

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, **columns: Sequence[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)


def documents(corpus: NamedCorpus) -> dict[str, list[str]]:
    return {split: list(corpus.documents(split)) for split in corpus.splits}


def test_lm1b(tmp_path: Path) -> None:
    write(tmp_path / "train" / "0000.parquet", text=["It 's one .", "A second ."])
    write(tmp_path / "train" / "0001.parquet", text=["A third ."])
    write(tmp_path / "test" / "0000.parquet", text=["Held out , it is ."])
    test = ["Held out, it is."]
    expected = {"train": ["It's one.", "A second.", "A third."], "valid": test, "test": test}
    assert documents(NamedCorpus("lm1b", folder=tmp_path)) == expected


def test_openwebtext_holds_out_its_last_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RECIPES["openwebtext"].held_out == 100_000
    monkeypatch.setitem(hub.RECIPES, "openwebtext", replace(RECIPES["openwebtext"], held_out=4))
    texts = [f"Page {i} , as it was ." for i in range(10)]
    write(tmp_path / "train-00000-of-00002.parquet", text=texts[:7])
    write(tmp_path / "train-00001-of-00002.parquet", text=texts[7:])
    corpus = NamedCorpus("openwebtext", folder=tmp_path)
    assert documents(corpus) == {"train": texts[:6], "valid": texts[6:]}


def test_openwebtext_must_be_larger_than_what_it_holds_out(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", text=["only"])
    with pytest.raises(ValueError, match="openwebtext holds out its last 100000 rows, but has only 1"):
        list(NamedCorpus("openwebtext", folder=tmp_path).documents("valid"))


def test_ptb_reads_sentences(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        write(
            tmp_path / f"{split}-00000-of-00001.parquet", sentence=[f"the {split} does n't cost $ N million"]
        )
    expected = {
        ours: [f"the {theirs} doesn't cost $1 million"] for ours, theirs in RECIPES["ptb"].splits.items()
    }
    assert documents(NamedCorpus("ptb", folder=tmp_path)) == expected


def test_wikitext103_joins_lines_into_articles(tmp_path: Path) -> None:
    rows = ["", " = Robert = \n", "", " A well @-@ known man . \n", " = = Life = = \n", "", " He lived . \n"]
    second = ["", " = Valkyria = \n", "", " A game , in 1 @,@ 000 parts . \n"]
    for split in ("train", "validation", "test"):
        write(tmp_path / f"{split}-00000-of-00001.parquet", text=rows + second)
    articles = [
        " = Robert =\n A well-known man.\n == Life ==\n He lived.\n",
        " = Valkyria =\n A game, in 1,000 parts.\n",
    ]
    corpus = NamedCorpus("wikitext103", folder=tmp_path)
    assert documents(corpus) == dict.fromkeys(("train", "valid", "test"), articles)


def test_lambada(tmp_path: Path) -> None:
    write(tmp_path / "test.parquet", text=["“ yes , ” she said"])
    assert documents(NamedCorpus("lambada", folder=tmp_path)) == {"test": ['\n" yes , " she said']}


def test_ag_news(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}.parquet", text=[f"News of {split} ."], label=[2])
    expected = {"train": ["News of train ."], "test": ["News of test ."]}
    assert documents(NamedCorpus("ag_news", folder=tmp_path)) == expected


@pytest.mark.parametrize("name", ["pubmed", "arxiv"])
def test_scientific_papers_are_their_articles(tmp_path: Path, name: str) -> None:
    for split in ("train", "validation", "test"):
        write(
            tmp_path / split / "0.parquet",
            article=["it 's found ( here ) , and seen ."],
            abstract=["no"],
            section_names=["no"],
        )
    assert set(map(tuple, documents(NamedCorpus(name, folder=tmp_path)).values())) == {
        ("it's found (here), and seen.",)
    }


def test_every_corpus_of_the_paper_is_there() -> None:
    assert {"lm1b", "openwebtext", "ptb", "wikitext103", "lambada", "ag_news", "pubmed", "arxiv"} == set(
        RECIPES
    )


def test_blank_rows_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "test.parquet", text=["a", None, " ", "b"])
    write(tmp_path / "train.parquet", text=["c"])
    assert documents(NamedCorpus("ag_news", folder=tmp_path))["test"] == ["a", "b"]


def test_the_fingerprint_follows_the_files_and_the_corpus(tmp_path: Path) -> None:
    for place, text in (("a", "x"), ("b", "x"), ("c", "y")):
        write(tmp_path / place / "train.parquet", text=[text])
    a, b, c = (NamedCorpus("openwebtext", folder=tmp_path / place).fingerprint for place in "abc")
    assert a == b != c
    assert NamedCorpus("ag_news", folder=tmp_path / "a").fingerprint != a


CHANGES: dict[str, object] = {
    "repo": "someone/else",
    "config": "another",
    "field": "text",
    "splits": {"train": "train", "valid": "test", "test": "test"},
    "detokenize": Detokenizer(*RECIPES["ptb"].detokenize.rules[:-1]),
    "script": False,
    "held_out": 1,
    "articles": True,
}


@pytest.mark.parametrize("option", [field.name for field in fields(Recipe)])
def test_the_fingerprint_follows_every_option_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    write(tmp_path / "train.parquet", sentence=["x"])
    before = NamedCorpus("ptb", folder=tmp_path).fingerprint
    monkeypatch.setitem(hub.RECIPES, "ptb", replace(RECIPES["ptb"], **{option: CHANGES[option]}))
    assert NamedCorpus("ptb", folder=tmp_path).fingerprint != before


def test_the_fingerprint_tells_a_recipe_without_a_detokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "train.parquet", sentence=["x"])
    before = NamedCorpus("ptb", folder=tmp_path).fingerprint
    monkeypatch.setitem(hub.RECIPES, "ptb", replace(RECIPES["ptb"], detokenize=None))
    assert NamedCorpus("ptb", folder=tmp_path).fingerprint != before


@pytest.mark.parametrize("lines", [[], ["no title\n"], [" = = Only a section = = \n"]])
def test_lines_without_a_title_are_one_article(lines: list[str]) -> None:
    assert list(join_articles(lines)) == lines


# --- the hub, imitated ------------------------------------------------------------------------------


class Hub:
    """Replaces `load_dataset` and `HfApi`, and records the requests."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        rows: int = 10,
        files: Sequence[str] = (),
        field: str = "text",
        main: Sequence[str] = ("README.md",),
    ) -> None:
        """`files` are in the converted revision, `main` in the main one."""
        self.loaded: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.revisions: list[str | None] = []
        self.rows, self.field = rows, field
        self.held = {None: ("c0ffee", main), "refs/convert/parquet": ("decade", files)}
        monkeypatch.setattr(datasets, "load_dataset", self.load)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(dataset_info=self.info))

    def info(self, repo: str, revision: str | None) -> SimpleNamespace:
        self.revisions.append(revision)
        commit, files = self.held[revision]
        return SimpleNamespace(sha=commit, siblings=[SimpleNamespace(rfilename=file) for file in files])

    def load(self, *arguments: Any, **options: Any) -> Any:
        self.loaded.append((arguments, options))
        rows = datasets.Dataset.from_dict({self.field: [f"row {i}" for i in range(self.rows)]})
        streamed = rows.to_iterable_dataset()
        split = datasets.SplitInfo(name=options["split"], num_examples=self.rows)
        streamed.info.splits = datasets.SplitDict({options["split"]: split})
        return streamed


def test_a_script_is_read_from_its_converted_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    imitation = Hub(monkeypatch, files=["plain_text/train/0000.parquet", "plain_text/test/0000.parquet"])
    corpus = NamedCorpus("lm1b")
    assert len(list(corpus.documents("valid"))) == 10
    (arguments, options), *_ = imitation.loaded
    assert arguments == ("parquet",)
    pattern = "hf://datasets/billion-word-benchmark/lm1b@decade/plain_text/test/*.parquet"
    assert options == {"data_files": {"test": pattern}, "split": "test", "streaming": True}
    assert imitation.revisions == ["refs/convert/parquet"]


# The files of the hub's conversions. arXiv's train is above 5 GB, so all its splits are in partial folders.
CONVERSIONS = {
    "lm1b": ["plain_text/train/0000.parquet", "plain_text/test/0000.parquet"],
    "ptb": [f"penn_treebank/{split}/0000.parquet" for split in ("train", "validation", "test")],
    "pubmed": [
        f"{config}{split}/0000.parquet"
        for config in ("arxiv/partial-", "pubmed/")
        for split in ("train", "validation", "test")
    ],
}
CONVERSIONS["arxiv"] = CONVERSIONS["pubmed"]


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.script])
def test_every_split_of_a_conversion_is_found_whole_or_partial(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitation = Hub(monkeypatch, files=[".gitattributes", *CONVERSIONS[name]], field=RECIPES[name].field)
    corpus = NamedCorpus(name)
    for split in corpus.splits:
        assert len(list(corpus.documents(split))) == 10
    for theirs, (_, options) in zip(RECIPES[name].splits.values(), imitation.loaded, strict=True):
        where, pattern = options["data_files"][theirs].split("@decade/")
        assert where == f"hf://datasets/{RECIPES[name].repo}"
        assert pattern.replace("*", "0000") in CONVERSIONS[name]
        assert ("partial-" in pattern) == (name == "arxiv")


def test_a_whole_split_goes_before_a_partial_one(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["plain_text/partial-test/0000.parquet", "plain_text/test/0000.parquet"]
    imitation = Hub(monkeypatch, files=files)
    list(NamedCorpus("lm1b").documents("test"))
    assert imitation.loaded[0][1]["data_files"]["test"].endswith("/plain_text/test/*.parquet")


@pytest.mark.parametrize("name", ["wikitext103", "lambada", "ag_news"])
def test_a_script_that_lies_on_the_main_revision_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` refuses a repository of this kind, whatever else is in it."""
    recipe = RECIPES[name]
    folders = [f"{recipe.config}/{split}" for split in recipe.splits.values()]
    files = [f"{folder}/0000.parquet" for folder in folders]
    script = f"{recipe.repo.partition('/')[2]}.py"
    imitation = Hub(monkeypatch, files=files, main=["README.md", script, *files])
    corpus = NamedCorpus(name)
    for split in corpus.splits:
        assert list(corpus.documents(split))
    for folder, (arguments, options) in zip(folders, imitation.loaded, strict=True):
        assert arguments == ("parquet",)
        assert list(options["data_files"].values()) == [
            f"hf://datasets/{recipe.repo}@decade/{folder}/*.parquet"
        ]
    assert imitation.revisions == [None, "refs/convert/parquet"]


def test_a_part_of_openwebtext_is_not_taken_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last documents are held out, and a partial copy lacks them."""
    files = [f"plain_text/partial-train/{number:04}.parquet" for number in range(10)]
    Hub(monkeypatch, files=files, main=["README.md", "openwebtext.py"])
    message = (
        "holds only plain_text/partial-train, and not the last 100000 rows of train, which are held out$"
    )
    for split in ("train", "valid"):
        with pytest.raises(FileNotFoundError, match=message):
            list(NamedCorpus("openwebtext").documents(split))


def test_a_conversion_without_the_split_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, files=["plain_text/train/0000.parquet", "plain_text/test/index.duckdb"])
    message = (
        "holds no parquet files in plain_text/test or plain_text/partial-test, only in plain_text/train$"
    )
    with pytest.raises(FileNotFoundError, match=message):
        list(NamedCorpus("lm1b").documents("test"))


def test_others_are_read_at_the_commit_of_their_main_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    imitation = Hub(monkeypatch)
    corpus = NamedCorpus("wikitext103")
    list(corpus.documents("valid"))
    (arguments, options), *_ = imitation.loaded
    assert arguments == ("Salesforce/wikitext", "wikitext-103-raw-v1")
    assert options == {"revision": "c0ffee", "split": "validation", "streaming": True}
    assert imitation.revisions == [None]


def test_the_stated_number_of_rows_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch)
    monkeypatch.setitem(hub.RECIPES, "openwebtext", replace(RECIPES["openwebtext"], held_out=3))
    corpus = NamedCorpus("openwebtext")
    assert (corpus.count("train"), corpus.count("valid")) == (7, 3)
    assert list(corpus.documents("valid")) == ["row 7", "row 8", "row 9"]
    assert NamedCorpus("ag_news").count("test") == 10


def test_the_commit_is_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    imitation = Hub(monkeypatch)
    first = NamedCorpus("lm1b").fingerprint
    assert NamedCorpus("lm1b").fingerprint == first
    imitation.info = lambda repo, revision: SimpleNamespace(  # type: ignore[method-assign]
        sha="another", siblings=None
    )
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(dataset_info=imitation.info))
    assert NamedCorpus("lm1b").fingerprint != first


# --- errors -----------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name must be one of lm1b, openwebtext.*got 'c4'"):
        NamedCorpus("c4")


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split must be one of test for corpus 'lambada', got 'train'"):
        NamedCorpus("lambada").documents("train")


def test_a_folder_without_the_split_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", text=["x"])
    with pytest.raises(FileNotFoundError, match="holds no parquet file whose name says test"):
        list(NamedCorpus("lm1b", folder=tmp_path).documents("test"))


def test_a_folder_of_another_schema_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "test.parquet", text=["x"])
    with pytest.raises(ValueError, match="has no column 'sentence', which ptb reads: it has text"):
        list(NamedCorpus("ptb", folder=tmp_path).documents("test"))


def test_without_a_network_the_error_names_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Exception("cannot reach the hub\nand more")  # a plain Exception, like httpx's

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(dataset_info=fail))
    with pytest.raises(
        FileNotFoundError, match=r"^corpus 'lm1b' could not be read from [^:]*: cannot reach the hub$"
    ):
        list(NamedCorpus("lm1b").documents("train"))


def test_without_datasets_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "test.parquet", text=["x"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ImportError, match=r"corpus 'lm1b' needs the package datasets: pip install 'bd3lm\[data\]'"
    ):
        list(NamedCorpus("lm1b", folder=tmp_path).documents("test"))
