"""Places pick and spread what a bool index would, gradients too."""

import pytest
import torch

from bd3lm.objectives.places import Places

FLAGS = torch.tensor([[True, False, True], [False, False, False], [False, True, True]])


@pytest.mark.parametrize("flags", [FLAGS, ~FLAGS, FLAGS & ~FLAGS], ids=["some", "others", "none"])
def test_they_are_a_bool_index(flags):
    values = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    places = Places.of(flags, torch.device("cpu"))
    picked = places.pick(values)
    assert torch.equal(picked, values[flags])
    spread = places.spread(picked[:, 0])
    assert torch.equal(spread, torch.where(flags, values[..., 0], 0.0))
    (3.0 * spread).sum().backward()
    assert torch.equal(values.grad[..., 0], 3.0 * flags)
    assert not values.grad[..., 1].any()
