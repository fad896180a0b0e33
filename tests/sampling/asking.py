"""Requests with what ends their texts, and with how their tokens are drawn."""

from collections.abc import Sequence
from dataclasses import replace

from bd3lm.sampling import Request, Sharpening, Stopping


def ending(requests: Sequence[Request], stopping: Stopping | None) -> list[Request]:
    return [replace(request, stopping=stopping or Stopping()) for request in requests]


def drawn_by(requests: Sequence[Request], sharpening: Sharpening | None) -> list[Request]:
    return [replace(request, sharpening=sharpening or Sharpening()) for request in requests]
