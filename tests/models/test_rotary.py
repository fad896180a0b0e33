"""Rotary positions: rotations in the complex plane that attention sees only as differences, however far."""

import math

import pytest
import torch

from bd3lm.models.rotary import LinearScaling, Llama3Scaling, frequencies, rotate, rotation


def test_rotation_is_multiplication_by_a_complex_number():
    """The half-split form: x_i + i·x_{i + d/2} times exp(i · position · base^(−2i/d))."""
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 1000, 4])
    turned = rotate(x, rotation(positions, 8, base=100.0, dtype=torch.float64))
    for p, position in enumerate(positions.tolist()):
        for i in range(4):
            turn = complex(math.cos(position * 100 ** (-2 * i / 8)), math.sin(position * 100 ** (-2 * i / 8)))
            product = torch.complex(x[:, :, p, i], x[:, :, p, i + 4]) * turn
            torch.testing.assert_close(turned[:, :, p, i], product.real, rtol=0, atol=1e-12)
            torch.testing.assert_close(turned[:, :, p, i + 4], product.imag, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", [1, 1000, 100_000])
def test_attention_sees_only_differences_of_positions(shift):
    q, k = torch.randn(2, 1, 1, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def scores(positions):
        turn = rotation(positions, 16, base=10000.0, dtype=torch.float64)
        return rotate(q, turn) @ rotate(k, turn).transpose(-1, -2)

    here, there = scores(torch.arange(6)), scores(torch.arange(6) + shift)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-9)
    assert (here - q @ k.transpose(-1, -2)).abs().max() > 0.1


def test_angles_keep_double_precision_far_into_a_text():
    """Angles in float32 would be off by a thousandth or more at position 100,000."""
    position, head_dim = 100_000, 64
    cos, sin = rotation(torch.tensor([position]), head_dim, base=10000.0, dtype=torch.float32)
    angles = [position * 10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    expected_cos = torch.tensor([[math.cos(a) for a in angles]], dtype=torch.float64)
    expected_sin = torch.tensor([[math.sin(a) for a in angles]], dtype=torch.float64)
    assert (cos - expected_cos).abs().max() < 1e-7
    assert (sin - expected_sin).abs().max() < 1e-7
    single = torch.tensor([angles]).float() / position * torch.tensor(float(position))
    assert (single.cos() - expected_cos).abs().max() > 1e-4  # the error that this test would catch


def test_low_precision_input_keeps_its_type_and_is_turned_in_the_precision_of_the_table():
    x = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(2))
    turn = rotation(torch.arange(4), 8, base=10000.0, dtype=torch.float32)
    turned = rotate(x.bfloat16(), turn)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.bfloat16().float(), turn).bfloat16())


def test_linear_scaling_stretches_positions():
    stretched = rotation(
        torch.arange(9), 8, base=50.0, dtype=torch.float64, scaling=LinearScaling(factor=3.0)
    )
    plain = rotation(torch.arange(9) / 3, 8, base=50.0, dtype=torch.float64)
    torch.testing.assert_close(stretched, plain)


def test_llama3_scaling_keeps_fast_angles_and_slows_the_others():
    """Written out pair by pair, by the length of a full turn."""
    scaling = Llama3Scaling(factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plain = frequencies(128, base=500_000.0)
    scaled = frequencies(128, base=500_000.0, scaling=scaling)
    kinds = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4.0:
            kinds.add("fast")
            expected = before
        elif wavelength > 8192 / 1.0:
            kinds.add("slow")
            expected = before / 8.0
        else:
            kinds.add("between")
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * before / 8.0 + smooth * before
        assert after == pytest.approx(expected, rel=1e-12)
    assert kinds == {"fast", "slow", "between"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearScaling(factor=0.5), "factor must be at least 1 and finite, got 0.5"),
        (lambda: Llama3Scaling(factor=8.0, original_context=0), "original_context must be at least 1, got 0"),
        (
            lambda: Llama3Scaling(factor=8.0, original_context=64, low_freq_factor=4.0),
            "low_freq_factor and high_freq_factor must be .* the first below the second, got 4.0 and 4.0",
        ),
    ],
)
def test_impossible_scalings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
