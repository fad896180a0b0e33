"""Models for transformers' AutoModelForCausalLM: our folder, with the code to run it.

The weights and the model's entries in config.json are as `native` writes them, so bd3lm loads the folder too,
without that code. The code is assembled from this package's own (`remote`, `inlining`). It needs torch and
transformers, but not bd3lm.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bd3lm.data import Tokenizer
from bd3lm.interop import native
from bd3lm.interop.inlining import inlined
from bd3lm.interop.sources import CONFIG_NAME, WEIGHTS_NAME
from bd3lm.interop.weights import check_config, make_folder, write_tensors
from bd3lm.io.files import write_atomically
from bd3lm.methods import LanguageModelConfig
from bd3lm.models import Network, TransformerConfig
from bd3lm.models.rotary import frequencies

REMOTE = "bd3lm.interop.remote"
CONFIGURATION, MODELING = "configuration_bd3lm", "modeling_bd3lm"
_CONFIG_CLASS, _MODEL_CLASS = "BD3LMConfig", "BD3LMForCausalLM"
_HEADING = """\
# Written by bd3lm (MIT licence) with an exported model, from its own modules: do not edit.
# ruff: noqa"""


def to_remote_config(config: LanguageModelConfig, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """The config.json of the folder. A model that the code cannot run is refused. Of a model with several
    laws, the one that writes in blocks is used."""
    if "block" in config.method.laws:
        config = config.under("block")
    network = config.network
    if config.method.unmasking(config.frame) is None:
        raise ValueError(
            "code for transformers is only for models that reveal blocks of masks (method.kind "
            f"block_diffusion), got {config.title} (method.kind {config.method.kind}); export an "
            "autoregressive model with --to huggingface, which transformers runs without extra code"
        )
    if not isinstance(network, TransformerConfig):
        raise ValueError(f"network.kind must be transformer, which the code runs, got {network.kind!r}")
    slopes = frequencies(network.head_dim, base=network.rotary_base, scaling=network.rotary_scaling)
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if tokenizer is not None:
        ids |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {
        **native.describe(config),
        "model_type": "bd3lm",
        "architectures": [_MODEL_CLASS],
        "auto_map": {
            "AutoConfig": f"{CONFIGURATION}.{_CONFIG_CLASS}",
            "AutoModelForCausalLM": f"{MODELING}.{_MODEL_CLASS}",
        },
        "rotary_frequencies": slopes.tolist(),
        "default_top_p": config.method.default_top_p,
        **ids,
    }


def modeling_code() -> str:
    """The text of modeling_bd3lm.py."""
    return inlined(f"{REMOTE}.{MODELING}", heading=_HEADING)


def code_of(name: str) -> str:
    """The text of a module of `remote`, without imports from this package."""
    spec = find_spec(f"{REMOTE}.{name}")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{REMOTE}.{name} is missing; reinstall bd3lm")
    return f"{_HEADING}\n\n{Path(spec.origin).read_text('utf-8')}"


def save(
    network: Network,
    config: LanguageModelConfig,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a folder that AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) loads."""
    check_config(network, config)
    data = to_remote_config(config, tokenizer)
    data["dtype"] = str(network.dtype).removeprefix("torch.")
    text = json.dumps(data, indent=2) + "\n"
    code = {f"{CONFIGURATION}.py": code_of(CONFIGURATION), f"{MODELING}.py": modeling_code()}
    path = make_folder(folder)
    write_tensors(path / WEIGHTS_NAME, dict(network.named_parameters()))  # a tied matrix occurs once
    for name, lines in code.items():
        write_atomically(path / name, lines.encode())
    if tokenizer is not None:
        begun = tokenizer if config.method.score_first else tokenizer.with_begin()
        begun.save(path)
    write_atomically(path / CONFIG_NAME, text.encode())
