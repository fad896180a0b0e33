"""The model that is timed: its size, its method, and the arithmetic that a pass over it costs."""

from dataclasses import dataclass
from typing import Literal

from bd3lm.config import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import TransformerConfig

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

    def config(self) -> LanguageModelConfig:
        """The last token id is the mask."""
        network = TransformerConfig(
            vocab_size=self.vocabulary,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            context=self.context,
            dropout=self.dropout,
        )
        mask_id = self.vocabulary - 1
        if self.method == "ar":
            return LanguageModelConfig(network=network, method=AutoregressiveMethod(mask_id=mask_id))
        block_size = self.context if self.method == "mdlm" else self.block_size
        return LanguageModelConfig(
            network=network, method=BlockDiffusionMethod(mask_id=mask_id, block_size=block_size)
        )

    @property
    def title(self) -> str:
        name = {"bd3lm": f"BD3-LM, blocks of {self.block_size}", "mdlm": "MDLM", "ar": "AR"}[self.method]
        return f"{name}, {self.layers} x {self.hidden}, context {self.context:,}"

    def training_flops(self, batch: int) -> float:
        """Of a step's matrix products, three times those of its forward pass; nothing is counted twice.

        A layer has 12·d² weights. BD3-LM passes the text twice, except that the last layer computes only
        keys and values of the clean half; attention is counted where the mask lets it be (causal: half), and
        the head at hidden tokens: on average (n + 1)/2 of n.
        """
        d, length, layers = self.hidden, self.context, self.layers
        weights = 12 * d * d
        pairs = {"ar": 0.5, "mdlm": 1.0, "bd3lm": 1.0}[self.method] * length**2
        body = layers * length * weights
        head = float(length)
        if self.method == "bd3lm":
            body = (2 * layers - 1) * length * weights + 2 * length * d * d
            head = length * (self.block_size + 1) / (2 * self.block_size)
        if self.method == "mdlm":
            head = length / 2
        forward = 2 * body + 2 * head * d * self.vocabulary + 4 * layers * pairs * d
        return 3.0 * batch * forward
