"""A server as clients meet it: its texts are those of `generate`, and all that it refuses is one shape."""

import asyncio
import json
import os
import random
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from bd3lm.data.chat import Message, conversation
from bd3lm.data.templates import named_template, template_stops
from bd3lm.data.tokenizers import END
from bd3lm.lm import Gap, LanguageModel
from bd3lm.serving import Limits
from bd3lm.serving.app import build_app
from bd3lm.serving.engine import RemoteEngine
from bd3lm.serving.worker import Served
from tests.lm import BYTES
from tests.serving import TEMPLATE, Server, serving, small_model
from tests.serving.load import Load, compared, memory

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "small"
    small_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return LanguageModel.from_pretrained(folder, device="cpu")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    words = ("--seats", "8", "--queue", "40", "--most-tokens", "512", "--most-body", "100000")
    with serving(folder, *words) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


# --- texts ---


def test_a_completion_is_the_text_of_its_seed(client: openai.OpenAI, lm: LanguageModel) -> None:
    found = client.completions.create(model="small", prompt="ab", max_tokens=20, seed=3, temperature=0.7)
    (text,) = lm.generate("ab", seed=3, max_new_tokens=20, temperature=0.7)
    assert found.choices[0].text == text.completion
    reason = {"length": "length", "eos": "stop"}[text.stopped_by]
    assert found.choices[0].finish_reason == reason
    assert found.usage is not None
    counted = found.usage.model_dump()
    assert (counted["prompt_tokens"], counted["completion_tokens"]) == (
        text.sample.given,
        text.sample.written,
    )
    assert (counted["passes"], counted["tokens_per_pass"]) == (text.sample.evaluations, 1.0)
    again = lm.generate(
        "ab", seeds=[found.choices[0].model_extra["seed"]], max_new_tokens=20, temperature=0.7
    )
    assert again[0].completion == text.completion


def test_several_prompts_and_several_texts_of_each(client: openai.OpenAI, lm: LanguageModel) -> None:
    prompts = ["one", [97, 98, 99], "three ☂"]
    for each in (prompts[0], prompts[1], [prompts[0], prompts[2]]):
        found = client.completions.create(model="small", prompt=each, n=3, max_tokens=9, seed=1, top_p=0.8)
        several = each if isinstance(each[0], str) and not isinstance(each, str) else [each]
        expected = lm.generate(several, count=3, seed=1, top_p=0.8, max_new_tokens=9)
        assert [choice.text for choice in found.choices] == [text.completion for text in expected]
        assert [choice.index for choice in found.choices] == list(range(3 * len(several)))


@pytest.mark.parametrize(
    "how", [{}, {"law": "block"}, {"speculation": 3}, {"law": "block", "speculation": "off"}], ids=str
)
def test_pieces_together_are_the_text(client: openai.OpenAI, lm: LanguageModel, how: dict[str, Any]) -> None:
    stream = client.completions.create(
        model="small",
        prompt="ab",
        n=2,
        max_tokens=40,
        seed=5,
        stream=True,
        echo=True,
        extra_body=how,
        stream_options={"include_usage": True},
    )
    texts, last, usage = ["", ""], {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            last[choice.index] = choice.finish_reason
    model = lm.with_law(how["law"]) if "law" in how else lm
    expected = model.generate("ab", count=2, seed=5, max_new_tokens=40)
    assert texts == [text.text for text in expected]
    assert all(last.values())
    assert usage is not None
    assert usage.completion_tokens == sum(text.sample.written for text in expected)
    if "speculation" in how and how["speculation"] != "off":
        assert usage.model_extra["drafted"] > 0


def test_a_text_ends_before_its_stop_string_also_when_it_is_streamed(
    client: openai.OpenAI, lm: LanguageModel
) -> None:
    (whole,) = lm.generate("ab", seed=7, max_new_tokens=40)
    assert whole.completion is not None
    stop = next(
        piece for piece in (whole.completion[k : k + 2] for k in range(8, 30)) if "\ufffd" not in piece
    )
    (expected,) = lm.generate("ab", seed=7, max_new_tokens=40, stop=stop)
    asked = {"model": "small", "prompt": "ab", "max_tokens": 40, "seed": 7, "stop": [stop]}
    found = client.completions.create(**asked)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (expected.completion, "stop")
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert streamed == expected.completion


def test_a_conversation_is_answered_by_the_template(client: openai.OpenAI, lm: LanguageModel) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi <assistant>"}]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why?"},
    ]
    found = client.chat.completions.create(model="small", messages=messages, max_completion_tokens=12, seed=2)
    assert lm.tokenizer is not None
    turns = [("system", "be brief"), ("user", "hi <assistant>"), ("assistant", "yes"), ("user", "why?")]
    ids = conversation(TEMPLATE, [Message(*turn) for turn in turns], lm.tokenizer)
    (expected,) = lm.generate([ids], seed=2, max_new_tokens=12)
    assert found.choices[0].message.content == expected.completion
    assert found.choices[0].message.role == "assistant"
    pieces = list(
        client.chat.completions.create(model="small", messages=messages, max_tokens=12, seed=2, stream=True)
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.completion


def test_a_server_brings_a_template_of_its_own(tmp_path: Path) -> None:
    """As `bd3lm chat` does: with the strings that end an answer, and in place of the model's own template."""
    model = small_model()
    model.save_pretrained(tmp_path)
    assert model.tokenizer is not None
    template = named_template("plain")
    ids = conversation(template, [Message("user", "why?")], model.tokenizer)
    (expected,) = model.generate([ids], seed=2, max_new_tokens=12, stop=template_stops(template))
    with serving(tmp_path, "--chat-template", "plain") as server:
        body = server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "why?"}], max_tokens=12, seed=2
        ).json()
    assert body["choices"][0]["message"]["content"] == expected.completion


def test_gaps_are_filled(server: Server, lm: LanguageModel) -> None:
    body = server.post(prompt="ab", suffix="cd", max_tokens=5, seed=4).json()
    (expected,) = lm.generate([["ab", Gap(5), "cd"]], seed=4)
    assert expected.text is not None
    assert f"ab{body['choices'][0]['text']}cd" == expected.text
    body = server.post(template="The {3} sat {{on}} the {2}.", seed=4).json()
    (expected,) = lm.generate([["The ", Gap(3), " sat {on} the ", Gap(2), "."]], seed=4)
    assert body["choices"][0]["text"] == expected.text


def test_a_text_follows_a_schema_or_an_expression(client: openai.OpenAI, lm: LanguageModel) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 9}, "kind": {"enum": ["a", "b"]}},
        "required": ["size", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    found = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "a thing"}],
        max_tokens=60,
        seed=1,
        response_format=form,
    )
    thing = json.loads(found.choices[0].message.content or "")
    assert set(thing) == {"size", "kind"}
    asked: dict[str, Any] = {"model": "small", "prompt": "ab", "max_tokens": 40, "seed": 1, "n": 2}
    texts = client.completions.create(
        **asked, extra_body={"response_format": {"type": "regex", "regex": "[0-9]{4}"}}
    )
    expected = lm.generate("ab", count=2, seed=1, max_new_tokens=40, regex="[0-9]{4}")
    assert [choice.text for choice in texts.choices] == [text.completion for text in expected]
    with pytest.raises(openai.BadRequestError, match="regex is for models that write token by token"):
        client.completions.create(
            **asked, extra_body={"law": "block", "response_format": {"type": "regex", "regex": "a"}}
        )
    with pytest.raises(openai.BadRequestError, match="regex cannot be used"):
        client.completions.create(**asked, extra_body={"response_format": {"type": "regex", "regex": "(a"}})


def test_all_that_happens_to_a_text_is_told_to_who_asks_for_events(server: Server, lm: LanguageModel) -> None:
    for how in (
        {"law": "block"},
        {"speculation": 3},
        {"template": "a{3}b{2}c", "prompt": "", "law": "block"},
    ):
        body = {"prompt": "ab", "max_tokens": 30, "seed": 6, "events": True, "stream": True} | how
        with server.http as http:
            answer = http.post("/v1/completions", json=body)
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        steps = [step for chunk in chunks for choice in chunk["choices"] for step in choice["events"]]
        (_, given), *steps = steps
        pieces = list(given)
        for kind, *rest in steps:
            if kind == "block":
                pieces += [None] * (rest[1] - len(pieces))
            elif kind == "show":
                pieces[rest[0]] = rest[1]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        shown = "".join(piece for piece in pieces if piece is not None)
        assert shown.startswith(text if "template" in how else f"ab{text}") or "\ufffd" in shown
        assert any(kind == "draft" for kind, *_ in steps) == ("speculation" in how)
    assert server.post(prompt="ab", events=True).json()["error"]["param"] == "events"
    assert server.post(prompt="ab", fills=3).json()["error"]["param"] == "fills"


# --- probabilities of tokens ---

LOGPROBS = [
    {},
    {"law": "block"},
    {"speculation": 3, "temperature": 0.5},
    {"law": "block", "speculation": 2},
    {"stop": ["e", "a"], "temperature": 1.5},
]


@pytest.mark.parametrize("how", LOGPROBS, ids=str)
def test_tokens_are_told_with_what_the_model_gave_them(
    client: openai.OpenAI, lm: LanguageModel, how: dict[str, Any]
) -> None:
    ours = {name: how[name] for name in ("law", "speculation") if name in how}
    theirs = {name: value for name, value in how.items() if name not in ours}
    asked = {
        "model": "small",
        "prompt": ["ab", "naïve ☂"],
        "max_tokens": 30,
        "seed": 5,
        "logprobs": 3,
    } | theirs
    found = client.completions.create(**asked, extra_body=ours)
    assert lm.tokenizer is not None
    model = lm.with_law(how.get("law", "causal"))
    expected = model.generate(asked["prompt"], seed=5, max_new_tokens=30, alternatives=3, **theirs)
    for choice, text in zip(found.choices, expected, strict=True):
        assert choice.text == text.completion
        told, given = choice.logprobs, text.sample.given
        assert told is not None
        assert near(told.token_logprobs, (text.sample.log_p or ())[given:])
        assert told.tokens == [named(lm, token) for token in text.tokens[given:]]
        assert told.top_logprobs is not None
        assert told.text_offset is not None
        for top, token, log_p, others in zip(
            told.top_logprobs,
            told.tokens,
            told.token_logprobs,
            text.sample.alternatives[given:],
            strict=True,
        ):
            likely = {named(lm, other): p for other, p in reversed(others)}
            assert near(top, likely | {token: log_p})
        for token, begin in zip(told.tokens, told.text_offset, strict=True):
            assert begin <= len(choice.text) + 8
            if "\ufffd" not in token and token != END and begin < len(choice.text):
                assert choice.text.startswith(token, begin)
        if model.law == "causal":
            (known,) = lm.log_likelihood([text.tokens], given=[given])
            assert sum(told.token_logprobs) == pytest.approx(known.log_p, abs=1e-3)
    plain = client.completions.create(**asked | {"logprobs": None}, extra_body=ours)
    assert [choice.text for choice in plain.choices] == [choice.text for choice in found.choices]
    assert all(choice.logprobs is None for choice in plain.choices)
    assert plain.usage == found.usage
    told_so_far: list[dict[str, list[Any]]] = [{}, {}]
    texts, pieces = ["", ""], 0
    for chunk in client.completions.create(**asked, extra_body=ours, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            pieces += choice.logprobs is not None
            for name, several in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                told_so_far[choice.index].setdefault(name, []).extend(several)
    assert texts == [choice.text for choice in found.choices]
    assert near(told_so_far, [choice.logprobs and choice.logprobs.model_dump() for choice in found.choices])
    assert pieces > 2 or "stop" in how


def near(one: Any, other: Any) -> bool:
    """Whether both are the same, up to rounding, which depends on how many texts share a pass."""
    if isinstance(one, float):
        return bool(one == pytest.approx(other, abs=1e-9))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(near(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == other)


def named(lm: LanguageModel, token: int) -> str:
    assert lm.tokenizer is not None
    return lm.tokenizer.decode([token]) or lm.tokenizer.decode([token], skip_special=False)


def test_tokens_are_made_likelier_and_kept_out(client: openai.OpenAI, lm: LanguageModel) -> None:
    """By ids; what is told of tokens is the model's own."""
    plain = client.completions.create(model="small", prompt="ab", max_tokens=40, seed=1)
    often = max(set(plain.choices[0].text.encode()), key=plain.choices[0].text.encode().count)
    bias = {str(often): -100.0, "120": 3.0}
    asked: dict[str, Any] = {"prompt": "ab", "max_tokens": 40, "seed": 1, "logit_bias": bias, "n": 4}
    found = client.completions.create(model="small", **asked, logprobs=0)
    expected = lm.generate(
        "ab", count=4, seed=1, max_new_tokens=40, logit_bias={often: -100, 120: 3}, alternatives=0
    )
    assert [choice.text for choice in found.choices] == [text.completion for text in expected]
    for choice, text in zip(found.choices, expected, strict=True):
        assert often not in text.tokens[2:]
        (known,) = lm.log_likelihood([text.tokens], given=[text.sample.given])
        assert choice.logprobs is not None
        assert sum(choice.logprobs.token_logprobs or ()) == pytest.approx(known.log_p, abs=1e-3)
    streamed = client.completions.create(model="small", **asked, stream=True)
    texts = [""] * 4
    for chunk in streamed:
        for piece in chunk.choices:
            texts[piece.index] += piece.text
    assert texts == [text.completion for text in expected]


def test_tokens_of_an_answer_are_told_with_their_bytes(client: openai.OpenAI, lm: LanguageModel) -> None:
    messages: Any = [{"role": "user", "content": "why?"}]
    asked: dict[str, Any] = {
        "model": "small",
        "messages": messages,
        "max_tokens": 20,
        "seed": 2,
        "logprobs": True,
    }
    found = client.chat.completions.create(**asked, top_logprobs=2).choices[0]
    assert lm.tokenizer is not None
    ids = conversation(TEMPLATE, [Message("user", "why?")], lm.tokenizer)
    (expected,) = lm.generate([ids], seed=2, max_new_tokens=20, alternatives=2)
    assert found.message.content == expected.completion
    assert found.logprobs is not None
    content = found.logprobs.content
    assert content is not None
    given = expected.sample.given
    assert near([each.logprob for each in content], (expected.sample.log_p or ())[given:])
    assert (
        b"".join(bytes(each.bytes or ()) for each in content).decode(errors="replace") == expected.completion
    )
    others = [[(other.token, other.logprob) for other in each.top_logprobs] for each in content]
    likely = expected.sample.alternatives[given:]
    assert near(others, [[(named(lm, token), log_p) for token, log_p in each] for each in likely])
    pieces = list(client.chat.completions.create(**asked, top_logprobs=2, stream=True))
    several = [piece.choices[0].logprobs for piece in pieces]
    streamed = [each for some in several if some for each in some.content or ()]
    assert near([each.model_dump() for each in streamed], [each.model_dump() for each in content])
    (alone,) = client.chat.completions.create(**asked).choices
    assert alone.logprobs is not None
    assert all(each.top_logprobs == [] for each in alone.logprobs.content or ())
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        client.chat.completions.create(**asked | {"logprobs": False}, top_logprobs=2)


def test_tokens_of_gaps_say_where_they_are(server: Server, lm: LanguageModel) -> None:
    for how in ({"law": "block"}, {"law": "causal", "fills": 3}):
        for shape in (
            {"template": "The {3} sat ☂ on the {2}."},
            {"prompt": "The ", "suffix": " sat", "max_tokens": 4},
        ):
            body = server.post(seed=4, logprobs=0, **how, **shape).json()
            (choice,) = body["choices"]
            told = choice["logprobs"]
            assert len(told["tokens"]) == len(told["text_offset"]) == body["usage"]["completion_tokens"]
            assert [list(top.values()) for top in told["top_logprobs"]] == [
                [p] for p in told["token_logprobs"]
            ]
            assert told["text_offset"] == sorted(told["text_offset"])
            assert told["text_offset"][0] == (4 if "template" in shape else 0)
            streamed = server.post(seed=4, logprobs=0, stream=True, **how, **shape).text.split("\n\n")
            last = json.loads(streamed[-3][6:])["choices"][0]
            assert near([last["text"], last["logprobs"]], [choice["text"], told])


def test_events_tell_how_sure_the_model_was(server: Server, lm: LanguageModel) -> None:
    body = {"prompt": "ab", "max_tokens": 12, "seed": 6, "events": True, "stream": True, "law": "block"}
    (expected,) = lm.with_law("block").generate("ab", seed=6, max_new_tokens=12, alternatives=4)
    assert expected.sample.log_p is not None
    for asked in (
        {"alternatives": 4},
        {"alternatives": 0},
        {"alternatives": 2, "logprobs": 4},
        {"logprobs": 1},
    ):
        answer = server.post(**body, **asked)
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        shown = [step[1:] for choice in choices for step in choice["events"] if step[0] == "show"]
        assert len(shown) == expected.sample.written
        for position, piece, *told in shown:
            assert piece == named(lm, expected.tokens[position])
            if "alternatives" not in asked:
                assert told == []
                continue
            log_p, others = told
            assert near(log_p, expected.sample.log_p[position])
            likely = expected.sample.alternatives[position][: asked["alternatives"]]
            assert near(others, [[named(lm, token), p] for token, p in likely])
        assert "".join(choice["text"] for choice in choices) == expected.completion
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert len(logprobs) == ("logprobs" in asked)
        if logprobs:
            assert near(logprobs[0]["token_logprobs"], expected.sample.log_p[expected.sample.given :])


def test_under_load_every_text_is_as_if_it_were_alone(server: Server, lm: LanguageModel) -> None:
    """Forty clients at once with settings of their own; a third of them leave in the middle."""

    async def ask(http: httpx.AsyncClient, number: int) -> tuple[dict[str, Any], str | None]:
        chance = random.Random(number)
        body: dict[str, Any] = {
            "prompt": "".join(chance.choice("abc ☂") for _ in range(chance.randint(1, 30))),
            "max_tokens": chance.randint(1, 60),
            "seed": number,
            "temperature": chance.choice([0.0, 0.7, 1.0]),
            "law": chance.choice(["causal", "block"]),
            "stream": chance.random() < 0.6,
        }
        if body["law"] == "causal" and chance.random() < 0.4:
            body["speculation"] = chance.choice([2, "auto"])
        await asyncio.sleep(chance.random())
        if number % 3 == 0:
            async with http.stream(
                "POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 60}
            ) as answer:
                async for _ in answer.aiter_lines():
                    if chance.random() < 0.3:
                        return body, None
            return body, None
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not body["stream"]:
            return body, answer.json()["choices"][0]["text"]
        lines = [line[6:] for line in answer.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return body, "".join(json.loads(line)["choices"][0]["text"] for line in lines)

    async def all_of_them() -> list[tuple[dict[str, Any], str | None]]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(ask(http, number) for number in range(40)))

    for body, text in asyncio.run(all_of_them()):
        if text is not None:
            (expected,) = lm.with_law(body["law"]).generate(
                body["prompt"],
                seed=body["seed"],
                max_new_tokens=body["max_tokens"],
                temperature=body["temperature"],
            )
            assert text == expected.completion
    server.until(10, lambda: server.texts() == 0)


# --- refusals ---

COMPLETIONS = [
    ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1, got 0"),
    ({"max_tokens": 2000}, 400, None, "max_tokens must be at most 509 here"),
    ({"temperature": -1}, 400, "temperature", "got -1"),
    ({"temperature": "hot"}, 400, "temperature", "got 'hot'"),
    ({"top_p": 0}, 400, "top_p", "got 0"),
    ({"n": 100}, 400, "n", "prompts times n must be at most 32 here, got 100"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", "less than or equal to 100, got 101"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias", "got 'a'"),
    ({"logit_bias": {"1000": 1}}, 400, None, "logit_bias must hold token ids below"),
    ({"logit_bias": {"5": 1}, "law": "block"}, 400, None, "a joint model takes it under its causal law"),
    ({"logit_bias": {"5": 1}, "speculation": 2}, 400, None, "speculation must be off with logit_bias"),
    ({"logprobs": 21}, 400, "logprobs", "less than or equal to 20, got 21"),
    ({"logprobs": True}, 400, "logprobs", "got True"),
    ({"logprobs": 2, "echo": True}, 400, "logprobs", "echo and logprobs cannot be combined"),
    ({"top_logprobs": 2}, 400, "top_logprobs", "it is for chats; in completions logprobs is the number"),
    ({"alternatives": 2}, 400, "alternatives", "alternatives needs events"),
    ({"alternatives": 21, "events": True, "stream": True}, 400, "alternatives", "got 21"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty", "there are no penalties"),
    ({"max_lenght": 3}, 400, "max_lenght", "max_lenght is not a field of this server"),
    ({"model": "gpt-4"}, 404, "model", "model must be 'small', which is served here, got 'gpt-4'"),
    ({"prompt": []}, 400, "prompt", ""),
    ({"prompt": [10**9]}, 400, None, "token"),
    ({"prompt": "\ud800"}, 400, "prompt", "surrogate"),
    ({"stop": [""]}, 400, "stop", ""),
    ({"law": "block", "lean": 2, "unmasking": {"kind": "nothing"}}, 400, None, "unmasking"),
    ({"law": "causal", "lean": 2}, 400, None, "lean is for the block law"),
    ({"speculation": 300}, 400, "speculation", ""),
    ({"template": "no gap", "prompt": ""}, 400, "template", "template must contain a gap"),
    ({"suffix": "x", "prompt": [97]}, 400, "suffix", "suffix needs a text as prompt"),
    ({"prompt": "x" * 90_000}, 400, "prompt", "prompt must have at most 32,768 characters here, got 90,000"),
    ({"prompt": "x" * 200_000}, 413, None, "a request must have at most 100,000 bytes here"),
]


@pytest.mark.parametrize(("body", "status", "param", "said"), COMPLETIONS, ids=lambda each: str(each)[:40])
def test_what_cannot_be_is_refused_in_one_shape(
    server: Server, body: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    with server.http as http:
        content = json.dumps({"prompt": "ab", "max_tokens": 4} | body)
        answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]
    assert param is None or error["param"].startswith(param)


def test_the_client_of_openai_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at most"):
        client.completions.create(model="small", prompt="ab", max_tokens=4000)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    assert [model.id for model in client.models.list()] == ["small"]
    with pytest.raises(openai.BadRequestError, match="only one of max_tokens"):
        client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "a"}], max_tokens=1, max_completion_tokens=1
        )
    with pytest.raises(openai.BadRequestError, match="tool"):
        client.chat.completions.create(model="small", messages=[{"role": "tool", "content": "a"}])


BODIES = [
    b"",
    b"{",
    b"[" * 90_000,
    b'{"a":' * 15_000,
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b'"prompt"',
    b'{"prompt": "ab", "seed": 1e400}',
    b'{"prompt": "ab", "temperature": NaN}',
    b'{"prompt": "ab", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "ab", "seed": -1}',
    b'{"prompt": "\\ud83d"}',
    b'{"prompt": "\\u0000", "max_tokens": 1}',
    b'{"prompt": [[[]]]}',
    b'{"prompt": "ab", "stop": ["a", "\\ud800"]}',
    b'{"prompt": "ab", "max_tokens": 1e30}',
    b'{"prompt": "ab", "\\ud800": 1}',
    b'{"prompt": ["ab", 1]}',
    '{"\u00b8": {}, "n": 2140}'.encode(),
    b'{"' + b"a" * 50_000 + b'": 1}',
    b'{"": 1}',
    b'{"prompt": "ab", "logit_bias": {"\\ud800": 1, "": 2}}',
    b'{"prompt": "ab", "law": "causal", "logit_bias": {"4294967295": 1}}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}',
    b'{"prompt": "ab", "response_format": {"type": "json_schema", "json_schema": {"schema": '
    + b'{"items": ' * 5000
    + b"{}"
    + b"}" * 5003,
    b'{"prompt": "a", "prompt": 1}',
    b'{"prompt": "ab", "stop": ' + json.dumps(["x"] * 500).encode() + b"}",
]


def test_no_body_is_answered_by_an_error_of_the_server(server: Server) -> None:
    with server.http as http:
        for route in ("/v1/completions", "/v1/chat/completions"):
            for body in BODIES:
                answer = http.post(route, content=body, headers={"content-type": "application/json"})
                assert answer.status_code in (200, 400, 413), (body[:60], answer.text)
                assert answer.status_code == 200 or "error" in answer.json()
                # What is said is about the request, and not about the program.
                assert not re.search(
                    r"0x[0-9a-f]{6}|\w\[|\(\)", answer.json().get("error", {}).get("message", "")
                )
        assert http.get("/nothing").json()["error"]["type"] == "invalid_request_error"
        assert http.get("/v1/completions").status_code == 405


def test_too_many_texts_are_refused_until_there_is_room(server: Server) -> None:
    async def crowd() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            body = {"prompt": "ab", "max_tokens": 500, "n": 24, "seed": 1}
            answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(4)))
            return [answer.status_code for answer in answers]

    assert sorted(set(asyncio.run(crowd()))) == [200, 429]
    assert server.post(prompt="ab", max_tokens=2).status_code == 200


def test_counts_are_told_to_prometheus(server: Server) -> None:
    with server.http as http:
        before = _counts(http)
        server.post(prompt="ab", max_tokens=8, speculation=2, seed=1)
        server.post(prompt="ab", max_tokens=0)
        after = _counts(http)
    assert after['bd3lm_tokens_total{kind="written"}'] - before['bd3lm_tokens_total{kind="written"}'] == 8
    assert after['bd3lm_answers_total{status="400"}'] - before['bd3lm_answers_total{status="400"}'] == 1
    assert after["bd3lm_engine_ready"] == 1
    assert after["bd3lm_texts_under_way"] == 0


def _counts(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


# --- who leaves, and what dies ---


def test_a_client_that_leaves_frees_its_seats(server: Server) -> None:
    for stream in (True, False):
        body = json.dumps({"prompt": "ab", "max_tokens": 500, "n": 32, "seed": 1, "stream": stream}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as wire:
            head = (
                "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            wire.sendall(head.encode() + body)
            server.until(20, lambda: server.texts() > 24)
        left = time.monotonic()
        server.until(20, lambda: server.texts() == 0)
        assert time.monotonic() - left < 3  # they would have taken longer


def test_half_a_request_harms_nobody(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    wires = [socket.create_connection((host, int(port))) for _ in range(20)]
    for wire in wires:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n{")
    assert server.post(prompt="ab", max_tokens=2).status_code == 200
    for wire in wires:
        wire.close()


@pytest.mark.slow
def test_an_engine_that_dies_is_told_of_and_started_again(folder: Path) -> None:
    with serving(folder) as server, server.http as http:
        body = {"prompt": "ab", "max_tokens": 2000, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(server.engine, signal.SIGKILL)
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert rest[-1]["error"]["type"] == "server_error"
        assert "died with exit code -9" in rest[-1]["error"]["message"]
        health = http.get("/health")
        assert health.status_code == 503 or health.json()["status"] == "ok"
        refused = server.post(prompt="ab", max_tokens=2)
        assert refused.status_code in (200, 503)
        server.until(60, lambda: http.get("/health").status_code == 200)
        assert server.post(prompt="ab", max_tokens=2).status_code == 200
        assert _counts(http)["bd3lm_engine_starts"] == 2


@pytest.mark.slow
def test_a_server_that_is_stopped_answers_what_runs(folder: Path) -> None:
    with serving(folder, BD3LM_API_KEY="secret") as server, server.http as http:
        assert server.post(prompt="ab").status_code == 401
        key = {"authorization": "Bearer secret"}
        body = {"prompt": "ab", "max_tokens": 300, "stream": True}
        with http.stream("POST", "/v1/completions", json=body, headers=key) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        said, noted = server.process.communicate(timeout=60)
    assert server.process.returncode == 0
    assert "stopping: finishing running requests first" in said + noted
    assert "Traceback" not in noted


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_who_is_not_done_when_a_server_stops_is_told(folder: Path, signals: int) -> None:
    """After the grace period, or after the second signal. Nobody waits for half a request."""
    grace = {1: "1.5", 2: "60"}[signals]
    with serving(folder, "--grace", grace) as server:
        body = {
            "prompt": "ab",
            "max_tokens": 4000,
            "n": 8,
            "law": "causal",
            "logit_bias": {str(BYTES.eos_id): -100},
        }

        async def asked() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                streams = [
                    asyncio.create_task(http.post("/v1/completions", json=body | {"stream": is_stream}))
                    for is_stream in (True, False)
                ]
                while await asyncio.to_thread(server.texts) < 16:
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.5)
                for _ in range(signals):
                    server.process.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.3)
                return await asyncio.gather(*streams)

        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n{")
            began = time.monotonic()
            streamed, whole = asyncio.run(asked())
        assert time.monotonic() - began < 20
        last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert (streamed.status_code, whole.status_code) == (200, 503)
        for told in (last, whole.json()):
            assert told["error"]["message"].startswith("the server is stopping")
            assert told["error"]["type"] == "server_error"
        said, noted = server.process.communicate(timeout=60)
    assert server.process.returncode == 0
    assert "Traceback" not in said + noted


def test_pages_of_other_origins_may_ask_only_where_they_are_named() -> None:
    engine = RemoteEngine(Served("none", "none"), Limits(), notes=print)
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    for origins in ([], ["https://example.org"]):
        client = TestClient(build_app(engine, origins=origins))
        for origin in ("https://example.org", "https://example.com", "null"):
            found = client.options("/v1/completions", headers=asks | {"origin": origin}).headers
            allowed = found.get("access-control-allow-origin")
            assert allowed == (origin if origin in origins else None)
            assert client.get("/health", headers={"origin": origin}).headers.get(
                "access-control-allow-origin"
            ) == (origin if origin in origins else None)
            assert "access-control-allow-credentials" not in found


@pytest.mark.slow
def test_a_server_that_is_killed_takes_its_engine_along(folder: Path) -> None:
    with serving(folder) as server:
        engine = server.engine
        server.stop(signal.SIGKILL)
        end = time.monotonic() + 20
        while Path(f"/proc/{engine}").exists():
            assert time.monotonic() < end
            time.sleep(0.05)


def test_the_lines_of_the_page_are_answered(server: Server) -> None:
    """The requests that its curl commands make, of the model that is served here."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    commands = re.findall(r"^curl .*?(?<!\\)$", page.replace("\\\n", " "), re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        words = shlex.split(command)
        url = next(word for word in words if word.startswith("http://127.0.0.1:8000"))
        path = url.removeprefix("http://127.0.0.1:8000")
        with server.http as http:
            if "-d" not in words:
                answer = http.get(path)
            else:
                kind, _, value = words[words.index("-H") + 1].partition(": ")
                answer = http.post(path, content=words[words.index("-d") + 1], headers={kind: value})
        assert answer.status_code == 200, (command, answer.text)


@pytest.mark.slow
def test_a_crowd_of_clients_gets_its_texts_and_leaves_nothing_behind() -> None:
    """Of the model in the box, half a minute long; a third of them leave in the middle."""
    with serving("box") as server:
        server.post(prompt="a", max_tokens=8)
        warm = Load(server.url, clients=16, seconds=5)
        asyncio.run(warm.run())
        before = memory(server)
        load = Load(server.url, clients=32, seconds=25)
        asyncio.run(load.run())
        server.until(10, lambda: server.texts() == 0)
        assert load.refused == 0
        assert load.left > 5
        assert len(load.done) > 20
        lm = LanguageModel.from_pretrained("box", device="cpu")
        assert compared(lm, load.done, 20) == 20
        assert memory(server) < before + 100  # MiB


def test_one_request_does_not_stop_the_others(server: Server) -> None:
    """What would take all memory, or all time, is refused before it does."""
    hopeless: list[tuple[dict[str, Any], str]] = [
        ({"template": "a{99999999999999999999}b"}, "a text may have 512 tokens here"),
        ({"prompt": "ab", "suffix": "c", "max_tokens": 2**31 - 1}, "a text may have 512 tokens here"),
        ({"prompt": [97] * 20_000}, "a text may have 512 tokens here"),
        ({"template": "x" * 50_000 + "{3}"}, "template must have at most 32,768 characters here"),
        ({"template": "{1}a" * 20_000}, "template must have at most 32,768 characters here"),
        ({"prompt": ["a", "x" * 50_000]}, "prompt must have at most 32,768 characters here"),
        ({"prompt": "x" * 20_000, "suffix": "x" * 20_000}, "characters here, got 40,000"),
        (
            {"prompt": "a", "suffix": "b", "fills": 64, "n": 32},
            "prompts times n times fills must be at most 512",
        ),
        ({"prompt": [""] * 5_000}, "must hold at most 1,024 entries, and has 5,000"),
        (
            grammar({"type": "integer", "multipleOf": 9_999_991}),
            "multipleOf must be at most 10,000",
        ),
        (grammar({"$ref": "#"}), "json_schema cannot be used"),
        (
            grammar({"allOf": [{"anyOf": [{"const": i}, {"pattern": f"a{{{i}}}.*"}]} for i in range(23)]}),
            "json_schema cannot be used",
        ),
    ]
    for body, said in hopeless:
        began = time.monotonic()
        answer = server.post(**body)
        assert answer.status_code == 400, (body, answer.text[:200])
        assert said in answer.json()["error"]["message"]
        assert time.monotonic() - began < 10
    with server.http as http:
        assert _counts(http)["bd3lm_engine_starts"] == 1


def grammar(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    return {"prompt": "a", "max_tokens": 8, "response_format": form}


def test_fields_that_ask_for_nothing_are_as_if_they_were_not_there(client: openai.OpenAI) -> None:
    """Many clients send them with every request."""
    plain = client.completions.create(model="small", prompt="ab", max_tokens=8, seed=1)
    nothing: dict[str, Any] = {
        "n": None,
        "stream": None,
        "logit_bias": {},
        "best_of": 1,
        "presence_penalty": 0,
    }
    found = client.completions.create(
        model="small", prompt="ab", max_tokens=8, seed=1, frequency_penalty=0, extra_body=nothing
    )
    assert found.choices[0].text == plain.choices[0].text
    with pytest.raises(openai.BadRequestError, match="presence_penalty is not a field of this server"):
        client.completions.create(model="small", prompt="ab", presence_penalty=0.5)
    for messages in (
        [{"role": "developer", "content": "brief"}, {"role": "user", "content": "a"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": "b"},
        ],
    ):
        asked: Any = {"model": "small", "messages": messages, "max_tokens": 4, "extra_body": {"tools": []}}
        assert client.chat.completions.create(**asked).choices[0].finish_reason in ("length", "stop")


@pytest.mark.slow
def test_who_reads_nothing_is_let_go_of(folder: Path) -> None:
    """A client that takes no part of an answer holds no text for longer than a request may take."""
    with serving(folder, "--most-seconds", "2", "--most-tokens", "4000") as server:
        body = {
            "prompt": "ab",
            "max_tokens": 3900,
            "n": 4,
            "stream": True,
            "events": True,
            "alternatives": 20,
        }
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            content = json.dumps(body).encode()
            wire.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(content) + content
            )
            server.until(10, lambda: server.texts() > 0)
            server.until(20, lambda: server.texts() == 0)
