"""A run small enough to train in a second: the real trainer on a made-up language."""

import csv
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bd3lm.diffusion import ClippedTimes, ClipSearch, LearnedCounts
from bd3lm.models import BlockReading, Transformer, TransformerConfig
from bd3lm.objectives import Autoregressive, BlockDiffusionLoss, Objective, TokenBatch
from bd3lm.training import (
    CheckpointStore,
    ClipSearchValidator,
    CsvLog,
    Engine,
    HeldOut,
    LikelihoodValidator,
    OptimizerSettings,
    Trainer,
    TrainSettings,
)
from tests.oracles.networks import FAMILIES

VOCABULARY, MASK, CONTEXT = 13, 12, 8
ROWS = 4

AR = Autoregressive(mask_id=MASK)
SEARCH = ClipSearch(every=6, batches=3, widths=(0.4, 0.6, 0.8), step=0.2)
COUNTS = BlockDiffusionLoss(reading=BlockReading(block_size=4, mask_id=MASK))
NEXT_TOKEN = BlockDiffusionLoss(
    reading=BlockReading(block_size=4, mask_id=MASK, causal_clean=True), next_token=0.5
)
LEARNED = BlockDiffusionLoss(reading=BlockReading(block_size=4, mask_id=MASK), masking=LearnedCounts())
CLIPPED = BlockDiffusionLoss(
    reading=BlockReading(block_size=4, mask_id=MASK), masking=ClippedTimes(redraw=True, search=SEARCH)
)


def sentences(rows: int, seed: int, length: int = CONTEXT) -> Tensor:
    """Texts in which each token is mostly the previous one plus three."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(MASK, (rows, length), generator=generator)
    follows = torch.rand(rows, length, generator=generator) < 0.8
    for i in range(1, length):
        tokens[:, i] = torch.where(follows[:, i], (tokens[:, i - 1] + 3) % MASK, tokens[:, i])
    return tokens


class Sentences:
    """An endless stream of these texts, a function of the step like a `BatchStream`."""

    def __init__(self, context: int = CONTEXT, rows: int = ROWS, seed: int = 0) -> None:
        self.context, self.rows, self.seed = context, rows, seed

    def batch(self, step: int, rows: slice | None = None) -> TokenBatch:
        tokens = sentences(self.rows, 1000 * self.seed + step + 1, self.context)
        return TokenBatch.of(tokens[rows or slice(None)])


class Watcher:
    """Does something at every log entry."""

    def __init__(self, do: Callable[[Trainer], None]) -> None:
        self.do = do

    def on_start(self, trainer: Trainer) -> None:
        pass

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.do(trainer)

    def on_end(self, trainer: Trainer) -> None:
        pass


class Crash(Exception):
    pass


def crash_at(step: int) -> Watcher:
    """Ends the process here, as far as anybody can tell."""

    def crash(trainer: Trainer) -> None:
        if trainer.step == step:
            raise Crash

    return Watcher(crash)


def signal_at(step: int, number: int) -> Watcher:
    """A signal that arrives during `step` (after the log of the previous step)."""

    def send(trainer: Trainer) -> None:
        if trainer.step == step - 1:
            os.kill(os.getpid(), number)

    return Watcher(send)


def held_out(*texts: Tensor, score_first: bool = False) -> HeldOut:
    return HeldOut([TokenBatch.of(each, score_first=score_first) for each in texts])


HELD_OUT = held_out(sentences(6, 10**6), sentences(6, 10**6 + 1), sentences(5, 10**6 + 2))


def network(*, dropout: float = 0.1, seed: int = 0, family: str = "GPT", **shape: Any) -> Transformer:
    """The mask has the same id whether it is in the vocabulary or outside it."""
    torch.manual_seed(seed)
    values: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "context": CONTEXT}
    values |= FAMILIES[family] | shape
    values["vocab_size"] = MASK if values.get("mask_vector") else VOCABULARY
    model = Transformer(TransformerConfig(dropout=dropout, **values))
    with torch.no_grad():
        for parameter in model.parameters():  # the usual initialization has tiny gradients
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return model


def tiny_trainer(
    folder: Path,
    objective: Objective = COUNTS,
    *callbacks: Any,
    model: Transformer | None = None,
    family: str = "GPT",
    dropout: float = 0.1,
    engine: Engine | None = None,
    validate: bool = True,
    data: Any = None,
    optimizer: OptimizerSettings | None = None,
    **settings: Any,
) -> Trainer:
    """10 steps; checkpoints after 4, 8 and 10, validation after 3, 6, 9 and 10, when a proposal learns
    too."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "steps": 10,
        "global_batch": ROWS,
        "ema_decay": 0.8,
        "log_every": 1,
        "validate_every": 3,
        "checkpoint_every": 4,
        "adapt_every": 3,
        **settings,
    }
    validators: list[Any] = []
    if validate:
        judge = AR if isinstance(objective, Autoregressive) else COUNTS
        validators.append(LikelihoodValidator(HELD_OUT, judge))
    if objective.search is not None and validate:
        validators.append(ClipSearchValidator(HELD_OUT))
    return Trainer(
        network=model or network(dropout=dropout, family=family),
        objective=objective,
        data=data or Sentences(),
        settings=TrainSettings(**values),
        optimizer=optimizer or OptimizerSettings(lr=0.02, warmup_steps=3, weight_decay=0.1, clip_norm=1.0),
        engine=engine or Engine(),
        store=CheckpointStore(folder / "checkpoints", keep_last=3, keep_best=1),
        validators=validators,
        callbacks=[CsvLog(folder / "metrics.csv"), *callbacks],
        run_state={"recipe": "tiny"},
    )


def checkpoint(folder: Path, step: int = 10) -> dict[str, bytes]:
    """Every byte of a checkpoint: weights, averages, moments, what the objective learned and counted."""
    where = folder / "checkpoints" / f"step-{step:08d}"
    return {path.name: path.read_bytes() for path in where.iterdir()}


def state(folder: Path, step: int = 10) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(checkpoint(folder, step)["state.json"])["state"]
    return found


def rows(folder: Path) -> list[dict[str, str]]:
    """The metrics without those that depend on a clock."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)]
