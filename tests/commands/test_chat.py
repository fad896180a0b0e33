"""`bd3lm chat`: answers are the library's, commands do what they say, and nothing reaches a terminal raw."""

import io
import itertools
import json
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.live import Live
from rich.text import Text

from bd3lm.cli import main
from bd3lm.commands.chat.answers import Answerer
from bd3lm.commands.chat.conversation import Conversation, read_conversation
from bd3lm.commands.chat.display import Typed
from bd3lm.commands.chat.lines import read_history, read_rest
from bd3lm.commands.chat.session import SETTINGS, Session, setting_value
from bd3lm.commands.sample import Sample, display
from bd3lm.data.chat import Message, conversation
from bd3lm.data.templates import PLAIN, named_template
from bd3lm.io.console import Console
from bd3lm.io.terminal import printable
from bd3lm.lm import LanguageModel, load
from bd3lm.models import Transformer
from bd3lm.serving import Limits
from bd3lm.serving.worker import Worker
from tests.commands import fails, saved
from tests.lm import BYTES, D3PM, SEDD, SSD, baseline, of_bytes
from tests.serving import TEMPLATE, small_model

CONTEXT = 160
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x1b[31m"


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


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
    console = Console(force_terminal=live, file=io.StringIO(), width=60, height=30)
    notes = Console(force_terminal=False, file=io.StringIO(), width=200)
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


# --- answers ---

MODELS: dict[str, Callable[[], LanguageModel]] = {
    "autoregressive": lambda: model_of(block_size=None),
    "blocks of 4": lambda: model_of(block_size=4),
    "one block": lambda: model_of(block_size=CONTEXT),
    "joint, of bytes": lambda: small_model(4 * CONTEXT),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("shown", ["pipe", "terminal", "drafts"])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_generate_for_the_conversation(name: str, shown: str) -> None:
    model, live = MODELS[name](), shown != "pipe"
    seen = chat(
        model,
        "Hello ☂",
        "why?",
        "and?",
        live=live,
        drafts=shown == "drafts",
        seed=3,
        system="Be.",
        temperature=0.9,
    )
    turns: list[str] = []
    for message, answer in seen.exchanges:
        assert answer == by_hand(model, [*turns, message], 3, "Be.", temperature=0.9)
        turns += [message, answer]
    assert len(turns) == 6
    if not live:
        assert seen.shown == "".join(f"{answer}\n" for answer in turns[1::2])
    else:
        for answer in turns[1::2]:
            for word in printable(answer).split():
                assert len(word) > 30 or word in seen.shown


@pytest.mark.sweep(3)
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("method", [SEDD, D3PM, SSD], ids=["SEDD", "D3PM", "SSD-LM"])
def test_models_that_write_a_text_as_a_whole_answer_too(method: Any, drafts: bool) -> None:
    model = baseline(method, tokenizer=replace(BYTES, chat_template=TEMPLATE), context=64)
    seen = chat(model, "hi", live=drafts, drafts=drafts, steps=4, seed=1)
    assert seen.exchanges == [("hi", by_hand(model, ["hi"], 1, steps=4))]


def test_with_speculation_it_is_the_same_text_in_fewer_passes() -> None:
    model = small_model(CONTEXT)
    plain, guessed = (chat(model, "hi", **more) for more in ({}, {"speculation": "3", "law": "causal"}))
    assert plain.shown == guessed.shown
    assert " tokens a pass; of " in guessed.noted
    assert " tokens a pass; of " not in plain.noted


def test_a_server_gives_the_same_answer_to_the_same_seed() -> None:
    model = small_model(CONTEXT)
    seen = chat(model, "hello", "and then?", seed=7)
    (first, answer), (second, _) = seen.exchanges
    worker = Worker(model, Limits())
    ask = dict.fromkeys(("law", "lean", "alternatives", "logprobs"))
    turns = zip(("user", "assistant", "user"), (first, answer, second), strict=True)
    messages = [{"role": role, "content": content} for role, content in turns]
    settings, flags = {"seed": 7}, {"echo": False, "events": False, "pieces": False, "tell": "end"}
    worker.take(
        [
            {
                "do": "write",
                "text": 0,
                "prompt": {"messages": messages},
                "settings": settings,
                "max_new_tokens": 24,
                **ask,
                **flags,
            }
        ]
    )
    while len(worker):
        worker.step()
    (done,) = [line for line in worker.told if line["is"] == "done"]
    assert done["more"] == seen.exchanges[1][1]


def test_another_answer_has_the_next_seed_and_forgets_the_last() -> None:
    model = model_of()
    seen = chat(model, "a", "b", "/again", "/again", "c", seed=5)
    (a, first), (b, second), (c, third) = seen.exchanges
    assert (a, b, c) == ("a", "b", "c")
    assert second == by_hand(model, ["a", first, "b"], 7)
    assert third == by_hand(model, ["a", first, "b", second, "c"], 5)


def test_without_a_limit_an_answer_may_fill_the_context() -> None:
    model = model_of(64, end_logit=-1e3)
    seen = chat(model, "hi", max_new_tokens=None)
    given = len(BYTES.encode("<user>hi\n<assistant>"))
    assert len(seen.exchanges[0][1]) == 64 - given
    assert f"the answer is cut off at {64 - given} tokens: the context is full" in seen.noted


def test_a_stop_string_ends_an_answer_before_it() -> None:
    model = model_of(end_logit=-1e3)
    whole = by_hand(model, ["hi"])
    assert whole is not None
    stop = whole[10:12]
    seen = chat(model, "hi", stops=(stop,))
    assert seen.exchanges == [("hi", whole[: whole.index(stop)])]
    assert seen.exchanges == chat(model, "hi", stop=(stop,)).exchanges
    assert "cut off" not in seen.noted


# --- what no longer fits ---


def test_the_oldest_exchanges_are_dropped_whole_and_the_system_stays() -> None:
    model = model_of(end_logit=-1e3)
    seen = chat(model, *"abcdef", system="Be kind.")
    turns = [turn for exchange in seen.exchanges for turn in exchange]
    kept = [by_hand(model, turns[2 * d : 11], system="Be kind.") == turns[11] for d in range(6)]
    assert kept.index(True) > 0
    assert (
        "the oldest exchange no longer fits in the context of 160 tokens, and the model is not given it"
        in seen.noted
    )
    assert seen.noted.count("no longer fit") == kept.index(True)
    assert len(seen.exchanges) == 6  # all of them are kept to be saved


@pytest.mark.parametrize("seed", range(20))
def test_as_much_of_a_conversation_is_given_as_fits(seed: int) -> None:
    chance = random.Random(seed)
    exchanges = [
        ("u" * chance.randint(0, 40), "a" * chance.randint(0, 40)) for _ in range(chance.randint(0, 12))
    ]
    most_new = chance.choice([None, 1, 30, 500])
    talk = Conversation(TEMPLATE, BYTES, CONTEXT, chance.choice([None, "Be."]), exchanges)
    room = min(CONTEXT // 4, most_new or CONTEXT)
    fitting = [
        dropped for dropped in range(len(exchanges) + 1) if len(talk.tokens("hi", dropped)) <= CONTEXT - room
    ]
    window = talk.window("hi", most_new)
    assert window.dropped == fitting[0]
    assert window.tokens == talk.tokens("hi", fitting[0])


def test_a_long_history_is_not_tokenized_from_its_beginning() -> None:
    talk = Conversation(TEMPLATE, BYTES, CONTEXT, None, [("u" * 1000, "a" * 1000)] * 1000)
    seen: list[int] = []
    tokens, talk.tokens = talk.tokens, lambda *words: seen.append(words[1]) or tokens(*words)  # type: ignore[method-assign]
    assert talk.window("hi", None).dropped == 1000
    assert min(seen) >= 994
    assert len(seen) < 8


def test_a_message_that_leaves_no_room_is_refused_and_the_conversation_goes_on() -> None:
    model = model_of()
    said = "a message must leave room for an answer in the context of 160 tokens, got one that makes"
    seen = chat(model, "a", "x" * 200, "b", live=True)
    assert said in seen.noted
    assert [message for message, _ in seen.exchanges] == ["a", "b"]
    assert (
        "a message must have at most 10,240 characters here, got 20,000"
        in chat(model, "x" * 20000, live=True).noted
    )
    with pytest.raises(ValueError, match=said):  # a script does not go on
        chat(model, "a", "x" * 200, "b")


# --- commands ---


def test_help_names_every_command_and_setting() -> None:
    noted = chat(model_of(), "/help").noted
    for name in (
        "new",
        "undo",
        "again",
        "system",
        "set",
        "show",
        "drafts",
        "paste",
        "save",
        "load",
        "quit",
        *SETTINGS,
    ):
        assert name in noted


def test_what_was_said_is_forgotten_and_taken_back() -> None:
    model = model_of()
    assert [m for m, _ in chat(model, "a", "b", "/undo", "c").exchanges] == ["a", "c"]
    seen = chat(model, "a", "/new", "b")
    assert seen.exchanges == [("b", by_hand(model, ["b"]))]


def test_the_system_is_told_and_taken_back() -> None:
    model = model_of()
    seen = chat(model, "/system Be  brief.", "a", "/system", "/new", "a")
    assert "no system message" in seen.noted
    assert seen.exchanges == [("a", by_hand(model, ["a"]))]
    (told,) = chat(model, "/system Be  brief.", "a").exchanges
    assert told[1] == by_hand(model, ["a"], system="Be  brief.") != seen.exchanges[0][1]


def test_a_template_that_takes_no_system_says_so_and_the_old_one_stays() -> None:
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE
    )
    seen = chat(model_of(), "/system Obey.", "a", live=True, template=template)
    assert "no system here" in seen.noted
    assert seen.session.talk.system is None
    assert len(seen.exchanges) == 1


def test_a_setting_is_changed_and_taken_back() -> None:
    model = model_of()
    seen = chat(model, "/set temperature 0", "a", "/set temperature default", "/set seed 9", "/undo", "a")
    assert seen.exchanges == [("a", by_hand(model, ["a"], 9))]
    cold = chat(model, "/set temperature 0", "a", "/set seed 9", "/undo", "a")
    assert cold.exchanges == [("a", by_hand(model, ["a"], 9, temperature=0))]
    assert "max_new_tokens is 5" in chat(model, "/set --max-new-tokens 5").noted
    joint = small_model(CONTEXT)
    seen = chat(joint, "/set law block", "/set unmasking entropy_bound bound=0.5", "hi")
    assert seen.exchanges == [("hi", by_hand(joint.with_law("block"), ["hi"], entropy_bound=0.5))]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temperature 5000", r"--temperature must lie in \[0.001, 1000\]"),
        ("/set temperature nan", "--temperature must lie in"),
        ("/set temperature warm", "temperature must be a number, got 'warm'"),
        ("/set top_k 0.5", "top_k must be a whole number, got '0.5'"),
        ("/set top_p 3", r"--top-p must lie in \(0, 1\], got 3.0"),
        ("/set seed -1", "must be whole numbers from 0"),
        ("/set seed 99999999999999999999", "must be whole numbers from 0"),
        ("/set max_new_tokens 0", "--max-new-tokens must be at least 1, got 0"),
        ("/set speculate maybe", "--speculation must be auto, off or a number of drafts, got 'maybe'"),
        ("/set scheme rejection", "--scheme rejection needs --speculation N"),
        ("/set top_p_rule odd", "top_p_rule must be 'inclusive' or 'exclusive', got 'odd'"),
        ("/set law causal", "law"),  # which this model has not
        ("/set unmasking entropy_bond", "--unmasking must name one of"),
        ("/set temprature 1", "/set must name one of .*, did you mean 'temperature'"),
        ("/set temperature", "/set temperature must be followed by a value, or by default"),
        ("/set", "/set must be followed by NAME VALUE"),
        ("/drafts maybe", "/drafts must be on or off, got 'maybe'"),
        ("/drafts", r"/drafts must be followed by on\|off"),
        (
            "/hlep",
            r"there is no command /hlep, did you mean help\? there are /help, /new, /undo, .*/quit; //",
        ),
        ("/", "there is no command /, there are /help"),
        ("/new please", "/new takes nothing after it, got 'please'"),
        ("/undo", "there is no answer yet"),
        ("/again", "there is no answer yet"),
        ("/save x.jsonl", "there is no answer yet"),
        ("/load nowhere.jsonl", "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    line: str, said: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = model_of()
    seen = chat(model, line, "hi", live=True)
    (told,) = [each for each in seen.noted.splitlines() if re.search(said, each)]
    assert seen.exchanges == [("hi", by_hand(model, ["hi"]))], told
    with pytest.raises((ValueError, OSError), match=said):
        chat(model, line, "hi")


def test_it_shows_settings_and_what_is_used_of_the_context() -> None:
    model = model_of()
    seen = chat(model, "hi", "/show", system="Be.", top_k=3)
    (message, answer) = seen.exchanges[0]
    used = len(BYTES.encode(f"<system>Be.\n<user>{message}\n<assistant>{answer}\n<user>\n<assistant>"))
    assert re.search(r"top_k +3\n", seen.noted)
    assert f"1 exchange; before the next message {used} of 160 tokens of the context are used" in seen.noted


def test_messages_of_several_lines() -> None:
    model = model_of()
    seen = chat(
        model,
        "one\\",
        "two \\\\\\",
        "three\\\\",
        "/paste",
        " a\\",
        "/new",
        "",
        "b",
        "/end",
        "//help",
        "  ",
        "last\\",
    )
    told = ["one\ntwo \\\\\nthree\\\\", " a\\\n/new\n\nb", "/help", "last\n"]
    assert [message for message, _ in seen.exchanges] == [told[0], told[1], told[2], "last"]


def test_quit_ends_it() -> None:
    assert [m for m, _ in chat(model_of(), "a", "/quit", "b").exchanges] == ["a"]


def test_drafts_are_seen_in_a_terminal_alone(monkeypatch) -> None:
    clock, update = itertools.count(), Live.update  # every frame, however fast they come
    monkeypatch.setattr(display, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(Live, "update", lambda live, shown, **_: update(live, shown, refresh=True))
    model = small_model(CONTEXT)
    seen = chat(model, "/set speculation 3", "/drafts on", "hi", live=True)
    assert "\x1b[2;3m" in seen.shown  # pale
    assert seen.exchanges == [("hi", by_hand(model, ["hi"]))]
    assert (
        "\x1b[2;3m"
        not in chat(model, "/set speculation 3", "/drafts on", "/drafts off", "hi", live=True).shown
    )
    with pytest.raises(ValueError, match="drafts are shown in a terminal, and standard output is none"):
        chat(model, "/drafts on")


# --- files ---


def test_a_conversation_is_saved_and_taken_up_again(tmp_path: Path) -> None:
    model, file = small_model(CONTEXT), tmp_path / "talk here.jsonl"
    seen = chat(model, "Hello \u2028 ☂", "b", f"/save {file}", system="Be.")
    line = json.loads(file.read_text("utf-8"))
    assert list(line) == ["messages"]
    assert [each["role"] for each in line["messages"]] == ["system", *["user", "assistant"] * 2]
    assert file.read_text("utf-8").count("\n") == 1
    again = chat(model, "other", f"/load {file}", "c")
    assert again.exchanges[:2] == seen.exchanges
    assert again.session.talk.system == "Be."
    assert again.exchanges == chat(model, "Hello \u2028 ☂", "b", "c", system="Be.").exchanges
    with pytest.raises(ValueError, match="/save must be a new file"):
        chat(model, "a", f"/save {file}")
    with pytest.raises(ValueError, match="/save must be in an existing folder"):
        chat(model, "a", f"/save {tmp_path / 'none' / 'x'}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one conversation on one line, and .* has 0"),
        ('{"messages": []}\n{"messages": []}\n', "has 2"),
        ("hello\n", "must be a file of JSON"),
        ("[" * 100_000, "must be a file of JSON"),
        ("[]", "an object with a list of messages"),
        ('{"messages": {}}', "an object with a list of messages"),
        ('{"messages": [3]}', "message 0 of .* must have a role and a content"),
        ('{"messages": [{"role": "user", "content": null}]}', "must have a role and a content"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "role must be one of system, user, assistant"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "in turns, the last of them the assistant's"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}',
            "in turns, the last of them the assistant's",
        ),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": ""}]}',
            "message 0 of .* must be valid Unicode",
        ),
    ],
)
def test_a_file_that_holds_no_conversation_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        read_conversation(file)
    assert "\n" not in str(caught.value)


def test_a_history_has_its_last_lines(tmp_path: Path) -> None:
    file = tmp_path / "history"
    assert read_history(file) == []
    file.write_text("".join(f"line {number}\n" for number in range(2000)))
    assert read_history(file) == [f"line {number}" for number in range(1000, 2000)]
    with pytest.raises(ValueError, match="--history must be in an existing folder"):
        read_history(tmp_path / "none" / "history")


def test_a_template_by_name_or_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    assert named_template(file) == TEMPLATE
    assert named_template("plain") == PLAIN
    for name, said in ((tmp_path, "is a folder"), ("plane", "there is no file plane")):
        with pytest.raises(ValueError, match=f"--chat-template must be plain or a file, .*{said}"):
            named_template(name)
    file.write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        named_template(file)


def test_the_plain_template_is_words_that_any_tokenizer_has() -> None:
    turns = [
        Message("system", "Be."),
        Message("user", " a\n"),
        Message("assistant", " b "),
        Message("user", "c"),
    ]
    text = "Be.\n\nUser: a\n\nAssistant: b<|endoftext|>\n\nUser: c\n\nAssistant:"
    assert BYTES.decode(conversation(PLAIN, turns, BYTES), skip_special=False) == f"<|endoftext|>{text}"


# --- stopped ---


def interrupted_at(monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    calls, forward = itertools.count(), Transformer.forward

    def interrupted(*arguments: Any, **options: Any) -> torch.Tensor:
        if next(calls) == passes:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    monkeypatch.setattr(Transformer, "forward", interrupted)


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
        assert "stopped before there was an answer; the message is taken back" in seen.noted
    else:
        ((message, part),) = first
        assert message == "a"
        assert whole.startswith(part)
        assert 0 < len(part) < len(whole)
        assert "stopped; the answer is kept as far as it goes" in seen.noted
    turns = [turn for exchange in first for turn in exchange]
    assert (last, answer) == ("b", by_hand(model, [*turns, "b"]))
    assert seen.shown.count("\x1b[?25l") == seen.shown.count("\x1b[?25h")


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
    assert seen.noted.count("Ctrl-C again, Ctrl-D or /quit ends") == 4


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
    assert "the system's message must be valid Unicode" in seen.noted
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
    console = Console(force_terminal=True, file=io.StringIO(), width=width)
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
    console = Console(force_terminal=True, file=io.StringIO(), width=20)
    with Typed(console) as show:
        show.more("a\tb 日本語日本語 cd\t")
        show.more("e")
    assert console.file.getvalue() == "a       b \n日本語日本語 cd e\n"  # type: ignore[attr-defined]


# --- the command ---


def piped(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text), isatty=lambda: False))


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
        (b"hi\n", "--drafts", "--drafts is for a terminal, and standard output is none"),
        (b"hi\n", "--history FILE", "--history is for a terminal, and standard input or output is none"),
        (b"hi\n", "--top-k 0", "--top-k must be at least 1, got 0"),
        (b"hi\n", "--max-new-tokens 0", "--max-new-tokens must be at least 1, got 0"),
        (b"hi\n", "--seed -1", "must be whole numbers from 0"),
        (b"hi\n", "--law causal", "law"),
        (
            b"hi\n",
            "--chat-template plane",
            "--chat-template must be plain or a file, and there is no file plane",
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
        f"bd3lm: {folder} must have a chat template, and its tokenizer has none: name a file with one, "
        "--chat-template FILE, or say --chat-template plain\n"
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
            preexec_fn=lambda: os.close(
                os.open(os.ttyname(0), os.O_RDWR)
            ),  # which makes it the one in charge
            env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "60", "LINES": "30"},
        )
        os.close(other)
        self.printed = ""

    def until(self, said: str, seconds: float = 60.0) -> str:
        """All that was printed up to this, since the last time."""
        end = time.monotonic() + seconds
        while said not in self.printed:
            assert time.monotonic() < end, self.printed
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
    terminal.until("stopped; the answer is kept as far as it goes")
    terminal.until("> ")
    terminal.type(f"/save {tmp_path / 'talk.jsonl'}\r")
    terminal.until("wrote ")
    terminal.until("> ")
    terminal.type("\x03")
    terminal.until("Ctrl-C again, Ctrl-D or /quit ends")
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
