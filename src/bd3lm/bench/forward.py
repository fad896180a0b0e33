"""The forward pass of a training step, network and loss, without keeping activations for a backward pass."""

import torch

from bd3lm.bench.timing import Timing, time_calls
from bd3lm.bench.training import TrainingCase, random_tokens
from bd3lm.models import Transformer
from bd3lm.objectives import TokenBatch
from bd3lm.training.step import NetworkRunner, training_sums


def measure_forward(
    case: TrainingCase, *, device: torch.device, warmup: int = 3, repeats: int = 20
) -> Timing:
    """Seconds per pass over the same tokens and masks, in bfloat16 on a GPU and float32 elsewhere.

    Dropout is off, and the EMA of the case is not used.
    """
    torch.manual_seed(0)
    network = Transformer(case.shape.network).to(device).eval()
    network.attention_backend = case.attention
    if case.compile:
        network.compile_trunk()
    runner = NetworkRunner(network, autocast=torch.bfloat16 if device.type == "cuda" else None)
    objective = case.objective()
    batch = TokenBatch.of(random_tokens(case.batch_size, case.shape), score_first=False)
    generator = torch.Generator().manual_seed(0)
    draws = objective.draw(case.batch_size, case.shape.context, generator=generator, device="cpu")
    losses: list[torch.Tensor] = []

    def once() -> None:
        with torch.no_grad():
            sums = runner(lambda network: training_sums(network, objective, batch, draws))
        losses[:] = [sums.loss]

    timing = time_calls(once, device=device, warmup=warmup, repeats=repeats)
    if losses and not losses[0].isfinite():
        raise FloatingPointError(f"the loss of {case.shape.title} is not finite, so its time means nothing")
    return timing
