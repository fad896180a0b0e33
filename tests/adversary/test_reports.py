"""A run's folder whose files say anything: `bd3lm report` writes pages that parse, or says one clear line.

Each case damages one file of a run that was really trained, by a seed, and so can be repeated. A page is
read by an HTML parser that complains of what is not balanced, plots by an XML parser, and nothing that a file
said may be mark-up in any of them.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands.report import Report, make_report
from bd3lm.commands.shared.subjects import Subject
from bd3lm.reports import plots
from bd3lm.runs.recipe import recipe_from_dict
from bd3lm.runs.train import train_stages
from tests.reports import film, judgement, lengths, long_text, samples, unigram
from tests.reports.conftest import PLOTS, drawing_once
from tests.reports.test_hostile import EVIL, MARKDOWN, check_drawing
from tests.reports.test_page import Page
from tests.tiny_recipes import prepared, two_stages

pytestmark = pytest.mark.filterwarnings("ignore")  # of matplotlib, on names without room and wide ranges

QUIET = Console(quiet=True)
MARK = "<script>alert(1)</script>"
"""In every hostile string, and no mark-up of ours."""
STRINGS = [
    *(text + MARK for text in EVIL.values()),
    "",
    MARK * 2000,
    "\ud800" + MARK,
    "own",
    "valid",
    "e" * 5,
]
NUMBERS = [
    -1,
    0,
    1,
    2,
    0.5,
    -0.0,
    1e-320,
    1e29,
    1e31,
    1e308,
    10**18,
    10**400,
    2**63,
    True,
    float("nan"),
    float("inf"),
]
OTHERS = [None, [], {}, [[]], {"kind": "x"}, [None], [1, "a"], {"": None}, [0] * 5000]
HOSTILE = [*STRINGS, *NUMBERS, *OTHERS]
INTERNAL = re.compile(
    "NoneType|object is not|list index|empty sequence|unhashable|not supported between|has no attribute|"
    "KeyError|Traceback|not subscriptable|unexpected keyword|cannot convert"
)
"""What Python says of a mistake of ours, and no user can put right."""


@pytest.fixture(scope="module", autouse=True)
def _drawn_once() -> Iterator[None]:
    """Most damage leaves most plots as they were."""
    with pytest.MonkeyPatch.context() as patch:
        for name, draw in PLOTS.items():
            patch.setattr(plots, name, drawing_once(draw))
        yield


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages with a record of every kind."""
    data = prepared(tmp_path_factory.mktemp("data") / "shards")
    out = tmp_path_factory.mktemp("runs") / "demo"
    stages = [(each.name, recipe_from_dict(each.recipe, where=each.name)) for each in two_stages(data).stages]
    train_stages(stages, out, console=QUIET, device="cpu")
    make_report(Report(runs=(out,), samples=1, device="cpu"), console=QUIET)
    weights = Subject.open(out / "block", device="cpu").weights
    box_film = {"title": "t", "parameters": 9, "film": film()["result"]}
    more = [
        lengths(),
        judgement(),
        judgement(9.0, top_p=1.0),
        samples(("a", "b")),
        long_text(),
        unigram(),
    ]
    for number, record in enumerate([*more, {**film(), "kind": "box_film", "result": box_film}]):
        file = out / "block" / "measured" / f"more-{number}.json"
        file.write_text(json.dumps({**record, "weights": weights}), encoding="utf-8")
    assert main(["report", str(out / "block"), "--no-measure", "--device", "cpu"]) == 0
    return out


def check(run: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether it wrote a report, whose files all parse then; else it said one line, which is clear."""
    block = run / "block"
    (block / "report.html").unlink(missing_ok=True)
    capsys.readouterr()
    status = main(["report", str(block), "--no-measure", "--device", "cpu"])
    said = capsys.readouterr().err
    if status:
        line, *more = (line for line in said.splitlines() if not line.startswith("bd3lm: warning: "))
        assert status == 1
        assert all(each.startswith("  ") for each in more), more  # a recipe's problems, a line each
        assert line.startswith("bd3lm: ")
        assert not INTERNAL.search(line), line
        assert not (block / "report.html").exists()
        return False
    page, text = ((block / name).read_text("utf-8") for name in ("report.html", "report.md"))
    Page(page)
    assert MARK not in page
    assert not [
        each
        for token in MARKDOWN.parse(text)
        for each in (token, *(token.children or ()))
        if "html" in each.type
    ]
    for drawing in [*(block / "report").glob("*.svg")]:
        check_drawing(drawing.read_text("utf-8"))
    return True


# --- damage ---


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in JSON."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))


def damaged_values(value: Any, chance: random.Random) -> Any:
    """With another value, or none, in one to three places."""
    for _ in range(chance.randint(1, 3)):
        found = [*places(value)]
        if not found:
            break
        *path, key = chance.choice(found)
        inside = value
        for each in path:
            inside = inside[each]
        match chance.randrange(4):
            case 0:
                del inside[key]
            case 1 if isinstance(inside[key], str):
                inside[key] += chance.choice(STRINGS)
            case 2 if isinstance(inside, dict):
                inside[chance.choice(STRINGS)] = inside.pop(key)
            case _:
                inside[key] = chance.choice(HOSTILE)
    return value


def damaged_text(text: bytes, chance: random.Random) -> bytes:
    """Cut, torn, or with something put into it."""
    place, more = chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)
    pieces = (
        b"\0",
        b"\xff\xfe",
        b"[" * 50_000,
        b"9" * 5_000,
        b'"' + b"x" * 140_000,
        b"\n\n,,,\n",
        MARK.encode(),
        EVIL["signs"].encode(),
    )
    match chance.randrange(4):
        case 0:
            return text[:place]
        case 1:
            return text[: min(place, more)] + text[max(place, more) :]
        case 2:
            return text[:place] + chance.choice(pieces) + text[place:]
    return text[:place] + bytes(chance.randrange(256) for _ in range(8)) + text[place + 8 :]


def damaged_rows(text: str, chance: random.Random) -> str:
    """With another value in one to three cells."""
    rows = [line.split(",") for line in text.splitlines()]
    cells = [
        "",
        "x",
        MARK,
        "nan",
        "inf",
        "-1",
        "0",
        "1e31",
        "1e-320",
        "٣",
        "9" * 5000,
        '"',
        "1" * 140_000,
        "0.5",
    ]
    for _ in range(chance.randint(1, 3)):
        row = chance.choice(rows)
        row[chance.randrange(len(row))] = chance.choice(cells)
    return "".join(",".join(row) + "\n" for row in rows)


def damage(run: Path, chance: random.Random) -> Path:
    """One file of the run; the one that was damaged."""
    measured = sorted(run.glob("block/measured/*.json"))
    file = chance.choice([*measured, *sorted(run.glob("*/metrics.csv")), *sorted(run.glob("*/recipe.yaml"))])
    if chance.random() < 0.3 or file.suffix == ".yaml":
        file.write_bytes(damaged_text(file.read_bytes(), chance))
    elif file.suffix == ".csv":
        file.write_text(damaged_rows(file.read_text("utf-8"), chance), encoding="utf-8")
    else:
        value = damaged_values(json.loads(file.read_text("utf-8")), chance)
        file.write_text(json.dumps(value), encoding="utf-8")
    return file


@pytest.mark.sweep(4)
@pytest.mark.parametrize("batch", range(60))
def test_a_damaged_file_is_a_page_that_parses_or_one_clear_line(batch, reported, tmp_path, capsys):
    """20 seeds a batch."""
    run = Path(shutil.copytree(reported, tmp_path / "demo"))
    for seed in range(20 * batch, 20 * batch + 20):
        file = None
        try:
            file = damage(run, random.Random(seed))
            check(run, capsys)
        except Exception as error:
            pytest.fail(f"seed {seed}, {file}: {type(error).__name__}: {error}")
        shutil.copyfile(reported / file.relative_to(run), file)


# --- what was found, one by one ---


@pytest.fixture
def run(reported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reported, tmp_path / "demo"))


def line(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the report says instead of being written."""
    assert not check(run, capsys)
    assert main(["report", str(run / "block"), "--no-measure", "--device", "cpu"]) == 1
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1," + "9" * 140_000, "must be the log of a training run, as CSV: field larger than field limit"),
        ("0,64,3.0", "must have in each row a step, from 1 on, and the tokens seen so far"),
        ("7,,3.0", "must have in each row a step, from 1 on, and the tokens seen so far"),
        (f"7,64,{MARK}", "must hold numbers, got train_nats '<script>"),
    ],
)
def test_a_log_that_is_none_is_named(row, said, run, capsys):
    file = run / "block" / "metrics.csv"
    columns = file.read_text("utf-8").splitlines()[0].split(",")
    cells = [*row.split(","), *[""] * (len(columns) - row.count(",") - 1)]
    file.write_text(f"{','.join(columns)}\n{','.join(cells)}\n", encoding="utf-8")
    assert f"bd3lm: {file} {said}" in line(run, capsys)


def test_a_loss_that_was_not_finite_is_left_out_of_the_plot(run, capsys):
    file = run / "block" / "metrics.csv"
    head, *rows = file.read_text("utf-8").splitlines()
    place = head.split(",").index("train_nats")
    for row, text in ((1, "nan"), (2, "inf"), (3, "1e300")):
        cells = rows[row].split(",")
        cells[place] = text
        rows[row] = ",".join(cells)
    file.write_text("\n".join([head, *rows, ""]), encoding="utf-8")
    assert check(run, capsys)


@pytest.mark.parametrize(
    ("kind", "place", "value", "said"),
    [
        (
            "perplexity",
            "result.figures.0.perplexity",
            "12" + MARK,
            "must be a measurement .* Input should be a v",
        ),
        (
            "perplexity",
            "settings.text",
            ["a"],
            "is not at settings.text: Input should be a valid string, got ",
        ),
        ("perplexity", "result.figures", [], "is not at result.figures: List should have at least 1 item"),
        ("perplexity", "measured", None, "is not at measured: Input should be a valid string, got None"),
        (
            "denoising",
            "result.steps.0",
            ["show", 10**9, "x"],
            "steps.0 must be a step that can follow the others",
        ),
        (
            "denoising",
            "result.steps.0",
            ["block", 0, 10**12],
            "steps.0 must be a step that can follow the others",
        ),
        (
            "samples",
            "result.texts.0.stopped_by",
            "x",
            "stopped_by: Input should be 'eos', 'string', 'entropy' or",
        ),
    ],
)
def test_a_measurement_of_another_form_is_named(kind, place, value, said, run, capsys):
    (file, *_) = sorted((run / "block" / "measured").glob(f"{kind}*.json"))
    record = json.loads(file.read_text("utf-8"))
    *path, key = [int(each) if each.isdecimal() else each for each in place.split(".")]
    inside = record
    for each in path:
        inside = inside[each]
    inside[key] = value
    file.write_text(json.dumps(record), encoding="utf-8")
    assert re.search(f"^bd3lm: {re.escape(str(file))} .*{said}", line(run, capsys))


@pytest.mark.parametrize("text", ["[" * 50_000, '{"a":' * 50_000, "9" * 5_000, "", "\0"], ids=len)
def test_a_measured_file_that_is_no_json_is_named(text, run, capsys):
    file = run / "block" / "measured" / "more.json"
    file.write_text(text, encoding="utf-8")
    assert f"bd3lm: {file} must be JSON, as measurements are stored, and is not: " in line(run, capsys)


@pytest.mark.parametrize("name", [MARK.replace("/", "\\"), "a\x1b[31m\x07b", "`<b>`|*x*\n# y", "\u202etxt"])
def test_a_folder_may_be_called_anything(name, reported, tmp_path, capsys):
    """It is in tables, commands, captions and, where runs have one name, in plots."""
    run = Path(shutil.copytree(reported, tmp_path / name / "demo"))
    assert check(run, capsys)
