"""What a language model is, as plain values: its network, its method, and both from and to plain dicts.

Dicts come from files that people write by hand, so all that is wrong with one is said at once, with the
nearest valid name for a misspelt one.
"""

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from numbers import Real
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import Discriminator, TypeAdapter, ValidationError

from bd3lm.models import TransformerConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Method:
    """What every method needs: a mask token, and whether the first token of a text is scored."""

    kind: str
    mask_id: int
    score_first: bool = False
    title: ClassVar[str]
    """What tables call it."""

    def __post_init__(self) -> None:
        raise_problems(self.problems())

    @property
    def writes_past_context(self) -> bool:
        """Whether its texts may be longer than the network's context."""
        return True

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, whatever the network."""
        if self.mask_id < 0:
            yield f"mask_id must be a token id, at least 0, got {self.mask_id}"

    def conflicts(self, network: TransformerConfig) -> Iterator[str]:
        """What keeps this method from working with a network."""
        if self.mask_id >= network.vocab_size:
            yield f"method.mask_id must be below network.vocab_size {network.vocab_size}, got {self.mask_id}"


@dataclass(frozen=True, kw_only=True)
class AutoregressiveMethod(_Method):
    """Next-token prediction. The mask token is never predicted."""

    kind: Literal["autoregressive"] = "autoregressive"
    title = "autoregressive"

    def conflicts(self, network: TransformerConfig) -> Iterator[str]:
        yield from super().conflicts(network)
        if network.time_conditioning:
            yield "network.time_conditioning must be false for an autoregressive method, which has no noise"


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionMethod(_Method):
    """Masked diffusion within blocks, autoregression between them. One block of the whole context is MDLM."""

    kind: Literal["block_diffusion"] = "block_diffusion"
    block_size: int
    causal_clean: bool = False
    """Whether clean tokens attend causally rather than block-causally."""
    previous_token: bool = False
    """Whether a hidden token is shown together with the token before it."""
    lean: float = 0.0
    """How much the order in which a block is revealed leans to the left: a token is e^lean times as likely to
    come next as its right neighbour. 0 is the paper's, uniformly random. Texts are written and likelihoods
    are measured in this order."""
    title = "block diffusion"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.block_size < 1:
            yield f"block_size must be at least 1, got {self.block_size}"
        yield from lean_problems(self.lean)

    def conflicts(self, network: TransformerConfig) -> Iterator[str]:
        yield from super().conflicts(network)
        yield from lean_problems(self.lean, name="method.lean", told_noise=network.time_conditioning)
        if network.context % self.block_size:
            yield f"method.block_size must divide network.context {network.context}, got {self.block_size}"


ProcessName = Literal["absorbing", "uniform"]
ScheduleName = Literal["linear", "square", "square_root", "logarithmic", "cosine"]


@dataclass(frozen=True, kw_only=True)
class ScoreEntropyMethod(_Method):
    """SEDD: scores of the whole context, under noise that masks tokens or replaces them by random ones."""

    kind: Literal["score_entropy"] = "score_entropy"
    title = "SEDD"
    process: ProcessName = "absorbing"

    @property
    def writes_past_context(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class D3PMMethod(_Method):
    """D3PM: the whole context in T discrete steps, under noise of either kind."""

    kind: Literal["d3pm"] = "d3pm"
    title = "D3PM"
    process: ProcessName = "absorbing"
    steps: int = 1000
    """T, of the bound and of the sampler."""
    schedule: ScheduleName = "linear"

    @property
    def writes_past_context(self) -> bool:
        return self.process == "absorbing"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.steps < 1:
            yield f"steps must be at least 1, got {self.steps}"


@dataclass(frozen=True, kw_only=True)
class SimplexMethod(_Method):
    """SSD-LM: Gaussian diffusion of a block on the simplex, after clean text. It has no likelihood."""

    kind: Literal["simplex"] = "simplex"
    title = "SSD-LM"
    block_size: int = 25
    simplex_scale: float = 5.0
    """K of the almost one-hot vectors, whose entries are ±K."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.block_size < 1:
            yield f"block_size must be at least 1, got {self.block_size}"
        if not 0.0 < self.simplex_scale < math.inf:
            yield f"simplex_scale must be positive and finite, got {self.simplex_scale}"

    def conflicts(self, network: TransformerConfig) -> Iterator[str]:
        yield from super().conflicts(network)
        if self.block_size > network.context:
            yield (
                f"method.block_size must be at most network.context {network.context}, got {self.block_size}"
            )


# A new method is a dataclass with a `kind` of its own, added here.
Method = Annotated[
    AutoregressiveMethod | BlockDiffusionMethod | ScoreEntropyMethod | D3PMMethod | SimplexMethod,
    Discriminator("kind"),
]


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """A network and the method it is trained and sampled by."""

    network: TransformerConfig
    method: Method

    def __post_init__(self) -> None:
        raise_problems(self.method.conflicts(self.network))

    @property
    def title(self) -> str:
        """What tables call the model."""
        method = self.method
        if isinstance(method, BlockDiffusionMethod):
            leaning = f", lean {method.lean:g}" if method.lean else ""
            if method.block_size == self.network.context:
                return f"diffusion, one block (MDLM){leaning}"
            return f"{method.title}, blocks of {method.block_size}{leaning}"
        uniform = getattr(method, "process", None) == "uniform"
        return f"{method.title}, uniform noise" if uniform else method.title


def config_to_dict(config: LanguageModelConfig) -> dict[str, Any]:
    """The config as plain values, ready for JSON or YAML."""
    return asdict(config)


def config_from_dict(data: Mapping[str, Any], *, where: str = "config") -> LanguageModelConfig:
    """The config that `config_to_dict` gave; `where` names the data's origin in errors."""
    return parse(LanguageModelConfig, data, where=where)


class SettingsError(ValueError):
    """All that is wrong with some settings, and which of their keys nothing takes."""

    def __init__(self, message: str, unknown_keys: Collection[str]) -> None:
        super().__init__(message)
        self.unknown_keys = frozenset(unknown_keys)
        """With dots, from the outermost: method.maskng."""


def parse(kind: type[T], data: Mapping[str, Any], *, where: str) -> T:
    """A dataclass from plain values, nested ones included; one SettingsError says all that is wrong.

    A field may be a dataclass, one or None, or a union of several told apart by their `kind`.
    """
    found = list(_key_problems(kind, data, ""))
    problems = [f"{problem.place}: {problem.what}" for problem in found]
    try:
        parsed = TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        errors = [dict(details) for details in error.errors(include_url=False)]
        problems += [_describe(details, data) for details in errors if not _told(details)]
    if problems:
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SettingsError(
            "\n  ".join([f"{where} has {count}:", *problems]),
            [problem.place for problem in found if problem.is_unknown_key],
        )
    return parsed


def did_you_mean(word: object, options: Collection[str]) -> str:
    """A question with the nearest of the options, or nothing when none is near."""
    near = difflib.get_close_matches(str(word), options, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def lean_problems(lean: float, *, name: str = "lean", told_noise: bool = False) -> Iterator[str]:
    """What is wrong with a lean; `told_noise` for a network that is told the noise level.

    `bd3lm.diffusion.check_lean` checks the number alone in the same way; a config may not import it.
    """
    is_number = isinstance(lean, Real) and not isinstance(lean, bool)
    if not is_number or not 0.0 <= lean <= 1e6:
        yield f"{name} must be a number from 0 to 1e6, got {lean!r}"
    elif lean and told_noise:
        yield (
            f"{name} must be 0 for a network that is told the noise level, since an order that leans has "
            f"none that all places share, got {lean:g}"
        )


def raise_problems(problems: Iterator[str]) -> None:
    """Raise one ValueError with all the problems, if there are any."""
    if found := list(problems):
        raise ValueError("; ".join(found))


class _Problem(NamedTuple):
    """Something wrong at a place in the settings."""

    place: str
    what: str
    is_unknown_key: bool = False


def _key_problems(kind: Any, data: object, path: str) -> Iterator[_Problem]:
    """Keys that no field takes and unknown kinds, about which pydantic says nothing or too little."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if not isinstance(data, Mapping):
        return
    if isinstance(kind, UnionType):
        choices = [member for member in get_args(kind) if is_dataclass(member)]
        if len(choices) > 1:
            members = {get_args(get_type_hints(choice)["kind"])[0]: choice for choice in choices}
            given = data.get("kind")
            if given not in list(members):
                found = f"got {given!r}{did_you_mean(given, members)}" if "kind" in data else "but is missing"
                yield _Problem(f"{path}kind", f"must be one of {', '.join(map(repr, members))}, {found}")
                return
            choices = [members[given]]
        kind = choices[0] if choices else None
    if not is_dataclass(kind):
        return
    names = [field.name for field in fields(kind)]
    hints = get_type_hints(kind, include_extras=True)
    for key, value in data.items():
        if key in names:
            yield from _number_problems(hints[key], value, f"{path}{key}")
            yield from _key_problems(hints[key], value, f"{path}{key}.")
        else:
            suggestion = did_you_mean(key, names) or ","
            what = f"unknown key{suggestion} allowed are {', '.join(names)}"
            yield _Problem(f"{path}{key}", what, is_unknown_key=True)


def _number_problems(kind: Any, value: object, place: str) -> Iterator[_Problem]:
    """Values that may not be the number they look like: pydantic takes true for 1, and octal 010 for 10."""
    if not any(member in (int, float) for member in get_args(kind) or (kind,)):
        return
    for each in value if isinstance(value, list | tuple) else (value,):
        octal = isinstance(each, str) and re.fullmatch(r"[-+]?0[0-9_]+(\.[0-9_]*)?", each)
        if isinstance(each, bool) or octal:
            yield _Problem(place, f"must be a decimal number, got {each!r}")


def _told(error: Mapping[str, Any]) -> bool:
    """Whether `_key_problems` has said it better: a mapping whose `kind` is missing or unknown."""
    return error["type"] in ("union_tag_invalid", "union_tag_not_found") and isinstance(
        error["input"], Mapping
    )


def _describe(error: Mapping[str, Any], data: object) -> str:
    """One of pydantic's errors as `field: what is allowed, what was given`."""
    place = ".".join(_path(error["loc"], data))
    place = f"{place}: " if place else ""
    match error["type"]:
        case "missing":
            return f"{place}must be given, but is missing"
        case "value_error":  # from a __post_init__, which names the field and the value
            return f"{place}{error['ctx']['error']}"
    return f"{place}{error['msg'][:1].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _path(location: tuple[int | str, ...], data: object) -> list[str]:
    """The keys that lead to an error: pydantic's location without the names of chosen union members."""
    path = []
    for index, part in enumerate(location):
        if isinstance(data, Mapping) and part == data.get("kind"):
            continue
        path.append(str(part))
        if isinstance(data, Mapping) and index < len(location) - 1:
            data = data.get(part)
    return path
