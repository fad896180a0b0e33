import pytest
import torch
from torch import Tensor, nn

from bd3lm.training.ema import EMA


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def fill(target: Tensor, *values: float) -> None:
    with torch.no_grad():
        target.copy_(torch.tensor(values))


def test_the_average_by_hand() -> None:
    """Update n keeps min(decay, (1 + n) / (10 + n)): 2/11, 3/12, and then 0.26, which is less than 4/13."""
    weight = parameter(0.0, 11.0)
    ema = EMA({"w": weight}, decay=0.26)
    fill(weight, 1.0, 0.0)
    ema.update()
    torch.testing.assert_close(ema.tensors()["w"], torch.tensor([9 / 11, 2.0]))
    fill(weight, 2.0, -2.0)
    ema.update()
    torch.testing.assert_close(ema.tensors()["w"], torch.tensor([9 / 44 + 1.5, -1.0]))
    fill(weight, 0.0, 9.0)
    ema.update()
    torch.testing.assert_close(ema.tensors()["w"], torch.tensor([0.26 * (9 / 44 + 1.5), 6.4]))
    assert ema.updates == 3


def test_the_papers_decay_is_reached_after_its_warm_up() -> None:
    """(1 + n) / (10 + n) first exceeds 0.9999 at n = 89,990; there one update moves by exactly 1e-4."""
    weight = parameter(0.0)
    ema = EMA({"w": weight})
    ema.updates = 89_990
    fill(weight, 1.0)
    ema.update()
    assert ema.tensors()["w"].item() == pytest.approx(1e-4, rel=1e-3)


def test_an_average_starts_at_the_parameters_and_does_not_follow_them_by_itself() -> None:
    weight = parameter(3.0)
    ema = EMA({"w": weight})
    fill(weight, 5.0)
    assert ema.tensors()["w"].item() == 3.0
    assert not ema.tensors()["w"].requires_grad


def test_averages_are_in_the_parameters_only_inside() -> None:
    weight, bias = parameter(0.1, 0.2), parameter(0.3)
    raw = [weight.detach().clone(), bias.detach().clone()]
    ema = EMA({"w": weight, "b": bias})
    fill(ema.tensors()["w"], 7.0, 8.0)
    fill(ema.tensors()["b"], 9.0)
    storage = weight.data_ptr()
    with ema.swapped_in():
        assert (weight.tolist(), bias.tolist()) == ([7.0, 8.0], [9.0])
    assert torch.equal(weight, raw[0])
    assert torch.equal(bias, raw[1])
    assert weight.data_ptr() == storage  # optimizers and wrappers keep pointing at it
    assert (ema.tensors()["w"].tolist(), ema.tensors()["b"].tolist()) == ([7.0, 8.0], [9.0])


def test_raw_parameters_return_after_an_error() -> None:
    weight = parameter(1.0)
    ema = EMA({"w": weight})
    fill(ema.tensors()["w"], 2.0)
    with pytest.raises(RuntimeError, match="oh"), ema.swapped_in():
        raise RuntimeError("oh")
    assert weight.item() == 1.0


def test_averages_are_float32_whatever_the_parameters_are() -> None:
    weight = parameter(1.0, dtype=torch.bfloat16)
    ema = EMA({"w": weight}, decay=0.9)
    fill(weight, 1.5)
    ema.update()
    assert ema.tensors()["w"].dtype == torch.float32
    assert ema.tensors()["w"].item() == pytest.approx(1 + 0.5 * 9 / 11)  # bfloat16 would be 0.001 off
    fill(ema.tensors()["w"], 1.0001)
    with ema.swapped_in():
        assert weight.item() == 1.0
    assert weight.item() == 1.5


def test_without_decay_the_averages_are_the_parameters_and_take_no_memory() -> None:
    weight = parameter(1.0, 2.0)
    ema = EMA({"w": weight}, decay=0.0)
    for values in ((3.0, 4.0), (5.0, 6.0)):
        fill(weight, *values)
        ema.update()
        with ema.swapped_in():
            assert weight.tolist() == list(values)
        assert ema.tensors()["w"].tolist() == weight.tolist() == list(values)
    assert ema.tensors()["w"].data_ptr() == weight.data_ptr()
    assert not ema.tensors()["w"].requires_grad


def test_a_restored_state_continues_as_before() -> None:
    def after(ema: EMA, weight: nn.Parameter) -> Tensor:
        fill(weight, 4.0, 5.0)
        ema.update()
        return ema.tensors()["w"]

    first, second = parameter(1.0, 2.0), parameter(0.0, 0.0)
    ema, other = EMA({"w": first}), EMA({"w": second})
    fill(first, 2.0, 3.0)
    ema.update()
    other.updates = ema.updates
    other.tensors()["w"].copy_(ema.tensors()["w"])
    assert torch.equal(after(ema, first), after(other, second))


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_decay_must_be_below_one(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay must lie in \[0, 1\)"):
        EMA({}, decay=decay)
