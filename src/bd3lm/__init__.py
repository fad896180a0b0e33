"""Block diffusion language models: train them, prove them, sample them fast, compare them honestly."""

__version__ = "0.1.0"
