"""D3PM's sampler for uniform noise: T draws from the reverse step (Austin et al. 2021, section 2).

The step averages posteriors over the network's guess, as `objectives.D3PM` defines and trains it.

With a `block_size` each block takes T steps, after the clean text before it (eq. 5).

Under the absorbing process D3PM samples like masked diffusion: its sampler is `SlidingWriter` or
`BlockWriter` with `Ancestral(T)` steps, which takes at most one pass for each masked token.
"""

from torch import Tensor

from bd3lm.diffusion import Linear, NoiseSchedule, Uniform, d3pm
from bd3lm.models import Denoiser
from bd3lm.sampling.drawing import RowSharpening
from bd3lm.sampling.stepwise import StepwiseWriter, split


class PosteriorWriter(StepwiseWriter):
    """x_{t−1} ~ Σ_x q(x_{t−1} | x_t, x) p(x | x_t), for T steps from uniform noise; the last from p(x | x_1).

    `objectives.D3PM` with as many steps bounds the likelihood of these texts. Sharpening applies to the
    network's guess p(x | x_t), never to the step, since the noise of the posterior is not the network's.
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
