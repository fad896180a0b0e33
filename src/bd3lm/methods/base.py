"""What a method is: the record saved beside the weights, and all that follows from it.

One file a method. A method of one's own is a frozen dataclass with a `kind` of its own, in any package or
file: it trains, is saved, writes, is measured and is reported without a change here. Where methods differ,
others ask the method; nothing outside this room looks at its class.
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
"""What texts are drawn from: blocks, whose masks are uncovered one after another, or token after token."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What a method must know of the network that it is for."""

    vocab_size: int
    """How many token ids there are, the mask among them."""
    context: int
    mask_id: int
    told_noise: bool = False
    """Whether the network is told the noise level."""
    mask_apart: bool = False
    """Whether the mask comes after the tokens that the network can predict."""
    learns_beside: bool = False
    """Whether the network has additions, which learn while its weights stay as they are."""
    keeps_keys: bool = True
    """Whether the network hands its keys and values to a store, for passes to come."""

    @classmethod
    def of(cls, network: NetworkConfig, mask_id: int) -> "Frame":
        """What a network's config says of it."""
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
    """How a method is trained, as far as that is its own affair. Nothing of it is saved with the model.

    This one is for methods without options of their own.
    """

    def __post_init__(self) -> None:
        raise_problems(self.problems())

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, whatever the method and the network."""
        yield from ()

    @property
    def search(self) -> ClipSearch | None:
        """The search for a range of mask rates that training makes as it goes, if it makes one."""
        return None

    @property
    def mask_range(self) -> tuple[float, float] | None:
        """The range of mask rates that it begins with, for masks drawn from one."""
        return None

    @property
    def not_under_fsdp(self) -> str | None:
        """What of this FSDP cannot do, if anything."""
        return None

    @property
    def variant(self) -> str:
        """What sets this training apart from the method's usual one, to follow its title; mostly nothing."""
        return ""


@dataclass(frozen=True, kw_only=True)
class NoisedTraining(Training):
    """What methods that draw noise levels have in common."""

    strata: Strata = "permuted"
    """How noise levels are spread over the blocks of a batch: evenly, handed out at random or in the order of
    the batch (the paper's way), or drawn one by one."""

    @property
    def levels(self) -> LevelSampler:
        return LevelSampler.spread(self.strata)


@dataclass(frozen=True, kw_only=True)
class Method(Kinded, ABC, family="method"):
    """A method of training and of writing, as plain values."""

    score_first: bool = False
    """Whether the first token of a text is predicted too."""

    title: ClassVar[str]
    """What tables call it."""
    Training: ClassVar[type[Any]] = Training
    """Its own options of training, a frozen dataclass."""
    default_top_p: ClassVar[float] = 0.9
    """The paper's, for texts whose settings name none (Suppl. C.5)."""
    default_steps: ClassVar[int | None] = None
    """Steps that its sampler takes where settings name none; None for a sampler without steps of its own."""
    greedy: ClassVar[Mapping[str, Any]] = MappingProxyType({"top_k": 1, "top_p": 1.0})
    """Settings that take the likeliest token at every place."""
    paper_estimator: ClassVar[str] = "auto"
    """The name of the estimator whose figure the paper prints; "auto" for a method that is not in it."""
    weighs_in_steps: ClassVar[bool] = False
    """Whether its bound is a sum over T steps, each of which weighs T at most, so that one drawn has a finite
    variance. Where noise levels are drawn from 0 on, a rate t weighs 1/t, and there is none."""
    no_likelihood: ClassVar[str | None] = None
    """Why it has no likelihood, nor a bound on one, to be asked for; None where it has."""
    own_estimators: ClassVar[frozenset[str]] = frozenset()
    """Names of estimators that other methods do not have."""
    trains_beside: ClassVar[bool] = False
    """Whether only what a network has beside its weights is trained, and saved."""
    masks_by_rule: ClassVar[bool] = False
    """Whether masking rules draw its masks, so that they can be compared on a trained model."""
    has_order: ClassVar[bool] = False
    """Whether a pass reveals some masks of several, in an order that an unmasking rule decides."""
    writer_draws: ClassVar[frozenset[str]] = frozenset()
    """Settings of how tokens are drawn that are its writer's; others are of each request."""
    concerns_release_only: ClassVar[frozenset[str]] = frozenset()
    """Its fields that change nothing of how it is trained, so that a resumed run may change them."""
    reference_tells_noise: ClassVar[bool] = False
    """Whether the reference implementation always tells its networks the noise level."""
    reference_lacks: ClassVar[frozenset[str]] = frozenset({"score_first"})
    """Its fields that the reference implementation does not have, and that must be as by default there."""

    def __post_init__(self) -> None:
        raise_problems(self.problems())

    # --- what fits ---

    def problems(self) -> Iterator[str]:
        """What is wrong with these values, whatever the network."""
        yield from ()

    def conflicts(self, frame: Frame) -> Iterator[str]:
        """What keeps it from working with a network."""
        yield from ()

    def training_conflicts(self, training: Any, frame: Frame) -> Iterator[str]:
        """What keeps it from being trained so, in the names of a recipe's sections."""
        yield from ()

    def resolved(self, context: int) -> Self:
        """The method with what it leaves to the network's context filled in."""
        return self

    # --- which laws it has ---

    @property
    def laws(self) -> tuple[Law, ...]:
        """The laws that a network trained by it has."""
        return ("block",)

    @property
    def default_law(self) -> Law:
        """The one that it writes in, and is measured in, unless another is asked for."""
        return self.laws[0]

    def under(self, law: Law) -> "Method":
        """The method that writes and measures one of its laws: mostly itself."""
        if law not in self.laws:
            hint = "; only a joint model has both" if len(self.laws) == 1 else ""
            raise ValueError(f"law must be {' or '.join(self.laws)} for {self.title}, got {law!r}{hint}")
        return self

    def after(self, training: Any) -> Self:
        """What a model is that was trained so."""
        return self

    # --- what it is made of ---

    @abstractmethod
    def objective(self, training: Any, frame: Frame) -> Objective:
        """What it is trained with."""

    def validation(self, training: Any, frame: Frame) -> Objective:
        """What it is judged by while it trains: its likelihood, or a bound, whatever it is trained with."""
        return self.objective(training, frame)

    @abstractmethod
    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        """What writes its texts. A setting that would do nothing is refused."""

    @abstractmethod
    def estimator(self, name: str, frame: Frame) -> Estimator:
        """The estimator of its likelihood by that name, "auto" for the best that is quick enough; one that
        would not do is refused with the reason."""

    def one_pass_estimator(self, frame: Frame) -> str:
        """The name of an estimator that takes one pass over a text."""
        return "auto"

    def judging(self, masking: MaskingRule, frame: Frame) -> Objective:
        """What masks drawn by a rule say of its likelihood, for a method that `masks_by_rule`."""
        raise ValueError(f"{self.title} draws no masks by a masking rule, got {masking}")

    def drafts(self, frame: Frame, masks: int | None = None) -> Drafts:
        """Masks behind a text, which draft tokens that its causal law verifies: so many in a group, by
        default its own number."""
        raise ValueError(
            f"acceptance is of drafts, which a drafter makes, and a joint model, got {self.title}, which has "
            "none"
        )

    # --- how it writes ---

    def settled(self, settings: Settings) -> Settings:
        """The settings with what they leave open filled in: the order and the nucleus of the method."""
        if settings.top_p is not None:
            return settings
        return replace(settings, top_p=self.default_top_p)

    def piece(self, context: int) -> int:
        """How many tokens are written together, and cannot depend on later ones."""
        return context

    @property
    def writes_past_context(self) -> bool:
        """Whether its texts may be longer than the network's context."""
        return True

    @property
    def uncovers(self) -> bool:
        """Whether writing uncovers masks one after another, which makes a film."""
        return True

    @property
    def order_lean(self) -> float:
        """How much the order in which it reveals a block leans to the left."""
        return 0.0

    def unmasking(self, frame: Frame) -> BlockReading | None:
        """How its network reads blocks of masks, where texts are written by revealing one after another in
        the order of `order_lean`, and nothing else about it matters to who writes them. None where that is
        not so."""
        return None

    @property
    def can_be_guided(self) -> bool:
        """Whether its texts can be held to a grammar, which has to know the token before each."""
        return False

    def speculation(self, settings: Settings) -> Speculation | None:
        """How its texts are drafted and verified, if they are; refused where it cannot be."""
        asked = settings.speculation
        if asked is None or not asked.is_on:
            return None
        raise ValueError(
            f"speculation must be 'off' for a model of the method {self.title}: drafts come from masks whose "
            "tokens a pass can verify, which drafters, joint models and block diffusion have"
        )

    def fill_weights(self, settings: Settings, frame: Frame) -> FillWeights | str:
        """What weighs several fills of a gap by what follows them, for settled settings; or why nothing does,
        to follow "fills must be 1"."""
        return f"for {self.title}, whose likelihood is only bounded"

    def fills(self, settings: Settings, frame: Frame) -> Fills | None:
        """How many fills are drawn of a template, and what weighs them; None where there is only one. More
        are refused where nothing weighs them."""
        number = DEFAULT_FILLS if settings.fills is None else settings.fills
        weights = "" if number == 1 else self.fill_weights(settings, frame)
        if isinstance(weights, FillWeights):
            return Fills(number, weights)
        if settings.fills is not None and number > 1:
            raise ValueError(f"fills must be 1 {weights}, got {number}")
        return None

    def with_lean(self, lean: float) -> Self:
        """The same with another lean."""
        raise ValueError(f"lean is for block diffusion, whose order can be chosen, got {self.kind}")

    # --- how conversations are learned ---

    def packing(self, context: int) -> Packing:
        """How conversations share a sequence, for a method that can be trained on their answers alone."""
        raise ValueError(
            "conversations are learned by autoregressive models, drafters and block diffusion, got "
            f"{self.title}"
        )

    def tuned_by(self, frame: Frame) -> Any:
        """How it is trained on conversations where nothing else is said: an object of its `Training`."""
        return self.Training()

    # --- how texts are scored ---

    def scoring_unit(self, context: int) -> int:
        """Texts are padded to a multiple of so many tokens."""
        return 1

    def scored_multiple(self, context: int) -> int:
        """Only texts of a multiple of so many tokens have a likelihood."""
        return 1

    # --- how others say it ---

    @property
    def is_causal_lm(self) -> bool:
        """Whether it reads and predicts as any causal language model does, and can be written as one."""
        return False

    def title_for(self, context: int) -> str:
        """Its title, with what tells it from its like."""
        return self.title

    def in_reference(self, context: int) -> dict[str, Any]:
        """Its fields in the config.json of the reference implementation."""
        raise ValueError(
            "the reference's layout holds autoregressive and block diffusion models, got method.kind "
            f"{self.kind}"
        )


def at_least_one(name: str, value: int) -> Iterator[str]:
    """What is wrong with a number that counts something."""
    if not is_whole(value) or value < 1:
        yield f"{name} must be at least 1, got {value!r}"


NELBOS: Mapping[str, LevelSampler] = MappingProxyType(
    {
        "nelbo": LevelSampler(),
        "nelbo:ordered": LevelSampler(assignment="ordered"),
        "nelbo:reference": LevelSampler(assignment="ordered", least=1e-3),
    }
)
"""The estimators that draw noise levels: ours, the paper's, and the reference implementation's."""


def needs_mask_among_tokens(kind: str, frame: Frame) -> Iterator[str]:
    """What is wrong with a mask beside the vocabulary, for methods that know it as a token like others."""
    if frame.mask_apart:
        yield (
            f"method.kind {kind} needs a network whose mask is one of the tokens that it can predict, got a "
            "mask beside them"
        )


def only_estimator(only: Collection[str], name: str, why: str) -> None:
    """Refuse another estimator than those that a method has."""
    if name not in ("auto", *only):
        *others, last = map(repr, only)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"estimator must be {allowed} for {why}, got {name!r}")
