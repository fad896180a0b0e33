"""Everything a training run needs, as plain values: what a YAML file or a preset says.

A recipe holds no objects, only numbers and names; `build` turns it into a run. Where a choice has options of
its own (the method, how masks are drawn) it is a union told apart by `kind`, so that no option exists where
it would do nothing.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import Discriminator

from bd3lm.config import ProcessName, ScheduleName, lean_problems, parse, raise_problems
from bd3lm.diffusion import ClipSearch
from bd3lm.training import OptimizerSettings, TrainSettings


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Where the tokens are."""

    path: str = "builtin"
    """A folder that `bd3lm data prepare` wrote; or builtin, prepared on the way."""
    context: int = 1024
    bos_eos: bool = False
    """Put BOS and EOS at the ends of each sequence, as MDLM does."""
    skip: int | None = None
    """Sequences of the order to begin after. By default a stage begins where the one before it stopped."""
    builtin_vocabulary: int = 1024
    """Size of the BPE trained for the built-in corpus."""
    validation_sequences: int | None = None
    """How many held-out sequences to validate on; by default all."""
    validation_batch: int = 16

    def __post_init__(self) -> None:
        for name in ("context", "validation_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.builtin_vocabulary < 258:
            raise ValueError(
                "builtin_vocabulary must be at least 258 (256 bytes and two special tokens), "
                f"got {self.builtin_vocabulary}"
            )
        if self.validation_sequences is not None and self.validation_sequences < 1:
            raise ValueError(
                f"validation_sequences must be at least 1, or null for all, got {self.validation_sequences}"
            )
        if self.skip is not None and self.skip < 0:
            raise ValueError(f"skip must not be negative, got {self.skip}")


@dataclass(frozen=True, kw_only=True)
class NetworkRecipe:
    """The shape of the network; vocabulary and context come from the data."""

    size: str = "small"
    """tiny, small or medium; the fields below replace parts of it."""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    dropout: float = 0.1
    tied: bool = False
    adaln: bool = False
    time_conditioning: bool = False
    initialisation: Literal["gpt2", "identity"] = "gpt2"
    """Small weights everywhere, or residual branches that add nothing and tokens that are far apart."""

    @property
    def shape(self) -> dict[str, Any]:
        """What replaces parts of `size`: the fields that are given, but for the first weights."""
        fields = asdict(self)
        return {
            name: value
            for name, value in fields.items()
            if name not in ("size", "initialisation") and value is not None
        }


@dataclass(frozen=True, kw_only=True)
class TimesMasking:
    """Uniform times under a noise schedule."""

    kind: Literal["times"] = "times"
    schedule: ScheduleName = "linear"


@dataclass(frozen=True, kw_only=True)
class DiscreteMasking:
    """T discrete steps under a noise schedule."""

    kind: Literal["discrete"] = "discrete"
    steps: int
    schedule: ScheduleName = "linear"


@dataclass(frozen=True, kw_only=True)
class ClippedMasking:
    """Mask rates uniform on [low, high]; with `search`, the range of least variance, found as it goes."""

    kind: Literal["clipped"] = "clipped"
    low: float = 0.0
    high: float = 1.0
    weight: Literal["reference", "derivative", "paper", "flat"] = "reference"
    redraw: bool = False
    search: ClipSearch | None = None


@dataclass(frozen=True, kw_only=True)
class CountsMasking:
    """Masks by how many tokens they hide."""

    kind: Literal["counts"] = "counts"
    complementary: bool = False
    learn_proposal: bool = False
    lean: float = 0.0
    """Train for an order that leans to the left; 0 trains for all orders alike."""
    weight: Literal["nelbo", "flat"] = "nelbo"
    """The weight of a hidden token: that of the bound, or 1, which has less noise but gives no bound."""


MaskingRecipe = Annotated[
    TimesMasking | DiscreteMasking | ClippedMasking | CountsMasking, Discriminator("kind")
]


@dataclass(frozen=True, kw_only=True)
class AutoregressiveRecipe:
    """Next-token prediction."""

    kind: Literal["autoregressive"] = "autoregressive"
    score_first: bool = False
    random_batch: bool = False
    """The paper's case study: keep each token's loss with a probability drawn for its sequence."""


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionRecipe:
    """Block diffusion; MDLM when no block size is given."""

    kind: Literal["block_diffusion"] = "block_diffusion"
    block_size: int | None = None
    """Tokens in a block; by default the whole context is one block."""
    masking: MaskingRecipe = field(default_factory=CountsMasking)
    score_first: bool = False
    causal_clean: bool = False
    previous_token: bool = False
    """Show the network a hidden token as the mask plus the token before it."""
    lean: float = 0.0
    """The order in which the trained model reveals a block when it writes and is measured, in validation too:
    0 is uniformly random, with more the left comes first. Training itself has `masking.lean`."""
    next_token: float = 0.0
    """Weight of a next-token loss on the clean half, which must then be causal."""
    algorithm: Literal["single_pass", "two_pass"] = "single_pass"
    strata: Literal["permuted", "ordered", "none"] = "permuted"


@dataclass(frozen=True, kw_only=True)
class ScoreEntropyRecipe:
    """SEDD."""

    kind: Literal["score_entropy"] = "score_entropy"
    process: ProcessName = "absorbing"
    score_first: bool = False


@dataclass(frozen=True, kw_only=True)
class D3PMRecipe:
    """D3PM."""

    kind: Literal["d3pm"] = "d3pm"
    process: ProcessName = "absorbing"
    steps: int = 1000
    """T."""
    schedule: ScheduleName = "linear"
    auxiliary: float = 0.0
    """λ, the weight of a cross-entropy beside the bound."""
    score_first: bool = False


@dataclass(frozen=True, kw_only=True)
class SimplexRecipe:
    """SSD-LM."""

    kind: Literal["simplex"] = "simplex"
    block_size: int = 25
    """The last block of a sequence is cut where the sequence ends."""
    steps: int = 5000
    """How finely times are drawn in training."""
    simplex_scale: float = 5.0
    score_first: bool = False


MethodRecipe = Annotated[
    AutoregressiveRecipe | BlockDiffusionRecipe | ScoreEntropyRecipe | D3PMRecipe | SimplexRecipe,
    Discriminator("kind"),
]


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    """How many checkpoints are kept."""

    keep_last: int = 2
    keep_best: int = 1


@dataclass(frozen=True, kw_only=True)
class TrackerRecipe:
    """Who is told besides metrics.csv."""

    tensorboard: bool = False
    wandb_project: str | None = None
    nelbo_variance_batches: int = 0
    """Measure the variance of the training loss over blocks on this many held-out batches; 0 does not."""
    gradient_variance_batches: int = 0
    """Measure the gradient's variance over this many batches at validation; 0 does not."""

    def __post_init__(self) -> None:
        for name in ("nelbo_variance_batches", "gradient_variance_batches"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative (0 measures none), got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run."""

    train: TrainSettings
    method: MethodRecipe
    data: DataRecipe = field(default_factory=DataRecipe)
    network: NetworkRecipe = field(default_factory=NetworkRecipe)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    trackers: TrackerRecipe = field(default_factory=TrackerRecipe)
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """auto is one process alone, or DDP under torchrun."""
    start_from: str | None = None
    """A checkpoint whose (EMA) weights training starts from, with a fresh optimizer; also --from."""

    def __post_init__(self) -> None:
        raise_problems(self._conflicts())

    def _conflicts(self) -> Iterator[str]:
        method, context = self.method, self.data.context
        if self.trackers.gradient_variance_batches == 1:
            yield "trackers.gradient_variance_batches must be 0 or at least 2, got 1"
        if isinstance(method, AutoregressiveRecipe) and self.network.time_conditioning:
            yield "network.time_conditioning must be false for an autoregressive method"
        if isinstance(method, D3PMRecipe | SimplexRecipe) and method.steps < 1:
            yield f"method.steps must be at least 1, got {method.steps}"
        if isinstance(method, D3PMRecipe) and not 0.0 <= method.auxiliary < math.inf:
            yield f"method.auxiliary must be finite and not negative, got {method.auxiliary}"
        if isinstance(method, SimplexRecipe):
            if not 1 <= method.block_size <= context:
                yield f"method.block_size must lie in 1..data.context {context}, got {method.block_size}"
            if not 0.0 < method.simplex_scale < math.inf:
                yield f"method.simplex_scale must be positive and finite, got {method.simplex_scale}"
            if self.trackers.nelbo_variance_batches:
                yield "trackers.nelbo_variance_batches must be 0 for method.kind simplex, which has no NELBO"
        if not isinstance(method, BlockDiffusionRecipe):
            return
        size = context if method.block_size is None else method.block_size
        if size < 1 or context % size:
            yield f"method.block_size must divide data.context {context}, got {size}"
        if not 0.0 <= method.next_token < math.inf:
            yield f"method.next_token must be finite and not negative, got {method.next_token}"
        elif method.next_token and not method.causal_clean:
            yield "method.next_token needs method.causal_clean: otherwise tokens see what they predict"
        search = method.masking.search if isinstance(method.masking, ClippedMasking) else None
        if search is not None and search.every % self.train.validate_every:
            yield (
                f"method.masking.search.every must be a multiple of train.validate_every "
                f"{self.train.validate_every}, when the search is made, got {search.every}"
            )
        if method.algorithm == "two_pass" and self.parallel == "fsdp":
            yield "method.algorithm two_pass does not run under parallel fsdp, which frees keys early"
        told_noise = self.network.time_conditioning
        yield from lean_problems(method.lean, name="method.lean", told_noise=told_noise)
        if isinstance(method.masking, CountsMasking):
            yield from _counts_problems(method.masking)
            if told_noise:
                yield (
                    "network.time_conditioning needs masks drawn by time: method.masking.kind counts draws "
                    "none"
                )


def _counts_problems(masking: CountsMasking) -> Iterator[str]:
    """Options of masks by count that do not go together."""
    if masking.lean:
        yield from lean_problems(masking.lean, name="method.masking.lean")
        for name in ("complementary", "learn_proposal"):
            if getattr(masking, name):
                yield f"method.masking.{name} needs method.masking.lean 0, got {masking.lean:g}"
    if masking.learn_proposal and masking.complementary:
        yield "method.masking.learn_proposal needs one noisy copy: method.masking.complementary must be false"
    if masking.learn_proposal and masking.weight != "nelbo":
        yield f"method.masking.learn_proposal needs method.masking.weight nelbo, got {masking.weight}"


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain values, ready for YAML."""
    plain: dict[str, Any] = _plain(asdict(recipe))
    return plain


def recipe_from_dict(data: Mapping[str, Any], *, where: str) -> Recipe:
    """A recipe from plain values; one ValueError says all that is wrong."""
    return parse(Recipe, data, where=where)


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, later ones winning. A `kind` that changes drops the options of the kind before."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            before = merged.get(key)
            if isinstance(value, Mapping) and isinstance(before, Mapping):
                changed = "kind" in value and value["kind"] != before.get("kind")
                merged[key] = merge({} if changed else before, value)
            else:
                merged[key] = merge(value) if isinstance(value, Mapping) else value
    return merged


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`--train.steps 100 --method.masking.kind=times` as a nested dict; the values of text fields are
    taken as they are, all others are read as YAML."""
    overrides: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ValueError(f"expected --any.field value, got {word!r}")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{name} needs a value, got none")
            text = rest.pop(0)
        target = overrides
        path = name.replace("-", "_").split(".")
        *parents, leaf = path
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"--{name} sets a part of something that another flag sets whole")
        try:
            target[leaf] = _flag_value(text, _types_at(path) or _types_at(path[1:]))  # after a stage's name
        except ValueError as error:
            raise ValueError(f"--{name}: {error}") from None
    return overrides


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file that people write by hand; a ValueError names the file."""
    try:
        data = _load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config must be a YAML file, got {path}, which does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, got a file that is not: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a mapping of settings, got {type(data).__name__}")
    return data


_DECIMAL = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"""(?:[-+]?(?:0|[1-9][0-9_]*)\.[0-9_]*(?:[eE][-+][0-9]+)?
            |\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?
            |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
}
_DATE = "tag:yaml.org,2002:timestamp"


class _SettingsLoader(yaml.SafeLoader):
    """YAML 1.1 with decimal numbers only, so that 010 is not 8 and 1:30 not 90, and with every key once.

    What it takes for a number YAML 1.1 does too, so a text that `yaml.safe_dump` wrote comes back as one.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, _DECIMAL.get(tag, pattern)) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ValueError(f"{key.value} is given twice, again in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return node


def _load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_SettingsLoader)


def _types_at(path: Sequence[str]) -> list[Any]:
    """The types that a field of a recipe may have, by its path of names; none if there is no such field."""
    kinds: list[Any] = [Recipe]
    for name in path:
        hints = [get_type_hints(kind) for kind in kinds if is_dataclass(kind)]
        found = [hint[name] for hint in hints if name in hint]
        kinds = [
            member for each in found for member in (get_args(each) if isinstance(each, UnionType) else [each])
        ]
    return kinds


def _flag_value(text: str, types: Sequence[Any]) -> Any:
    """A flag's value for a field of one of the types; the recipe reports what is wrong with it."""
    if NoneType in types and text.lower() in ("null", "none", "~", ""):
        return None
    if str in types:
        return text
    if int in types and re.fullmatch(r"[-+]?[1-9][0-9]*(\.[0-9]*)?[eE]\+?[0-9]+", text):
        return float(text)  # which is an integer where it is whole
    try:
        return _load_yaml(text)
    except yaml.YAMLError:
        return text


def _plain(value: Any) -> Any:
    """Tuples as lists, so that YAML needs no tags."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
