"""The documents name code, tests and commands that exist; their examples run."""

import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import bd3lm
from bd3lm import cli
from bd3lm.commands import every_command
from bd3lm.commands.train import Train
from bd3lm.methods import BlockDiffusionMethod, Law
from bd3lm.runs.recipe import Recipe, _types_at
from tests.lm import of_method

pytestmark = pytest.mark.sweep(3)

ROOT = Path(__file__).parents[1]
PACKAGE = Path(bd3lm.__file__).parent
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
BOX = ROOT / "src" / "bd3lm" / "box" / "README.md"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", CONTRIBUTING, BOX]
WITH_COMMANDS = [
    ROOT / "README.md",
    BOX,
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "install",
            "quickstart",
            "training",
            "publishing",
            "adapting",
            "tuning",
            "serving",
            "checkpoints",
            "reproduce",
            "results",
            "evaluation",
            "sampling",
            "idea",
            "speculation",
            "figures",
            "scale",
            "exporting",
        )
    ),
]
# In place of the programs that a page calls. Those that call ours write down its words, the rest do nothing.
SHELL = r"""
set -eu
bd3lm() { printf '%s\0' "$@" $'\x1e'; }
torchrun() { while [ "$1" != bd3lm ]; do shift; done; "$@"; }
sbatch() { while [ "$1" != scripts/train.slurm ]; do shift; done; shift; bd3lm train "$@" --out "$OUT"; }
make() { :; }
pip() { :; }
curl() { :; }
python() { :; }
lmdeploy() { :; }
"""


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```(?:{language})\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def _commands(source: str, folder: Path) -> list[list[str]]:
    """The words of every call of bd3lm, as a shell makes them of its loops, quotes and variables."""
    script = SHELL + source.replace(".venv/bin/bd3lm", "bd3lm")
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", script],
        cwd=folder,  # empty, so that patterns match nothing and stay as they are
        env={"PATH": str(folder)},  # anything else that a page calls is an error
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return [call.rstrip("\0").split("\0") for call in done.stdout.split("\x1e\0")[:-1]]


@pytest.fixture
def understand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Read a command as `bd3lm` does, and stop before it does anything; a recipe is resolved."""

    def show(self: Train) -> int:
        known = self.preset or self.show  # else it needs a run to resume, or a file
        return run(replace(self, show=True)) if known else 0

    run = Train.run
    for each in every_command().values():
        monkeypatch.setattr(each, "run", lambda self: 0)
    monkeypatch.setattr(Train, "run", show)

    def check(words: list[str]) -> None:
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code
        assert not status, f"bd3lm {' '.join(words)}: {capsys.readouterr().err}"

    return check


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_understood(
    page: Path, understand: Callable[..., None], tmp_path: Path
) -> None:
    calls = [call for block in _blocks(page, "sh") for call in _commands(block, tmp_path)]
    assert len(calls) >= 2
    for words in calls:
        understand(words)


def test_what_differs_from_the_paper_can_be_had_as_it_is_there(
    understand: Callable[..., None], tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Where ours differs\n(.*?)^## ", page, flags=re.DOTALL | re.MULTILINE)
    rows = section[section.index("as they do |") :].splitlines()[2:]
    rows = [row for row in rows if row.startswith("|")]
    assert len(rows) >= 11
    for row in rows:
        calls = re.findall(r"`(bd3lm [^`]+)`", row.split("|")[4])
        assert calls, row
        for call in calls:
            (words,) = _commands(call, tmp_path)
            understand(words)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bd3lm sample box --lenght 5", "--lenght"),
        ("bd3lm smaple box", "sample"),
        ("torchrun --nproc-per-node 8 -m bd3lm train demo --train.stpes 5", "stpes"),
        ("for run in ar nothing; do bd3lm train demo-$run; done", "demo-nothing"),
        ("bd3lm train demo --method.block_size 8", "block.method.block_size"),
        ("bd3lm variance runs/mine --gradients", "--gradients"),
        ("OUT=runs/a sbatch --nodes 4 scripts/train.slurm demo --paralell fsdp", "paralell"),
    ],
)
def test_a_mistake_in_a_command_is_noticed(
    line: str, said: str, understand: Callable[..., None], tmp_path: Path
) -> None:
    *right, wrong = _commands(line, tmp_path)
    for words in right:
        understand(words)
    with pytest.raises(AssertionError, match=re.escape(said)):
        understand(wrong)


def test_an_unknown_program_on_a_page_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="bd3ml"):
        _commands("bd3ml sample box", tmp_path)


@pytest.mark.parametrize("page", ["sampling", "idea", "speculation", "figures"])
def test_the_examples_of_a_page_run(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a tiny model in place of the box, which takes a minute for them on one core."""
    monkeypatch.chdir(tmp_path)
    joint = BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True)

    def load(name: str, law: Law = "block") -> bd3lm.LanguageModel:
        return {"box": of_method(joint, context=64)}[name].with_law(law)

    monkeypatch.setattr(bd3lm, "load", load)
    examples = _blocks(ROOT / "docs" / f"{page}.md", "python|py")
    assert examples
    for source in examples:
        exec(compile(source, f"{page}.md", "exec"), {"__name__": page})
    assert (tmp_path / "leaning" / "config.json").exists() == (page == "sampling")


def test_what_the_page_about_the_idea_says_of_the_box_is_so(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = _blocks(ROOT / "docs" / "idea.md", "python")
    exec(compile(example, "idea.md", "exec"), {"__name__": "idea"})
    text, log_p = capsys.readouterr().out.rstrip().rsplit("\n", 1)
    assert text.startswith("The city of")
    (said,) = re.findall(r"# (−[\d.]+),", example)
    assert f"{float(log_p):.2f}" == said.replace("−", "-")


def test_passes_on_the_page_about_speculation_are_those_of_the_box(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = _blocks(ROOT / "docs" / "speculation.md", "py")
    exec(compile(example, "speculation.md", "exec"), {"__name__": "speculation"})
    said = re.search(r"# (\d+) and (\d+) passes", example)
    assert said
    assert capsys.readouterr().out.split() == ["True", *said.groups()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_named_in_a_page_exist(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {name}\(", source, flags=re.MULTILINE), f"{file}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_named_in_a_page_exists(page: Path) -> None:
    for dotted in re.findall(r"`(bd3lm(?:\.\w+)+)`", page.read_text(encoding="utf-8")):
        assert _exists(dotted), dotted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fields_of_recipes_named_in_a_page_exist(page: Path) -> None:
    """Of some kind, as flags or in backquotes; but for those that the page about extensions adds."""
    parts = {each.name for each in fields(Recipe)}
    for flag, name in re.findall(r"--((?:\w+\.)+\w+)|`((?:\w+\.)+\w+)`", page.read_text(encoding="utf-8")):
        path = (flag or name).split(".")
        if path[0] == "bd3lm":  # a module, of which another test knows
            continue
        first = 0 if path[0] in parts else 1  # after a stage's name
        part, *field = path[first:]
        if part in parts and field and field not in (["masking", "least"], ["jsonl"]):
            *family, last = field
            assert _types_at([part, *family] if last == "kind" else [part, *field]), ".".join(path)


def test_recipes_of_training_are_understood(
    understand: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = _blocks(ROOT / "docs" / "training.md", "yaml")
    assert recipes
    for recipe in recipes:
        Path("recipe.yaml").write_text(recipe, encoding="utf-8")
        understand(["train", "--config", "recipe.yaml", "--show"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


def test_rooms_are_those_of_the_contract() -> None:
    table = CONTRIBUTING.read_text(encoding="utf-8").partition("| rooms |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines()[2:]]
    assert rows == _rooms()


TINY = """
method: {kind: block_diffusion, block_size: 4}
train: {steps: 1, global_batch: 2}
network: {layers: 1, hidden: 16, heads: 2}
data: {context: 16, builtin_vocabulary: 300, validation_sequences: 2}
"""


def test_the_walks_are_as_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Functions are first called in the order of the page, by none from a room below."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(TINY, encoding="utf-8")
    model = tmp_path / "runs" / "recipe"
    typed = (
        ["train", "--config", "recipe.yaml", "--device", "cpu"],
        ["sample", str(model), "The import statement", "--device", "cpu"],
        ["eval", str(model), "--device", "cpu"],
    )
    depth = {room: row for row, rooms in enumerate(_rooms()) for room in rooms}
    for (title, walk), words in zip(_walks().items(), typed, strict=True):
        with _first_calls(walk) as calls:
            assert cli.main(words) == 0, capsys.readouterr().err
        assert [call for call, _ in calls] == walk, title
        for (file, function), (from_file, _) in calls[1:]:
            above, below = (depth[Path(each).parts[0].removesuffix(".py")] for each in (from_file, file))
            assert above <= below, f"{title}: {file} {function} is called from {from_file}"


def _rooms() -> list[list[str]]:
    """The rooms in the order of the contract, those of a row side by side."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    return [layer.split(" | ") for layer in contract["layers"]]


def _walks() -> dict[str, list[tuple[str, str]]]:
    """The functions of each walk by its title: (file, name)."""
    text = CONTRIBUTING.read_text(encoding="utf-8").partition("## The three walks")[2].partition("\n## ")[0]
    sections = (each.partition("\n") for each in text.split("\n### ")[1:])
    return {
        title: re.findall(r"^\| `([\w/.]+)` \| `([\w.]+)` \|", rows, flags=re.MULTILINE)
        for title, _, rows in sections
    }


@contextmanager
def _first_calls(
    wanted: Sequence[tuple[str, str]],
) -> Iterator[list[tuple[tuple[str, str], tuple[str, str]]]]:
    """The first call of each function, with the nearest of the others that it is called by (or itself)."""
    left, calls = set(wanted), []

    def of(frame: FrameType) -> tuple[str, str]:
        return frame.f_code.co_filename.removeprefix(f"{PACKAGE}/"), frame.f_code.co_qualname

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (name := of(frame)) not in left:
            return
        left.remove(name)
        above, by = frame.f_back, name
        while above is not None and by == name:
            by = of(above) if of(above) in wanted else name
            above = above.f_back
        calls.append((name, by))

    sys.setprofile(seen)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False
