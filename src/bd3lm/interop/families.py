"""Families of causal language models that our decoder covers: their config.json and tensors, in both
directions.

A family is a row of `FAMILIES`; a tensor is a row of `_LAYER_ROWS` or `_OTHER_ROWS`. Loading and saving use
the same rows, so each understands what the other writes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from bd3lm.interop.weights import Shape, parameter_shapes
from bd3lm.models import TransformerConfig
from bd3lm.models.rotary import LinearScaling, Llama3Scaling, RotaryScaling
from bd3lm.parsing import parse, shown

ACTIVATION = "silu"
ROPE_TYPES = ("default", "linear", "llama3")
FULL = "full_attention"

# The names of our fields in config.json, for every family.
_SHARED_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "intermediate_size": "mlp_width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "context",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
}

# Our fields with one value for every family.
_SHARED_FIXED: dict[str, object] = {
    "mlp": "swiglu",
    "norm": "rms",
    "head_bias": False,
    "additions": 0,
    "adaln": False,
    "time_conditioning": False,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The differences of one kind of checkpoint from the others."""

    model_type: str
    architecture: str
    """The class in `transformers`, as config.json names it under `architectures`."""
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Extra fields of its config.json, with the fields of ours that each sets."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Our fields with one value for the whole family."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of fields that its config.json may leave out. null means the default of `transformers`."""
    whole_heads: bool = True
    """Whether `transformers` requires the width to be a multiple of the heads, even if head_dim is given."""

    @property
    def our_values(self) -> dict[str, object]:
        return {**_SHARED_FIXED, **self.fixed}

    @property
    def said(self) -> dict[str, tuple[str, ...]]:
        """All fields of its config.json that set numbers or flags of ours."""
        return {**{name: (ours,) for name, ours in _SHARED_FIELDS.items()}, **self.fields}


_QKV_AND_OUT = {"attention_bias": ("qkv_bias", "attention_bias")}
_USUAL = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": None, "num_key_value_heads": None}
_NO_BIASES = {"qkv_bias": False, "attention_bias": False, "mlp_bias": False}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=_QKV_AND_OUT | {"mlp_bias": ("mlp_bias",)},
    fixed={"qk_norm": False},
    defaults=_USUAL | {"attention_bias": False, "mlp_bias": False},
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fixed=_NO_BIASES | {"qk_norm": False},
    defaults=_USUAL | {"num_key_value_heads": 8, "sliding_window": 4096},
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed=_NO_BIASES | {"qkv_bias": True, "qk_norm": False},
    defaults=_USUAL | {"num_key_value_heads": 32, "max_window_layers": 28},
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=_QKV_AND_OUT,
    fixed={"mlp_bias": False, "qk_norm": True},
    defaults=_USUAL
    | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False, "max_window_layers": 28},
    whole_heads=False,
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
)
WRITTEN = (LLAMA, QWEN2, QWEN3)
"""The families to try when saving, in order; a Mistral network is saved as Llama."""


# --- config.json to a network ---


@dataclass(frozen=True, kw_only=True)
class _Said:
    """The relevant fields of a config.json, with the family's defaults filled in."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = ACTIVATION
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 0
    layer_types: list[str] | None = None


def network_of(family: Family, data: Mapping[str, Any], *, where: str) -> TransformerConfig:
    """The network that a config.json of this family describes. Unsupported features are refused by name."""
    names = {each.name for each in fields(_Said)}
    values = {**family.defaults, **{name: data[name] for name in names if name in data}}
    said = parse(_Said, values, where=where)
    try:
        _check_layers(said, family)
        base, scaling = _rotary(said)
        ours = {one: getattr(said, name) for name, several in family.said.items() for one in several}
        zero_if_none = {name: ours[name] or 0 for name in ("kv_heads", "head_dim") if ours[name] is None}
        return TransformerConfig(
            **{
                **family.our_values,
                **ours,
                **zero_if_none,
                "context": _context(said, family),
                "rotary_base": base,
                "rotary_scaling": scaling,
                "dropout": 0.0,
                "mask_vector": True,
            }
        )
    except ValueError as error:
        raise ValueError(f"{where} must describe a network that bd3lm supports: {error}") from error


def _check_layers(said: _Said, family: Family) -> None:
    """Refuse layers of kinds that we do not have."""
    if said.hidden_act != ACTIVATION:
        raise ValueError(f"hidden_act must be {ACTIVATION!r}, got {shown(said.hidden_act)}")
    if said.layer_types is not None:
        odd = next((kind for kind in said.layer_types if kind != FULL), None)
        if odd is not None:
            raise ValueError(f"layer_types must all be {FULL!r}, got {shown(odd)}")
        return
    windowed = family is not MISTRAL and said.use_sliding_window and said.sliding_window is not None
    if windowed and said.max_window_layers < said.num_hidden_layers:
        raise ValueError(
            f"use_sliding_window must be false (from layer {said.max_window_layers} on, layers see a window "
            f"of {said.sliding_window} tokens), got true"
        )


def _context(said: _Said, family: Family) -> int:
    """The context. Mistral's layers see a window: up to its length they do the same as layers that see
    everything."""
    window = said.sliding_window if family is MISTRAL else None
    return min(said.max_position_embeddings, window or said.max_position_embeddings)


def _rotary(said: _Said) -> tuple[float, RotaryScaling | None]:
    """Base and scaling, as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes them."""
    rope = said.rope_scaling or said.rope_parameters or {}
    name = "rope_scaling" if said.rope_scaling else "rope_parameters"
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"{name}.rope_type must be one of {', '.join(ROPE_TYPES)}, got {shown(kind)}")
    share = rope.get("partial_rotary_factor", said.partial_rotary_factor)
    if share not in (None, 1):
        raise ValueError(f"partial_rotary_factor must be 1 (heads rotated whole), got {shown(share)}")
    base = _number(rope.get("rope_theta", said.rope_theta), "rope_theta")
    if kind == "default":
        return base, None
    factor = _number(rope.get("factor"), f"{name}.factor")
    if kind == "linear":
        return base, LinearScaling(factor=factor)
    original = _number(
        rope.get("original_max_position_embeddings"), f"{name}.original_max_position_embeddings"
    )
    return base, Llama3Scaling(
        factor=factor,
        original_context=int(original),
        low_freq_factor=_number(rope.get("low_freq_factor"), f"{name}.low_freq_factor"),
        high_freq_factor=_number(rope.get("high_freq_factor"), f"{name}.high_freq_factor"),
    )


def _number(value: object, name: str) -> float:
    """A value that must be a number that fits a float."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{name} must be a number, got {shown(value)}")


# --- A network to config.json ---


def family_for(network: TransformerConfig) -> Family:
    """The family to save a network as. A ValueError names the fields that fit no family."""
    problems = {family.model_type: list(misfits(family, network)) for family in WRITTEN}
    for family in WRITTEN:
        if not problems[family.model_type]:
            return family
    nearest = min(problems, key=lambda name: len(problems[name]))
    raise ValueError(
        f"network must fit a family of transformers ({', '.join(problems)}); nearest is {nearest}, "
        f"where {'; '.join(problems[nearest])}"
    )


def misfits(family: Family, network: TransformerConfig) -> Iterator[str]:
    """The fields of a network that a family cannot express."""
    for name, value in family.our_values.items():
        if (got := getattr(network, name)) != value:
            yield f"{name} must be {value!r}, got {got!r}"
    for name, ours in family.fields.items():
        if len({getattr(network, one) for one in ours}) > 1:
            values = ", ".join(f"{one} {getattr(network, one)}" for one in ours)
            yield f"{' and '.join(ours)} must be equal (both are {name}), got {values}"
    if family.whole_heads and network.hidden % network.heads:
        yield f"hidden must be a multiple of heads, got {network.hidden} and {network.heads}"
    if network.rotary_scaling is not None and rope_scaling_of(network.rotary_scaling) is None:
        yield f"rotary_scaling must be linear or llama3, got {network.rotary_scaling.kind!r}"


def config_of(family: Family, network: TransformerConfig) -> dict[str, Any]:
    """The config.json of a network that fits, readable by transformers 4 and 5."""
    told = {name: getattr(network, ours[0]) for name, ours in family.said.items()}
    scaling = network.rotary_scaling
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **told,
        "hidden_act": ACTIVATION,
        "rope_theta": network.rotary_base,
        "rope_scaling": None if scaling is None else rope_scaling_of(scaling),
    }


def rope_scaling_of(scaling: RotaryScaling) -> dict[str, Any] | None:
    """A scaling as config.json writes it; None if it has no name for it."""
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return None


# --- Tensors ---

Layout = Literal["huggingface", "gguf"]


@dataclass(frozen=True)
class _Row:
    """One module of theirs: the whole or part of one of our modules, with its name in each layout."""

    ours: str
    part: str | None
    huggingface: str
    gguf: str


_OTHER_ROWS = (
    _Row("embedding", None, "model.embed_tokens", "token_embd"),
    _Row("final_norm", None, "model.norm", "output_norm"),
    _Row("output", None, "lm_head", "output"),
)
_LAYER_ROWS = (
    _Row("attention_norm", None, "input_layernorm", "attn_norm"),
    _Row("qkv", "query", "self_attn.q_proj", "attn_q"),
    _Row("qkv", "key", "self_attn.k_proj", "attn_k"),
    _Row("qkv", "value", "self_attn.v_proj", "attn_v"),
    _Row("query_norm", None, "self_attn.q_norm", "attn_q_norm"),
    _Row("key_norm", None, "self_attn.k_norm", "attn_k_norm"),
    _Row("attention_out", None, "self_attn.o_proj", "attn_output"),
    _Row("mlp_norm", None, "post_attention_layernorm", "ffn_norm"),
    _Row("mlp_in", "gate", "mlp.gate_proj", "ffn_gate"),
    _Row("mlp_in", "up", "mlp.up_proj", "ffn_up"),
    _Row("mlp_out", None, "mlp.down_proj", "ffn_down"),
)
_LAYERS: dict[Layout, str] = {"huggingface": "model.layers.{}.", "gguf": "blk.{}."}
MASK_VECTOR = "mask_vector"  # only in our layout


@dataclass(frozen=True)
class Piece:
    """A tensor of theirs: these rows of one of our parameters."""

    name: str
    ours: str
    start: int
    stop: int
    shape: Shape
    part: str | None
    """query, key, value, gate or up, if it is only a part."""


def pieces(network: TransformerConfig, layout: Layout = "huggingface") -> list[Piece]:
    """All tensors of a checkpoint of this network, in our order. They cover every row of our parameters."""
    others, in_layers = _by_ours(_OTHER_ROWS), _by_ours(_LAYER_ROWS)
    found = []
    for name, shape in parameter_shapes(network).items():
        if name == MASK_VECTOR:
            continue
        module, parameter = name.rsplit(".", 1)
        prefix, rows = "", others
        if module.startswith("layers."):
            _, index, module = module.split(".")
            prefix, rows = _LAYERS[layout].format(index), in_layers
        start = 0
        for row in rows[module]:
            stop = start + _height(row.part, shape, network)
            theirs = row.huggingface if layout == "huggingface" else row.gguf
            piece_shape = (stop - start, *shape[1:])
            found.append(Piece(f"{prefix}{theirs}.{parameter}", name, start, stop, piece_shape, row.part))
            start = stop
    return found


def _by_ours(rows: tuple[_Row, ...]) -> dict[str, list[_Row]]:
    return {row.ours: [each for each in rows if each.ours == row.ours] for row in rows}


def _height(part: str | None, shape: Shape, network: TransformerConfig) -> int:
    """How many rows of our parameter this part has."""
    if part == "query":
        return network.attention_width
    if part in ("key", "value"):
        return network.kv_heads * network.head_dim
    if part in ("gate", "up"):
        return network.mlp_width
    return shape[0]
