"""Every line to a terminal goes through one function, whoever writes it and whatever is in it."""

import ast
import sys
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import bd3lm
from bd3lm.io.console import Console
from bd3lm.io.terminal import give, one_entry, printable, say

SOURCE = Path(bd3lm.__file__).parent
THROUGH_IT = {"io/terminal.py", "io/console.py", "__main__.py"}
EVIL = "\x1b]0;x\x07\x1b[31mred\x9b2J\b\r\x7f\u202e\u2028\ud800[/red][link=http://a]b[/]:cat:"


def bypasses(tree: ast.AST) -> list[int]:
    """The lines that print, or make one of rich's own consoles."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="print"):
                found.append(node.lineno)
            case ast.ImportFrom(module="rich.console" | "rich", names=names) if {
                each.name for each in names
            } & {"Console", "print", "get_console"}:
                found.append(node.lineno)
    return found


def test_nothing_is_written_past_it() -> None:
    places = {file.relative_to(SOURCE).as_posix(): file for file in SOURCE.rglob("*.py")}
    found = {name: bypasses(ast.parse(file.read_text("utf-8"))) for name, file in places.items()}
    assert {name: lines for name, lines in found.items() if lines and name not in THROUGH_IT} == {}
    assert THROUGH_IT < places.keys()


@pytest.mark.parametrize("source", ["print(1)", "from rich.console import Console", "f = print"])
def test_what_goes_past_it_is_found(source: str) -> None:
    assert bypasses(ast.parse(source))


def test_what_steers_a_terminal_is_shown_as_text() -> None:
    assert printable("a\x1b[31m\x9b\x7f\r\nb\rc\td") == "a\\x1b[31m\\x9b\\x7f\nb\\rc\td"
    assert printable("\u202etxt\u2066 \u2028 \ud800") == "\\u202etxt\\u2066 \\u2028 \\ud800"
    assert printable("naïve 🙂 你好 مرحبا \u200d") == "naïve 🙂 你好 مرحبا \u200d"


def test_every_code_point_can_be_shown() -> None:
    for code in range(sys.maxunicode + 1):
        printable(chr(code)).encode()


def test_an_error_is_one_line_and_a_list_at_most() -> None:
    assert one_entry("a:\n  b\n  c\n") == "a:\n  b\n  c"
    assert one_entry("a\nbd3lm: all is well\r\n") == "a\\nbd3lm: all is well"


def test_lines_for_people_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    say(EVIL, to=sys.stderr)
    printed = capsys.readouterr()
    assert printed.out == printed.err == f"{printable(EVIL)}\n"


@pytest.mark.parametrize("seen", [False, True])
def test_data_is_as_it_is_but_on_a_terminal(
    seen: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: seen)
    give("a\x1b[31m")
    assert capsys.readouterr().out == ("a\\x1b[31m\n" if seen else "a\x1b[31m\n")


@pytest.mark.parametrize("shown", [EVIL, Text(EVIL), "table", "bar"], ids=lambda shown: type(shown).__name__)
def test_a_console_shows_what_it_is_given(shown: object, capsys: pytest.CaptureFixture[str]) -> None:
    """In a terminal, whose own codes are those of colours and of the cursor."""
    console = Console(force_terminal=True, width=200, color_system=None)
    if shown == "bar":
        with Progress(TextColumn("{task.description}", markup=False), console=console) as progress:
            progress.add_task(EVIL)
    else:
        if shown == "table":
            shown = Table(EVIL, title=EVIL)
            shown.add_row(EVIL)
        console.print(shown)
    printed = capsys.readouterr().out
    for code in ("\x1b[?25l", "\x1b[?25h", "\x1b[2K", "\x1b[1A", "\r"):  # those of a bar
        printed = printed.replace(code, "") if "bar" == shown else printed
    assert printable(printed) == printed
    if shown != "bar":  # which has room for what rich counts
        assert "[/red][link=http://a]b[/]:cat:" in printed
    assert "\\x1b[31mred\\x9b2J" in printed
