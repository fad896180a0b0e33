import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from bd3lm.methods import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    D3PMMethod,
    LanguageModelConfig,
    Method,
    ScoreEntropyMethod,
    SimplexMethod,
    config_from_dict,
    config_to_dict,
)
from bd3lm.models import TransformerConfig

NETWORK = TransformerConfig(vocab_size=11, context=16)
METHODS: list[Method] = [
    AutoregressiveMethod(),
    AutoregressiveMethod(score_first=True),
    BlockDiffusionMethod(block_size=4),
    BlockDiffusionMethod(block_size=16, causal_clean=True, score_first=True),
    BlockDiffusionMethod(block_size=4, previous_token=True),
    BlockDiffusionMethod(block_size=4, lean=0.75),
    D3PMMethod(process="uniform", block_size=4),
    ScoreEntropyMethod(block_size=8),
    ScoreEntropyMethod(process="uniform"),
    SimplexMethod(block_size=5),
]


def plain(**changes: Any) -> dict[str, Any]:
    """A valid config as plain values, with changes to its two parts."""
    data: dict[str, Any] = {
        "network": {"kind": "transformer", "vocab_size": 11, "context": 16},
        "method": {"kind": "block_diffusion", "block_size": 4},
        "mask_id": 10,
    }
    return {
        **data,
        **{
            part: data.get(part, {}) | change if isinstance(change, dict) else change
            for part, change in changes.items()
        },
    }


def problems(data: Any) -> list[str]:
    with pytest.raises(ValueError, match="config has") as caught:
        config_from_dict(data)
    heading, *listed = str(caught.value).split("\n  ")
    assert heading == ("config has a problem:" if len(listed) == 1 else f"config has {len(listed)} problems:")
    return listed


@pytest.mark.parametrize("method", METHODS)
def test_round_trip_through_json(method: Method) -> None:
    config = LanguageModelConfig(
        network=replace(NETWORK, adaln=True, dropout=0.25), method=method, mask_id=10
    )
    data = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(data) == config
    assert next(iter(data["method"])) == "kind"


def test_defaults_may_be_left_out() -> None:
    expected = LanguageModelConfig(network=NETWORK, method=BlockDiffusionMethod(block_size=4), mask_id=10)
    assert config_from_dict(plain()) == expected


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_mask_beside_the_vocabulary_is_for_methods_that_only_read_it(method: Method) -> None:
    beside = replace(NETWORK, mask_vector=True)
    needs_it_inside = isinstance(method, D3PMMethod | ScoreEntropyMethod | SimplexMethod)
    if not needs_it_inside:
        config = LanguageModelConfig(network=beside, method=method, mask_id=11)
        assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
        assert config.frame.mask_apart
        return
    said = f"method.kind {method.kind} needs a network whose mask is one of the tokens that it can predict"
    with pytest.raises(ValueError, match=said):
        LanguageModelConfig(network=beside, method=method, mask_id=11)
    inside = LanguageModelConfig(network=NETWORK, method=method, mask_id=10)
    assert not inside.frame.mask_apart


def test_the_mask_is_the_token_that_has_the_vector_of_its_own() -> None:
    with pytest.raises(ValueError, match="mask_id must be 11, the network's extra vector for it, got 10"):
        LanguageModelConfig(network=replace(NETWORK, mask_vector=True), method=METHODS[0], mask_id=10)
    for network, most in ((NETWORK, 10), (replace(NETWORK, mask_vector=True), 11)):
        for outside in (-1, most + 1):
            with pytest.raises(ValueError, match=rf"mask_id must lie in 0\.\.{most}, got {outside}"):
                LanguageModelConfig(network=network, method=METHODS[0], mask_id=outside)


def test_a_lean_may_be_left_out_and_be_a_whole_number() -> None:
    assert config_from_dict(plain()).method.lean == 0.0
    assert config_to_dict(config_from_dict(plain()))["method"]["lean"] == 0.0
    assert config_from_dict(plain(method={"lean": 2})).method.lean == 2.0


def test_blocks_of_the_whole_context_are_no_blocks_to_sedd_and_d3pm() -> None:
    """Whole contexts are what they were before they had blocks, whichever way that is said."""
    for kind in ("score_entropy", "d3pm"):
        whole, said, blocks = (
            config_from_dict({**plain(), "method": {"kind": kind, "block_size": size}})
            for size in (None, 16, 4)
        )
        assert whole == said
        assert blocks.method.writes_past_context
        assert (whole.method.piece(16), blocks.method.piece(16)) == (16, 4)
        assert blocks.title == f"{whole.title}, blocks of 4"
        (problem,) = problems({**plain(), "method": {"kind": kind, "block_size": 5}})
        assert "method.block_size must divide the context 16, got 5" in problem
        (problem,) = problems({**plain(), "method": {"kind": kind, "block_size": 0}})
        assert "block_size must be at least 1, got 0" in problem


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ({}, "block diffusion, blocks of 4"),
        ({"lean": 0.0}, "block diffusion, blocks of 4"),
        ({"lean": 2.0}, "block diffusion, blocks of 4, lean 2"),
        ({"lean": 0.75, "block_size": 1}, "block diffusion, blocks of 1, lean 0.75"),
        ({"block_size": 16}, "diffusion, one block (MDLM)"),
        ({"block_size": 16, "lean": 2.0}, "diffusion, one block (MDLM), lean 2"),
    ],
    ids=str,
)
def test_titles_name_a_lean(method: dict[str, Any], title: str) -> None:
    assert config_from_dict(plain(method=method)).title == title


def test_a_lean_of_one_block_is_no_mdlm_without_saying_so() -> None:
    assert "lean 2" in config_from_dict(plain(method={"block_size": 16, "lean": 2.0})).title


def test_configs_are_frozen_values() -> None:
    config = config_from_dict(plain())
    assert hash(config) == hash(config_from_dict(plain()))
    with pytest.raises(FrozenInstanceError):
        config.network = NETWORK  # type: ignore[misc]


class TestErrors:
    def test_all_are_told_at_once(self) -> None:
        data = plain(
            network={"layers": "many", "hiden": 3}, method={"block_size": 2.5, "masks": 1}, extras={}
        )
        del data["network"]["vocab_size"]
        listed = problems(data)
        assert len(listed) == 6
        for start, part in [
            (
                "network.hiden: ",
                "unknown key, did you mean 'hidden'? allowed are kind, vocab_size, context, layers",
            ),
            ("method.masks: ", "unknown key, allowed are kind, score_first, block_size"),
            ("extras: ", "unknown key, allowed are network, method, mask_id"),
            ("network.vocab_size: ", "must be given, but is missing"),
            ("network.layers: ", "integer, unable to parse string as an integer, got 'many'"),
            ("method.block_size: ", "integer, got a number with a fractional part, got 2.5"),
        ]:
            assert any(line.startswith(start) and part in line for line in listed), (start, listed)

    def test_both_parts_are_checked_when_one_is_wrong(self) -> None:
        listed = problems(plain(network={"layers": 0}, method={"lean": -1, "block_size": 0}))
        assert listed == [
            "network: layers must be at least 1, got 0",
            "method: block_size must be at least 1, got 0; lean must be a number from 0 to 1e6, got -1.0",
        ]

    @pytest.mark.parametrize(
        ("method", "said"),
        [
            ({"kind": "blockdiffusion"}, "got 'blockdiffusion', did you mean 'block_diffusion'?"),
            ({"kind": "sedd"}, "got 'sedd'"),
            ({"kind": None}, "got None"),
            ({"kind": []}, "got []"),
        ],
    )
    def test_unknown_methods(self, method: dict[str, Any], said: str) -> None:
        (problem,) = problems(plain(method=method))
        assert problem.startswith("method.kind: must be one of 'autoregressive', 'block_diffusion', ")
        assert problem.endswith(said)

    def test_no_method(self) -> None:
        assert problems(plain() | {"method": {}}) == [
            "method.kind: must be one of 'autoregressive', 'block_diffusion', 'd3pm', 'drafter', "
            "'score_entropy', 'simplex', but is missing"
        ]
        assert problems({"network": {"kind": "transformer", "vocab_size": 11}, "mask_id": 10}) == [
            "method: must be given, but is missing"
        ]

    @pytest.mark.parametrize("part", ["network", "method"])
    @pytest.mark.parametrize("value", [None, 3, "text", []])
    def test_parts_that_are_no_dicts(self, part: str, value: object) -> None:
        (problem,) = problems(plain() | {part: value})
        assert problem.startswith(f"{part}: must be ")
        assert problem.endswith(f"got {value!r}")

    @pytest.mark.parametrize("data", [None, [], "text"])
    def test_no_dict_at_all(self, data: object) -> None:
        (problem,) = problems(data)
        assert problem.startswith("input should be a dictionary")

    def test_a_dict_where_a_number_belongs(self) -> None:
        (problem,) = problems(plain(network={"layers": {"kind": "many"}}))
        assert problem.startswith("network.layers: ")

    @pytest.mark.parametrize("value", [True, "010", "+007"])
    def test_what_is_not_surely_a_number(self, value: object) -> None:
        assert problems(plain(network={"layers": value}, method={"lean": value})) == [
            f"{place}: must be a decimal number, got {value!r}" for place in ("network.layers", "method.lean")
        ]

    def test_fields_of_another_method(self) -> None:
        listed = problems(plain(method={"kind": "autoregressive"}))
        assert listed == ["method.block_size: unknown key, allowed are kind, score_first"]

    def test_the_origin_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"^run\.yaml has a problem"):
            config_from_dict(
                {"network": {"kind": "transformer", "vocab_size": 11}, "mask_id": 1}, where="run.yaml"
            )


class TestCrossChecks:
    @pytest.mark.parametrize("method", METHODS)
    def test_mask_id_is_a_token(self, method: Method) -> None:
        for mask_id in (11, -1):
            with pytest.raises(ValueError, match=rf"mask_id must lie in 0\.\.10, got {mask_id}"):
                LanguageModelConfig(network=NETWORK, method=method, mask_id=mask_id)

    def test_block_size_divides_the_context(self) -> None:
        with pytest.raises(ValueError, match=r"method\.block_size must divide the context 16, got 5"):
            LanguageModelConfig(network=NETWORK, method=BlockDiffusionMethod(block_size=5), mask_id=1)

    def test_autoregression_has_no_noise(self) -> None:
        network = replace(NETWORK, adaln=True, time_conditioning=True)
        with pytest.raises(ValueError, match=r"network\.time_conditioning must be false"):
            LanguageModelConfig(network=network, method=AutoregressiveMethod(), mask_id=1)
        LanguageModelConfig(network=network, method=BlockDiffusionMethod(block_size=4), mask_id=1)

    def test_a_network_that_is_told_the_time_has_no_lean(self) -> None:
        network = replace(NETWORK, adaln=True, time_conditioning=True)
        method = BlockDiffusionMethod(block_size=4, lean=1.5)
        said = r"method\.lean must be 0 for a network that is told the noise level, .* got 1\.5"
        with pytest.raises(ValueError, match=said):
            LanguageModelConfig(network=network, method=method, mask_id=1)
        LanguageModelConfig(network=NETWORK, method=method, mask_id=1)

    @pytest.mark.parametrize("lean", [-0.5, float("nan"), float("inf"), 2e6])
    def test_what_is_no_lean(self, lean: float) -> None:
        said = f"lean must be a number from 0 to 1e6, got {lean}"
        with pytest.raises(ValueError, match=said):
            BlockDiffusionMethod(block_size=4, lean=lean)
        assert problems(plain(method={"lean": lean})) == [f"method: {said}"]

    def test_they_are_told_at_once_from_dicts_too(self) -> None:
        (problem,) = problems(plain(method={"block_size": 5}, mask_id=50))
        assert "mask_id must lie in 0..10, got 50" in problem
        assert "method.block_size must divide the context 16, got 5" in problem
