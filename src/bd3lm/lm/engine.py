"""An engine for texts that are submitted at any time, as a server needs it."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Unpack

from bd3lm.lm.generation import build_stopping, build_writer
from bd3lm.lm.prompts import Prompt, build_requests
from bd3lm.methods import LanguageModelConfig, Law, Settings, SettingsKeywords
from bd3lm.sampling import Engine, Event, Handle, Tell, Writer

if TYPE_CHECKING:
    from bd3lm.lm.model import LanguageModel

_WRITERS = 32  # settings of writers that are remembered


class TextEngine:
    """Writes many texts of a model at once, each with its own settings and law.

    `submit`, `step` and `abort` may be called from any thread. Call `step` from one thread in a loop: it
    returns the events of all texts.
    """

    def __init__(self, model: "LanguageModel", *, seats: int = 32) -> None:
        self.model = model
        self._engine = Engine(seats=seats)
        self._writers: OrderedDict[tuple[Settings, LanguageModelConfig], Writer] = OrderedDict()

    def submit(
        self,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        max_new_tokens: int | None = None,
        law: Law | None = None,
        lean: float | None = None,
        tell: Tell = "pieces",
        **changes: Unpack[SettingsKeywords],
    ) -> Handle:
        """Submit one text to be written. A request that cannot be written is refused at once.

        The text is the one that `generate` writes with `seeds=[settings.seed]`. `law` chooses the law of a
        joint model. `lean` sets the order of the block law, as in `with_lean`.
        """
        model, settings = self.model, Settings.of(settings, changes)
        config = self._config(law, lean)
        settings.check_floor(config.network.input_vocab_size)
        stopping = build_stopping(settings, model.tokenizer)
        writer = self._writer(settings, config)
        (request,) = build_requests(
            [prompt],
            [settings.seed],
            config,
            model.tokenizer,
            settings,
            stopping,
            max_new_tokens=max_new_tokens,
        )
        return self._engine.submit(request, writer, tell=tell)

    def _config(self, law: Law | None, lean: float | None) -> LanguageModelConfig:
        if lean is None:
            return self.model.config if law is None else self.model.record.under(law)
        leaning = self.model if law is None else self.model.with_law(law)
        return leaning.with_lean(lean).config

    def step(self) -> list[Event]:
        """Write the next piece of every active text, and return what happened."""
        return self._engine.step()

    def close(self) -> None:
        """Drop all texts."""
        self._engine.close()

    def __len__(self) -> int:
        """How many texts are waiting or being written."""
        return len(self._engine)

    @property
    def written(self) -> int:
        """How many texts are being written; the others are waiting."""
        return self._engine.written

    def _writer(self, settings: Settings, config: LanguageModelConfig) -> Writer:
        """The writer that earlier texts with these settings used, if any, so that all of them share
        passes."""
        key = settings.of_writer(config.method.writer_draws), config
        if key not in self._writers:
            self._writers[key] = build_writer(self.model.network, config, settings)
        self._writers.move_to_end(key)
        while len(self._writers) > _WRITERS:
            self._writers.popitem(last=False)
        return self._writers[key]
