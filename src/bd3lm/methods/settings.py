"""How texts are written, as users say it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from bd3lm.diffusion import Projection, is_number, is_whole
from bd3lm.diffusion.categorical import NucleusRule
from bd3lm.parsing import did_you_mean
from bd3lm.sampling import Adaptive, Planned, Sharpening, Stopping, UnmaskingRule
from bd3lm.sampling.stopping import FindEnd


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
    top_p: float | None = None
    """Draw from the likeliest tokens that hold this much probability; 1 draws from the model itself. By
    default the paper's: 0.9, for SEDD 0.99, for SSD-LM 0.95."""
    top_p_rule: NucleusRule = "inclusive"
    """Whether the token that crosses top_p is kept; the reference implementation leaves it out."""
    unmasking: UnmaskingRule | None = None
    """Which tokens of a block a pass reveals. By default one, first-hitting, in the model's own order."""
    steps: int | None = None
    """Steps of SEDD (by default 1,000), of D3PM (as trained), of SSD-LM for each block (1,000)."""
    projection: str = "sampling"
    """How SSD-LM makes almost one-hot vectors of what its network says: sampling, greedy or multi_hot."""
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
        for name in ("temperature", "top_p", "entropy_floor"):
            value = getattr(self, name)
            if not _is_left_open(name, value) and not is_number(value):
                raise ValueError(f"{name} must be a number, got {value!r}")
        object.__setattr__(self, "stop", stop_strings(self.stop))
        for name in ("stop_at_eos", "cache"):
            value = getattr(self, name)
            if not isinstance(value, bool | np.bool_):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if not isinstance(self.unmasking, Planned | Adaptive | None):
            raise ValueError(
                f"unmasking must be a rule of bd3lm.sampling such as FirstHitting() or Ancestral(5000), got "
                f"{self.unmasking!r}"
            )
        if self.eos_id is not None and not self.stop_at_eos:
            raise ValueError(f"eos_id is for stop_at_eos, which is off, got {self.eos_id}")
        if self.projection not in list(members := Projection.members()):
            raise ValueError(f"projection must be one of {', '.join(members)}, got {self.projection!r}")
        self.sharpening()  # these two say what is wrong with their parts
        self.stopping()

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
            top_p=1.0 if self.top_p is None else self.top_p,
            top_p_rule=self.top_p_rule,
        )

    def stopping(self, *, eos_id: int | None = None, find_end: FindEnd | None = None) -> Stopping:
        """When a text ends. `eos_id` is the tokenizer's, for settings that name none."""
        own = self.eos_id if self.eos_id is not None or not self.stop_at_eos else eos_id
        return Stopping(
            eos_id=own,
            find_end=find_end,
            entropy_floor=self.entropy_floor,
            entropy_window=self.entropy_window,
            redraws=self.redraws,
        )

    def projection_rule(self) -> Projection:
        """The projection by its kind, with the nucleus where it has one."""
        member: Any = Projection.members()[self.projection]
        has_nucleus = "top_p" in {each.name for each in fields(member)}
        return member(top_p=self.sharpening().top_p) if has_nucleus else member()

    def refuse(self, *names: str, why: str) -> None:
        """Refuse settings that would do nothing for a method."""
        for name in names:
            if getattr(self, name) != getattr(Settings(), name):
                raise ValueError(f"{name} must be left at its default, got {getattr(self, name)}: {why}")


def stop_strings(stop: Any) -> tuple[str, ...]:
    """One string, or several in a sequence, as a tuple."""
    strings = [stop] if isinstance(stop, str) else stop.tolist() if hasattr(stop, "tolist") else stop
    if not isinstance(strings, Sequence):
        raise ValueError(f"stop must be a string or a sequence of strings, got {stop!r}")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"stop must hold strings, none of them empty, got {string!r} in {stop!r}")
        if not _is_unicode(string):  # half of a surrogate pair, as a broken argument of a command has it
            raise ValueError(f"stop must be valid Unicode, got {string!r}")
    return tuple(str(string) for string in strings)


def _is_left_open(name: str, value: object) -> bool:
    """True if it is None, and None is what the field is by default."""
    return value is None and getattr(Settings, name) is None


def _is_unicode(string: str) -> bool:
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True
