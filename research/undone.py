"""What does each optimisation of the training step give, on the code as it is?

Times the step of BD3-LM, then the step with one optimisation undone at a time, then the step as it is again,
which shows how far the clock drifted meanwhile. All in one process: an optimisation is undone by putting the
plain form of a function in the place of the library's. Appends a JSON line for each step to --out, with the
fields of `bd3lm bench train`.

    PYTHONPATH=src python research/undone.py [--only NAME ...] [--steps 20] [--out results.jsonl]
"""

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from bd3lm.bench import (
    Shape,
    TrainingCase,
    device_name,
    matrix_rate,
    measure_training,
    training_record,
)
from bd3lm.diffusion import Masks
from bd3lm.models import (
    BlockDiffusion,
    Transformer,
    attention,
    cross_entropy,
    dropout,
    layouts,
    rotary,
    send,
    transformer,
)
from bd3lm.objectives import denoising
from bd3lm.training import EMA, OptimizerSettings, optim, pick_device, trainer
from bd3lm.training.distributed import local

Patch = tuple[Any, str, Any]  # a module or a class, the name of a function of it, what takes its place


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """How one is undone. Where it is not `at_work`, the step would be timed twice."""

    instead: str | None  # in words
    patches: tuple[Patch, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the TrainingCase
    on: str = "any device"

    def at_work(self, device: torch.device) -> bool:
        on_gpu = device.type == "cuda"
        if self.on == "Hopper":
            return on_gpu and torch.cuda.get_device_capability(device) == (9, 0)
        return on_gpu or self.on == "any device"


# --- the plain forms ---


def all_logits(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    position_weights: Tensor,
    *,
    excluded: int,
) -> tuple[Tensor, Tensor]:
    """Instead of `weighted_cross_entropy`. The excluded token is at −∞ by its bias: no logits are copied."""
    offset = weight.new_zeros(weight.shape[0]) if bias is None else bias
    is_excluded = torch.arange(weight.shape[0], device=weight.device) == excluded
    logits = F.linear(states, weight, offset.masked_fill(is_excluded, -torch.inf))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # the others are let go
    nats = F.cross_entropy(logits, targets, reduction="none")
    return (nats * position_weights).sum(), nats.detach()


def plain_reduction() -> type[cross_entropy._Plain]:
    """Instead of `cross_entropy._kernel`."""
    return cross_entropy._Plain


def nats_everywhere(
    self: denoising.BlockDenoiser, masks: Masks, *, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Instead of `BlockDenoiser.weighted_nats`: visible tokens go through the head too, and weigh nothing."""
    device = self.model.device
    batch, masked, weight = self.batch.to(device), send(masks.masked, device), send(masks.weight, device)
    targets, mask_id = batch.tokens.unsqueeze(1).expand_as(masked).flatten(), self.reading.mask_id
    states = self._states(denoising._noisy(batch, masked, mask_id), noise).flatten(0, 2)
    total, nats = self.model.cross_entropy(states, targets, weight.flatten(), excluded=mask_id)
    return total, nats.view(masked.shape) * masked


def torchs_dropout(x: Tensor, rate: float, seed: Tensor) -> Tensor:
    """Instead of `dropout.dropout`: the seed is torch's own."""
    return F.dropout(x, rate)


def no_fine_masks(device: torch.device) -> bool:
    """Instead of `attention._has_fine_tiles`."""
    return False


_kernel_options = attention._kernel_options


def options_of_fine_masks(head_dim: int, dtype: torch.dtype, fine: bool) -> dict[str, Any]:
    """Instead of `attention._kernel_options`: the tiles stay those of masks of 64."""
    return _kernel_options(head_dim, dtype, True)


def no_options(head_dim: int, dtype: torch.dtype, fine: bool) -> dict[str, Any]:
    """Instead of `attention._kernel_options`."""
    return {}


def allows_by_divisions(self: BlockDiffusion, query: Tensor, key: Tensor) -> Tensor:
    """Instead of `BlockDiffusion.allows`: M_BD, M_OBC and M_BC as they are written down.

    The clean text is block-causal, as in the step that is timed.
    """
    query_clean, key_clean = query >= self.noisy, key >= self.noisy
    query_block, key_block = query % self.length // self.block_size, key % self.length // self.block_size
    same_copy = query // self.length == key // self.length
    block_diagonal = ~query_clean & same_copy & (query_block == key_block)
    offset_block_causal = ~query_clean & key_clean & (key_block < query_block)
    block_causal = query_clean & key_clean & (key_block <= query_block)
    return block_diagonal | offset_block_causal | block_causal


_run_trunk = Transformer._run_trunk


def whole_last_layer(
    self: Transformer,
    x: Tensor,
    rope: rotary.Rotation,
    mask: attention.AttentionMask,
    last_mask: attention.AttentionMask,
    store: Any,
    read: layouts.Span,
    adding: layouts.Span,
    conditioning: Tensor | None,
    seeds: Sequence[Tensor],
) -> Tensor:
    """Instead of `Transformer._run_trunk`: what is not read is computed, and thrown away."""
    every = (0, x.shape[1])
    states = _run_trunk(self, x, rope, mask, mask, store, every, adding, conditioning, seeds)
    return states[:, slice(*read)].contiguous()


def compile_each_layer(self: Transformer) -> None:
    """Instead of `Transformer.compile_trunk`, with static shapes as there: a graph for each layer's index."""
    attention.allow_many_graphs()
    for layer in self.layers:
        layer.compile(dynamic=False, backend=attention.compiler)


def tanh_gelu(x: Tensor) -> Tensor:
    """Instead of `transformer._gelu`."""
    return F.gelu(x, approximate="tanh")


def foreach_optimizer(
    settings: OptimizerSettings, parameters: Mapping[str, Tensor], device: torch.device
) -> torch.optim.AdamW:
    """Instead of `make_optimizer`: what it makes for a CPU. It looks at the device for nothing else."""
    return optim.make_optimizer(settings, parameters, torch.device("cpu"))


@torch.no_grad()
def update_one_by_one(self: EMA) -> None:
    """Instead of `EMA.update`."""
    self.updates += 1
    decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
    for name, average in self._shadow.items():
        local(average).lerp_(local(self._parameters[name]).float(), 1.0 - decay)


# --- what is undone ---

COARSE_MASKS: Patch = (attention, "_has_fine_tiles", no_fine_masks)
OPTIMISATIONS = {
    "head in chunks": Optimisation(
        instead="all logits at once, not padded, by torch's cross-entropy in float32",
        patches=((transformer, "weighted_cross_entropy", all_logits),),
    ),
    "kernels of the loss": Optimisation(
        instead="chunks of logits reduced by torch's own operations",
        patches=((cross_entropy, "_kernel", plain_reduction),),
        on="a GPU",
    ),
    "head at hidden tokens only": Optimisation(
        instead="head and loss at all noisy tokens",
        patches=((denoising.BlockDenoiser, "weighted_nats", nats_everywhere),),
    ),
    "dropout as a hash": Optimisation(
        instead="torch's dropout", patches=((dropout, "dropout", torchs_dropout),)
    ),
    "gradient of the rotation in one kernel": Optimisation(
        instead="as it is compiled",
        patches=((transformer, "rotated_parts", rotary._rotated_parts),),
        on="a GPU",
    ),
    "masks of 64": Optimisation(
        instead="masks of 128, in the same tiles",
        patches=(COARSE_MASKS, (attention, "_kernel_options", options_of_fine_masks)),
        on="Hopper",
    ),
    "FlexAttention's tiles": Optimisation(
        instead="masks of 128, in torch's own tiles and options",
        patches=(COARSE_MASKS, (attention, "_kernel_options", no_options)),
        on="Hopper",
    ),
    "mask rule of shifts": Optimisation(
        instead="a rule of divisions, as it is written down",
        patches=((BlockDiffusion, "allows", allows_by_divisions),),
        on="a GPU",
    ),
    "last layer without the clean half": Optimisation(
        instead="the last layer at all positions",
        patches=((Transformer, "_run_trunk", whole_last_layer),),
    ),
    "one graph for all layers": Optimisation(
        instead="each layer compiled by itself",
        patches=((Transformer, "compile_trunk", compile_each_layer),),
    ),
    "GELU by a sigmoid": Optimisation(
        instead="torch's tanh GELU", patches=((transformer, "_gelu", tanh_gelu),)
    ),
    "AdamW in one kernel": Optimisation(
        instead="AdamW by foreach, after a pass that scales gradients",
        patches=((trainer, "make_optimizer", foreach_optimizer),),
        on="a GPU",
    ),
    "average by foreach": Optimisation(
        instead="one parameter after another",
        patches=((EMA, "update", update_one_by_one),),
        on="a GPU",
    ),
    "attention by FlexAttention": Optimisation(
        instead="a dense mask", changes={"attention": "dense"}, on="a GPU"
    ),
    "compiled": Optimisation(instead="eager", changes={"compile": False}),
}
OPTIMISATIONS["all of them"] = Optimisation(
    instead="a plain implementation",
    patches=tuple(each for undone in OPTIMISATIONS.values() for each in undone.patches),
    changes={"attention": "dense", "compile": False},
)
UNCHANGED = Optimisation(instead=None)


@contextmanager
def without(optimisation: Optimisation) -> Iterator[None]:
    """The library with its plain forms in place; nothing that was compiled before is found, nor after."""
    _forget()
    gc.collect()  # of a step that failed more is left than of others
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        with ExitStack() as patches:
            for owner, name, plain in optimisation.patches:
                patches.enter_context(patch.object(owner, name, plain))
            yield
    finally:
        _forget()


def _forget() -> None:
    """Drop what was compiled, rendered or found out."""
    torch._dynamo.reset()
    for cached in (
        attention._has_fine_tiles,
        attention._compiled_flex,
        layouts._dense,
        layouts._block_mask,
    ):
        cached.cache_clear()


# --- timing ---


def measure_all(
    case: TrainingCase,
    names: Sequence[str],
    *,
    device: torch.device,
    steps: int = 20,
    out: Path | None = None,
    commit: str | None = None,
) -> list[dict[str, Any]]:
    """A record for the case as it is, without each of the named optimisations, and as it is again.

    One that fails has an `error` and no time, and the others go on.
    """
    rate = matrix_rate(device)
    records: list[dict[str, Any]] = []
    for variant, name in [
        ("as it is", None),
        *((f"undone: {name}", name) for name in names),
        ("as it is, again", None),
    ]:
        print(f"== {variant}", file=sys.stderr, flush=True)
        optimisation = UNCHANGED if name is None else OPTIMISATIONS[name]
        timed = replace(case, **optimisation.changes)
        record: dict[str, Any] = {"undone": name, "instead": optimisation.instead, "commit": commit}
        try:
            with without(optimisation):
                timing = measure_training(timed, device=device, steps=steps)
        except Exception as error:
            traceback.print_exc()
            record = {"bench": "train", "variant": variant, **record, "error": _first_line(error)}
        else:
            record = training_record(variant, timed, timing, device, rate=rate) | record
            first = (records or [record])[0].get("seconds")
            record["ratio"] = None if first is None else timing.median / first["median"]
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        records.append(record)
    return records


def _first_line(error: Exception) -> str:
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def _print(console: Console, title: str, records: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title=title)
    for heading in ("optimisation", "instead", "ms", "x", "GiB"):
        table.add_column(heading, justify="left" if heading in ("optimisation", "instead") else "right")
    for record in records:
        names = record["undone"] or record["variant"], record["instead"]
        if "error" in record:
            table.add_row(*names, "failed", "", "")
            continue
        ratio, memory = record["ratio"], record["peak_gib"]
        table.add_row(
            *names,
            f"{1e3 * record['seconds']['median']:.2f}",
            "" if ratio is None else f"{ratio:.3f}",
            "" if memory is None else f"{memory:.1f}",
        )
    console.print(table)
    console.print(
        "ms is the median of the steps, x is it over that of the first row, GiB is the most memory held.",
        soft_wrap=True,
        highlight=False,
    )
    for record in records:
        if "error" in record:
            console.print(f"{record['variant']}: {escape(record['error'])}", soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=OPTIMISATIONS, default=list(OPTIMISATIONS), metavar="NAME"
    )
    parser.add_argument("--steps", type=int, default=20)
    plain = Shape()
    sizes = ("layers", "hidden", "heads", "context", "vocabulary", "block_size")
    for name in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(plain, name))
    parser.add_argument("--batch", type=int, default=TrainingCase().batch_size)
    parser.add_argument("--device")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    try:
        device = pick_device(options.device)
        shape = Shape(**{name: getattr(options, name) for name in sizes})
        case = TrainingCase(shape=shape, batch_size=options.batch)
    except ValueError as error:
        parser.error(str(error))
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if shape.one_block:
        parser.error(f"--block-size must be below the context {shape.context}: one block has no clean half")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"--out must be in an existing folder, and {options.out.parent} is none")
    console = Console()
    names = []
    for name in dict.fromkeys(options.only):
        if OPTIMISATIONS[name].at_work(device):
            names.append(name)
        else:
            console.print(f"'{name}' is left out: not on this device.", highlight=False)
    records = measure_all(
        case, names, device=device, steps=options.steps, out=options.out, commit=options.commit
    )
    _print(console, f"{shape.title}, batch {case.batch_size}, on {device_name(device)}", records)
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
