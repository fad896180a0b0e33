"""Recipes in YAML by somebody who means harm, as files and as flags: settings, or an error, in little time.

A few lines of YAML can stand for more than any memory holds, or for themselves.
"""

import json
import os
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bd3lm.cli import main
from bd3lm.io.settings_text import NoYaml, load_settings
from bd3lm.io.terminal import printable
from bd3lm.parsing import SettingsError
from bd3lm.runs.reading import read_settings
from bd3lm.runs.recipe import parse_overrides, recipe_from_dict, recipe_to_dict
from bd3lm.runs.stages import resolve_stages
from tests.adversary.confined import REFUSED, confined, outcome
from tests.tiny_recipes import BLOCK, plain

RECIPE = plain(Path("shards"), BLOCK)
CASES_TOGETHER = 20


def chain(begin: str, link: Callable[[str, str], str], links: int = 9) -> str:
    """Each line names the one before it several times."""
    names = string.ascii_lowercase
    lines = [link(names[turn], names[turn - 1]) for turn in range(1, links + 1)]
    return "\n".join([begin, *lines])


BOMBS = {
    "lists": chain("a: &a [x, x]", lambda new, old: f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]"),
    "mappings": chain(
        "a: &a {x: 1}",
        lambda new, old: f"{new}: &{new} {{{', '.join(f'k{turn}: *{old}' for turn in range(10))}}}",
    ),
    "merges": chain(
        "a: &a {x: 1}", lambda new, old: f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}"
    ),
    "keys": chain("a: &a [x, x]", lambda new, old: f"? &{new} [{', '.join([f'*{old}'] * 10)}]\n: 1"),
    "levels": "\n".join(
        ["a0: &a0 1", *(f"a{turn}: &a{turn} {'[' * 9}*a{turn - 1}{']' * 9}" for turn in range(1, 2000))]
    ),
    "many values": "\n".join(f"k{turn}: 1" for turn in range(60_000)),
    "a long list": f"a: [{'1,' * 200_000}]",
    "two megabytes": f"a: {'x' * 2_000_000}",
}
ENDLESS = {
    "a list in itself": "a: &a [*a]",
    "a mapping in itself": "train: &a {steps: *a}",
    "the whole in itself": "&a\ntrain: *a\nx: {y: *a}",
    "its own merge": "a: &a\n  <<: *a",
    "a merge of a whole": "&a\nb:\n  <<: *a",
    "its own key": "? &a [*a]\n: 1",
}
DEEP = {
    "brackets": "[" * 50_000,
    "braces": "{" * 50_000,
    "closed brackets": f"a: {'[' * 50_000}{']' * 50_000}",
    "lists": "- " * 50_000,
    "keys": "? " * 50_000,
    "pairs": "a: " + "[a: " * 50_000,
    "indents": "".join(f"{' ' * turn}k:\n" for turn in range(900)),
}
NO_VALUES = {
    f"{kind} {text}": f"train: {{steps: !!{kind} {text}}}"
    for kind, text in [
        *(
            ("timestamp", "abc"),
            ("bool", "abc"),
            ("int", "abc"),
            ("float", "abc"),
            ("binary", "1"),
            ("int", "''"),
        ),
        *(
            ("float", "1:x"),
            ("int", "0b2"),
            ("int", "1:2:x"),
            ("set", "{a}"),
            ("omap", "[a]"),
            ("pairs", "[a]"),
        ),
        *(("str", "[a]"), ("seq", "{a: 1}"), ("map", "[a]"), ("int", "[1]"), ("null", "{}"), ("value", "1")),
        *(("int", "9" * 5000), ("int", "0x" + "f" * 100_000), ("float", "1e" + "9" * 400 + "x")),
        *(("python/name:os.system", ""), ("python/object/apply:os.system", "[ls]"), ("merge", "1")),
        ("timestamp", "2024-01-01"),
    ]
}
NO_YAML = {
    "a control character": "a: \0",
    "half a pair": "a: \ud800",
    "another version": "%YAML 9.9\n---\na: 1",
    "a tag of its own": "%TAG ! tag:evil\n---\n!x 1",
    "two documents": "a: 1\n---\nb: 2",
    "an unknown name": "a: *b",
    "a name without end": f"a: *{'b' * 100_000}",
    "a tag without end": f"a: !{'b' * 100_000} 1",
    "the value sign": "a: =",
    "a key that is a list": "? [a]\n: 1",
    "a merge of a number": "<<: 1",
    "a tab": "a:\n\t- b",
}
FINE = {  # and are said to be no recipe
    "a date": "a: 2024-01-01",
    "nothing": "",
    "a number": "1",
    "keys of all kinds": "{1: 2, null: 3, true: 4, 1.5: 5, .nan: 6}",
    "a key to steer a terminal": '"\\e[31mred\\e]0;x\\a": 1',
    "half a pair as a key": '"\\ud800": 1',
    "a key without end": f"{'k' * 1000}: 1",
    "infinity": "train: {steps: .inf}",
    "a large number": f"train: {{steps: {'9' * 4000}}}",
}
HOSTILE = {
    **{f"bomb of {name}": text for name, text in BOMBS.items()},
    **{f"endless, {name}": text for name, text in ENDLESS.items()},
    **{f"deep {name}": text for name, text in DEEP.items()},
    **{f"no value: {name[:40]}": text for name, text in NO_VALUES.items()},
    **{f"no YAML: {name}": text for name, text in NO_YAML.items()},
    **{f"fine, {name}": text for name, text in FINE.items()},
}


def from_file(file: Path) -> str:
    stages = resolve_stages(None, config=file)
    return f"{len(stages)} stages"


def check_line(line: str) -> None:
    """One entry for a person: a line, or a list of problems under it."""
    assert line.startswith(REFUSED)
    first, *more = printable(line).splitlines()
    assert all(each.startswith("  ") for each in more), line
    assert max(map(len, (first, *more))) < 1000


@pytest.mark.sweep(10)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_entry(case: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_bytes(HOSTILE[case].encode("utf-8", "surrogatepass"))
    check_line(confined(lambda: outcome(lambda: from_file(file)), megabytes=200, seconds=20))


@pytest.mark.sweep(10)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_flag_is_a_value_or_one_entry(case: str) -> None:
    inside = "{" + HOSTILE[case].replace("\n", ", ") + "}"
    names = ("--train.steps", "--method", "--train", "--optimizer.betas")
    tried = [[name, value] for name in names for value in (HOSTILE[case], inside)]
    lines = confined(
        lambda: [outcome(lambda words=words: flags(words)) for words in tried], megabytes=200, seconds=40
    )
    for line in lines:
        if line.startswith(REFUSED):
            check_line(line)


def flags(words: list[str]) -> str:
    said = parse_overrides(words)
    recipe_from_dict({**RECIPE, **said}, where="flags")
    return "taken"


@pytest.mark.parametrize("name", ["a" + ".a" * 5000, "train" + ".a" * 5000, "." * 5000])
def test_a_flag_of_many_parts_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=r"^--any\.field must have at most 20 names, got 5,00"):
        parse_overrides([f"--{name}", "1"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            BOMBS["mappings"],
            "at most 10,000 values, each counted as often as it is named, got more in line 5",
        ),
        (BOMBS["levels"], "nested at most 50 levels deep, got more in line"),
        (ENDLESS["a mapping in itself"], "must not contain itself, as in line 1"),
        (DEEP["brackets"], "nested at most 50 levels deep, got more in line 1"),
        (NO_VALUES["timestamp abc"], "settings cannot have values of type timestamp"),
        (NO_VALUES["bool abc"], "this is not a valid bool"),
        ("a: 1\nb: 2\na: 3", "a is given twice, again in line 3"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        read_settings(file)
    assert str(raised.value).startswith(f"{file}")


def test_names_within_the_limits_are_as_before() -> None:
    text = "a: &a {x: &x [1, 2], y: *x}\nb: &b {<<: *a, x: 3}\nc: {<<: [*b, *a], z: *b}\nd: !!str 5\n"
    assert load_settings(text) == yaml.safe_load(text)
    nested = f"a: {'[' * 48}1{']' * 48}"
    assert load_settings(nested) == yaml.safe_load(nested)
    with pytest.raises(ValueError, match="nested at most 50 levels deep"):
        load_settings(f"a: [{nested[3:]}]")


@pytest.mark.parametrize("bits", [1, 63, 64, 65, 1000])
def test_a_whole_number_comes_back(bits: int) -> None:
    assert load_settings(yaml.safe_dump({"seed": 2**bits})) == {"seed": 2**bits}


@pytest.mark.parametrize("piped", [False, True])
def test_a_config_without_end_is_one_line(piped: bool, tmp_path: Path) -> None:
    """`--config <(command)` is a pipe that a user names; a recipe in the folder of a run is none."""
    file = tmp_path / "recipe.yaml"
    if piped:
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")

    def work() -> str:
        if piped and not os.fork():
            with file.open("w") as pipe:
                pipe.write("a: [" * 10)
            os._exit(0)
        return outcome(lambda: read_settings(file))

    line = confined(work, megabytes=100, seconds=20)
    assert ("is not YAML" if piped else "must have at most 1,000,000 bytes, got more") in line


# --- fuzzed ---

PIECES = (
    *(
        "[",
        "]",
        "{",
        "}",
        ": ",
        "? ",
        "- ",
        "\n",
        "  ",
        "&a ",
        "*a",
        "<<: ",
        "*",
        "&",
        "!",
        "!!",
        "|",
        ">",
        '"',
    ),
    *(
        "'",
        "#",
        "%",
        "@",
        "`",
        "\t",
        "\0",
        "\x1b[31m",
        "\x85",
        "\u2028",
        "\ufeff",
        "\ud800",
        "---\n",
        "...\n",
        "=",
        "~",
    ),
    *(
        "!!bool x",
        "!!timestamp ",
        "!!binary ",
        "!!set ",
        "!!python/name:os ",
        ".nan",
        "-.inf",
        "1e999",
        "0x1f",
    ),
    *(
        "9" * 5000,
        "1:30:00",
        "2024-01-01",
        "null",
        "true",
        "x" * 500,
        "[" * 60,
        "\\x1b",
        "\\ud800",
        "é",
        "🙂",
    ),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e300, float("nan")),
    *(
        float("inf"),
        "",
        "4",
        "1e9",
        "x" * 300,
        "\x1b[31m",
        "counts",
        [],
        [1],
        [[]],
        {},
        {"kind": []},
        {"a": 1},
    ),
    *({"kind": "counts", "x": 1}, [None], {"": None}, {1: 2}, {None: 1}, "\u202e", ["a"] * 50),
)


def fuzzed_text(draw: random.Random) -> str:
    """A recipe with pieces put into it, or a text of pieces alone."""
    if draw.random() < 0.3:
        return "".join(draw.choices(PIECES, k=draw.randint(1, 40)))
    text = yaml.safe_dump(RECIPE, default_flow_style=draw.choice([None, True, False]))
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice(PIECES) + text[place + draw.choice([0, 0, 1, 5, 40]) :]
    return text


def fuzzed_values(draw: random.Random) -> Any:
    data = json.loads(json.dumps(RECIPE))
    for _ in range(draw.choice([1, 1, 2, 4])):
        inside = data
        while True:
            key = draw.choice([*inside, "extra", "kind", "__class__", "\x1b[2J", "start_from"])
            if isinstance(inside.get(key), dict) and inside[key] and draw.random() < 0.8:
                inside = inside[key]
                continue
            break
        if draw.random() < 0.15 and key in inside:
            del inside[key]
        else:
            inside[key] = draw.choice(VALUES)
    return data


def draws(batch: int) -> list[int]:
    return list(range(batch * CASES_TOGETHER, (batch + 1) * CASES_TOGETHER))


def checked(seeds: list[int], work: Callable[[random.Random], Any]) -> list[str]:
    """What work says for each seed; anything but an expected error fails, with its seed."""

    def all_of_them() -> list[str]:
        said = []
        for seed in seeds:
            try:
                said.append(outcome(lambda seed=seed: work(random.Random(seed))))
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error!s:.500}") from error
        return said

    found: list[str] = confined(all_of_them, megabytes=300)
    for line in found:
        if line.startswith(REFUSED):
            printable(line).encode()
    return found


@pytest.mark.sweep(8)
@pytest.mark.parametrize("batch", range(200))
def test_fuzzed_text_is_settings_or_one_entry(batch: int, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"

    def work(draw: random.Random) -> str:
        file.write_bytes(fuzzed_text(draw).encode("utf-8", "surrogatepass"))
        return from_file(file)

    found = checked(draws(batch), work)
    assert any(line.startswith(REFUSED) for line in found)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("batch", range(200))
def test_fuzzed_settings_are_a_recipe_that_comes_back_or_one_entry(batch: int) -> None:
    def work(draw: random.Random) -> str:
        data = fuzzed_values(draw)
        if draw.random() < 0.5:  # as a file would say it
            try:
                data = load_settings(yaml.safe_dump(data))
            except NoYaml:  # a control character
                return "no YAML"
        recipe = recipe_from_dict(data, where="here")
        again = recipe_from_dict(load_settings(yaml.safe_dump(recipe_to_dict(recipe))), where="again")
        assert repr(again) == repr(recipe)  # as NaN is not equal to itself
        return "a recipe"

    found = checked(draws(batch), work)
    assert any(line.startswith(REFUSED) for line in found)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("batch", range(120))
def test_fuzzed_flags_are_settings_or_one_entry(batch: int) -> None:
    names = [
        "train.steps",
        "method",
        "method.kind",
        "objective.masking",
        "data.path",
        "optimizer.lr",
        "x",
        "a.b.c",
    ]

    def work(draw: random.Random) -> str:
        words = []
        for _ in range(draw.randint(1, 4)):
            name = draw.choice(names) + draw.choice(["", "", "", ".", ".x", "-y", "\x1b[31m"])
            words += draw.choice([[f"--{name}"], [f"--{name}={''.join(draw.choices(PIECES, k=3))}"]])
            words += [] if draw.random() < 0.1 else ["".join(draw.choices(PIECES, k=draw.randint(1, 6)))]
        return flags(words)

    found = checked(draws(batch), work)
    assert any(line.startswith(REFUSED) for line in found)


# --- what reaches a terminal ---

ESCAPE = "\x1b]0;evil\x07\x1b[31mred\r\x9b2J\u202e"


@pytest.mark.parametrize(
    "words",
    [
        ("sample", ESCAPE, "hi"),
        ("sample", "box", "--prompts-from", ESCAPE),
        ("data", "verify", ESCAPE),
        ("data", "prepare", f"{ESCAPE}.txt", "out", "--tokenizer", "bytes"),
        ("report", ESCAPE),
        ("eval", ESCAPE),
        ("score", "box", f"{ESCAPE}.txt"),
        ("train", ESCAPE),
        ("train", "--config", ESCAPE),
        ("train", "demo", f"--{ESCAPE}", "1"),
        ("train", "demo", f"--train.{ESCAPE}", "1", "--show"),
        ("train", "demo", "--train.steps", ESCAPE, "--show"),
        ("train", "demo", "--method.kind", ESCAPE, "--show"),
        ("train", "--config", "FILE"),
        ("data", "prepare", "JSONL", "out", "--tokenizer", "bytes"),
        ("data", "prepare", "JSONL", "out", "--tokenizer", "bytes", "--field", "other"),
        ("data", "prepare", "FOLDER", "out", "--tokenizer", "bytes", "--held-out", "0"),
        (ESCAPE,),
        ("sample", f"--{ESCAPE}"),
        ("sample", "--seed", ESCAPE),
        ("--plugin", f"{ESCAPE}.py", "presets"),
        ("--plugin", ESCAPE, "presets"),
    ],
    ids=lambda words: " ".join(words).replace(ESCAPE, "E").encode("ascii", "replace").decode()[:60],
)
def test_no_line_steers_a_terminal(
    words: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a text")
    (tmp_path / "folder" / f"{ESCAPE}.zip").write_text("no text")
    (tmp_path / "a.yaml").write_text(json.dumps({ESCAPE: 1, "train": {ESCAPE: 2, "steps": ESCAPE}}))
    (tmp_path / "a.jsonl").write_text(json.dumps({ESCAPE: "x"}) + "\n")
    meant = {"FILE": "a.yaml", "JSONL": "a.jsonl", "FOLDER": "folder"}
    try:
        status = main([meant.get(word, word) for word in words])
    except SystemExit as end:
        status = end.code
    printed = capfd.readouterr()
    assert printed.out + printed.err == printable(printed.out + printed.err)
    assert "red" in printed.out + printed.err
    assert status == (
        0 if "FOLDER" in words else 2 if words[0] == ESCAPE or (words[0] == "sample" and status == 2) else 1
    )


def test_a_line_cannot_be_added_to_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(json.dumps({"x\nbd3lm: wrote everything": 1}))
    assert main(["train", "--config", str(tmp_path / "a.yaml")]) == 1
    assert main(["data", "verify", "x\nbd3lm: all is whole"]) == 1
    assert [line for line in capfd.readouterr().err.splitlines() if line.startswith("bd3lm: ")] == [
        f"bd3lm: {tmp_path / 'a.yaml'} has 3 problems:",
        "bd3lm: x\\nbd3lm: all is whole holds no token shards: there is no meta.json",
    ]


def test_a_key_that_cannot_be_seen_is_quoted() -> None:
    with pytest.raises(SettingsError, match=r"\n  train\.'\\x1b\[31m': unknown key"):
        recipe_from_dict({**RECIPE, "train": {**RECIPE["train"], "\x1b[31m": 1}}, where="here")


def test_a_pipe_over_a_preset_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `--config <(command)` is; what is checked before torch is loaded must leave it to the recipe."""
    os.mkfifo(tmp_path / "pipe")
    if not os.fork():
        (tmp_path / "pipe").write_text("train: {steps: 3}")
        os._exit(0)
    assert main(["train", "demo", "--config", str(tmp_path / "pipe"), "--show"]) == 0
    assert "steps: 3" in capsys.readouterr().out
