"""A network's pass over a few tokens after a KV cache, in as few GPU kernels as possible.

It computes the same as `Transformer.forward` with a `KVCache`, and replaces it on CUDA: sampling makes such a
pass for every token. With few tokens, kernel launches and loading the weights take most of the time, so
norms, biases, activations and residuals are fused into the matrix products (`kernels`). With many tokens the
library's own products are faster, and one kernel does everything between two of them. Attention reads only
the visible part of the ring. For tokens with low-rank additions the pass reads weights with the additions
merged in: as two more small products, each addition would cost launches of its own.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bd3lm.models.cache import KVCache, KVStore
from bd3lm.models.devices import runs_kernels
from bd3lm.models.layouts import Layout, Span, inside
from bd3lm.models.rotary import Rotation

if TYPE_CHECKING:
    from bd3lm.models.additions import Addition
    from bd3lm.models.transformer import Layer, Transformer

# Up to this many tokens the fused kernels are faster than the library's (docs/decisions.md).
_FEW_TO_NORM = 16
_FEW_TO_ADD = 32  # at least _FEW_TO_NORM: when a branch waits for a norm, that norm is not a fused one
_FEW_OF_TWO_KINDS = 32  # for both, if additions apply to some of the tokens; not measured yet
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_decode(network: "Transformer", tokens: Tensor, layout: Layout, cache: KVStore | None) -> bool:
    """Whether `decode` can compute this pass."""
    return (
        isinstance(cache, KVCache)
        and runs_kernels(tokens.device)
        and not network.training
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not network.uses_noise
        and not network.config.adds_everywhere  # `Transformer.merged` has none, and reads no other weights
        and network.attention_backend == "auto"
        and network.embedding.weight.dtype in _DTYPES
        and cache.keys.dtype == network.embedding.weight.dtype
        and _serves(network)
        and _kernels().ring_rule(layout, cache.window, cache.segment) is not None
    )


def _serves(network: "Transformer") -> bool:
    """Whether the kernels support this network. If not, warn, because sampling is slower without them."""
    config, dtype = network.config, network.embedding.weight.dtype
    served = bool(_kernels().supports(config, dtype))
    if not served:
        _say_not_fused(config.head_dim)
    return served


@lru_cache
def _say_not_fused(head_dim: int) -> None:
    """Warn once for each head size."""
    warnings.warn(
        "this network is sampled without fused kernels, which is slower: they support a head_dim of 16, 32, "
        f"64 or 128, got {head_dim}",
        stacklevel=2,
    )


def decode(network: "Transformer", tokens: Tensor, layout: Layout, cache: KVCache) -> Tensor:
    """Hidden states (rows, read positions, width), as from `Transformer.forward`."""
    cache.check_pass(layout, tokens)
    with torch.cuda.device(tokens.device) if tokens.is_cuda else nullcontext():  # Triton uses the current one
        return _decode(network, tokens, layout, cache)


def _decode(network: "Transformer", tokens: Tensor, layout: Layout, cache: KVCache) -> Tensor:
    config, segment, last = network.config, tokens.shape[1], len(network.layers) - 1
    rule = _kernels().ring_rule(layout, cache.window, cache.segment)
    listing = rule.listing(tokens.device)
    ring = _Ring(
        cache,
        rule,
        _kernels().rotations(
            cache.ends,
            segment,
            head_dim=config.head_dim,
            base=config.rotary_base,
            scaling=config.rotary_scaling,
            places=None if listing is None else listing.places,
        ),
    )
    added = layout.added if config.additions else (0, 0)
    stream = _Stream(network.to_stream(tokens), added)
    merged = _merged(network) if added[0] < added[1] else [{} for _ in network.layers]
    layers, final_norm = _norms(network, cache)
    for index, (layer, norms) in enumerate(zip(network.layers, layers, strict=True)):
        read = layout.read if index == last else (0, segment)
        _run_layer(cast("Layer", layer), norms, merged[index], stream, index, ring, read)
    return stream.normed(final_norm)


def _run_layer(
    layer: "Layer",
    norms: "_LayerNorms",
    merged: "_Merged",
    stream: "_Stream",
    index: int,
    ring: "_Ring",
    read: Span,
) -> None:
    """Like `Layer.forward`, in evaluation mode."""
    qkv, attention_out, mlp_in, mlp_out = (
        _Linear.of(getattr(layer, name), merged.get(name))
        for name in ("qkv", "attention_out", "mlp_in", "mlp_out")
    )
    attended = ring.attend(layer, index, stream.norm_linear(norms.attention, qkv), read)
    stream.narrow(read)
    if read == (0, 0):
        return
    stream.add_linear(attended, attention_out, norms.attention_gate)
    widened = stream.norm_linear(norms.mlp, mlp_in, layer.activation)
    stream.add_linear(widened, mlp_out, norms.mlp_gate)


class _Stream:
    """The residual stream (rows, positions, width) of a pass.

    With many tokens, the output of a branch waits for the next norm, and one kernel does both. At the
    positions in `added` the linear layers use their merged weights.
    """

    def __init__(self, x: Tensor, added: Span) -> None:
        self._shape, self._x, self._added = x.shape, _flat(x), added
        self._branch: tuple[Tensor, Tensor | None] | None = None  # waits to be added, times a gate

    def narrow(self, read: Span) -> None:
        """Keep only these positions; no branch may be waiting."""
        if read != (0, self._shape[1]):
            kept = self._x.view(self._shape)[:, slice(*read)]
            self._shape, self._x, self._added = kept.shape, _flat(kept), inside(self._added, read)

    def norm_linear(self, norm: "_Norm", linear: "_Linear", activation: str | None = None) -> Tensor:
        """linear(norm(stream)), with or without an activation."""
        if self._is_few(_FEW_TO_NORM):
            y: Tensor = _kernels().norm_linear(
                self._x,
                norm.weight,
                norm.bias,
                linear.weight,
                linear.bias,
                rms=norm.rms,
                eps=norm.eps,
                activation=activation,
                other=self._other(linear),
            )
        elif activation == "gelu":
            y = self._product(self._normed(norm), linear, _gelu_linear)
        else:
            y = self._product(self._normed(norm), linear)
            y = _kernels().swiglu(y) if activation == "swiglu" else y
        return y.view(*self._shape[:-1], -1)

    def add_linear(self, x: Tensor, linear: "_Linear", gate: Tensor | None) -> None:
        """stream + gate · linear(x), for as many tokens as the stream has."""
        flat = _flat(x)
        if self._is_few(_FEW_TO_ADD):
            self._x = _kernels().linear_residual(
                flat, linear.weight, linear.bias, self._x, gate, other=self._other(linear)
            )
        else:
            self._branch = self._product(flat, linear), gate

    def normed(self, norm: "_Norm") -> Tensor:
        return self._normed(norm).view(self._shape)

    @property
    def _has_two_kinds(self) -> bool:
        start, stop = self._added
        return start < stop

    def _is_few(self, most: int) -> bool:
        """Whether to use the fused kernels for this many tokens. `most` applies if all tokens have the same
        weights."""
        return len(self._x) <= (_FEW_OF_TWO_KINDS if self._has_two_kinds else most)

    def _other(self, linear: "_Linear") -> Any:
        """The merged weight, in the form that the fused kernels take."""
        if not self._has_two_kinds:
            return None
        return _kernels().OtherWeight(linear.merged, self._shape[1], *self._added)

    def _product(self, x: Tensor, linear: "_Linear", product: "_Product" = F.linear) -> Tensor:
        """The library's product: one over all tokens, or one for each kind of token."""
        if not self._has_two_kinds or linear.merged is None:
            return product(x, linear.weight, linear.bias)
        rows, size = self._shape[:2]
        start, stop = self._added
        parts = [
            product(x.view(rows, size, -1)[:, first:last].flatten(0, 1), weight, linear.bias)
            for first, last, weight in (
                (0, start, linear.weight),
                (start, stop, linear.merged),
                (stop, size, linear.weight),
            )
            if first < last
        ]
        return torch.cat([part.view(rows, -1, part.shape[-1]) for part in parts], 1).flatten(0, 1)

    def _normed(self, norm: "_Norm") -> Tensor:
        if self._branch is None:
            return norm(self._x)
        y, gate = self._branch
        self._x, normed = _kernels().add_norm(
            self._x, y, gate, norm.weight, norm.bias, rms=norm.rms, eps=norm.eps
        )
        self._branch = None
        return cast("Tensor", normed)


def _flat(x: Tensor) -> Tensor:
    """(tokens, features), contiguous: the kernels take no strides, and a part of a pass may be a view."""
    return x.reshape(-1, x.shape[-1]).contiguous()


_Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # tokens, weight, bias


def _gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GELU of a product. On a GPU the product's own kernel applies it, in the tanh form."""
    if x.is_cuda and bias is not None:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


@dataclass(frozen=True)
class _Linear:
    """A linear layer. `merged` is its weight with the additions merged in, for passes that use them."""

    weight: Tensor
    bias: Tensor | None
    merged: Tensor | None

    @classmethod
    def of(cls, linear: nn.Linear, merged: Tensor | None) -> "_Linear":
        return cls(linear.weight, linear.bias, merged)


@dataclass(frozen=True)
class _Ring:
    """The cache as one pass sees it."""

    cache: KVCache
    rule: Any
    rope: Rotation

    def attend(self, layer: "Layer", index: int, qkv: Tensor, read: Span) -> Tensor:
        cache, norms = self.cache, (layer.query_norm, layer.key_norm)
        query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
        attended: Tensor = _kernels().attend_ring(
            qkv,
            *self.rope,
            cache.keys[index],
            cache.values[index],
            cache.starts,
            cache.ends,
            self.rule,
            read,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=layer.norm_eps,
        )
        return attended


@dataclass(frozen=True)
class _Norm:
    """A norm over the last dimension, with the shift and scale of an adaptive norm folded in."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    rms: bool

    @classmethod
    def of(
        cls, norm: nn.LayerNorm | nn.RMSNorm, shift: Tensor | None = None, scale: Tensor | None = None
    ) -> "_Norm":
        weight, rms = norm.weight, isinstance(norm, nn.RMSNorm)
        eps = cast("float", norm.eps)
        if shift is None or scale is None:
            return cls(weight, None, eps, rms)
        return cls((weight * (1 + scale)).contiguous(), shift.contiguous(), eps, rms)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.rms:
            return F.layer_norm(x, x.shape[1:], self.weight, self.bias, self.eps)
        normed = F.rms_norm(x, x.shape[1:], self.weight, self.eps)
        return normed if self.bias is None else normed + self.bias


@dataclass(frozen=True)
class _LayerNorms:
    """The norms of a layer, and the gates of its branches."""

    attention: _Norm
    mlp: _Norm
    attention_gate: Tensor | None = None
    mlp_gate: Tensor | None = None


_Norms = tuple[list[_LayerNorms], _Norm]
_ADAPTIVE: "WeakKeyDictionary[KVCache, _Norms]" = WeakKeyDictionary()


def _norms(network: "Transformer", cache: KVCache) -> _Norms:
    """All norms. Adaptive norms see a constant here, so their result is kept as long as the cache.

    It is not kept longer because we cannot detect a change of the weights: fused optimizers bypass torch's
    counters.
    """
    layers = [cast("Layer", layer) for layer in network.layers]
    if network.noise_embedding is None or network.final_modulation is None:
        return [_LayerNorms(_Norm.of(x.attention_norm), _Norm.of(x.mlp_norm)) for x in layers], _Norm.of(
            network.final_norm
        )
    if cache not in _ADAPTIVE:
        constant = network.noise_embedding(torch.zeros(1, device=network.device))[0]
        parts = [cast("nn.Linear", x.modulation)(constant).chunk(6) for x in layers]
        adapted = [
            _LayerNorms(
                _Norm.of(x.attention_norm, shift, scale),
                _Norm.of(x.mlp_norm, mlp_shift, mlp_scale),
                gate.contiguous(),
                mlp_gate.contiguous(),
            )
            for x, (shift, scale, gate, mlp_shift, mlp_scale, mlp_gate) in zip(layers, parts, strict=True)
        ]
        _ADAPTIVE[cache] = adapted, _Norm.of(network.final_norm, *network.final_modulation(constant).chunk(2))
    return _ADAPTIVE[cache]


_Merged = dict[str, Tensor]  # of one layer, by the names of its linear layers
_MERGED: "WeakKeyDictionary[Transformer, tuple[object, list[_Merged]]]" = WeakKeyDictionary()


def _merged(network: "Transformer") -> list[_Merged]:
    """The weights with the additions merged in, kept for as long as the network lives.

    When we see that the weights have changed, we recompute them in place, because CUDA graphs read them at
    their address. A change that we do not see only makes drafts worse until the next one that we see; no text
    becomes wrong.
    """
    key, known = network.weights_key, _MERGED.get(network)
    if known is None or known[0] != key:
        # Outside any active inference mode: its tensors could not be written again later.
        with torch.inference_mode(False), torch.no_grad():
            fresh = (_merge(cast("Layer", layer)) for layer in network.layers)  # one at a time in memory
            before: list[_Merged] = [{} for _ in network.layers] if known is None else known[1]
            _MERGED[network] = key, [_keep(*pair) for pair in zip(before, fresh, strict=True)]
    return _MERGED[network][1]


def _merge(layer: "Layer") -> _Merged:
    return {
        name: cast("Addition", addition).merged(getattr(layer, name).weight)
        for name, addition in layer.additions.items()
    }


def _keep(before: _Merged, fresh: _Merged) -> _Merged:
    """Write the fresh weights over the old ones if device and dtype match, else use the fresh tensors."""

    def fits(name: str) -> bool:
        old, new = before.get(name), fresh[name]
        return old is not None and (old.device, old.dtype) == (new.device, new.dtype)

    return {name: before[name].copy_(x) if fits(name) else x for name, x in fresh.items()}


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """Imported only with CUDA: there may be no Triton on other machines."""
    from bd3lm.models.kernels import decoding

    return decoding
