"""Computes the memory and time that training a network takes. These figures are calculated, not measured."""

import math
from dataclasses import dataclass

from bd3lm.bench.shapes import MethodName, Shape
from bd3lm.interop.weights import parameter_shapes
from bd3lm.models import TransformerConfig

WIDE, NARROW = 4, 2  # bytes per number in float32 and in bfloat16
RATE = 4e14
"""The assumed FLOP/s of a GPU: half of what an H200 reached in one large product."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A network and a way to train it, with the number of processes that share its parameters."""

    shape: Shape
    sequences: int = 1
    """Sequences per process and pass."""
    processes: int = 1
    """Processes that shard the parameters (FSDP2); 1 if each has all of them."""
    average: bool = True
    """Whether an EMA of the weights is kept (train.ema_decay above 0)."""

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in parameter_shapes(self.shape.network).values())

    @property
    def weights(self) -> int:
        return WIDE * self.parameters // self.processes

    @property
    def gradients(self) -> int:
        return self.weights

    @property
    def moments(self) -> int:
        """AdamW's two."""
        return 2 * self.weights

    @property
    def averages(self) -> int:
        return self.weights if self.average else 0

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.moments + self.averages

    @property
    def positions(self) -> int:
        """Positions in a pass: a joint model reads each text twice, noisy and clean."""
        texts = 1 if self.shape.method in ("ar", "mdlm") else 2
        return texts * self.sequences * self.shape.context

    def activations(self, *, recompute: bool) -> int:
        """Memory for the backward pass; with recomputation, the input of each layer and one layer's
        activations."""
        network = self.shape.network
        layer = self.positions * kept_by_layer(network)
        if not recompute:
            return network.layers * layer
        return network.layers * self.positions * WIDE * network.hidden + layer

    def seconds_per_token(self, *, recompute: bool) -> float:
        """Seconds for this many tokens of text on one device: a third more if layers are recomputed."""
        flops = self.shape.training_flops(1) / self.shape.context
        return flops * (4 / 3 if recompute else 1.0) / RATE


def kept_by_layer(network: TransformerConfig, *, wide: int = WIDE, narrow: int = NARROW) -> int:
    """Bytes per position that a layer keeps for the backward pass, run without a compiler.

    In float32: the residual stream before attention and before the MLP, and the output of RMS norms. In
    bfloat16: the inputs of the four products; the projection to queries, keys and values, which contains the
    values; queries and keys after norms and rotations; and the input of the MLP's activation. A compiler
    keeps less.
    """
    stream = 2 * network.hidden * (2 if network.norm == "rms" else 1)
    rotated = network.attention_width + network.kv_heads * network.head_dim
    inside = (
        2 * network.hidden  # into the first product of attention and of the MLP
        + network.qkv_width
        + rotated * (2 if network.qk_norm else 1)
        + network.attention_width
        + network.mlp_in_width
        + network.mlp_width * (2 if network.mlp == "swiglu" else 1)  # SwiGLU: a factor, and the product
    )
    return wide * stream + narrow * inside


SIZES: tuple[tuple[str, str, int], ...] = (
    ("0.1 B", "small", 50_258),
    ("0.6 B", "qwen3-0.6b", 151_936),
    ("1.7 B", "qwen3-1.7b", 151_936),
    ("8 B", "qwen3-8b", 151_936),
)
"""The models in docs/scale.md: a name, the network of a recipe, and its vocabulary."""

_METHODS: tuple[tuple[str, MethodName], ...] = (("AR", "ar"), ("joint, blocks of 4", "joint"))


def memory_table() -> list[str]:
    """The memory rows of docs/scale.md, in GB of 10^9 bytes, for context 1,024 and one sequence."""
    lines = [
        "| size | `network.size` | parameters | weights | gradients | moments | average | activations, AR | "
        "recomputed | activations, joint | recomputed |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, size, vocabulary in SIZES:
        ways = [Scale(shape=Shape(method=way, size=size, vocabulary=vocabulary)) for _, way in _METHODS]
        one = ways[0]
        parts = (one.weights, one.gradients, one.moments, one.averages)
        kept = [each.activations(recompute=again) for each in ways for again in (False, True)]
        cells = [name, f"`{size}`", f"{one.parameters / 1e9:.2f} B", *map(_gigabytes, (*parts, *kept))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def time_table() -> list[str]:
    """The time rows: hours on one device for a billion tokens of text."""
    lines = [
        "| size | "
        + " | ".join(f"{title}{more}" for title, _ in _METHODS for more in ("", ", recomputed"))
        + " | states, whole | states, 8 processes |",
        "|---|" + "--:|" * (2 * len(_METHODS) + 2),
    ]
    for name, size, vocabulary in SIZES:
        shapes = [Shape(method=way, size=size, vocabulary=vocabulary) for _, way in _METHODS]
        hours = [
            Scale(shape=shape).seconds_per_token(recompute=again) * 1e9 / 3600
            for shape in shapes
            for again in (False, True)
        ]
        states = [Scale(shape=shapes[0], processes=number).states for number in (1, 8)]
        cells = [name, *(f"{each:,.1f} h" for each in hours), *map(_gigabytes, states)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"
