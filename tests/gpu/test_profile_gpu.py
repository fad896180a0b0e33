"""Profiles on CUDA: the kernels of a compiled step and of replayed passes, ours among them by their names.

Run with `pytest --gpu -m gpu tests/gpu`.
"""

import pytest
import torch

from bd3lm.bench import Profile, SamplingCase, Shape, TrainingCase, measure_sampling, measure_training
from bd3lm.bench import profile as profiling
from bd3lm.bench.profile import ATTENTION, DRAWING, FUSED, LOSS, OPTIMIZER, OTHER, PRODUCTS, group_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32_and_nothing_but_compiled_kernels"),
]
CUDA = torch.device("cuda")
SHAPE = Shape(layers=2, hidden=128, heads=2, context=256, vocabulary=500)


@pytest.fixture
def names(monkeypatch) -> set[str]:
    """Those of all kernels that the profiler saw, not only of the longest."""
    seen: set[str] = set()
    grouped = profiling.group_of

    def remember(kernel_name: str, device_type: str) -> str:
        seen.add(kernel_name)
        return grouped(kernel_name, device_type)

    monkeypatch.setattr(profiling, "group_of", remember)
    return seen


def check(profile: Profile | None, names: set[str], *, groups: set[str], ours: set[str]) -> None:
    assert profile is not None
    assert groups <= set(profile.groups), sorted(names)
    assert ours <= names, sorted(names)
    # Ours begin with an underscore, and so do names of C++ that were left as the compiler wrote them.
    underscored = {name for name in names if name.startswith("_") and not name.startswith("_Z")}
    assert {name for name in underscored if group_of(name, "cuda") == OTHER} == set()
    assert all(seconds > 0 for seconds in profile.groups.values())
    assert 1 <= len(profile.kernels) <= 13
    assert profile.kernels[0].launches > 0
    assert profile.idle is not None
    assert 0 <= profile.idle < 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_profile_of_training_has_its_kernels(compiled, names):
    case = TrainingCase(shape=SHAPE, batch_size=4, compile=compiled)
    timing = measure_training(case, device=CUDA, steps=3, profile=True)
    check(
        timing.profile,
        names,
        groups={PRODUCTS, ATTENTION, LOSS, OPTIMIZER},
        ours={"_log_totals", "_grad_logits"},
    )


def test_a_profile_of_sampling_has_the_kernels_of_replayed_passes(names):
    case = SamplingCase(shape=SHAPE, length=64, dtype="bfloat16")
    timing = measure_sampling(case, device=CUDA, repeats=1, profile=True)
    check(
        timing.profile,
        names,
        groups={PRODUCTS, FUSED, ATTENTION, DRAWING},
        ours={"_linear", "_attend", "_rotate", "_score", "_settle"},
    )


def test_a_profile_of_long_texts_and_plain_kernels_is_of_short_ones(names):
    """Which have a warm-up of their own."""
    case = SamplingCase(shape=SHAPE, length=160, dtype="bfloat16", fused=False, replayed=False)
    timing = measure_sampling(case, device=CUDA, repeats=1, profile=True)
    check(timing.profile, names, groups={PRODUCTS}, ours=set())
    assert timing.profile is not None
    assert timing.profile.seconds > 0
