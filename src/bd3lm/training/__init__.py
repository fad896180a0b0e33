"""Training: the loop, the engine under it, checkpoints, and who watches."""

from bd3lm.models.devices import pick_device
from bd3lm.training.callbacks import CsvLog, ProgressBar, TensorBoardLog, WandbLog
from bd3lm.training.checkpoint import CheckpointStore
from bd3lm.training.clipping import ClipChoice, choose_range, range_moments
from bd3lm.training.distributed import Engine
from bd3lm.training.ema import EMA
from bd3lm.training.log_window import Metrics
from bd3lm.training.optim import OptimizerSettings, learning_rate
from bd3lm.training.trainer import Callback, Trainer, TrainSettings, Validator
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
    "TensorBoardLog",
    "TrainSettings",
    "Trainer",
    "Validator",
    "WandbLog",
    "choose_range",
    "learning_rate",
    "pick_device",
    "range_moments",
]
