"""Settings as users give them, the writer that obeys them, and what comes of it."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from bd3lm.config import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    D3PMMethod,
    LanguageModelConfig,
    Method,
    ScoreEntropyMethod,
    SimplexMethod,
    did_you_mean,
)
from bd3lm.data import Tokenizer
from bd3lm.diffusion import (
    GreedyProjection,
    MultiHotProjection,
    NoiseSchedule,
    Projection,
    SamplingProjection,
    Uniform,
    is_number,
    is_whole,
    named_process,
)
from bd3lm.diffusion.categorical import NucleusRule
from bd3lm.lm.scoring import block_reading
from bd3lm.lm.stops import StopStrings, shared_start, stop_strings, written_text
from bd3lm.models import BlockReading, Transformer
from bd3lm.sampling import (
    AnalyticWriter,
    Ancestral,
    AutoregressiveWriter,
    BlockWriter,
    FirstHitting,
    PosteriorWriter,
    Remasking,
    Sample,
    Sharpening,
    SimplexWriter,
    SlidingWriter,
    Stopping,
    UnmaskingRule,
    Writer,
    token_entropy,
)

_PROJECTIONS = ("sampling", "greedy", "multi_hot")
_NUCLEUS = {"score_entropy": 0.99, "simplex": 0.95}  # Suppl. C.5
_NUCLEUS_OF_MOST = 0.9


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How texts are written. The defaults are the paper's sampler, one context long."""

    length: int | None = None
    """Tokens a text may reach, what was given included (also the token that texts begin with). By default a
    template's own length, else the network's context."""
    seed: int = 0
    batch_size: int = 32
    """Texts written side by side. It changes speed and memory, not the texts."""
    temperature: float = 1.0
    """0 always takes the likeliest token, as top_k=1 does."""
    top_k: int | None = None
    nucleus_p: float | None = None
    """Draw from the likeliest tokens that hold this much probability; 1 draws from the model itself. By
    default the paper's: 0.9, for SEDD 0.99, for SSD-LM 0.95."""
    nucleus_rule: NucleusRule = "inclusive"
    """Whether the token that crosses nucleus_p is kept; the reference implementation leaves it out."""
    unmasking: UnmaskingRule | None = None
    """Which tokens of a block a pass reveals. By default one, first-hitting, in the model's own order."""
    steps: int | None = None
    """Steps of SEDD (by default 1,000), of D3PM (as trained), of SSD-LM for each block (1,000)."""
    projection: Literal["sampling", "greedy", "multi_hot"] = "sampling"
    """How SSD-LM makes almost one-hot vectors of what its network says."""
    stop_at_eos: bool = True
    """End a text at the end token."""
    eos_id: int | None = None
    """The end token; by default the tokenizer's."""
    stop: tuple[str, ...] = ()
    """End a text where one of these strings appears in what is written after all that was given. One string
    or any sequence of them may be given."""
    entropy_floor: float | None = None
    """End a text whose last tokens have less entropy, in nats; 4 in the paper."""
    entropy_window: int = 256
    redraws: int = 0
    """How often a text below the floor is drawn again, rather than ended."""
    stride: int | None = None
    """For a network of one block, past its context: tokens written at a time; by default half the context."""
    cache: bool = True
    """Keep keys and values between passes; without, the context is computed afresh each time."""

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "top_k", "steps", "entropy_window", "stride"):
            value = getattr(self, name)
            if not _is_left_open(name, value) and (not is_whole(value) or value < 1):
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
        for name in ("seed", "redraws", "eos_id"):
            value = getattr(self, name)
            if not _is_left_open(name, value) and not is_whole(value):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        for name in ("temperature", "nucleus_p", "entropy_floor"):
            value = getattr(self, name)
            if not _is_left_open(name, value) and not is_number(value):
                raise ValueError(f"{name} must be a number, got {value!r}")
        object.__setattr__(self, "stop", stop_strings(self.stop))
        for name in ("stop_at_eos", "cache"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if not isinstance(self.unmasking, UnmaskingRule | None):
            raise ValueError(
                f"unmasking must be a rule of bd3lm.sampling such as FirstHitting() or Ancestral(5000), got "
                f"{self.unmasking!r}"
            )
        if self.eos_id is not None and not self.stop_at_eos:
            raise ValueError(f"eos_id is for stop_at_eos, which is off, got {self.eos_id}")
        if self.projection not in _PROJECTIONS:
            raise ValueError(f"projection must be one of {', '.join(_PROJECTIONS)}, got {self.projection!r}")
        self.sharpening()  # these two say what is wrong with their parts
        self.stopping(None)

    @classmethod
    def of(cls, settings: "Settings | None", changes: dict[str, Any]) -> "Settings":
        """Settings with some fields changed, by name."""
        if settings is not None and not isinstance(settings, cls):
            raise ValueError(f"settings must be a Settings, or fields of it by name, got {settings!r}")
        names = [each.name for each in fields(cls)]
        for name in changes:
            if name not in names:
                hint = did_you_mean(name, names) or ","
                raise ValueError(f"{name} is no setting{hint} allowed are {', '.join(names)}")
        return replace(settings or cls(), **changes)

    def for_method(self, method: Method) -> "Settings":
        """A copy in which an order or a nucleus that was left open is the method's own or the paper's."""
        settings = self
        if settings.unmasking is None and isinstance(method, BlockDiffusionMethod):
            settings = replace(settings, unmasking=FirstHitting(lean=method.lean))
        takes_the_likeliest = method.kind == "simplex" and self.projection == "greedy"
        if settings.nucleus_p is not None or takes_the_likeliest:
            return settings
        return replace(settings, nucleus_p=_NUCLEUS.get(method.kind, _NUCLEUS_OF_MOST))

    def of_writer(self) -> "Settings":
        """A copy with only the fields that affect how the writer is built."""
        plain = Settings()
        aside = (
            "length",
            "seed",
            "batch_size",
            "stop_at_eos",
            "eos_id",
            "stop",
            "entropy_floor",
            "entropy_window",
            "redraws",
        )
        return replace(self, **{name: getattr(plain, name) for name in aside})

    def check_stop(self, tokenizer: Tokenizer | None) -> None:
        """Refuse strings for a model without a tokenizer: there is no text to find them in."""
        if self.stop and tokenizer is None:
            raise ValueError(
                f"stop needs a tokenizer, and this model was saved without one, got {self.stop!r}; eos_id "
                "ends texts at a token"
            )

    def check_floor(self, vocab_size: int) -> None:
        """Refuse an entropy floor that no text of this vocabulary can reach."""
        tokens = vocab_size - 1  # the mask is never written
        highest = math.log(min(self.entropy_window, tokens))
        if self.entropy_floor is not None and self.entropy_floor > highest:
            raise ValueError(
                f"entropy_floor must be at most {highest:.2f}, the entropy of {self.entropy_window} tokens "
                f"as different as a vocabulary of {tokens:,} allows, or nothing that is written is kept, got "
                f"{self.entropy_floor:g}"
            )

    def sharpening(self) -> Sharpening:
        return Sharpening(
            temperature=self.temperature,
            top_k=self.top_k,
            nucleus_p=1.0 if self.nucleus_p is None else self.nucleus_p,
            nucleus_rule=self.nucleus_rule,
        )

    def stopping(self, tokenizer: Tokenizer | None) -> Stopping:
        eos_id = self.eos_id
        if eos_id is None and tokenizer is not None and self.stop_at_eos:
            eos_id = tokenizer.eos_id
        return Stopping(
            eos_id=eos_id,
            find_end=StopStrings(tokenizer, self.stop) if self.stop and tokenizer is not None else None,
            entropy_floor=self.entropy_floor,
            entropy_window=self.entropy_window,
            redraws=self.redraws,
        )


@dataclass(frozen=True)
class Generation:
    """A text that was written, and what it cost. Without a tokenizer there are tokens and no text.

    A text that was stopped by a string ends before that string, as with OpenAI and vLLM; its tokens end with
    the one that completes it.
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

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.sample.tokens.tolist()
        return tokens

    @property
    def entropy(self) -> float:
        """The entropy of its token frequencies, in nats: texts that repeat themselves have little."""
        return token_entropy(self.sample.tokens).item()


def build_writer(network: Transformer, config: LanguageModelConfig, settings: Settings) -> Writer:
    """What writes a model's texts; an option that would do nothing for it is refused."""
    method, context = config.method, config.network.context
    settings = settings.for_method(method)
    common: dict[str, Any] = {"mask_id": method.mask_id, "context": context}
    sharpening = settings.sharpening()
    match method:
        case AutoregressiveMethod():
            _refuse(
                settings,
                "unmasking",
                "stride",
                "steps",
                "projection",
                why="an autoregressive model writes token after token",
            )
            return AutoregressiveWriter(
                network,
                **common,
                score_first=method.score_first,
                sharpening=sharpening,
                cache=settings.cache,
            )
        case BlockDiffusionMethod():
            _refuse(settings, "projection", why="it is SSD-LM's")
            _refuse(settings, "steps", why="block diffusion takes unmasking=Ancestral(steps)")
            if method.lean and isinstance(settings.unmasking, Ancestral | Remasking):
                raise ValueError(
                    f"unmasking {settings.unmasking} has no order that leans, and the model's lean is "
                    f"{method.lean:g}; use with_lean(0) (or --lean 0)"
                )
            if method.block_size == context:
                return _whole_context(network, block_reading(method), settings, settings.unmasking)
            _refuse(settings, "stride", why=f"this model writes blocks of {method.block_size}")
            return BlockWriter(
                network,
                reading=block_reading(method),
                context=context,
                unmasking=settings.unmasking,
                sharpening=sharpening,
                cache=settings.cache,
            )
        case ScoreEntropyMethod():
            _refuse(
                settings,
                "unmasking",
                "projection",
                "stride",
                "cache",
                why="SEDD writes a whole context",
            )
            process = named_process(
                method.process, vocab_size=config.network.vocab_size, mask_id=method.mask_id
            )
            return AnalyticWriter(
                network,
                **common,
                process=process,
                schedule=process.log_linear,
                steps=settings.steps or 1000,
                sharpening=sharpening,
            )
        case D3PMMethod():
            _refuse(settings, "unmasking", "projection", why="D3PM takes its own steps")
            steps = settings.steps or method.steps
            schedule = NoiseSchedule.members()[method.schedule]()
            if method.process == "absorbing":  # revealing what falls into a step is its posterior
                reading = BlockReading(block_size=context, mask_id=method.mask_id)
                return _whole_context(network, reading, settings, Ancestral(steps, schedule))
            _refuse(settings, "stride", "cache", why="uniform noise is over a whole context")
            return PosteriorWriter(
                network,
                **common,
                process=Uniform(config.network.vocab_size),
                schedule=schedule,
                steps=steps,
                sharpening=sharpening,
            )
        case SimplexMethod():
            _refuse(
                settings,
                "unmasking",
                "stride",
                "temperature",
                "top_k",
                "nucleus_rule",
                why="SSD-LM draws by its projection",
            )
            if settings.projection == "greedy":
                _refuse(settings, "nucleus_p", why="the greedy projection takes the likeliest token")
            return SimplexWriter(
                network,
                **common,
                block_size=method.block_size,
                simplex_scale=method.simplex_scale,
                steps=settings.steps or 1000,
                projection=_projection(settings, sharpening.nucleus_p),
                cache=settings.cache,
            )


def _whole_context(
    network: Transformer, reading: BlockReading, settings: Settings, unmasking: UnmaskingRule | None
) -> Writer:
    _refuse(settings, "cache", why="a network of one block has nothing to cache")
    return SlidingWriter(
        network,
        reading=reading,
        context=reading.block_size,
        stride=settings.stride,
        unmasking=unmasking,
        sharpening=settings.sharpening(),
    )


def _projection(settings: Settings, nucleus_p: float) -> Projection:
    match settings.projection:
        case "greedy":
            return GreedyProjection()
        case "multi_hot":
            return MultiHotProjection(nucleus_p)
        case _:
            return SamplingProjection(nucleus_p)


def _is_left_open(name: str, value: object) -> bool:
    """True if it is None, and None is what the field is by default."""
    return value is None and getattr(Settings, name) is None


def _refuse(settings: Settings, *names: str, why: str) -> None:
    """An option that would do nothing is an error."""
    for name in names:
        if getattr(settings, name) != getattr(Settings(), name):
            raise ValueError(f"{name} must be left at its default, got {getattr(settings, name)}: {why}")
