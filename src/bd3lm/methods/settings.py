"""`Settings`: the options of generation."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict

import numpy as np

from bd3lm.diffusion import Projection, is_number, is_whole
from bd3lm.diffusion.categorical import NucleusRule
from bd3lm.limits import check_alternatives
from bd3lm.parsing import did_you_mean
from bd3lm.sampling import (
    Adaptive,
    Ancestral,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Planned,
    Remasking,
    Sharpening,
    Speculation,
    Stopping,
    UnmaskingRule,
)
from bd3lm.sampling.stopping import FindEnd
from bd3lm.words import advice_in_python

_COUNTS = ("length", "batch_size", "top_k", "steps", "tokens_per_pass", "entropy_window", "stride", "fills")
_WAYS = ("steps", "tokens_per_pass", "confidence", "entropy_bound", "unmasking")
"""Options that each decide alone which tokens a pass reveals."""
DEFAULT_FILLS = 16
"""Fills of a gap with text after it, by default. The gain from another fill falls as fast as 1/fills."""
SHARPENING = ("temperature", "top_k", "top_p", "top_p_rule")
"""Settings of how a token is drawn from its distribution."""
UNMASKING = ("remask", "tokens_per_pass", "confidence", "entropy_bound", "unmasking")
"""Settings that only decide which masks a pass reveals."""


class SettingsKeywords(TypedDict, total=False):
    """The fields of `Settings` as keywords of `generate` and `stream`, for editors and type checkers."""

    length: int | None
    seed: int
    batch_size: int
    temperature: float
    top_k: int | None
    top_p: float | None
    top_p_rule: NucleusRule
    steps: int | None
    remask: float | None
    tokens_per_pass: int | None
    confidence: float | None
    entropy_bound: float | None
    unmasking: UnmaskingRule | None
    projection: str
    speculation: Speculation | int | Literal["auto", "off"] | None
    regex: str | None
    json_schema: str | Mapping[str, Any] | None
    logit_bias: Mapping[int, float] | None
    stop_at_eos: bool
    eos_id: int | None
    stop: str | Sequence[str]
    entropy_floor: float | None
    entropy_window: int
    redraws: int
    stride: int | None
    cache: bool
    fills: int | None
    alternatives: int | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of generation. The defaults are the paper's sampler, for texts of one context."""

    length: int | None = None
    """Number of tokens a text may reach, including the prompt and the start token. By default a template's
    own length, else the network's context."""
    seed: int = 0
    """One seed for all texts of a call. Each text derives its own seed from it and from the text's place."""
    batch_size: int = 32
    """Texts written at the same time. It changes speed and memory, not the texts."""
    temperature: float = 1.0
    """Below 1, likely tokens become likelier. 0 always takes the likeliest token, like top_k=1."""
    top_k: int | None = None
    """Draw only from this many of the likeliest tokens."""
    top_p: float | None = None
    """Nucleus sampling: draw only from the likeliest tokens that together have this probability. 1 keeps all
    tokens. The default is the paper's: 0.9, for SEDD 0.99, for SSD-LM 0.95."""
    top_p_rule: NucleusRule = "inclusive"
    """Whether the nucleus keeps the token that crosses top_p. The reference implementation leaves it out."""
    steps: int | None = None
    """Ancestral steps for each block, instead of first-hitting ones (5,000 in the paper). For SEDD (default
    1,000) and D3PM (default: as trained) the steps of a text; for SSD-LM those of a block (1,000)."""
    remask: float | None = None
    """With `steps`: ReMDM's eta in [0, 1], the share of the allowed remasking that a step does."""
    tokens_per_pass: int | None = None
    """Reveal this many tokens in each pass, in the model's order. Faster, but not the model's
    distribution."""
    confidence: float | None = None
    """Reveal all tokens drawn with at least this probability. Not the model's distribution."""
    entropy_bound: float | None = None
    """Reveal tokens together as long as their entropies bound the error by this many nats."""
    unmasking: UnmaskingRule | None = None
    """The rule that chooses which tokens of a block a pass reveals, from `bd3lm.sampling`. The five fields
    above are shortcuts for the usual rules. The default is first-hitting: one token a pass, in the model's
    order."""
    projection: str = "sampling"
    """How SSD-LM turns its network's distributions into almost one-hot vectors: sampling, greedy or
    multi_hot."""
    speculation: Speculation | None = None
    """Write several tokens a pass without changing the distribution of the texts: the model guesses tokens,
    and later passes verify them. Give the number of guesses (such as 3), "auto", "off", or a `Speculation`
    for all options. The default is "auto" for a drafter and off for other models."""
    regex: str | None = None
    """Write only text that matches this regular expression as a whole, after the prompt. For the causal law.
    Needs llguidance, which comes with bd3lm[serve]."""
    json_schema: str | None = None
    """Write JSON that follows this schema, given as a text or a mapping. For the causal law; needs llguidance
    too."""
    logit_bias: tuple[tuple[int, float], ...] | None = None
    """Add numbers to the logits of some tokens before one is drawn: a mapping from token ids to numbers from
    -100, which bans a token, to 100. For the causal law. Reported log-probabilities do not include it."""
    stop_at_eos: bool = True
    """End a text at the end token."""
    eos_id: int | None = None
    """The end token. The default is the tokenizer's."""
    stop: tuple[str, ...] = ()
    """End a text where one of these strings appears in the text written after the last given token. Give one
    string or a sequence of them."""
    entropy_floor: float | None = None
    """End a text if its last tokens have less entropy than this, in nats. The paper uses 4."""
    entropy_window: int = 256
    """How many of the last tokens `entropy_floor` looks at."""
    redraws: int = 0
    """How often a text below the entropy floor is drawn again instead of ended."""
    stride: int | None = None
    """Tokens written at a time past the context, for a network of one block. By default half the context."""
    cache: bool = True
    """Keep keys and values between passes. Without, each pass computes the context again."""
    fills: int | None = None
    """How many fills to draw for a template with text after its gaps; one of them is chosen, with a
    probability that depends on how well the text after it fits. 1 ignores that text. The default is 16 if
    fills can be weighed, else 1."""
    alternatives: int | None = None
    """Report the log-probability of each token when it was revealed, before temperature and nucleus, and this
    many of the likeliest tokens there: 0 to 20. By default nothing is reported."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not _is_left_open(name, value) and (not is_whole(value) or value < 1):
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
        for name in ("seed", "redraws", "eos_id"):
            value = getattr(self, name)
            if not _is_left_open(name, value) and not is_whole(value):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if self.alternatives is not None:
            check_alternatives(self.alternatives)
        for name in ("temperature", "top_p", "entropy_floor", "remask", "confidence", "entropy_bound"):
            value = getattr(self, name)
            if not _is_left_open(name, value) and not is_number(value):
                raise ValueError(f"{name} must be a number, got {value!r}")
        self._check_unmasking()
        if self.speculation is not None:
            object.__setattr__(self, "speculation", Speculation.of(self.speculation))
        object.__setattr__(self, "stop", stop_strings(self.stop))
        self._check_grammar()
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        for name in ("stop_at_eos", "cache"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.eos_id is not None and not self.stop_at_eos:
            raise ValueError(f"eos_id is for stop_at_eos, which is off, got {self.eos_id}")
        if self.projection not in list(members := Projection.members()):
            raise ValueError(f"projection must be one of {', '.join(members)}, got {self.projection!r}")
        self.sharpening()  # these two check their own values
        self.stopping()

    def _check_unmasking(self) -> None:
        """Refuse invalid settings of what a pass reveals."""
        if not isinstance(self.unmasking, Planned | Adaptive | None):
            raise ValueError(
                f"unmasking must be a rule of bd3lm.sampling such as FirstHitting() or Ancestral(5000), got "
                f"{self.unmasking!r}"
            )
        if self.remask is not None and self.steps is None:
            raise ValueError(f"remask needs steps, the number of steps for each block, got {self.remask}")
        if self.remask is not None and not 0.0 <= self.remask <= 1.0:
            raise ValueError(f"remask must lie in [0, 1], got {self.remask}")
        if self.confidence is not None and not 0.0 < self.confidence <= 1.0:
            raise ValueError(f"confidence must lie in (0, 1], got {self.confidence}")
        if self.entropy_bound is not None and not self.entropy_bound >= 0.0:
            raise ValueError(f"entropy_bound must not be negative, got {self.entropy_bound}")

    def _check_grammar(self) -> None:
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", _as_json(self.json_schema))
        for name in ("regex", "json_schema"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a text, got {value!r:.80}")
        if self.regex is not None and self.json_schema is not None:
            raise ValueError("only one of regex and json_schema may be given, got both")

    @property
    def is_guided(self) -> bool:
        """Whether a grammar constrains the texts."""
        return self.regex is not None or self.json_schema is not None

    @classmethod
    def of(cls, settings: "Settings | None", changes: Mapping[str, object]) -> "Settings":
        """Settings with some fields changed, by name."""
        if settings is not None and not isinstance(settings, cls):
            raise ValueError(f"settings must be a Settings, or fields of it by name, got {settings!r}")
        names = [each.name for each in fields(cls)]
        for name in changes:
            if name not in names:
                raise ValueError(_no_setting(name, names))
        known: dict[str, Any] = dict(changes)
        return replace(settings or cls(), **known)

    def by_rule(self, lean: float) -> "Settings":
        """The same settings with the shortcuts replaced by their unmasking rule, by default first-hitting in
        an order with this lean."""
        chosen = [name for name in _WAYS if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError(f"only one of {', '.join(_WAYS)} may be given, got {' and '.join(chosen)}")
        unsaid: dict[str, Any] = dict.fromkeys(("steps", *UNMASKING))
        return replace(self, **{**unsaid, "unmasking": self._rule(lean)})

    def _rule(self, lean: float) -> UnmaskingRule:
        if self.unmasking is not None:
            return self.unmasking
        if self.steps is not None and self.remask is not None:
            return Remasking(steps=self.steps, eta=self.remask)
        if self.steps is not None:
            return Ancestral(self.steps)
        if self.confidence is not None:
            return MostConfident(threshold=self.confidence)
        if self.entropy_bound is not None:
            return EntropyBound(self.entropy_bound)
        return FirstHitting(self.tokens_per_pass or 1, lean)

    def of_writer(self, own: Collection[str] = ()) -> "Settings":
        """A copy that keeps only the fields that decide how a writer is built, and resets those of single
        requests, except the fields in `own`, which the method gives to its writer."""
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
            "fills",
            *SHARPENING,
        )
        kept = {name: getattr(plain, name) for name in aside if name not in own}
        # Only whether there is a grammar or a bias matters, not which.
        regex, bias = "" if self.is_guided else None, () if self.logit_bias is not None else None
        return replace(self, regex=regex, json_schema=None, logit_bias=bias, **kept)

    def check_floor(self, vocab_size: int) -> None:
        """Refuse an entropy floor that no text of this vocabulary can reach."""
        tokens = vocab_size - 1  # the mask is never written
        highest = math.log(min(self.entropy_window, tokens))
        if self.entropy_floor is not None and self.entropy_floor > highest:
            raise ValueError(
                f"entropy_floor must be at most {highest:.2f}, the largest entropy that "
                f"{self.entropy_window} tokens from a vocabulary of {tokens:,} can have, or every text falls "
                f"below it, got {self.entropy_floor:g}"
            )

    def sharpening(self) -> Sharpening:
        """The temperature, top-k and nucleus of these settings."""
        return Sharpening(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_p_rule=self.top_p_rule,
        )

    def stopping(self, *, eos_id: int | None = None, find_end: FindEnd | None = None) -> Stopping:
        """The rules that end a text. `eos_id` is the tokenizer's, for settings without one."""
        own = self.eos_id if self.eos_id is not None or not self.stop_at_eos else eos_id
        return Stopping(
            eos_id=own,
            find_end=find_end,
            entropy_floor=self.entropy_floor,
            entropy_window=self.entropy_window,
            redraws=self.redraws,
        )

    def projection_rule(self) -> Projection:
        """The projection with this name, with the nucleus if it has one."""
        member: Any = Projection.members()[self.projection]
        has_nucleus = "top_p" in {each.name for each in fields(member)}
        return member(top_p=self.sharpening().top_p) if has_nucleus else member()

    def refuse(self, *names: str, why: str) -> None:
        """Refuse settings that have no effect for a method."""
        for name in names:
            if getattr(self, name) != getattr(Settings(), name):
                raise ValueError(f"{name} must be left at its default, got {getattr(self, name)}: {why}")


def _bias(asked: Any) -> tuple[tuple[int, float], ...]:
    """Token ids and what to add to their logits, as a tuple that can be part of a key."""
    if not isinstance(asked, Mapping | tuple):
        raise ValueError(f"logit_bias must map token ids to numbers, got {asked!r:.80}")
    pairs = tuple(asked.items() if isinstance(asked, Mapping) else asked)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not is_whole(pair[0]) or pair[0] < 0:
            raise ValueError(f"logit_bias must map token ids to numbers, got {pair!r:.80}")
        if not is_number(pair[1]) or not -100 <= pair[1] <= 100:
            raise ValueError(f"logit_bias must hold numbers from -100 to 100, got {pair[1]!r:.80}")
    return tuple(sorted((int(token), float(added)) for token, added in pairs))


def stop_strings(stop: Any) -> tuple[str, ...]:
    """The stop strings as a tuple; a single string is one."""
    strings = [stop] if isinstance(stop, str) else stop.tolist() if hasattr(stop, "tolist") else stop
    if not isinstance(strings, Sequence):
        raise ValueError(f"stop must be a string or a sequence of strings, got {stop!r}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold strings, none of them empty, got {string!r} in {stop!r}")
        if not _is_unicode(string):  # half of a surrogate pair, as in a broken command-line argument
            raise ValueError(f"stop must be valid Unicode, got {string!r}")
    return tuple(str(string) for string in strings)


def _no_setting(name: str, names: Sequence[str]) -> str:
    """The error for an unknown keyword: our word for it, or similar names."""
    advice = advice_in_python(name)
    if advice is not None:
        return f"{name} is not a setting: {advice}"
    return f"{name} is not a setting{did_you_mean(name, names) or ','} allowed are {', '.join(names)}"


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema must be what JSON can hold: {error}") from None


def _is_left_open(name: str, value: object) -> bool:
    """Whether it is None and None is the field's default."""
    return value is None and getattr(Settings, name) is None


def _is_unicode(string: str) -> bool:
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True
