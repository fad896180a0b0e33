"""Llama-, Mistral- and Qwen-type checkpoints compared with transformers: loading, saving, one-line errors."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import bd3lm
from bd3lm import interop
from bd3lm.interop import families, huggingface
from bd3lm.interop.families import FAMILIES, config_of, family_for, network_of, pieces
from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import Causal, Transformer, TransformerConfig
from bd3lm.models.rotary import LinearScaling, Llama3Scaling
from tests.interop.checkpoints import CASES, CONTEXT, VOCABULARY, logits_of, saved, some_tokens, tiny
from tests.interop.small import assert_same

INDEX = "model.safetensors.index.json"


def our_logits(network: Transformer, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return network.head(network(tokens, layout=Causal(tokens.shape[1])))


def cached_logits(network: Transformer, tokens: Tensor, *, window: int = CONTEXT - 1) -> Tensor:
    """Token by token through the cache."""
    cache = network.new_cache(len(tokens), segment=1, window=window)
    found = []
    with torch.no_grad():
        for place in range(tokens.shape[1]):
            state = network(tokens[:, place : place + 1], layout=Causal(1), cache=cache)
            cache.advance(1)
            found.append(network.head(state))
    return torch.cat(found, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny("llama"), tmp_path_factory.mktemp("llama"))


def copy_of(folder: Path, to: Path, **config: Any) -> Path:
    """The same checkpoint with another config.json; the value ... removes the key."""
    to.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    data = json.loads((to / "config.json").read_text()) | config
    data = {key: value for key, value in data.items() if value is not ...}
    (to / "config.json").write_text(json.dumps(data))
    return to


# --- Loading ---


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = tiny(name)
    network, config = interop.load(saved(theirs, tmp_path))
    tokens = some_tokens()
    expected = logits_of(theirs, tokens)
    torch.testing.assert_close(our_logits(network, tokens), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(cached_logits(network, tokens), expected, atol=1e-5, rtol=0)
    assert config.method == AutoregressiveMethod()
    assert config.mask_id == VOCABULARY == network.vocab_size
    assert network.config.tied is theirs.config.tie_word_embeddings
    assert not network.training


@pytest.mark.parametrize("name", CASES)
def test_greedy_texts_are_those_of_generate(name: str, tmp_path: Path) -> None:
    theirs = tiny(name)
    model = bd3lm.load(saved(theirs, tmp_path), device="cpu")
    prompts = some_tokens(3, 5)
    written = model.generate(prompts.tolist(), max_new_tokens=30, temperature=0.0)
    expected = theirs.generate(prompts, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert [sample.tokens for sample in written] == expected.tolist()


def test_the_mask_is_read_as_the_mean_of_all_tokens_and_never_predicted(folder: Path) -> None:
    network, config = interop.load(folder)
    mean = network.embedding.weight.double().mean(0).float()
    assert torch.equal(network.mask_vector, mean)
    masked = torch.full((1, 3), config.mask_id)
    assert our_logits(network, masked).shape == (1, 3, VOCABULARY)
    torch.testing.assert_close(network.embed(masked)[0, 0], mean)


@pytest.mark.parametrize("name", ["llama", "qwen2, tied", "qwen3"])
def test_shards_are_one_model(name: str, tmp_path: Path) -> None:
    theirs = tiny(name)
    whole, split = saved(theirs, tmp_path / "whole"), saved(theirs, tmp_path / "split", max_shard_size="5KB")
    assert len(list(split.glob("*.safetensors"))) > 3
    assert not (split / "model.safetensors").exists()
    one, other = interop.load(whole), interop.load(split)
    assert_same(one[0], other[0])
    assert one[1] == other[1]


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("asked", [None, torch.float64])
def test_the_dtype_is_the_requested_or_the_stored_one(
    stored: torch.dtype, asked: torch.dtype | None, tmp_path: Path
) -> None:
    theirs = tiny("qwen3").to(stored)
    network, _ = interop.load(saved(theirs, tmp_path), dtype=asked)
    assert {parameter.dtype for parameter in network.parameters()} == {asked or stored}
    expected = theirs.model.layers[1].mlp.up_proj.weight
    found = network.layers[1].mlp_in.weight[network.config.mlp_width :]
    assert torch.equal(found, expected.to(found.dtype))


def test_mixed_types_need_one_to_be_chosen(folder: Path, tmp_path: Path) -> None:
    copy_of(folder, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].half()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"must have one floating-point type .*, got torch.float16, torch.fl"
    ):
        interop.load(tmp_path)
    assert interop.load(tmp_path, dtype="float32")[0].embedding.weight.dtype == torch.float32
    state["model.norm.weight"] = torch.zeros(state["model.norm.weight"].shape, dtype=torch.int8)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"have one floating-point type .*, got I8, torch.float32"):
        interop.load(tmp_path, dtype="float32")


@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """Measured by the system, in a process of its own: 100 MB of weights in shards of 20 MB."""
    theirs = tiny("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=1000)
    saved(theirs, tmp_path, max_shard_size="20MB")
    program = (
        "import sys, bd3lm, torch; from bd3lm import interop\n"
        "import bd3lm.interop.huggingface as h, bd3lm.models, bd3lm.interop.native, bd3lm.interop.lightning\n"
        "def kib(name):\n"
        "    return next(int(line.split()[1]) for line in open('/proc/self/status') if name in line)\n"
        "before = kib('VmRSS')\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"
        "network, _ = interop.load(sys.argv[1])\n"
        "print(sum(p.nbytes for p in network.parameters()) / 2**20, (kib('VmHWM') - before) / 1024)"
    )
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the system does not tell a process's most memory")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    weights, most = map(float, done.stdout.split())
    assert weights > 90
    assert most < weights + 20 + 15  # a shard, as mapped pages of its file, and some overhead


def test_nothing_of_a_repository_is_run_or_asked(folder: Path, tmp_path: Path) -> None:
    copy_of(folder, tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('run')")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle, say")
    program = (
        "import sys, bd3lm\n"
        "model = bd3lm.load(sys.argv[1], device='cpu')\n"
        "model.generate([[3, 4]], max_new_tokens=3)\n"
        "assert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert not done.returncode, done.stderr


# --- What a config.json may contain ---


def read(kind: str, **data: Any) -> TransformerConfig:
    base = {
        "model_type": kind,
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    data = {key: value for key, value in (base | data).items() if value is not ...}
    return huggingface.read_network(data, where="config.json")


@pytest.mark.parametrize("name", CASES)
def test_both_styles_of_rotary_fields_say_the_same(name: str) -> None:
    """As transformers 5 writes them, and as transformers 4 did."""
    data = json.loads(tiny(name).config.to_json_string(use_diff=False))
    new = network_of(FAMILIES[data["model_type"]], data, where="config.json")
    rope = data.pop("rope_parameters")
    data["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    data["rope_scaling"] = {"type": kind, **rope} if kind == "linear" else {"rope_type": kind, **rope}
    if kind == "default":
        data["rope_scaling"] = None
    assert network_of(FAMILIES[data["model_type"]], data, where="config.json") == new


@pytest.mark.parametrize("kind", FAMILIES)
def test_missing_fields_have_the_defaults_of_transformers(kind: str) -> None:
    import transformers

    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 50, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 64}
    theirs = transformers.AutoConfig.for_model(kind, **sizes)
    data = json.loads(theirs.to_json_string(use_diff=False))
    assert read(kind, num_key_value_heads=..., **sizes) == network_of(
        FAMILIES[kind], data, where="config.json"
    )


def test_scalings() -> None:
    assert read("llama").rotary_scaling is None
    linear = {"type": "linear", "factor": 2}
    assert read("llama", rope_scaling=linear).rotary_scaling == LinearScaling(factor=2.0)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8192
    found = read("llama", rope_scaling=llama3, rope_theta=500000.0)
    assert found.rotary_scaling == Llama3Scaling(factor=8.0, original_context=8192)
    assert found.rotary_base == 500000.0


def test_mistral_s_window_is_the_context() -> None:
    """Up to the window nothing differs; past it the cache shows that much."""
    assert read("mistral", sliding_window=32).context == 32
    assert read("mistral", sliding_window=None).context == 64
    assert read("mistral", max_position_embeddings=32768).context == 4096  # the default
    theirs = tiny("mistral", sliding_window=16)
    tokens = some_tokens(2, 16)
    network = Transformer(network_of(FAMILIES["mistral"], theirs.config.to_dict(), where=""))
    huggingface.fill(network, pieces(network.config), theirs.state_dict().__getitem__)
    torch.testing.assert_close(our_logits(network, tokens), logits_of(theirs, tokens), atol=1e-5, rtol=0)


def test_past_the_window_a_cache_is_mistral_s(tmp_path: Path) -> None:
    """A key leaves each layer as the window moves on, in both implementations, for texts of any length."""
    theirs = tiny("mistral", sliding_window=16)
    model = bd3lm.load(saved(theirs, tmp_path), device="cpu")
    tokens = some_tokens(2, 60)
    found = cached_logits(model.network, tokens, window=15)
    torch.testing.assert_close(found, logits_of(theirs, tokens), atol=1e-5, rtol=0)
    prompts = some_tokens(3, 40)
    written = [text.tokens for text in model.generate(prompts.tolist(), max_new_tokens=20, temperature=0.0)]
    likeliest = logits_of(theirs, torch.tensor(written)).argmax(-1)
    assert likeliest[:, 39:-1].tolist() == [text[40:] for text in written]


def test_unused_windows_are_ignored() -> None:
    unused = read("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=3)
    assert unused == read("qwen2", use_sliding_window=False, sliding_window=16)
    assert unused == read("qwen2", layer_types=["full_attention"] * 3, use_sliding_window=True)


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_type must be one of .*'yarn'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "got 'dynamic'"),
        ("qwen2", {"rope_parameters": {"rope_type": "longrope"}}, r"rope_parameters.rope_type .*'longrope'"),
        ("qwen2", {"rope_scaling": {"rope_type": ["yarn"]}}, r"got \['yarn'\]"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be a number, got None"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be at least 1"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor must be a number"),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "original_max_position_embeddings"),
        ("llama", {"rope_theta": float("nan")}, "rotary_base must be positive"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor must be 1"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "use_sliding"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "got 'sliding_attention'"),
        ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "quantized by 'gptq' are not supported"),
        ("llama", {"quantization_config": "x"}, "quantized by 'x'"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, r"\['LlamaForCausalLM'\]"),
        ("llama", {"architectures": [3]}, r"got \[3\]"),
        ("llama", {"vocab_size": ...}, "vocab_size: must be given, but is missing"),
        ("llama", {"vocab_size": "many"}, "vocab_size"),
        ("llama", {"hidden_size": 2**40}, "hidden must be at most"),
        ("llama", {"num_attention_heads": 0}, "heads must be at least 1"),
        ("llama", {"num_attention_heads": 5}, "hidden must be a multiple of heads"),
        ("llama", {"num_key_value_heads": 3}, "heads must be a multiple of kv_heads"),
        ("llama", {"rms_norm_eps": 2.0}, "norm_eps must lie in"),
        ("llama", {"num_hidden_layers": True}, "must be a decimal number, got True"),
        ("mistral", {"sliding_window": -5}, "context must be at least 1"),
    ],
)
def test_unsupported_features_are_refused_by_name(kind: str, data: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(kind, **data)


# --- Files with false metadata ---


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"vocab_size": 51}, r"model.embed_tokens.weight is \(50, 32\) but must be \(51, 32\)"),
        ({"vocab_size": 2**26}, r"but must be \(67108864, 32\)"),
        ({"num_hidden_layers": 2}, r"unexpected: model\.layers\.2\."),
        ({"num_hidden_layers": 4}, r"missing: model\.layers\.3\."),
        ({"num_hidden_layers": 10_000}, "it has 10000 layers, got 30 tensors in all"),
        ({"intermediate_size": 2**24}, "wrong shape: model.layers.0.mlp.gate_proj.weight"),
        ({"attention_bias": True}, r"missing: model\.layers\.0\.self_attn\.q_proj\.bias"),
        (
            {"tie_word_embeddings": True},
            "lm_head.weight in .* must equal model.embed_tokens.weight, since tie",
        ),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "missing: .*q_norm"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "a model of type 'gpt2'"),
    ],
)
def test_a_false_config_is_detected_from_the_weights(
    config: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    copy_of(folder, tmp_path, **config)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=said) as caught:
            interop.load(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_nothing_is_allocated_for_what_does_not_fit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: Any, **__: Any) -> Any:
        raise AssertionError("allocated")

    monkeypatch.setattr(huggingface, "allocate", allocate)
    with pytest.raises(AssertionError, match="allocated"):
        interop.load(folder)
    with pytest.raises(ValueError, match="wrong shape"):
        interop.load(copy_of(folder, tmp_path, vocab_size=49))


def test_weights_must_fit_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bd3lm.models.devices.memory_of", lambda _: 1000)
    with pytest.raises(ValueError, match=r"the weights in .* must fit in memory: it needs at least 0.0 GiB"):
        interop.load(folder)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return saved(tiny("llama"), tmp_path / "shards", max_shard_size="20KB")


def change_index(folder: Path, change: Any) -> None:
    data = json.loads((folder / INDEX).read_text())
    change(data["weight_map"])
    (folder / INDEX).write_text(json.dumps(data))


def test_a_missing_shard_is_named(shards: Path) -> None:
    gone = sorted(shards.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"must hold all . files that its {INDEX} names, .*: {gone.name}$"):
        interop.load(shards)


def test_a_shard_must_hold_what_the_index_lists(shards: Path) -> None:
    def swap(files: dict[str, str]) -> None:
        last = max(files.values())
        files["model.embed_tokens.weight"] = last

    change_index(shards, swap)
    with pytest.raises(ValueError, match=r"must hold the tensors that .* different: model\.embed_tokens\.w"):
        interop.load(shards)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "x.bin",
        ".x.safetensors",
        3,
        None,
        "x" * 999,
    ],
)
def test_shards_are_bare_names(name: object, shards: Path) -> None:
    change_index(shards, lambda files: files.update({"lm_head.weight": name}))
    with pytest.raises(ValueError, match=r"must be bare names that end in \.safetensors, got"):
        interop.load(shards)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 10**5])
def test_an_invalid_index_is_refused(text: str, shards: Path) -> None:
    (shards / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json must (be valid JSON|hold a weight_map)"):
        interop.load(shards)


def test_a_torn_shard_is_one_line(shards: Path) -> None:
    file = sorted(shards.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="must be a readable safetensors file"):
        interop.load(shards)


def test_old_buffers_and_a_duplicate_head_are_accepted(tmp_path: Path) -> None:
    theirs = tiny("llama, tied")
    saved(theirs, tmp_path)
    before = interop.load(tmp_path)[0]
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    assert_same(interop.load(tmp_path)[0], before)


# --- Saving ---


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_transformers_loads_with_equal_logits(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = tiny(name)
    network, config = interop.load(saved(theirs, tmp_path / "theirs"))
    huggingface.save(network, config, tmp_path / "ours", eos_id=1, bos_id=0)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").eval()
    tokens = some_tokens()
    assert torch.equal(logits_of(again, tokens), logits_of(theirs, tokens))
    assert again.generation_config.eos_token_id == 1
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())
    back, back_config = interop.load(tmp_path / "ours")
    assert_same(back, network)
    assert back_config == config


def test_a_model_of_ours_with_its_mask_in_the_vocabulary(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    network_config = TransformerConfig(
        vocab_size=30, layers=2, hidden=16, heads=2, mlp="swiglu", mlp_bias=False, norm="rms", head_bias=False
    )
    config = LanguageModelConfig(network=network_config, method=AutoregressiveMethod(), mask_id=29)
    network = Transformer(network_config).eval()
    huggingface.save(network, config, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = some_tokens(vocabulary=29)
    torch.testing.assert_close(logits_of(again, tokens), our_logits(network, tokens), atol=1e-5, rtol=0)
    assert again.generation_config.suppress_tokens == [29]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mlp": "gelu", "mlp_bias": False}, r"nearest is llama, where mlp must be 'swiglu', got 'gelu'$"),
        ({"norm": "layer"}, "norm must be 'rms', got 'layer'$"),
        ({"head_bias": True}, "head_bias must be False, got True$"),
        ({"adaln": True}, "adaln must be False, got True$"),
        ({"attention_bias": True}, "qkv_bias and attention_bias must be equal .both are attention_bias.,"),
        ({"qk_norm": True, "mlp_bias": True}, "(qk_norm must be False|mlp_bias must be False), got True$"),
        ({"head_dim": 8, "heads": 3, "kv_heads": 3}, "hidden must be a multiple of heads, got 16 and 3$"),
    ],
)
def test_a_network_that_fits_no_family_names_the_field(changes: dict[str, Any], said: str) -> None:
    base = {"mlp": "swiglu", "mlp_bias": False, "norm": "rms", "head_bias": False}
    shape = {"vocab_size": 30, "layers": 2, "hidden": 16, "heads": 2}
    with pytest.raises(ValueError, match=said):
        family_for(TransformerConfig(**(shape | base | changes)))


def test_every_family_says_what_it_is(tmp_path: Path) -> None:
    found = {family_for(read(kind)).model_type for kind in FAMILIES}
    assert found == {"llama", "qwen2", "qwen3"}  # Mistral's networks are saved as Llama's
    for kind in FAMILIES:
        network = read(kind)
        family = family_for(network)
        assert network_of(family, config_of(family, network), where="") == network


def test_only_autoregressive_models_are_written(tmp_path: Path) -> None:
    network = Transformer(read("llama"))
    for method in (BlockDiffusionMethod(block_size=4), AutoregressiveMethod(score_first=True)):
        config = LanguageModelConfig(network=network.config, method=method, mask_id=VOCABULARY)
        with pytest.raises(
            ValueError, match=r"must be an autoregressive model that does not predict first tokens"
        ):
            huggingface.save(network, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_row_of_our_parameters_is_in_one_tensor() -> None:
    for kind in FAMILIES:
        network = read(kind)
        for layout in ("huggingface", "gguf"):
            found = pieces(network, layout)
            assert len({piece.name for piece in found}) == len(found)
            rows: dict[str, list[int]] = {}
            for piece in found:
                rows.setdefault(piece.ours, []).extend(range(piece.start, piece.stop))
            shapes = families.parameter_shapes(network)
            assert rows == {name: list(range(shape[0])) for name, shape in shapes.items() if name in rows}
            assert shapes.keys() - rows.keys() == {"mask_vector"}
