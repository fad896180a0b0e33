"""The model that is timed: its size, its method, and the arithmetic that a pass over it costs."""

from dataclasses import dataclass
from typing import Literal

import torch

from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig, Method
from bd3lm.models import Backend, TransformerConfig

MethodName = Literal["bd3lm", "mdlm", "ar"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A network and a method; the defaults are the paper's small model with blocks of 4."""

    method: MethodName = "bd3lm"
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
        self.config()  # refuses what no network can be

    @property
    def one_block(self) -> bool:
        """Whether a text is one block, which sees no clean text."""
        return self.method == "mdlm" or (self.method == "bd3lm" and self.block_size == self.context)

    def attention_on(self, device: torch.device, backend: Backend) -> Backend:
        """What a backend comes to in training: `auto` is one of the others where the layout has no kernel."""
        if backend != "auto" or self.method == "ar" or self.one_block:
            return backend
        return "flex" if device.type == "cuda" else "dense"

    @property
    def network(self) -> TransformerConfig:
        return TransformerConfig(
            vocab_size=self.vocabulary,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            context=self.context,
            dropout=self.dropout,
        )

    def config(self) -> LanguageModelConfig:
        """The last token id is the mask."""
        method: Method = AutoregressiveMethod()
        if self.method != "ar":
            method = BlockDiffusionMethod(block_size=None if self.method == "mdlm" else self.block_size)
        return LanguageModelConfig(network=self.network, method=method, mask_id=self.vocabulary - 1)

    @property
    def method_title(self) -> str:
        return {"bd3lm": f"BD3-LM, blocks of {self.block_size}", "mdlm": "MDLM", "ar": "AR"}[self.method]

    @property
    def title(self) -> str:
        return f"{self.method_title}, {self.layers} x {self.hidden}, context {self.context:,}"

    def training_flops(self, batch: int) -> float:
        """Of a step's matrix products, three times those of its forward pass; nothing is counted twice.

        A layer has 12·d² weights. BD3-LM passes the text twice, except that the last layer computes only
        keys and values of the clean half; attention is counted where the mask lets it be, and the head at
        masked tokens: on average (n + 1)/2 of a block's n, and half of MDLM's.
        """
        d, length, layers = self.hidden, self.context, self.layers
        weights = 12 * d * d
        body = layers * length * weights
        if self.method == "ar":
            pairs = layers * length * (length + 1) / 2
        elif self.one_block:
            pairs = float(layers * length**2)
        else:
            body = (2 * layers - 1) * length * weights + 2 * length * d * d
            pairs = (2 * layers - 1) * length * (length + self.block_size) / 2
        read = {"ar": 1.0, "mdlm": 0.5, "bd3lm": (self.block_size + 1) / (2 * self.block_size)}[self.method]
        forward = 2 * body + 2 * read * length * d * self.vocabulary + 4 * pairs * d
        return 3.0 * batch * forward
