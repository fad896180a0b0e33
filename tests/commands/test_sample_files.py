"""Files of samples: read back as they were written, and refused where they are something else."""

import pytest

from bd3lm.commands.shared.sample_files import Samples, open_source
from bd3lm.commands.shared.subjects import Subject
from tests.commands import LINE, written
from tests.lm import of_bytes


def test_only_a_newline_ends_a_line(tmp_path):
    found = Samples.read(written(tmp_path, LINE, LINE))
    assert found.values("documents") == [LINE["documents"]] * 2
    assert found.length == 9


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"words": "human"}, "line 2 must have a text in its field text, or be a line of .*human"),
        ({"text": 3}, "line 2 must have a text in its field text, or be a line of .*: 3"),
        ({"text": "human"}, "samples written in one way, got 2 different settings"),
        ({"text": "cut", "settings": {}}, "line 2 must be a sample .*of the wrong type: documents, length"),
        ({**LINE, "entropy": "4"}, "missing or of the wrong type: entropy$"),
        ({**LINE, "documents": [1]}, "missing or of the wrong type: documents$"),
        ([], "line 2 must have a text in its field text"),
        ({**LINE, "settings": {"length": 9}}, "samples written in one way, got 2 different settings"),
        ({**LINE, "dtype": "bfloat16"}, "samples written in one way, got 2 different settings"),
        ({**LINE, "weights": "0123"}, "samples written in one way, got 2 different settings or models"),
    ],
)
def test_a_file_that_is_no_samples_is_refused(line, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        Samples.read(written(tmp_path, LINE, line))


def test_an_empty_or_broken_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold at least one sample, got none"):
        Samples.read(written(tmp_path))
    (tmp_path / "samples.jsonl").write_text("{half")
    with pytest.raises(ValueError, match="line 1 must be JSON, as `bd3lm sample --out` writes it"):
        Samples.read(tmp_path / "samples.jsonl")
    (tmp_path / "samples.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"samples\.jsonl must be text, as `bd3lm sample --out` writes it"):
        Samples.read(tmp_path / "samples.jsonl")


def test_another_file_is_no_source(tmp_path):
    (tmp_path / "texts.csv").write_text("A text.")
    with pytest.raises(ValueError, match=r"sources must be runs, .* \.txt\), got the file .*texts\.csv"):
        open_source(str(tmp_path / "texts.csv"))


def test_texts_of_other_code_have_their_texts_alone(tmp_path):
    (tmp_path / "texts.txt").write_text("One text\nof two lines.\n\n\nAnother.\n")
    lines = written(tmp_path, {"text": "One text\nof two lines.", "id": 1}, {"text": "Another.\n\nStill."})
    for file, last in ((tmp_path / "texts.txt", "Another."), (lines, "Another.\n\nStill.")):
        found = open_source(str(file))
        assert isinstance(found, Samples)
        assert found.values("documents") == [["One text\nof two lines."], [last]]
        assert found.is_of_other_code
        assert (found.length, found.lean, found.weights, found.origin) == (None, None, None, str(file))
        assert found.values("entropy") == [None, None]
        found.require_from_nothing()
    assert not Samples.read(written(tmp_path, LINE)).is_of_other_code
    (tmp_path / "texts.txt").write_text("\n\n")
    with pytest.raises(ValueError, match="must hold at least one text, got none"):
        Samples.read(tmp_path / "texts.txt")


def test_texts_of_other_code_must_not_have_a_prompt_either(tmp_path):
    found = Samples.read(written(tmp_path, {"text": "Once upon a time.", "prompt": "Once"}))
    with pytest.raises(
        ValueError, match=r"sample 0 of .* must be written from scratch, .* that has a prompt"
    ):
        found.require_from_nothing()


@pytest.mark.parametrize("given", [{"given": 3}, {"given": 1, "prompt": "a"}])
def test_samples_with_a_prompt_are_told_apart(given, tmp_path):
    Samples.read(written(tmp_path, {**LINE, "prompt": ""})).require_from_nothing()
    with pytest.raises(
        ValueError, match=r"sample 1 of .* must be written from scratch, without a prompt, got"
    ):
        Samples.read(written(tmp_path, LINE, {**LINE, **given})).require_from_nothing()


def test_a_source_is_a_file_of_samples_or_a_model(tmp_path):
    found = open_source(str(written(tmp_path, LINE)), device="cpu")
    assert isinstance(found, Samples)
    assert found.origin == str(tmp_path / "samples.jsonl")
    of_bytes(4).save_pretrained(tmp_path / "model")
    subject = open_source(str(tmp_path / "model"), device="cpu", dtype="float32")
    assert isinstance(subject, Subject)
    assert subject.dtype == "float32"
    assert Samples("drawn", [LINE], subject).origin is subject


def test_a_file_says_what_weights_wrote_it_unless_it_is_older(tmp_path):
    assert Samples.read(written(tmp_path, LINE)).weights is None
    assert Samples.read(written(tmp_path, {**LINE, "weights": "0123"})).weights == "0123"


def test_texts_have_the_lean_of_their_rule(tmp_path):
    for rule, lean in (({"kind": "first_hitting", "lean": 2.0}, 2.0), ("mine", 0.0), (None, 0.0)):
        line = {**LINE, "settings": {**LINE["settings"], "unmasking": rule}}
        assert Samples.read(written(tmp_path, line)).lean == lean
