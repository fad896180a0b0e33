"""The documents name code and tests that exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


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


def test_the_examples_of_extending_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    printed: list[str] = []
    for source in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(source, "extending.md", "exec"), {"__name__": "extending"})
        printed.append(capsys.readouterr().out)
    bound, trained, text = printed
    assert bound == "False\n"
    assert trained.endswith("30 True 17\n")
    assert (
        "masking=Times(schedule=Cubic())"
        in (tmp_path / "runs/cubic/checkpoints/step-00000030/state.json").read_text()
    )
    assert text.startswith("The city of")


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
