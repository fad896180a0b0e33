"""The documents name code, tests and commands that exist; their examples run."""

import importlib
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import bd3lm
from bd3lm import cli
from bd3lm.commands import every_command
from bd3lm.commands.train import Train
from tests.lm import of_bytes

pytestmark = pytest.mark.sweep(3)

ROOT = Path(__file__).parents[1]
BOX = ROOT / "src" / "bd3lm" / "box" / "README.md"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", BOX]
WITH_COMMANDS = [
    ROOT / "README.md",
    BOX,
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("quickstart", "reproduce", "evaluation", "sampling", "scale")
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
python() { :; }
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
        return run(replace(self, show=True)) if self.preset else 0  # without one it needs a run to resume

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


def test_the_examples_of_sampling_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a tiny model in place of the box, which takes a minute for them on one core."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bd3lm, "load", lambda name: {"box": of_bytes(context=64)}[name])
    for source in _blocks(ROOT / "docs" / "sampling.md", "python|py"):
        exec(compile(source, "sampling.md", "exec"), {"__name__": "sampling"})
    assert (tmp_path / "leaning" / "config.json").exists()


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
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


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
