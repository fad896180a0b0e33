"""A run of the list, trained: the library's own trainer, watched, and the model that comes out of it."""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch._dynamo.utils import counters

from bd3lm.interop import RUN_MODEL
from bd3lm.lm import LanguageModel
from bd3lm.models import Transformer
from bd3lm.runs import plan as run_plan
from bd3lm.runs.merging import merge
from bd3lm.training import CheckpointStore, ClipSearchValidator, Engine, Metrics, Trainer, Validator
from research.evidence.measures import TRAINED_ON
from research.evidence.results import Results
from research.evidence.runs import Run
from research.evidence.settings import Settings, recipe

_TIMED = 80  # steps
_GRAPHS = 256  # in one process; dynamo's own limit is eight, past which it computes eagerly without a word


@dataclass(frozen=True)
class Place:
    """Where things are: the prepared data, the weights that other runs start from, the device, the code."""

    data: Path
    weights: Path
    engine: Engine
    commit: str | None = None
    others: int = 0  # that work on the device at the same time: steps are not timed

    def model_of(self, run: Run) -> Path:
        """The folder with the weights of a run that is a parent."""
        return self.weights / run.digest / RUN_MODEL


def train(run: Run, place: Place, results: Results, *, keep: bool) -> LanguageModel:
    """Train a run, record how it went, and `keep` its weights where others start from them.

    Runs of one shape share their compiled graphs, although each builds a network of its own: dynamo keeps
    graphs by code and takes parameters as inputs.
    """
    number, budget = run_steps(run, results), run_budget(run, results)
    start = None if run.parent is None else str(place.model_of(run.parent))
    graphs, begun = counters["stats"]["unique_graphs"], time.perf_counter()
    # Of what is trained again, for a run that starts from it, the curve is known.
    watch = _Watch(run, None if results.of(run, "trained") else results)
    built = _train(run, {"train": {"steps": number}, "start_from": start}, place, watch)
    trainer = built.trainer
    results.add(
        "trained",
        run,
        table=run.table,
        training=run.kind,
        shape=run.shape,
        cost=run.cost,
        steps=number,
        budget=budget,
        tokens=trainer.tokens_seen,
        seconds=time.perf_counter() - begun,
        step_seconds=None if place.others else watch.step_seconds(),
        graphs=counters["stats"]["unique_graphs"] - graphs,
        parent=run.parent and run.parent.key,
        learned=trainer.objective.state(),
        device=_device_name(place.engine.device),
        torch=torch.__version__,
        precision=trainer.precision,
        data=built.shards.fingerprint[:16],
        commit=place.commit,
    )
    if keep:
        built.export()
    network = _averaged(built, place.engine.device)
    model = LanguageModel(network, built.config, built.tokenizer)
    del built, trainer
    gc.collect()
    if place.engine.device.type == "cuda":
        torch.cuda.empty_cache()
    return model


def time_steps(run: Run, place: Place, results: Results) -> None:
    """Time the first steps of a run, and keep nothing else of it.

    It is the whole run that is begun: a shorter one would not be compiled.
    """
    watch = _Watch(run, None, until=_TIMED)
    with suppress(_Enough):
        _train(run, {"train": {"log_every": _TIMED // 4}}, place, watch, search=False)
    results.add(
        "timed",
        run,
        training=run.kind,
        cost=run.cost,
        step_seconds=watch.step_seconds(),
        as_trained=True,
        device=_device_name(place.engine.device),
        torch=torch.__version__,
        commit=place.commit,
    )


def _train(
    run: Run, changes: Settings, place: Place, watch: "_Watch", *, search: bool = True
) -> run_plan.Run:
    torch._dynamo.config.recompile_limit = _GRAPHS
    settings = merge(run.settings, {"data": {"path": str(place.data / TRAINED_ON)}}, changes)
    asked = recipe(settings, where=run.key)
    built = run_plan.plan_run(asked, place.weights / run.digest, engine=place.engine).build()
    trainer = built.trainer
    trainer.callbacks = [watch]
    trainer.store = _Unkept(built.out)
    # Held-out likelihoods are measured afterwards, once, with nothing to compile.
    trainer.validators = [_eagerly(each) for each in trainer.validators if search and _is_search(each)]
    trainer.run()
    if trainer.stopped_by == "signal":
        raise SystemExit(f"stopped while training {run.key}; what was measured before is kept")
    return built


def run_steps(run: Run, results: Results) -> int:
    """As many as its settings say, or as make the time of another run together with the parents' steps.

    All of them must have been timed, or runs of the same cost.
    """
    other, known = run.same_time_as, run_budget(run, results)
    if other is None or known is None:
        return run.steps
    left = other.steps * known[other.key]
    left -= sum(each.steps * known[each.key] for each in run.lineage[:-1])
    return max(1, round(left / known[run.key]))


def run_budget(run: Run, results: Results) -> dict[str, float] | None:
    """The step times by which a run gets another's time: of the two and of its parents; else None."""
    if run.same_time_as is None:
        return None
    spent = {each.key: results.step_seconds(each.cost) for each in (*run.lineage, run.same_time_as)}
    if unknown := [name for name, seconds in spent.items() if seconds is None]:
        raise ValueError(
            f"{run.key} needs the time of a step of runs like {', '.join(unknown)}, not timed yet"
        )
    return {name: seconds for name, seconds in spent.items() if seconds is not None}


class _Enough(Exception):
    """The steps that were to be seen have been."""


class _Watch:
    """Times the steps, and writes the training curve down where there are results to write to."""

    def __init__(self, run: Run, results: Results | None, *, until: int | None = None) -> None:
        self._run, self._results, self._until = run, results, until
        self._seen: list[tuple[int, float, bool]] = []

    def on_start(self, trainer: Trainer) -> None:
        pass

    def on_log(self, trainer: Trainer, metrics: Metrics) -> None:
        self._seen.append((trainer.step, time.perf_counter(), "clip_low" in metrics))
        if self._results is not None:
            kept = {name: value for name, value in metrics.items() if name != "tokens_per_second"}
            self._results.add("step", self._run, step=trainer.step, **_rounded(kept))
        if trainer.step == self._until:
            raise _Enough

    def on_end(self, trainer: Trainer) -> None:
        pass

    def step_seconds(self) -> float | None:
        """The median of windows without a clip search, after the first, in which it was compiled.

        None where a run was over before a second window.
        """
        windows = [
            ((later[1] - earlier[1]) / (later[0] - earlier[0]), later[2])
            for earlier, later in pairwise(self._seen)
        ]
        timed = [spent for spent, searched in windows if not searched] or [each for each, _ in windows]
        return median(timed) if timed else None


class _Unkept(CheckpointStore):
    """A checkpoint takes longer to write than a run of this size to reach it again."""

    def save(self, step: int, *args: Any, **options: Any) -> Path:
        return self.folder


def _is_search(validator: Validator) -> bool:
    return isinstance(validator, ClipSearchValidator)


def _eagerly(validator: Validator) -> Validator:
    """A few passes without gradients are done before they could be compiled."""

    def measure(trainer: Trainer) -> Metrics:
        with torch.compiler.set_stance("force_eager"), dense_attention(trainer.network):
            return validator(trainer)

    return measure


@contextmanager
def dense_attention(network: Transformer) -> Iterator[None]:
    """Attention by a dense mask, which needs no compiler."""
    before, network.attention_backend = network.attention_backend, "dense"
    try:
        yield
    finally:
        network.attention_backend = before


def _averaged(built: run_plan.Run, device: torch.device) -> Transformer:
    """A network that holds the averaged weights, not compiled, in evaluation mode."""
    with device:
        network = Transformer(built.config.network)
    # Tied, the head is the embedding, which is averaged once.
    network.load_state_dict(built.trainer.ema.tensors(), strict=not built.config.network.tied)
    return network.eval().requires_grad_(False)


def _rounded(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in metrics.items()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
