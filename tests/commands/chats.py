"""What tests of `bd3lm chat` share: a session of given lines, its answers by hand, and a terminal."""

import io
import itertools
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bd3lm.commands.chat.answers import Answerer
from bd3lm.commands.chat.conversation import Conversation
from bd3lm.commands.chat.session import Session
from bd3lm.commands.sample import Sample
from bd3lm.data.chat import Message, conversation
from bd3lm.io.console import Console
from bd3lm.lm import LanguageModel
from bd3lm.models import Transformer
from tests.lm import BYTES, of_bytes
from tests.serving import TEMPLATE

CONTEXT = 160


def a_console(width: int, *, is_terminal: bool = True) -> Console:
    """Whatever the terminal of whoever runs the tests is."""
    return Console(
        force_terminal=is_terminal,
        file=io.StringIO(),
        width=width,
        height=30,
        _environ={"TERM": "xterm-256color"},
    )


@dataclass
class Said:
    """Lines that are there already, some of which are keys that interrupt."""

    lines: list[str | type[BaseException]]
    is_live: bool = True

    def read(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if not isinstance(line, str):
            raise line
        return line

    def close(self) -> None:
        pass


def model_of(context: int = CONTEXT, **options: Any) -> LanguageModel:
    """It writes few signs, and ends its answers."""
    model = of_bytes(
        options.pop("block_size", 4),
        tokenizer=replace(BYTES, chat_template=TEMPLATE),
        context=context,
        end_logit=options.pop("end_logit", -2.0),
        **options,
    )
    with torch.no_grad():
        others = [byte for byte in range(256) if chr(byte) not in "abcdef \n"]
        model.network.output.bias[others] = -1e3
    return model


@dataclass
class Seen:
    """What a session left."""

    shown: str
    noted: str
    session: Session

    @property
    def exchanges(self) -> list[tuple[str, str]]:
        return self.session.talk.exchanges


def chat(
    model: LanguageModel,
    *lines: str | type[BaseException],
    live: bool = False,
    drafts: bool = False,
    template: str | None = None,
    system: str | None = None,
    stops: Sequence[str] = (),
    **choices: Any,
) -> Seen:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    template = tokenizer.chat_template if template is None else template
    assert template is not None
    console = a_console(60, is_terminal=live)
    notes = a_console(200, is_terminal=False)
    session = Session(
        Answerer(model, tokenizer, Sample(**{"max_new_tokens": 24, **choices}), stops),
        Conversation(template, tokenizer, model.config.network.context, system),
        Said(list(lines), live),
        name="tiny",
        console=console,
        notes=notes,
        drafts=drafts,
    )
    session.run()
    return Seen(console.file.getvalue(), notes.file.getvalue(), session)  # type: ignore[attr-defined]


def by_hand(
    model: LanguageModel, turns: Sequence[str], seed: int = 0, system: str | None = None, **settings: Any
) -> str | None:
    """The answer to the last of these turns, of a user and an assistant in turn."""
    assert model.tokenizer is not None
    assert model.tokenizer.chat_template is not None
    messages = [] if system is None else [Message("system", system)]
    messages += [Message(("user", "assistant")[place % 2], turn) for place, turn in enumerate(turns)]
    tokens = conversation(model.tokenizer.chat_template, messages, model.tokenizer)
    (found,) = model.generate([tokens], seeds=[seed], **{"max_new_tokens": 24, **settings})
    return found.completion


def interrupted_at(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    calls, forward = itertools.count(), Transformer.forward

    def interrupted(*arguments: Any, **options: Any) -> torch.Tensor:
        if next(calls) == passes:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    monkeypatch.setattr(Transformer, "forward", interrupted)


def piped(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text), isatty=lambda: False))


def _in_charge() -> None:
    """Make a process answer its terminal: tests that run in the background inherit an ignored Ctrl-C."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """`bd3lm chat` at a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.main, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bd3lm", "chat", *words],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=_in_charge,
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "60", "LINES": "30"},
        )
        os.close(other)
        self.printed = ""

    def until(self, said: str, seconds: float = 60.0) -> str:
        """All that was printed up to this, since the last time."""
        end = time.monotonic() + seconds
        while said not in self.printed:
            if time.monotonic() > end:
                raise TimeoutError(f"{said!r} did not come after {self.printed!r}")
            if select.select([self.main], [], [], 0.1)[0]:
                try:
                    self.printed += os.read(self.main, 65536).decode(errors="replace")
                except OSError:
                    raise AssertionError(f"it ended after {self.printed!r}") from None
        before, _, self.printed = self.printed.partition(said)
        return before

    def type(self, keys: str) -> None:
        os.write(self.main, keys.encode())

    def end(self) -> int:
        """Take the rest, until it ends."""
        while True:
            try:
                if not os.read(self.main, 65536):
                    break
            except OSError:
                break
        os.close(self.main)
        return self.process.wait(60)
