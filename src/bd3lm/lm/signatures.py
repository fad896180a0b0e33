"""Signatures that show the settings of `generate`, for `help` and for completion in notebooks."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

from bd3lm.methods import Settings, SettingsKeywords

F = TypeVar("F", bound=Callable[..., object])


def shows_settings(function: F) -> F:
    """Replace `**changes` in a function's signature by the settings that it accepts, with their defaults.

    Type checkers read `Unpack[SettingsKeywords]`, but `help` and most completers ask `inspect`, which does
    not.
    """
    signature = inspect.signature(function)
    kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    hints = SettingsKeywords.__annotations__
    named = [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
        )
        for each in fields(Settings)
    ]
    function.__signature__ = signature.replace(parameters=[*kept, *named])  # type: ignore[attr-defined]
    return function
