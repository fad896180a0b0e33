"""Run notebooks from the first cell to the last, and save what they print and plot.

    python scripts/run_notebooks.py docs/notebooks/*.ipynb

A cell that raises ends the run with its traceback, and the file stays as it was.
"""

import argparse
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

CELL_SECONDS = 800  # on a machine that does ten other things


def executed(path: Path, *, then: str = "", cell_seconds: int = CELL_SECONDS) -> NotebookNode:
    """The notebook with fresh outputs. `then` is code that runs after its last cell, and is not kept."""
    notebook = nbformat.read(path, as_version=4)
    cells = list(notebook.cells)
    if then:
        notebook.cells.append(nbformat.v4.new_code_cell(then))
    NotebookClient(
        notebook,
        timeout=cell_seconds,
        startup_timeout=180,
        kernel_name="python3",  # always this interpreter's
        extra_arguments=["--log-level=ERROR"],  # it warns that others on this machine can listen
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    notebook.cells = cells
    notebook.metadata.language_info = {"name": "python"}  # the rest depends on who ran it
    return notebook


def save(notebook: NotebookNode, path: Path) -> None:
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", type=Path, nargs="+")
    for path in parser.parse_args().notebooks:
        started = time.monotonic()
        save(executed(path), path)
        print(f"{path}: {time.monotonic() - started:.0f} s, {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
