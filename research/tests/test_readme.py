"""What pages say of this folder is so: files, modules and targets of make that they name exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = ROOT / "research" / "README.md"
PAGES = [
    OWN,
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "src/bd3lm/box/README.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    for file in re.findall(r"\bresearch/[\w/.*-]*\w", text):
        assert list(ROOT.glob(file)), file
    for module in re.findall(r"python -m (research[\w.]*)", text):
        assert importlib.util.find_spec(module), module


def test_links_and_targets_of_the_page_of_this_folder_exist() -> None:
    text, makefile = OWN.read_text("utf-8"), (ROOT / "Makefile").read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (OWN.parent / link).exists(), link
    for file in re.findall(r"`((?:[\w-]+/)?[\w-]+(?:/|\.sh|\.py))`", text):
        assert (OWN.parent / file).exists(), file
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
