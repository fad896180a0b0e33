"""The config of a block diffusion language model, for transformers' AutoConfig."""

from typing import Any

from transformers import PreTrainedConfig


class BD3LMConfig(PreTrainedConfig):
    """The network, the method and the mask, as bd3lm writes them, and the attributes that transformers
    expects."""

    model_type = "bd3lm"

    def __init__(
        self,
        network: dict[str, Any] | None = None,
        method: dict[str, Any] | None = None,
        mask_id: int | None = None,
        rotary_frequencies: list[float] | None = None,
        default_top_p: float = 1.0,
        **others: Any,
    ) -> None:
        self.network = dict(network or {})
        self.method = dict(method or {})
        self.mask_id = mask_id
        self.rotary_frequencies = list(rotary_frequencies or ())
        self.default_top_p = default_top_p
        others["tie_word_embeddings"] = self.network.get("tied", False)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, others.pop(name, None))
        super().__init__(**others)

    @property
    def vocab_size(self) -> int | None:
        """How many tokens it can predict."""
        return self.network.get("vocab_size")

    @property
    def hidden_size(self) -> int | None:
        return self.network.get("hidden")

    @property
    def num_hidden_layers(self) -> int | None:
        return self.network.get("layers")

    @property
    def num_attention_heads(self) -> int | None:
        return self.network.get("heads")

    @property
    def max_position_embeddings(self) -> int | None:
        """Positions the network was trained on."""
        return self.network.get("context")
