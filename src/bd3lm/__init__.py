"""Block diffusion language models: train them, prove them, sample them fast, compare them honestly."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bd3lm.lm import LanguageModel, load

__version__ = "0.1.0"
__all__ = ["LanguageModel", "load"]


def __getattr__(name: str) -> Any:
    """`bd3lm.load` and `bd3lm.LanguageModel`, imported when first used, so that `import bd3lm` is quick."""
    if name in __all__:
        from bd3lm import lm

        return getattr(lm, name)
    raise AttributeError(f"module 'bd3lm' has no attribute {name!r}")
