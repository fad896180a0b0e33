"""The config of an SDAR checkpoint: that of Qwen3, for programs that ask transformers' AutoConfig for it."""

from typing import Any

from transformers import Qwen3Config


class SDARConfig(Qwen3Config):
    """Qwen3's, with the block size and the mask as further fields."""

    model_type = "sdar"

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if not hasattr(self, "rope_theta"):  # transformers 5 keeps it elsewhere, and engines ask for it here
            self.rope_theta = values.get("rope_theta", 10000.0)
