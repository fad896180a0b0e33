"""The base class of methods. A method is the record saved with the weights, and everything that follows from
it.

Each method has one file. Your own method is a frozen dataclass with its own `kind`, in any package or file.
It trains, saves, writes, is measured and is reported without changes to this package, because other rooms ask
the method where methods differ, and never look at its class.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from bd3lm.data.packed import Packing
from bd3lm.diffusion import ClipSearch, LevelSampler, MaskingRule, Strata, is_whole
from bd3lm.evaluation import Drafts, Estimator
from bd3lm.kinds import Kinded
from bd3lm.methods.settings import DEFAULT_FILLS, Settings
from bd3lm.models import BlockReading, Denoiser, NetworkConfig
from bd3lm.objectives import Objective
from bd3lm.parsing import raise_problems
from bd3lm.sampling import Fills, FillWeights, Speculation, Writer

Law = Literal["block", "causal"]
"""What texts are drawn from: blocks, with masks revealed one by one ("block"), or token by token
("causal")."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What a method must know about its network."""

    vocab_size: int
    """The number of token ids, including the mask."""
    context: int
    mask_id: int
    told_noise: bool = False
    """Whether the network's input includes the noise level."""
    mask_apart: bool = False
    """Whether the mask is an extra token that the network cannot predict."""
    learns_beside: bool = False
    """Whether the network has additions that are trained while its weights stay frozen."""
    keeps_keys: bool = True
    """Whether the network can store keys and values for later passes."""

    @classmethod
    def of(cls, network: NetworkConfig, mask_id: int) -> "Frame":
        """The frame that follows from a network's config."""
        return cls(
            vocab_size=network.input_vocab_size,
            context=network.context,
            mask_id=mask_id,
            told_noise=network.told_noise,
            mask_apart=network.input_vocab_size > network.vocab_size,
            learns_beside=network.learns_beside,
            keeps_keys=network.cache_shape is not None,
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """A method's own training options. They are not saved with the model.

    This base class is for methods without options.
    """

    def __post_init__(self) -> None:
        raise_problems(self.problems())

    def problems(self) -> Iterator[str]:
        """Errors in these values alone, for any method and network."""
        yield from ()

    @property
    def search(self) -> ClipSearch | None:
        """The clip search that training performs as it runs, if any."""
        return None

    @property
    def mask_range(self) -> tuple[float, float] | None:
        """The initial range of mask rates, for masks drawn by rate."""
        return None

    @property
    def not_under_fsdp(self) -> str | None:
        """Why this training cannot run under FSDP; None if it can."""
        return None

    @property
    def variant(self) -> str:
        """A suffix for the method's title that tells this training from the usual one; mostly empty."""
        return ""


@dataclass(frozen=True, kw_only=True)
class NoisedTraining(Training):
    """The options shared by all methods that draw noise levels."""

    strata: Strata = "permuted"
    """How noise levels are spread over the blocks of a batch: evenly and assigned at random ("permuted"),
    evenly in the order of the batch ("ordered", the paper's way), or drawn independently."""

    @property
    def levels(self) -> LevelSampler:
        """The sampler of noise levels."""
        return LevelSampler.spread(self.strata)


@dataclass(frozen=True, kw_only=True)
class Method(Kinded, ABC, family="method"):
    """A method of training and writing, as plain values."""

    score_first: bool = False
    """Whether the model also predicts the first token of a text."""

    title: ClassVar[str]
    """The method's name in tables."""
    Training: ClassVar[type[Any]] = Training
    """Its class of training options, a frozen dataclass."""
    default_top_p: ClassVar[float] = 0.9
    """The nucleus for settings without one: the paper's (Suppl. C.5)."""
    default_steps: ClassVar[int | None] = None
    """Sampling steps for settings that name none. None for a sampler without steps of its own."""
    greedy: ClassVar[Mapping[str, Any]] = MappingProxyType({"top_k": 1, "top_p": 1.0})
    """Settings that always take the likeliest token."""
    paper_estimator: ClassVar[str] = "auto"
    """The estimator of the figure in the paper, by name. "auto" for a method that the paper does not have."""
    weighs_in_steps: ClassVar[bool] = False
    """Whether its bound is a sum over T steps. Each step weighs T at most, so a drawn bound has a finite
    variance. With noise levels drawn from 0 on, a rate t weighs 1/t, and the variance is infinite."""
    no_likelihood: ClassVar[str | None] = None
    """Why it has neither a likelihood nor a bound on one. None if it has one."""
    own_estimators: ClassVar[frozenset[str]] = frozenset()
    """Names of estimators that only this method has."""
    trains_beside: ClassVar[bool] = False
    """Whether only the network's additions are trained and saved."""
    masks_by_rule: ClassVar[bool] = False
    """Whether masking rules draw its masks, so that rules can be compared on a trained model."""
    has_order: ClassVar[bool] = False
    """Whether a pass chooses which masks to reveal, in the order of an unmasking rule."""
    writer_draws: ClassVar[frozenset[str]] = frozenset()
    """Settings of token drawing that belong to its writer instead of to each request."""
    concerns_release_only: ClassVar[frozenset[str]] = frozenset()
    """Fields that do not affect training, so that a resumed run may change them."""
    reference_tells_noise: ClassVar[bool] = False
    """Whether the reference implementation always feeds its networks the noise level."""
    reference_lacks: ClassVar[frozenset[str]] = frozenset({"score_first"})
    """Fields that the reference implementation lacks. They must have their defaults in its format."""

    def __post_init__(self) -> None:
        raise_problems(self.problems())

    # --- what fits ---

    def problems(self) -> Iterator[str]:
        """Errors in these values alone, for any network."""
        yield from ()

    def conflicts(self, frame: Frame) -> Iterator[str]:
        """Reasons why it does not work with a network."""
        yield from ()

    def training_conflicts(self, training: Any, frame: Frame) -> Iterator[str]:
        """Reasons why it cannot be trained with these options, named as in a recipe."""
        yield from ()

    def resolved(self, context: int) -> Self:
        """The method with defaults that depend on the network's context filled in."""
        return self

    # --- which laws it has ---

    @property
    def laws(self) -> tuple[Law, ...]:
        """The laws of a network trained with it."""
        return ("block",)

    @property
    def default_law(self) -> Law:
        """The law that it writes and is measured under by default."""
        return self.laws[0]

    def under(self, law: Law) -> "Method":
        """The method that writes and measures one of its laws, mostly itself."""
        if law not in self.laws:
            hint = "; only a joint model has both" if len(self.laws) == 1 else ""
            raise ValueError(f"law must be {' or '.join(self.laws)} for {self.title}, got {law!r}{hint}")
        return self

    def after(self, training: Any) -> Self:
        """The method of a model after this training."""
        return self

    # --- what it is made of ---

    @abstractmethod
    def objective(self, training: Any, frame: Frame) -> Objective:
        """The training loss."""

    def validation(self, training: Any, frame: Frame) -> Objective:
        """The validation loss: its likelihood or a bound, whatever the training loss is."""
        return self.objective(training, frame)

    @abstractmethod
    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        """The writer of its texts. Refuses a setting that has no effect."""

    @abstractmethod
    def estimator(self, name: str, frame: Frame) -> Estimator:
        """The estimator of its likelihood with this name; "auto" is the best that is fast enough. Refuses an
        unsuitable one, with the reason."""

    def one_pass_estimator(self, frame: Frame) -> str:
        """The name of an estimator that takes one pass over a text."""
        return "auto"

    def judging(self, masking: MaskingRule, frame: Frame) -> Objective:
        """The estimate of its likelihood with masks drawn by a rule, for a method with `masks_by_rule`."""
        raise ValueError(f"{self.title} does not draw masks by a masking rule, got {masking}")

    def drafts(self, frame: Frame, masks: int | None = None) -> Drafts:
        """The masks behind a text that draft tokens for its causal law to verify: `masks` in a group, by
        default as many as the method has."""
        raise ValueError(
            f"acceptance is of drafts, which a drafter or a joint model makes, got {self.title}, which has "
            "none"
        )

    # --- how it writes ---

    def settled(self, settings: Settings) -> Settings:
        """The settings with the method's defaults filled in: its order and its nucleus."""
        if settings.top_p is not None:
            return settings
        return replace(settings, top_p=self.default_top_p)

    def piece(self, context: int) -> int:
        """How many tokens are written together. They cannot depend on later tokens."""
        return context

    @property
    def writes_past_context(self) -> bool:
        """Whether its texts may be longer than the network's context."""
        return True

    @property
    def uncovers(self) -> bool:
        """Whether writing reveals masks one after another, which can be shown as a film."""
        return True

    @property
    def order_lean(self) -> float:
        """The lean of the order in which it reveals a block."""
        return 0.0

    def unmasking(self, frame: Frame) -> BlockReading | None:
        """How its network reads blocks of masks, if texts are written only by revealing masks in the order of
        `order_lean`. None for any other way of writing."""
        return None

    @property
    def can_be_guided(self) -> bool:
        """Whether a grammar can constrain its texts: it must know the token before each."""
        return False

    def speculation(self, settings: Settings) -> Speculation | None:
        """The drafting and verification of its texts, if settings ask for it. Refused if it has none."""
        asked = settings.speculation
        if asked is None or not asked.is_on:
            return None
        raise ValueError(
            f"speculation must be 'off' for a model of the method {self.title}: it takes masks whose tokens "
            "a pass can verify, which drafters, joint models and block diffusion have"
        )

    def fill_weights(self, settings: Settings, frame: Frame) -> FillWeights | str:
        """The weights of several fills of a gap, given settled settings; or the reason why there are none, to
        follow "fills must be 1"."""
        return f"for {self.title}, whose likelihood is only bounded"

    def fills(self, settings: Settings, frame: Frame) -> Fills | None:
        """How many fills of a template to draw and how to weigh them; None for a single fill. Refuses several
        fills that cannot be weighed."""
        number = DEFAULT_FILLS if settings.fills is None else settings.fills
        weights = "" if number == 1 else self.fill_weights(settings, frame)
        if isinstance(weights, FillWeights):
            return Fills(number, weights)
        if settings.fills is not None and number > 1:
            raise ValueError(f"fills must be 1 {weights}, got {number}")
        return None

    def with_lean(self, lean: float) -> Self:
        """The same method with another lean."""
        raise ValueError(f"lean is for block diffusion, whose order can be chosen, got {self.kind}")

    # --- how conversations are learned ---

    def packing(self, context: int) -> Packing:
        """How conversations share a sequence, for a method that can train on answers alone."""
        raise ValueError(
            "only autoregressive models, drafters and block diffusion can learn conversations, got "
            f"{self.title}"
        )

    def tuned_by(self, frame: Frame) -> Any:
        """The default options for training on conversations, an object of its `Training`."""
        return self.Training()

    # --- how texts are scored ---

    def scoring_unit(self, context: int) -> int:
        """Texts are padded to a multiple of this many tokens to be scored."""
        return 1

    def scored_multiple(self, context: int) -> int:
        """Only texts of a multiple of this many tokens have a likelihood."""
        return 1

    # --- how others say it ---

    @property
    def is_causal_lm(self) -> bool:
        """Whether it reads and predicts like any causal language model, and can be saved as one."""
        return False

    def title_for(self, context: int) -> str:
        """Its title, with what tells it apart from similar models."""
        return self.title

    def in_reference(self, context: int) -> dict[str, Any]:
        """Its fields in the config.json of the reference implementation."""
        raise ValueError(
            "the reference's format holds autoregressive and block diffusion models, got method.kind "
            f"{self.kind}"
        )


def at_least_one(name: str, value: int) -> Iterator[str]:
    """The error for a count below 1, if it is."""
    if not is_whole(value) or value < 1:
        yield f"{name} must be at least 1, got {value!r}"


NELBOS: Mapping[str, LevelSampler] = MappingProxyType(
    {
        "nelbo": LevelSampler(),
        "nelbo:ordered": LevelSampler(assignment="ordered"),
        "nelbo:reference": LevelSampler(assignment="ordered", least=1e-3),
    }
)
"""The estimators that draw noise levels: ours, the paper's and the reference implementation's."""


def needs_mask_among_tokens(kind: str, frame: Frame) -> Iterator[str]:
    """The error for a mask outside the vocabulary, for methods that treat it as an ordinary token."""
    if frame.mask_apart:
        yield (
            f"method.kind {kind} needs a network whose mask is one of the tokens that it can predict, got a "
            "mask outside of them"
        )


def only_estimator(only: Collection[str], name: str, why: str) -> None:
    """Refuse an estimator that a method does not have."""
    if name not in ("auto", *only):
        *others, last = map(repr, only)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"estimator must be {allowed} for {why}, got {name!r}")
