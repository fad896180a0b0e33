"""`bd3lm export`: layouts that other programs load, and what does not fit into them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bd3lm
from bd3lm import interop
from bd3lm.cli import main
from bd3lm.lm import LanguageModel
from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import Transformer, TransformerConfig
from tests.commands import fails
from tests.data_room.documents import contents
from tests.data_room.test_checkpoints import TEXTS, beside
from tests.interop.checkpoints import logits_of, saved, some_tokens, tiny
from tests.interop.small import assert_same
from tests.lm import BYTES, of_bytes


def test_what_the_reference_cannot_hold_is_refused_and_nothing_written(tmp_path, capsys):
    of_bytes(4).with_lean(2.0).save_pretrained(tmp_path / "source")
    assert main(["export", str(tmp_path / "source"), str(tmp_path / "theirs"), "--to", "reference"]) == 1
    assert "cannot hold this model: method.lean must be 0.0, got 2.0" in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()


def llama_of_bytes(**changes) -> LanguageModel:
    """An autoregressive model of ours, with its mask in the vocabulary."""
    shape = {"vocab_size": 258, "layers": 2, "hidden": 16, "heads": 2, "kv_heads": 1, "context": 64}
    kind = {"mlp": "swiglu", "mlp_bias": False, "norm": "rms", "head_bias": False}
    config = TransformerConfig(**(shape | kind | changes))
    torch.manual_seed(0)
    method = AutoregressiveMethod()
    return LanguageModel(
        Transformer(config).eval(), LanguageModelConfig(network=config, method=method, mask_id=257), BYTES
    )


class TestHuggingFace:
    @pytest.mark.parametrize("vocabulary", [300, 333])
    def test_a_checkpoint_goes_in_and_out(self, vocabulary: int, tmp_path: Path, capsys) -> None:
        """Through our own format: the same weights, config, tokenizer and texts."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        theirs, ours, out, back = (tmp_path / name for name in ("theirs", "ours", "out", "back"))
        model = saved(tiny("qwen2", vocab_size=vocabulary), theirs)
        config = json.loads((theirs / "config.json").read_text())
        beside(theirs, vocabulary, config=config, tokenizer_config={"chat_template": "A", "eos_token": "a"})
        assert main(["convert", str(theirs), str(ours)]) == 0
        assert main(["export", str(ours), str(out), "--to", "huggingface"]) == 0
        assert "for huggingface: autoregressive" in capsys.readouterr().out
        assert main(["convert", str(out), str(back)]) == 0
        assert contents(back) == contents(ours)
        assert_same(interop.load(theirs)[0], interop.load(out)[0])
        model, again = (AutoModelForCausalLM.from_pretrained(each) for each in (theirs, out))
        tokens = some_tokens(vocabulary=vocabulary)
        assert torch.equal(logits_of(model, tokens), logits_of(again, tokens))
        tokenizer, original = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(theirs)
        assert tokenizer.chat_template == "A"
        assert tokenizer.eos_token == "a"
        for text in TEXTS:
            assert tokenizer(text)["input_ids"] == original(text)["input_ids"]

    def test_one_of_ours_writes_the_same_greedy_texts_there(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = llama_of_bytes()
        model.save_pretrained(tmp_path / "ours")
        assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "huggingface"]) == 0
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        written = model.generate("ab", max_new_tokens=20, temperature=0.0)[0]
        inputs = tokenizer("ab", return_tensors="pt")
        expected = theirs.generate(**inputs, max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert written.tokens == expected[0].tolist()
        again = bd3lm.load(tmp_path / "out", device="cpu")
        assert (again.tokenizer.bos_id, again.tokenizer.eos_id) == (256, 256)

    def test_another_precision(self, tmp_path: Path) -> None:
        llama_of_bytes().save_pretrained(tmp_path / "ours")
        words = ("--to", "huggingface", "--dtype", "bfloat16")
        assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), *words]) == 0
        assert interop.load(tmp_path / "out")[0].embedding.weight.dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("model", "said"),
        [
            (
                lambda: of_bytes(4),
                "must be an autoregressive model that does not predict first tokens, got block",
            ),
            (lambda: llama_of_bytes(mlp="gelu"), "nearest is llama, where mlp must be 'swiglu', got 'gelu'"),
            (lambda: llama_of_bytes(norm="layer"), "nearest is llama, where norm must be 'rms', got 'layer'"),
        ],
    )
    def test_what_does_not_fit_is_one_line_and_nothing_is_written(
        self, model, said: str, tmp_path: Path, capsys
    ) -> None:
        model().save_pretrained(tmp_path / "ours")
        words = ("export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "huggingface")
        assert said in fails(capsys, *words)
        assert not (tmp_path / "out").exists()


class TestTransformers:
    def test_the_folder_is_ours_with_code_beside_it(self, tmp_path: Path, capsys) -> None:
        model, out = of_bytes(4), tmp_path / "out"
        model.save_pretrained(tmp_path / "ours")
        words = ("--to", "transformers", "--dtype", "bfloat16")
        assert main(["export", str(tmp_path / "ours"), str(out), *words]) == 0
        assert "for transformers: block diffusion, blocks of 4" in capsys.readouterr().out
        code = {"configuration_bd3lm.py", "modeling_bd3lm.py"}
        assert {each.name for each in out.iterdir()} == code | set(contents(tmp_path / "ours"))
        data = json.loads((out / "config.json").read_text())
        assert (data["dtype"], data["default_top_p"], data["eos_token_id"]) == ("bfloat16", 0.9, 256)
        again = bd3lm.load(out, device="cpu", dtype="bfloat16")
        assert again.record == model.record
        assert_same(again.network, model.to(dtype="bfloat16").network)

    @pytest.mark.parametrize(("layout", "law"), [("huggingface", ", causal law"), ("transformers", "")])
    def test_of_a_joint_model_the_law_that_is_written_is_said(self, layout, law, tmp_path, capsys) -> None:
        model = llama_of_bytes()
        method = BlockDiffusionMethod(block_size=4, joint=True, causal_clean=True)
        record = replace(model.record, method=method)
        LanguageModel(model.network, record, BYTES).save_pretrained(tmp_path / "ours")
        assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", layout]) == 0
        assert f"for {layout}: block diffusion, blocks of 4{law}, " in capsys.readouterr().out

    def test_of_a_joint_model_the_block_law_is_written(self, tmp_path: Path) -> None:
        network, record = of_bytes(4, causal_clean=True).network, of_bytes(4, causal_clean=True).record
        method = replace(record.method, joint=True, law="causal")
        model = LanguageModel(network, replace(record, method=method), BYTES)
        model.save_pretrained(tmp_path / "ours")
        assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "transformers"]) == 0
        assert bd3lm.load(tmp_path / "out", device="cpu").record == model.with_law("block").config


class TestSdar:
    def qwen_of_bytes(self, **method) -> LanguageModel:
        kind = {"qk_norm": True, "head_dim": 8}
        network = llama_of_bytes(**kind).network
        of = BlockDiffusionMethod(**({"block_size": 4} | method))
        return LanguageModel(
            network, LanguageModelConfig(network=network.config, method=of, mask_id=257), BYTES
        )

    def test_a_model_goes_out_and_in(self, tmp_path: Path, capsys) -> None:
        model = self.qwen_of_bytes()
        model.save_pretrained(tmp_path / "ours")
        assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "sdar"]) == 0
        said = capsys.readouterr()
        assert "for sdar: block diffusion, blocks of 4" in said.out
        assert "the mask of this model is 257, but SGLang and LMDeploy always use 151669" in said.err
        again = bd3lm.load(tmp_path / "out", device="cpu")
        settings = {"max_new_tokens": 20, "temperature": 0.0, "eos_id": 255}
        assert again.generate("ab", **settings)[0].tokens == model.generate("ab", **settings)[0].tokens
        assert interop.config_of(tmp_path / "out") == again.record

    def test_what_does_not_fit_is_one_line_and_nothing_is_written(self, tmp_path: Path, capsys) -> None:
        self.qwen_of_bytes(causal_clean=True, lean=1.0).save_pretrained(tmp_path / "ours")
        said = fails(capsys, "export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "sdar")
        assert "cannot hold this model: method.causal_clean must be false" in said
        assert "method.lean must be 0" in said
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["transformers", "sdar"])
def test_autoregressive_models_are_not_for_block_layouts(layout: str, tmp_path: Path, capsys) -> None:
    llama_of_bytes().save_pretrained(tmp_path / "ours")
    said = fails(capsys, "export", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", layout)
    assert "block_diffusion" in said
    assert "autoregressive" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [(), ("--to", "onnx")])
def test_a_layout_must_be_named(words: tuple[str, ...], tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["export", "box", str(tmp_path / "out"), *words])
    assert "--to" in capsys.readouterr().err


def test_a_full_folder_is_left_alone(tmp_path: Path, capsys) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").touch()
    said = fails(capsys, "export", "box", str(tmp_path / "out"), "--to", "reference")
    assert "OUT must be a new or empty folder" in said
