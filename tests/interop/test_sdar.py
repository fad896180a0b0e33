"""SDAR's layout: names, shapes and config.json, the mask's rows, logits, and models that do not fit."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import bd3lm
from bd3lm.data import byte_tokenizer, load_tokenizer
from bd3lm.interop import load, sdar
from bd3lm.lm import LanguageModel
from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import BlockCausal, Transformer, TransformerConfig
from tests.oracles.qwen3 import qwen3_logits

VOCABULARY, CONTEXT, BLOCK, HIDDEN = 23, 32, 4, 24


def qwen_like(*, in_vocabulary: bool = False, method: dict[str, Any] | None = None, **changes: Any):
    """A random network of Qwen3's type. Its mask is an extra vector, or id 5."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "layers": 2,
        "hidden": HIDDEN,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 10,
        "mlp": "swiglu",
        "mlp_width": 20,
        "norm": "rms",
        "norm_eps": 1e-6,
        "qk_norm": True,
        "mlp_bias": False,
        "head_bias": False,
        "rotary_base": 500.0,
        "context": CONTEXT,
        "dropout": 0.0,
        "mask_vector": not in_vocabulary,
    }
    config = TransformerConfig(**(shape | changes))
    network = Transformer(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    mask_id = config.vocab_size if config.mask_vector else 5
    of = BlockDiffusionMethod(**({"block_size": BLOCK} | (method or {})))
    return network, LanguageModelConfig(network=config, method=of, mask_id=mask_id)


def noisy_text(mask_id: int) -> Tensor:
    """Two clean blocks, and one with two masks."""
    text = torch.randint(6, VOCABULARY, (3 * BLOCK,), generator=torch.Generator().manual_seed(1))
    text[-3], text[-1] = mask_id, mask_id
    return text


def our_logits(network: Transformer, text: Tensor) -> Tensor:
    with torch.no_grad():
        return network.head(network(text.unsqueeze(0), layout=BlockCausal(len(text), BLOCK)))[0]


def block_causal(query: int, key: int) -> bool:
    return key // BLOCK <= query // BLOCK


MODELS: dict[str, dict[str, Any]] = {
    "a vector": {},
    "a vector, tied": {"tied": True},
    "in the vocabulary": {"in_vocabulary": True},
    "in the vocabulary, tied": {"in_vocabulary": True, "tied": True},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
class TestOut:
    def test_logits_are_those_of_qwen3_block_by_block(self, options: dict[str, Any], tmp_path: Path) -> None:
        network, config = qwen_like(**options)
        sdar.save(network, config, tmp_path)
        data = json.loads((tmp_path / "config.json").read_text())
        text = noisy_text(config.mask_id)
        theirs = torch.where(text == config.mask_id, data["mask_token_id"], text)
        expected = qwen3_logits(load_file(tmp_path / "model.safetensors"), data, theirs, block_causal)
        ours, others = our_logits(network.double(), text), torch.arange(VOCABULARY) != data["mask_token_id"]
        torch.testing.assert_close(expected[:, :VOCABULARY][:, others], ours[:, others], atol=1e-9, rtol=1e-9)

    def test_names_shapes_and_config(self, options: dict[str, Any], tmp_path: Path) -> None:
        network, config = qwen_like(**options)
        sdar.save(network, config, tmp_path)
        data = json.loads((tmp_path / "config.json").read_text())
        rows = VOCABULARY + (not options.get("in_vocabulary", False))
        expected = {
            "model_type": "sdar",
            "architectures": ["SDARForCausalLM"],
            "vocab_size": rows,
            "block_size": BLOCK,
            "mask_token_id": 5 if options.get("in_vocabulary") else VOCABULARY,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "rope_theta": 500.0,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "torch_dtype": "float32",
        }
        assert {name: data[name] for name in expected} == expected
        found = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
        layer = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (40, HIDDEN),
            "self_attn.k_proj": (20, HIDDEN),
            "self_attn.v_proj": (20, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 40),
            "self_attn.q_norm": (10,),
            "self_attn.k_norm": (10,),
            "mlp.gate_proj": (20, HIDDEN),
            "mlp.up_proj": (20, HIDDEN),
            "mlp.down_proj": (HIDDEN, 20),
        }
        others = {"model.embed_tokens": (rows, HIDDEN), "lm_head": (rows, HIDDEN), "model.norm": (HIDDEN,)}
        assert found == {f"{name}.weight": shape for name, shape in others.items()} | {
            f"model.layers.{index}.{name}.weight": shape
            for index in range(2)
            for name, shape in layer.items()
        }

    def test_the_mask_is_never_the_likeliest_token(self, options: dict[str, Any], tmp_path: Path) -> None:
        """Its logit is the mean of the others: below the highest, with a probability below 1 / vocabulary."""
        network, config = qwen_like(**options)
        fitted = sdar.save(network, config, tmp_path)
        head = load_file(tmp_path / "model.safetensors")["lm_head.weight"].double()
        states = torch.randn(500, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        logits = states @ head.T
        others = [place for place in range(len(head)) if place != fitted.mask_id]
        torch.testing.assert_close(logits[:, fitted.mask_id], logits[:, others].mean(1), atol=1e-5, rtol=1e-5)
        assert (logits.argmax(1) != fitted.mask_id).all()
        assert float(logits.softmax(1)[:, fitted.mask_id].max()) <= 1 / len(head)

    def test_it_loads_again_with_the_same_logits(self, options: dict[str, Any], tmp_path: Path) -> None:
        network, config = qwen_like(**options)
        fitted = sdar.save(network, config, tmp_path)
        again, other = load(tmp_path)
        assert other.method == config.method
        assert (other.mask_id, other.network) == (fitted.mask_id, fitted.network)
        text = noisy_text(config.mask_id)
        others = torch.arange(VOCABULARY) != fitted.mask_id
        theirs = our_logits(again, torch.where(text == config.mask_id, fitted.mask_id, text))
        assert torch.equal(theirs[:, :VOCABULARY][:, others], our_logits(network, text)[:, others])
        sdar.save(again, other, tmp_path / "again")
        first, second = (load_file(at / "model.safetensors") for at in (tmp_path, tmp_path / "again"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first if name != "lm_head.weight")


def test_a_free_row_of_qwens_is_the_one_that_engines_take() -> None:
    config = LanguageModelConfig(
        network=replace(qwen_like()[1].network, vocab_size=151936),
        method=BlockDiffusionMethod(block_size=BLOCK),
        mask_id=151936,
    )

    class Tokenizer:
        own_ids = 151669

    of_qwen = sdar.fit(config, Tokenizer())  # type: ignore[arg-type]
    assert (of_qwen.mask_id, of_qwen.network.vocab_size, of_qwen.note) == (151669, 151936, None)
    Tokenizer.own_ids = 151700
    later = sdar.fit(config, Tokenizer())  # type: ignore[arg-type]
    assert (later.mask_id, later.network.vocab_size) == (151700, 151936)
    assert "SGLang and LMDeploy always use 151669" in str(later.note)
    unknown = sdar.fit(config)
    assert (unknown.mask_id, unknown.network.vocab_size) == (151936, 151937)


class TestTokenizer:
    """A tokenizer with 257 tokens, in networks with more rows and with as many."""

    @pytest.mark.parametrize(("rows", "mask"), [(300, 257), (257, 257), (151936, 151669)])
    def test_it_is_saved_and_loaded_with_the_mask(self, rows: int, mask: int, tmp_path: Path) -> None:
        network, config = qwen_like(vocab_size=rows)
        tokenizer = byte_tokenizer().with_mask(rows)
        LanguageModel(network, config, tokenizer)  # it would refuse one that does not fit
        fitted = sdar.save(network, config, tmp_path, tokenizer=tokenizer)
        assert (fitted.mask_id, fitted.network.vocab_size) == (mask, max(rows, mask + 1))
        data = json.loads((tmp_path / "config.json").read_text())
        assert (data["mask_token_id"], data["bos_token_id"], data["eos_token_id"]) == (mask, 256, 256)
        again = bd3lm.load(tmp_path, device="cpu")
        assert again.tokenizer is not None
        assert again.tokenizer.mask_id == again.config.mask_id == mask
        assert (again.tokenizer.eos_id, again.tokenizer.bos_id) == (256, 256)
        assert again.tokenizer.encode("né") == tokenizer.encode("né")

    def test_released_ones_name_their_mask_otherwise(self, tmp_path: Path) -> None:
        sdar.save(*qwen_like(vocab_size=300, mask_vector=False, method={}), tmp_path)
        spec = json.loads(byte_tokenizer().spec)
        for token, name in zip(spec["added_tokens"], ("<|endoftext|>", "<|MASK|>"), strict=True):
            token["content"] = name
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": 257}))
        tokenizer = bd3lm.load(tmp_path, device="cpu").tokenizer
        assert tokenizer is not None
        assert (tokenizer.mask_id, tokenizer.eos_id, tokenizer.bos_id) == (257, 256, None)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": "257"}))
        with pytest.raises(
            ValueError, match=r"mask_token_id in config\.json of .* must be a token id, got '257'"
        ):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": {"causal_clean": True}}, "method.causal_clean must be false"),
        ({"method": {"previous_token": True}}, "method.previous_token must be false"),
        ({"method": {"lean": 2.0}}, "method.lean must be 0 .* got 2$"),
        ({"method": {"block_size": CONTEXT}}, "method.block_size must be below the context 32"),
        ({"norm": "layer"}, "network.norm must be 'rms', got 'layer'"),
        ({"mlp": "gelu"}, "network.mlp must be 'swiglu', got 'gelu'"),
        ({"qk_norm": False}, "network.qk_norm must be True, got False"),
        ({"qkv_bias": True}, "network.qkv_bias must be false, got true$"),
        ({"qkv_bias": True, "attention_bias": True}, "network.attention_bias must be false"),
        ({"mlp_bias": True}, "network.mlp_bias must be False, got True"),
        ({"head_bias": True}, "network.head_bias must be False, got True"),
        ({"adaln": True}, "network.adaln must be False"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    network, config = qwen_like(**options)
    with pytest.raises(ValueError, match=f"^SDAR's layout cannot hold this model: .*{said}"):
        sdar.save(network, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_method_does_not_fit(tmp_path: Path) -> None:
    network, config = qwen_like()
    with pytest.raises(ValueError, match=r"method\.kind must be block_diffusion for SDAR's layout"):
        sdar.save(network, replace(config, method=AutoregressiveMethod()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class TestIn:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        sdar.save(*qwen_like(), tmp_path)
        return tmp_path

    def edit(self, folder: Path, **changes: Any) -> None:
        path = folder / "config.json"
        data = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in data.items() if value is not ...}))

    def test_what_released_checkpoints_leave_out_is_as_in_engines(self, folder: Path) -> None:
        self.edit(folder, block_size=..., vocab_size=151936, mask_token_id=...)
        data = json.loads((folder / "config.json").read_text())
        with pytest.warns(UserWarning, match="has no block_size: using 4"):
            _, config = sdar.from_sdar_config(data, where="config.json")
        assert (config.mask_id, config.method) == (151669, BlockDiffusionMethod(block_size=4))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"block_size": 5}, "method.block_size must divide the context 32, got 5"),
            ({"block_size": "4"}, "block_size in .* must be a whole number, got '4'"),
            ({"mask_token_id": 24}, "mask_id must lie in 0..23, got 24"),
            ({"mask_token_id": ...}, "mask_id must lie in 0..23, got 151669"),
            ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
            ({"architectures": ["SDARMoeForCausalLM"]}, "architectures in .* must be .*SDARForCausalLM"),
            ({"quantization_config": {"quant_method": "awq"}}, "weights quantized by 'awq' are not"),
            ({"num_hidden_layers": 3}, "missing: model.layers.2"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, changes: dict[str, Any], said: str, folder: Path) -> None:
        self.edit(folder, **changes)
        with pytest.raises(ValueError, match=said) as error:
            load(folder)
        assert "\n" not in str(error.value)


def test_engines_find_a_config_by_transformers(tmp_path: Path) -> None:
    """What SGLang, LMDeploy and JetEngine read first; they run no other code of the folder."""
    sdar.save(*qwen_like(), tmp_path)
    asked = """
import sys
from transformers import AutoConfig
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
print(config.model_type, config.block_size, config.mask_token_id, config.rope_theta, config.head_dim,
      config.num_key_value_heads, config.vocab_size, config.attention_bias, config.sliding_window)
"""
    environment = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-I", "-c", asked, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["sdar", "4", "23", "500.0", "10", "2", "24", "False", "None"]
