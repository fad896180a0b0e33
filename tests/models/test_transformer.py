"""The network: its size, its parts, and the effect of its options."""

from dataclasses import replace

import pytest
import torch

from bd3lm.models import (
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    KVTape,
    Transformer,
    TransformerConfig,
)
from tests.oracles.formula import written_out_logits
from tests.oracles.networks import logits_of, tiny_transformer

CONDITIONINGS = {"plain": {}, "adaln": {"adaln": True}, "time": {"adaln": True, "time_conditioning": True}}


def random_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 4, (rows, length), generator=torch.Generator().manual_seed(seed))


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_default_is_the_papers_110_million_parameters():
    with torch.device("meta"):
        model = Transformer(TransformerConfig(vocab_size=30_522))
        tied = Transformer(TransformerConfig(vocab_size=30_522, tied=True))
    layer = 3 * 768**2 + 768**2 + (768 * 3072 + 3072) + (3072 * 768 + 768) + 2 * 768
    without_head = 30_522 * 768 + 12 * layer + 768
    assert without_head == 108_440_832
    assert parameters(model) - parameters(model.output) == without_head
    assert parameters(model) == without_head + 30_522 * 768 + 30_522
    assert parameters(tied) == without_head + 30_522


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_a_network_is_its_written_out_formula(conditioning):
    """One layer with one head, in plain operations."""
    model = tiny_transformer(
        5, layers=1, heads=1, hidden=4, mlp_width=8, conditioning_dim=3, **CONDITIONINGS[conditioning]
    )
    tokens, noise = random_tokens(2, 5), torch.tensor([[0.0, 0.3, 0.3, 1.0, 6.9], [2.0, 0.0, 0.1, 0.5, 3.0]])
    w = dict(model.named_parameters())

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name + ".weight"]

    def silu(x):
        return x / (1 + torch.exp(-x))

    def modulation(name, parts):
        """Shifts, scales and gates; 0, 0 and 1 without adaptive norms."""
        if conditioning == "plain":
            return (0.0, 0.0, 1.0, 0.0, 0.0, 1.0)[:parts]
        level = noise.double() if conditioning == "time" else torch.zeros(2, 5, dtype=torch.float64)
        waves = level.unsqueeze(-1) * 10000.0 ** -(torch.arange(128, dtype=torch.float64) / 128)
        embedded = silu(linear(torch.cat((waves.cos(), waves.sin()), -1), "noise_embedding.first"))
        return linear(silu(linear(embedded, "noise_embedding.second")), name).split(4, -1)

    def turned(x):
        angle = torch.arange(5.0, dtype=torch.float64)[:, None] * torch.tensor(
            [1.0, 0.01], dtype=torch.float64
        )
        z = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation("layers.0.modulation", 6)
    x = w["embedding.weight"][tokens]
    normed = norm(x, "layers.0.attention_norm") * (1 + scale) + shift
    q, k, v = linear(normed, "layers.0.qkv").split(4, -1)
    scores = turned(q) @ turned(k).transpose(-1, -2) / 4**0.5
    weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
    x = x + gate * linear(weights @ v, "layers.0.attention_out")
    h = linear(norm(x, "layers.0.mlp_norm") * (1 + scale_mlp) + shift_mlp, "layers.0.mlp_in")
    h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    x = x + gate_mlp * linear(h, "layers.0.mlp_out")
    shift, scale = modulation("final_modulation", 2)
    logits = linear(norm(x, "final_norm") * (1 + scale) + shift, "output")
    found = logits_of(model, tokens, Causal(5), noise=noise)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-10 if conditioning == "plain" else 1e-6)


MODERN = {
    "Llama": {"norm": "rms", "mlp": "swiglu", "mlp_width": 6, "mlp_bias": False, "head_bias": False},
    "Qwen": {
        "norm": "rms",
        "norm_eps": 1e-3,
        "mlp": "swiglu",
        "mlp_width": 5,
        "qkv_bias": True,
        "attention_bias": True,
        "qk_norm": True,
        "head_dim": 6,
    },
}


@pytest.mark.parametrize("family", MODERN)
def test_a_modern_network_is_its_written_out_formula(family):
    """One layer with two heads that share one key/value head, and a mask outside the vocabulary."""
    config = {"heads": 2, "kv_heads": 1, "hidden": 8, "mask_vector": True, **MODERN[family]}
    model = tiny_transformer(5, layers=1, **config)
    tokens = torch.tensor([[0, 3, 4, 1, 4], [2, 2, 1, 0, 3]])  # 4 is the mask
    logits = written_out_logits(model, tokens, torch.ones(5, 5).tril().bool())
    assert logits.shape[-1] == 4  # the mask is not predicted
    torch.testing.assert_close(logits_of(model, tokens, Causal(5)), logits, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["dense", "flex"])
@pytest.mark.parametrize("layout", [Causal(8), BlockCausal(8, 4), BlockDiffusion(8, 4, causal_clean=True)])
def test_shared_heads_are_copies_of_one(layout, backend):
    """Grouped heads against a network with its own copy of the key/value head for each query head."""
    grouped = tiny_transformer(7, heads=4, kv_heads=2, norm="rms", qkv_bias=True, dtype=torch.float32)
    spread = Transformer(replace(grouped.config, kv_heads=4)).eval()
    rows = torch.arange(32).split(4)  # heads of 4 numbers: four of queries, two of keys, two of values
    order = torch.cat([*rows[:4], *(rows[head] for head in (4, 4, 5, 5, 6, 6, 7, 7))])
    state = grouped.state_dict()
    state |= {name: each[order] for name, each in state.items() if ".qkv." in name}
    spread.load_state_dict(state)
    grouped.attention_backend = spread.attention_backend = backend
    tokens = random_tokens(2, layout.size)
    torch.testing.assert_close(
        logits_of(grouped, tokens, layout), logits_of(spread, tokens, layout), rtol=0, atol=1e-5
    )


def test_tied_networks_share_the_embedding_and_untied_ones_do_not():
    tied, untied = tiny_transformer(tied=True), tiny_transformer(tied=False)
    assert tied.output.weight is tied.embedding.weight
    assert untied.output.weight is not untied.embedding.weight
    assert tiny_transformer(head_bias=False).output.bias is None


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_a_reset_network_is_a_new_one(conditioning):
    torch.manual_seed(0)
    new = Transformer(
        TransformerConfig(vocab_size=5, layers=2, hidden=8, heads=2, **CONDITIONINGS[conditioning])
    )
    model = Transformer(new.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(1)
    model.reset_parameters()
    torch.manual_seed(1)
    new.reset_parameters()
    weights = dict(model.named_parameters())
    for name, weight in new.named_parameters():
        assert torch.equal(weights[name], weight), name


def test_initial_weights_shrink_residual_branches_with_depth():
    model = Transformer(TransformerConfig(vocab_size=100, layers=8, hidden=128, heads=2))
    layer = model.layers[3]
    assert layer.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.attention_out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert layer.mlp_out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not layer.mlp_in.bias.any()


@pytest.mark.parametrize("tied", [False, True])
def test_a_network_may_start_as_the_identity(tied):
    model = Transformer(TransformerConfig(vocab_size=500, layers=3, hidden=128, heads=2, tied=tied)).eval()
    model.start_as_identity()
    tokens = torch.randint(500, (2, 6))
    alone = model.final_norm(model.embedding(tokens))
    assert torch.equal(model(tokens, layout=Causal(6)), alone)
    certain = model.head(alone).softmax(-1).max()
    assert tied or certain < 0.1  # a tied head first predicts the token that is there
    weight = model.embedding.weight
    assert weight.std().item() == pytest.approx(128**-0.5 if tied else 1.0, rel=0.05)
    queries, keys, values = model.layers[1].qkv.weight.chunk(3)
    assert not queries.any()
    for part in (keys, values, model.layers[1].mlp_in.weight):
        assert part.std().item() == pytest.approx(128**-0.5, rel=0.05)


def test_a_network_that_starts_as_the_identity_learns_in_all_its_parts():
    model = Transformer(TransformerConfig(vocab_size=50, layers=2, hidden=32, heads=2, dropout=0.0))
    model.start_as_identity()

    def parts() -> dict[str, torch.Tensor]:
        """Separate queries, keys and values."""
        named = {name: each.detach().clone() for name, each in model.named_parameters()}
        whole = [name for name in named if "qkv" in name]
        return named | {f"{name} {i}": part for name in whole for i, part in enumerate(named[name].chunk(3))}

    first = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    tokens = torch.randint(50, (4, 9))
    for _ in range(3):  # the first step moves only what lies behind the zeros
        logits = model.head(model(tokens[:, :-1], layout=Causal(8)))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not [name for name, weight in parts().items() if torch.equal(weight, first[name])]


def test_dropout_acts_in_training_only():
    model, tokens = tiny_transformer(dropout=0.5), random_tokens(2, 6)
    still = tiny_transformer(dropout=0.0)(tokens, layout=Causal(6))
    assert torch.equal(model(tokens, layout=Causal(6)), still)
    model.train()
    torch.manual_seed(0)
    first, second = model(tokens, layout=Causal(6)), model(tokens, layout=Causal(6))
    assert not torch.equal(first, second)
    assert not torch.equal(first, still)


@pytest.mark.parametrize("time", [False, True])
def test_adaptive_norms_start_as_plain_ones(time):
    plain = Transformer(TransformerConfig(vocab_size=4, layers=2, hidden=16, heads=2)).eval()
    adaptive = Transformer(
        TransformerConfig(vocab_size=4, layers=2, hidden=16, heads=2, adaln=True, time_conditioning=time)
    ).eval()
    missing = adaptive.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert all("modulation" in name or "noise_embedding" in name for name in missing)
    tokens = random_tokens(3, 6)
    adapted = adaptive(tokens, layout=Causal(6), noise=torch.tensor([0.1, 1.0, 5.0]) if time else None)
    torch.testing.assert_close(adapted, plain(tokens, layout=Causal(6)), rtol=0, atol=1e-6)


def test_the_noise_level_matters_only_with_time_conditioning():
    tokens = random_tokens(2, 6).repeat(2, 1)
    noise = torch.tensor([0.5, 0.5, 2.0, 2.0])
    for name, config in CONDITIONINGS.items():
        model = tiny_transformer(1, **config)
        quiet, loud = logits_of(model, tokens, Bidirectional(6), noise=noise).chunk(2)
        assert model.uses_noise == (name == "time")
        assert torch.equal(quiet, loud) == (name != "time")


def test_a_noise_level_a_row_is_the_same_one_at_every_token():
    model, tokens = tiny_transformer(1, **CONDITIONINGS["time"]), random_tokens(2, 6)
    noise = torch.tensor([0.3, 1.7])
    a_row = logits_of(model, tokens, Causal(6), noise=noise)
    a_token = logits_of(model, tokens, Causal(6), noise=noise.unsqueeze(1).expand(2, 6))
    torch.testing.assert_close(a_row, a_token, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_the_gradient_reaches_every_parameter(conditioning, tied):
    model = tiny_transformer(2, tied=tied, **CONDITIONINGS[conditioning])
    layout = BlockDiffusion(6, 2)
    noise = torch.rand(3, 12, generator=torch.Generator().manual_seed(0))
    logits_of(model, random_tokens(3, 12), layout, noise=noise).log_softmax(-1)[..., 0].sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
@pytest.mark.parametrize("causal_clean", [False, True])
def test_skipping_the_clean_positions_of_the_last_layer_changes_nothing(causal_clean, conditioning):
    model = tiny_transformer(3, **CONDITIONINGS[conditioning])
    tokens = random_tokens(2, 18)
    noise = torch.rand(2, 18, generator=torch.Generator().manual_seed(1))
    every = {"length": 6, "block_size": 2, "copies": 2, "causal_clean": causal_clean}
    noisy = model(tokens, layout=BlockDiffusion(**every), noise=noise)
    whole = model(tokens, layout=BlockDiffusion(**every, read_clean=True), noise=noise)
    assert noisy.shape == (2, 12, 16)
    torch.testing.assert_close(noisy, whole[:, :12], rtol=0, atol=1e-12)
    alone = Causal(6) if causal_clean else BlockCausal(6, 2)
    clean = model(tokens[:, 12:], layout=alone, noise=noise[:, 12:])
    torch.testing.assert_close(whole[:, 12:], clean, rtol=0, atol=1e-12)


def test_a_pass_for_keys_only_leaves_the_keys_of_a_whole_pass():
    model, tokens = tiny_transformer(4), random_tokens(2, 6)
    whole, keys_only = KVTape(), KVTape()
    assert model(tokens, layout=BlockCausal(6, 2), cache=whole).shape == (2, 6, 16)
    assert model(tokens, layout=BlockCausal(6, 2, keys_only=True), cache=keys_only).shape == (2, 0, 16)
    assert len(keys_only.layers) == 2
    for one, other in zip(whole.layers, keys_only.layers, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_bfloat16_autocast_runs_and_stays_close(conditioning):
    model = tiny_transformer(0, dtype=torch.float32, gain=0.7, **CONDITIONINGS[conditioning])
    tokens, layout = random_tokens(4, 12), BlockDiffusion(6, 2)
    noise = torch.rand(4, 12, generator=torch.Generator().manual_seed(0))
    exact = logits_of(model, tokens, layout, noise=noise)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = logits_of(model, tokens, layout, noise=noise)
    assert rounded.dtype == torch.bfloat16
    assert 0 < (rounded - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"hidden": 10, "heads": 4}, "hidden must be a multiple of heads .* got hidden 10 and heads 4"),
        ({"hidden": 6, "heads": 2}, "head_dim must be even .* got 3"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"time_conditioning": True}, "time_conditioning needs adaln=True"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**({"vocab_size": 4} | change))


def test_bad_input_is_refused():
    model = tiny_transformer()
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=rf"token ids must lie in 0..3, got values from .*{bad}"):
            model(torch.tensor([[0, bad]]), layout=Causal(2))
    with pytest.raises(ValueError, match=r"tokens must be \(rows, positions\) .* got \(3,\)"):
        model(torch.zeros(3, dtype=torch.long), layout=Causal(3))
    with pytest.raises(ValueError, match=r"tokens must be .* got \(0, 3\)"):
        model(torch.zeros(0, 3, dtype=torch.long), layout=Causal(3))
    with pytest.raises(ValueError, match=r"tokens must have 3 positions for Causal.* got 2"):
        model(torch.zeros(1, 2, dtype=torch.long), layout=Causal(3))


def test_tokens_without_positions_are_refused():
    with pytest.raises(ValueError, match="tokens must"):
        tiny_transformer()(torch.zeros(1, 0, dtype=torch.long), layout=Causal(1))


def test_a_time_conditioned_network_refuses_missing_and_misshapen_noise():
    model, tokens = tiny_transformer(**CONDITIONINGS["time"]), random_tokens(2, 6)
    with pytest.raises(ValueError, match="noise must be given"):
        model(tokens, layout=Causal(6))
    with pytest.raises(
        ValueError, match=r"noise must have shape \(rows,\) or \(rows, positions\) .* got \(2, 3\)"
    ):
        model(tokens, layout=Causal(6), noise=torch.zeros(2, 3))


@pytest.mark.parametrize("keys_only", [False, True])
def test_the_last_layer_does_no_work_that_nothing_reads(keys_only: bool) -> None:
    network = tiny_transformer()
    layout = BlockDiffusion(6, 2, keys_only=keys_only)
    seen: dict[str, int] = {}
    for index, layer in enumerate(network.layers):
        layer.mlp_in.register_forward_hook(
            lambda _module, inputs, _output, index=index: seen.update({str(index): inputs[0].shape[1]})
        )
    network(torch.zeros(1, layout.size, dtype=torch.long), layout=layout)
    first, last = str(0), str(len(network.layers) - 1)
    assert seen[first] == layout.size
    assert seen.get(last, 0) == (0 if keys_only else layout.noisy)


# --- vectors instead of ids ---


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_embedded_ids_are_the_ids(conditioning):
    """Bit for bit, with and without a store, and with only some positions read."""
    model = tiny_transformer(3, **CONDITIONINGS[conditioning])
    tokens, noise = random_tokens(3, 8), torch.rand(3, 8)
    for layout in (Bidirectional(8), BlockDiffusion(4, 2)):
        expected = model(tokens, layout=layout, noise=noise)
        assert torch.equal(model(model.embed(tokens), layout=layout, noise=noise), expected)
    caches = [model.new_cache(3, segment=4) for _ in range(2)]
    for part in (tokens[:, :4], tokens[:, 4:]):
        states = [
            model(inputs, layout=BlockCausal(4, 2), noise=noise[:, :4], cache=cache)
            for inputs, cache in zip((part, model.embed(part)), caches, strict=True)
        ]
        for cache in caches:
            cache.advance(4)
        assert torch.equal(*states)
    tapes = [KVTape(), KVTape()]
    for inputs, tape in zip((tokens, model.embed(tokens)), tapes, strict=True):
        model(inputs, layout=BlockCausal(8, 4, keys_only=True), noise=noise, cache=tape)
        layout = BlockDiffusion(8, 4)
        states.append(model(inputs, layout=layout, noise=noise, cache=tape.replay()))
    assert torch.equal(*states[-2:])


def test_a_mixture_of_tokens_is_the_mean_of_their_vectors():
    model = tiny_transformer(3)
    weight = model.embedding.weight
    probabilities = torch.tensor([[0.25, 0.0, 0.75, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.stack((0.25 * weight[0] + 0.75 * weight[2], weight[1]))
    torch.testing.assert_close(model.embed(probabilities), expected, rtol=0, atol=1e-15)
    assert model.vocab_size == 4
    model.embed(probabilities).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, probabilities.sum(0).unsqueeze(1).expand(4, 16))


def test_a_mixture_has_the_precision_of_an_embedding():
    """Under autocast the embedding of ids, and so every residual, stays in float32."""
    model, tokens = tiny_transformer(3, dtype=torch.float32), random_tokens(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ids, mixed = model.embed(tokens), model.embed(torch.full((2, 4, 4), 0.25))
    assert ids.dtype == mixed.dtype == torch.float32


def test_vectors_of_the_wrong_width_are_refused():
    model = tiny_transformer(3)
    with pytest.raises(ValueError, match=r"embedded tokens must be \(rows, positions, 16\).*\(2, 4, 5\)"):
        model(torch.zeros(2, 4, 5, dtype=torch.float64), layout=Bidirectional(4))
    with pytest.raises(ValueError, match=r"probabilities must have 4 entries.*\(2, 4, 5\)"):
        model.embed(torch.zeros(2, 4, 5))
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.3"):
        model.embed(torch.tensor([4]))
