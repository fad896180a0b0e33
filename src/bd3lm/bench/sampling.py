"""Sampling: texts written side by side by a network of random weights."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch

from bd3lm.bench.shapes import Shape
from bd3lm.bench.timing import Timing, time_calls
from bd3lm.lm import LanguageModel, Settings
from bd3lm.models import Transformer
from bd3lm.sampling import without_replays


@dataclass(frozen=True, kw_only=True)
class SamplingCase:
    """One way to write: a shape, how many texts at once, how long, and whether keys are kept.

    `fused` is as samplers write on a GPU: passes of fused kernels, replayed as CUDA graphs. Without it they
    are made of the plain kernels, launched one by one, as anywhere else. A text of one block has nothing to
    keep, whatever `cache` says.
    """

    shape: Shape = field(default_factory=Shape)
    batch: int = 1
    length: int = 512
    nucleus_p: float = 0.9
    cache: bool = True
    fused: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"length must be at least 2, since the first token is given, got {self.length}")

    @property
    def tokens(self) -> int:
        """Written in one go: the first token of each text is given."""
        return self.batch * (self.length - 1)

    def as_computed(self, device: torch.device) -> Self:
        """Equal for cases that are the same computation on a device."""
        return replace(self, fused=self.fused and device.type == "cuda")


def measure_sampling(
    case: SamplingCase, *, device: torch.device, warmup: int = 1, repeats: int = 3
) -> Timing:
    """Seconds to write all texts, from one given token each, first-hitting, one evaluation a token."""
    torch.manual_seed(0)
    config = case.shape.config()
    network = Transformer(config.network).to(device, getattr(torch, case.dtype)).eval()
    model = LanguageModel(network, config)
    settings = Settings(
        length=case.length,
        batch_size=case.batch,
        nucleus_p=case.nucleus_p,
        stop_at_eos=False,
        cache=case.cache or case.shape.one_block,  # which refuses to be told to do without
    )
    if not case.fused and device.type == "cuda":  # elsewhere nothing is fused
        network.attention_backend = "dense"
    prompts = [[0]] * case.batch
    with nullcontext() if case.fused else without_replays():
        return time_calls(
            lambda: model.generate(prompts, settings), device=device, warmup=warmup, repeats=repeats
        )
