import math

import pytest
import torch
from torch import nn

from bd3lm.training.distributed import Engine
from bd3lm.training.optim import OptimizerSettings, apply_gradients, learning_rate, make_optimizer

CPU = torch.device("cpu")


def test_the_rate_rises_linearly_from_zero_and_stays() -> None:
    settings = OptimizerSettings(lr=0.4, warmup_steps=4)
    rates = [learning_rate(settings, step, 10) for step in (0, 1, 2, 3, 4, 5, 9, 1000)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4])


def test_the_defaults_are_the_papers() -> None:
    settings = OptimizerSettings()
    assert learning_rate(settings, 1250, 10**6) == pytest.approx(1.5e-4)
    assert learning_rate(settings, 2500, 10**6) == learning_rate(settings, 10**6, 10**6) == 3e-4


def test_no_warm_up_starts_at_the_full_rate() -> None:
    assert learning_rate(OptimizerSettings(lr=0.4, warmup_steps=0), 0, 10) == 0.4


def test_a_cosine_falls_from_the_full_rate_to_its_floor() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=2, decay="cosine", min_lr_ratio=0.2)
    at = {step: learning_rate(settings, step, 10) for step in (1, 2, 4, 6, 8, 10, 11)}
    quarter = 0.2 + 0.8 * 0.5 * (1 + math.sqrt(0.5))
    assert at == pytest.approx({1: 0.5, 2: 1.0, 4: quarter, 6: 0.6, 8: 1.2 - quarter, 10: 0.2, 11: 0.2})


def test_a_line_falls_over_the_last_steps() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=2, decay="linear", decay_steps=4, min_lr_ratio=0.2)
    at = {step: learning_rate(settings, step, 10) for step in (1, 2, 6, 7, 8, 10, 11)}
    assert at == pytest.approx({1: 0.5, 2: 1.0, 6: 1.0, 7: 0.8, 8: 0.6, 10: 0.2, 11: 0.2})
    # All steps after the warm-up, where it is not said or where there are not as many.
    for steps in (None, 100):
        settings = OptimizerSettings(
            lr=1.0, warmup_steps=2, decay="linear", decay_steps=steps, min_lr_ratio=0.0
        )
        at = {step: learning_rate(settings, step, 10) for step in (1, 2, 4, 6, 10)}
        assert at == pytest.approx({1: 0.5, 2: 1.0, 4: 0.75, 6: 0.5, 10: 0.0})


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        learning_rate(OptimizerSettings(), -1, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": math.nan},
        {"eps": -1e-8},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"weight_decay": -0.1},
        {"warmup_steps": -1},
        {"decay": "square"},
        {"decay_steps": 5},
        {"decay_steps": 0, "decay": "linear"},
        {"min_lr_ratio": 1.5},
        {"clip_norm": 0.0},
    ],
)
def test_settings_name_what_is_wrong(wrong: dict[str, object]) -> None:
    name = next(iter(wrong))
    with pytest.raises(ValueError, match=f"^{name} must"):
        OptimizerSettings(**wrong)  # type: ignore[arg-type]


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.noise_embedding = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3, bias=False)
        self.output = nn.Linear(3, 5)


def test_weight_decay_spares_embeddings_norms_and_biases() -> None:
    named = dict(Toy().named_parameters())
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0.1), named, CPU)
    names = {id(parameter): name for name, parameter in named.items()}
    by_decay = {
        group["weight_decay"]: {names[id(member)] for member in group["params"]}
        for group in optimizer.param_groups
    }
    assert by_decay == {
        0.1: {"noise_embedding.weight", "output.weight"},
        0.0: {"embedding.weight", "noise_embedding.bias", "norm.weight", "output.bias"},
    }


def test_without_weight_decay_there_is_one_group_with_the_settings() -> None:
    settings = OptimizerSettings(lr=0.1, betas=(0.8, 0.95), eps=1e-6)
    optimizer = make_optimizer(settings, dict(Toy().named_parameters()), CPU)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.95), 1e-6)
    assert (group["weight_decay"], group["foreach"], group["fused"]) == (0.0, True, None)


def gradients(*values: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(value))) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


class Recorder(torch.optim.SGD):
    """Subtracts the gradient it is given, so the parameters show it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1.0)


@pytest.mark.parametrize(
    ("clip_norm", "expected"),
    [
        (None, [[1.5, 0.0], [2.0]]),
        (2.6, [[1.5, 0.0], [2.0]]),
        (0.5, [[0.3, 0.0], [0.4]]),  # the norm of (1.5, 0, 2) is 2.5
    ],
)
def test_gradients_are_scaled_then_clipped_then_applied(
    clip_norm: float | None, expected: list[list[float]]
) -> None:
    parameters = gradients([3.0, 0.0], [4.0])
    norm = apply_gradients(
        Recorder(parameters), parameters, factor=torch.tensor(0.5), clip_norm=clip_norm, engine=Engine()
    )
    assert norm.item() == 2.5
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(-parameter.detach(), torch.tensor(value), rtol=1e-5, atol=0.0)
        assert parameter.grad is None


def test_a_gradient_of_zero_stays_zero_and_a_missing_one_is_passed_over() -> None:
    parameters = [*gradients([0.0, 0.0]), nn.Parameter(torch.ones(1))]
    norm = apply_gradients(
        Recorder(parameters), parameters, factor=torch.tensor(2.0), clip_norm=1.0, engine=Engine()
    )
    assert norm.item() == 0.0
    assert [parameter.tolist() for parameter in parameters] == [[0.0, 0.0], [1.0]]


def test_the_norm_tells_of_a_gradient_that_is_not_finite() -> None:
    parameters = gradients([math.inf], [1.0])
    norm = apply_gradients(
        Recorder(parameters), parameters, factor=torch.tensor(1.0), clip_norm=1.0, engine=Engine()
    )
    assert not math.isfinite(norm.item())


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_fused_optimizer_scales_inside_its_kernel_and_updates_alike(
    clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; CPUs have the kernel too. Weight decay ignores the factor, moments include it."""
    passes = []
    multiply = torch._foreach_mul_
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *given: passes.append(given) or multiply(*given))
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((7, 5), (5,))]
    updates = [[torch.randn(value.shape, generator=generator) for value in start] for _ in range(3)]
    trained = {}
    for fused in (False, True):
        parameters = [nn.Parameter(value.clone()) for value in start]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, eps=1e-3, fused=fused)
        norms = []
        for update in updates:
            for parameter, gradient in zip(parameters, update, strict=True):
                parameter.grad = gradient.clone()
            factor = torch.tensor(0.25)
            norms.append(
                apply_gradients(optimizer, parameters, factor=factor, clip_norm=clip_norm, engine=Engine())
            )
            assert all(parameter.grad is None for parameter in parameters)
            assert not hasattr(optimizer, "grad_scale")
        trained[fused] = [*norms, *parameters, *(optimizer.state[each]["exp_avg"] for each in parameters)]
    assert len(passes) == 3  # the plain one makes three passes
    torch.testing.assert_close(trained[True], trained[False], rtol=1e-5, atol=1e-6)
    assert (trained[True][3] - start[0]).abs().max() > 0.1
