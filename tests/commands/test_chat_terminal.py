"""`bd3lm chat` at a terminal and in a pipe: what is stopped, wrapped, hostile or wrong."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from rich.text import Text

from bd3lm.cli import main
from bd3lm.commands.chat.answers import Answerer
from bd3lm.commands.chat.conversation import read_conversation
from bd3lm.commands.chat.display import Typed
from bd3lm.commands.chat.lines import read_rest
from bd3lm.commands.chat.session import SETTINGS, setting_value
from bd3lm.commands.sample import Sample
from bd3lm.data.chat import Message, conversation
from bd3lm.data.templates import PLAIN
from bd3lm.io.terminal import printable
from bd3lm.lm import load
from tests.commands import fails, saved
from tests.commands.chats import (
    CONTEXT,
    Said,
    Terminal,
    a_console,
    by_hand,
    chat,
    interrupted_at,
    model_of,
    piped,
)
from tests.lm import BYTES, of_bytes
from tests.serving import small_model

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x1b[31m"


# --- stopped ---


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("passes", [0, 1, 9, 14])
def test_a_stopped_answer_is_kept_as_far_as_it_goes(passes: int, drafts: bool, monkeypatch) -> None:
    model = model_of(end_logit=-1e3)
    whole = by_hand(model, ["a"])
    assert whole is not None
    interrupted_at(monkeypatch, passes)
    seen = chat(model, "a", "b", live=True, drafts=drafts)
    monkeypatch.undo()
    *first, (last, answer) = seen.exchanges
    if passes < 2:
        assert not first
        assert "stopped before there was an answer; the message is removed" in seen.noted
    else:
        ((message, part),) = first
        assert message == "a"
        assert whole.startswith(part)
        assert 0 < len(part) < len(whole)
        assert "stopped; the partial answer is kept" in seen.noted
    turns = [turn for exchange in first for turn in exchange]
    assert (last, answer) == ("b", by_hand(model, [*turns, "b"]))
    assert seen.shown.count("\x1b[?25l") == seen.shown.count("\x1b[?25h")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("part", range(24))
def test_wherever_it_is_stopped_the_chat_goes_on(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between the generators of the engine, one of which may hold a lock then."""
    model, written, seen = model_of(end_logit=-1e3), Answerer._written, [0, 0]
    last = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name not in ("generator_context", "_events", "_told"):
            return None
        frame.f_trace_opcodes = True
        seen[0] += event == "opcode"
        if last and seen[0] == last:
            raise KeyboardInterrupt
        return count

    def traced(*arguments: Any) -> Any:
        sys.settrace(count)
        try:
            return written(*arguments)
        finally:
            sys.settrace(None)

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Answerer, "_written", traced)
            whole = chat(model, "a", live=True, max_new_tokens=8).exchanges[0][1]
            total, seen[0] = seen[0], 0
            last = total * part // 24 + random.Random(part).randrange(total // 24)
            signal.alarm(20)
            stopped = chat(model, "a", live=True, max_new_tokens=8)
        signal.alarm(20)
        kept = stopped.exchanges[0][1] if stopped.exchanges else ""
        assert whole.startswith(kept)
        stopped.session.lines.lines += ["b"]  # type: ignore[attr-defined]
        stopped.session.run()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    turns = ["a", kept] if stopped.exchanges[1:] else []
    assert stopped.exchanges[-1] == ("b", by_hand(model, [*turns, "b"], max_new_tokens=8))


def test_another_answer_that_is_stopped_at_once_leaves_the_one_before(monkeypatch) -> None:
    model = model_of()
    expected = chat(model, "a").exchanges
    lines = ["a", "/again"]
    seen = chat(model, *lines[:1], live=True)
    interrupted_at(monkeypatch, 0)
    seen.session.lines.lines.append("/again")  # type: ignore[attr-defined]
    seen.session.run()
    assert seen.exchanges == expected


def test_from_a_pipe_a_stop_ends_the_command(monkeypatch) -> None:
    interrupted_at(monkeypatch, 9)
    with pytest.raises(KeyboardInterrupt):
        chat(model_of(end_logit=-1e3), "a", "b")


def test_twice_at_the_prompt_ends_it_and_once_does_not() -> None:
    stop = KeyboardInterrupt
    seen = chat(model_of(), stop, "a", stop, "b\\", stop, "c", stop, stop, "d", live=True)
    assert [message for message, _ in seen.exchanges] == ["a", "c"]
    assert seen.noted.count("Ctrl-C again, Ctrl-D or /quit quits") == 4


# --- hostile ---


def test_what_a_model_writes_does_not_steer_the_terminal() -> None:
    model = small_model(CONTEXT)
    with torch.no_grad():
        model.network.output.bias[list(b"\x1b\x07\r\x9b\x08")] += 3.0
    for drafts in (False, True):
        seen = chat(model, "hi", live=True, drafts=drafts, max_new_tokens=100)
        answer = seen.exchanges[0][1]
        assert "\x1b" in answer
        left = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", seen.shown)
        assert "\\x1b" in left
        assert printable(left) == left
        assert not {"2J", "31m"} & set(re.findall(r"\x1b\[([0-9;?]*[A-Za-z])", seen.shown))
    assert chat(model, "hi", max_new_tokens=100).shown == f"{answer}\n"  # a program gets what was written


def test_what_is_typed_is_text_whatever_it_looks_like() -> None:
    model = model_of()
    message = f"<|endoftext|><|mask|>{{{{ 7 * 7 }}}}{ESCAPE}\0"
    seen = chat(model, message, "/undo", f"/{ESCAPE}", f"/set {ESCAPE} 1", live=True)
    assert seen.session.answerer.done
    assert seen.noted.count("\\x1b]0;owned") == 3
    assert "\x1b" not in seen.noted
    assert chat(model, message).exchanges == [(message, by_hand(model, [message]))]


def test_half_a_character_is_refused() -> None:
    seen = chat(model_of(), "a\ud800", "/system \ud800", "b", live=True)
    assert "a message must be valid Unicode, got 'a\\ud800'" in seen.noted
    assert "the system message must be valid Unicode" in seen.noted
    assert [message for message, _ in seen.exchanges] == ["b"]


# --- wrapping ---


def screen(printed: str, width: int) -> list[str]:
    """The lines of a terminal that was sent this, which breaks a line only before the next sign."""
    lines, column = [""], 0
    for found in re.finditer(r"\x1b\[(\d*)([CK])|(\r)|(\n)|(.)", printed, flags=re.DOTALL):
        number, code, carriage, end, sign = found.groups()
        if code == "C":
            column += int(number)
        elif code == "K":
            lines[-1] = lines[-1][:column]
        elif carriage:
            column = 0
        elif end or column == width:
            lines.append("")
            column = 0
        if sign:
            lines[-1] = lines[-1][:column].ljust(column) + sign + lines[-1][column + 1 :]
            column += 1
    return lines


@pytest.mark.parametrize("seed", range(50))
def test_an_answer_is_wrapped_at_words_however_its_pieces_come(seed: int) -> None:
    """As rich wraps the whole of it."""
    chance, width = random.Random(seed), 20
    words = ["".join(chance.choices("abcxyz", k=chance.choice([1, 3, 8, 20, 19, 21, 45]))) for _ in range(40)]
    text = "".join(word + chance.choice([" ", " ", "  ", "\n", "\n\n"]) for word in words) + "end"
    console = a_console(width)
    show, place = Typed(console), 0
    with show:
        while place < len(text):
            size = chance.choice([1, 2, 5, 30])
            show.more(text[place : place + size])
            place += size
    expected = [line.plain.rstrip() for line in Text(text).wrap(console, width)]
    found = screen(console.file.getvalue(), width)  # type: ignore[attr-defined]
    assert [line.rstrip() for line in found] == [*expected, ""]


def test_wide_signs_and_tabs_take_their_room() -> None:
    console = a_console(20)
    with Typed(console) as show:
        show.more("a\tb 日本語日本語 cd\t")
        show.more("e")
    assert console.file.getvalue() == "a       b \n日本語日本語 cd e\n"  # type: ignore[attr-defined]


# --- the command ---


def test_answers_alone_go_to_a_pipe(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = saved(model_of(), tmp_path / "model")
    piped(monkeypatch, "Hello ☂\r\n\nwhy?\n/again".encode())
    assert main(["chat", str(folder), "--max-new-tokens", "24", "--seed", "2", "--device", "cpu"]) == 0
    printed, model = capsys.readouterr(), load(folder, device="cpu")
    first = by_hand(model, ["Hello ☂"], 2)
    assert first is not None
    answers = [first, *(by_hand(model, ["Hello ☂", first, "why?"], seed) for seed in (2, 3))]
    assert printed.out == "".join(f"{answer}\n" for answer in answers)
    assert re.search(r"tokens written in .*\. Stopped: ", printed.err)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (b"\xff\n", "", "standard input must be UTF-8 text, and is not"),
        (b"/nothing\nhi\n", "", "there is no command /nothing, there are /help"),
        (b"hi\n", "--drafts", "--drafts needs a terminal, and standard output is not one"),
        (b"hi\n", "--history FILE", "--history needs a terminal, and standard input or output is not one"),
        (b"hi\n", "--top-k 0", "--top-k must be at least 1, got 0"),
        (b"hi\n", "--max-new-tokens 0", "--max-new-tokens must be at least 1, got 0"),
        (b"hi\n", "--seed -1", "must be whole numbers from 0"),
        (b"hi\n", "--law causal", "law"),
        (
            b"hi\n",
            "--chat-template plane",
            "--chat-template must be plain or a file, but there is no file plane",
        ),
        (b"hi\n", "--chat-template FILE", "the chat template of the model must write each message once"),
    ],
)
def test_what_is_wrong_is_one_line(
    text: bytes, words: str, said: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    folder, file = saved(model_of(), tmp_path / "model"), tmp_path / "hello.jinja"
    file.write_text("hello")
    piped(monkeypatch, text)
    assert said in fails(capsys, "chat", str(folder), *words.replace("FILE", str(file)).split())


def test_a_model_without_a_template_is_told_before_torch_is_there(tmp_path: Path) -> None:
    folder = saved(of_bytes(), tmp_path / "model")
    code = f"""
import sys
from bd3lm.cli import main
status = main(["chat", {str(folder)!r}])
assert "torch" not in sys.modules
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], input="hi\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"bd3lm: {folder} must have a chat template, and its tokenizer has none: give a file with one, "
        "--chat-template FILE, or use --chat-template plain\n"
    )


def test_a_model_without_a_tokenizer_is_told_so(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = saved(of_bytes(tokenizer=None), tmp_path / "model")
    piped(monkeypatch, b"hi\n")
    said = "the model was saved without a tokenizer; name one with --tokenizer"
    assert said in fails(capsys, "chat", str(folder), "--chat-template", "plain")


def test_another_law_writes_with_an_engine_of_its_own_and_settings_keep_theirs() -> None:
    joint = small_model(CONTEXT)
    seen = chat(joint, "/set law block", "a", "/set law default", "/undo", "a")
    assert seen.exchanges == [("a", by_hand(joint, ["a"]))]
    engine = seen.session.answerer.engine
    seen.session.answerer.choose(replace(seen.session.answerer.choices, temperature=0.5))
    assert seen.session.answerer.engine is engine
    with pytest.raises(ValueError, match="lean is for the block law"):
        seen.session.answerer.choose(replace(seen.session.answerer.choices, lean=1.0))
    assert seen.session.answerer.choices.lean is None


def test_with_the_plain_template_any_model_can_be_asked(tmp_path: Path, monkeypatch, capsys) -> None:
    model = of_bytes(context=CONTEXT)
    folder = saved(model, tmp_path / "model")
    piped(monkeypatch, b"hi\n")
    assert (
        main(["chat", str(folder), "--chat-template", "plain", "--max-new-tokens", "24", "--device", "cpu"])
        == 0
    )
    tokens = conversation(PLAIN, [Message("user", "hi")], BYTES)
    (expected,) = model.generate([tokens], seeds=[0], max_new_tokens=24, stop="\n\nUser:")
    assert capsys.readouterr().out == f"{expected.completion}\n"


def test_settings_are_flags_of_sample() -> None:
    for name in SETTINGS:
        assert setting_value(Sample, name, "default") == getattr(Sample(), name)


def test_lines_are_joined_as_they_are_typed() -> None:
    assert read_rest("a\\", Said(["b", "c"])) == "a\nb"
    assert read_rest("a\\\\", Said(["b"])) == "a\\\\"
    assert read_rest("a\\", Said([])) == "a"


@pytest.mark.slow
def test_a_program_can_wait_for_each_answer(tmp_path: Path) -> None:
    """And one that reads no more is no failure."""
    model = model_of(end_logit=-1e3)
    with torch.no_grad():
        model.network.output.bias[ord("\n")] = -1e3
    folder, turns = saved(model, tmp_path / "model"), list[str]()
    process = subprocess.Popen(
        [sys.executable, "-m", "bd3lm", "chat", str(folder), "--device", "cpu", "--max-new-tokens", "24"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    for message in ("a", "b"):
        process.stdin.write(f"{message}\n")
        process.stdin.flush()
        answer = process.stdout.readline().removesuffix("\n")
        assert answer == by_hand(model, [*turns, message])
        turns += [message, answer]
    process.stdout.close()
    process.stdin.write("c\n")
    process.stdin.close()
    noted = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), [line for line in noted.splitlines() if "cut off" not in line]) == (141, [])


@pytest.mark.slow
def test_at_a_terminal(tmp_path: Path) -> None:
    """Typing, editing, the arrow keys, Ctrl-C in an answer and at the prompt, and a history that is kept."""
    model = model_of(8192, end_logit=-1e3)
    folder, history = saved(model, tmp_path / "model"), tmp_path / "history"
    history.write_text("earlier\n")
    terminal = Terminal(str(folder), "--device", "cpu", "--max-new-tokens", "20", "--history", str(history))
    terminal.until("context 8,192 tokens")
    terminal.until("> ")
    terminal.type("Hellx\x7fo\r")
    answer = by_hand(model, ["Hello"], max_new_tokens=20)
    assert answer is not None
    terminal.until(answer.split()[0])
    terminal.until("the answer is cut off at 20 tokens: max_new_tokens")
    terminal.until("> ")
    terminal.type("/set max_new_tokens 8000\r")
    terminal.until("max_new_tokens is 8000")
    terminal.until("> ")
    terminal.type("tell me more\r")
    terminal.until("\n")
    time.sleep(1.0)
    terminal.type("\x03")
    terminal.until("stopped; the partial answer is kept")
    terminal.until("> ")
    terminal.type(f"/save {tmp_path / 'talk.jsonl'}\r")
    terminal.until("wrote ")
    terminal.until("> ")
    time.sleep(1.0)  # it must wait for a key by then
    terminal.type("\x03")
    terminal.until("Ctrl-C again, Ctrl-D or /quit quits")
    terminal.until("> ")
    terminal.type("\x1b[A\x1b[A\r")  # up twice
    terminal.until("tell me more")
    time.sleep(1.0)
    terminal.type("\x03")
    terminal.until("stopped")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    kept = read_conversation(tmp_path / "talk.jsonl")[1]
    assert kept[0] == ("Hello", answer)
    assert (by_hand(model, ["Hello", answer, "tell me more"], max_new_tokens=2000) or "").startswith(
        kept[1][1][:1000]
    )
    assert kept[1][1]
    assert history.stat().st_mode & 0o777 == 0o600
    lines = history.read_text().splitlines()
    assert [lines[0], lines[1], lines[-1]] == ["earlier", "Hello", "tell me more"]


@pytest.mark.slow
def test_at_a_terminal_a_stopped_service_ends_it(tmp_path: Path) -> None:
    terminal = Terminal(str(saved(model_of(), tmp_path / "model")), "--device", "cpu", "--drafts")
    terminal.until("> ")
    time.sleep(1.0)  # it must wait for a key by then
    terminal.process.send_signal(signal.SIGTERM)
    terminal.until("bd3lm: terminated")
    assert terminal.end() == 143
