"""research/speculation.py: what it counts, and that every part runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bd3lm
from bd3lm.runs.own_texts import builtin_prompts
from bd3lm.sampling import Sample, Speculation
from research import speculation
from research.speculation import HEADING, PROMPTS, TINY, Lines, counted, main, prompts_for, repeats
from tests.interop.checkpoints import saved, tiny


def sample(**changes: Any) -> Sample:
    return Sample(
        **{
            "index": 0,
            "tokens": torch.arange(12),
            "given": 2,
            "prompt": 2,
            "written_from": 2,
            "seed": 0,
            "evaluations": 5,
            "fill_passes": 1,
            "stopped_by": "length",
            "drafted": (4, 2),
            "accepted": (3, 0),
            **changes,
        }
    )


def test_tokens_passes_and_drafts_are_summed():
    found = counted([sample(), sample(evaluations=3, drafted=(2, 0), accepted=(1, 0))])
    assert (found["texts"], found["tokens"], found["passes"], found["fill_passes"]) == (2, 20, 8, 2)
    assert found["tokens_per_pass"] == 2.5
    assert (found["drafted"], found["accepted"]) == ([6, 2], [4, 0])
    assert found["acceptance"] == [4 / 6, 0.0]
    assert counted([])["tokens_per_pass"] is None


def test_a_text_that_says_eight_tokens_twice_repeats_itself():
    assert not repeats(range(20))
    assert not repeats([1] * 8)
    assert repeats([1] * 9)
    assert repeats([*range(8), 99, *range(8)])
    assert not repeats([*range(8), 99, *range(7)])


def test_the_prompts_are_many_and_none_that_own_texts_are_written_from():
    assert len(PROMPTS) == len(set(PROMPTS)) == 64
    assert not set(PROMPTS) & {*builtin_prompts(chat=True), *builtin_prompts(chat=False)}


def test_a_model_without_a_template_continues_beginnings():
    box = bd3lm.load("box", device="cpu")
    found = prompts_for(box, 70)
    assert found[:64] == builtin_prompts(chat=False)[:64]
    assert found[64:] == found[:6]


def test_times_are_by_the_first_side_of_a_group():
    lines = Lines()
    plain = {"part": "one", "law": "causal", "temperature": 0.6, "top_p": 0.9, "batch": 1}
    first = {**plain, "side": "off", "tokens_per_second": 1000.0, "tokens_per_pass": 1.0}
    told = lines.of(first)
    assert told.startswith("one     causal  T 0.6, p 0.9       1  off ")
    assert told.endswith("   1.000      1,000   1.00")
    assert lines.of({**first, "side": "auto", "tokens_per_second": 2500.0}).endswith(" 2,500   2.50")
    assert lines.of({**first, "batch": 4, "tokens_per_second": 9.0}).endswith(" 9   1.00")
    refused = {**plain, "side": "off", "refused": "no such way"}
    assert lines.of(refused).endswith("refused: no such way")
    greedy = {**plain, "part": "tokens", "temperature": 0.0, "side": "coupled", "tokens_per_pass": 2.0}
    without = {"texts": 3, "passes": 7, "tokens_per_pass": 1.5}
    told = lines.of({**greedy, "without_repeats": without})
    assert "greedy" in told
    assert told.endswith("2.000  3 texts without repeats: 1.500")


@pytest.mark.slow
def test_every_part_of_a_joint_model_runs(tmp_path, capsys):
    out = tmp_path / "found.jsonl"
    assert main(["box", "--tiny", "--commit", "abc", "--out", str(out), "--device", "cpu"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("box, ")
    assert printed[1] == HEADING
    assert len(printed) == 2 + len(records)
    assert {record["commit"] for record in records} == {"abc"}
    assert records[0]["command"] == "research/speculation.py box --tiny --commit abc --device cpu"
    parts = {each: [record for record in records if record["part"] == each] for each in speculation.PARTS}
    causal = [each for each in parts["tokens"] if each["law"] == "causal"]
    assert len(causal) == 3 * 5
    assert all(each["tokens_per_pass"] >= 0.5 and len(each["drafted"]) == TINY.drafts for each in causal)
    for law in ("causal", "block"):
        assert sum(each["law"] == law for each in parts["tokens"]) == 3 * 5
    assert [each["side"] for each in parts["one"]][:2] == ["off", "2 drafts"]
    assert {each["batch"] for each in parts["batches"]} == set(TINY.batches)
    for each in parts["one"] + parts["batches"]:
        assert each["tokens_per_second"] == pytest.approx(each["tokens"] / each["seconds"])
        assert each["texts"] == (TINY.alone if each["part"] == "one" else max(2 * each["batch"], 4))
    for drawn in ((0.6, 0.9), (0.0, 1.0)):  # coupled texts are the same texts
        same = [each for each in parts["one"] if (each["temperature"], each["top_p"]) == drawn]
        written = {tuple(each["written_by_text"]) for each in same if "rejection" not in each["side"]}
        assert len(written) == 1


@pytest.mark.slow
def test_the_peer_writes_the_greedy_texts_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    base = bd3lm.load(saved(tiny("llama"), tmp_path), device="cpu")
    prompt = [3, 1, 4, 1, 5]
    peer = speculation.Peer(base, len(prompt) + 6)
    (ours,) = base.generate([prompt], max_new_tokens=6, temperature=0.0)
    assert peer.write(prompt) == ours.sample.written == 6


def test_mistakes_are_said_before_anything_is_measured(capsys):
    for words, said in (
        (["--out", "nowhere/found.jsonl"], "--out must be in an existing folder, and nowhere is none"),
        (["--out", "found.jsonl", "--turns", "0"], "--turns must be at least 1"),
        (["--out", "found.jsonl", "--parts", "magic"], "invalid choice: 'magic'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["box", "--commit", "abc", *words])
        assert said in capsys.readouterr().err


def test_off_is_no_speculation():
    sides = speculation.sides_of(bd3lm.load("box", device="cpu"), None, speculation.COOLER, TINY)
    assert sides[0].speculation == Speculation(drafts=0)
    assert not sides[0].speculation.is_on
    assert sides[0].model.law == "causal"
