"""The process that holds the model: it takes requests as lines, writes texts, and reports on them.

Incoming lines say what to `do`: `write` a text, or `leave` it. Outgoing lines say what `is` the case: a text
is `begun` or `refused`, has `more` text, is `done` or `failed`; there are `events` for clients that watch.
All waiting lines are read between two passes, so requests join and leave there.
"""

import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from bd3lm.data.chat import Message, conversation
from bd3lm.data.templates import template_stops
from bd3lm.lm import Gap, Generation, LanguageModel
from bd3lm.lm.engine import TextEngine
from bd3lm.lm.generation import build_writer
from bd3lm.lm.prompts import Prompt
from bd3lm.methods import Law, Settings
from bd3lm.parsing import parse
from bd3lm.sampling import (
    BlockFinished,
    BlockStarted,
    Drafted,
    Event,
    Extended,
    Failed,
    Handle,
    Speculation,
    Started,
    Stopped,
    TokenHidden,
    TokenRevealed,
    UnmaskingRule,
)
from bd3lm.serving.chances import Names, TokenChances, in_json
from bd3lm.serving.limits import Limits
from bd3lm.serving.link import Line, receive, send
from bd3lm.serving.telling import Telling

_TRIED: dict[str, Any] = {"speculation": Speculation(drafts=1), "alternatives": 1}
"""Settings that only some models have, with a value that the other models refuse."""


@dataclass(frozen=True)
class Served:
    """The model to serve, and how to load it."""

    source: str
    name: str
    device: str | None = None
    dtype: str | None = None
    law: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    """The text of a template that replaces the tokenizer's own."""


@dataclass
class _Text:
    """A text being written."""

    number: int
    handle: Handle
    telling: Telling | None
    """For a text that is sent piece by piece."""
    has_steps: bool
    """Whether the client gets all events."""
    alternatives: int | None
    """How many other tokens to report at each place, if any."""
    chances: TokenChances | None
    """For a text with log-probabilities."""
    revealed: dict[int, TokenRevealed] = field(default_factory=dict)
    told_to: int = 0
    finished_to: int = 0


def work(connection: Connection, served: Served, limits: Limits) -> None:
    """Serve until the other side is gone."""
    try:
        worker = Worker(_loaded(served), limits)
    except (ValueError, OSError, ImportError, MemoryError) as error:
        send(connection, [{"is": "unusable", "why": str(error) or "out of memory"}])
        return
    send(connection, [worker.hello()])
    try:
        while True:
            if not len(worker):
                worker.take(receive(connection))  # waits
            while connection.poll():
                worker.take(receive(connection))
            try:
                worker.step()
            except Exception as error:
                worker.lose(error)
            if worker.told:
                send(connection, worker.said())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _loaded(served: Served) -> LanguageModel:
    model = LanguageModel.from_pretrained(
        served.source,
        device=served.device,
        dtype=served.dtype,
        tokenizer=served.tokenizer,
        law=served.law,  # type: ignore[arg-type]  # from_pretrained checks it
    )
    if model.tokenizer is None:
        raise ValueError(
            f"{served.source} must have a tokenizer to be served, and was saved without one; name one with "
            "--tokenizer"
        )
    if served.chat_template is not None:
        model.tokenizer = replace(model.tokenizer, chat_template=served.chat_template)
    return model


class Worker:
    """A model's texts being written, by the numbers that the server gave them."""

    def __init__(self, model: LanguageModel, limits: Limits) -> None:
        if model.tokenizer is None:
            raise ValueError("model must have a tokenizer")
        self.model, self.tokenizer, self.limits = model, model.tokenizer, limits
        self.engine = TextEngine(model, seats=limits.seats)
        self.names = Names(self.tokenizer)
        self.told: list[Line] = []
        self._by_number: dict[int, _Text] = {}
        self._by_index: dict[int, _Text] = {}

    def hello(self) -> Line:
        """The description of the model for the server."""
        method = self.model.record.method
        return {
            "is": "ready",
            "context": self.model.config.network.context,
            "method": method.title,
            "laws": list(method.laws),
            "law": self.model.law,
            "means": {law: self._means(law) for law in method.laws},
            "chats": self.tokenizer.chat_template is not None,
            "parameters": sum(each.numel() for each in self.model.network.parameters()),
            "device": str(self.model.device),
            "dtype": str(self.model.network.dtype).removeprefix("torch."),
        }

    def _means(self, law: Law) -> list[str]:
        """Which optional settings have an effect under a law. The others are refused."""
        config = self.model.record.under(law)
        found = []
        with suppress(ValueError):
            config.method.with_lean(config.method.order_lean)
            found.append("lean")
        for name, value in _TRIED.items():
            with suppress(ValueError):
                build_writer(self.model.network, config, Settings(**{name: value}))
                found.append(name)
        return found

    def __len__(self) -> int:
        return len(self._by_number)

    def said(self) -> list[Line]:
        """The lines to send, and the current load."""
        running = self.engine.written
        told, self.told = self.told, []
        return [*told, {"is": "load", "running": running, "waiting": len(self.engine) - running}]

    def take(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if line["do"] == "write":
                try:
                    self._write(line)
                except ValueError as error:
                    self.told.append({"is": "refused", "text": line["text"], "why": str(error)})
                except Exception as error:  # it must not end the other texts
                    traceback.print_exc()
                    why = f"the text cannot be written: {type(error).__name__}"
                    self.told.append({"is": "failed", "text": line["text"], "why": why})
            elif line["do"] == "end":
                raise EOFError
            else:
                self._leave(line["text"])

    def lose(self, error: Exception) -> None:
        """Drop all texts, since nobody knows which one caused the error; the model is still there. Device
        errors are not survivable."""
        if self.model.device.type == "cuda":
            raise error
        traceback.print_exc()
        why = f"the texts being written were lost: {type(error).__name__}"
        self.told += [{"is": "failed", "text": number, "why": why} for number in self._by_number]
        self._by_number.clear()
        self._by_index.clear()
        self.engine.close()
        self.engine = TextEngine(self.model, seats=self.limits.seats)

    def step(self) -> None:
        """Write a piece of every text."""
        for event in self.engine.step():
            text = self._by_index.get(event.index)
            if text is not None:
                self._tell(text, event)
        for text in self._by_number.values():  # the unfinished ones
            self._tell_finished(text)

    def _write(self, line: Line) -> None:
        settings: dict[str, Any] = dict(line["settings"])
        if "unmasking" in settings:
            settings["unmasking"] = parse(UnmaskingRule, settings["unmasking"], where="unmasking")
        if "logit_bias" in settings:
            settings["logit_bias"] = dict(settings["logit_bias"])
        template = self.tokenizer.chat_template
        if (
            isinstance(line["prompt"], dict)
            and template is not None
            and not {"regex", "json_schema"} & {*settings}
        ):
            settings["stop"] = (*settings.get("stop", ()), *template_stops(template))
        tell = line["tell"]
        handle = self.engine.submit(
            self._given(line),
            max_new_tokens=line["max_new_tokens"],
            length=self._length(line),
            law=line["law"],
            lean=line["lean"],
            tell=tell,
            **settings,
        )
        request = handle.request
        given, most = len(request.given), self.limits.tokens
        if request.length > most:
            handle.abort()
            raise ValueError(
                f"max_tokens must be at most {max(most - given, 0):,} here, since a text may have {most:,} "
                f"tokens and the prompt has {given:,}, got {request.length - given:,}"
            )
        known = request.given.tolist()
        telling = Telling(self.tokenizer, known, settings.get("stop") or ()) if line["pieces"] else None
        text = _Text(
            line["text"], handle, telling, line["events"], line["alternatives"], self._chances(line, known)
        )
        text.told_to = text.finished_to = len(known)
        self._by_number[text.number] = self._by_index[handle.index] = text
        begun: Line = {"is": "begun", "text": text.number, "given": len(known)}
        if line["echo"]:
            begun["prompt"] = self.tokenizer.decode(known)
        self.told.append(begun)

    def _chances(self, line: Line, known: list[int]) -> TokenChances | None:
        if line["logprobs"] is None:
            return None
        mask = self.model.config.mask_id
        prompt = known[: known.index(mask)] if mask in known else known
        return TokenChances(self.names, self.tokenizer, prompt, line["logprobs"])

    def _given(self, line: Line) -> Prompt:
        """The prompt: text, ids, a conversation, or a template of texts and gaps."""
        prompt = line["prompt"]
        if isinstance(prompt, dict):
            template = self.tokenizer.chat_template
            if template is None:
                raise ValueError(
                    "messages need a chat template, and this model's tokenizer has none; start the server "
                    "with --chat-template, or use /v1/completions to continue a text"
                )
            messages = [Message(each["role"], each["content"]) for each in prompt["messages"]]
            return conversation(template, messages, self.tokenizer)
        if isinstance(prompt, str):
            return prompt
        tokens = sum(
            part["gap"] if isinstance(part, dict) else 1 for part in prompt if not isinstance(part, str)
        )
        if tokens > self.limits.tokens:  # check before such a gap is made
            raise ValueError(
                f"a text may have {self.limits.tokens:,} tokens here, and its gaps and token ids alone have "
                f"{tokens:,}"
            )
        if any(isinstance(part, dict) for part in prompt):
            return [Gap(part["gap"]) if isinstance(part, dict) else part for part in prompt]
        if not prompt:
            raise ValueError("prompt must hold at least one token id, got none")
        return list(prompt)

    def _length(self, line: Line) -> int | None:
        """The default length of a text: one context of the model."""
        is_template = any(isinstance(part, dict) for part in line["prompt"])
        if line["max_new_tokens"] is not None or is_template:
            return None
        return min(self.limits.tokens, self.model.config.network.context)

    def _leave(self, number: int) -> None:
        text = self._by_number.pop(number, None)
        if text is not None:
            del self._by_index[text.handle.index]
            text.handle.abort()

    def _tell_finished(self, text: _Text) -> None:
        """Send what passes wrote of a text that is sent piece by piece, with log-probabilities. Otherwise
        `Extended` does this; but a finished piece is known before it is known whether the text ends in it."""
        start, stop = text.told_to, text.finished_to
        if text.telling is None or text.chances is None or stop <= start:
            return
        found = [text.revealed.pop(place) for place in range(start, stop)]
        tokens = [each.token for each in found]
        chances = text.chances.more(
            start, tokens, [each.log_p for each in found], [each.alternatives for each in found]
        )
        more = text.telling.more(start, tokens)
        text.told_to = stop
        self.told.append(
            {"is": "more", "text": text.number, "more": more, "tokens": len(tokens), "chances": chances}
        )

    def _tell(self, text: _Text, event: Event) -> None:
        match event:
            case TokenRevealed(position=position) if text.telling is not None:
                text.revealed[position] = event
            case TokenHidden(position=position) if text.telling is not None:
                text.revealed.pop(position, None)
            case BlockFinished(stop=stop):
                text.finished_to = stop
            case Extended(start=start, tokens=tokens) if text.telling is not None:
                more = text.telling.more(start, tokens)
                self.told.append({"is": "more", "text": text.number, "more": more, "tokens": len(tokens)})
            case _ if text.has_steps and (step := self._happened(event, text.alternatives)) is not None:
                self.told.append({"is": "events", "text": text.number, "steps": [step]})
            case Stopped(sample=sample):
                generation = self.model.generation(sample)
                self.told.append(self._done(text, generation))
                self._leave(text.number)
            case Failed(reason=reason):
                self.told.append({"is": "failed", "text": text.number, "why": reason})
                self._leave(text.number)

    def _happened(self, event: Event, alternatives: int | None) -> list[Any] | None:
        """An event for a client that watches, in the format of films (`bd3lm.reports.animation`)."""
        match event:
            case Started(request=request):
                mask = self.model.config.mask_id
                given = [None if token == mask else self._piece(token) for token in request.given.tolist()]
                return ["given", given]
            case BlockStarted(start=start, stop=stop):
                return ["block", start, stop]
            case TokenRevealed(position=position, token=token, log_p=log_p):
                shown = ["show", position, self._piece(token)]
                if alternatives is None or log_p is None:
                    return shown
                others = event.alternatives[:alternatives]
                return [*shown, in_json(log_p), [[self.names.of(each), in_json(p)] for each, p in others]]
            case TokenHidden(position=position):
                return ["hide", position]
            case Drafted(positions=positions, tokens=tokens):
                drafts = zip(positions, tokens, strict=True)
                return ["draft", [[position, self._piece(token)] for position, token in drafts]]
        return None

    def _piece(self, token: int) -> str:
        """The text of one token, which may be half a character."""
        return self.tokenizer.decode([token])

    def _done(self, text: _Text, generation: Generation) -> Line:
        sample, completion = generation.sample, generation.completion or ""
        chances: list[Line] = []
        if text.chances is not None and sample.log_p is not None:
            start = text.told_to if text.telling is not None else sample.prompt
            some = slice(start, None)
            chances = text.chances.more(
                start, generation.tokens[some], sample.log_p[some], sample.alternatives[some]
            )
        return {
            "is": "done",
            "text": text.number,
            "whole": generation.text,
            "more": completion if text.telling is None else text.telling.rest(completion),
            "before": len(generation.text or "") - len(completion),
            "chances": chances,
            "stopped_by": sample.stopped_by,
            "given": sample.given,
            "written": sample.written,
            "passes": sample.evaluations,
            "fill_passes": sample.fill_passes,
            "drafted": list(sample.drafted),
            "accepted": list(sample.accepted),
            "seed": sample.seed,
        }
