"""Times variants one after the other; prints a table and appends JSON lines."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.table import Table

from bd3lm.bench import (
    PROFILED_STEPS,
    AttentionCase,
    SamplingCase,
    Timing,
    TrainingCase,
    device_name,
    matrix_rate,
    measure_attention,
    measure_forward,
    measure_sampling,
    measure_training,
    timing_record,
    training_record,
)
from bd3lm.bench.reference import CARD, PROVENANCE, sampling_reference, training_reference
from bd3lm.commands.bench import BenchAttention, BenchForward, BenchSample, BenchTrain
from bd3lm.io.console import Console

Case = TypeVar("Case", TrainingCase, SamplingCase, AttentionCase)
_TRAINING: dict[str, Callable[[TrainingCase], TrainingCase]] = {
    "compiled": lambda case: replace(case, compile=True),
    "eager": lambda case: replace(case, compile=False),
    "dense": lambda case: replace(case, attention="dense"),
    "two-pass": lambda case: replace(case, algorithm="two_pass"),
    "no-ema": lambda case: replace(case, ema=False),
}
_FORWARD: dict[str, Callable[[TrainingCase], TrainingCase]] = {
    "single-pass": lambda case: case,
    "two-pass": _TRAINING["two-pass"],
    "dense": _TRAINING["dense"],
}
# A text of one block, or a text written from left to right, is always read in one pass.
_FORWARD_ONE_PASS = {name: _FORWARD[name] for name in ("single-pass", "dense")}
_SAMPLING: dict[str, Callable[[SamplingCase], SamplingCase]] = {
    "cached": lambda case: case,
    "unreplayed": lambda case: replace(case, replayed=False),
    "unfused": lambda case: replace(case, fused=False),
    "plain": lambda case: replace(case, fused=False, replayed=False),
    "uncached": lambda case: replace(case, cache=False),
}
# A text of one block is computed whole in every pass.
_SAMPLING_ONE_BLOCK: dict[str, Callable[[SamplingCase], SamplingCase]] = {
    "uncached": lambda case: replace(case, cache=False),
    "plain": lambda case: replace(case, cache=False, fused=False, replayed=False),
}
_ATTENTION: dict[str, Callable[[AttentionCase], AttentionCase]] = {
    "auto": lambda case: case,
    "flex": lambda case: replace(case, backend="flex"),
    "dense": lambda case: replace(case, backend="dense"),
}


def bench_training(
    case: TrainingCase,
    variants: Sequence[str],
    *,
    device: torch.device,
    steps: int = BenchTrain.steps,
    profile: bool = False,
    out: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Time training steps of a case in several variants; the first is the baseline."""
    console = console or Console()
    chosen = _choose(variants, _TRAINING, case)
    _check_folder(out)
    chosen = _without_repetitions(chosen, device, console)
    rate = matrix_rate(device)
    rows = []
    for name, variant in chosen.items():
        with console.status(f"training: {case.shape.title}, {name}"):
            timing = measure_training(variant, device=device, steps=steps, profile=profile)
        record = training_record(name, variant, timing, device, rate=rate) | _profile(timing)
        _keep(out, record)
        rows.append(record)
    reference = training_reference(case) if _on_the_card(device) else None
    beside = [] if reference is None else [(reference[2], float(reference[0]), reference[1])]
    _print(console, f"Training, {case.shape.title}, batch {case.batch_size}", rows, beside, device)
    _explain(
        console,
        rows,
        beside,
        timed="step",
        tokens="of the texts",
        more="used is the speed of the method's matrix products over a step, as a share of the "
        f"{rate / 1e12:,.3g} TFLOP/s of one large product in this run",
    )
    _print_profiles(console, rows, device, "step", f"{PROFILED_STEPS} more steps of each variant")
    return rows


def bench_forward(
    case: TrainingCase,
    variants: Sequence[str] | None = None,
    *,
    device: torch.device,
    repeats: int = BenchForward.repeats,
    out: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Time forward passes of training in several variants, by default all that the method has."""
    console = console or Console()
    one_pass = case.shape.method == "ar" or case.shape.one_block
    known = _FORWARD_ONE_PASS if one_pass else _FORWARD
    chosen = _choose(list(known) if variants is None else variants, known, case)
    _check_folder(out)
    chosen = _without_repetitions(chosen, device, console)
    rows = []
    for name, variant in chosen.items():
        with console.status(f"forward: {case.shape.title}, {name}"):
            timing = measure_forward(variant, device=device, repeats=repeats)
        record = timing_record("forward", name, variant, timing, device)
        record |= {"tokens_per_second": case.batch_size * case.shape.context / timing.median}
        _keep(out, record)
        rows.append(record)
    _print(console, f"Forward pass, {case.shape.title}, batch {case.batch_size}", rows, [], device)
    _explain(console, rows, [], timed="call", tokens="of the texts")
    return rows


def bench_sampling(
    case: SamplingCase,
    variants: Sequence[str] | None = None,
    *,
    device: torch.device,
    repeats: int = BenchSample.repeats,
    profile: bool = False,
    out: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Time sampling in several variants, by default cached, or uncached if there is nothing to cache."""
    console = console or Console()
    known = _SAMPLING_ONE_BLOCK if case.shape.one_block else _SAMPLING
    chosen = _choose([next(iter(known))] if variants is None else variants, known, case)
    _check_folder(out)
    chosen = _without_repetitions(chosen, device, console)
    rows = []
    for name, variant in chosen.items():
        with console.status(f"sampling: {case.shape.title}, {name}"):
            timing = measure_sampling(variant, device=device, repeats=repeats, profile=profile)
        record = timing_record("sample", name, variant, timing, device)
        record |= {
            "tokens_per_second": variant.tokens / timing.median,
            **_profile(timing, length=variant.profiled_length),
        }
        _keep(out, record)
        rows.append(record)
    reference = sampling_reference(case) if _on_the_card(device) else None
    beside = [] if reference is None else [(reference[1], reference[0], None)]
    texts = f"{_number(case.batch_size, 'text')} of {case.length} tokens"
    _print(console, f"Sampling, {case.shape.title}: {texts}, {case.dtype}", rows, beside, device)
    _explain(console, rows, beside, timed="run", tokens="written, all texts together")
    few = f"{_number(case.batch_size, 'text')} of {case.profiled_length} tokens"
    profiled = f"one more run of each variant, of {few}"
    if case.profiled_length < case.length:
        profiled += f" instead of {case.length}, to keep it small"
    _print_profiles(console, rows, device, "run", profiled)
    return rows


def bench_attention(
    case: AttentionCase,
    variants: Sequence[str],
    *,
    device: torch.device,
    repeats: int = BenchAttention.repeats,
    out: Path | None = None,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Time one layer's attention with several kernels, forward alone and with the backward pass."""
    console = console or Console()
    chosen = _choose(variants, _ATTENTION, case)
    _check_folder(out)
    chosen = _without_repetitions(chosen, device, console)
    rows = []
    for backward, passes in ((False, "forward"), (True, "forward and backward")):
        alike = []
        for name, variant in chosen.items():
            with console.status(f"attention, {passes}: {case.title}, {name}"):
                timed = replace(variant, backward=backward)
                timing = measure_attention(timed, device=device, repeats=repeats)
            record = timing_record("attention", name, timed, timing, device)
            record |= {"tokens_per_second": case.batch_size * case.shape.context / timing.median}
            _keep(out, record)
            alike.append(record)
        _print(console, f"Attention of one layer, {passes}, {case.title}", alike, [], device)
        rows += alike
    _explain(console, rows, [], timed="call", tokens="of the texts, through this one layer")
    return rows


def _choose(
    variants: Sequence[str], known: Mapping[str, Callable[[Case], Case]], case: Case
) -> dict[str, Case]:
    """The case under each of the named variants; all names are checked before the first is timed."""
    for name in variants:
        if name not in known:
            title = case.shape.method_title
            raise ValueError(f"variants of {title} must be among {', '.join(known)}, got {name!r}")
    if not variants:
        raise ValueError(f"variants must name at least one of {', '.join(known)}, got none")
    return {name: known[name](case) for name in variants}


def _without_repetitions(
    cases: Mapping[str, Case], device: torch.device, console: Console
) -> dict[str, Case]:
    """Leave out variants that compute the same on this device as an earlier one, and say which."""
    names: dict[Case, str] = {}
    kept = {}
    for name, case in cases.items():
        first = names.setdefault(case.as_computed(device), name)
        if first == name:
            kept[name] = case
        else:
            console.print(f"{name} is left out: on this device it is the same computation as {first}.")
    return kept


def _check_folder(out: Path | None) -> None:
    """Refuse an --out that cannot be written, before anything is timed."""
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out must be in an existing folder, and {out.parent} is not one")


def _profile(timing: Timing, **more: Any) -> dict[str, Any]:
    return {} if timing.profile is None else {"profile": asdict(timing.profile) | more}


def _keep(out: Path | None, record: Mapping[str, Any]) -> None:
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _print(
    console: Console,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    reference: Sequence[tuple[str, float, float | None]],
    device: torch.device,
) -> None:
    """Print a table of the rows, with other people's figures below; empty columns are left out."""
    first = rows[0]["seconds"]["median"]
    lines = [("variant", "ms", "least, most", "tokens/s", "time", "GiB", "used")]
    for row in rows:
        seconds, used = row["seconds"], row.get("utilisation")
        lines.append(
            (
                row["variant"],
                f"{1e3 * seconds['median']:.2f}",
                f"{1e3 * seconds['least']:.2f}, {1e3 * seconds['most']:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                f"x {seconds['median'] / first:.2f}",
                _gibibytes(row["peak_gib"]),
                "" if used is None else f"{used:.0%}",
            )
        )
    for name, rate, memory in reference:
        lines.append((name, "", "", f"{rate:,.0f}", "", _gibibytes(memory), ""))
    table = Table(title=f"{title}, on {device_name(device)}")
    headings, *body = zip(*(column for column in zip(*lines, strict=True) if any(column[1:])), strict=True)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for line in body:
        table.add_row(*line)
    console.print(table)


def _explain(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    reference: Sequence[tuple[str, float, float | None]],
    *,
    timed: str,
    tokens: str,
    more: str | None = None,
) -> None:
    """Print the meaning of the columns, and the source of other people's figures."""
    columns = [
        f"ms is the median of {_number(rows[0]['repeats'], timed)} after warm-up; least and most are the "
        "fastest and the slowest",
        f"tokens/s counts tokens {tokens}",
        "time is relative to the first row",
    ]
    if any(row["peak_gib"] is not None for row in rows):
        columns.append("GiB is the peak memory")
    if more is not None:
        columns.append(more)
    console.print("; ".join(columns) + ".", soft_wrap=True, highlight=False)
    for name, *_ in reference:
        console.print(f"'{name}' {PROVENANCE}.", soft_wrap=True, highlight=False)


def _print_profiles(
    console: Console, rows: Sequence[Mapping[str, Any]], device: torch.device, unit: str, profiled: str
) -> None:
    """Print where the time of a step or a run goes, a table for each profiled variant."""
    profiles = {row["variant"]: row["profile"] for row in rows if "profile" in row}
    on_gpu = device.type == "cuda"
    for variant, profile in profiles.items():
        total = sum(profile["groups"].values())
        table = Table(title=f"Where the time of a {unit} goes, {variant}")
        table.add_column("kernels" if on_gpu else "operators")
        table.add_column("ms", justify="right")
        table.add_column("share", justify="right")
        for group, seconds in profile["groups"].items():
            table.add_row(group, f"{1e3 * seconds:.2f}", f"{seconds / total:.0%}")
        table.add_section()
        table.add_row("all of them", f"{1e3 * total:.2f}", "")
        table.add_row(f"{unit} without the profiler", f"{1e3 * profile['seconds']:.2f}", "")
        if on_gpu:
            table.add_row("no kernel runs", "", f"{profile['idle']:.0%}")
        console.print(table)
    if not profiles:
        return
    lines = [
        f"profiled: {profiled}",
        f"share is of all {'kernels' if on_gpu else 'operators'} listed",
    ]
    if on_gpu:
        lines += [
            f"ms is the time in kernels per {unit}; overlapping kernels can add up to more than the {unit}",
            "no kernel runs: share of the time between the first and the last kernel, while the profiler "
            "slows the host",
        ]
    else:
        lines.append(
            f"ms is the time in operators per {unit}, slowed by the profiler and without Python's share"
        )
    console.print("; ".join(lines) + ".", soft_wrap=True, highlight=False)


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _gibibytes(memory: float | None) -> str:
    return "" if memory is None else f"{memory:.1f}"


def _on_the_card(device: torch.device) -> bool:
    return device.type == "cuda" and CARD in torch.cuda.get_device_name(device)
