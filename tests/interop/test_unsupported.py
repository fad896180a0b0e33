"""The error for an unsupported model names its kind in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from bd3lm import interop

FIELDS = {f"field_{number}": number for number in range(27)}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **FIELDS},
            r"holds a model of type 'gpt2' \(GPT2LMHeadModel\), which bd3lm does not load; of Hugging Face's "
            "types it loads llama, mistral, qwen2, qwen3, sdar$",
        ),
        ({"model_type": "mamba"}, "holds a model of type 'mamba', which bd3lm does not load; of Hugging"),
        ({"architectures": ["DreamModel"]}, "holds a model of type 'DreamModel', which bd3lm does not load;"),
        ({"model_type": 3, "architectures": "x"}, "got the fields: model_type, architectures$"),
        (FIELDS, r"must have format 'bd3lm', .*, got the fields: field_0, .*, field_4 and 22 more$"),
        ({}, "got the fields: none$"),
    ],
    ids=["gpt2", "type", "architecture", "odd", "unknown", "empty"],
)
def test_unsupported_models_are_named(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        interop.load(tmp_path)
