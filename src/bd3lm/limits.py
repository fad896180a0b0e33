"""What some settings may be, known before torch is there to use them: flags are checked at once."""

import re
from numbers import Integral, Real

_COLDEST, _HOTTEST = 1e-3, 1e3  # where log-probabilities over a temperature surely stay finite
MOST_ALTERNATIVES = 20  # of a token: as many as OpenAI's clients may ask for
_MOST_LEAN = 1e6  # far past left to right; lean·(n − 1) stays finite for any block


def check_temperature(temperature: float, name: str = "temperature") -> None:
    """Refuse a temperature at which probabilities might not be finite; 0 takes the likeliest token."""
    if temperature != 0.0 and not _COLDEST <= temperature <= _HOTTEST:
        raise ValueError(
            f"{name} must lie in [{_COLDEST:g}, {_HOTTEST:g}], so that probabilities stay finite, or be 0, "
            f"which always takes the likeliest token, got {temperature}"
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
    """Refuse flags, by their fields, that count something and are below 1; None is left open."""
    for field, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"--{field.replace('_', '-')} must be at least 1, got {count}")


def check_device(device: str, name: str = "device") -> None:
    """Refuse what names no kind of device that bd3lm runs on; whether it is there only torch knows."""
    if re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", device) is None:
        raise ValueError(f"{name} must be cpu, cuda or cuda:N, got {device!r}")
