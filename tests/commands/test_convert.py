"""`bd3lm convert`: between layouts and precisions, and a .ckpt is read as what it is."""

import json
import re
from pathlib import Path

import pytest
import torch

from bd3lm.cli import main
from bd3lm.data import load_tokenizer
from bd3lm.interop import load
from tests.commands import fails
from tests.data_room.documents import contents
from tests.interop.small import CONTEXT, VOCABULARY, small_model
from tests.interop.test_lightning import checkpoint, omegaconf
from tests.lm import BYTES, of_bytes

PARITY = Path(__file__).parents[1] / "data" / "parity"


@pytest.fixture
def convert(tmp_path, capsys):
    """Converts a checkpoint into a new folder; returns its config, or what was said on failure."""

    def run(*words, said=None, **network):
        with omegaconf() as wrapped:
            more = {} if said is None else {"hyper_parameters": {"config": wrapped(said)}}
            torch.save(checkpoint(small_model(**network)[0], **more), tmp_path / "model.ckpt")
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        command = ["convert", str(tmp_path / "model.ckpt"), str(out), "--context", str(CONTEXT), *words]
        failed = main(command)
        said = capsys.readouterr().err
        assert not failed or said.count("\n") == 1, said
        return said if failed else json.loads((out / "config.json").read_text())

    return run


def test_a_ckpt_with_a_noise_embedding_needs_to_be_told_what_it_is_fed(convert):
    size = ("--block-size", "4")
    assert "--time-conditioning or --no-time-conditioning" in convert(*size, adaln=True)
    assert convert(*size, "--time-conditioning", adaln=True)["network"]["time_conditioning"] is True
    assert convert(*size, "--no-time-conditioning", adaln=True)["network"]["time_conditioning"] is False
    assert convert(*size)["network"]["time_conditioning"] is False
    assert "give only one of --time-conditioning" in convert(
        "--time-conditioning", "--no-time-conditioning", adaln=True
    )


def test_a_causal_ckpt_has_no_block_size(convert):
    assert convert("--causal")["method"]["kind"] == "autoregressive"
    assert convert("--block-size", "4")["method"]["block_size"] == 4
    said = "only one of block_size (the context for MDLM), causal=True (autoregressive) and sedd=True"
    assert said in convert("--causal", "--block-size", "4")
    assert "block_size must" in convert("--block-size", "0")


def test_a_ckpt_is_never_guessed_to_be_mdlm_or_sedd(convert):
    assert "use --block-size (the context for MDLM), --causal or --sedd" in convert()
    assert convert("--sedd")["method"]["kind"] == "score_entropy"
    mdlm = convert(said={"parameterization": "subs"})["method"]
    assert (mdlm["kind"], mdlm["block_size"]) == ("block_diffusion", CONTEXT)
    assert convert(said={"algo": {"parameterization": "sedd"}})["method"]["kind"] == "score_entropy"
    assert "parameterization 'sedd', got 'ar'" in convert("--causal", said={"parameterization": "sedd"})
    assert "sedd or ar, got 'd3pm'" in convert(said={"parameterization": "d3pm"})


def test_the_mask_of_a_ckpt_may_be_named(convert):
    assert convert("--sedd")["mask_id"] == VOCABULARY - 1
    assert convert("--sedd", "--mask-id", "4")["mask_id"] == 4
    assert f"mask_id must lie in 0..{VOCABULARY - 1}" in convert("--sedd", "--mask-id", "99")


def test_facts_of_a_ckpt_are_not_for_folders_and_one_is_needed(tmp_path, capsys):
    assert "--context must be given for a .ckpt" in fails(capsys, "convert", "a.ckpt", str(tmp_path / "out"))
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--no-time-conditioning"]) == 1
    assert "are only for a .ckpt file" in capsys.readouterr().err


def test_other_commands_say_to_convert_first(tmp_path, capsys):
    torch.save(checkpoint(small_model()[0]), tmp_path / "model.ckpt")
    assert main(["sample", str(tmp_path / "model.ckpt")]) == 1
    assert "run `bd3lm convert` first" in capsys.readouterr().err


def test_convert_writes_into_a_new_or_empty_folder_only(tmp_path, capsys):
    source, other, empty = (tmp_path / name for name in ("source", "other", "empty"))
    of_bytes(4).save_pretrained(source)
    of_bytes(4, seed=1).save_pretrained(other)
    before = contents(other)
    assert main(["convert", str(source), str(other)]) == 1
    said = f"bd3lm: OUT must be a new or empty folder, and {other} holds config.json\n"
    assert capsys.readouterr().err == said
    assert contents(other) == before
    empty.mkdir()
    assert main(["convert", str(source), str(empty)]) == 0
    assert contents(empty) == contents(source)


def test_convert_reads_the_references_layout_back(tmp_path, capsys):
    source, theirs, back = (tmp_path / name for name in ("source", "theirs", "back"))
    of_bytes(4).save_pretrained(source)
    assert main(["export", str(source), str(theirs), "--to", "reference"]) == 0
    written = json.loads((theirs / "config.json").read_text())
    assert (written["block_size"], "format" in written) == (4, False)
    assert main(["convert", str(theirs), str(back)]) == 0
    assert contents(back) == contents(source)


@pytest.mark.parametrize("name", ["bd3lm-block4", "mdlm-noblocks"])
def test_convert_the_reference_layout(name, tmp_path, capsys):
    folder = next(p.parent for p in sorted((PARITY / name).rglob("config.json")))
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    title = {"bd3lm-block4": "block diffusion, blocks of 4", "mdlm-noblocks": "diffusion, one block (MDLM)"}
    assert re.search(rf": {re.escape(title[name])}, [\d,]+ parameters$", capsys.readouterr().out)
    theirs, ours = load(folder)[0].state_dict(), load(tmp_path / "ours")[0].state_dict()
    assert theirs.keys() == ours.keys()
    assert all(theirs[key].equal(ours[key]) for key in ours)


def test_convert_to_another_precision(tmp_path, capsys):
    of_bytes(4).save_pretrained(tmp_path / "saved")
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    before, half = (load(tmp_path / name)[0].state_dict() for name in ("saved", "half"))
    assert all(half[key].equal(before[key].to(torch.bfloat16)) for key in before | half)
    assert load_tokenizer(tmp_path / "half") == BYTES
