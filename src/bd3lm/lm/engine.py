"""Texts of one model that come and go: what a server asks."""

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
    """Writes texts of a model side by side, each with settings and a law of its own.

    `submit`, `step` and `abort` may be called from any thread. Only one should step, over and over: what
    happens is told to whoever does.
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
        """Have one text written; what cannot be is refused at once, with the reason.

        The seed of the settings is the text's own: the text is that of `generate` with `seeds=[seed]`. `law`
        is for a joint model, which has two, and `lean` for the block law, as `with_lean` has it.
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
        """Write a piece of every text that is under way, and tell what happened."""
        return self._engine.step()

    def close(self) -> None:
        """Let go of all texts."""
        self._engine.close()

    def __len__(self) -> int:
        """How many texts are waiting or being written."""
        return len(self._engine)

    @property
    def written(self) -> int:
        """How many texts are being written; the others wait."""
        return self._engine.written

    def _writer(self, settings: Settings, config: LanguageModelConfig) -> Writer:
        """The writer that such settings made before, if one did: its texts share passes."""
        key = settings.of_writer(config.method.writer_draws), config
        if key not in self._writers:
            self._writers[key] = build_writer(self.model.network, config, settings)
        self._writers.move_to_end(key)
        while len(self._writers) > _WRITERS:
            self._writers.popitem(last=False)
        return self._writers[key]
