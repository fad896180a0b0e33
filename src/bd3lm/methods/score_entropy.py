"""SEDD: scores of a whole context, trained by denoising score entropy (Lou et al. 2024)."""

from dataclasses import dataclass

from bd3lm.methods.base import Frame, NoisedTraining
from bd3lm.methods.settings import Settings
from bd3lm.methods.whole_context import CorruptionMethod
from bd3lm.models import Denoiser
from bd3lm.objectives import ScoreEntropy
from bd3lm.sampling import AnalyticWriter, Writer


@dataclass(frozen=True, kw_only=True)
class ScoreEntropyMethod(CorruptionMethod):
    """SEDD: scores of the whole context, under noise that masks tokens or replaces them by random ones."""

    kind = "score_entropy"
    title = "SEDD"
    default_nucleus = 0.99
    default_steps = 1000
    reference_tells_noise = True

    def objective(self, training: NoisedTraining, frame: Frame) -> ScoreEntropy:
        process = self.forward_process(frame)
        return ScoreEntropy(
            process=process, mask_id=frame.mask_id, schedule=process.log_linear, levels=training.levels
        )

    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        settings.refuse("unmasking", "projection", "stride", "cache", why="SEDD writes a whole context")
        process = self.forward_process(frame)
        return AnalyticWriter(
            network,
            mask_id=frame.mask_id,
            context=frame.context,
            process=process,
            schedule=process.log_linear,
            steps=settings.steps or self.default_steps,
            sharpening=settings.sharpening(),
        )

    @property
    def writes_past_context(self) -> bool:
        return False
