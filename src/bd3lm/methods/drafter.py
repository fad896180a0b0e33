"""A frozen autoregressive model with trained additions that guess its next tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bd3lm.data.packed import Packing
from bd3lm.evaluation import Drafts
from bd3lm.methods.autoregressive import AutoregressiveMethod
from bd3lm.methods.base import Frame, Training, at_least_one
from bd3lm.methods.settings import Settings
from bd3lm.models import AIMS, Aim
from bd3lm.objectives import Drafting
from bd3lm.sampling import Speculation


@dataclass(frozen=True, kw_only=True)
class DrafterTraining(Training):
    """The training options of a drafter."""

    aim: Aim = "soft"
    """What drafts learn: the token that follows ("hard"), the distribution that verifies them ("soft"), or
    the largest overlap with that distribution, which is the acceptance rate ("overlap")."""

    def problems(self) -> Iterator[str]:
        if self.aim not in AIMS:
            yield f"aim must be one of {', '.join(AIMS)}, got {self.aim!r}"

    @property
    def variant(self) -> str:
        return f", {self.aim} targets"


@dataclass(frozen=True, kw_only=True)
class DrafterMethod(AutoregressiveMethod):
    """A frozen next-token model, with low-rank additions that draft tokens at masks behind the text. It
    writes and scores exactly as the model it was made from, to the last bit."""

    kind = "drafter"
    title = "autoregressive, with a drafter"
    Training = DrafterTraining
    trains_beside = True
    concerns_release_only = frozenset()

    masks: int = 3
    """Masks behind a text in training, each of which drafts a token after the one that needs no draft."""

    def problems(self) -> Iterator[str]:
        yield from at_least_one("masks", self.masks)
        if self.score_first:
            yield "score_first must be false for a drafter, whose model is given the first token"

    def conflicts(self, frame: Frame) -> Iterator[str]:
        yield from super().conflicts(frame)
        if not frame.learns_beside:
            yield "network.additions must be at least 1 for a drafter, which trains nothing else, got 0"

    def training_conflicts(self, training: DrafterTraining, frame: Frame) -> Iterator[str]:
        if frame.context % self.masks:
            yield f"method.masks must divide the context {frame.context}, got {self.masks}"

    def objective(self, training: DrafterTraining, frame: Frame) -> Drafting:
        return Drafting(mask_id=frame.mask_id, masks=self.masks, aim=training.aim)

    def packing(self, context: int) -> Packing:
        """Groups of masks begin where a conversation begins. Padding of the last group is never drafted."""
        return Packing(unit=self.masks)

    def tuned_by(self, frame: Frame) -> DrafterTraining:
        return DrafterTraining(aim="overlap")

    def drafts(self, frame: Frame, masks: int | None = None) -> Drafts:
        number = self.masks if masks is None else masks
        if not 1 <= number < frame.context:
            raise ValueError(f"masks must be 1 to {frame.context - 1}, less than a context, got {number}")
        return Drafts(mask_id=frame.mask_id, masks=number, shifted=True, adds=True)

    def settled(self, settings: Settings) -> Settings:
        if settings.speculation is None and settings.cache:  # speculation is why drafters exist
            settings = replace(settings, speculation=Speculation())
        return super().settled(settings)

    def speculation(self, settings: Settings) -> Speculation | None:
        asked = settings.speculation
        return asked if asked is not None and asked.is_on else None

    def validation(self, training: DrafterTraining, frame: Frame) -> Drafting:
        """The nats of the next tokens under the drafts, and how often each place is accepted. The likelihood
        of the model itself does not change."""
        return self.objective(training, frame)
