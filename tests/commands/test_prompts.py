"""Prompts in files and templates with gaps: as they are read, and through `bd3lm sample`."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bd3lm.cli import main
from bd3lm.commands.shared.prompts import parse_template, read_prompts, template_text
from bd3lm.lm import Gap, load
from tests.commands import fails
from tests.lm import of_bytes


@pytest.fixture
def model(tmp_path):
    made = of_bytes(4)
    made.save_pretrained(tmp_path / "model")
    return made


def typed(monkeypatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))


def saved(folder: Path, name: str, text: str) -> str:
    (folder / name).write_bytes(text.encode())
    return str(folder / name)


def records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]


# --- reading ---


def test_a_line_of_a_text_file_is_a_prompt(tmp_path):
    text = "\ufeffA cat\r\n\n  a dog \n{3}\nline\u2028still the same\n \n"
    expected = ["A cat", "  a dog ", "{3}", "line\u2028still the same"]
    assert read_prompts(saved(tmp_path, "prompts.txt", text)) == expected


def test_json_lines_hold_prompts_of_several_lines_and_empty_ones(tmp_path):
    text = '{"prompt": "two\\nlines", "id": 1}\n\n{"prompt": ""}\n'
    assert read_prompts(saved(tmp_path, "prompts.jsonl", text)) == ["two\nlines", ""]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A cat\nA dog\n", ["A cat", "A dog"]),
        ('{"prompt": "A cat"}\n{"prompt": "A dog"}', ["A cat", "A dog"]),
        ('{"a": 1}\n', ['{"a": 1}']),
        ("{half\n", ["{half"]),
    ],
    ids=["text", "JSON lines", "JSON without a prompt", "no JSON"],
)
def test_standard_input_is_of_either_kind(text, expected, monkeypatch):
    typed(monkeypatch, text)
    assert read_prompts("-") == expected


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.txt", "\n \n", r"--prompts-from must hold at least one prompt, and .*p\.txt is empty"),
        ("p.jsonl", "", r"--prompts-from must hold at least one prompt, and .*p\.jsonl is empty"),
        ("p.jsonl", '{"prompt": "a"}\n\nb', r"p\.jsonl line 3 must be a JSON object with a text .* prompt"),
        (
            "p.jsonl",
            '{"text": "a"}',
            r"p\.jsonl line 1 must be a JSON object with a text in its field prompt",
        ),
        ("p.jsonl", '{"prompt": 3}', r"line 1 must be a JSON object with a text in its field prompt, got \{"),
    ],
)
def test_what_holds_no_prompts_is_refused(name, text, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        read_prompts(saved(tmp_path, name, text))


def test_files_that_cannot_be_read_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="nowhere could not be read: No such file or directory"):
        read_prompts(str(tmp_path / "nowhere"))
    (tmp_path / "latin").write_bytes(b"na\xefve")
    with pytest.raises(ValueError, match=r"--prompts-from must be UTF-8 text, and .*latin is not"):
        read_prompts(str(tmp_path / "latin"))
    typed(monkeypatch, "")
    with pytest.raises(ValueError, match="at least one prompt, and standard input is empty"):
        read_prompts("-")


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("The {3} sat on the {2}.", ["The ", Gap(3), " sat on the ", Gap(2), "."]),
        ("{1}{12}", [Gap(1), Gap(12)]),
        ("{{a}} {{{4}}} }}{{", ["{a} {", Gap(4), "} }{"]),
    ],
)
def test_a_template_is_texts_and_gaps(template, parts):
    assert parse_template(template) == parts
    assert template_text(parts) == template


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("no gap", r"--template must contain a gap, such as \{3\}, got 'no gap'"),
        ("", "--template must contain a gap"),
        ("{{3}}", "--template must contain a gap"),
        ("a {0}", r"a gap is a number of tokens, at least 1, in braces, .* got '\{0\}' in 'a \{0\}'"),
        ("a {x} {2}", "a gap is a number of tokens, .* got '{' in"),
        ("a {2} }", "a gap is a number of tokens, .* got '}' in"),
    ],
)
def test_other_braces_are_refused(template, said):
    with pytest.raises(ValueError, match=said):
        parse_template(template)


# --- through the command ---


def test_prompts_from_a_file_are_continued_by_so_many_tokens(model, tmp_path, capsys):
    prompts, out = saved(tmp_path, "prompts.txt", "a\nabcdef\n"), tmp_path / "texts.jsonl"
    words = [
        "sample",
        str(tmp_path / "model"),
        "--prompts-from",
        prompts,
        "--max-new-tokens",
        "5",
        "--no-stop-at-eos",
    ]
    assert main([*words, "--count", "2", "--out", str(out)]) == 0
    expected = model.generate(["a", "a", "abcdef", "abcdef"], max_new_tokens=5, stop_at_eos=False)
    found = records(out)
    assert [each["text"] for each in found] == [each.text for each in expected]
    assert [each["prompt"] for each in found] == ["a", "a", "abcdef", "abcdef"]
    assert all(each["length"] - each["given"] == 5 for each in found)
    assert all(each["settings"]["max_new_tokens"] == 5 for each in found)


def test_prompts_from_standard_input(model, tmp_path, capsys, monkeypatch):
    typed(monkeypatch, "abc\n")
    assert main(["sample", str(tmp_path / "model"), "--prompts-from", "-"]) == 0
    assert capsys.readouterr().out == f"{model.generate('abc')[0].text}\n"


def test_a_template_is_filled(model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    words = [
        "sample",
        str(tmp_path / "model"),
        "--template",
        "a{3}b{{c{2}",
        "--count",
        "2",
        "--no-stop-at-eos",
    ]
    assert main([*words, "--out", str(out)]) == 0
    template = ["a", Gap(3), "b{c", Gap(2)]
    expected = model.generate([template, template], stop_at_eos=False)
    found = records(out)
    assert [each["tokens"] for each in found] == [each.tokens for each in expected]
    assert [(each["prompt"], each["template"]) for each in found] == [("", "a{3}b{{c{2}")] * 2
    assert found[0]["tokens"] != found[1]["tokens"]


def test_a_template_can_be_filmed(tmp_path, capsys):
    film = tmp_path / "film.svg"
    assert main(["sample", "box", "--template", "The {3} is", "--film", str(film)]) == 0
    assert capsys.readouterr().out.startswith("The ")
    assert film.is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ab", "--template", "a {2}"], "may be given, got PROMPTS and --template"),
        (["ab", "--prompts-from", "p.txt"], "may be given, got PROMPTS and --prompts-from"),
        (["--template", "a {2}", "--prompts-from", "-"], "may be given, got --prompts-from and --template"),
        (["--template", "a"], "--template must contain a gap"),
        (
            ["ab", "--length", "9", "--max-new-tokens", "4"],
            "only one of --length and --max-new-tokens may be given, got 9 and 4",
        ),
        (["ab", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_asked_for_together_is_refused_before_a_model_is_loaded(words, said, capsys):
    assert main(["sample", "no-such-model", *words]) == 1
    assert said in capsys.readouterr().err


def test_fills_are_a_setting_of_templates_and_in_the_records(tmp_path, capsys):
    out = tmp_path / "filled.jsonl"
    words = ["sample", "box", "--template", "The {2} is", "--fills", "3", "--device", "cpu"]
    assert main([*words, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    (found,) = load("box", device="cpu").generate(["The ", Gap(2), " is"], fills=3)
    assert printed.out == f"{found.text}\n"
    assert "; 3 fills of gaps compared." in printed.err
    record = json.loads(out.read_text("utf-8"))
    assert (record["fills"], record["settings"]["fills"]) == (3, 3)
    assert record["effective_fills"] == pytest.approx(found.sample.effective_fills, abs=1e-5)
    assert record["evaluations"] == found.sample.evaluations
    assert "--fills must be at least 1, got 0" in fails(capsys, *words[:4], "--fills", "0")
    assert "--fills needs --template" in fails(capsys, "sample", "box", "The", "--fills", "3")


def test_chances_of_tokens_are_in_the_records_of_who_asks(tmp_path, capsys):
    words = ["sample", "box", "The", "river", "--law", "causal", "--length", "12", "--device", "cpu"]
    files = tmp_path / "plain.jsonl", tmp_path / "told.jsonl"
    for out, more in zip(files, ([], ["--alternatives", "2"]), strict=True):
        assert main([*words, "--out", str(out), *more]) == 0
    plain, told = ([json.loads(line) for line in out.read_text("utf-8").splitlines()] for out in files)
    model = load("box", device="cpu", law="causal")
    for one, other in zip(plain, told, strict=True):
        assert one["text"] == other["text"]
        assert one["evaluations"] == other["evaluations"]
        assert "log_p" not in one
        given = other["given"]
        assert other["log_p"][:given] == [None] * given
        assert [len(each) for each in other["alternatives"][given:]] == [2] * (other["length"] - given)
        (known,) = model.log_likelihood([other["tokens"]], given=[given])
        assert sum(other["log_p"][given:]) == pytest.approx(known.log_p, abs=1e-3)
    capsys.readouterr()
    short = ["sample", "box", "The", "--alternatives"]
    assert "--alternatives must be a whole number in 0..20, got 21" in fails(capsys, *short, "21")
    assert "--alternatives needs --out, which records them" in fails(capsys, *short, "3")
