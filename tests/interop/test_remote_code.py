"""Models for transformers: loaded without bd3lm, they give our logits and write our texts."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import bd3lm
from bd3lm import interop
from bd3lm.data import byte_tokenizer
from bd3lm.interop import remote_code
from bd3lm.lm import LanguageModel
from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import (
    BlockCausal,
    BlockDecoding,
    Causal,
    Transformer,
    TransformerConfig,
    embed_with_previous,
)
from bd3lm.models.rotary import LinearScaling, Llama3Scaling
from tests.interop.small import assert_same

VOCABULARY, CONTEXT, BLOCK = 19, 24, 4
LLAMA: dict[str, Any] = {
    "norm": "rms",
    "mlp": "swiglu",
    "mlp_width": 20,
    "mlp_bias": False,
    "head_bias": False,
    "kv_heads": 2,
    "head_dim": 6,
    "mask_vector": True,
    "rotary_scaling": Llama3Scaling(factor=4.0, original_context=12),
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "of the box": ({"tied": True}, {"causal_clean": True, "previous_token": True, "lean": 2.0}),
    "llama": (LLAMA, {}),
    "qwen3, joint": (LLAMA | {"qk_norm": True, "tied": True}, {"causal_clean": True, "lean": 1.0}),
    "qwen2": (
        LLAMA | {"qkv_bias": True, "rotary_scaling": LinearScaling(factor=2.0)},
        {"previous_token": True},
    ),
    "all biases": (
        LLAMA | {"qkv_bias": True, "attention_bias": True, "mlp_bias": True, "head_bias": True},
        {},
    ),
    "adaptive norms": ({"adaln": True, "conditioning_dim": 8}, {}),
    "told the noise": (
        {"adaln": True, "time_conditioning": True, "conditioning_dim": 8},
        {"causal_clean": True},
    ),
    "first tokens": ({}, {"score_first": True, "previous_token": True}),
    "blocks of 1": ({}, {"block_size": 1}),
    "one block": ({}, {"block_size": CONTEXT, "previous_token": True}),
}
SETTINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 13, "seed": 3},
    {"max_new_tokens": 13, "seed": 4, "top_p": 1.0, "temperature": 0.7},
    {"max_new_tokens": 9, "seed": 5, "top_k": 3},
    {"max_new_tokens": 13, "temperature": 0.0},
]
PAST_CONTEXT: dict[str, Any] = {"max_new_tokens": 40, "seed": 6, "top_p": 1.0}
UNTIL_AN_END: dict[str, Any] = {"max_new_tokens": 15, "seed": 7, "top_p": 1.0, "eos_token_id": 3}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    "temperature": ({"temperature": -1.0}, "temperature must be finite and not negative, got -1.0"),
    "top_p": ({"top_p": 0.0}, "top_p must lie in (0, 1], got 0.0"),
    "top_k": ({"top_k": 0}, "top_k must be at least 1, got 0"),
    "seed": ({"seed": -1}, "seed must lie in 0..2^63 − 1, got -1"),
}
PROMPTS = [[1, 5, 2, 9, 4, 7], [0, 2, 2, 8, 11, 3]]


def model_of(network: dict[str, Any], method: dict[str, Any]) -> LanguageModel:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "layers": 2,
        "hidden": 16,
        "heads": 4,
        "context": CONTEXT,
    }
    config = TransformerConfig(**(shape | network))
    made = Transformer(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + (parameter.ndim == 1))
    mask_id = VOCABULARY if config.mask_vector else 13
    of = BlockDiffusionMethod(**({"block_size": BLOCK} | method))
    return LanguageModel(made, LanguageModelConfig(network=config, method=of, mask_id=mask_id))


def ask(model: LanguageModel, folder: Path, settings: list[dict[str, Any]], text: str | None = None) -> None:
    """Export a model, and write down the requests for it."""
    remote_code.save(model.network, model.config, folder, tokenizer=model.tokenizer)
    n = model.config.method.piece(CONTEXT)
    generator = torch.Generator().manual_seed(1)
    clean = torch.randint(0, 12, (2, 4 * n if n < CONTEXT else n), generator=generator)
    noisy = clean.clone()
    noisy[:, -1], noisy[0, -n] = model.config.mask_id, model.config.mask_id
    tensors = {"clean": clean, "noisy": noisy}
    if model.network.uses_noise:
        tensors["noise"] = torch.tensor([0.3, 1.1])
    save_file(tensors, folder / "asked.safetensors")
    asked = {"prompts": PROMPTS, "settings": settings, "wrong": [wrong for wrong, _ in WRONG.values()]}
    (folder / "asked.json").write_text(json.dumps(asked | ({} if text is None else {"text": text})))


def settings_of(name: str) -> list[dict[str, Any]]:
    return [*SETTINGS, UNTIL_AN_END, *([] if name == "one block" else [PAST_CONTEXT])]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models, and their answers where bd3lm cannot be imported."""
    folder = tmp_path_factory.mktemp("exported")
    for name, options in MODELS.items():
        ask(model_of(*options), folder / name, settings_of(name))
    of_bytes = model_of({"vocab_size": 258}, {})
    network, config = of_bytes.network, of_bytes.config
    config = LanguageModelConfig(network=config.network, method=config.method, mask_id=257)
    with_text = LanguageModel(network, config, byte_tokenizer())
    ask(with_text, folder / "bytes", [{"max_new_tokens": 5, "eos_token_id": 1000}], text="Once")
    script = Path(__file__).with_name("without_bd3lm.py")
    environment = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-I", script, folder], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def given(exported: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((exported / name / "given.json").read_text())
    return found


every_model = pytest.mark.parametrize("name", MODELS)


@pytest.mark.slow  # an interpreter without bd3lm writes for each model
@every_model
class TestWithoutBd3lm:
    def test_logits_of_a_block_given_clean_text(self, name: str, exported: Path) -> None:
        model, theirs = model_of(*MODELS[name]), load_file(exported / name / "given.safetensors")
        text = load_file(exported / name / "asked.safetensors")
        n = model.config.method.piece(CONTEXT)
        reading = model.config.method.unmasking(model.config.frame)
        assert reading is not None
        noisy = text["noisy"]
        layout = BlockDecoding(noisy.shape[1], n, causal_clean=reading.causal_clean)
        ours = self._logits(model, noisy, layout, text.get("noise"), previous=reading.previous_token)
        torch.testing.assert_close(theirs["noisy"][:, -n:], ours, atol=1e-5, rtol=1e-5)
        assert torch.equal(theirs["noisy"], theirs["noisy again"])

    def test_logits_of_clean_text(self, name: str, exported: Path) -> None:
        """Logits of the clean half: the next-token predictions of a joint model with causal clean tokens."""
        model, theirs = model_of(*MODELS[name]), load_file(exported / name / "given.safetensors")
        text = load_file(exported / name / "asked.safetensors")
        reading = model.config.method.unmasking(model.config.frame)
        assert reading is not None
        size = text["clean"].shape[1]
        layout = Causal(size) if reading.causal_clean else BlockCausal(size, reading.block_size)
        ours = self._logits(model, text["clean"], layout, text.get("noise"), previous=False)
        torch.testing.assert_close(theirs["clean"], ours, atol=1e-5, rtol=1e-5)

    @staticmethod
    def _logits(model: LanguageModel, tokens: Tensor, layout: Any, noise: Any, *, previous: bool) -> Tensor:
        with torch.no_grad():
            shown = tokens
            if previous:
                before = torch.cat((tokens[:, :1], tokens[:, :-1]), 1)
                shown = embed_with_previous(model.network, tokens, before, blank=model.config.mask_id)
            return model.network.head(model.network(shown, layout=layout, noise=noise))

    def test_texts_are_ours_for_a_seed(self, name: str, exported: Path) -> None:
        model, theirs = model_of(*MODELS[name]), given(exported, name)["texts"]
        for settings, rows in zip(settings_of(name), theirs, strict=True):
            ours = {key: value for key, value in settings.items() if key != "eos_token_id"}
            eos = settings.get("eos_token_id")
            expected = [each.tokens for each in model.generate(PROMPTS, eos_id=eos, **ours)]
            longest = max(map(len, expected))
            assert rows == [tokens + [eos] * (longest - len(tokens)) for tokens in expected], settings

    def test_it_is_saved_and_loaded_again(self, name: str, exported: Path) -> None:
        found = given(exported, name)
        assert found["same"]
        assert not found["training"]
        assert found["tied"] == model_of(*MODELS[name]).config.network.tied
        assert {"config.json", "model.safetensors", "configuration_bd3lm.py", "modeling_bd3lm.py"} <= {
            *found["files"]
        }

    def test_bad_settings_are_refused_in_a_line(self, name: str, exported: Path) -> None:
        assert given(exported, name)["refused"] == [said for _, said in WRONG.values()]

    @pytest.mark.parametrize("copy", ["", "again"])
    def test_bd3lm_loads_the_same_folder(self, name: str, copy: str, exported: Path) -> None:
        model = model_of(*MODELS[name])
        network, config = interop.load(exported / name / copy)
        assert config == model.config
        assert_same(network, model.network)


@pytest.mark.slow
def test_a_text_begins_there_as_it_does_here(exported: Path) -> None:
    tokenizer = byte_tokenizer()
    assert given(exported, "bytes")["ids"] == [tokenizer.bos_id, *tokenizer.encode("Once")]
    again = bd3lm.load(exported / "bytes", device="cpu").tokenizer
    assert again is not None
    assert (again.mask_id, again.bos_id, again.encode("Once")) == (257, 256, tokenizer.encode("Once"))


def test_the_code_needs_nothing_of_this_package() -> None:
    tree = ast.parse(remote_code.modeling_code())
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    own = {name.partition(".")[0] for name in modules if name is not None}
    assert own - sys.stdlib_module_names == {"torch", "transformers", "configuration_bd3lm"}
    assert not {"subprocess", "urllib", "socket", "pickle", "os", "requests"} & own


@pytest.mark.slow
def test_the_box_writes_the_same_there(tmp_path: Path) -> None:
    box = bd3lm.load("box", device="cpu")
    remote_code.save(box.network, box.config, tmp_path / "box", tokenizer=box.tokenizer)
    prompt = box.generate("The king of France was", max_new_tokens=1)[0].tokens[:-1]
    told = {"max_new_tokens": 300, "seed": 9}
    code = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(json.dumps(model.generate(torch.tensor([json.loads(sys.argv[2])]), **json.loads(sys.argv[3])).tolist()))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, tmp_path / "box", json.dumps(prompt), json.dumps(told)],
        env={"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [box.generate([prompt], **told)[0].tokens]


def test_another_method_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model = model_of({}, {})
    config = LanguageModelConfig(network=model.config.network, method=AutoregressiveMethod(), mask_id=13)
    with pytest.raises(ValueError, match="code for transformers is only for models that reveal blocks"):
        remote_code.save(model.network, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
