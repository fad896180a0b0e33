"""`bd3lm bench`: tables for people, JSON lines for later, and bad input in one line."""

import io
import json
from dataclasses import asdict
from itertools import product

import pytest
import torch
from rich.console import Console

import bd3lm
from bd3lm.bench import AttentionCase, Kernel, Profile, SamplingCase, Shape, Timing, TrainingCase
from bd3lm.cli import main
from bd3lm.commands.bench import timing
from bd3lm.commands.bench.timing import (
    bench_attention,
    bench_forward,
    bench_sampling,
    bench_training,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = {"hidden": 16, "heads": 2, "context": 8}
NETWORK = {"layers": 1, "vocabulary": 11}


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def measured(monkeypatch) -> list:
    """Cases as they are measured. The n-th takes n seconds, give or take a half; products, 1 GFLOP/s."""
    cases: list = []

    def measure(case, *, device, **repeats):
        cases.append(case)
        n = float(len(cases))
        return Timing((n, n + 0.5, n - 0.5), 2**31 if device.type == "cuda" else None)

    for name in ("measure_training", "measure_forward", "measure_sampling", "measure_attention"):
        monkeypatch.setattr(timing, name, measure)
    monkeypatch.setattr(timing, "matrix_rate", lambda device: 1e9)
    return cases


def on_a(card: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)


def cells(console: Console) -> dict[str, list[str]]:
    """The rows of the printed tables, by their first cell."""
    lines = console.file.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    return {first: others for first, *others in rows}


def headings(console: Console) -> list[str]:
    """Those of the last table."""
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("┃")]
    return [cell.strip() for cell in lines[-1].split("┃")[1:-1]]


def prose(console: Console) -> str:
    """What was printed, however its lines were broken."""
    return " ".join(console.file.getvalue().split())


def words(**options) -> list[str]:
    """As they are written on a command line."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


# --- training ---


def test_variants_of_training_stand_beside_the_first(measured, console):
    case = TrainingCase(shape=Shape(**SHAPE, **NETWORK), batch_size=500)
    rows = bench_training(case, ["eager", "two-pass", "no-ema", "dense"], device=CPU, console=console)
    assert [(each.compile, each.algorithm, each.ema, each.attention) for each in measured] == [
        (False, "single_pass", True, "auto"),
        (True, "two_pass", True, "auto"),
        (True, "single_pass", False, "auto"),
        (True, "single_pass", True, "dense"),
    ]
    table = cells(console)
    assert list(table) == ["eager", "two-pass", "no-ema", "dense"]
    used = case.shape.training_flops(500) / 2.0 / 1e9
    assert 0.01 < used < 1.0
    assert table["two-pass"] == ["2000.00", "1500.00, 2500.00", "2,000", "x 2.00", f"{used:.0%}"]
    assert rows[1]["utilisation"] == pytest.approx(used)
    assert rows[1]["tokens_per_second"] == 500 * 8 / 2.0
    printed = prose(console)
    assert "Training, BD3-LM, blocks of 4, 1 x 16, context 8, batch 500" in printed
    said = "used is the speed of the method's matrix products over a step, as a share of the 0.001 TFLOP/s of"
    assert said in printed


def test_records_are_appended_as_json_lines(measured, console, tmp_path):
    out = tmp_path / "bench.jsonl"
    case = TrainingCase(shape=Shape(**SHAPE, **NETWORK), batch_size=2)
    rows = bench_training(case, ["compiled", "eager"], device=CPU, out=out, console=console)
    rows += bench_training(case, ["no-ema"], device=CPU, out=out, console=console)
    kept = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert kept == rows
    assert [record["variant"] for record in kept] == ["compiled", "eager", "no-ema"]
    first = kept[0]
    assert first["case"] == asdict(measured[0])
    assert first["seconds"] == {"median": 1.0, "least": 0.5, "most": 1.5}
    assert first["repeats"] == len(first["each"])
    assert (min(first["each"]), max(first["each"])) == (0.5, 1.5)
    assert (first["bench"], first["repeats"], first["peak_gib"]) == ("train", 3, None)
    assert (first["torch"], first["bd3lm"]) == (torch.__version__, bd3lm.__version__)
    assert "CPU" in first["device"]


def test_on_a_gpu_its_name_and_memory_are_shown(measured, console, monkeypatch):
    on_a("Some GPU", monkeypatch)
    bench_training(TrainingCase(), ["compiled"], device=CUDA, console=console)
    assert "on Some GPU" in prose(console)
    assert list(cells(console)) == ["compiled"]
    assert cells(console)["compiled"][4] == "2.0"


# --- what others reached ---


@pytest.mark.parametrize(
    ("card", "batch", "shown"),
    [
        ("NVIDIA H200", 32, True),
        ("NVIDIA H200 NVL", 32, True),
        ("NVIDIA H100", 32, False),
        ("NVIDIA H200", 16, False),
    ],
)
def test_others_figures_are_shown_for_the_very_case_on_the_very_card(
    measured, console, monkeypatch, card, batch, shown
):
    on_a(card, monkeypatch)
    bench_training(TrainingCase(batch_size=batch), ["compiled"], device=CUDA, console=console)
    row = cells(console).get("reference implementation")
    assert row == (["", "", "79,500", "", "66.1", ""] if shown else None)
    assert ("'reference implementation' was measured before this project" in prose(console)) == shown


def test_a_cpu_is_not_compared_with_a_card(measured, console, monkeypatch):
    on_a("NVIDIA H200", monkeypatch)
    bench_training(TrainingCase(), ["compiled"], device=CPU, console=console)
    assert list(cells(console)) == ["compiled"]


def test_sampling_has_its_own_figures_of_others(measured, console, monkeypatch):
    on_a("NVIDIA H200", monkeypatch)
    case = SamplingCase(shape=Shape(method="ar"), dtype="bfloat16")
    bench_sampling(case, ["cached"], device=CUDA, console=console)
    name = "Hugging Face generate, static cache, compiled"
    assert cells(console)[name] == ["", "", "467", "", ""]
    assert f"'{name}' was measured before this project began" in prose(console)


# --- sampling and attention ---


def test_sampling_counts_the_tokens_that_are_written(measured, console):
    case = SamplingCase(shape=Shape(**SHAPE, **NETWORK), batch_size=30, length=101)
    rows = bench_sampling(case, ["cached", "uncached"], device=CPU, console=console)
    assert [each.cache for each in measured] == [True, False]
    assert [row["tokens_per_second"] for row in rows] == [3000.0, 1500.0]
    assert cells(console)["uncached"][2:4] == ["1,500", "x 2.00"]
    assert "30 texts of 101 tokens, float32" in prose(console)
    assert headings(console) == ["variant", "ms", "least, most", "tokens/s", "time"]


def test_a_text_of_one_block_is_called_uncached(measured, console):
    case = SamplingCase(shape=Shape(method="mdlm", **SHAPE, **NETWORK), length=8)
    (row,) = bench_sampling(case, device=CPU, console=console)
    assert (row["variant"], row["case"]["cache"]) == ("uncached", False)
    assert "1 text of 8 tokens" in prose(console)
    bench_sampling(case, ["plain"], device=CPU, console=console)
    assert (measured[1].cache, measured[1].fused, measured[1].replayed) == (False, False, False)


def test_the_columns_are_explained(measured, console, monkeypatch):
    bench_sampling(SamplingCase(), device=CPU, console=console)
    assert "the median of 3 runs after warm-up; least and most are the fastest" in prose(console)
    assert "GiB is the peak memory" not in prose(console)
    on_a("Some GPU", monkeypatch)
    bench_attention(AttentionCase(), ["auto"], device=CUDA, console=console)
    assert "the median of 3 calls" in prose(console)
    assert "GiB is the peak memory" in prose(console)


@pytest.mark.parametrize(
    ("bench", "case", "variants", "timed", "said"),
    [
        (
            bench_sampling,
            SamplingCase(),
            ["cached", "unreplayed", "unfused", "plain"],
            1,
            "plain is left out: on this device it is the same",
        ),
        (bench_training, TrainingCase(compile=False), ["eager", "dense"], 1, "dense is left out: on"),
        (bench_training, TrainingCase(compile=True), ["eager", "dense"], 2, None),
        (bench_attention, AttentionCase(), ["auto", "dense"], 2, "same computation as auto."),
        (bench_forward, TrainingCase(), None, 2, "dense is left out: on this device it is the same"),
        (bench_attention, AttentionCase(shape=Shape(method="ar")), ["auto", "dense"], 4, None),
    ],
)
def test_what_does_not_differ_on_a_cpu_is_timed_once(measured, console, bench, case, variants, timed, said):
    bench(case, variants, device=CPU, console=console)
    assert len(measured) == timed
    assert said in prose(console) if said else "left out" not in prose(console)


def test_on_a_gpu_plain_and_dense_differ_and_flex_is_automatic(measured, console, monkeypatch):
    on_a("Some GPU", monkeypatch)
    ways = ["cached", "unreplayed", "unfused", "plain"]
    bench_sampling(SamplingCase(), ways, device=CUDA, console=console)
    assert [(each.fused, each.replayed) for each in measured] == list(product((True, False), repeat=2))
    measured.clear()
    bench_attention(AttentionCase(), ["auto", "dense", "flex"], device=CUDA, console=console)
    assert [each.backend for each in measured] == ["auto", "dense"] * 2
    assert prose(console).count("left out") == 1


def test_passes_of_attention_are_compared_with_their_like(measured, console):
    """Forward alone in one table, with the backward pass in another, each with its own first row."""
    case = AttentionCase(shape=Shape(method="ar", **SHAPE), batch_size=6)
    rows = bench_attention(case, ["auto", "dense"], device=CPU, console=console)
    assert [(each.backend, each.backward) for each in measured] == [
        ("auto", False),
        ("dense", False),
        ("auto", True),
        ("dense", True),
    ]
    assert [(row["variant"], row["case"]["backward"]) for row in rows[1:3]] == [
        ("dense", False),
        ("auto", True),
    ]
    forward, backward = prose(console).split("forward and backward, ")
    assert "forward, AR, 2 heads of 8, context 8, batch 6" in forward
    assert "x 2.00" in forward
    assert "x 1.33" in backward
    assert "x 2.00" not in backward
    assert rows[3]["tokens_per_second"] == 6 * 8 / 4.0


# --- profiles ---


@pytest.fixture
def profiled(monkeypatch) -> None:
    """Everything takes two seconds, and its kernels one more, as they overlap."""

    def measure(case, *, device, profile, **repeats):
        assert profile
        on_gpu = device.type == "cuda"
        found = Profile(
            calls=1,
            seconds=2.0,
            groups={"matrix products": 2.25, "attention": 0.75},
            kernels=(Kernel("nvjet", "matrix products", 2.25, 3.0),),
            idle=0.125 if on_gpu else None,
        )
        return Timing((2.0,), 2**31 if on_gpu else None, found)

    for name in ("measure_training", "measure_sampling"):
        monkeypatch.setattr(timing, name, measure)
    monkeypatch.setattr(timing, "matrix_rate", lambda device: 1e9)


def test_a_profile_is_printed_by_groups_and_kept(profiled, console, monkeypatch, tmp_path):
    on_a("Some GPU", monkeypatch)
    out = tmp_path / "bench.jsonl"
    bench_training(TrainingCase(), ["compiled"], device=CUDA, profile=True, out=out, console=console)
    table = cells(console)
    assert table["matrix products"] == ["2250.00", "75%"]
    assert table["all of them"] == ["3000.00", ""]
    assert table["step without the profiler"] == ["2000.00", ""]
    assert table["no kernel runs"] == ["", "12%"]
    assert headings(console) == ["kernels", "ms", "share"]
    assert "Where the time of a step goes, compiled" in prose(console)
    assert "3 more steps of each variant; share is of all kernels listed; ms is the time in k" in prose(
        console
    )
    assert "overlapping kernels can add up to more than the step" in prose(console)
    kept = json.loads(out.read_text("utf-8"))["profile"]
    assert kept["groups"] == {"matrix products": 2.25, "attention": 0.75}
    assert kept["kernels"] == [
        {"name": "nvjet", "group": "matrix products", "seconds": 2.25, "launches": 3.0}
    ]
    assert (kept["calls"], kept["seconds"], kept["idle"]) == (1, 2.0, 0.125)


def test_of_long_texts_it_is_said_that_shorter_ones_are_profiled(profiled, console):
    (row,) = bench_sampling(SamplingCase(), device=CPU, profile=True, console=console)
    assert row["profile"]["length"] == 128
    assert "one more run of each variant, of 1 text of 128 tokens instead of 512, to keep it" in prose(
        console
    )
    assert headings(console) == ["operators", "ms", "share"]
    assert "no kernel runs" not in prose(console)
    bench_sampling(SamplingCase(length=100), device=CPU, profile=True, console=console)
    assert "of 1 text of 100 tokens; share is of all operators listed; ms is the time in op" in prose(console)


# --- the command ---


def test_the_command_times_training(capsys, tmp_path):
    out = tmp_path / "bench.jsonl"
    given = words(**SHAPE, **NETWORK, batch_size=2, steps=2, device="cpu", block_size=2, out=out)
    assert main(["bench", "train", *given, "--variants", "eager"]) == 0
    kept = json.loads(out.read_text("utf-8"))
    assert (kept["variant"], kept["repeats"], kept["case"]["batch_size"]) == ("eager", 2, 2)
    assert kept["case"]["shape"] == asdict(Shape(block_size=2, **SHAPE, **NETWORK))
    assert kept["seconds"]["least"] > 0
    assert "│ eager " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["train", "sample"])
def test_help_says_where_single_kernels_are(kind, capsys):
    with pytest.raises(SystemExit):
        main(["bench", kind, "--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "The --out file also lists the longest single kernels." in said


def test_the_command_times_sampling(capsys, tmp_path):
    out = tmp_path / "bench.jsonl"
    given = words(**SHAPE, **NETWORK, batch_size=2, length=8, repeats=1, device="cpu", top_p=0.8, out=out)
    assert main(["bench", "sample", *given, "--variants", "cached", "uncached"]) == 0
    cached, uncached = (json.loads(line) for line in out.read_text("utf-8").splitlines())
    assert (cached["case"]["cache"], uncached["case"]["cache"]) == (True, False)
    assert (cached["case"]["top_p"], cached["case"]["shape"]["vocabulary"]) == (0.8, 11)
    assert "uncached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "options"), [("train", {"batch_size": 2, "steps": 1}), ("sample", {"length": 8, "repeats": 1})]
)
def test_the_command_profiles(kind, options, capfd, tmp_path):
    """And torch's profiler says nothing of its own."""
    out = tmp_path / "bench.jsonl"
    given = words(**SHAPE, **NETWORK, **options, device="cpu", out=out)
    assert main(["bench", kind, *given, "--profile"]) == 0
    printed = capfd.readouterr()
    assert "│ matrix products " in printed.out
    assert "Where the time of a" in printed.out
    assert printed.err == ""
    profile = json.loads(out.read_text("utf-8"))["profile"]
    assert profile["groups"]["matrix products"] > 0
    assert profile["idle"] is None


def test_the_command_times_attention(capsys):
    given = words(**SHAPE, method="ar", batch_size=2, repeats=2, device="cpu")
    assert main(["bench", "attention", *given]) == 0
    printed = capsys.readouterr().out
    assert printed.count("│ auto ") == printed.count("│ dense ") == 2


@pytest.mark.parametrize(
    ("method", "variants"),
    [("bd3lm", ["single-pass", "two-pass"]), ("ar", ["single-pass", "dense"])],
)
def test_the_command_times_forward_passes(capsys, tmp_path, method, variants):
    out = tmp_path / "bench.jsonl"
    given = words(**SHAPE, **NETWORK, method=method, batch_size=2, repeats=2, device="cpu", out=out)
    assert main(["bench", "forward", *given]) == 0
    kept = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [(each["bench"], each["variant"], each["repeats"]) for each in kept] == [
        ("forward", variant, 2) for variant in variants
    ]
    assert "Forward pass, " in capsys.readouterr().out


def test_forward_passes_on_a_gpu_are_the_papers(measured, console, monkeypatch):
    """One pass against two, and against the same with a dense mask, 16 texts of 1,024 tokens."""
    on_a("Some GPU", monkeypatch)
    bench_forward(TrainingCase(batch_size=16), device=CUDA, console=console)
    assert [(each.algorithm, each.attention) for each in measured] == [
        ("single_pass", "auto"),
        ("two_pass", "auto"),
        ("single_pass", "dense"),
    ]
    assert cells(console)["dense"][:4] == ["3000.00", "2500.00, 3500.00", "5,461", "x 3.00"]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("forward", ["--variants", "eager"], "must be among single-pass, two-pass, dense, got 'eager'"),
        ("forward", ["--repeats", "0"], "repeats at least 1, got 3 and 0"),
        (
            "forward",
            ["--method", "mdlm", "--variants", "two-pass"],
            "variants of MDLM must be among single-pass, dense, got 'two-pass'",
        ),
        (
            "train",
            ["--variants", "faster"],
            "variants of BD3-LM, blocks of 4 must be among compiled, eager, dense, two-pass, no-ema, got",
        ),
        ("train", ["--variants"], "variants must name at least one of compiled, eager"),
        ("train", ["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        ("train", ["--steps", "0"], "steps must be at least 1, got 0"),
        ("train", ["--heads", "5"], "hidden must be a multiple of heads"),
        ("train", ["--block-size", "3"], "block_size must divide the context 8, got 3"),
        ("train", ["--block-size", "0"], "block_size must be at least 1, got 0"),
        ("train", ["--vocabulary", "1"], "vocabulary must be at least 2"),
        ("train", ["--method", "ar", "--variants", "eager", "two-pass"], "two passes need a clean text"),
        (
            "train",
            ["--out", "nowhere/bench.jsonl"],
            "--out must be in an existing folder, and nowhere is not one",
        ),
        (
            "sample",
            ["--variants", "eager"],
            "must be among cached, unreplayed, unfused, plain, uncached, got 'eager'",
        ),
        ("sample", ["--batch-size", "0"], "batch_size must be a whole number from 1 on, got 0"),
        ("sample", ["--length", "1"], "length must be at least 2"),
        ("sample", ["--top-p", "2"], "top_p must lie in (0, 1], got 2.0"),
        ("sample", ["--repeats", "0"], "repeats at least 1, got 1 and 0"),
        ("sample", ["--out", "nowhere/bench.jsonl"], "--out must be in an existing folder"),
        (
            "sample",
            ["--method", "mdlm", "--variants", "cached"],
            "variants of MDLM must be among uncached, plain, got 'cached'",
        ),
        ("attention", ["--variants", "eager"], "must be among auto, flex, dense, got 'eager'"),
        ("attention", ["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        ("attention", ["--heads", "5"], "hidden must be a multiple of heads"),
        ("attention", ["--block-size", "3"], "block_size must divide the context 8, got 3"),
        ("attention", ["--variants", "flex"], "backend must be 'auto' or 'dense' on a CPU"),
        ("attention", ["--out", "nowhere/bench.jsonl"], "--out must be in an existing folder"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, kind, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "matrix_rate", lambda device: 1e9)
    network = {} if kind == "attention" else NETWORK
    default = {
        "train": "eager",
        "forward": "single-pass",
        "sample": "cached",
        "attention": "dense",
    }[kind]
    given = words(**SHAPE, **network, device="cpu")
    if "--variants" not in options:
        given += ["--variants", default]
    assert main(["bench", kind, *given, *options]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.startswith("bd3lm: ")
    assert printed.err.count("\n") == 1
    assert "│" not in printed.out


def test_attention_has_no_option_that_does_nothing(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "attention", "--layers", "2"])
    assert "layers" in capsys.readouterr().err
