"""Block diffusion language models: train them, prove them, sample them fast, compare them honestly.

>>> lm = bd3lm.load("box")  # the model that comes with this package; or a run, a folder, a hub id
>>> print(lm.generate("Once upon a time", max_new_tokens=40)[0])
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bd3lm.lm import Gap, Generation, LanguageModel, Settings, TextLikelihood, load

__version__ = "0.2.0"
__all__ = ["Gap", "Generation", "LanguageModel", "Settings", "TextLikelihood", "load"]


def __getattr__(name: str) -> Any:
    """What `__all__` names, imported when first used, so that `import bd3lm` is quick."""
    if name in __all__:
        from bd3lm import lm

        return getattr(lm, name)
    raise AttributeError(f"module 'bd3lm' has no attribute {name!r}")


def __dir__() -> list[str]:
    rooms = [name for name, value in globals().items() if isinstance(value, ModuleType)]
    return [*__all__, "__version__", *rooms]
