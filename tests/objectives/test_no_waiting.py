"""Inside a training step the host waits for no device, whatever the method: shown without a GPU.

The network is on torch's meta device, whose tensors have shapes and no values; batches and draws are on the
host, as in training. A step that needs a value from there, or a shape that depends on one, cannot go on, and
the only way from the host to the device must be a copy that is not waited for. What this cannot show is left
to tests/gpu/test_step_gpu.py: kernels that wait by themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bd3lm.diffusion import Absorbing, Floored, Linear, Uniform
from bd3lm.models import Transformer
from bd3lm.objectives import D3PM, Objective, ScoreEntropy, SimplexDiffusionLoss, TokenBatch, TokenLoss
from bd3lm.training import Engine
from tests.training.tiny import (
    AR,
    CLIPPED,
    CONTEXT,
    COUNTS,
    LEARNED,
    MASK,
    NEXT_TOKEN,
    VOCABULARY,
    network,
    sentences,
    tiny_trainer,
)

pytestmark = pytest.mark.sweep(3)

META = torch.device("meta")
ABSORBING, UNIFORM = Absorbing(VOCABULARY, MASK), Uniform(VOCABULARY)
WITHOUT_TIMES: dict[str, Objective] = {"AR": AR, "counts": COUNTS, "next": NEXT_TOKEN, "learned": LEARNED}
WITH_TIMES: dict[str, Objective] = {
    "clipped": CLIPPED,
    "SEDD": ScoreEntropy(process=ABSORBING, mask_id=MASK),
    "uniform SEDD": ScoreEntropy(process=UNIFORM, mask_id=MASK, schedule=Floored(Linear())),
    "D3PM": D3PM(process=ABSORBING, mask_id=MASK, steps=9, auxiliary=0.1),
    "uniform D3PM": D3PM(process=UNIFORM, mask_id=MASK, steps=9, auxiliary=0.1),
    "SSD-LM": SimplexDiffusionLoss(block_size=3, mask_id=MASK, steps=50),
    "SSD-LM, one block": SimplexDiffusionLoss(block_size=CONTEXT, mask_id=MASK, steps=50),
}
CASES = [
    *((objective, False) for objective in (WITHOUT_TIMES | WITH_TIMES).values()),
    *((objective, True) for objective in WITH_TIMES.values()),
]
NAMES = [*WITHOUT_TIMES, *WITH_TIMES, *(f"{name}, told the time" for name in WITH_TIMES)]


class Waited(AssertionError):
    """The host would have waited for the device."""


class NoWaitingOperators(TorchDispatchMode):
    """Fails on operators for which CUDA waits, in the backward pass too."""

    LOOKING = (
        "_local_scalar_dense",  # item, float, if
        "_unique2",
        "equal",
        "masked_scatter_backward",
        "masked_select",
        "nonzero",
        "repeat_interleave",  # by a tensor; by a number it is seen as expand
    )
    INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        devices = {each.device for each in _tensors((args, kwargs))}
        indices = _tensors(args[1]) if name in self.INDEXING else []
        if META in devices and name in self.LOOKING:
            raise Waited(f"{name} looks at values on the device")
        if META in devices and any(index.dtype == torch.bool for index in indices):
            raise Waited(f"{name} by flags has to count them")
        target = kwargs.get("device")
        if target is not None:
            devices.add(target)
        sent = name == "_to_copy" and target == META and kwargs.get("non_blocking")
        if len(devices) > 1 and not sent:
            raise Waited(f"{name} takes values from one side to the other, and waits for them")
        return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class NoTensorsOfNumbers(TorchFunctionMode):
    """Fails where Python numbers are copied to the device, which torch does before operators are seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and made.device == META:
            raise Waited(f"{func.__name__} copies from the host and waits; use full or new_full")
        return made


@contextmanager
def no_waiting() -> Iterator[None]:
    with NoWaitingOperators(), NoTensorsOfNumbers():
        yield


@pytest.fixture(autouse=True)
def what_the_meta_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed precision and generators: nobody waits for either."""
    generator = torch.Generator
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    monkeypatch.setattr(torch, "Generator", lambda _="cpu": generator())


@pytest.mark.parametrize(("objective", "told_time"), CASES, ids=NAMES)
def test_a_step_waits_for_nothing(objective, told_time, tmp_path):
    model = network(layers=1, adaln=told_time, time_conditioning=told_time)
    trainer = tiny_trainer(tmp_path, objective, model=model, engine=Engine(device=META), validate=False)
    with no_waiting():
        for _ in range(2):
            trainer.train_step()
    assert trainer.step == 2


def loss_by(model: Transformer, objective: Objective) -> TokenLoss:
    """Of texts of several lengths."""
    batch = TokenBatch.of(sentences(3, seed=0), lengths=torch.tensor([CONTEXT, 2, 5]))
    return objective.loss(model, batch, objective.seeded_draws(batch, 0))


@pytest.mark.parametrize("name", ["SEDD", "D3PM", "SSD-LM", "SSD-LM, one block"])
def test_texts_of_several_lengths_are_not_waited_for(name):
    model = network(layers=1).to(META)
    with no_waiting():
        loss_by(model, WITH_TIMES[name]).minimised.backward()


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda nats: nats.sum().item(),
    "if": lambda nats: bool(nats.sum() > 0),
    "tolist": lambda nats: nats.tolist(),
    "flags": lambda nats: nats[nats > 0],
    "nonzero": lambda nats: (nats > 0).nonzero(),
    "masked_select": lambda nats: nats.masked_select(nats > 0),
    "unique": lambda nats: nats.unique(),
    "index_put": lambda nats: nats.detach().index_put_((nats > 0,), nats[0, 0].detach()),
    "repeat_interleave": lambda nats: nats.repeat_interleave(torch.ones_like(nats[0], dtype=torch.long), 1),
    "index on the host": lambda nats: nats[:, torch.arange(2)],
    "to the host": lambda nats: nats.to("cpu", non_blocking=True),
    "to the device": lambda nats: torch.ones(3).to(nats.device),
    "copy": lambda nats: nats.detach().copy_(torch.zeros(nats.shape)),
    "tensor": lambda nats: torch.tensor(1.0, device=nats.device),
    "as_tensor": lambda nats: torch.as_tensor([1.0], device=nats.device),
    "new_tensor": lambda nats: nats.new_tensor(1.0),
    "backward": lambda nats: torch.zeros_like(nats).masked_scatter(nats > 0, nats).sum().backward(),
}


@pytest.mark.parametrize("name", WAITS)
def test_waiting_is_noticed(name):
    model = network(layers=1).to(META)
    with no_waiting():
        nats = loss_by(model, WITH_TIMES["D3PM"]).nats
        with pytest.raises(Waited):
            WAITS[name](nats)
