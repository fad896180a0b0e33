"""Statistics since the last log: sums kept on the device, which the host reads only to log them."""

import time

import torch
from torch import Tensor

Metrics = dict[str, float]


class LogWindow:
    """Sums on the device since the last log."""

    def __init__(self) -> None:
        self._totals: Tensor | None = None
        self._norm: Tensor | None = None
        self._rate = 0.0
        self._tokens = 0  # tokens of text, scored or not, that were read in these seconds
        self._seconds = 0.0
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Do not count the time since the last step (validation, saving) as training."""
        self._since = time.perf_counter()

    def add(self, totals: Tensor, norm: Tensor, rate: float, tokens: int) -> None:
        """Add a step: its sums of nats, auxiliary nats and weights, and how many tokens of text it read."""
        self._totals = totals if self._totals is None else self._totals + totals
        self._norm, self._rate = norm, rate
        self._tokens += tokens
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now

    def sums(self) -> list[float]:
        return [] if self._totals is None else self._totals.tolist()

    def restore(self, sums: list[float], device: torch.device) -> None:
        """Continue from the sums of an earlier process. Speed is measured anew, from the steps of this
        process alone."""
        self._norm, self._tokens, self._seconds = None, 0, 0.0
        self._totals = torch.tensor(sums, dtype=torch.float64, device=device) if sums else None

    def last_norm(self) -> float:
        return 0.0 if self._norm is None else self._norm.item()

    def averages(self) -> Metrics:
        if self._totals is None or self._norm is None:
            raise RuntimeError("no step was trained since the last log")
        nats, auxiliary, weight = self._totals.tolist()
        norm = self._norm.item()
        self._seconds += time.perf_counter() - self._since
        metrics = {
            "train_nats": nats / max(weight, 1.0),
            "learning_rate": self._rate,
            "gradient_norm": norm,
            "tokens_per_second": self._tokens / max(self._seconds, 1e-9),
        }
        if auxiliary:
            metrics["auxiliary_nats"] = auxiliary / max(weight, 1.0)
        self._totals, self._tokens, self._seconds = None, 0, 0.0
        self.restart()
        return metrics
