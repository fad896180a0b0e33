"""Records of measurements: a line of JSON with everything needed to know what was measured."""

import platform
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

import bd3lm
from bd3lm.bench.timing import Timing
from bd3lm.bench.training import TrainingCase


def timing_record(kind: str, name: str, case: Any, timing: Timing, device: torch.device) -> dict[str, Any]:
    """The record of a measurement: the case, a dataclass; the seconds per call; the device."""
    return {
        "bench": kind,
        "variant": name,
        "case": asdict(case),
        "seconds": {"median": timing.median, "least": timing.spread[0], "most": timing.spread[1]},
        "repeats": len(timing.seconds),
        "each": [round(seconds, 7) for seconds in timing.seconds],
        "peak_gib": None if timing.peak_bytes is None else timing.peak_bytes / 2**30,
        "device": device_name(device),
        "torch": torch.__version__,
        "bd3lm": bd3lm.__version__,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def training_record(
    name: str, case: TrainingCase, timing: Timing, device: torch.device, *, rate: float
) -> dict[str, Any]:
    """The record of a training step; `rate` is the FLOP/s that a large matrix product reached in the same
    run."""
    flops = case.shape.training_flops(case.batch_size)
    return {
        **timing_record("train", name, case, timing, device),
        "tokens_per_second": case.batch_size * case.shape.context / timing.median,
        "utilisation": flops / timing.median / rate,
        "matrix_tflops": rate / 1e12,
    }


def device_name(device: torch.device) -> str:
    """The name of a device as people know it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads != 1)}"
