"""The model of a benchmark: its size, its method, and the FLOPs of a pass."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig, Method
from bd3lm.models import Backend, TransformerConfig

MethodName = Literal["bd3lm", "joint", "mdlm", "ar"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A network and a method; the defaults are the paper's small model with blocks of 4.

    A joint model is trained in blocks, and also to predict the next tokens of its clean text, which is
    causal. A named `size` sets everything about the network but vocabulary and context.
    """

    method: MethodName = "bd3lm"
    size: str | None = None
    block_size: int = 4
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50258
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.vocabulary < 2:
            raise ValueError(f"vocabulary must be at least 2, a token and the mask, got {self.vocabulary}")
        sizes = TransformerConfig.sizes
        if self.size is not None:
            if self.size not in sizes:
                raise ValueError(f"size must be one of {', '.join(sizes)}, got {self.size!r}")
            for name in ("layers", "hidden", "heads"):
                object.__setattr__(self, name, sizes[self.size][name])
        self.config()  # refuses an invalid network

    @property
    def one_block(self) -> bool:
        """Whether a text is a single block, which sees no clean text."""
        return self.method == "mdlm" or (self.method == "bd3lm" and self.block_size == self.context)

    def attention_on(self, device: torch.device, backend: Backend) -> Backend:
        """The backend that is really used in training: `auto` becomes one of the others if the layout has no
        kernel."""
        if backend != "auto" or self.method == "ar" or self.one_block:
            return backend
        return "flex" if device.type == "cuda" else "dense"

    @property
    def network(self) -> TransformerConfig:
        shape: dict[str, Any] = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads}
        if self.size is not None:
            shape = dict(TransformerConfig.sizes[self.size])
        return TransformerConfig(
            vocab_size=self.vocabulary, context=self.context, dropout=self.dropout, **shape
        )

    def config(self) -> LanguageModelConfig:
        """The last token id is the mask."""
        method: Method = AutoregressiveMethod()
        if self.method != "ar":
            joint = self.method == "joint"
            method = BlockDiffusionMethod(
                block_size=None if self.method == "mdlm" else self.block_size,
                causal_clean=joint,
                joint=joint,
            )
        return LanguageModelConfig(network=self.network, method=method, mask_id=self.vocabulary - 1)

    @property
    def method_title(self) -> str:
        return {
            "bd3lm": f"BD3-LM, blocks of {self.block_size}",
            "joint": f"joint, blocks of {self.block_size}",
            "mdlm": "MDLM",
            "ar": "AR",
        }[self.method]

    @property
    def title(self) -> str:
        named = "" if self.size is None else f"{self.size}, "
        return f"{self.method_title}, {named}{self.layers} x {self.hidden}, context {self.context:,}"

    def training_flops(self, batch: int) -> float:
        """FLOPs of a step's matrix products, three times those of its forward pass; nothing is counted twice.

        BD3-LM passes the text twice, except that the last layer computes only keys and values of the clean
        half, unless a next-token loss reads it. Attention counts where the mask allows it. The head counts at
        masked tokens, on average (n + 1)/2 of a block's n and half of MDLM's, and where next tokens are
        predicted.
        """
        network, length, layers = self.network, self.context, self.layers
        kv_weights = 2 * network.kv_heads * network.head_dim * network.hidden
        weights = kv_weights + network.hidden * (
            2 * network.attention_width + network.mlp_in_width + network.mlp_width
        )
        blocks = length * (length + self.block_size) / 2  # pairs of positions, as if in blocks
        causal = length * (length + 1) / 2
        masked = (self.block_size + 1) / (2 * self.block_size)
        if self.method == "ar":
            body, pairs, read = layers * length * weights, layers * causal, 1.0
        elif self.one_block:
            body, pairs, read = layers * length * weights, layers * float(length**2), 0.5
            read = masked if self.method != "mdlm" else read
        elif self.method == "joint":
            body, pairs, read = 2 * layers * length * weights, layers * (blocks + causal), masked + 1.0
        else:
            body = (2 * layers - 1) * length * weights + length * kv_weights
            pairs, read = (2 * layers - 1) * blocks, masked
        head = read * length * network.hidden * self.vocabulary
        forward = 2 * body + 2 * head + 4 * pairs * network.attention_width
        return 3.0 * batch * forward
