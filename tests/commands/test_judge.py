"""`bd3lm judge`: samples drawn and kept, judged under a tiny GPT-2, and what stands beside the figures."""

import io
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands.judge import Judge
from bd3lm.commands.judge.judging import check_flags, open_judge, run_judge, settings_of
from bd3lm.commands.shared import sample_files
from bd3lm.commands.shared.records import kept
from bd3lm.commands.shared.sample_files import open_source
from bd3lm.commands.shared.subjects import Subject
from bd3lm.data import PydocCorpus
from bd3lm.evaluation import HuggingFaceJudge, judge_texts
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.reports import with_error
from bd3lm.runs.merging import merge
from bd3lm.runs.stages import resolve_stages
from bd3lm.runs.train import train_stages
from bd3lm.sampling import Ancestral, FirstHitting
from tests.commands import LINE, written
from tests.evaluation.judges import save_judge
from tests.lm import BASELINES, baseline, of_bytes, of_method

pytestmark = pytest.mark.sweep(3)

pytest.importorskip("transformers")

TINY = {
    "network": {"layers": 1, "hidden": 16, "heads": 2},
    "data": {"context": 32, "builtin_vocabulary": 300, "validation_sequences": 8, "validation_batch": 4},
    "train": {"global_batch": 4, "steps": 2},
}
FEW = Judge(count=3, length=(40,), entropy_floor=0.0, window=32, stride=16)
FLAGS = ["--window", "32", "--stride", "16", "--count", "3", "--length", "40", "--entropy-floor", "0"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("judged")
    no_lean = merge(TINY, {"block": {"method": {"lean": 0.0}}})
    train_stages(resolve_stages("demo", overrides=no_lean), out, console=Console(quiet=True))
    return out


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory):
    return save_judge(tmp_path_factory.mktemp("judge") / "tiny-gpt")


@pytest.fixture(scope="module")
def judge(judge_folder):
    return HuggingFaceJudge.load(judge_folder)


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained / "block", tmp_path / "block")
    return tmp_path / "block"


def screen() -> Console:
    return Console(force_terminal=False, file=io.StringIO(), width=80)


def judged(source, judge, console=None, **flags):
    console, few = console or screen(), replace(FEW, **flags)
    check_flags(few)
    return run_judge([open_source(str(source))], few, load_judge=lambda: judge, console=console)


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]


def test_a_run_is_sampled_judged_and_its_judgement_kept(run, judge):
    console = screen()
    (record,) = judged(run, judge, console=console)
    (file,) = (run / "measured").glob("samples-40-*.jsonl")
    lines = lines_of(file)
    texts = [line["documents"] for line in lines]
    expected = judge_texts(judge, texts, window=32, stride=16)
    result = record["result"]
    assert result["perplexity"] == pytest.approx(expected.perplexity)
    assert result["perplexity_error"] == pytest.approx(expected.perplexity_error)
    assert result["nats"] == pytest.approx(math.log(result["perplexity"]))
    assert result["bits_per_character"] == pytest.approx(expected.bits_per_character)
    assert result["characters"] == sum(len(document) for text in texts for document in text)
    assert result["entropy"] == pytest.approx(sum(line["entropy"] for line in lines) / 3)
    assert (result["evaluations"], result["evaluations_per_token"]) == (39, 1)
    assert (result["samples"], result["redraws"], result["degenerate"], result["mauve"]) == (3, 0, 0, None)
    assert record["settings"] == {
        "judge": "tiny-gpt",
        "judge_dtype": "float32",
        "window": 32,
        "stride": 16,
        "mauve_reference": None,
        "count": 3,
        "length": 40,
        "top_p": 0.9,
        "unmasking": {"kind": "first_hitting", "tokens_per_pass": 1, "lean": 0.0},
        "steps": None,
        "entropy_floor": None,
        "redraws": 0,
        "seed": 0,
        "law": "block",
        "lean": 0.0,
        "dtype": "float32",
    }
    assert len(list((run / "measured").glob("judgement-tiny-gpt-40-????????.json"))) == 1
    assert kept(Subject.open(run), "judgement") == [record]
    assert all(len(line["tokens"]) == 40 for line in lines)  # no end token ended one


def test_what_a_perplexity_must_stand_beside_fits_80_columns(run, judge):
    console = screen()
    (record,) = judged(run, judge, console=console)
    printed = console.file.getvalue()
    result = record["result"]
    assert "Generative perplexity under tiny-gpt, float32, window 32, stride 16" in printed
    for shown in (
        with_error(result["perplexity"], result["perplexity_error"]),
        f"{result['bits_per_character']:.3f} bits/char",
        with_error(result["entropy"], result["entropy_error"]),
        " 39 ",
        "3 samples",
        "nucleus 0.9",
        "float32",
        "redrawn",
    ):
        assert shown in printed


def test_samples_are_drawn_once_and_never_written_over(run, judge, monkeypatch):
    told = screen()
    first = judged(run, judge, console=told)
    assert "writing 3 texts of up to 40 tokens by" in told.file.getvalue()
    (file,) = (run / "measured").glob("*.jsonl")
    (run / "measured" / f"{file.name}.partial").write_text("interrupted")
    other = judged(run, judge, top_p=1.0)
    assert other[0]["result"]["perplexity"] != first[0]["result"]["perplexity"]
    assert len(list((run / "measured").glob("*.jsonl"))) == 2
    monkeypatch.setattr(sample_files, "write_texts", lambda *_, **__: pytest.fail("drawn again"))
    console = screen()
    again = judged(run, judge, batch_size=1, console=console)
    assert again[0]["result"] == first[0]["result"]
    assert f"measuring {file}, drawn earlier" in console.file.getvalue().replace("\n", "")


def test_only_a_judgement_made_in_the_same_way_is_replaced(run, judge):
    first = judged(run, judge)
    other = judged(run, judge, top_p=1.0)
    windows = judged(run, judge, stride=8)
    judged(run, judge)
    found = kept(Subject.open(run), "judgement")
    assert len(found) == 3
    for record in (*first, *other, *windows):
        (same,) = [each for each in found if each["settings"] == record["settings"]]
        assert same["result"] == record["result"]


def test_an_interrupted_drawing_is_begun_again(run, judge, monkeypatch):
    real = sample_files.write_texts

    def interrupted(*arguments, out, **options):
        out.with_name(out.name + ".partial").write_text("half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(sample_files, "write_texts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        judged(run, judge)
    monkeypatch.setattr(sample_files, "write_texts", real)
    assert judged(run, judge)[0]["result"]["samples"] == 3
    assert not list((run / "measured").glob("*.partial"))


def test_a_file_is_judged_as_the_model_that_wrote_it(run, judge, tmp_path):
    (drawn,) = judged(run, judge)
    (file,) = (run / "measured").glob("*.jsonl")
    shutil.copy(file, tmp_path / "elsewhere.jsonl")
    (read,) = judged(tmp_path / "elsewhere.jsonl", judge)
    assert read["result"] == drawn["result"]
    assert read["settings"] == drawn["settings"]
    assert (read["model"], read["weights"]) == (str(tmp_path / "elsewhere.jsonl"), drawn["weights"])
    assert read.keys() == drawn.keys()


def test_a_model_without_a_run_leaves_nothing_behind(run, judge):
    (record,) = judged(run, judge)
    model = run.parent / "alone"
    shutil.copytree(run / "model", model)
    before = sorted(model.rglob("*"))
    (alone,) = judged(model, judge)
    assert alone["result"] == record["result"]
    assert sorted(model.rglob("*")) == before


def test_another_nucleus_rule_draws_other_samples_and_is_said(run, judge_folder, tmp_path, capsys):
    found = {}
    for rule in ("inclusive", "exclusive"):
        out = tmp_path / f"{len(found)}.json"
        words = ["--judge", str(judge_folder), "--top-p-rule", rule, "--top-p", "0.2", "--out", str(out)]
        assert main(["judge", str(run), *FLAGS, *words]) == 0
        (found[rule],) = json.loads(out.read_text())
        assert ("exclusive" in capsys.readouterr().out) is (rule == "exclusive")
    assert found["inclusive"]["result"]["nats"] != found["exclusive"]["result"]["nats"]
    assert "top_p_rule" not in found["inclusive"]["settings"]  # as in records from before there was a choice
    assert found["exclusive"]["settings"]["top_p_rule"] == "exclusive"
    assert len(list((run / "measured").glob("samples-40-*.jsonl"))) == 2


def test_texts_of_other_code_are_judged_beside_samples(run, judge, tmp_path):
    human = ["A text of people.", "Another of theirs, longer than the first."]
    texts = tmp_path / "human.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in human))
    (tmp_path / "human.txt").write_text("\n\n".join(human))
    console = screen()
    sources = [open_source(str(source)) for source in (run, texts, tmp_path / "human.txt")]
    drawn, *others = run_judge(sources, FEW, load_judge=lambda: judge, console=console)
    expected = judge_texts(judge, [[text] for text in human], window=32, stride=16)
    unknown = ("entropy", "entropy_error", "evaluations", "evaluations_per_token", "redraws", "degenerate")
    for record in others:
        result = record["result"]
        assert result.keys() == drawn["result"].keys()
        assert record["settings"].keys() == drawn["settings"].keys()
        assert result["perplexity"] == pytest.approx(expected.perplexity)
        assert result["bits_per_character"] == pytest.approx(expected.bits_per_character)
        assert [result[name] for name in unknown] == [None] * len(unknown)
        assert (result["samples"], record["settings"]["length"]) == (2, None)
    printed = " ".join(console.file.getvalue().split())
    shown = with_error(others[0]["result"]["perplexity"], others[0]["result"]["perplexity_error"])
    assert printed.count(f"? {shown} ? ? 2 samples") == 2
    assert "?: unknown, because a file of texts does not say how they were written." in printed


def test_only_empty_texts_of_other_code(judge, tmp_path):
    with pytest.raises(ValueError, match=r"samples\.jsonl must hold a text to judge, got 2 empty ones"):
        judged(written(tmp_path, {"text": ""}, {"text": ""}), judge)


def test_files_put_together_are_judged_together(run, judge, tmp_path):
    for seed in (1, 2):
        judged(run, judge, count=2, seed=seed)
    files = sorted((run / "measured").glob("*.jsonl"))
    both = tmp_path / "both.jsonl"
    both.write_text("".join(file.read_text() for file in files))
    (record,) = judged(both, judge)
    assert (record["settings"]["count"], record["settings"]["seed"]) == (4, None)


def test_redraws_and_samples_that_stay_degenerate_are_counted(judge, tmp_path):
    floor = {**LINE, "settings": {"length": None, "entropy_floor": 4.0}}
    cut_short = {**floor, "stopped_by": "entropy", "redraws": 20, "redrawn_passes": 160}
    console = screen()
    again = {**floor, "redraws": 3, "redrawn_passes": 24}
    samples = written(tmp_path, floor, again, cut_short, cut_short)
    (record,) = judged(samples, judge, console=console)
    assert (record["result"]["redraws"], record["result"]["degenerate"]) == (43, 2)
    assert (record["result"]["evaluations"], record["result"]["redrawn_passes"]) == (8, 344)
    printed = console.file.getvalue().replace("\n", " ")
    assert " + 86 " in printed
    assert "counts passes of rejected attempts" in printed
    assert f"2 samples of {samples} stayed below the entropy floor of 4 and were cut short" in printed


def test_a_model_of_which_nothing_is_left_is_told_why(run, judge):
    said = r"nothing is left of the samples of .*: 2 of 2 stayed below the entropy floor of 5\.5"
    with pytest.raises(ValueError, match=said):
        judged(run, judge, count=2, length=(256,), entropy_floor=5.5, redraws=1)
    (file,) = (run / "measured").glob("*.jsonl")
    assert [line["redraws"] for line in lines_of(file)] == [1, 1]


def test_a_floor_that_nothing_reaches_is_refused_before_anything_is_drawn(run, judge):
    with pytest.raises(ValueError, match=r"entropy_floor must be at most 5\.55, .* got 9$"):
        judged(run, judge, count=2, length=(256,), entropy_floor=9.0)
    assert not (run / "measured").exists()


def test_the_paper_s_way_of_drawing():
    assert (Judge().count, Judge().length, Judge().entropy_floor) == (300, (1024, 2048), 4.0)

    def settings(model, **changes):
        return settings_of(Judge(**changes), SimpleNamespace(model=model), 1024)

    plain = settings(of_bytes())
    assert (plain.stop_at_eos, plain.redraws, plain.top_p, plain.length) == (False, 20, 0.9, 1024)
    assert plain.unmasking == FirstHitting()
    assert settings(of_bytes().with_lean(2.0)).unmasking == FirstHitting(lean=2.0)
    assert settings(of_bytes(), steps=5000).unmasking == Ancestral(5000)
    assert settings(of_bytes(), top_p=1.0).top_p == 1.0
    assert settings(of_bytes(), top_p_rule="exclusive").top_p_rule == "exclusive"
    assert settings(of_bytes(), entropy_floor=0.0).entropy_floor is None
    for method in BASELINES.values():
        found = settings(baseline(method), steps=25)
        assert (found.steps, found.unmasking) == (25, None)
        assert found.top_p == {"score_entropy": 0.99, "simplex": 0.95}.get(method.kind, 0.9)


def test_a_lean_is_drawn_in_recorded_and_in_the_title(run, judge_folder, tmp_path, capsys):
    found = {}
    for flags in ([], ["--lean", "2"], ["--lean", "0", "--steps", "9"]):
        out = tmp_path / f"{len(found)}.json"
        assert main(["judge", str(run), *FLAGS, *flags, "--judge", str(judge_folder), "--out", str(out)]) == 0
        (record,) = json.loads(out.read_text())
        title = "block diffusion, blocks of 4" + (", lean 2" if flags[1:] == ["2"] else "")
        assert record["title"] == title
        found[" ".join(flags)] = record["settings"]
    capsys.readouterr()
    assert {flags: (of["lean"], of["unmasking"]) for flags, of in found.items()} == {
        "": (0.0, {"kind": "first_hitting", "tokens_per_pass": 1, "lean": 0.0}),
        "--lean 2": (2.0, {"kind": "first_hitting", "tokens_per_pass": 1, "lean": 2.0}),
        "--lean 0 --steps 9": (0.0, {"kind": "ancestral", "steps": 9, "schedule": "linear"}),
    }
    texts = [
        [line["tokens"] for line in lines_of(file)] for file in (run / "measured").glob("samples-40-*.jsonl")
    ]
    assert len(texts) == 3
    assert min(map(texts.count, texts)) == 1  # of the lean; nine steps may reveal one token each


def test_texts_of_either_law_are_judged_and_say_which(judge_folder, tmp_path, capsys):
    of_method(BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True)).save_pretrained(
        tmp_path / "joint"
    )
    found = {}
    for law in ("block", "causal"):
        out, texts = tmp_path / f"{law}.json", tmp_path / f"{law}.jsonl"
        words = ["judge", str(tmp_path / "joint"), *FLAGS, "--judge", str(judge_folder), "--out", str(out)]
        assert main([*words, "--law", law]) == 0
        (record,) = json.loads(out.read_text())
        assert record["settings"]["law"] == law
        assert record["title"].endswith(", causal law") == (law == "causal")
        found[law] = record["result"]["nats"]
        words = ["sample", str(tmp_path / "joint"), "--length", "40", "--law", law, "--out", str(texts)]
        assert main(words) == 0
        capsys.readouterr()
        assert main(["judge", str(texts), "--judge", str(judge_folder), *FLAGS[:4]]) == 0
        assert f"{law} law" in " ".join(capsys.readouterr().out.split())
    assert found["block"] != found["causal"]


def test_ancestral_steps_are_not_for_a_model_that_leans(run, judge, monkeypatch):
    monkeypatch.setattr(sample_files, "write_texts", lambda *_, **__: pytest.fail("drawn"))
    source = open_source(str(run), lean=2.0)
    with pytest.raises(ValueError, match=r"no order that leans, .* use with_lean\(0\), or --lean 0"):
        run_judge([source], replace(FEW, steps=9), load_judge=lambda: judge, console=screen())


def test_a_lean_is_for_a_model_that_has_an_order(judge_folder, tmp_path, capsys):
    of_bytes(None).save_pretrained(tmp_path / "ar")
    assert main(["judge", str(tmp_path / "ar"), *FLAGS, "--judge", str(judge_folder), "--lean", "2"]) == 1
    assert "--lean sets the order within a block, and no" in capsys.readouterr().err


def nats_after(judge, documents: list[str], prompt: str) -> tuple[float, int]:
    """By the chain rule in one window: what follows the prompt, which is tokenized apart."""
    tokens, scored = [judge.eos_id, *judge.encode(prompt)], []
    for place, document in enumerate([documents[0][len(prompt) :], *documents[1:]]):
        tokens += [judge.eos_id] if place else []
        scored += range(len(tokens), len(tokens) + len(judge.encode(document)))
        tokens += judge.encode(document)
    log_p = judge.log_p(torch.tensor([tokens]))[0].double()
    return -log_p[scored].sum().item(), len(scored)


def test_after_a_prompt_what_was_written_is_judged_given_the_prompt(run, judge, tmp_path):
    texts, console = tmp_path / "prompted.jsonl", screen()
    words = [
        "sample",
        str(run),
        "import the",
        "For",
        "",
        "--length",
        "12",
        "--no-stop-at-eos",
        "--out",
        str(texts),
    ]
    assert main(words) == 0
    (record,) = judged(texts, judge, console=console)
    lines = lines_of(texts)
    assert all(len(judge.encode(line["text"])) < 30 for line in lines)  # so that one window holds them
    assert [line["text"].removesuffix(line["completion"]) for line in lines] == ["import the", "For", ""]
    found = [
        nats_after(judge, line["documents"], prompt)
        for line, prompt in zip(lines[:2], ("import the", "For"), strict=True)
    ]
    alone = judge_texts(judge, [lines[2]["documents"]], window=32, stride=16)
    nats = sum(each for each, _ in found) + alone.nats.sum().item()
    tokens = sum(each for _, each in found) + int(alone.tokens.sum())
    result = record["result"]
    assert result["tokens"] == tokens
    assert result["nats"] == pytest.approx(nats / tokens, rel=1e-5)
    assert result["characters"] == sum(len(text) for line in lines for text in line["documents"]) - 13
    assert record["settings"]["after_prompts"] is True
    printed = " ".join(console.file.getvalue().split())
    assert "After prompts: only the text after a prompt is scored, given the prompt" in printed
    # Small windows change what is in view, and nothing else.
    (by_windows,) = judged(texts, judge, window=6, stride=2)
    assert by_windows["result"]["tokens"] == tokens


def test_texts_of_other_code_may_have_prompts_that_they_begin_with(judge, tmp_path):
    file = written(tmp_path, {"text": "Once upon a time.", "prompt": "Once upon"})
    (record,) = judged(file, judge)
    nats, tokens = nats_after(judge, ["Once upon a time."], "Once upon")
    assert (record["result"]["tokens"], record["result"]["nats"]) == (
        tokens,
        pytest.approx(nats / tokens, rel=1e-5),
    )
    file = written(tmp_path, {"text": " a time.", "prompt": "Once upon"})
    with pytest.raises(ValueError, match=r"sample 0 of .* must begin with its prompt, 'Once upon', got"):
        judged(file, judge)


def test_what_was_given_and_is_not_known_is_not_judged_as_if_it_had_been_written(
    run, judge, tmp_path, monkeypatch
):
    filled = tmp_path / "filled.jsonl"
    assert main(["sample", str(run), "--template", "The {3} sat on the {2}.", "--out", str(filled)]) == 0
    monkeypatch.setattr(sample_files, "write_texts", lambda *_, **__: pytest.fail("drawn"))
    unknown = written(tmp_path, {**LINE, "given": 3})
    for file, said in (
        (filled, "fills the gaps of a template, .*: judge texts that continue a prompt or were"),
        (unknown, "was given 3 tokens and does not say which: write it again with `bd3lm sample --out`"),
    ):
        sources = [open_source(str(source)) for source in (run, file)]
        with pytest.raises(ValueError, match=f"sample 0 of {file} {said}"):
            run_judge(sources, FEW, load_judge=lambda: judge, console=screen())


def test_mauve_is_not_for_texts_that_begin_with_prompts(judge, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace())
    human = tmp_path / "human.txt"
    human.write_text("A human text.")
    file = written(tmp_path, {"text": "Once upon a time.", "prompt": "Once"})
    with pytest.raises(
        ValueError, match=r"--mauve compares whole texts .* begin with prompts: leave --mauve out"
    ):
        judged(file, judge, mauve=human)


def test_a_length_that_a_model_cannot_write_is_said_before_others_are_drawn(judge, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_files, "write_texts", lambda *_, **__: pytest.fail("drawn"))
    baseline(BASELINES["SEDD"]).save_pretrained(tmp_path / "sedd")
    with pytest.raises(ValueError, match="length must be at most 16, the network's whole context, got 32"):
        judged(tmp_path / "sedd", judge, length=(16, 32))


def test_all_is_opened_before_anything_is_drawn(run, judge, capsys, monkeypatch):
    monkeypatch.setattr(sample_files, "write_texts", lambda *_, **__: pytest.fail("drawn"))
    monkeypatch.setattr(HuggingFaceJudge, "load", lambda *_, **__: pytest.fail("loaded"))
    assert main(["judge", str(run), "nowhere.jsonl", *FLAGS]) == 1
    assert "there is no file nowhere.jsonl" in capsys.readouterr().err
    with pytest.raises(ValueError, match="window must be from 2 to 32, what tiny-gpt can read, got 1024"):
        judged(run, judge, window=Judge.window, stride=Judge.stride)


def test_the_command_from_end_to_end(run, judge_folder, tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    sample = ["sample", str(run), "--count", "3", "--no-stop-at-eos", "--length", "40", "--out", str(texts)]
    assert main(sample) == 0
    capsys.readouterr()
    common = ["--judge", str(judge_folder), "--out"]
    assert main(["judge", str(run), *FLAGS, *common, str(tmp_path / "run.json")]) == 0
    assert "Generative perplexity under tiny-gpt" in capsys.readouterr().out
    assert main(["judge", str(texts), *FLAGS[:4], *common, str(tmp_path / "file.json")]) == 0
    by_run, by_file = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "file.json"))
    assert [each["result"] for each in by_run] == [each["result"] for each in by_file]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "a source must be given"),
        (["LINE", "--count", "5"], "--count needs a model that writes samples, and all sources are files"),
        (["LINE", "--entropy-floor", "3"], "--entropy-floor needs a model that writes"),
        (["LINE", "--dtype", "float64"], "--dtype needs a model that writes"),
        (["LINE", "--lean", "2"], "--lean needs a model that writes"),
        (["LINE", "--law", "causal"], "--law needs a model that writes"),
        (["texts.jsonl", "--window", "9", "--device", "cpu"], "there is no file texts.jsonl"),
        (["RUN", "--count", "0"], "count must be at least 1, got 0"),
        (
            ["RUN", "--length", "128"],
            "--length 128 is shorter than the 256 tokens of the entropy rule: add --ent",
        ),
        (["RUN", "--length", "512", "512"], "length must be one or more different lengths"),
        (["RUN", "--entropy-floor", "0", "--redraws", "3"], "redraws needs an entropy floor above 0, got 3"),
        (["RUN", "--judge-batch-size", "0"], "--judge-batch-size must be at least 1, got 0"),
        (["RUN", "--mauve", "no.txt"], "--mauve must be a file of human texts, and no.txt is not a file"),
        (
            ["RUN", "--judge", "./no-folder"],
            "judge: there is no folder './no-folder' here. It must be a local",
        ),
        (
            ["RUN", "--judge", "no.gguf"],
            "judge: there is no file 'no.gguf' here. It must be a local folder, a",
        ),
        (
            ["RUN", "--judge", "~nobodyhere/x"],
            "judge: there is no folder '~nobodyhere/x' here. It must be a local",
        ),
        (
            ["RUN", "--judge", "hf://a/b.gguf"],
            "judge: a hub id must look like 'hf://owner/name' or 'hf://name' without a file name, got 'hf://a/b",
        ),
        (
            ["RUN", "--judge", "block/modle"],
            "no folder 'block/modle' here, did you mean 'block/model'? To load",
        ),
        (
            ["RUN", "--judge", "human.csv"],
            "a .gguf file or a hub id such as gpt2-large, got the file 'human.csv'",
        ),
        (["RUN", "--judge", "RUN"], "must be a causal language model that transformers can load: "),
        (["human.csv"], "with a field text, or .txt), got the file human.csv"),
        (
            ["half.jsonl"],
            "half.jsonl line 1 must have a text in its field text, or be a line of `bd3lm sample",
        ),
        (
            ["RUN", "--mauve", "human.csv"],
            "--mauve must be a file of human texts: human.csv has no known format in its name",
        ),
        (["RUN", "--mauve", "LINE"], "--mauve must be a file of human texts: "),
        (["RUN", "--stride", "1024"], "stride must be from 1 to 1023"),
    ],
)
def test_bad_input_is_one_line(words, said, run, judge_folder, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "human.csv").write_text("a,b\n")
    (tmp_path / "half.jsonl").write_text(json.dumps({"words": "human"}) + "\n")
    (tmp_path / "samples.jsonl").write_text(json.dumps(LINE) + "\n")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    wide = save_judge(tmp_path / "wide", n_positions=1024) if "--stride" in words else judge_folder
    named = [{"RUN": str(run), "LINE": "samples.jsonl"}.get(word, word) for word in words]
    judge = [] if "--judge" in words else ["--judge", str(wide)]
    assert main(["judge", *named, *judge]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("bd3lm:") == 1  # transformers has bars of its own on the lines before
    assert error.splitlines()[-1].startswith("bd3lm: ")


def test_a_judge_of_the_hub_needs_no_owner_where_the_hub_is_named(judge_folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # which is no judge
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(judge_folder))
    assert [open_judge(name).name for name in ("small", "hf://tiny", "some/tiny")] == [
        "small",
        "tiny",
        "some/tiny",
    ]


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_gguf_file_without_what_reads_it(package, tmp_path, capsys, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setitem(sys.modules, package, None)
    judge = tmp_path / "judge.gguf"
    judge.touch()
    assert main(["judge", str(written(tmp_path, LINE)), "--judge", str(judge)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"bd3lm: judge '{judge}', a GGUF file, needs the package {package}: ")
    assert said.endswith("pip install 'bd3lm[judge]'\n")


def test_a_missing_mauve_is_said_before_anything_is_opened(judge, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mauve", None)
    (tmp_path / "human.txt").write_text("Not much.")
    with pytest.raises(ImportError, match=r"MAUVE needs the package mauve: pip install 'bd3lm\[mauve\]'"):
        judged("nowhere", judge, mauve=tmp_path / "human.txt")


@pytest.mark.slow
def test_mauve_is_high_for_text_like_the_reference_and_low_for_other(judge, tmp_path):
    pytest.importorskip("mauve", reason="MAUVE is in the extra bd3lm[mauve]")
    texts = [document for document in PydocCorpus().documents("train") if len(document) > 200][:120]
    reference = tmp_path / "human.jsonl"
    reference.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[::2]))
    alike, unlike = (
        written(tmp_path / name, *({**LINE, "documents": [make(text)]} for text in texts[1::2]))
        for name, make in (("alike", lambda text: text), ("unlike", lambda _: "aaaaaaaa" * 20))
        if (tmp_path / name).mkdir() is None
    )
    torch.manual_seed(0)
    console = screen()
    (near,), (far,) = (judged(file, judge, mauve=reference, console=console) for file in (alike, unlike))
    assert near["result"]["mauve"] > 0.5 > 0.2 > far["result"]["mauve"]
    assert f"MAUVE {near['result']['mauve']:.3f}" in console.file.getvalue()


def test_a_reference_that_is_too_short_is_refused(judge, tmp_path):
    pytest.importorskip("mauve", reason="MAUVE is in the extra bd3lm[mauve]")
    (tmp_path / "human.txt").write_text("Not much.")
    samples = written(tmp_path, LINE)
    said = r"the reference must hold 1 texts of up to 26 tokens, .* from the beginning of a document, got 0"
    with pytest.raises(ValueError, match=said):
        judged(samples, judge, mauve=tmp_path / "human.txt")
