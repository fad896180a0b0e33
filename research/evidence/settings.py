"""The settings of a run in full, by which results know it, and the recipe that the library makes of them.

Names and defaults stand here as they were when the first results came: the library may change its own, and
results are found all the same. How it names them now, `recipe` and `parameters` alone know.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from bd3lm.models import Transformer
from bd3lm.runs.merging import merge
from bd3lm.runs.presets import network_config
from bd3lm.runs.recipe import Recipe, recipe_from_dict

Settings = Mapping[str, Any]

# The presets of Wikipedia say the same (tests/test_presets.py), and are not read here.
COMMON: Settings = {
    "data": {
        "path": "wikipedia",
        "context": 256,
        "bos_eos": False,
        "builtin_vocabulary": 1024,
        "validation_batch": 64,
        "validation_sequences": 512,
    },
    "network": {
        "size": "tiny",
        "layers": 8,
        "hidden": 512,
        "heads": 8,
        "dropout": 0.0,
        "tied": False,
        "adaln": False,
        "time_conditioning": False,
        "initialisation": "identity",
    },
    "optimizer": {
        "lr": 2e-3,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "warmup_steps": 100,
        "decay": "linear",
        "decay_steps": 300,
        "min_lr_ratio": 0.0,
        "clip_norm": 1.0,
    },
    "train": {
        "steps": 1000,  # of 128 sequences of 256 tokens: 33 M tokens
        "global_batch": 128,
        "micro_batch": None,
        "precision": "auto",
        "compile": "auto",
        "ema_decay": 0.99,
        "log_every": 20,
        "validate_every": 1000,
        "checkpoint_every": 1000,
        "adapt_every": 100,
    },
    "checkpoint": {"keep_last": 2, "keep_best": 1},
    "trackers": {
        "tensorboard": False,
        "wandb_project": None,
        "nelbo_variance_batches": 0,
        "gradient_variance_batches": 0,
    },
    "parallel": "auto",
    "start_from": None,
}
_METHODS: Mapping[str, Settings] = {
    "autoregressive": {"random_batch": False},
    "block_diffusion": {
        "block_size": None,
        "causal_clean": False,
        "next_token": 0.0,
        "algorithm": "single_pass",
        "strata": "permuted",
    },
    "score_entropy": {"process": "absorbing"},
    "d3pm": {"process": "absorbing", "schedule": "linear", "auxiliary": 0.0},
    "simplex": {"steps": 5000, "simplex_scale": 5.0},
}
_MASKINGS: Mapping[str, Settings] = {
    "times": {"kind": "times", "schedule": "linear"},
    "clipped": {
        "kind": "clipped",
        "low": 0.0,
        "high": 1.0,
        "weight": "reference",
        "redraw": False,
        "search": None,
    },
    "counts": {"kind": "counts", "complementary": False, "learn_proposal": False},
}
_SEARCH: Settings = {
    "every": 45,
    "batches": 3,
    "widths": [0.5, 0.6, 0.7, 0.8, 0.9],
    "step": 0.05,
    "full_range": True,
}


def in_full(changes: Settings, *, seed: int, skip: int) -> dict[str, Any]:
    """All settings of a run that makes these changes to what is common, and first skips some sequences."""
    method = changes["method"]
    usual = dict(_METHODS[method["kind"]])
    if masking := method.get("masking"):
        usual["masking"] = dict(_MASKINGS[masking["kind"]])
        if masking.get("search"):
            usual["masking"]["search"] = _SEARCH
    usual = {"kind": method["kind"], **usual, "score_first": True}
    return merge(COMMON, {"method": usual, "train": {"seed": seed}, "data": {"skip": skip}}, changes)


def digest_of(settings: Settings, *others: str) -> str:
    """Of settings, and of the digests of runs that have a part in the weights."""
    decisive = merge(settings)
    if decisive["network"]["initialisation"] == "gpt2":
        del decisive["network"]["initialisation"]  # the only one at first
    return hashlib.sha256(json.dumps([decisive, *others], sort_keys=True).encode()).hexdigest()[:16]


_OF_TRAINING = ("masking", "next_token", "algorithm", "strata", "random_batch", "auxiliary")


def recipe(settings: Settings, *, where: str) -> Recipe:
    """As the library trains it, which says apart from the method how it is trained."""
    method = dict(settings["method"])
    of_training = (*_OF_TRAINING, "steps") if method["kind"] == "simplex" else _OF_TRAINING
    objective = {name: method.pop(name) for name in of_training if name in method}
    if objective.get("masking", {}).get("kind") == "counts":
        masking = dict(objective["masking"])
        learned = masking.pop("learn_proposal", False)
        objective["masking"] = {"kind": "learned_counts"} if learned else masking
    return recipe_from_dict({**settings, "method": method, "objective": objective}, where=where)


def parameters(settings: Settings, vocabulary: int) -> int:
    """How many the network has."""
    shape = dict(settings["network"])
    del shape["initialisation"]
    config = network_config(
        shape.pop("size"), vocab_size=vocabulary, context=settings["data"]["context"], **shape
    )
    with torch.device("meta"):
        network = Transformer(config)
    return sum(each.numel() for each in network.parameters())
