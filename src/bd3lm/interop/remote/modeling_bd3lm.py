"""A block diffusion language model (BD3-LM) for transformers: the network, and sampling in blocks.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=64)

A text is written from left to right in blocks of a few tokens. Each block begins as masks. A pass over the
block predicts its masked tokens, and one of them is revealed, in an order drawn beforehand.
`BD3LMForCausalLM.forward` documents which tokens see which.
"""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from bd3lm.counter import Purpose, counter_uniform, derive_seed
from bd3lm.diffusion.categorical import gumbel_max, nucleus, temper, top_k
from bd3lm.diffusion.parameterizations import subs_at_masks
from bd3lm.diffusion.schedules import conditioning_noise
from bd3lm.models.config import TransformerConfig
from bd3lm.models.layouts import BlockCausal, BlockDecoding, Layout
from bd3lm.models.protocol import embed_with_previous
from bd3lm.models.rotary import Rotation, _rotated_parts
from bd3lm.models.transformer import Layer, NoiseEmbedding, Transformer, _norm
from bd3lm.sampling.unmasking import first_hitting_order

from .configuration_bd3lm import BD3LMConfig

AttentionMask = Tensor
rotated_parts = _rotated_parts


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """softmax(q kᵀ / √d) v where the mask (queries, keys) allows it. Each key/value head may serve several
    query heads."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


class Dropout(nn.Dropout):
    """torch's own dropout: bd3lm's seeds are not needed here."""

    def forward(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        return super().forward(x)


class KVStore:
    """Rotated keys and values of the finished text. A pass sees the last `window` positions."""

    def __init__(self, layers: int, window: int) -> None:
        self.window, self.length = window, 0
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._new: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Everything that a pass attends to: the kept keys and values, then its own."""
        kept = self._kept[layer]
        if kept is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(kept, (key, value), strict=True))
        self._new[layer] = key, value
        return key, value

    def keep(self, tokens: int) -> None:
        """Keep the keys and values of the last pass, which was over finished text."""
        self.length += tokens
        self._kept = [
            None if pair is None else (pair[0][:, :, -self.window :], pair[1][:, :, -self.window :])
            for pair in self._new
        ]

    def mask(self, layout: Layout, device: torch.device) -> Tensor:
        """Who sees whom in a pass after the text: (positions, kept positions and own ones)."""
        kept = min(self.length, self.window)
        query = torch.arange(layout.size, device=device).unsqueeze(1)
        key = torch.arange(-kept, layout.size, device=device).unsqueeze(0)
        seen = (key < 0) | layout.allows(query, key.clamp_min(0))
        return seen & (key >= layout.group_start(query) - self.window)


class NoStore:
    """A pass on its own."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value


class Shape(SimpleNamespace):
    """The network's fields by name, as config.json has them under `network`."""

    attention_width = TransformerConfig.attention_width
    qkv_width = TransformerConfig.qkv_width
    mlp_in_width = TransformerConfig.mlp_in_width


class BD3LMForCausalLM(PreTrainedModel):
    """The network with its head. Parameters have the same names as in bd3lm."""

    config_class = BD3LMConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _no_split_modules = ["Layer"]  # noqa: RUF012  # as transformers declares it
    _supports_sdpa = True
    _tied_weights_keys = {"output.weight": "embedding.weight"}  # noqa: RUF012  # as transformers declares it

    def __init__(self, config: BD3LMConfig) -> None:
        super().__init__(config)
        shape: Any = Shape(**config.network)
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.mask_vector = nn.Parameter(torch.zeros(shape.hidden)) if shape.mask_vector else None
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.final_norm = _norm(shape, shape.hidden)
        self.noise_embedding = NoiseEmbedding(shape.conditioning_dim) if shape.adaln else None
        self.final_modulation = nn.Linear(shape.conditioning_dim, 2 * shape.hidden) if shape.adaln else None
        self.output = nn.Linear(shape.hidden, shape.vocab_size, bias=shape.head_bias)
        self.shape = shape
        self.post_init()

    _layers: Any = Transformer._layers
    _vectors: Any = Transformer._vectors
    _conditioning: Any = Transformer._conditioning
    _run_trunk: Any = Transformer._run_trunk

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = cast("nn.Embedding", value)

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.output = cast("nn.Linear", new_embeddings)

    @property
    def uses_noise(self) -> bool:
        """Whether the output depends on the noise level."""
        return bool(self.shape.time_conditioning)

    def embed(self, tokens: Tensor) -> Tensor:
        """The vectors (..., width) of token ids (...), which may include the mask."""
        vectors: Tensor = self._vectors(tokens)
        return vectors

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        noise: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> CausalLMOutput:
        """Logits (rows, positions, vocabulary) at every token of some texts, not shifted.

        Blocks are counted from the first token. A block that contains a mask (`config.mask_id`) is being
        written: its tokens see the whole block and everything before it. A block without masks is finished:
        its tokens see the same. If `config.method["causal_clean"]` is true, they see only themselves and the
        tokens before them, and their logits predict the next token. Only the last block should contain masks,
        because later tokens would see them.

        A network that receives the noise level (`config.network["time_conditioning"]`) needs `noise`, −log(1
        − mask rate), for each row or each position. With `output_hidden_states`, `hidden_states` has the
        inputs of the head.
        """
        self._check(input_ids, attention_mask)
        length, n = input_ids.shape[1], self._block_size
        whole = -(-length // n) * n
        written, finished = BlockCausal(whole, n), self._layout(whole, finished=True)
        device = input_ids.device
        is_mask = F.pad(input_ids == self.config.mask_id, (0, whole - length)).unflatten(1, (-1, n)).any(-1)
        open_block = is_mask.repeat_interleave(n, dim=1)[:, :length]
        seen = torch.where(
            open_block.unsqueeze(-1),
            written.dense(device=device)[:length, :length],
            finished.dense(device=device)[:length, :length],
        )
        before = torch.cat((input_ids[:, :1], input_ids[:, :-1]), dim=1)
        positions = torch.arange(length, device=device)
        states = self._states(input_ids, before, positions, seen.unsqueeze(1), NoStore(), noise)
        hidden_states: Any = (states,) if output_hidden_states else None
        logits: Any = self.head(states)
        return CausalLMOutput(logits=logits, hidden_states=hidden_states)

    def head(self, states: Tensor) -> Tensor:
        """Logits over the vocabulary, in float32 at least."""
        logits: Tensor = self.output(states)
        return logits if logits.dtype == torch.float64 else logits.float()

    @property
    def _block_size(self) -> int:
        return int(self.config.method["block_size"])

    def _layout(self, length: int, *, finished: bool) -> BlockDecoding:
        causal = self.config.method["causal_clean"]
        return BlockDecoding(length, self._block_size, causal_clean=causal, keys_only=finished)

    def _states(
        self,
        tokens: Tensor,
        before: Tensor,
        positions: Tensor,
        mask: Tensor,
        store: KVStore | NoStore,
        noise: Tensor | None,
    ) -> Tensor:
        """Hidden states of tokens (rows, n) at some positions of their texts; `before` has the token before
        each."""
        if self.config.method["previous_token"]:
            x = embed_with_previous(cast("Any", self), tokens, before, blank=self.config.mask_id)
        else:
            x = self.embed(tokens)
        conditioning = self._conditioning(noise, tokens, x.dtype)
        every = (0, tokens.shape[1])
        rope = self._rotation(positions, x.dtype)
        states: Tensor = self._run_trunk(
            x,
            rope,
            mask=mask,
            last_mask=mask,
            store=store,
            read=every,
            adding=(0, 0),
            conditioning=conditioning,
            seeds=(),
        )
        return states

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """cos and sin of the angles, computed in double precision, the same for every head."""
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        slopes = torch.tensor(self.config.rotary_frequencies, dtype=torch.float64, device=positions.device)
        angles = (positions.unsqueeze(-1).double() * slopes).unsqueeze(-2)
        return angles.cos().to(precise), angles.sin().to(precise)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> Tensor:
        """Continue prompts (rows, tokens) of one length to texts (rows, tokens), written in blocks.

        Tokens are drawn at a temperature (0 takes the likeliest), from the `top_k` likeliest and from those
        that hold `top_p` of the probability (by default `config.default_top_p`; 1 is the model itself). A
        text ends after the first end token that is drawn, and is filled up with `pad_token_id`. A text
        depends on its prompt, the seed and its row, and is the same as in bd3lm.
        """
        top_p = self.config.default_top_p if top_p is None else top_p
        eos = self.config.eos_token_id if eos_token_id is None else eos_token_id
        pad = self.config.pad_token_id if pad_token_id is None else pad_token_id
        self._check(input_ids, attention_mask)
        _check_settings(max_new_tokens, temperature, top_p, top_k, seed)
        n, mask_id, context = self._block_size, self.config.mask_id, self.shape.context
        (rows, given), device = input_ids.shape, input_ids.device
        if bool((input_ids == mask_id).any()):
            raise ValueError(f"input_ids must not hold the mask {mask_id}")
        length = given + max_new_tokens
        if n == context and length > context:
            raise ValueError(
                f"a model of one block writes at most its context of {context} tokens, got a prompt of "
                f"{given} and max_new_tokens {max_new_tokens}"
            )
        text = torch.full((rows, -(-length // n) * n), mask_id, device=device)
        text[:, :given] = input_ids
        seeds = torch.tensor([derive_seed(seed, "text", row) for row in range(rows)])
        store = KVStore(self.shape.layers, context - n) if n < context else NoStore()
        start = given // n * n
        if start and isinstance(store, KVStore):
            self._read(text, 0, start, store)
        done = torch.zeros(rows, dtype=torch.bool, device=device)
        was_training = self.training
        self.eval()  # with dropout the results would not be exact
        try:
            for begin in range(start, text.shape[1], n):
                if begin > start and isinstance(store, KVStore):
                    self._read(text, begin - n, begin, store)
                for place, rate in self._plan(seeds, begin, given, length):
                    tokens = self._draw(
                        text,
                        begin,
                        place.to(device),
                        rate.to(device),
                        store,
                        seeds,
                        temperature,
                        top_k,
                        top_p,
                    )
                    text[:, begin : begin + n].scatter_(1, place.to(device), tokens)
                if eos is not None:
                    written = text[:, max(begin, given, 1) : min(begin + n, length)]
                    done |= (written == eos).any(1)
                    if bool(done.all()):
                        break
        finally:
            self.train(was_training)
        return _ended(text[:, : min(begin + n, length)], max(given, 1), eos, pad)

    def _plan(self, seeds: Tensor, begin: int, given: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each pass, the position (rows, 1) in the block to reveal, and the mask rate (rows,)."""
        positions = begin + torch.arange(self._block_size).expand(len(seeds), -1)
        masked = (positions >= given) & (positions < length)
        order, _, rate = first_hitting_order(seeds, positions, masked, self.config.method["lean"])
        for index in range(int(masked[0].sum())):
            yield order[:, index : index + 1], rate[:, index]

    def _read(self, text: Tensor, begin: int, end: int, store: KVStore) -> None:
        """Read finished text, in whole blocks."""
        tokens, positions = text[:, begin:end], torch.arange(begin, end, device=text.device)
        layout = self._layout(end - begin, finished=True)
        noise = torch.zeros(tokens.shape, device=text.device) if self.uses_noise else None
        self._states(tokens, tokens, positions, store.mask(layout, text.device), store, noise)
        store.keep(end - begin)

    def _draw(
        self,
        text: Tensor,
        begin: int,
        place: Tensor,
        mask_rate: Tensor,
        store: KVStore | NoStore,
        seeds: Tensor,
        temperature: float,
        k: int | None,
        p: float,
    ) -> Tensor:
        """Draw tokens (rows, 1) at a position (rows, 1) of each row's block, from one pass over the block."""
        n = self._block_size
        positions = begin + torch.arange(n, device=text.device)
        layout = self._layout(n, finished=False)
        isolated = layout.dense(device=text.device)
        mask = store.mask(layout, text.device) if isinstance(store, KVStore) else isolated
        noise = conditioning_noise(mask_rate).unsqueeze(1).expand(-1, n) if self.uses_noise else None
        block, before = text[:, begin : begin + n], text[:, (positions - 1).clamp_min(0)]
        states = self._states(block, before, positions, mask, store, noise)
        asked = states.gather(1, place.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        log_p = subs_at_masks(self.head(asked), self.config.mask_id)
        if bool(log_p[..., int(self.config.mask_id == 0)].isnan().any()):
            raise FloatingPointError("the model's probabilities are not finite; its weights may hold NaN")
        if temperature == 0.0:
            return log_p.argmax(-1)
        log_p = temper(log_p, temperature)
        log_p = nucleus(log_p if k is None else top_k(log_p, k), p)
        at = (begin + place).to(text.device)
        uniform = counter_uniform(seeds.to(text.device).unsqueeze(1), at, Purpose.TOKEN, log_p.shape[-1])
        return gumbel_max(log_p, uniform)

    def _check(self, input_ids: Tensor, attention_mask: Tensor | None) -> None:
        most = self.shape.vocab_size - 1 + bool(self.shape.mask_vector)
        if input_ids.ndim != 2 or not input_ids.numel() or input_ids.dtype != torch.long:
            raise ValueError(
                "input_ids must be int64 token ids (rows, tokens) with at least one of them, got "
                f"{input_ids.dtype} of shape {tuple(input_ids.shape)}"
            )
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high > most:
            raise ValueError(f"input_ids must lie in 0..{most}, got values from {low} to {high}")
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            raise ValueError(
                "attention_mask must be 1 everywhere: pass texts of different lengths one by one"
            )


def _check_settings(max_new_tokens: int, temperature: float, top_p: float, k: int | None, seed: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and not negative, got {temperature}")
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if k is not None and k < 1:
        raise ValueError(f"top_k must be at least 1, got {k}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must lie in 0..2^63 − 1, got {seed}")


def _ended(text: Tensor, written_from: int, eos: int | None, pad: int | None) -> Tensor:
    """Texts cut after their first end token, and filled up to the longest of them."""
    if eos is None:
        return text
    is_end = text == eos
    is_end[:, :written_from] = False
    after = is_end.int().cumsum(1) - is_end.int() > 0
    filled = text.masked_fill(after, eos if pad is None else pad)
    return filled[:, : int((~after).sum(1).max())]
