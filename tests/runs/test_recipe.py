"""Recipes: plain values in and out, layers that replace one another, and errors that come all at once."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import yaml

from bd3lm.diffusion import ClippedTimes, ClipSearch, Counts, DiscreteTimes, Times
from bd3lm.methods import (
    AutoregressiveMethod,
    AutoregressiveTraining,
    BlockDiffusionMethod,
    BlockDiffusionTraining,
)
from bd3lm.models import TransformerConfig
from bd3lm.runs.adapting import OUTCOMES
from bd3lm.runs.merging import merge
from bd3lm.runs.outline import Outline
from bd3lm.runs.presets import PRESETS, preset
from bd3lm.runs.reading import read_settings
from bd3lm.runs.recipe import (
    Recipe,
    parse_overrides,
    recipe_from_dict,
    recipe_to_dict,
)

pytestmark = pytest.mark.sweep(3)


def test_an_outline_has_the_fields_of_a_recipe() -> None:
    """So that an error of either lists the same."""
    assert [each.name for each in fields(Outline)] == [each.name for each in fields(Recipe)]


SMALLEST: dict[str, Any] = {"train": {"steps": 5}, "method": {"kind": "autoregressive"}}


def parse(*layers: dict[str, Any]) -> Recipe:
    return recipe_from_dict(merge(SMALLEST, *layers), where="recipe")


def problems(*layers: dict[str, Any]) -> list[str]:
    with pytest.raises(ValueError, match=r"^recipe has") as caught:
        parse(*layers)
    return str(caught.value).split("\n  ")[1:]


# --- presets ---

STAGES = [(name, stage.name) for name, found in PRESETS.items() for stage in found.stages]


@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_every_stage_of_every_preset_is_a_recipe_and_survives_yaml(name, stage):
    data = next(s.recipe for s in preset(name).stages if s.name == stage)
    recipe = recipe_from_dict(data, where=name)
    written = yaml.safe_dump(recipe_to_dict(recipe), sort_keys=False)
    assert recipe_from_dict(yaml.safe_load(written), where=name) == recipe


CASES = ("ar-random-batch", "bd3lm-1", "bd3lm-1-full")


def test_the_presets_there_are():
    in_blocks = [f"{name}-{size}" for size in (4, 8, 16) for name in ("bd3lm", "block")]
    corpora = [
        f"{corpus}-{method}"
        for corpus in ("lm1b", "owt", "wikipedia")
        for method in ("ar", "mdlm", "sedd", "d3pm", "ssd-lm", *CASES, *in_blocks)
    ]
    assert list(PRESETS) == [
        "demo",
        "demo-paper",
        "demo-sedd",
        "demo-d3pm",
        "demo-d3pm-uniform-4",
        "demo-ssd-lm",
        "demo-ar",
        *(f"demo-{case}" for case in CASES),
        *corpora,
        "box",
        *(f"adapt-{outcome}" for outcome in OUTCOMES),
    ]


@pytest.mark.parametrize("corpus", ["demo", "lm1b", "owt", "wikipedia"])
def test_the_case_study_differs_in_the_method_alone(corpus):
    """Section 4.2: AR, with a random batch size, blocks of 1 by uniform times, and fully masked."""
    plain, *cases = (
        recipe_from_dict(preset(f"{corpus}-{name}").stages[-1].recipe, where="p") for name in ("ar", *CASES)
    )
    if corpus == "wikipedia":  # where each begins as the results say is best for it
        starts = [plain.network.initialisation, *(case.network.initialisation for case in cases)]
        assert starts == ["gpt2", "gpt2", "identity", "identity"]
        cases = [replace(case, network=plain.network) for case in cases]
    if corpus == "lm1b":  # where AR alone is a run of table 3 too, and the figure has a budget of its own
        assert len({case.train for case in cases}) == 1
        assert (cases[0].train.steps, cases[0].train.log_every) == (250_000, 1)
        cases = [replace(case, train=plain.train) for case in cases]
    assert all(replace(case, method=plain.method, objective=plain.objective) == plain for case in cases)
    first = plain.method.score_first
    blocks = BlockDiffusionMethod(block_size=1, score_first=first)
    assert [case.method for case in cases] == [AutoregressiveMethod(score_first=first), blocks, blocks]
    assert [case.objective for case in cases] == [
        AutoregressiveTraining(random_batch=True),
        BlockDiffusionTraining(masking=Times()),
        BlockDiffusionTraining(masking=ClippedTimes(low=1.0, high=1.0)),
    ]


@pytest.mark.parametrize(("corpus", "context"), [("lm1b", 128), ("owt", 1024)])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_papers_two_stages(corpus, context, size):
    """Suppl. C.2 and C.3, as printed."""
    base, tuned = (recipe_from_dict(s.recipe, where="p") for s in preset(f"{corpus}-bd3lm-{size}").stages)
    for recipe in (base, tuned):
        assert (recipe.data.context, recipe.network.size, recipe.network.dropout) == (context, "small", 0.1)
        assert (recipe.optimizer.lr, recipe.optimizer.warmup_steps) == (3e-4, 2500)
        assert (recipe.optimizer.decay, recipe.optimizer.weight_decay) == ("constant", 0.0)
        assert (recipe.train.global_batch, recipe.train.ema_decay) == (512, 0.9999)
    assert (base.train.steps, tuned.train.steps) == (850_000, 150_000)
    assert base.method == BlockDiffusionMethod()
    assert base.objective == BlockDiffusionTraining(masking=Times())
    assert tuned.method == BlockDiffusionMethod(block_size=size)
    search = ClipSearch(every=5000, batches=100)
    assert tuned.objective == BlockDiffusionTraining(masking=ClippedTimes(redraw=True, search=search))


def test_only_demos_are_too_small_to_be_compiled():
    for name in PRESETS:
        for stage in preset(name).stages:
            compiles = recipe_from_dict(stage.recipe, where=name).train.compile
            assert compiles == (False if name.startswith("demo") else "auto"), name


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(ValueError, match="no preset 'lm1b-bd3lm4', did you mean 'lm1b-bd3lm-4'"):
        preset("lm1b-bd3lm4")


# --- reading ---


def test_defaults_are_the_papers():
    recipe = parse()
    assert (recipe.optimizer.lr, recipe.optimizer.warmup_steps, recipe.train.ema_decay) == (
        3e-4,
        2500,
        0.9999,
    )
    assert (recipe.train.global_batch, recipe.data.context) == (512, 1024)
    network = recipe.network.config(vocab_size=50258, context=recipe.data.context)
    assert network == TransformerConfig(vocab_size=50258)
    assert network.dropout == 0.1


@pytest.mark.parametrize(
    ("word", "meant"), [("auto", "auto"), ("true", True), ("on", True), ("false", False), ("off", False)]
)
def test_whether_to_compile_is_left_open_or_said(word, meant):
    assert parse().train.compile == "auto"
    assert parse(parse_overrides(["--train.compile", word])).train.compile is meant
    [problem] = problems({"train": {"compile": "maybe"}})
    assert problem == "train.compile: input should be True, False or 'auto', got 'maybe'"


def test_a_misspelt_key_suggests_the_right_one():
    assert problems({"train": {"warmup": 3, "stepz": 4}, "optimiser": {}}) == [
        "train.warmup: unknown key, allowed are " + ", ".join(recipe_to_dict(parse())["train"]),
        "train.stepz: unknown key, did you mean 'steps'?",
        "optimiser: unknown key, did you mean 'optimizer'? allowed are " + ", ".join(recipe_to_dict(parse())),
    ]


def test_all_errors_come_at_once():
    found = problems(
        {
            "train": {"steps": 0},
            "optimizer": {"lr": -1.0, "lrr": 2},
            "network": {"dropout": "much"},
            "method": {"kind": "block_diffusion"},
            "objective": {"masking": {"kind": "count"}},
        }
    )
    text = "\n".join(found)
    assert len(found) == 5
    for expected in (
        "train: steps must be at least 1, got 0",
        "optimizer: lr must be positive and finite, got -1.0",
        "optimizer.lrr: unknown key, did you mean 'lr'?",
        "network.dropout: ",
        "objective.masking.kind: must be one of ",
        "got 'count', did you mean 'counts'?",
    ):
        assert expected in text


def test_an_option_that_would_do_nothing_does_not_exist():
    assert "method.block_size: unknown key" in problems({"method": {"block_size": 4}})[0]
    block = {"method": {"kind": "block_diffusion"}, "objective": {"masking": {"kind": "times", "low": 0.3}}}
    assert "objective.masking.low: unknown key" in problems(block)[0]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"method": {"block_size": 3}}, "method.block_size must divide the context 1024, got 3"),
        ({"objective": {"next_token": 1.0}}, "objective.next_token needs method.causal_clean"),
        (
            {"method": {"causal_clean": True}, "objective": {"next_token": -1.0}},
            "objective: next_token must be finite and not negative, got -1.0",
        ),
        (
            {"method": {"causal_clean": True}, "objective": {"next_token": float("inf")}},
            "objective: next_token must be finite and not negative, got inf",
        ),
        ({"network": {"adaln": True, "time_conditioning": True}}, "needs masks drawn by time"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(layer, message):
    assert message in problems({"method": {"kind": "block_diffusion"}}, layer)[0]


def test_an_autoregressive_network_knows_no_time():
    assert (
        "time_conditioning must be false"
        in problems({"network": {"adaln": True, "time_conditioning": True}})[0]
    )


# --- layers ---


def test_later_layers_win_key_by_key():
    assert merge({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 4}}, {"b": {"z": 5}}) == {
        "a": {"x": 1, "y": 4},
        "b": {"z": 5},
    }


def test_layers_are_not_changed_by_merging():
    first, second = {"a": {"x": 1}}, {"a": {"y": {"z": 2}}}
    merged = merge(first, second)
    merged["a"]["y"]["z"] = 3
    assert first == {"a": {"x": 1}}
    assert second == {"a": {"y": {"z": 2}}}


def test_another_kind_drops_the_options_of_the_one_before():
    clipped = {
        "method": {"kind": "block_diffusion"},
        "objective": {"masking": {"kind": "clipped", "low": 0.3, "redraw": True}},
    }
    counts = {"objective": {"masking": {"kind": "counts"}}}
    assert parse(clipped, counts).objective.masking == Counts()
    assert parse(clipped, {"objective": {"masking": "counts"}}).objective.masking == Counts()
    same = parse(clipped, {"objective": {"masking": {"kind": "clipped", "high": 0.8}}})
    assert same.objective.masking == ClippedTimes(low=0.3, high=0.8, redraw=True)
    discrete = parse(clipped, {"objective": {"masking": {"kind": "discrete", "steps": 5}}})
    assert discrete.objective.masking == DiscreteTimes(steps=5)
    assert merge(clipped, {"method": {"kind": "autoregressive"}}) == {"method": {"kind": "autoregressive"}}
    assert merge({"a": "counts"}, {"a": {"lean": 2}}) == {"a": {"kind": "counts", "lean": 2}}


# --- flags ---


def test_flags_are_paths_and_yaml():
    words = (
        "--train.steps 100 --objective.masking.kind=times --optimizer.betas [0.9,0.95] --network.tied true"
    )
    assert parse_overrides([*words.split(), "--start-from", "runs/a b", "--optimizer.clip_norm", "null"]) == {
        "train": {"steps": 100},
        "objective": {"masking": {"kind": "times"}},
        "optimizer": {"betas": [0.9, 0.95], "clip_norm": None},
        "network": {"tied": True},
        "start_from": "runs/a b",
    }


@pytest.mark.parametrize("word", ["3e-4", "1e-3", "3E-4"])
def test_a_number_may_be_written_with_an_exponent(word):
    """YAML 1.1 reads 3e-4 as a text; a learning rate is written so."""
    assert parse(parse_overrides(["--optimizer.lr", word])).optimizer.lr == float(word)


@pytest.mark.parametrize("word", ["1000", "1e3", "1E+3", "1.0e3", "1_000", "1000.0"])
def test_a_whole_number_may_be_written_in_several_ways(word):
    steps = parse(parse_overrides(["--train.steps", word])).train.steps
    assert (steps, type(steps)) == (1000, int)


@pytest.mark.parametrize("word", ["true", "on", "010", "1:30", "0x10", "2024-01-01", "1.5e0"])
def test_what_is_no_decimal_whole_number_is_refused_for_one(word):
    """YAML 1.1 has octals and base 60, and Python takes true for 1."""
    [problem] = problems(parse_overrides(["--train.steps", word]))
    value = {"true": "True", "on": "True", "1.5e0": "1.5"}.get(word, repr(word))
    assert problem.startswith("train.steps: ")
    assert problem.endswith(f"got {value}")


@pytest.mark.parametrize("word", ["true", "010", "1:30.5"])
def test_what_is_no_decimal_number_is_refused_for_one(word):
    [problem] = problems(parse_overrides(["--optimizer.lr", word]))
    assert problem.startswith("optimizer.lr: ")
    problem, *_ = problems(parse_overrides(["--optimizer.betas", f"[{word}, 0.9]"]))
    assert problem.startswith("optimizer.betas")


@pytest.mark.parametrize("word", ["2024", "010", "1e3", "true", "null", "[a", "2024-01-01", "a: b"])
def test_a_text_is_taken_as_it_is(word):
    assert parse_overrides(["--data.path", word]) == {"data": {"path": word}}
    assert parse_overrides([f"--block.data.path={word}"]) == {"block": {"data": {"path": word}}}


@pytest.mark.parametrize("word", ["null", "none", "None", "~"])
def test_nothing_is_a_value_where_a_field_may_have_none(word):
    words = ["--data.skip", word, "--trackers.wandb_project", word, "--ar.optimizer.clip_norm", word]
    assert parse_overrides(words) == {
        "data": {"skip": None},
        "trackers": {"wandb_project": None},
        "ar": {"optimizer": {"clip_norm": None}},
    }
    assert parse_overrides(["--objective.strata", "none"]) == {"objective": {"strata": "none"}}


def test_a_flag_of_many_values_gives_each_once():
    words = ["--objective.masking", "{kind: clipped, low: 0.25, search: {widths: [0.5]}}"]
    masking = {"kind": "clipped", "low": 0.25, "search": {"widths": [0.5]}}
    assert parse_overrides(words) == {"objective": {"masking": masking}}
    with pytest.raises(ValueError, match=r"^--objective\.masking: low is given twice"):
        parse_overrides(["--objective.masking", "{kind: clipped, low: 0.25, low: 0.5}"])


def test_negative_numbers_are_values():
    assert parse_overrides(["--a", "-1", "--b=-2.5"]) == {"a": -1, "b": -2.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps", "3"], "expected --any.field value, got 'steps'"),
        (["--train.steps"], "--train.steps needs a value, got none"),
        (["--train.steps", "--show"], "--train.steps needs a value, got none"),
        (["--train", "3", "--train.steps", "3"], "--train.steps sets a part of a field"),
        (["--train.steps", "3", "--train", "3"], "--train sets a field as a whole, and another flag sets"),
        (["--plugins.a", "b"], "to load a plugin use --plugin"),
        (["--"], "expected --any.field value"),
    ],
)
def test_flags_that_make_no_sense_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        parse_overrides(words)


# --- files ---


def test_a_file_gives_every_key_once(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("train:\n  steps: 5\noptimizer: {lr: 0.1}\ntrain:\n  seed: 1\n")
    said = re.escape(f"{file}: train is given twice, again in line 4")
    with pytest.raises(ValueError, match=said):
        read_settings(file)


def test_a_file_may_merge_what_it_named_before(tmp_path):
    """A key that replaces a merged one is not given twice."""
    file = tmp_path / "a.yaml"
    file.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\n")
    assert read_settings(file) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 3, "y": 4}}


def test_numbers_in_a_file_are_decimal(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("train: {steps: 010, seed: 1:30, log_every: true}\n")
    assert problems(read_settings(file)) == [
        "train.steps: must be a decimal number, got '010'",
        "train.log_every: must be a decimal number, got True",
        "train.seed: input should be a valid integer, unable to parse string as an integer, got '1:30'",
    ]


@pytest.mark.parametrize("text", ["010", "1e3", "1.5e3", "-.5", "1:30", "0.5", "true", "null", "2024-01-01"])
def test_a_text_that_was_written_is_read_as_one(text, tmp_path):
    recipe = parse({"data": {"path": text}})
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe_to_dict(recipe)))
    assert recipe_from_dict(read_settings(file), where="file") == recipe


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "--config must be a YAML file, and {file} does not exist"),
        (b"train: caf\xe9", "{file} must be UTF-8 text: "),
        (b"train: [", "{file} is not YAML"),
        (b"- train", "{file} must hold a mapping of settings, got list"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content, said, tmp_path):
    file = tmp_path / "a.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(said.format(file=file))):
        read_settings(file)


# --- values ---


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"data": {"validation_sequences": 0}}, "validation_sequences must be at least 1, or null for all, "),
        (
            {"data": {"validation_sequences": -3}},
            "validation_sequences must be at least 1, or null for all, ",
        ),
        (
            {"data": {"builtin_vocabulary": 257}},
            "builtin_vocabulary must be at least 258 (256 bytes and two ",
        ),
        ({"trackers": {"nelbo_variance_batches": -1}}, "nelbo_variance_batches must not be negative (0 "),
        ({"trackers": {"gradient_variance_batches": -1}}, "gradient_variance_batches must not be negative "),
    ],
    ids=str,
)
def test_counts_that_make_no_sense_are_refused(layer, said):
    [(part, values)] = layer.items()
    [problem] = problems(layer)
    assert problem.startswith(f"{part}: {said}")
    assert problem.endswith(f"got {next(iter(values.values()))}")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"kind": "d3pm", "steps": 0}, "method: steps must be at least 1, got 0"),
        ({"kind": "simplex", "block_size": 0}, "method: block_size must be at least 1, got 0"),
        ({"kind": "simplex", "block_size": 17}, "method.block_size must be at most the context 16, got 17"),
        ({"kind": "simplex", "block_size": 5, "simplex_scale": 0}, "method: simplex_scale must be positive"),
    ],
    ids=str,
)
def test_baselines_are_checked_before_anything_is_built(method, said):
    recipe = {"train": {"steps": 1}, "data": {"context": 16}, "method": method}
    with pytest.raises(ValueError, match=re.escape(said)):
        recipe_from_dict(recipe, where="here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": {"lean": -1.0}}, "method: lean must be a number from 0 to 1e6, got -1.0"),
        ({"method": {"lean": float("inf")}}, "method: lean must be a number from 0 to 1e6, got inf"),
        (
            {
                "method": {"lean": 1.5},
                "objective": {"masking": {"kind": "times"}},
                "network": {"adaln": True, "time_conditioning": True},
            },
            "method.lean must be 0 for a network that is told the noise level",
        ),
    ],
    ids=["negative", "infinite", "told the time"],
)
def test_a_lean_is_checked_before_anything_is_built(changes, said):
    """As a later stage of a preset it would complain after hours of training."""
    recipe = {"train": {"steps": 1}, "data": {"context": 16}}
    method = {"kind": "block_diffusion", "block_size": 4}
    with pytest.raises(ValueError, match=re.escape(said)):
        recipe_from_dict(merge(recipe, {"method": method}, changes), where="here")


@pytest.mark.parametrize(
    ("masking", "said"),
    [
        ({"lean": -1.0}, "objective.masking: lean must be a number from 0 to 1e6, got -1.0"),
        ({"lean": float("nan")}, "objective.masking: lean must be a number from 0 to 1e6, got nan"),
        ({"lean": 0.7, "complementary": True}, "objective.masking: complementary=True needs lean 0, got 0.7"),
        ({"kind": "learned_counts", "lean": 0.7}, "objective.masking.lean: unknown key"),
        ({"kind": "learned_counts", "complementary": True}, "objective.masking.complementary: unknown key"),
    ],
    ids=str,
)
def test_masks_that_lean_are_checked_before_anything_is_built(masking, said):
    method = {"kind": "block_diffusion", "block_size": 4}
    recipe = {"train": {"steps": 1}, "data": {"context": 16}, "method": method}
    with pytest.raises(ValueError, match=re.escape(said)):
        recipe_from_dict({**recipe, "objective": {"masking": {"kind": "counts", **masking}}}, where="here")


@pytest.mark.parametrize(
    ("method", "objective", "said"),
    [
        ("d3pm", {"auxiliary": -1}, "objective: auxiliary must be finite and not negative, got -1.0"),
        ({"kind": "simplex", "block_size": 5}, {"steps": 0}, "objective: steps must be at least 1, got 0"),
        ("score_entropy", {"steps": 5}, "objective.steps: unknown key, allowed are strata"),
        ("autoregressive", {"masking": "counts"}, "objective.masking: unknown key, allowed are random_batch"),
    ],
    ids=str,
)
def test_options_of_training_are_the_methods_own(method, objective, said):
    recipe = {"train": {"steps": 1}, "data": {"context": 16}, "method": method, "objective": objective}
    with pytest.raises(ValueError, match=re.escape(said)):
        recipe_from_dict(recipe, where="here")


def test_a_lean_is_a_field_of_block_diffusion_alone():
    words = "--method.kind block_diffusion --method.block_size 4 --method.lean 2"
    assert parse(parse_overrides(words.split())).method.lean == 2.0
    assert parse({"method": {"kind": "block_diffusion"}}).method.lean == 0.0
    recipe = {"train": {"steps": 1}, "method": {"kind": "autoregressive", "lean": 2.0}}
    with pytest.raises(ValueError, match=r"method\.lean: unknown key"):
        recipe_from_dict(recipe, where="here")


def test_ssd_lm_has_no_nelbo_whose_variance_could_be_tracked():
    recipe = {
        "train": {"steps": 1},
        "method": {"kind": "simplex"},
        "trackers": {"nelbo_variance_batches": 2},
    }
    with pytest.raises(ValueError, match=r"nelbo_variance_batches must be 0 for method\.kind simplex"):
        recipe_from_dict(recipe, where="here")


@pytest.mark.parametrize("plugins", [["a.py"], {"tails": 3}, "a.py"])
def test_what_a_recipe_may_say_of_plugins(plugins):
    with pytest.raises(ValueError, match="plugins must map each kind to its file or module"):
        recipe_from_dict({**SMALLEST, "plugins": plugins}, where="recipe")


def test_options_of_another_method_are_refused_from_python_too():
    recipe = parse({"method": "score_entropy"})
    with pytest.raises(
        ValueError, match=r"objective must be a NoisedTraining for method\.kind score_entropy"
    ):
        replace(recipe, objective=BlockDiffusionTraining())
