"""Finding a corpus by what a user writes."""

from pathlib import Path

import pytest

from bd3lm.data import CORPORA, FileCorpus, NamedCorpus, PydocCorpus, load_corpus


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lm1b").mkdir()
    (tmp_path / "lm1b" / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_corpus("pydoc"), PydocCorpus)
    assert isinstance(load_corpus("lm1b"), NamedCorpus)
    assert isinstance(load_corpus("lm1b", folder=tmp_path / "lm1b"), NamedCorpus)
    for path in ("./lm1b", Path("lm1b"), tmp_path / "lm1b" / "a.txt"):
        assert isinstance(load_corpus(path), FileCorpus)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "test.txt").write_text("x")
    assert list(load_corpus("~/test.txt", held_out=0).documents("train")) == ["x"]
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} holds no parquet file"):
        list(load_corpus("lm1b", folder="~").documents("train"))


def test_options_reach_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 5)
    corpus = load_corpus(tmp_path / "a.jsonl", field="body", held_out=2)
    assert [len(list(corpus.documents(split))) for split in corpus.splits] == [3, 2]
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    assert list(load_corpus(tmp_path / "b.txt", text_unit="line", held_out=0).documents("train")) == [
        "one",
        "two",
    ]


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"held_out does not apply to corpus 'pydoc', got 0.1"):
        load_corpus("pydoc", held_out=0.1)
    with pytest.raises(ValueError, match="field does not apply to corpus 'lm1b', got 'text'"):
        load_corpus("lm1b", field="text")
    with pytest.raises(ValueError, match="folder does not apply"):
        load_corpus(tmp_path, folder=tmp_path)


def test_a_misspelt_name_lists_the_right_ones() -> None:
    with pytest.raises(
        FileNotFoundError, match=f"^wikitext is neither a file or folder nor one of {', '.join(CORPORA)}$"
    ):
        load_corpus("wikitext")
