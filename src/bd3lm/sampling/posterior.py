"""D3PM's sampler over uniform noise: T draws from the reverse step (Austin et al. 2021, section 2).

The step averages posteriors over the network's guess, as `objectives.D3PM` says and trains.

With a `block_size` the T steps are of each block, after the clean text before it (eq. 5).

Under the absorbing process D3PM samples as masked diffusion does: `SlidingWriter` and `BlockWriter` with
`Ancestral(T)` steps are its sampler, with at most one pass for each masked token.
"""

from torch import Tensor

from bd3lm.diffusion import Linear, NoiseSchedule, Uniform, d3pm
from bd3lm.models import Denoiser
from bd3lm.sampling.drawing import RowSharpening
from bd3lm.sampling.stepwise import StepwiseWriter, split


class PosteriorWriter(StepwiseWriter):
    """x_{t−1} ~ Σ_x q(x_{t−1} | x_t, x) p(x | x_t), for T steps from uniform noise; the last from p(x | x_1).

    The law whose likelihood `objectives.D3PM` with as many steps bounds. Sharpening is of the network's
    guess p(x | x_t), never of the step: the noise that the posterior puts back is not the network's.
    """

    process: Uniform
    sharpens_steps = False

    def __init__(
        self,
        model: Denoiser,
        *,
        process: Uniform,
        mask_id: int,
        context: int,
        steps: int = 1000,
        schedule: NoiseSchedule | None = None,
        block_size: int | None = None,
        cache: bool = True,
    ) -> None:
        if not isinstance(process, Uniform):
            raise ValueError(
                f"process must be Uniform, got {process}; under the absorbing process SlidingWriter with "
                "unmasking=Ancestral(steps) is D3PM's sampler"
            )
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        super().__init__(
            model,
            process=process,
            mask_id=mask_id,
            context=context,
            steps=steps,
            schedule=schedule or Linear(),
            block_size=block_size,
            cache=cache,
        )

    def moves(
        self, logits: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor, sharpening: RowSharpening
    ) -> tuple[Tensor, Tensor]:
        log_p = sharpening(d3pm(logits, self.mask_id))
        return split(self.process.posterior(log_p.double().exp(), x_t, alpha_s, alpha_t), x_t)
