"""Lightning checkpoints: their contents are found, and nothing they ask for is run."""

import builtins
import math
import os
import pickle
import shutil
import subprocess
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import conditioning_noise, sedd
from bd3lm.interop import LightningFacts, load
from bd3lm.interop.lightning import read
from bd3lm.interop.reference import to_reference_state
from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, ScoreEntropyMethod
from bd3lm.models import Bidirectional, Transformer
from tests.interop.small import CONTEXT, VOCABULARY, assert_same, small_model

FACTS = LightningFacts(context=CONTEXT, block_size=4, time_conditioning=False)


def reference_order(model: Transformer) -> "OrderedDict[str, Tensor]":
    """The reference's state dict in the order of its modules, which safetensors files do not keep."""
    state = to_reference_state(model)

    def place(name: str) -> int:
        modules = ("vocab_embed", "sigma_map", "rotary_emb", "blocks", "output_layer")
        return modules.index(name.split(".")[1])

    return OrderedDict((name, state[name]) for name in sorted(state, key=place))


def checkpoint(model: Transformer, average: Transformer | None = None, **more: Any) -> dict[str, Any]:
    """A checkpoint as the reference's training writes it."""
    state = reference_order(model)
    extra = {"sampling_eps_min": torch.tensor(0.3), "sampling_eps_max": torch.tensor(0.8)}
    contents: dict[str, Any] = {"epoch": 3, "global_step": 17, "state_dict": OrderedDict(state, **extra)}
    if average is not None:
        shadow = [tensor for name, tensor in reference_order(average).items() if "inv_freq" not in name]
        contents["ema"] = {"decay": 0.9999, "num_updates": 17, "shadow_params": shadow}
    return contents | more


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.ckpt"


@pytest.fixture
def hyper_parameters() -> Iterator[Any]:
    """An object like omegaconf's, from a module that can no longer be imported when it is read."""
    module = types.ModuleType("foreign_config")

    class Node:
        def __init__(self, value: Any) -> None:
            self.value, self.kind = value, type(value)
            self.cache: Any = defaultdict(dict, resolved={"now": 1})

        def __setstate__(self, state: Any) -> None:
            raise AssertionError("foreign code ran")

    class Flag(Node):
        def __reduce__(self) -> tuple[Any, ...]:
            return type(self), (self.value,), self.__dict__

    for kind in (Node, Flag):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    sys.modules[module.__name__] = module
    yield {"config": Node({"a": [Node(1), Node("b")]}), "flag": Flag(2), "type": Node, "any": Any}
    sys.modules.pop(module.__name__, None)


@contextmanager
def omegaconf() -> Iterator[Callable[[Any], Any]]:
    """Wraps plain values in objects with omegaconf's state, from a module that then disappears."""
    module = types.ModuleType("made_up_omegaconf")

    class DictConfig:
        def __init__(self, values: dict[str, Any]) -> None:
            self._metadata, self._parent = AnyNode(None), None
            self._content = {name: wrapped(value) for name, value in values.items()}
            for child in self._content.values():
                child._parent = self

    class AnyNode:
        def __init__(self, value: Any) -> None:
            self._parent: Any = None
            self._val = value

    def wrapped(value: Any) -> Any:
        return DictConfig(value) if isinstance(value, dict) else AnyNode(value)

    for kind in (DictConfig, AnyNode):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    sys.modules[module.__name__] = module
    yield wrapped
    del sys.modules[module.__name__]


BD3LM = {"algo": {"name": "bd3lm", "parameterization": "subs", "cross_attn": True}}


class TestMethod:
    """The hyper-parameters decide; if they are silent, the caller must say."""

    @pytest.fixture
    def method(self, file: Path) -> Callable[..., Any]:
        def found(config: dict[str, Any] | None, *, adaln: bool = False, **facts: Any) -> Any:
            with omegaconf() as wrapped:
                more = {} if config is None else {"hyper_parameters": {"config": wrapped(config)}}
                torch.save(checkpoint(small_model(adaln=adaln)[0], **more), file)
            return load(file, lightning=LightningFacts(context=CONTEXT, **facts))[1].method

        return found

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({"parameterization": "subs"}, BlockDiffusionMethod(block_size=CONTEXT)),  # MDLM's own code
            ({"algo": {"parameterization": "subs"}}, BlockDiffusionMethod(block_size=CONTEXT)),
            (
                {"algo": {"parameterization": "subs"}, "block_size": 4},
                BlockDiffusionMethod(block_size=CONTEXT),
            ),
            (BD3LM | {"block_size": 4}, BlockDiffusionMethod(block_size=4)),
            (BD3LM | {"block_size": "${model.length}"}, BlockDiffusionMethod(block_size=CONTEXT)),
            ({"parameterization": "sedd"}, ScoreEntropyMethod()),
            ({"algo": {"parameterization": "sedd"}, "parameterization": "subs"}, ScoreEntropyMethod()),
            ({"algo": {"parameterization": "ar"}}, AutoregressiveMethod()),
        ],
    )
    def test_it_is_what_the_file_says(
        self, method: Callable[..., Any], config: dict[str, Any], expected: object
    ) -> None:
        assert method(config) == expected

    @pytest.mark.parametrize(
        ("facts", "expected"),
        [
            ({"sedd": True}, ScoreEntropyMethod()),
            ({"causal": True}, AutoregressiveMethod()),
            ({"block_size": 4}, BlockDiffusionMethod(block_size=4)),
        ],
    )
    @pytest.mark.parametrize("config", [None, {}, {"parameterization": "${algo.parameterization}"}])
    def test_where_the_file_says_nothing_it_must_be_given(
        self,
        method: Callable[..., Any],
        config: dict[str, Any] | None,
        facts: dict[str, Any],
        expected: object,
    ) -> None:
        assert method(config, **facts) == expected
        with pytest.raises(ValueError, match=r"the method must be given for .*model\.ckpt, whose hyper-par"):
            method(config)

    def test_what_is_given_must_agree(self, method: Callable[..., Any]) -> None:
        assert method({"parameterization": "sedd"}, sedd=True) == ScoreEntropyMethod()
        assert method(BD3LM, block_size=8) == BlockDiffusionMethod(block_size=8)
        for config, facts in (
            ({"parameterization": "sedd"}, {"block_size": CONTEXT}),
            ({"parameterization": "subs"}, {"sedd": True}),
            ({"parameterization": "ar"}, {"sedd": True}),
        ):
            with pytest.raises(ValueError, match=f"parameterization '{config['parameterization']}', got"):
                method(config, **facts)

    def test_what_cannot_be_read_is_refused_by_name(self, method: Callable[..., Any]) -> None:
        for facts in ({}, {"block_size": CONTEXT}):
            with pytest.raises(ValueError, match=r"subs .*, sedd or ar, got 'd3pm'"):
                method({"parameterization": "d3pm"}, **facts)
        with pytest.raises(ValueError, match=r"block_size must be given for .*, a block diffusion model"):
            method(BD3LM | {"block_size": "${blocks}"})

    def test_sedd_gets_the_noise_level_if_its_network_has_an_embedding(
        self, method: Callable[..., Any], file: Path
    ) -> None:
        for adaln in (False, True):
            method({"parameterization": "sedd"}, adaln=adaln)
            network, config = load(file, lightning=LightningFacts(context=CONTEXT))
            assert network.uses_noise == config.network.time_conditioning == adaln

    def test_the_scores_are_the_references(self, method: Callable[..., Any], file: Path) -> None:
        """log s = f(x, σ) − log(e^σ − 1) − log(V − 1), and 0 at the token itself; σ = −log α."""
        method({"parameterization": "sedd"}, adaln=True)
        network, config = load(file, lightning=LightningFacts(context=CONTEXT))
        mask, alpha = config.mask_id, torch.tensor([[0.3]])
        tokens = torch.arange(CONTEXT).remainder(mask)[None]
        tokens[:, ::2] = mask
        sigma = conditioning_noise(1.0 - alpha).squeeze(1)
        assert sigma.item() == pytest.approx(-math.log(0.3))
        with torch.no_grad():
            logits = network.head(network(tokens, layout=Bidirectional(CONTEXT), noise=sigma))
        theirs = logits - torch.expm1(sigma).log() - math.log(VOCABULARY - 1)
        theirs = theirs.scatter(-1, tokens[..., None], 0.0)
        torch.testing.assert_close(sedd(logits, tokens, alpha), theirs)

    def test_the_mask_of_bert_is_not_the_last_token(self, file: Path) -> None:
        model, _ = small_model(vocab_size=30_522, layers=1)
        torch.save(checkpoint(model), file)
        with pytest.raises(ValueError, match=r"mask_id must be given for .*: 103 for bert-base-uncased"):
            load(file, lightning=LightningFacts(context=CONTEXT, sedd=True))
        assert load(file, lightning=LightningFacts(context=CONTEXT, sedd=True, mask_id=103))[1].mask_id == 103


class TestWeights:
    @pytest.mark.parametrize("adaln", [False, True])
    def test_config_and_weights_are_found(self, adaln: bool, file: Path) -> None:
        model, config = small_model(adaln=adaln, layers=3)
        torch.save(checkpoint(model), file)
        again, found = load(file, lightning=FACTS)
        assert_same(model, again)
        assert not again.training
        assert found.method == config.method
        expected = (
            config.network
            if adaln
            else config.network.__class__(**{**config.network.__dict__, "conditioning_dim": 128})
        )
        assert found.network == expected

    def test_the_average_is_preferred(self, file: Path) -> None:
        raw, average = small_model(seed=1, adaln=True)[0], small_model(seed=2, adaln=True)[0]
        torch.save(checkpoint(raw, average), file)
        for weights, expected in ((None, average), ("ema", average), ("raw", raw)):
            facts = replace(FACTS, weights=weights)  # type: ignore[arg-type]
            assert_same(expected, load(file, lightning=facts)[0])

    def test_no_average(self, file: Path) -> None:
        model, _ = small_model()
        torch.save(checkpoint(model, ema=None), file)
        assert_same(model, load(file, lightning=FACTS)[0])
        facts = LightningFacts(context=CONTEXT, block_size=4, weights="ema")
        with pytest.raises(ValueError, match=r"weights='ema' needs ema\.shadow_params"):
            load(file, lightning=facts)

    def test_an_average_of_another_network(self, file: Path) -> None:
        model, _ = small_model()
        contents = checkpoint(model, model)
        shadow = contents["ema"]["shadow_params"]
        contents["ema"]["shadow_params"] = shadow[:-1]
        torch.save(contents, file)
        with pytest.raises(ValueError, match=r"must be the 20 parameters of the backbone, got 19$"):
            load(file, lightning=FACTS)
        contents["ema"]["shadow_params"] = shadow[::-1]
        torch.save(contents, file)
        message = r"got 20: backbone\.vocab_embed\.embedding is \(11,\) but must be \(11, 16\)"
        with pytest.raises(ValueError, match=message):
            load(file, lightning=FACTS)

    def test_compiled_models(self, file: Path) -> None:
        model, _ = small_model()
        contents = checkpoint(model, model)
        contents["state_dict"] = OrderedDict(
            (name.replace("backbone.", "backbone._orig_mod."), tensor)
            for name, tensor in contents["state_dict"].items()
        )
        torch.save(contents, file)
        assert_same(model, load(file, lightning=FACTS)[0])

    def test_other_tensors_are_ignored(self, file: Path) -> None:
        model, _ = small_model()
        contents = checkpoint(model)
        contents["state_dict"]["metrics.total"] = torch.ones(3)
        torch.save(contents, file)
        assert_same(model, load(file, lightning=FACTS)[0])

    def test_the_file_may_go(self, file: Path) -> None:
        """Weights are copied out of the file, which is only mapped into memory."""
        model, _ = small_model()
        torch.save(checkpoint(model), file)
        again, _ = load(file, lightning=FACTS)
        file.write_bytes(b"\0" * file.stat().st_size)
        assert_same(model, again)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"backbone.vocab_embed.embedding": None}, r"must hold a backbone\.vocab_embed\.embedding"),
            ({"backbone.rotary_emb.inv_freq": None}, r"must hold a backbone\.rotary_emb\.inv_freq"),
            ({"backbone.rotary_emb.inv_freq": torch.ones(0)}, r"of 1 dimensions, none of them 0"),
            ({"backbone.vocab_embed.embedding": torch.ones(3)}, r"of 2 dimensions.* got one of shape \(3,\)"),
            ({"backbone.rotary_emb.inv_freq": torch.ones(3)}, r"half a head of the 16 units, got 3"),
            ({"backbone.rotary_emb.inv_freq": torch.ones(4)}, r"must match rotary_base 10000"),
            (
                {"backbone.rotary_emb.inv_freq": torch.ones(4, dtype=torch.int)},
                r"must match rotary_base 10000",
            ),
            ({"backbone.blocks.1.norm1.weight": None}, r"missing: backbone\.blocks\.1\.norm1\.weight"),
            ({"backbone.blocks.0.other": torch.ones(1)}, r"unexpected: backbone\.blocks\.0\.other"),
            (
                {"backbone.blocks.0.norm1.weight": torch.ones(3)},
                r"norm1\.weight is \(3,\) but must be \(16,\)",
            ),
            ({"backbone.blocks.0.norm1.weight": "text"}, r"must hold tensors named backbone\.\*"),
        ],
    )
    def test_damaged(self, change: dict[str, Any], named: str, file: Path) -> None:
        contents = checkpoint(small_model()[0])
        for name, tensor in change.items():
            contents["state_dict"].pop(name, None)
            if tensor is not None:
                contents["state_dict"][name] = tensor
        torch.save(contents, file)
        with pytest.raises(ValueError, match=named):
            load(file, lightning=FACTS)

    @pytest.mark.parametrize("contents", [{}, {"state_dict": {}}, {"state_dict": {"w": torch.ones(1)}}, [1]])
    def test_other_files(self, contents: Any, file: Path) -> None:
        torch.save(contents, file)
        with pytest.raises(ValueError, match=r"must hold (a dict|tensors named backbone\.\*)"):
            load(file, lightning=FACTS)


class TestFacts:
    def test_they_are_needed(self, file: Path) -> None:
        torch.save(checkpoint(small_model()[0]), file)
        with pytest.raises(ValueError, match=r"lightning must be given .*=LightningFacts\(context="):
            load(file)

    def test_they_are_not_for_folders(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"lightning must be None unless the model is a \.ckpt file"):
            load(tmp_path, lightning=FACTS)

    def test_one_block(self, file: Path) -> None:
        torch.save(checkpoint(small_model()[0]), file)
        facts = LightningFacts(context=CONTEXT, block_size=CONTEXT)
        assert load(file, lightning=facts)[1].method == BlockDiffusionMethod(block_size=CONTEXT)

    def test_autoregressive(self, file: Path) -> None:
        torch.save(checkpoint(small_model()[0]), file)
        facts = LightningFacts(context=CONTEXT, causal=True)
        assert load(file, lightning=facts)[1].method == AutoregressiveMethod()

    def test_time_conditioning(self, file: Path) -> None:
        torch.save(checkpoint(small_model(adaln=True)[0]), file)
        facts = LightningFacts(context=CONTEXT, block_size=4, time_conditioning=True)
        assert load(file, lightning=facts)[0].uses_noise
        torch.save(checkpoint(small_model()[0]), file)
        with pytest.raises(ValueError, match="time_conditioning needs adaln"):
            load(file, lightning=facts)

    def test_time_conditioning_must_be_said_where_there_is_a_noise_embedding(self, file: Path) -> None:
        facts = LightningFacts(context=CONTEXT, block_size=4)
        torch.save(checkpoint(small_model(adaln=True)[0]), file)
        with pytest.raises(ValueError, match=r"time_conditioning must be given for .*model\.ckpt, which has"):
            load(file, lightning=facts)
        assert not load(file, lightning=FACTS)[0].uses_noise
        torch.save(checkpoint(small_model()[0]), file)
        assert not load(file, lightning=facts)[0].uses_noise

    @pytest.mark.parametrize(
        "arguments",
        [{"block_size": 4, "causal": True}, {"block_size": 4, "sedd": True}, {"causal": True, "sedd": True}],
    )
    def test_the_method_is_named_once(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"only one of block_size .* may be given, got"):
            LightningFacts(context=CONTEXT, **arguments)

    def test_bad_values(self, file: Path) -> None:
        with pytest.raises(ValueError, match="weights must be 'ema', 'raw' or None, got 'best'"):
            LightningFacts(context=CONTEXT, block_size=4, weights="best")  # type: ignore[arg-type]
        torch.save(checkpoint(small_model()[0]), file)
        with pytest.raises(ValueError, match=r"block_size must divide the context 16, got 5"):
            load(file, lightning=LightningFacts(context=CONTEXT, block_size=5))
        with pytest.raises(ValueError, match="context must be at least 1, got 0"):
            load(file, lightning=LightningFacts(context=0, block_size=5))


class Calls:
    """When unpickled, makes a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


class Restores(dict[str, Any]):
    """When unpickled, makes a call with its items and state."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("dict()",), {"state": 1}, None, iter({"a": 1}.items())


class TestNothingRuns:
    def test_foreign_classes_are_inert(self, hyper_parameters: Any, file: Path) -> None:
        model, _ = small_model()
        torch.save(checkpoint(model, hyper_parameters=hyper_parameters), file)
        del sys.modules["foreign_config"]
        allowed = set(torch.serialization.get_safe_globals())
        assert_same(model, load(file, lightning=FACTS)[0])
        found = read(file)["hyper_parameters"]
        assert not hasattr(found["config"], "value")
        assert set(torch.serialization.get_safe_globals()) == allowed  # stand-ins last for one load

    @pytest.mark.parametrize(
        "ask",
        [
            lambda target: Calls(os.system, f"touch {target}"),
            lambda target: Calls(eval, f"open({str(target)!r}, 'w')"),
            lambda target: Calls(exec, f"open({str(target)!r}, 'w')"),
            lambda target: Calls(builtins.open, str(target), "w"),
            lambda target: Calls(subprocess.check_call, ["touch", str(target)]),
            lambda target: Calls(os.mkdir, str(target)),
            lambda target: Calls(shutil.copy, __file__, str(target)),
            lambda target: Calls(Path.touch, target),
            lambda target: Calls(map, Calls(eval, f"open({str(target)!r}, 'w')"), [1]),
            lambda target: Calls(torch.storage._load_from_bytes, pickle.dumps(Calls(os.mkdir, str(target)))),
        ],
    )
    @pytest.mark.parametrize("zipped", [True, False])
    def test_hostile_files(
        self, ask: Callable[[Path], Any], zipped: bool, file: Path, tmp_path: Path
    ) -> None:
        """Refused, or loaded with the call replaced by one that does nothing. The call is never made."""
        target = tmp_path / "made"
        model, _ = small_model()
        contents = checkpoint(model, hyper_parameters={"nested": [ask(target)]})
        torch.save(contents, file, _use_new_zipfile_serialization=zipped)
        try:
            assert_same(model, load(file, lightning=FACTS)[0])
        except ValueError as error:
            assert "pickles can run any code, so they are not loaded" in str(error)  # noqa: PT017
            assert "weights_only=False" not in str(error)  # noqa: PT017
        assert not target.exists()

    def test_the_hostile_file_would_have_worked(self, file: Path, tmp_path: Path) -> None:
        """Shows that the test above can fail."""
        target = tmp_path / "made"
        torch.save(Calls(os.mkdir, str(target)), file)
        torch.load(file, weights_only=False)
        assert target.exists()

    def test_files_that_cannot_be_made_inert_are_refused(self, file: Path) -> None:
        torch.save(checkpoint(small_model()[0], hyper_parameters=Restores()), file)
        with pytest.raises(ValueError, match="pickles can run any code, so they are not loaded"):
            load(file, lightning=FACTS)

    @pytest.mark.parametrize("contents", [b"", b"text", pickle.dumps({"state_dict": {}})])
    def test_other_files_are_refused(self, contents: bytes, file: Path) -> None:
        file.write_bytes(contents)
        with pytest.raises(ValueError, match="pickles can run any code, so they are not loaded"):
            load(file, lightning=FACTS)

    def test_a_cut_file_is_refused(self, file: Path) -> None:
        torch.save(checkpoint(small_model()[0]), file)
        file.write_bytes(file.read_bytes()[:-2000])
        with pytest.raises(ValueError, match="pickles can run any code, so they are not loaded"):
            load(file, lightning=FACTS)

    def test_only_weights_are_ever_asked_for(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.save(checkpoint(small_model()[0]), file)
        calls = []
        real = torch.load

        def spy(*arguments: Any, **options: Any) -> Any:
            calls.append(options["weights_only"])
            return real(*arguments, **options)

        monkeypatch.setattr(torch, "load", spy)
        load(file, lightning=FACTS)
        assert calls == [True]
