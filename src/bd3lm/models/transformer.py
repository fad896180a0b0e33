"""The decoder: token ids in, hidden states or logits out. It knows nothing about diffusion.

By default it is the paper's transformer (Suppl. C.2): pre-norm layers without biases in the norms, rotary
positions, tanh GELU, residual dropout, and optionally adaptive layer norms conditioned on a noise level.
Config fields turn it into a Llama- or Qwen-type network. The output head is a separate method, so a caller
computes logits only for the positions it needs.
"""

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bd3lm.models.additions import Addition, added
from bd3lm.models.attention import AttentionMask, Backend, allow_many_graphs, attend, compiler
from bd3lm.models.cache import KVCache, KVHanded, KVStore, KVTape, NoStore
from bd3lm.models.config import TransformerConfig
from bd3lm.models.cross_entropy import weighted_cross_entropy
from bd3lm.models.decoding import can_decode, decode
from bd3lm.models.devices import require_room
from bd3lm.models.draft_loss import Aim, DraftLoss, weighted_draft_loss
from bd3lm.models.dropout import Dropout, draw_seeds
from bd3lm.models.layouts import Layout, Span, inside
from bd3lm.models.network import Network
from bd3lm.models.rotary import Rotation, rotate, rotated_parts, rotation, split_heads

_FREQUENCIES = 256  # width of the sinusoidal embedding of a noise level
_INIT_STD = 0.02
_GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


class Transformer(Network):
    """A stack of decoder layers. `forward` returns final hidden states, `head` turns them into logits."""

    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.attention_backend: Backend = "auto"
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.mask_vector = nn.Parameter(torch.empty(config.hidden)) if config.mask_vector else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.final_norm = _norm(config, config.hidden)
        self.noise_embedding = NoiseEmbedding(config.conditioning_dim) if config.adaln else None
        self.final_modulation = (
            nn.Linear(config.conditioning_dim, 2 * config.hidden) if config.adaln else None
        )
        self.output = nn.Linear(config.hidden, config.vocab_size, bias=config.head_bias)
        if config.tied:
            self.output.weight = self.embedding.weight
        self._trunk = self._run_trunk
        self._trainings = 0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialization: residual branches shrink with depth. Adaptive norms start as plain
        norms."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                nn.init.ones_(module.weight)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, Addition):
                module.reset_parameters()
        if self.mask_vector is not None:
            nn.init.normal_(self.mask_vector, std=_INIT_STD)
        for layer in self._layers:
            layer.shrink_residuals(1 / math.sqrt(2 * self.config.layers))
            if layer.modulation is not None:  # no shift, no scale, gates of 1
                nn.init.zeros_(layer.modulation.weight)
                for gate in (2, 5):
                    layer.modulation.bias.data.unflatten(0, (6, -1))[gate] = 1.0
        if self.final_modulation is not None:
            nn.init.zeros_(self.final_modulation.weight)

    def start_as_identity(self) -> None:
        """Initialize so that no residual branch adds anything yet and token vectors are far apart.

        The first logits at a position depend on its token alone, and the inputs of each branch have unit
        variance. Masked positions all look alike: from GPT-2's small weights a network needs hundreds of
        steps to notice their surroundings (docs/decisions.md).
        """
        # If tied, the embedding is also the head. A token's own logit is width · std: √width instead of
        # width.
        std = self.config.hidden**-0.5 if self.config.tied else 1.0
        nn.init.normal_(self.embedding.weight, std=std)
        if self.mask_vector is not None:
            nn.init.normal_(self.mask_vector, std=std)
        for layer in self._layers:
            layer.close_residuals()

    def start_as(self, initialisation: str) -> None:
        if initialisation == "identity":
            self.start_as_identity()
        else:
            super().start_as(initialisation)

    def _is_beside(self, name: str) -> bool:
        """Whether a parameter is missing from a checkpoint without masks and additions."""
        return name == "mask_vector" or ".additions." in name

    def learn_beside(self) -> None:
        """The mask vector learns even if it is not new: it is a single vector, and a resumed run need not
        know how it began."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self._is_beside(name))

    def merged(self) -> "Transformer":
        if not self.config.adds_everywhere:
            return self
        with torch.device("meta"):
            plain = Transformer(self.config.merged)
        with torch.no_grad():
            weights = {name: x.clone() for name, x in self.state_dict().items() if ".additions." not in name}
            for index, layer in enumerate(self._layers):
                for name, addition in layer.additions.items():
                    weight = getattr(layer, name).weight
                    weights[f"layers.{index}.{name}.weight"] = cast("Addition", addition).merged(weight)
        plain.load_state_dict(weights, assign=True)
        if self.config.tied:  # the assignment split one parameter into two
            plain.output.weight = plain.embedding.weight
        plain.attention_backend = self.attention_backend
        return plain.train(self.training)

    @property
    def may_lack(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.named_parameters() if self._is_beside(name))

    def fill_in(self, names: Collection[str]) -> None:
        """Initialize a new mask vector as the mean of all token vectors. Additions keep their fresh
        values."""
        if self.mask_vector is not None and "mask_vector" in names:
            with torch.no_grad():
                self.mask_vector.copy_(self.embedding.weight.mean(0, dtype=torch.float32))

    @property
    def can_compile(self) -> bool:
        return True

    def compile_layers(self) -> None:
        for layer in self._layers:
            layer.compile(backend=compiler)

    def compile_trunk(self) -> None:
        """Compile all layers as one graph for each shape and layout."""
        allow_many_graphs()
        self._trunk = torch.compile(self._run_trunk, dynamic=False, backend=compiler)

    @property
    def can_recompute(self) -> bool:
        return True

    def recompute_layers(self) -> None:
        for layer in self._layers:  # inside any wrapper of the engine, which gathers the weights
            layer.forward = partial(_computed_twice, layer)  # type: ignore[method-assign]

    @property
    def _layers(self) -> "Sequence[Layer]":
        return cast("Sequence[Layer]", self.layers)

    @property
    def sharded_layers(self) -> "Sequence[Layer]":
        return self._layers

    @property
    def idle_parameters(self) -> int:
        return 0 if self.config.tied else self.embedding.weight.numel()

    @property
    def recordable(self) -> bool:
        return True

    @property
    def graph_key(self) -> object:
        """The addresses of the weights, and the kernels. Passes read weights in place, with two exceptions:
        adaptive norms are computed once per cache, and additions are merged into copies of the weights."""
        if self.config.adaln:
            return None
        merged = self.weights_key if self.config.additions else None
        return self.attention_backend, [each.data_ptr() for each in self.parameters()], merged

    @property
    def weights_key(self) -> object:
        """A key that changes when the weights change: their addresses, torch's counts of changes (which fused
        optimizers bypass), and how often training has begun."""
        counts = [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in self.parameters()]
        return self._trainings, counts

    def train(self, mode: bool = True) -> Self:
        self._trainings += mode
        return super().train(mode)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """The vectors (..., width) of token ids (...), or of mixtures of tokens.

        A mixture is given by its probabilities (..., vocabulary). Its vector is the mean of the token
        vectors.
        """
        if not tokens.is_floating_point():
            self._check_ids(tokens)
            return self._vectors(tokens)
        if tokens.shape[-1] != self.vocab_size:
            raise ValueError(
                f"probabilities must have {self.vocab_size} entries, one per token of the vocabulary, got "
                f"{tuple(tokens.shape)}"
            )
        weight = self.embedding.weight
        # Mixed precision multiplies in half precision; the residual stream keeps the dtype it has for ids.
        return (tokens.to(weight.dtype) @ weight).to(weight.dtype)

    def _vectors(self, tokens: Tensor) -> Tensor:
        """The vectors of token ids, which are not checked."""
        if self.mask_vector is None:
            embedded: Tensor = self.embedding(tokens)
            return embedded
        is_mask = tokens == self.config.vocab_size
        embedded = self.embedding(tokens.masked_fill(is_mask, 0))
        return torch.where(is_mask.unsqueeze(-1), self.mask_vector, embedded)

    def forward(
        self,
        tokens: Tensor,
        *,
        layout: Layout,
        noise: Tensor | None = None,
        cache: KVStore | None = None,
    ) -> Tensor:
        """Hidden states (rows, read positions, width) of the positions that `layout` reads.

        `tokens` are ids (rows, positions) or vectors (rows, positions, width) from `embed`. `noise` is
        (rows,) or (rows, positions); it is required if `time_conditioning` is on, and ignored otherwise.
        """
        self._check(tokens)
        self.check_room(*tokens.shape[:2])
        if can_decode(self, tokens, layout, cache):
            return decode(self, tokens, layout, cast("KVCache", cache))
        store = cache if cache is not None else NoStore()
        segment, device, read = tokens.shape[1], tokens.device, layout.read
        positions = store.text_positions(layout, tokens)
        every = (0, segment)
        mask = store.mask(layout, every, device, self.attention_backend)
        last_mask = (
            mask if read in (every, (0, 0)) else store.mask(layout, read, device, self.attention_backend)
        )
        x = self.to_stream(tokens)
        rope = self._rotation(positions, x.dtype)
        conditioning = self._conditioning(noise, tokens, x.dtype)
        adding = every if self.config.adds_everywhere else layout.added
        return self._trunk(x, rope, mask, last_mask, store, read, adding, conditioning, self._dropout_seeds())

    def to_stream(self, tokens: Tensor) -> Tensor:
        """The input of the first layer, for checked ids or embedded tokens."""
        return tokens if tokens.is_floating_point() else self._vectors(tokens)

    def _run_trunk(
        self,
        x: Tensor,
        rope: Rotation,
        mask: AttentionMask,
        last_mask: AttentionMask,
        store: KVStore,
        read: Span,
        adding: Span,
        conditioning: Tensor | None,
        seeds: "Sequence[Tensor]",
    ) -> Tensor:
        """All layers and the last norm: the part that is compiled as one graph."""
        every = (0, x.shape[1])
        for index, layer in enumerate(self._layers):
            last = index == len(self._layers) - 1
            x = layer(
                x,
                rope,
                last_mask if last else mask,
                store,
                index,
                read if last else every,
                adding,
                conditioning,
                seeds[2 * index : 2 * index + 2],
            )
        x = self.final_norm(x)
        if self.final_modulation is None:
            return x
        return _modulate(x, *self.final_modulation(_at(conditioning, read)).chunk(2, dim=-1))

    def _dropout_seeds(self) -> "Sequence[Tensor]":
        """Two seeds per layer, drawn outside the compiled trunk; none if there is no dropout."""
        if not self.training or self.config.dropout == 0.0:
            return ()
        return draw_seeds(2 * len(self._layers), self.device)

    def head(self, states: Tensor) -> Tensor:
        """Logits over the vocabulary.

        Without gradients, the logits of half-precision weights are float32 on devices that support it: a
        bfloat16 logit of 10 is off by up to 0.03, which is a few percent of a probability.
        """
        weight, bias = self.output.weight, self.output.bias
        same_half = weight.dtype.itemsize == 2 and states.dtype == weight.dtype
        if not states.is_cuda or not same_half or torch.is_grad_enabled():
            logits: Tensor = self.output(states)
            return logits
        logits = torch.mm(states.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        logits = logits.unflatten(0, states.shape[:-1])
        return logits if bias is None else logits + bias

    def cross_entropy(
        self, states: Tensor, targets: Tensor, weights: Tensor, *, excluded: int
    ) -> tuple[Tensor, Tensor]:
        """Σ weight·(−log p(target)) over hidden states (n, width), and its terms, detached.

        p gives no probability to the `excluded` token. The logits of all positions never exist at once.
        """
        return weighted_cross_entropy(
            states, self.output.weight, self.output.bias, targets, weights, excluded=excluded
        )

    def draft_loss(
        self,
        states: Tensor,
        verifying: Tensor,
        targets: Tensor,
        weights: Tensor,
        *,
        aim: Aim,
        excluded: int,
    ) -> DraftLoss:
        """The loss of drafts against the distributions of the `verifying` states; both states are (n,
        width)."""
        return weighted_draft_loss(
            states,
            verifying,
            self.output.weight,
            self.output.bias,
            targets,
            weights,
            aim=aim,
            excluded=excluded,
        )

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        config = self.config
        cos, sin = rotation(
            positions,
            config.head_dim,
            base=config.rotary_base,
            scaling=config.rotary_scaling,
            dtype=precise,
        )
        return cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for every head

    def _conditioning(self, noise: Tensor | None, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
        """(rows, positions or 1, conditioning_dim), or None without adaptive norms."""
        if self.noise_embedding is None:
            return None
        if not self.uses_noise:
            noise = torch.zeros(1, device=tokens.device)
        elif noise is None:
            raise ValueError("noise must be given: this network is conditioned on the noise level")
        elif noise.shape not in ((tokens.shape[0],), tuple(tokens.shape[:2])):
            raise ValueError(
                f"noise must have shape (rows,) or (rows, positions) = {tuple(tokens.shape[:2])}, "
                f"got {tuple(noise.shape)}"
            )
        embedded: Tensor = self.noise_embedding(noise.to(dtype))
        return embedded.unsqueeze(1) if noise.ndim == 1 else embedded

    def check_room(self, rows: int, positions: int) -> None:
        """Refuse a pass whose activations do not fit in memory: a config.json may claim any context."""
        weight = self.embedding.weight
        itemsize = 2 if torch.is_autocast_enabled(weight.device.type) else weight.itemsize
        # Next to the stream, memory holds its norm, queries, keys and values once, and the MLP's activations
        # once.
        config = self.config
        width = config.hidden + max(config.hidden + config.qkv_width, config.mlp_in_width)
        require_room(
            rows * positions * width * itemsize,
            weight.device,
            what=f"a pass over {rows:,} x {positions:,} tokens",
        )

    def _check(self, tokens: Tensor) -> None:
        if tokens.is_floating_point():
            if tokens.ndim != 3 or tokens.shape[-1] != self.config.hidden or not tokens.numel():
                raise ValueError(
                    f"embedded tokens must be (rows, positions, {self.config.hidden}) with at least one row, "
                    f"got {tuple(tokens.shape)}"
                )
            return
        if tokens.ndim != 2 or not tokens.numel():
            raise ValueError(
                f"tokens must be (rows, positions) with at least one row, got {tuple(tokens.shape)}"
            )
        self._check_ids(tokens)

    def _check_ids(self, tokens: Tensor) -> None:
        # On an accelerator, checking the values would stall every pass; there the embedding itself traps.
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            low, high = int(tokens.min()), int(tokens.max())
            most = self.config.input_vocab_size - 1
            if low < 0 or high > most:
                raise ValueError(f"token ids must lie in 0..{most}, got values from {low} to {high}")


def _computed_twice(
    layer: "Layer",
    x: Tensor,
    rope: Rotation,
    mask: AttentionMask,
    store: KVStore,
    index: int,
    *rest: Any,
) -> Tensor:
    """A layer that keeps only its input for the backward pass, and recomputes the rest there.

    Seeds are passed in and nothing is drawn inside, so both runs give the same bits. Out here a tape takes
    keys and values once: they stay in memory, because a later pass attends to them. A ring of keys and values
    is written in place, and nothing is learned through it.
    """
    if not torch.is_grad_enabled() or isinstance(store, KVCache):
        return Layer.forward(layer, x, rope, mask, store, index, *rest)

    def run(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        if not isinstance(store, KVTape):
            return Layer.forward(layer, x, rope, mask, store, index, *rest), None
        handed = KVHanded()
        return Layer.forward(layer, x, rope, mask, handed, index, *rest), handed.pair

    x, pair = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
    if pair is not None:
        store.extend(index, *pair)
    return x


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.hidden
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.activation, self.norm_eps = config.mlp, config.norm_eps
        self.attention_norm = _norm(config, width)
        self.qkv = nn.Linear(width, config.qkv_width, bias=config.qkv_bias)
        self.query_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.attention_out = nn.Linear(config.attention_width, width, bias=config.attention_bias)
        self.mlp_norm = _norm(config, width)
        self.mlp_in = nn.Linear(width, config.mlp_in_width, bias=config.mlp_bias)
        self.mlp_out = nn.Linear(config.mlp_width, width, bias=config.mlp_bias)
        self.dropout = Dropout(config.dropout)
        kv_width = config.kv_heads * config.head_dim
        parts: dict[str, tuple[int, ...]] = {"qkv": (config.attention_width, kv_width, kv_width)}
        if config.mlp == "swiglu":
            parts["mlp_in"] = (config.mlp_width, config.mlp_width)
        self.additions = nn.ModuleDict(
            {
                name: Addition(getattr(self, name), config.additions, parts.get(name, ()))
                for name in ("qkv", "attention_out", "mlp_in", "mlp_out")
                if config.additions
            }
        )
        self.modulation = nn.Linear(config.conditioning_dim, 6 * width) if config.adaln else None

    def shrink_residuals(self, factor: float) -> None:
        with torch.no_grad():
            self.attention_out.weight.mul_(factor)
            self.mlp_out.weight.mul_(factor)

    def close_residuals(self) -> None:
        """Make residual branches add nothing: keys, values and the MLP have unit variance, attention is
        uniform."""
        for module in (self.qkv, self.mlp_in):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.zeros_(self.qkv.weight[: self.attention_out.in_features])  # the rows of the queries
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.mlp_out.weight)

    def forward(
        self,
        x: Tensor,
        rope: Rotation,
        mask: AttentionMask,
        store: KVStore,
        index: int,
        read: Span,
        adding: Span,
        conditioning: Tensor | None,
        seeds: "Sequence[Tensor]",
    ) -> Tensor:
        """The residual stream at the positions in `read`. All positions produce keys and values. Additions
        apply at the positions in `adding`."""
        shift, scale, *after = self._modulations(conditioning)
        normed = _modulate(self.attention_norm(x), shift, scale)
        query, key, value = self._project(normed, rope, read, adding)
        key, value = store.extend(index, key, value)
        x = x[:, slice(*read)]
        if not x.shape[1]:  # this pass only fills a store
            return x
        gate, shift, scale, gate_mlp = (_at(m, read) for m in after)
        seed, seed_mlp = seeds or (None, None)
        adding = inside(adding, read)
        attended = attend(query, key, value, mask).transpose(1, 2).flatten(2)
        x = x + _gated(self.dropout(self._linear("attention_out", attended, adding), seed), gate)
        normed = _modulate(self.mlp_norm(x), shift, scale)
        mixed = self._linear("mlp_out", self._activate(self._linear("mlp_in", normed, adding)), adding)
        return x + _gated(self.dropout(mixed, seed_mlp), gate_mlp)

    def _addition(self, name: str) -> Addition | None:
        return cast("Addition", self.additions[name]) if name in self.additions else None

    def _linear(self, name: str, x: Tensor, adding: Span) -> Tensor:
        """One of the linear layers, with its addition at some positions."""
        return added(getattr(self, name)(x), x, self._addition(name), adding)

    def _modulations(self, conditioning: Tensor | None) -> "Sequence[Tensor | None]":
        """Shift, scale and gate for attention, then for the MLP; None without adaptive norms."""
        if self.modulation is None:
            return (None,) * 6
        return cast("Sequence[Tensor]", self.modulation(conditioning).chunk(6, dim=-1))

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "gelu":
            return _gelu(x)
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value

    def _project(
        self, normed: Tensor, rope: Rotation, read: Span, adding: Span
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries of the positions that are read; rotated keys, and values, of all positions."""
        if read == (0, normed.shape[1]) and self.query_norm is None:
            projected = self._linear("qkv", normed, adding)
            query, key, value = rotated_parts(projected, rope, self.heads, self.kv_heads)
        else:
            query, key, value, query_rope = self._projected(normed, rope, read, adding)
            if self.query_norm is not None and self.key_norm is not None:
                query, key = self.query_norm(query), self.key_norm(key)
            query, key = rotate(query, query_rope), rotate(key, rope)
        # Heads stay innermost in memory, as the projection wrote them, so nothing is moved in either
        # direction.
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _projected(
        self, normed: Tensor, rope: Rotation, read: Span, adding: Span
    ) -> tuple[Tensor, Tensor, Tensor, Rotation]:
        """Queries, keys and values (rows, positions, heads, head_dim), and the rotation of the queries."""
        if read == (0, normed.shape[1]):
            projected = self._linear("qkv", normed, adding)
            return *split_heads(projected, self.heads, self.kv_heads), rope
        start, stop = read
        cut = self.attention_out.in_features
        sizes = (cut, self.qkv.out_features - cut)
        query_weight, other_weight = self.qkv.weight.split(sizes)
        query_bias, other_bias = (None, None) if self.qkv.bias is None else self.qkv.bias.split(sizes)
        shown, addition = normed[:, start:stop], self._addition("qkv")
        query = F.linear(shown, query_weight, query_bias)
        query = added(query, shown, addition, inside(adding, read), 0, 1)
        both = added(F.linear(normed, other_weight, other_bias), normed, addition, adding, 1, 3)
        query = query.unflatten(-1, (self.heads, -1))
        key, value = (part.unflatten(-1, (self.kv_heads, -1)) for part in both.chunk(2, dim=-1))
        cos, sin = rope
        return query, key, value, (cos[..., start:stop, :, :], sin[..., start:stop, :, :])


class NoiseEmbedding(nn.Module):
    """Embed a noise level as a conditioning vector: sinusoids, then two linear layers, each followed by
    SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(_FREQUENCIES, width)
        self.second = nn.Linear(width, width)

    def forward(self, noise: Tensor) -> Tensor:
        half = _FREQUENCIES // 2
        exponents = torch.arange(half, device=noise.device, dtype=torch.float32) / half
        angles = noise.unsqueeze(-1) * torch.exp(-math.log(10000.0) * exponents)
        sinusoids = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.first.weight.dtype)
        return F.silu(self.second(F.silu(self.first(sinusoids))))


def _norm(config: TransformerConfig, width: int) -> nn.LayerNorm | nn.RMSNorm:
    if config.norm == "rms":
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=False)


def _modulate(x: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    return x if shift is None or scale is None else x * (1 + scale) + shift


def _gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, x · (1 + tanh z)/2. When compiled, x · sigmoid(2z): the same, but cheaper."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    z = x.float()
    return (z * torch.sigmoid(_GELU_SLOPE * (z + 0.044715 * z * z * z))).to(x.dtype)


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else gate * x


def _at(modulation: Tensor | None, read: Span) -> Tensor | None:
    """The modulation of the positions that are read. A modulation shared by all positions stays as it is."""
    if modulation is None or modulation.shape[1] == 1:
        return modulation
    return modulation[:, slice(*read)]
