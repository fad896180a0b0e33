"""The result of generation: a text, its tokens and its cost."""

from dataclasses import dataclass

from bd3lm.data import Tokenizer
from bd3lm.lm.stops import StopStrings, shared_start, written_text
from bd3lm.methods import LanguageModelConfig, Settings
from bd3lm.models import Denoiser
from bd3lm.sampling import Sample, Stopping, Writer, token_entropy
from bd3lm.sampling.stopping import StoppedBy


@dataclass(frozen=True, repr=False)
class Generation:
    """A generated text and its cost. Without a tokenizer there are tokens but no text.

    `print` shows the text. If a stop string ended the text, `text` ends before that string, as with OpenAI
    and vLLM, while `tokens` end with the token that completes it.
    """

    text: str | None
    """The prompt and what was written after it."""
    completion: str | None
    """The text without its prompt: everything from the first written token on. For a template this is
    everything after the first run of given tokens, including the given texts after its gaps."""
    sample: Sample

    @classmethod
    def of(cls, sample: Sample, tokenizer: Tokenizer | None) -> "Generation":
        """A sample with its text, cut before the string that stopped it."""
        if tokenizer is None:
            return cls(None, None, sample)
        tokens = sample.tokens.tolist()
        text = tokenizer.decode(tokens)
        if sample.stop_string is not None:
            written = written_text(tokenizer, tokens, sample.written_from)
            place = written.find(sample.stop_string)
            text = text if place < 0 else text[: len(text) - len(written) + place]
        # If a prompt ends inside a character, that character belongs to the completion.
        prompt = shared_start(tokenizer.decode(tokens[: sample.prompt]), text)
        return cls(text, text[prompt:], sample)

    def __str__(self) -> str:
        return repr(self) if self.text is None else self.text

    def __repr__(self) -> str:
        shown = self.tokens if self.text is None else self.text
        return f"Generation({shown!r}, {len(self.tokens)} tokens, stopped by {self.stopped_by})"

    @property
    def tokens(self) -> list[int]:
        """The given and the written tokens, including the start token."""
        tokens: list[int] = self.sample.tokens.tolist()
        return tokens

    @property
    def stopped_by(self) -> StoppedBy:
        """Why the text ends where it does: "eos", "string", "entropy" or "length"."""
        return self.sample.stopped_by

    @property
    def entropy(self) -> float:
        """The entropy of the text's token frequencies, in nats. Repetitive texts have a low one."""
        return token_entropy(self.sample.tokens).item()


def build_writer(network: Denoiser, config: LanguageModelConfig, settings: Settings) -> Writer:
    """The writer for a model and these settings. Refuses a setting that would have no effect."""
    settled = config.method.settled(settings)
    config.method.speculation(settled)  # refuses what would do nothing
    if settled.is_guided and not config.method.can_be_guided:
        name = "json_schema" if settled.json_schema is not None else "regex"
        raise ValueError(
            f"{name} is for models that write token by token, not for {config.method.title}: a grammar says "
            "which tokens may come next; a joint model can follow one under its causal law"
        )
    if settled.logit_bias is not None and not config.method.can_be_guided:
        raise ValueError(
            f"logit_bias is for models that write token by token, not for {config.method.title}; a joint "
            "model takes it under its causal law"
        )
    writer = config.method.writer(network, settled, config.frame)
    if settings.alternatives is not None and not writer.knows_chances:
        title = config.method.title_for(config.frame.context)
        raise ValueError(
            f"alternatives must be None for {title}, which does not draw each token from a distribution that "
            f"the network gives in one pass, got {settings.alternatives}"
        )
    writer.alternatives = settings.alternatives
    return writer


def build_stopping(settings: Settings, tokenizer: Tokenizer | None) -> Stopping:
    """The rules that end texts, from the settings and the tokenizer."""
    if settings.stop and tokenizer is None:
        raise ValueError(
            f"stop needs a tokenizer, and this model was saved without one, got {settings.stop!r}; use "
            "eos_id to end texts at a token"
        )
    if tokenizer is None:
        return settings.stopping()
    find_end = StopStrings(tokenizer, settings.stop) if settings.stop else None
    return settings.stopping(eos_id=tokenizer.eos_id, find_end=find_end)
