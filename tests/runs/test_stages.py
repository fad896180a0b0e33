"""Which stages a run has: whose word counts among preset, file and flags, and what is wrong with them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from bd3lm.diffusion import Times
from bd3lm.runs import presets
from bd3lm.runs.stages import resolve_stages, stages_to_dict
from tests.tiny_recipes import plain, two_stages


@pytest.fixture
def staged(monkeypatch, tmp_path):
    monkeypatch.setattr(presets, "PRESETS", {**presets.PRESETS, "two": two_stages(tmp_path / "data")})


def write(path: Path, data: Any) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


def test_flag_over_file_over_preset_over_default(staged, tmp_path):
    file = write(tmp_path / "c.yaml", {"optimizer": {"lr": 0.5, "warmup_steps": 7}, "train": {"seed": 5}})
    (_, first), (_, second) = resolve_stages("two", config=file, overrides={"optimizer": {"lr": 0.25}})
    for recipe in (first, second):
        assert recipe.optimizer.lr == 0.25  # the flag's
        assert recipe.optimizer.warmup_steps == 7  # the file's
        assert recipe.train.seed == 5
        assert recipe.train.ema_decay == 0.8  # the preset's
        assert recipe.optimizer.eps == 1e-8  # nobody's


def test_a_stages_name_limits_a_setting_to_it(staged, tmp_path):
    file = write(tmp_path / "c.yaml", {"ar": {"train": {"steps": 11}}, "train": {"steps": 12}})
    stages = dict(resolve_stages("two", config=file, overrides={"block": {"optimizer": {"lr": 0.5}}}))
    assert (stages["ar"].train.steps, stages["block"].train.steps) == (11, 12)
    assert (stages["ar"].optimizer.lr, stages["block"].optimizer.lr) == (0.01, 0.5)


def test_a_stages_own_setting_in_a_file_yields_to_a_flag_for_all(staged, tmp_path):
    file = write(tmp_path / "c.yaml", {"ar": {"train": {"steps": 11}}})
    stages = resolve_stages("two", config=file, overrides={"train": {"steps": 13}})
    assert [recipe.train.steps for _, recipe in stages] == [13, 13]


@pytest.mark.parametrize("name", ["lm1b-ar", "wikipedia-mdlm"])
def test_fields_of_train_can_be_set_where_the_only_stage_is_called_so(name):
    [(_, recipe)] = resolve_stages(name, overrides={"train": {"steps": 5}})
    assert recipe.train.steps == 5


def test_another_kind_of_masking_brings_its_own_options(staged):
    stages = dict(resolve_stages("two", overrides={"block": {"objective": {"masking": {"kind": "times"}}}}))
    objective = stages["block"].objective
    assert objective.masking == Times()
    assert objective.next_token == 1.0  # the other options of training stay


def test_from_runs_the_last_stage_only(staged):
    [(name, recipe)] = resolve_stages("two", start_from="somewhere")
    assert (name, recipe.start_from) == ("block", "somewhere")


def test_errors_name_the_preset_the_file_and_the_stage(staged, tmp_path):
    file = write(tmp_path / "c.yaml", {"block": {"trian": {}}})
    with pytest.raises(
        ValueError, match=r"preset two with .*c.yaml \(stage block\) has a problem:\n  trian: .*'train'"
    ):
        resolve_stages("two", config=file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold a mapping of settings, got list"),
        ("a: [", "is not YAML: "),
        ("", "must hold a mapping of settings, got NoneType"),
    ],
)
def test_files_that_hold_no_settings_are_refused(text, message, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        resolve_stages("demo", config=tmp_path / "c.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--config must be a YAML file, and .*none.yaml does not exist"):
        resolve_stages("demo", config=tmp_path / "none.yaml")


def test_a_stage_that_is_given_a_plain_value_is_refused():
    with pytest.raises(ValueError, match="block"):
        resolve_stages("demo", overrides={"block": 3})


# --- stages of one's own ---


def test_a_file_alone_may_have_stages(tmp_path):
    """What --show prints of several stages is such a file."""
    stages = resolve_stages("demo", overrides={"train": {"steps": 7}})
    file = write(tmp_path / "c.yaml", stages_to_dict(stages))
    assert resolve_stages(None, config=file) == stages
    changed = resolve_stages(None, config=file, overrides={"block": {"train": {"steps": 3}}})
    assert [(name, recipe.train.steps) for name, recipe in changed] == [
        ("ar", 7),
        ("ar_longer", 7),
        ("block", 3),
    ]


def test_a_start_that_a_stage_names_is_not_replaced_by_a_flag_for_all():
    """What is said of all stages is about the first: the demo's blocks go on from `ar` all the same."""
    stages = dict(resolve_stages("demo", overrides={"start_from": "elsewhere"}))
    assert (stages["ar"].start_from, stages["block"].start_from) == ("elsewhere", "ar")
    stages = dict(resolve_stages("demo", overrides={"block": {"start_from": "ar_longer"}}))
    assert stages["block"].start_from == "ar_longer"


def test_a_curriculum_is_written_as_stages(tmp_path):
    sizes = {"ar": None, "four": 4, "sixteen": 16}
    recipes = {
        name: plain(
            tmp_path / "data", {"method": {"kind": "block_diffusion", "block_size": size}} if size else {}
        )
        for name, size in sizes.items()
    }
    file = write(tmp_path / "c.yaml", recipes)
    stages = resolve_stages(None, config=file)
    assert {name: getattr(recipe.method, "block_size", None) for name, recipe in stages} == sizes
    [(last, recipe)] = resolve_stages(None, config=file, start_from="somewhere")
    assert (last, recipe.start_from) == ("sixteen", "somewhere")
    with pytest.raises(ValueError, match=r"only the stage sixteen runs, got flags --four.any.field"):
        resolve_stages(None, config=file, overrides={"four": {}}, start_from="somewhere")
    with pytest.raises(ValueError, match=r"c.yaml \(stage four\) has a problem:\n  method.block_size: "):
        resolve_stages(None, config=file, overrides={"four": {"method": {"block_size": "x"}}})


@pytest.mark.parametrize("name", ["a/b", "model", "..", "", 1])
def test_stages_that_cannot_be_folders_are_refused(name, tmp_path):
    file = write(tmp_path / "c.yaml", {"ar": plain(tmp_path), name: plain(tmp_path)})
    with pytest.raises(ValueError, match=f"name of a stage is also its folder .* got {name!r}"):
        resolve_stages(None, config=file)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trian": {}}, r"\(stage b\) has 3 problems:\n  trian: unknown key, did you mean 'train'"),
        (None, "the stage b must be a mapping of settings, got None"),
    ],
)
def test_one_wrong_stage_does_not_hide_the_others(wrong, message, tmp_path):
    file = write(tmp_path / "c.yaml", {"a": plain(tmp_path), "b": wrong})
    with pytest.raises(ValueError, match=message):
        resolve_stages(None, config=file)


def test_a_file_with_one_stage_has_its_flags(tmp_path):
    file = write(tmp_path / "c.yaml", {"only": plain(tmp_path)})
    [(name, recipe)] = resolve_stages(None, config=file, overrides={"only": {"train": {"steps": 3}}})
    assert (name, recipe.train.steps) == ("only", 3)


def test_misspelt_parts_are_not_taken_for_stages(tmp_path):
    file = write(tmp_path / "c.yaml", {"trian": {"steps": 3}, "metod": {"kind": "autoregressive"}})
    with pytest.raises(ValueError, match=r"trian: unknown key, did you mean 'train'\?"):
        resolve_stages(None, config=file)
