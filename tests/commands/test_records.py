"""Records of models and of files, and where --out puts them."""

import errno
import json
import re
from pathlib import Path

import pytest

from bd3lm.cli import main
from bd3lm.commands.shared.records import keep, kept, model_and_title, new_record, record_name, write_records
from bd3lm.commands.shared.subjects import Subject, tell_what_is_not_kept
from tests.lm import of_bytes

COMMANDS = {
    "eval": ["eval", "MODEL", "--data", "text.txt"],
    "zeroshot": ["zeroshot", "MODEL", "--data", "text.txt"],
    "score": ["score", "MODEL", "text.txt"],
    "lengths": ["lengths", "MODEL"],
    "variance": ["variance", "MODEL"],
    "judge": ["judge", "MODEL", "--judge", "judge"],
    "harness": ["harness", "MODEL", "--tasks", "arc_easy"],
}


def test_a_record_of_a_file_has_what_one_of_a_model_has_but_does_not_know_its_weights(tmp_path):
    of_bytes(4).save_pretrained(tmp_path / "model")
    subject = Subject.open(tmp_path / "model", device="cpu")
    settings = {"dtype": "bfloat16", "seed": float("nan")}
    of_model, of_file = (new_record(of, "kind", settings=settings, result={}) for of in (subject, "a.jsonl"))
    assert list(of_file) == list(of_model)
    assert [of_file[name] for name in ("model", "title", "weights", "dtype")] == [
        "a.jsonl",
        None,
        None,
        "bfloat16",
    ]
    assert (of_model["dtype"], of_model["weights"]) == ("float64", subject.weights)
    assert of_file["settings"] == {"dtype": "bfloat16", "seed": None}
    assert model_and_title(of_file) == "a.jsonl"
    assert model_and_title(of_model) == f"{tmp_path / 'model'} (block diffusion, blocks of 4)"
    assert keep("a.jsonl", "kind", of_file) is None


def test_a_name_holds_a_digest_of_the_settings():
    settings = {"seed": 0, "data": Path("a/b"), "floor": float("inf")}
    name = record_name("perplexity", settings, "hub/some data", "valid")
    assert re.fullmatch("perplexity-hub-some-data-valid-[0-9a-f]{8}", name)
    assert record_name("perplexity", dict(reversed(settings.items())), "hub/some data", "valid") == name
    others = [{**settings, "seed": 1}, {**settings, "data": Path("a/c")}, {"seed": 0}]
    assert len({record_name("lengths", each) for each in [settings, *others]}) == 4


def a_run(folder: Path) -> Subject:
    of_bytes(4).save_pretrained(folder / "model")
    (folder / "recipe.yaml").write_text("")
    return Subject.open(folder, device="cpu")


def test_what_cannot_be_kept_beside_a_run_is_told_once_and_still_there(tmp_path, recwarn):
    subject = a_run(tmp_path)
    place = tmp_path / "measured"
    place.write_text("a file where a folder should be: root may write anywhere")
    record = new_record(subject, "kind", settings={}, result={"figure": 1})
    tell_what_is_not_kept([subject])
    assert keep(subject, "first", record) is None
    assert keep(subject, "second", record) is None
    (said,) = recwarn
    assert f"are shown but not stored, because {place} cannot be written to: Not a directory" in str(
        said.message
    )
    assert kept(subject, "kind") == [record, record]


def test_a_disk_that_becomes_full_costs_no_record(tmp_path, monkeypatch):
    subject = a_run(tmp_path)
    record = new_record(subject, "kind", settings={}, result={})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bd3lm.commands.shared.records.write_atomically", full)
    with pytest.warns(UserWarning, match=r"name\.json could not be written: No space left"):
        assert keep(subject, "name", record) is None
    assert kept(subject, "kind") == [record]


def test_records_of_a_run_are_those_of_its_weights_the_newest_last(tmp_path):
    run = a_run(tmp_path)
    record = new_record(run, "kind", settings={}, result={})
    newer, older, other = (
        {**record, **changes}
        for changes in ({"measured": "2026-02"}, {"measured": "2026-01"}, {"weights": "before"})
    )
    for name, each in (("a", newer), ("b", older), ("c", other)):
        keep(run, name, each)
    keep(run, "d", {**record, "kind": "another"})
    assert kept(run, "kind") == [older, newer]


def test_json_that_is_no_record_is_passed_over_and_what_is_no_json_is_named(tmp_path):
    run = a_run(tmp_path)
    record = new_record(run, "kind", settings={}, result={})
    keep(run, "one", record)
    measured = tmp_path / "measured"
    write_records(measured / "list.json", [record])
    (measured / "kind.json").write_text('{"kind": "kind"}')
    (measured / "number.json").write_text("4")
    (measured / "settings.json").write_text(json.dumps(record | {"settings": "none"}))
    assert kept(run, "kind") == [record]
    (measured / "half.json").write_text('{"kind": ')
    with pytest.raises(
        ValueError, match=rf"{measured / 'half.json'} must be JSON, as measurements are stored"
    ):
        kept(run, "kind")


def test_records_are_written_as_a_list(tmp_path, capsys):
    records = [new_record(name, "kind", settings={}, result={"ppl": 1.5}) for name in ("ä", "b")]
    write_records(tmp_path / "out.json", records)
    assert json.loads((tmp_path / "out.json").read_text("utf-8")) == records
    assert capsys.readouterr().out == f"wrote {tmp_path / 'out.json'}\n"
    write_records(None, records)
    assert capsys.readouterr().out == ""


def test_a_folder_that_takes_no_files_is_refused_before_anything_is_opened(tmp_path, capsys, monkeypatch):
    """Also to root, whom permissions do not stop: /proc takes no files of anybody."""
    words, taken = COMMANDS["eval"], tmp_path / "out.json"
    assert main([*words, "--out", str(taken)]) == 1
    assert "--out" not in capsys.readouterr().err  # the model is missing
    assert not list(tmp_path.iterdir())

    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    for out, said in (("/proc/out.json", "No such file or directory"), (taken, "Read-only file system")):
        if out == taken:
            monkeypatch.setattr("bd3lm.commands.shared.records.TemporaryFile", refuse)
        elif not Path("/proc/self").exists():
            continue
        assert main([*words, "--out", str(out)]) == 1
        folder = Path(out).parent
        expected = f"--out must be in a writable folder, and {folder} is not: {said}"
        assert capsys.readouterr().err == f"bd3lm: {expected}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_opened(command, tmp_path, capsys):
    if command == "harness":
        pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'bd3lm[harness]'")
    there, nowhere = tmp_path / "there.json", tmp_path / "nowhere" / "out.json"
    there.write_text("mine")
    for out, said in (
        (there, f"--out must be a new file, and {there} exists"),
        (nowhere, f"--out must be in an existing folder, and {nowhere.parent} is not one"),
    ):
        assert main([*COMMANDS[command], "--out", str(out)]) == 1
        assert capsys.readouterr().err == f"bd3lm: {said}\n"
    assert there.read_text() == "mine"
