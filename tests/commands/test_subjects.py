"""A run of several stages where one model is needed: its last stage, and a line that says so."""

import json
import subprocess
import sys

import pytest
import yaml

from bd3lm.cli import main
from bd3lm.commands.shared.models import one_model
from bd3lm.commands.shared.subjects import Subject
from tests.lm import of_bytes


@pytest.fixture
def run(tmp_path):
    """Two stages that have a model, in an order that is not the alphabet's, and one not begun."""
    out = tmp_path / "run"
    for name, block_size in (("ar", 4), ("zero", None)):
        of_bytes(block_size).save_pretrained(out / name / "model")
        (out / name / "recipe.yaml").write_text("{}")
    (out / "stages.yaml").write_text(yaml.safe_dump({"zero": {}, "ar": {}, "later": {}}, sort_keys=False))
    return out


def test_it_is_the_last_stage_that_was_begun(run, capsys):
    said = f"{run} is a run of several stages: using the last one begun, {run / 'ar'}\n"
    assert one_model(run) == run / "ar"
    assert capsys.readouterr() == ("", said)
    subject = Subject.open(str(run), device="cpu")
    assert (subject.name, subject.run) == (str(run / "ar"), run / "ar")
    assert subject.model.config.method.kind == "block_diffusion"


def test_everything_else_is_taken_as_it_is(run, tmp_path, capsys):
    stage, model = run / "ar", run / "ar" / "model"
    for source in (stage, str(model), "", "box", "hf://owner/name", tmp_path, tmp_path / "nowhere"):
        assert one_model(source) == source
    assert capsys.readouterr().err == ""


def test_a_run_is_sampled_and_converted_by_its_last_stage(run, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    assert main(["sample", str(run), "ab", "--out", str(out)]) == 0
    assert f"using the last one begun, {run / 'ar'}\n" in capsys.readouterr().err
    record = json.loads(out.read_text())
    assert record["text"] == of_bytes(4).generate("ab")[0].text
    assert (record["model"], record["weights"]) == (str(run / "ar"), Subject.open(run / "ar").weights)
    assert main(["convert", str(run), str(tmp_path / "converted")]) == 0
    assert f"using the last one begun, {run / 'ar'}\n" in capsys.readouterr().err
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert config == json.loads((run / "ar" / "model" / "config.json").read_text())


def test_a_last_stage_without_a_model_is_not_passed_over(run, capsys):
    (run / "later" / "checkpoints").mkdir(parents=True)
    (run / "later" / "recipe.yaml").write_text("{}")
    assert main(["sample", str(run), "ab"]) == 1
    assert f"folder {run / 'later'} holds a run without a model" in capsys.readouterr().err


@pytest.mark.slow
def test_sampling_from_a_model_does_not_wait_for_training():
    code = (
        "import sys; from bd3lm.commands.shared.models import one_model; "
        "import bd3lm.commands.sample.display; from bd3lm.interop import BOX_FOLDER; "
        "one_model(BOX_FOLDER); print('bd3lm.training' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
