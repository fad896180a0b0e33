"""What MAUVE is handed: written and human texts that begin alike, and are of the same lengths."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bd3lm.evaluation import mauve_score
from tests.evaluation.test_judging import HashJudge


class ReadingJudge(HashJudge):
    """Its features of a text are the text: the tokens that it was given to read, and zeros."""

    def features(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        rows = torch.zeros(len(tokens), 16)
        for row, length in enumerate(lengths.tolist()):
            rows[row, :length] = tokens[row, :length].float()
        return rows


@pytest.fixture
def compared(monkeypatch):
    """The texts that the package is handed, as letters; \"$\" is the judge's end token."""
    found: list[list[str]] = []

    def compute_mauve(*, p_features, q_features, verbose):
        for features in (p_features, q_features):
            rows = [[int(token) for token in row if token] for row in features.tolist()]
            found.append(["".join("$" if t == HashJudge.eos_id else chr(t) for t in row) for row in rows])
        return SimpleNamespace(mauve=0.5)

    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=compute_mauve))
    return found


def test_every_written_text_stands_beside_a_human_one_of_its_length_that_begins_as_it_does(compared):
    texts = [["abcde"], ["fg", "hi"], ["jklmnopqrst"], [""]]
    human = ["ABCDEFG", "HI", "JKLM", "NOPQRSTUVW", "XYZ"]
    assert mauve_score(ReadingJudge(), texts, human, window=9, batch_size=2) == 0.5
    assert compared[0] == ["$abcde", "$fg$hi", "$jklmnopq"]  # what was not written is not compared
    assert compared[1] == ["$ABCDE", "$HI$JK", "$NOPQRSTU"]


def test_too_little_of_either_is_refused(compared):
    said = "the reference must hold 2 texts of up to 4 tokens, .* from the beginning of a document, got 1"
    with pytest.raises(ValueError, match=said):
        mauve_score(ReadingJudge(), [["abc"], ["de"]], ["ABCDEFGHIJKLM"])
    with pytest.raises(ValueError, match="texts must hold at least one token to compare, got none"):
        mauve_score(ReadingJudge(), [[""]], ["ABC"])
    assert compared == []
