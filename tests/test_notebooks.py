"""The notebooks: they run from the first cell to the last, do what they say, and are saved as they ran."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bd3lm.methods import AutoregressiveMethod
from tests.lm import of_method
from tests.test_site import _module

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PAGE = _module("docs/_ext/notebooks.py")

BLOCK_DIFFUSION = """
assert ar_perplexity < 100 and max(exact) < 100, "nothing was learned"
assert all(a < b for a, b in zip(exact, bound, strict=True)), "the bound does not bound"
assert exact[-1] < exact[0] and bound[-1] < bound[0], "a larger lean does not lower perplexity here"
assert bound[-1] - exact[-1] < bound[0] - exact[0], "a larger lean does not close the gap"
"""
SPECULATION = """
assert plain.text == fast.text
assert fast.sample.evaluations < plain.sample.evaluations
assert all(tokens > 1.2 for _, _, tokens in found.values())
"""
DRAFTER = """
assert drafter.config.base is not None, "this is no drafter"
assert plain.text == fast.text
assert fast.sample.drafted
"""


def _cells(path: Path, kind: str) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "checkpoint", "then"),
    [
        ("block_diffusion", False, BLOCK_DIFFUSION),
        ("speculation", False, SPECULATION),
        ("speculation", True, DRAFTER),
    ],
)
def test_a_notebook_runs(
    name: str, checkpoint: bool, then: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a tiny checkpoint in place of the published one, which is not here."""
    from scripts.run_notebooks import executed

    for variable in ("TMPDIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("BD3LM_CHECKPOINT", raising=False)
    if checkpoint:
        of_method(AutoregressiveMethod(), context=64, hidden=64).save_pretrained(tmp_path / "checkpoint")
        monkeypatch.setenv("BD3LM_CHECKPOINT", str(tmp_path / "checkpoint"))
        monkeypatch.setenv("BD3LM_STEPS", "4")
        monkeypatch.setenv("BD3LM_TEXTS", "16")
    found = executed(ROOT / "docs" / "notebooks" / f"{name}.ipynb", then=then, cell_seconds=800)
    printed = "".join(output.get("text", "") for cell in found.cells for output in cell.get("outputs", []))
    assert printed.count("Skipped: ") == (3 if name == "speculation" and not checkpoint else 0)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_as_it_ran(path: Path) -> None:
    cells = _cells(path, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run make notebooks"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(outputs) >= 5
    for output in outputs:
        assert output["output_type"] in ("stream", "display_data")
        assert output.get("name") != "stderr", "".join(output["text"])
        assert not re.search(r"/(tmp|home|root|Users)/", "".join(output.get("text", [])))
    for cell in cells:
        plots = any("image/png" in output.get("data", {}) for output in cell["outputs"])
        assert plots == bool(cell["metadata"].get("alt")), "a plot needs words, in the cell's metadata"


def test_notebooks_are_small() -> None:
    assert len(NOTEBOOKS) == 2
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 400_000


def _page(*cells: dict[str, Any]) -> str:
    head = {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."], "metadata": {}}
    made: str = PAGE.as_markdown({"cells": [head, *cells]}, "a.ipynb")
    return made


def test_a_notebook_becomes_a_page() -> None:
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]},
        {"output_type": "display_data", "data": {"image/png": "QUJD\nRA==\n", "text/plain": "<Figure>"}},
    ]
    code = {
        "cell_type": "code",
        "source": "print(1)\nprint(2)",
        "metadata": {"alt": "Two."},
        "outputs": outputs,
    }
    fence = "~" * 8
    assert _page(code).split("\n\n") == [
        "# Title",
        "Text.",
        "{download}`Download this notebook <a.ipynb>`",
        f"{fence}{{code-block}} python",
        f"print(1)\nprint(2)\n{fence}",
        f"{fence}{{code-block}} text\n:class: output",
        f"1\n2\n{fence}",
        "![Two.](data:image/png;base64,QUJDRA==)\n",
    ]


def test_an_output_that_a_page_cannot_show_is_refused() -> None:
    error = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
    with pytest.raises(ValueError, match="must be text or a PNG, got error"):
        _page({"cell_type": "code", "source": "x", "metadata": {}, "outputs": [error]})
