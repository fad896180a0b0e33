"""`bd3lm chat`: answers are those of the library and of the server, and commands do what they say."""

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.live import Live

from bd3lm.commands.chat.conversation import Conversation, read_conversation
from bd3lm.commands.chat.lines import read_history
from bd3lm.commands.chat.session import SETTINGS
from bd3lm.commands.sample import display
from bd3lm.data.chat import Message, conversation
from bd3lm.data.templates import PLAIN, named_template
from bd3lm.io.terminal import printable
from bd3lm.lm import LanguageModel
from bd3lm.serving import Limits
from bd3lm.serving.worker import Worker
from tests.commands.chats import CONTEXT, by_hand, chat, model_of
from tests.lm import BYTES, D3PM, SEDD, SSD, baseline
from tests.serving import TEMPLATE, small_model

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
    assert " tokens per pass; of " in guessed.noted
    assert " tokens per pass; of " not in plain.noted


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
        "the oldest exchange no longer fits in the context of 160 tokens, and the model does not see it"
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
    said = "a message must leave room for an answer in the context of 160 tokens, got a message that makes"
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
    assert f"1 exchange; the conversation uses {used} of 160 tokens of the context" in seen.noted


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
    with pytest.raises(ValueError, match="drafts need a terminal, and standard output is not one"):
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
        ("hello\n", "must be a JSON file"),
        ("[" * 100_000, "must be a JSON file"),
        ("[]", "an object with a list of messages"),
        ('{"messages": {}}', "an object with a list of messages"),
        ('{"messages": [3]}', "message 0 of .* must have a role and a content"),
        ('{"messages": [{"role": "user", "content": null}]}', "must have a role and a content"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "role must be one of system, user, assistant"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "that alternates between user and assistant"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}',
            "that alternates between user and assistant",
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
