"""The Python of the README and of the first pages runs as written. The README's targets of make exist, and
its figures are those of the pages that it links to. test_docs.py reads the commands."""

import re
from pathlib import Path

import pytest

import bd3lm

ROOT = Path(__file__).parents[1]
README, INSTALL, QUICKSTART, TRAINING, PERFORMANCE = (
    (ROOT / page).read_text(encoding="utf-8")
    for page in (
        "README.md",
        "docs/install.md",
        "docs/quickstart.md",
        "docs/training.md",
        "docs/performance.md",
    )
)


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def numbers(row: str) -> list[str]:
    return re.findall(r"\d[\d,.]*\d|\d", row)


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        (README, "The city of"),
        (QUICKSTART, "The city of"),
        (TRAINING, r"False True\nperplexity [\d.]+ \(exact\), [\d.]+ \(bound\)"),
    ],
    ids=["README", "quickstart", "training"],
)
def test_python_examples_run(page: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    for source in blocks("python", page):
        exec(compile(source, "page.md", "exec"), {"__name__": "page"})
    assert re.match(printed, capsys.readouterr().out)


def test_the_citation_has_this_version() -> None:
    (bibtex,) = blocks("bibtex")
    assert f"version = {{{bd3lm.__version__}}}" in bibtex


@pytest.mark.parametrize(("page", "some"), [(README, {"demo"}), (INSTALL, {"demo", "serve", "test"})])
def test_make_targets_exist(page: str, some: set[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([\w-]+)", "\n".join(blocks("sh", page)), flags=re.MULTILINE)
    assert some <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_speeds_are_those_of_performance() -> None:
    """Each row has the numbers of one row there: ours, the peer's, and how many times as fast."""
    rows = re.findall(r"^\| (?:train|sample).*", README, flags=re.MULTILINE)
    assert len(rows) == 9
    known = [set(numbers(row)) for row in PERFORMANCE.splitlines() if row.startswith("|")]
    for row in rows:
        assert any(set(numbers(row)) <= each for each in known), row
    ratios = {numbers(row)[-1] for row in rows}
    assert ratios >= set(re.findall(r"\*\*([\d.]+)×\*\*", README)) > set()


def test_the_perplexities_are_those_of_the_results() -> None:
    (above,) = re.findall(r"\*\*(\+[\d.]+&nbsp;%)\*\* \| \((± [\d.]+)\)", README)
    (uniform,) = re.findall(r"preset is ([\d.]+ %) (± [\d.]+)\s+above AR", README)
    wanted = " ".join(above).replace("&nbsp;", " "), "+" + " ".join(uniform)
    pages = [page for folder in ("docs", "research") if (page := ROOT / folder / "results.md").exists()]
    rows = [row for page in pages for row in page.read_text(encoding="utf-8").splitlines()]
    preset = [row for row in rows if row.startswith("| `wikipedia-block-4`")]
    assert any(all(figure in row for figure in wanted) for row in preset)
