"""Sampling text from a network."""

from bd3lm.sampling.blocks import Samples, sample_blocks

__all__ = ["Samples", "sample_blocks"]
