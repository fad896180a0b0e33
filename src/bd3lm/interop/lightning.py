"""Load the reference's Lightning checkpoints (.ckpt) without running any code they name.

These files are pickles. Besides the weights they hold hyper-parameters and a tokenizer: objects of classes
that need not even be installed. torch's restricted unpickler (weights_only=True) refuses these classes. We
replace each class or function that it would refuse, by name, with one that does nothing, so nothing happens
whatever the file asks to call or restore. A file that still cannot be read is refused.

The state of these objects is plain data, and we keep it. So we can still read hyper-parameters stored by
omegaconf, as the reference's are. They name the parameterization, which the weights do not show, since MDLM,
SEDD and D3PM share one network.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bd3lm.interop.reference import (
    BUFFERS,
    FREQUENCIES,
    PREFIX,
    build_from_reference,
    check_reference_shapes,
    reference_name,
    transformer_of,
)
from bd3lm.methods import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    LanguageModelConfig,
    Method,
    ScoreEntropyMethod,
)
from bd3lm.models import Network, TransformerConfig

Weights = Literal["ema", "raw"]


@dataclass(frozen=True, kw_only=True)
class LightningFacts:
    """What a Lightning checkpoint does not say about its model.

    The model is `causal` (autoregressive) or `sedd`, or has a `block_size` (for MDLM the context). All of
    these can be omitted if the file's hyper-parameters tell. `time_conditioning` must be given if the network
    has a noise embedding: some models feed it the noise level, others a constant, with tensors of the same
    names and shapes. The reference's SEDD always feeds it the level.
    """

    context: int
    block_size: int | None = None
    causal: bool = False
    sedd: bool = False
    time_conditioning: bool | None = None
    mask_id: int | None = None
    """By default the last id, as with a tokenizer without a mask of its own."""
    weights: Weights | None = None
    """The moving average ("ema") or the raw weights; by default the average if there is one."""

    def __post_init__(self) -> None:
        if self.causal + self.sedd + (self.block_size is not None) > 1:
            raise ValueError(
                "only one of block_size (the context for MDLM), causal=True (autoregressive) and sedd=True "
                f"may be given, got block_size={self.block_size}, causal={self.causal} and sedd={self.sedd}"
            )
        if self.weights not in ("ema", "raw", None):
            raise ValueError(f"weights must be 'ema', 'raw' or None, got {self.weights!r}")


def load(
    path: Path,
    facts: LightningFacts | None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> tuple[Network, LanguageModelConfig]:
    """Load a model from a Lightning checkpoint of the reference. The shapes of the weights give the network's
    size."""
    if facts is None:
        raise ValueError(
            f"lightning must be given for {path}, which does not say its context or its method: run "
            "`bd3lm convert` first and use the folder that it writes; or in Python pass "
            "lightning=LightningFacts(context=..., block_size=...), with causal=True or sedd=True instead of "
            "block_size if that applies"
        )
    checkpoint = read(path)
    method = _method(facts, stated(checkpoint), where=str(path))
    state = _weights(checkpoint, facts.weights, where=str(path))
    config = _config(state, method, facts, where=str(path))
    shape = transformer_of(config)
    check_reference_shapes({name: tuple(t.shape) for name, t in state.items()}, shape, where=str(path))
    network = build_from_reference(shape, state, device=device, dtype=dtype, where=str(path))
    return network, config


def read(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint file, with inert objects in place of everything but tensors and plain
    values."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(_stand_in(name), name) for name in unknown]):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged or hostile pickle can fail in any way
        raise ValueError(
            f"{path} must be a checkpoint that torch.load can read with weights_only=True (other pickles "
            f"can run any code, so they are not loaded): {_reason(error)}"
        ) from None
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} must hold a dict, as Lightning's checkpoints do, got {type(checkpoint)}")
    return checkpoint


class _Inert:
    """Replaces any class or function: takes every argument, keeps a state unchanged, and does nothing."""

    state: object = None

    def __new__(cls, *args: object, **kwargs: object) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


def _reason(error: Exception) -> str:
    """torch's reason, without its advice to turn the protection off."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "weights_only" not in line]
    return lines[0] if lines else type(error).__name__


def _empty_dict(*args: object) -> dict[object, object]:
    """Replaces defaultdict, which omegaconf's objects hold: the unpickler fills only plain dicts."""
    return {}


def _stand_in(name: str) -> Callable[..., object]:
    return _empty_dict if name == "collections.defaultdict" else _Inert


@dataclass(frozen=True)
class Stated:
    """What the hyper-parameters of a checkpoint say about its method; None for what they do not say."""

    parameterization: str | None = None
    """subs (MDLM and BD3-LM), sedd, d3pm or ar."""
    block_size: int | None = None
    cross_attn: bool = False
    """Whether blocks see the clean text before them. If not, a text is one block."""


def stated(checkpoint: Mapping[str, Any]) -> Stated:
    """What a checkpoint says about its method, in the configuration it was trained with."""
    config = _entries(_entries(checkpoint.get("hyper_parameters")).get("config"))
    algo = _entries(config.get("algo"))  # the reference's; MDLM's own code has this one level up
    name = _value(algo.get("parameterization", config.get("parameterization")))
    size = _value(config.get("block_size"))
    return Stated(
        # "${...}" refers to another entry. Code would resolve it, and that is not run here.
        parameterization=name if isinstance(name, str) and not name.startswith("${") else None,
        block_size=size if isinstance(size, int) and not isinstance(size, bool) else None,
        cross_attn=_value(algo.get("cross_attn")) is True and size != _WHOLE_CONTEXT,
    )


_WHOLE_CONTEXT = "${model.length}"  # the reference's default block size


def _entries(node: object) -> Mapping[str, Any]:
    """The entries of a dict, or of a stand-in for one of omegaconf's; none for anything else."""
    if isinstance(node, _Inert) and isinstance(node.state, Mapping):
        node = node.state.get("_content")
    return node if isinstance(node, Mapping) else {}


def _value(node: object) -> object:
    """A plain value, or the value inside omegaconf's node."""
    if isinstance(node, _Inert) and isinstance(node.state, Mapping):
        return node.state.get("_val")
    return node


_GIVEN = "--block-size (the context for MDLM), --causal or --sedd of `bd3lm convert`"


def _method(facts: LightningFacts, file: Stated, *, where: str) -> Method:
    """The method given or stated in the file. An error if they differ, or if neither is there."""
    size, name = facts.block_size, file.parameterization
    given = "ar" if facts.causal else "sedd" if facts.sedd else None if size is None else "subs"
    if name not in ("subs", "sedd", "ar", None):
        raise ValueError(
            f"parameterization in the hyper-parameters of {where} must be subs (MDLM, BD3-LM), sedd or ar, "
            f"got {name!r}"
        )
    if given is None and name is None:
        raise ValueError(
            f"the method must be given for {where}, whose hyper-parameters do not name it (MDLM and SEDD "
            f"have the same tensors): use {_GIVEN}, or in Python the fields of LightningFacts"
        )
    if given is not None and name not in (given, None):
        raise ValueError(
            f"the method given for {where} must match its hyper-parameters, parameterization {name!r}, "
            f"got {given!r}; leave it out ({_GIVEN})"
        )
    if (given or name) == "ar":
        return AutoregressiveMethod()
    if (given or name) == "sedd":
        return ScoreEntropyMethod()
    if size is None and file.cross_attn and file.block_size is None:
        raise ValueError(
            f"block_size must be given for {where}, a block diffusion model whose hyper-parameters do not "
            "give it as a number: use --block-size of `bd3lm convert`"
        )
    if size is None:
        size = file.block_size if file.cross_attn else facts.context
    return BlockDiffusionMethod(block_size=size)


def _weights(checkpoint: Mapping[str, Any], which: Weights | None, *, where: str) -> dict[str, Tensor]:
    """The backbone's tensors by the reference's names, in the order of its parameters."""
    stored = checkpoint.get("state_dict")
    named = stored.items() if isinstance(stored, Mapping) else ()
    cleaned = {str(name).replace("_orig_mod.", ""): tensor for name, tensor in named}  # of torch.compile
    state = {name: tensor for name, tensor in cleaned.items() if name.startswith(PREFIX)}
    if not state or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"state_dict in {where} must hold tensors named {PREFIX}*, got {list(cleaned)[:5]}")
    average = checkpoint.get("ema")
    if which == "raw" or (which is None and average is None):
        return state
    shadow = average.get("shadow_params") if isinstance(average, Mapping) else None
    if not isinstance(shadow, list):
        raise ValueError(f"weights='ema' needs ema.shadow_params in {where}, got none; use weights='raw'")
    # The average is a plain list, in the order of the parameters.
    names = [name for name in state if name not in BUFFERS]
    shapes = [tuple(tensor.shape) if isinstance(tensor, Tensor) else None for tensor in shadow]
    expected = [tuple(state[name].shape) for name in names]
    if shapes != expected:
        at = next((i for i, (a, b) in enumerate(zip(shapes, expected, strict=False)) if a != b), None)
        differ = "" if at is None else f": {names[at]} is {shapes[at]} but must be {expected[at]}"
        raise ValueError(
            f"ema.shadow_params in {where} must be the {len(expected)} parameters of the backbone, "
            f"got {len(shapes)}{differ}"
        )
    return {**state, **dict(zip(names, shadow, strict=True))}


_BERT = 30_522  # the vocabulary size of bert-base-uncased, whose mask is 103


def _config(
    state: Mapping[str, Tensor], method: Method, facts: LightningFacts, *, where: str
) -> LanguageModelConfig:
    """The config of the network with these tensors."""

    def dimensions(name: str, count: int) -> list[int]:
        if name not in state or state[name].ndim != count or not state[name].numel():
            got = f"one of shape {tuple(state[name].shape)}" if name in state else "none"
            raise ValueError(f"{where} must hold a {name} of {count} dimensions, none of them 0, got {got}")
        return list(state[name].shape)

    vocab_size, hidden = dimensions(reference_name("embedding.weight"), 2)
    (pairs,) = dimensions(FREQUENCIES, 1)
    if hidden % (2 * pairs):
        raise ValueError(f"{FREQUENCIES} in {where} must have half a head of the {hidden} units, got {pairs}")
    mlp, _ = dimensions(reference_name("layers.0.mlp_in.weight"), 2)
    noise = reference_name("noise_embedding.first.weight")
    told = facts.time_conditioning
    if told is None and method.reference_tells_noise:
        told = noise in state  # with a constant level of 0 the reference's scores would all be infinite
    if noise in state and told is None:
        raise ValueError(
            f"time_conditioning must be given for {where}, which has a noise embedding ({noise}) and does "
            "not say whether it is fed the noise level or a constant: True or False, or `bd3lm convert` with "
            "--time-conditioning or --no-time-conditioning (published models use a constant)"
        )
    if vocab_size == _BERT and facts.mask_id is None:
        raise ValueError(
            f"mask_id must be given for {where}, whose vocabulary has the size of BERT's, where the mask is "
            "not the last token: 103 for bert-base-uncased, with --mask-id of `bd3lm convert`"
        )
    block_prefix = f"{PREFIX}blocks."
    blocks = {
        name.removeprefix(block_prefix).split(".")[0] for name in state if name.startswith(block_prefix)
    }
    shape: dict[str, Any] = (
        {"adaln": True, "conditioning_dim": dimensions(noise, 2)[0]} if noise in state else {}
    )
    try:
        return LanguageModelConfig(
            network=TransformerConfig(
                vocab_size=vocab_size,
                layers=len(blocks),
                hidden=hidden,
                heads=hidden // (2 * pairs),
                mlp_width=mlp,
                context=facts.context,
                time_conditioning=bool(told),
                **shape,
            ),
            method=method,
            mask_id=vocab_size - 1 if facts.mask_id is None else facts.mask_id,
        )
    except ValueError as error:
        raise ValueError(f"{where} with {facts} must describe a possible model: {error}") from error
