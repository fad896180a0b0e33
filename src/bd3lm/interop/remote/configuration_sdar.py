"""The config of an SDAR checkpoint, for programs that load it with transformers' AutoConfig. It extends
Qwen3's."""

from typing import Any

from transformers import Qwen3Config


class SDARConfig(Qwen3Config):
    """Qwen3's config with two more fields: the block size and the mask."""

    model_type = "sdar"

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if not hasattr(self, "rope_theta"):  # transformers 5 keeps it elsewhere, but engines read it here
            self.rope_theta = values.get("rope_theta", 10000.0)
