"""The work of the processes in the distributed tests. Each function runs on every rank and returns JSON."""

import errno
import hashlib
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bd3lm.diffusion import Draws
from bd3lm.models import BlockReading, Transformer, TransformerConfig
from bd3lm.objectives import BlockDiffusionLoss, Objective, TokenBatch
from bd3lm.training import tensor_files
from bd3lm.training.checkpoint import CheckpointStore, optimizer_groups
from bd3lm.training.distributed import Engine, Precision, local
from bd3lm.training.ema import EMA
from bd3lm.training.optim import OptimizerSettings, apply_gradients, make_optimizer
from tests.oracles.networks import FAMILIES

ROWS, LENGTH, VOCABULARY = 8, 8, 23
NOMINAL = float(ROWS * LENGTH)
SETTINGS = OptimizerSettings(lr=0.01, warmup_steps=0, weight_decay=0.1, clip_norm=0.5)


class Step(nn.Module):
    """Everything that uses a parameter, including the output head, inside one forward pass."""

    def __init__(self, network: Transformer, objective: Objective) -> None:
        super().__init__()
        self.network, self.objective = network, objective

    def forward(self, batch: TokenBatch, draws: Draws) -> tuple[Tensor, Tensor]:
        loss = self.objective.loss(self.network, batch, draws)
        return loss.minimised, loss.weight.sum()


class Run:
    """A tiny run on this rank's rows of a global batch. Ranks start from different weights on purpose."""

    def __init__(
        self, engine: Engine, *, tied: bool = False, precision: Precision = "fp32", family: str = "GPT"
    ) -> None:
        self.engine = engine
        torch.manual_seed(engine.rank)
        # 23 and 6 rows do not divide by 4, and of 6 rows the last of 4 ranks holds none.
        shape = {"layers": 2, "hidden": 6, "heads": 1, "head_dim": 6, "context": LENGTH, "tied": tied}
        shape |= FAMILIES[family]
        size = VOCABULARY - bool(shape.get("mask_vector"))  # the mask has the same id
        self.network = Transformer(TransformerConfig(vocab_size=size, dropout=0.0, **shape))
        self.network.attention_backend = "dense"  # compiled attention does not support heads this small
        with torch.no_grad():
            for parameter in self.network.parameters():  # the usual initialization has tiny gradients
                parameter.normal_(std=0.5)
        self.objective = BlockDiffusionLoss(reading=BlockReading(block_size=4, mask_id=VOCABULARY - 1))
        step = Step(self.network, self.objective)
        self.wrapped = engine.wrap(step, layers=list(self.network.layers), precision=precision)
        self.named: dict[str, Tensor] = dict(self.network.named_parameters())
        self.optimizer = make_optimizer(SETTINGS, self.named, engine.device)
        self.ema = EMA(self.named, decay=0.5)
        self.factor = torch.tensor(1.25, device=engine.device)

    def sums(self, step: int, rows: slice) -> Tensor:
        """Nats over this rank's rows of the global batch of a step."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY - 1, (ROWS, LENGTH), generator=generator)
        draws = self.objective.draw(ROWS, LENGTH, generator=generator, device="cpu").to(self.engine.device)
        batch = TokenBatch.of(tokens.to(self.engine.device))
        nats: Tensor = self.wrapped(batch[rows], draws[rows])[0]
        return nats

    def backward(self, step: int, micro_batches: int = 1) -> Tensor:
        """Backpropagate the whole batch's nats / NOMINAL and return those nats."""
        each = ROWS // self.engine.world // micro_batches
        first = self.engine.rank * each * micro_batches
        total = torch.zeros((), device=self.engine.device)
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            rows = slice(first + micro * each, first + (micro + 1) * each)
            with self.engine.accumulating(self.wrapped, last=last):
                nats = self.sums(step, rows)
                (nats * self.engine.gradient_scale / NOMINAL).backward()
            total += nats.detach()
            assert last or self.engine.world == 1 or not self.exchanged(), (
                "gradients were exchanged too early"
            )
        return self.engine.all_reduce_sum(total)

    def exchanged(self) -> bool:
        """Whether the ranks have exchanged gradients."""
        gradient = next(iter(self.named.values())).grad
        if gradient is None:  # FSDP2 keeps them elsewhere until then
            return False
        return torch.equal(self.engine.all_reduce_sum(gradient.clone()), self.engine.world * gradient)

    def train(self, step: int, micro_batches: int = 1) -> Tensor:
        self.backward(step, micro_batches)
        return self.update()

    def update(self) -> Tensor:
        norm = apply_gradients(
            self.optimizer,
            list(self.named.values()),
            factor=self.factor,
            clip_norm=SETTINGS.clip_norm,
            engine=self.engine,
        )
        self.ema.update()
        return norm

    def evaluate(self, step: int) -> Tensor:
        each = ROWS // self.engine.world
        with torch.no_grad():
            nats = self.sums(step, slice(self.engine.rank * each, (self.engine.rank + 1) * each))
        return self.engine.all_reduce_sum(nats)

    def groups(self) -> dict[str, dict[str, Tensor]]:
        return {
            "model": self.named,
            "ema": self.ema.tensors(),
            **optimizer_groups(self.optimizer, self.named),
        }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def fingerprint(groups: Mapping[str, Mapping[str, Tensor]]) -> str:
    """A digest of every bit, however the tensors are sharded."""
    digest = hashlib.sha256()
    for group, tensors in sorted(groups.items()):
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{group}/{name}".encode())
            digest.update(whole(tensor).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def difference(ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    assert ours.keys() == theirs.keys()
    worst = 0.0
    for name, other in theirs.items():
        mine = ours[name]
        assert mine is not None, name
        assert other is not None, name
        assert mine.dtype == torch.float32
        worst = max(worst, ((whole(mine) - other).abs().max() / other.abs().max()).item())
    return worst


def apart(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs() / theirs.abs()).item()


def gradients_of(run: Run) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in run.named.items()}


# --- Scenarios ---------------------------------------------------------------------------------------


def equal_to_one_process() -> dict[str, Any]:
    """How far two ranks are from one process on the same global batch, for each kind of parallelism."""
    with Engine.from_environment(parallel="fsdp", device="cpu") as engine:
        return {
            "ddp": _against_one_process(replace(engine, parallel="ddp")),
            "fsdp": _against_one_process(engine),
            "ddp, tied": _against_one_process(replace(engine, parallel="ddp"), tied=True),
            "fsdp, tied": _against_one_process(engine, tied=True),
            "fsdp, Llama": _against_one_process(engine, family="Llama"),
            "fsdp, Qwen3": _against_one_process(engine, family="Qwen3"),
            "bf16": _bfloat16(engine),
        }


def _against_one_process(engine: Engine, **shape: Any) -> dict[str, Any]:
    alone, run = Run(Engine(), **shape), Run(engine, **shape)
    nats = alone.backward(0)
    expected = {name: whole(p.grad).clone() for name, p in alone.named.items() if p.grad is not None}
    norm = alone.engine.grad_norm(alone.named.values())
    alone.optimizer.zero_grad()
    result: dict[str, Any] = {}
    for micro_batches in (1, 2, 4):
        ours = run.backward(0, micro_batches)
        result[f"nats{micro_batches}"] = apart(ours, nats)
        result[f"gradients{micro_batches}"] = difference(gradients_of(run), expected)
        result[f"norm{micro_batches}"] = apart(engine.grad_norm(run.named.values()), norm)
        run.optimizer.zero_grad()
    result["norms"] = max(apart(run.train(step, micro_batches=2), alone.train(step)) for step in range(3))
    result["parameters"] = difference(run.named, dict(alone.named))
    result["ema"] = difference(run.ema.tensors(), dict(alone.ema.tensors()))
    # Raw, averaged, raw: each pass must use the current weights.
    before = fingerprint({"model": run.named})
    raw = run.evaluate(9)
    result["raw"] = apart(raw, alone.evaluate(9))
    with run.ema.swapped_in(), alone.ema.swapped_in():
        averaged = run.evaluate(9)
        result["averaged"] = apart(averaged, alone.evaluate(9))
    result["swap"] = apart(averaged, raw)
    result["raw again"] = apart(run.evaluate(9), alone.evaluate(9))
    result["restored"] = fingerprint({"model": run.named}) == before
    result["held"] = sum(local(p).numel() for p in run.named.values())
    result["numel"] = sum(p.numel() for p in run.named.values())
    return result


def _bfloat16(engine: Engine) -> dict[str, Any]:
    alone, run = Run(Engine()), Run(engine, precision="bf16")
    alone.backward(0)
    run.backward(0, micro_batches=2)
    return {
        "gradients": difference(gradients_of(run), gradients_of(alone)),
        "dtypes": sorted({str(p.dtype) for p in run.named.values()}),
    }


def talk() -> dict[str, Any]:
    """Everything that ranks exchange besides gradients."""
    with Engine.from_environment(parallel="ddp", device="cpu") as engine:
        rank, world = engine.rank, engine.world
        total = engine.all_reduce_sum(torch.tensor([1.0, float(rank)], dtype=torch.float64))
        engine.barrier()
        return {
            "rank": rank,
            "is_main": engine.is_main,
            "scale": engine.gradient_scale,
            "sum": total.tolist(),
            "one": engine.any_true(rank == world - 1),
            "none": engine.any_true(False),
            "gathered": engine.gather_text("é" * rank),
            "empty": engine.gather_text(""),
            "broadcast": engine.broadcast_text(f"from {rank}"),
        }


def whole_on_main() -> dict[str, Any]:
    """The main process requests tensors by name, in its own order, and then fails while it holds one."""
    with Engine.from_environment(parallel="fsdp", device="cpu") as engine:
        run = Run(engine)
        sums: dict[str, float] = {}

        def look(fetch: Callable[[str], Tensor]) -> None:
            sums.update({name: fetch(name).double().sum().item() for name in sorted(run.named, reverse=True)})

        engine.with_whole(run.named, look)
        expected = {name: whole(each).double().sum().item() for name, each in run.named.items()}

        def fail(fetch: Callable[[str], Tensor]) -> None:
            fetch(next(iter(run.named)))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            engine.with_whole(run.named, fail)
        except OSError as error:
            said = str(error)
        return {"sums": sums, "same": sums == expected, "said": said, "after": engine.gather_text("there")}


def train_and_save(folder: str) -> dict[str, Any]:
    """Two FSDP2 steps and a checkpoint."""
    with Engine.from_environment(parallel="fsdp", device="cpu") as engine:
        run = Run(engine)
        for step in range(2):
            run.train(step)
        CheckpointStore(folder).save(2, run.groups(), {"updates": run.ema.updates}, engine=engine)
        return {
            "fingerprint": fingerprint(run.groups()),
            "empty": [name for name, p in run.named.items() if not local(p).numel()],
        }


def convert(sharded: str, single: str, again: str, replicated: str) -> dict[str, Any]:
    """Load with two ranks what four ranks and one process wrote; write it sharded and replicated."""
    with Engine.from_environment(parallel="fsdp", device="cpu") as engine:
        fsdp, ddp = Run(engine), Run(replace(engine, parallel="ddp"))
        seen = {}
        state = CheckpointStore(sharded).load_into(fsdp.groups(), engine=engine)
        seen["fsdp from four"] = fingerprint(fsdp.groups())
        fsdp = Run(engine)
        CheckpointStore(single).load_into(fsdp.groups(), engine=engine)
        seen["fsdp from one"] = fingerprint(fsdp.groups())
        CheckpointStore(again).save(2, fsdp.groups(), state or {}, engine=engine)
        CheckpointStore(again).load_into(ddp.groups(), engine=ddp.engine)
        seen["ddp from two"] = fingerprint(ddp.groups())
        CheckpointStore(replicated).save(2, ddp.groups(), state or {}, engine=ddp.engine)
        fsdp.train(2)
        ddp.train(2)  # the restored optimizers continue, and agree
        return {
            "state": state,
            "fingerprints": seen,
            "apart": difference(fsdp.named, dict(ddp.named)),
        }


def misfortunes(folder: str) -> dict[str, Any]:
    """A full disk on one rank, then a damaged file that only one rank looks at; all ranks must agree."""
    with Engine.from_environment(parallel="fsdp", device="cpu") as engine:
        run, store = Run(engine), CheckpointStore(folder)
        store.save(1, run.groups(), {"n": 1}, engine=engine)
        first = fingerprint(run.groups())
        run.train(0)
        result: dict[str, Any] = {}
        with full_disk() if engine.rank == 1 else nullcontext():
            try:
                store.save(2, run.groups(), {"n": 2}, engine=engine)
            except OSError as error:
                result["error"], result["errno"] = str(error), error.errno
        engine.barrier()
        result["after"] = sorted(path.name for path in Path(folder).iterdir())
        engine.barrier()
        store.save(3, run.groups(), {"n": 3}, engine=engine)
        if engine.is_main:
            flip_byte(Path(folder) / "step-00000003" / "tensors-00001-of-00002.safetensors", 500)
        engine.barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result["state"] = store.load_into(run.groups(), engine=engine)
        result["warnings"] = [str(w.message) for w in caught if "checkpoint" in str(w.message)]
        result["went back"] = fingerprint(run.groups()) == first
        return result


def lose_a_rank(folder: str) -> dict[str, Any]:
    """Rank 1 is killed while it writes its part of a checkpoint; rank 0 must not hang."""
    engine = Engine.from_environment(parallel="fsdp", device="cpu", timeout=timedelta(seconds=60))
    run, store = Run(engine), CheckpointStore(folder)
    store.save(1, run.groups(), {"n": 1}, engine=engine)
    error = ""
    try:
        with dying(at=1, action="fsync") if engine.rank == 1 else nullcontext():
            store.save(2, run.groups(), {"n": 2}, engine=engine)
    except RuntimeError as problem:  # torch.distributed raises this
        error = type(problem).__name__
    engine.close()
    alone = Run(Engine())
    state = store.load_into(alone.groups(), engine=Engine())
    store.save(3, alone.groups(), {"n": 3}, engine=Engine())
    return {
        "error": error,
        "state": state,
        "after": sorted(path.name for path in Path(folder).iterdir()),
    }


def killed_everywhere(base: str) -> list[list[dict[str, Any]]]:
    """The remains of killed saves of step 3, and of step 2 again, in a folder with checkpoints of 1 and 2."""
    return [_killed_everywhere(base, 3), _killed_everywhere(base, 2)]


def _killed_everywhere(base: str, step: int) -> list[dict[str, Any]]:
    """Fork a save that kills itself (SIGKILL) at event 1, 2, .. until one gets through.

    The events are before and after each of the things it does to the disk.
    """
    outcomes: list[dict[str, Any]] = []
    while not outcomes or outcomes[-1]["killed"]:
        folder = Path(base).with_name(f"killed-{step}-{len(outcomes)}")
        shutil.copytree(base, folder)
        child = os.fork()
        if not child:
            with dying(at=len(outcomes) + 1):
                _save_numbers(folder, step)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        store = CheckpointStore(folder)
        values = {}
        for found in store.steps():
            target = torch.zeros(4)
            state = store.load_into({"model": {"w": target}}, engine=Engine(), step=found)
            values[found] = [state, target.tolist()]
        _save_numbers(folder, step + 1)
        left = sorted(path.name for path in folder.iterdir())
        outcomes.append({"killed": status == signal.SIGKILL, "values": values, "after": left})
    return outcomes


def _save_numbers(folder: Path, step: int) -> None:
    tensors = {"model": {"w": torch.full((4,), float(step))}}
    CheckpointStore(folder, keep_last=1).save(step, tensors, {"run": 2}, engine=Engine(), score=9.0)


# --- Accidents ---------------------------------------------------------------------------------------


class dying:
    """The process kills itself at its `at`-th disk operation, counting before and after each."""

    def __init__(self, at: int, action: str | None = None) -> None:
        self.left = at
        actions = {
            "fsync": (os, "fsync"),
            "rename": (os, "rename"),
            "mkdir": (os, "mkdir"),
            "unlink": (os, "unlink"),
            "rmdir": (os, "rmdir"),
        }
        self.patches = [
            mock.patch.object(place, name, self._around(getattr(place, name)))
            for key, (place, name) in actions.items()
            if action in (None, key)
        ]

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._event()
            result = function(*args, **kwargs)
            self._event()
            return result

        return call

    def _event(self) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> None:
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


def full_disk() -> AbstractContextManager[Any]:
    """Files accept their first bytes and then no more."""
    write = tensor_files._write

    def fail(path: Path, chunks: Any) -> Any:
        def some() -> Any:
            yield next(iter(chunks))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return write(path, some())

    return mock.patch.object(tensor_files, "_write", fail)


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
