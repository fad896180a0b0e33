"""Training: the loop, the distributed engine, checkpoints, progress and trackers.

Settings can be read and checked without torch: modules that need torch load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bd3lm.training.settings import OptimizerSettings, TrainSettings

if TYPE_CHECKING:
    from bd3lm.models.devices import pick_device
    from bd3lm.training.callbacks import CsvLog, ProgressBar
    from bd3lm.training.checkpoint import CheckpointStore
    from bd3lm.training.clipping import ClipChoice, choose_range, range_moments
    from bd3lm.training.distributed import Engine
    from bd3lm.training.ema import EMA
    from bd3lm.training.log_window import Metrics
    from bd3lm.training.optim import learning_rate
    from bd3lm.training.trackers import SampleText, TensorBoardLog, Tracker, WandbLog
    from bd3lm.training.trainer import Callback, Trainer, Validator
    from bd3lm.training.validation import (
        ClipSearchValidator,
        GradientVarianceValidator,
        HeldOut,
        LikelihoodValidator,
        NelboVarianceValidator,
    )

__all__ = [
    "EMA",
    "Callback",
    "CheckpointStore",
    "ClipChoice",
    "ClipSearchValidator",
    "CsvLog",
    "Engine",
    "GradientVarianceValidator",
    "HeldOut",
    "LikelihoodValidator",
    "Metrics",
    "NelboVarianceValidator",
    "OptimizerSettings",
    "ProgressBar",
    "SampleText",
    "TensorBoardLog",
    "Tracker",
    "TrainSettings",
    "Trainer",
    "Validator",
    "WandbLog",
    "choose_range",
    "learning_rate",
    "pick_device",
    "range_moments",
]

_MODULES = {
    "bd3lm.models.devices": ("pick_device",),
    "bd3lm.training.callbacks": ("CsvLog", "ProgressBar"),
    "bd3lm.training.checkpoint": ("CheckpointStore",),
    "bd3lm.training.clipping": ("ClipChoice", "choose_range", "range_moments"),
    "bd3lm.training.distributed": ("Engine",),
    "bd3lm.training.ema": ("EMA",),
    "bd3lm.training.log_window": ("Metrics",),
    "bd3lm.training.optim": ("learning_rate",),
    "bd3lm.training.trackers": ("SampleText", "TensorBoardLog", "Tracker", "WandbLog"),
    "bd3lm.training.trainer": ("Callback", "Trainer", "Validator"),
    "bd3lm.training.validation": (
        "ClipSearchValidator",
        "GradientVarianceValidator",
        "HeldOut",
        "LikelihoodValidator",
        "NelboVarianceValidator",
    ),
}
_IMPORTED_WHEN_USED = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_WHEN_USED[name]), name)
