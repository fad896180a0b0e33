"""SEDD: scores of a context or of its blocks, trained by denoising score entropy (Lou et al. 2024)."""

from dataclasses import dataclass

from bd3lm.methods.base import Frame, NoisedTraining
from bd3lm.methods.corruption import CorruptionMethod
from bd3lm.methods.settings import UNMASKING, Settings
from bd3lm.models import Denoiser
from bd3lm.objectives import ScoreEntropy
from bd3lm.sampling import AnalyticWriter, Writer


@dataclass(frozen=True, kw_only=True)
class ScoreEntropyMethod(CorruptionMethod):
    """SEDD: scores of the whole context, under noise that masks tokens or replaces them by random tokens.

    With a `block_size` it scores a block given the clean text before it: block diffusion of either process in
    continuous time (`--method.kind score_entropy --method.process uniform --method.block_size 4`).
    """

    kind = "score_entropy"
    title = "SEDD"
    default_top_p = 0.99
    default_steps = 1000
    reference_tells_noise = True

    def objective(self, training: NoisedTraining, frame: Frame) -> ScoreEntropy:
        process = self.forward_process(frame)
        return ScoreEntropy(
            process=process,
            mask_id=frame.mask_id,
            schedule=process.log_linear,
            levels=training.levels,
            block_size=self.block_size,
        )

    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        size = self.piece(frame.context)
        refused = (*UNMASKING, "projection", "stride")
        if size == frame.context:
            settings.refuse(*refused, "cache", why="SEDD writes a whole context")
        settings.refuse(*refused, why=f"SEDD writes blocks of {size} in its own steps")
        process = self.forward_process(frame)
        return AnalyticWriter(
            network,
            mask_id=frame.mask_id,
            context=frame.context,
            block_size=size,
            process=process,
            schedule=process.log_linear,
            steps=settings.steps or self.default_steps,
            cache=settings.cache,
        )
