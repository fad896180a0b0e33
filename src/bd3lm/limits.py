"""Ranges of some settings, checked before torch is loaded, so that a wrong flag is reported at once."""

import re
from numbers import Integral, Real

_COLDEST, _HOTTEST = 1e-3, 1e3  # within these, log-probabilities divided by a temperature stay finite
MOST_ALTERNATIVES = 20  # per token: the most that OpenAI's clients may ask for
_MOST_LEAN = 1e6  # practically left to right; lean·(n − 1) stays finite for any block


def check_temperature(temperature: float, name: str = "temperature") -> None:
    """Refuse a temperature that might make probabilities infinite; 0 takes the most likely token."""
    if temperature != 0.0 and not _COLDEST <= temperature <= _HOTTEST:
        raise ValueError(
            f"{name} must lie in [{_COLDEST:g}, {_HOTTEST:g}], or be 0, which always takes the most likely "
            f"token, got {temperature}"
        )


def check_lean(lean: float, name: str = "lean") -> None:
    """Refuse anything but a number from 0 to 1e6."""
    if not isinstance(lean, Real) or isinstance(lean, bool) or not 0.0 <= lean <= _MOST_LEAN:
        raise ValueError(f"{name} must be a number from 0 to 1e6, got {lean!r}")


def check_alternatives(number: int, name: str = "alternatives") -> None:
    """Refuse anything but a whole number from 0 to 20."""
    if not isinstance(number, Integral) or isinstance(number, bool) or not 0 <= number <= MOST_ALTERNATIVES:
        raise ValueError(f"{name} must be a whole number in 0..{MOST_ALTERNATIVES}, got {number!r}")


def check_counts(**counts: int | None) -> None:
    """Refuse counts below 1; None is not checked. The keywords are the fields of the flags."""
    for field, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"--{field.replace('_', '-')} must be at least 1, got {count}")


def check_device(device: str, name: str = "device") -> None:
    """Refuse a name that is no kind of device bd3lm supports. Only torch knows whether the device exists."""
    if re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", device) is None:
        raise ValueError(f"{name} must be cpu, cuda or cuda:N, got {device!r}")
