"""Sampling: a network with random weights writes a batch of texts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Self

import torch

from bd3lm.bench.profile import profile_calls
from bd3lm.bench.shapes import Shape
from bd3lm.bench.timing import Timing, time_calls
from bd3lm.lm import Generation, LanguageModel, Settings
from bd3lm.models import Transformer
from bd3lm.sampling import without_replays

_MOST_PROFILED = 128  # tokens of a text: a profiler keeps every launch, and each token has hundreds


@dataclass(frozen=True, kw_only=True)
class SamplingCase:
    """One way to sample: a shape, a batch size, a length, and whether keys and values are cached.

    On a GPU, samplers use `fused` kernels, and passes are `replayed` as CUDA graphs. Without `fused` they use
    plain kernels; without `replayed` kernels are launched one by one, as on other devices. A text of one
    block has nothing to cache, whatever `cache` says.
    """

    shape: Shape = field(default_factory=Shape)
    batch_size: int = 1
    length: int = 512
    top_p: float = 0.9
    cache: bool = True
    fused: bool = True
    replayed: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"length must be at least 2, since the first token is given, got {self.length}")

    @property
    def tokens(self) -> int:
        """Tokens written in a run; the first token of each text is given."""
        return self.batch_size * (self.length - 1)

    @property
    def profiled_length(self) -> int:
        """Tokens of a text under the profiler."""
        return min(self.length, _MOST_PROFILED)

    def as_computed(self, device: torch.device) -> Self:
        """Equal for cases that are the same computation on a device."""
        on_gpu = device.type == "cuda"
        return replace(self, fused=self.fused and on_gpu, replayed=self.replayed and on_gpu)


def measure_sampling(
    case: SamplingCase, *, device: torch.device, warmup: int = 1, repeats: int = 3, profile: bool = False
) -> Timing:
    """Seconds to write all texts, from one given token each, first-hitting, with one evaluation per token.

    The profile is of one more run with texts of at most 128 tokens.
    """
    with sampling_run(case, device=device) as run:
        timing = time_calls(lambda: run(case.length), device=device, warmup=warmup, repeats=repeats)
        if not profile:
            return timing
        shorter, seconds = partial(run, case.profiled_length), timing.median
        if case.profiled_length < case.length:  # a short run, in which a GPU also records its passes
            seconds = time_calls(shorter, device=device, warmup=1, repeats=1).median
        return replace(timing, profile=profile_calls(shorter, device=device, calls=1, seconds=seconds))


@contextmanager
def sampling_run(case: SamplingCase, *, device: torch.device) -> Iterator[Callable[[int], list[Generation]]]:
    """All texts of a case, written up to a length that may differ from the case's."""
    torch.manual_seed(0)
    config = case.shape.config()
    network = Transformer(case.shape.network).to(device, getattr(torch, case.dtype)).eval()
    model = LanguageModel(network, config)
    settings = Settings(
        length=case.length,
        batch_size=case.batch_size,
        top_p=case.top_p,
        stop_at_eos=False,
        cache=case.cache or case.shape.one_block,  # which refuses to work without it
    )
    if not case.fused and device.type == "cuda":  # other devices have nothing fused
        network.attention_backend = "dense"
    prompts = [[0]] * case.batch_size
    with nullcontext() if case.replayed else without_replays():
        yield lambda length: model.generate(prompts, replace(settings, length=length))
