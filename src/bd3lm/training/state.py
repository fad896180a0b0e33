"""The part of a checkpoint's state that is not tensors."""

import math
from dataclasses import dataclass
from typing import Any

SUMS = 3  # per step: nats, auxiliary nats, weight


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Plain values, stored as JSON and checked when read."""

    step: int
    objective: dict[str, Any]
    """What the objective has learned."""
    statistics: dict[str, Any]
    """Numbers, or nested lists of numbers, for the objective to learn from next."""
    ema_updates: int
    validation_due: bool
    since_log: list[float]
    unlogged: dict[str, float]
    run: dict[str, Any]
    """Extra values from the caller that started the run."""

    def __post_init__(self) -> None:
        if self.step < 0 or self.ema_updates < 0:
            raise ValueError(
                f"step and ema_updates must not be negative, got {self.step} and {self.ema_updates}"
            )
        if len(self.since_log) not in (0, SUMS):
            raise ValueError(f"since_log must be {SUMS} sums or empty, got {len(self.since_log)}")
        if not all(map(math.isfinite, self.since_log)) or min(self.since_log[2:], default=0.0) < 0.0:
            raise ValueError(f"since_log must be finite, with a weight of at least 0, got {self.since_log}")
