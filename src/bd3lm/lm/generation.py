"""What comes of writing: a text, its tokens, and what they cost."""

from dataclasses import dataclass

from bd3lm.data import Tokenizer
from bd3lm.lm.stops import StopStrings, shared_start, written_text
from bd3lm.methods import LanguageModelConfig, Settings
from bd3lm.models import Denoiser
from bd3lm.sampling import Sample, Stopping, Writer, token_entropy
from bd3lm.sampling.stopping import StoppedBy


@dataclass(frozen=True, repr=False)
class Generation:
    """A text that was written, and what it cost. Without a tokenizer there are tokens and no text.

    Printed, it is its text. A text that was stopped by a string ends before that string, as with OpenAI and
    vLLM; its tokens end with the one that completes it.
    """

    text: str | None
    """What was given and what was written."""
    completion: str | None
    """The text without its prompt: all from the first token on that was written. Of a template that is what
    follows the first run of given tokens, the texts after its gaps included."""
    sample: Sample

    @classmethod
    def of(cls, sample: Sample, tokenizer: Tokenizer | None) -> "Generation":
        """A sample with its text, which ends before the string that stopped it."""
        if tokenizer is None:
            return cls(None, None, sample)
        tokens = sample.tokens.tolist()
        text = tokenizer.decode(tokens)
        if sample.stop_string is not None:
            written = written_text(tokenizer, tokens, sample.written_from)
            place = written.find(sample.stop_string)
            text = text if place < 0 else text[: len(text) - len(written) + place]
        # Where a prompt ends inside a character, the character is of the completion.
        prompt = shared_start(tokenizer.decode(tokens[: sample.prompt]), text)
        return cls(text, text[prompt:], sample)

    def __str__(self) -> str:
        return repr(self) if self.text is None else self.text

    def __repr__(self) -> str:
        shown = self.tokens if self.text is None else self.text
        return f"Generation({shown!r}, {len(self.tokens)} tokens, stopped by {self.stopped_by})"

    @property
    def tokens(self) -> list[int]:
        """What was given and what was written, the token that texts begin with included."""
        tokens: list[int] = self.sample.tokens.tolist()
        return tokens

    @property
    def stopped_by(self) -> StoppedBy:
        """Why the text ends where it does."""
        return self.sample.stopped_by

    @property
    def entropy(self) -> float:
        """The entropy of its token frequencies, in nats: texts that repeat themselves have little."""
        return token_entropy(self.sample.tokens).item()


def build_writer(network: Denoiser, config: LanguageModelConfig, settings: Settings) -> Writer:
    """What writes a model's texts; an option that would do nothing for it is refused."""
    settled = config.method.settled(settings)
    config.method.speculation(settled)  # refuses what would do nothing
    if settled.is_guided and not config.method.can_be_guided:
        name = "json_schema" if settled.json_schema is not None else "regex"
        raise ValueError(
            f"{name} is for models that write token after token, and not for {config.method.title}: a "
            "grammar says what may come next; a joint model can be held to one under its causal law"
        )
    if settled.logit_bias is not None and not config.method.can_be_guided:
        raise ValueError(
            f"logit_bias is for models that write token after token, and not for {config.method.title}; a "
            "joint model takes it under its causal law"
        )
    writer = config.method.writer(network, settled, config.frame)
    if settings.alternatives is not None and not writer.knows_chances:
        title = config.method.title_for(config.frame.context)
        raise ValueError(
            f"alternatives must be None for {title}, whose tokens are not drawn from what the network says "
            f"of them in one pass, got {settings.alternatives}"
        )
    writer.alternatives = settings.alternatives
    return writer


def build_stopping(settings: Settings, tokenizer: Tokenizer | None) -> Stopping:
    """When texts end, by the settings and the tokenizer."""
    if settings.stop and tokenizer is None:
        raise ValueError(
            f"stop needs a tokenizer, and this model was saved without one, got {settings.stop!r}; eos_id "
            "ends texts at a token"
        )
    if tokenizer is None:
        return settings.stopping()
    find_end = StopStrings(tokenizer, settings.stop) if settings.stop else None
    return settings.stopping(eos_id=tokenizer.eos_id, find_end=find_end)
