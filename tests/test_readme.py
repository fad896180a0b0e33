"""The README's Python runs as written, and its targets of make exist; test_docs.py reads its commands."""

import re
from pathlib import Path

import bd3lm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_examples_run(capsys) -> None:
    for source in blocks("python"):
        exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed.startswith("The city of")
    assert "False True" in printed
    assert "(exact)" in printed


def test_the_citation_has_this_version() -> None:
    (bibtex,) = blocks("bibtex")
    assert f"version = {{{bd3lm.__version__}}}" in bibtex


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([\w-]+)", "\n".join(blocks("sh")), flags=re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
