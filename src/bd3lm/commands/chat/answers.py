"""Answers of a model: tokens in, text out as it is settled; when stopped, the text so far."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bd3lm.commands.chat.display import Show
from bd3lm.commands.sample.checks import check_numbers, check_ways
from bd3lm.commands.shared.writing import fitting_threads
from bd3lm.io.signals import Terminated, forget_stops, stop_behind
from bd3lm.lm import Generation, LanguageModel
from bd3lm.lm.engine import TextEngine
from bd3lm.sampling import BlockFinished, Event, Extended, Failed, Handle, Stopped, TokenHidden, TokenRevealed
from bd3lm.serving.telling import Telling

if TYPE_CHECKING:
    from bd3lm.commands.sample import Sample
    from bd3lm.data import Tokenizer


@dataclass(frozen=True)
class Answer:
    """The text of an answer, complete or as far as it got when it was stopped."""

    text: str
    generation: Generation | None
    """None if the answer was stopped."""


class Answerer:
    """A model with settings that can change, named like the flags of `bd3lm sample`."""

    def __init__(
        self, model: LanguageModel, tokenizer: "Tokenizer", choices: "Sample", stops: Sequence[str] = ()
    ) -> None:
        self.model, self.tokenizer, self.stops = model, tokenizer, tuple(stops)
        self.done: list[Generation] = []
        self.seconds = 0.0
        self.choices = choices
        self.variant = self._under(choices)
        self.engine = TextEngine(self.variant, seats=1)
        self.choose(choices)

    def choose(self, choices: "Sample") -> None:
        """Change the settings. If they are wrong, this raises, and the old settings stay."""
        check_ways(choices)
        check_numbers(choices)
        variant, engine = self.variant, self.engine
        if (choices.law, choices.lean) != (self.choices.law, self.choices.lean):
            variant = self._under(choices)
            engine = TextEngine(variant, seats=1)  # otherwise keep it, with the GPU graphs it recorded
        settings = choices.settings_for(variant.config.method)
        settings = replace(settings, stop=(*settings.stop, *self.stops))
        first = next(token for token in range(2) if token != variant.config.mask_id)
        engine.submit([first], settings, max_new_tokens=1).abort()  # refuses invalid settings
        if engine is not self.engine:
            self.engine.close()
        self.choices, self.settings, self.engine, self.variant = choices, settings, engine, variant

    def _under(self, choices: "Sample") -> LanguageModel:
        """The model with the requested law and lean."""
        model = self.model if choices.law is None else self.model.with_law(choices.law)
        return model if choices.lean is None else model.with_lean(choices.lean)

    def most_new(self, given: int) -> int:
        """The most tokens an answer may have after this many tokens: --max-new-tokens, or the room in the
        context."""
        room = self.model.config.network.context - given
        return room if self.choices.max_new_tokens is None else min(self.choices.max_new_tokens, room)

    def answer(self, tokens: Sequence[int], *, seed: int, show: Show, may_stop: bool) -> Answer:
        """Write what follows these tokens: the text of `generate` with `seeds=[seed]` and `most_new` tokens.

        Ctrl-C ends the answer early if it `may_stop`.
        """
        handle = self.engine.submit(
            list(tokens),
            replace(self.settings, seed=seed),
            max_new_tokens=self.most_new(len(tokens)),
            tell="passes" if show.watches else "pieces",
        )
        telling = Telling(self.tokenizer, tokens, self.settings.stop)
        begun = time.perf_counter()
        forget_stops()
        try:
            with show, fitting_threads(self.variant, alone=True):
                answer = self._written(handle, telling, show)
            self.seconds += time.perf_counter() - begun
            return answer
        except (Exception, KeyboardInterrupt) as error:
            # The old engine may have been stopped while it held a lock, so it is dropped, not closed.
            self.engine = TextEngine(self.variant, seats=1)
            stop = stop_behind(error)
            if stop is None or isinstance(stop, Terminated) or not may_stop:
                raise
            forget_stops()
            return Answer(telling.told, None)

    def _written(self, handle: Handle, telling: Telling, show: Show) -> Answer:
        settled = _Settled(handle)
        while True:
            stopped: Stopped | None = None
            for event in self.engine.step():
                if event.index != handle.index:
                    continue
                if show.watches:
                    show.event(event)
                settled.take(event)
                if isinstance(event, Failed):
                    raise ValueError(event.reason)
                stopped = event if isinstance(event, Stopped) else stopped
            if stopped is None:
                show.more(telling.more(*settled.more()))
                continue
            generation = self.variant.generation(stopped.sample)
            text = generation.completion or ""
            show.more(telling.rest(text))
            self.done.append(generation)
            return Answer(text, generation)


class _Settled:
    """Tokens that are settled, collected from the events."""

    def __init__(self, handle: Handle) -> None:
        self.start = self.stop = len(handle.request.given)
        self.tokens: dict[int, int] = {}

    def take(self, event: Event) -> None:
        match event:
            case Extended(start=start, tokens=tokens):
                self.tokens |= dict(enumerate(tokens, start))
                self.stop = start + len(tokens)
            case TokenRevealed(position=position, token=token):
                self.tokens[position] = token
            case TokenHidden(position=position):
                self.tokens.pop(position, None)
            case BlockFinished(stop=stop):
                self.stop = stop

    def more(self) -> tuple[int, list[int]]:
        """The new settled tokens, and the position of the first."""
        start, self.start = self.start, max(self.start, self.stop)
        return start, [self.tokens.pop(place) for place in range(start, self.start)]
