"""Optional packages, imported where they are used."""

import importlib
from typing import Any


def require(module: str, extra: str, purpose: str) -> Any:
    """Import the module, or raise an ImportError that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{purpose} needs the package {package}: pip install 'bd3lm[{extra}]'") from error
