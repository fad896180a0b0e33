"""Benchmarks for `bd3lm bench`: training, forward passes, sampling and attention, each with a baseline."""

from bd3lm.bench.attention import AttentionCase, measure_attention
from bd3lm.bench.forward import measure_forward
from bd3lm.bench.profile import Kernel, Profile
from bd3lm.bench.records import device_name, timing_record, training_record
from bd3lm.bench.sampling import SamplingCase, measure_sampling
from bd3lm.bench.shapes import Shape
from bd3lm.bench.timing import Timing, matrix_rate
from bd3lm.bench.training import PROFILED_STEPS, TrainingCase, measure_training

__all__ = [
    "PROFILED_STEPS",
    "AttentionCase",
    "Kernel",
    "Profile",
    "SamplingCase",
    "Shape",
    "Timing",
    "TrainingCase",
    "device_name",
    "matrix_rate",
    "measure_attention",
    "measure_forward",
    "measure_sampling",
    "measure_training",
    "timing_record",
    "training_record",
]
