"""Responses in the shapes of OpenAI's API."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bd3lm.serving.link import Line

_FINISHED = {"eos": "stop", "string": "stop", "entropy": "stop", "length": "length"}
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Head:
    """What all responses to a request begin with."""

    kind: str
    """One of "completion" and "chat"."""
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat"

    def body(self, choices: list[dict[str, Any]], *, is_chunk: bool = False) -> dict[str, Any]:
        name = "text_completion"
        if self.is_chat:
            name = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def choice(
        self, index: int, text: str, done: Line, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """A finished text."""
        shown = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {
            "index": index,
            **shown,
            "logprobs": logprobs,
            "finish_reason": _FINISHED[done["stopped_by"]],
            "seed": done["asked_seed"],
        }

    def piece(
        self,
        index: int,
        text: str,
        *,
        finished: Line | None = None,
        first: bool = False,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A piece of a text."""
        if self.is_chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            shown: dict[str, Any] = {"delta": delta | ({"content": text} if text or first else {})}
        else:
            shown = {"text": text}
        reason = None if finished is None else _FINISHED[finished["stopped_by"]]
        found = {"index": index, **shown, "logprobs": logprobs, "finish_reason": reason}
        return found if finished is None else found | {"seed": finished["asked_seed"]}

    def logprobs(self, chances: Sequence[Line], *, before: int = 0) -> dict[str, Any]:
        """Tokens with their log-probabilities. `before` is the number of characters before the first written
        token."""
        names = ("token", "bytes", "logprob")
        if self.is_chat:
            content = [
                {
                    **{name: each[name] for name in names},
                    "top_logprobs": [{name: other[name] for name in names} for other in each["top"]],
                }
                for each in chances
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [each["token"] for each in chances],
            "token_logprobs": [each["logprob"] for each in chances],
            "top_logprobs": [_by_name(each) for each in chances],
            "text_offset": [before + each["offset"] for each in chances],
        }


def _by_name(chance: Line) -> dict[str, float]:
    """The likeliest tokens and the drawn one, by name. If several share a name, as halves of characters do,
    the drawn one wins, else the likeliest."""
    found: dict[str, float] = {}
    for other in chance["top"]:
        found.setdefault(other["token"], other["logprob"])
    return found | {chance["token"]: chance["logprob"]}


def usage(done: Sequence[Line], prompts: int) -> dict[str, Any]:
    """Token counts, and our counts of passes. A prompt with several texts counts once."""
    given = sum(each["given"] for each in done[:: max(len(done) // prompts, 1)])
    written = sum(each["written"] for each in done)
    passes = sum(each["passes"] for each in done)
    counted: dict[str, Any] = {
        "prompt_tokens": given,
        "completion_tokens": written,
        "total_tokens": given + written,
        "passes": passes,
        "read_passes": sum(each["fill_passes"] for each in done),
        "tokens_per_pass": round(written / passes, 3) if passes else None,
    }
    if any(each["drafted"] for each in done):
        counted |= {
            "drafted": sum(sum(each["drafted"]) for each in done),
            "accepted": sum(sum(each["accepted"]) for each in done),
        }
    return counted


def error(message: str, status: int, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(body: dict[str, Any]) -> str:
    """A server-sent event. JSON allows line separators within text, which would end the event's line."""
    return f"data: {json.dumps(body, ensure_ascii=True)}\n\n"
