"""What some settings may be, known before torch is there to use them: flags are checked at once."""

import re

_COLDEST, _HOTTEST = 1e-3, 1e3  # where log-probabilities over a temperature surely stay finite


def check_temperature(temperature: float, name: str = "temperature") -> None:
    """Refuse a temperature at which probabilities might not be finite; 0 takes the likeliest token."""
    if temperature != 0.0 and not _COLDEST <= temperature <= _HOTTEST:
        raise ValueError(
            f"{name} must lie in [{_COLDEST:g}, {_HOTTEST:g}], so that probabilities stay finite, or be 0, "
            f"which always takes the likeliest token, got {temperature}"
        )


def check_device(device: str, name: str = "device") -> None:
    """Refuse what names no kind of device that bd3lm runs on; whether it is there only torch knows."""
    if re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", device) is None:
        raise ValueError(f"{name} must be cpu, cuda or cuda:N, got {device!r}")
