"""The training loop. It is independent of the method: an objective gives sums to minimize, callbacks watch.

Data order, noise and dropout are functions of (seed, step). A run has no hidden state besides its weights,
optimizer, EMA and what the objective has learned, so a resumed run continues as if it had never stopped.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from bd3lm.diffusion import Draws, derive_seed
from bd3lm.models import Network
from bd3lm.objectives import Objective, TokenBatch
from bd3lm.training.checkpoint import CheckpointStore, optimizer_groups
from bd3lm.training.distributed import Engine, FirstWeights, fill
from bd3lm.training.ema import EMA
from bd3lm.training.index import INDEX, Damaged, parsed
from bd3lm.training.log_window import LogWindow, Metrics
from bd3lm.training.optim import apply_gradients, learning_rate, make_optimizer
from bd3lm.training.settings import OptimizerSettings, Precision, TrainSettings
from bd3lm.training.signals import stop_requests
from bd3lm.training.state import SUMS, RunState
from bd3lm.training.step import NetworkRunner, training_sums

_MIN_STEPS_TO_COMPILE = 200  # compiling takes about a minute; fewer steps do not make up for it
T = TypeVar("T")


class Batches(Protocol):
    """The global batch as a function of the step. Ranks and micro-batches take rows of it."""

    @property
    def context(self) -> int:
        """Tokens in a sequence."""

    def batch(self, step: int, rows: slice | None = None) -> TokenBatch:
        """Tokens on the CPU, and which of them to predict."""


class Callback(Protocol):
    """Watches a run. It is called on every rank; write files only on the main one."""

    def on_start(self, trainer: "Trainer") -> None:
        """Called before the first step, after a checkpoint was restored."""

    def on_log(self, trainer: "Trainer", metrics: Metrics) -> None:
        """Called every `log_every` steps, and after each validation."""

    def on_end(self, trainer: "Trainer") -> None:
        """Called after the last step, also if the run was stopped or failed."""


Validator = Callable[["Trainer"], Metrics]
"""Measures the network, in evaluation mode with its EMA weights. It may replace `trainer.objective`."""


class Trainer:
    """A run: network, objective, data, optimizer, EMA and checkpoints, advanced step by step."""

    def __init__(
        self,
        *,
        network: Network,
        objective: Objective,
        data: Batches,
        settings: TrainSettings,
        optimizer: OptimizerSettings,
        engine: Engine,
        store: CheckpointStore,
        first_weights: FirstWeights | None = None,
        validators: Sequence[Validator] = (),
        callbacks: Sequence[Callback] = (),
        run_state: Mapping[str, Any] | None = None,
    ) -> None:
        """`run_state` is JSON that every checkpoint contains (the resolved config, fingerprints). A network
        on torch's device "meta" needs `first_weights`; see `Engine.wrap`."""
        compiled = _compiles(settings, network, engine.device, done=store.latest() or 0)
        settings = replace(settings, compile=compiled)
        self.network, self.data, self.settings, self.engine, self.store = (
            network,
            data,
            settings,
            engine,
            store,
        )
        self.optimizer_settings = optimizer
        self.validators, self.callbacks = list(validators), list(callbacks)
        self.run_state = dict(run_state or {})
        self.step = 0
        self.resumed_at = 0
        self.stopped_by: Literal["steps", "signal"] = "steps"
        self.validation_due = False
        self._unlogged: Metrics = {}  # of a step with a pending validation
        self._rows = rank_rows(settings, engine)
        self.precision = _resolve(settings.precision, engine.device)
        self.objective = objective
        if settings.recompute_activations:
            _recompute(network)
        if settings.compile:
            network.compile_layers() if engine.parallel == "fsdp" else network.compile_trunk()
        mixed = torch.bfloat16 if self.precision == "bf16" and engine.parallel != "fsdp" else None
        self._wrapped = engine.wrap(
            NetworkRunner(network, autocast=mixed), layers=network.sharded_layers, precision=self.precision
        )
        if first_weights is not None:
            fill(network, first_weights)
        # Frozen parameters have no moments and no average, and no checkpoint holds them: they stay as loaded.
        self._named: dict[str, Tensor] = {
            name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad
        }
        self._optimizer = make_optimizer(optimizer, self._named, engine.device)
        self.ema = EMA(self._named, decay=settings.ema_decay)
        self._window = LogWindow()
        self._statistics: dict[str, Tensor] = {}

    @property
    def tokens_seen(self) -> int:
        """Tokens read so far, over all devices."""
        return self.step * self.settings.global_batch * self.data.context

    def apply(self, work: Callable[[Network], T]) -> T:
        """Run work on the network as it is trained: wrapped, in mixed precision. All ranks must take part."""
        done: T = self._wrapped(work)
        return done

    def run(self) -> None:
        """Train to the last step, or until SIGTERM or Ctrl-C asks to stop. Both save before returning."""
        with stop_requests(self._answer_to_signal) as stop_requested:
            for callback in self.callbacks:
                callback.on_start(self)
            try:
                self._window.restart()
                if self.validation_due:  # the run was stopped before this validation
                    self._validate(self._unlogged)
                while self.step < self.settings.steps:
                    self.train_step()
                    stopping = self.engine.any_true(stop_requested())
                    self._after_step(stopping)
                    if stopping:
                        self.stopped_by = "signal"
                        break
            finally:
                for callback in self.callbacks:
                    callback.on_end(self)

    def _answer_to_signal(self) -> str:
        """The answer to a signal that asks to stop. One process prints it for all."""
        if not self.engine.is_main:
            return ""
        step = min(self.step + 1, self.settings.steps)
        return f"finishing step {step}, then saving; press Ctrl-C again to quit at once"

    def train_step(self) -> None:
        """One step: the global batch forward and backward, then the optimizer and the average."""
        settings, engine = self.settings, self.engine
        objective = self.objective
        self.network.train()
        rate = learning_rate(self.optimizer_settings, self.step, settings.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        draws = self._draws()
        totals = torch.zeros(SUMS, dtype=torch.float64, device=engine.device)
        # The exact denominator, the global sum of weights, is known only after the last micro-batch. So
        # losses are divided by a nominal one, which keeps gradients at a sane scale, and corrected once at
        # the end.
        tokens = settings.global_batch * self.data.context
        nominal = float(tokens)
        with torch.random.fork_rng(devices=[]):  # on any device, dropout draws its seeds on the CPU
            for index, rows in enumerate(self._rows):
                batch = self._batch(rows)
                torch.default_generator.manual_seed(
                    derive_seed(settings.seed, "dropout", self.step, rows.start)
                )
                with engine.accumulating(self._wrapped, last=index == len(self._rows) - 1):
                    own = None if draws is None else draws[rows]
                    sums = self.apply(partial(training_sums, objective=objective, batch=batch, draws=own))
                    (sums.loss * (engine.gradient_scale / nominal)).backward()
                totals += torch.stack((sums.nats, sums.auxiliary, sums.weight)).double()
                self._collect(sums.statistics)
        engine.all_reduce_sum(totals)
        factor = nominal / totals[2].clamp_min(1.0)
        norm = apply_gradients(
            self._optimizer,
            list(self._named.values()),
            factor=factor.float(),
            clip_norm=self.optimizer_settings.clip_norm,
            engine=engine,
        )
        self.ema.update()
        self._window.add(totals, norm, rate, tokens)
        self.step += 1

    def _after_step(self, stopping: bool) -> None:
        step, settings = self.step, self.settings
        last = step == settings.steps
        metrics = self._logged() if step % settings.log_every == 0 or last else {}
        if self._statistics and step % settings.adapt_every == 0:
            self._adapt()
        self.validation_due = bool(self.validators) and (step % settings.validate_every == 0 or last)
        self._unlogged = metrics if self.validation_due else {}
        if metrics and not self.validation_due:
            self._log(metrics)  # before the checkpoint: a resumed run then has neither extra nor missing rows
        if step % settings.checkpoint_every == 0 or last or stopping:
            self.save()  # before validation, which may be long: a kill there loses nothing
        if self.validation_due and not stopping:
            self._validate(metrics)

    def _validate(self, metrics: Metrics) -> None:
        """Validate and log. If this step has a checkpoint, write it again with its score and the changes."""
        metrics = metrics | self.validate()
        self.validation_due, self._unlogged = False, {}
        self._log(metrics)
        if self.store.latest() == self.step:
            self.save(metrics.get("valid_nats"))

    def _log(self, metrics: Metrics) -> None:
        for callback in self.callbacks:
            callback.on_log(self, metrics)

    def validate(self) -> Metrics:
        """Run the validators on the EMA weights, in evaluation mode."""
        metrics: Metrics = {}
        self.network.eval()
        with torch.no_grad(), self.ema.swapped_in():
            for validator in self.validators:
                metrics |= validator(self)
        self._window.restart()
        return metrics

    def save(self, score: float | None = None) -> None:
        """Write a checkpoint, unless the loss or a gradient is no longer finite."""
        self.require_finite()
        state = RunState(
            step=self.step,
            objective=dict(self.objective.state()),
            statistics={name: value.tolist() for name, value in self._pooled_statistics().items()},
            ema_updates=self.ema.updates,
            validation_due=self.validation_due,
            since_log=self._window.sums(),
            unlogged=self._unlogged,
            run=self.run_state,
        )
        self.store.save(self.step, self._tensors(), vars(state), engine=self.engine, score=score)
        self._window.restart()

    def resume(self) -> bool:
        """Continue from the newest intact checkpoint. False if there is none."""
        found = self.store.load_into(
            self._tensors(), engine=self.engine, required=False, check_state=self._check_state
        )
        if found is None:
            return False
        state, objective, pooled = self._restored(found)
        self._require_same_inputs(state.run)
        self.step = self.resumed_at = state.step
        self.validation_due, self._unlogged = state.validation_due, state.unlogged
        self._window.restore(state.since_log, self.engine.device)
        # The state after pooling. Every rank has the names, since all must take part when they are pooled
        # again.
        self._statistics = (
            pooled if self.engine.is_main else {name: torch.zeros_like(it) for name, it in pooled.items()}
        )
        self.ema.updates = state.ema_updates
        self.objective = objective
        return True

    def _check_state(self, step: int, found: dict[str, Any]) -> None:
        state, *_ = self._restored(found)
        if state.step != step:
            raise Damaged(f"the state in {INDEX} must have step {step}, got {state.step}")
        if state.ema_updates != step:  # every step updates the averages once
            raise Damaged(f"the state in {INDEX} must have {step} ema_updates, got {state.ema_updates}")

    def _restored(self, found: dict[str, Any]) -> tuple[RunState, Objective, dict[str, Tensor]]:
        """The state of a checkpoint, and the objective and statistics in it. Raises `Damaged` if it is not
        valid."""
        state = parsed(RunState, found, where=f"the state in {INDEX}")
        try:
            objective = self.objective.restore(state.objective)
            pooled = {
                name: torch.tensor(value, dtype=torch.float64, device=self.engine.device)
                for name, value in state.statistics.items()
            }
        except (ValueError, TypeError, RuntimeError) as error:
            raise Damaged(f"the state in {INDEX} cannot be restored: {error}") from error
        return state, objective, pooled

    def _require_same_inputs(self, before: Mapping[str, Any]) -> None:
        """Refuse to continue with data or a tokenizer other than the checkpoint's."""
        for name in ("data_fingerprint", "tokenizer_fingerprint"):
            then, now = before.get(name), self.run_state.get(name)
            if then != now:
                raise ValueError(
                    f"the checkpoint in {self.store.folder} was trained with other inputs: {name} was "
                    f"{str(then)[:12]}, now {str(now)[:12]}"
                )

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything in a checkpoint except the JSON. Filling these tensors in place restores the run."""
        groups = optimizer_groups(self._optimizer, self._named)
        return {"model": self._named, "ema": self.ema.tensors(), **groups}

    def _batch(self, rows: slice) -> TokenBatch:
        """Rows of the global batch on the host, where objectives draw their masks before sending them on."""
        return self.data.batch(self.step, rows)

    def _draws(self) -> Draws | None:
        """The noise of the global batch: the same on every rank, and on every kind of device."""
        generator = torch.Generator().manual_seed(derive_seed(self.settings.seed, "masks", self.step))
        return self.objective.draw(
            self.settings.global_batch, self.data.context, generator=generator, device="cpu"
        )

    def _collect(self, statistics: Mapping[str, Tensor]) -> None:
        for name, value in statistics.items():
            self._statistics[name] = self._statistics.get(name, torch.zeros_like(value)) + value

    def _pooled_statistics(self) -> dict[str, Tensor]:
        """The sum over ranks. The main rank continues from it, the others from zero."""
        pooled = {}
        for name, value in self._statistics.items():
            self.engine.all_reduce_sum(value)
            pooled[name] = value
            self._statistics[name] = value if self.engine.is_main else torch.zeros_like(value)
        return pooled

    def _adapt(self) -> None:
        self.objective = self.objective.adapt(self._pooled_statistics())
        self._statistics = {}

    def _logged(self) -> Metrics:
        """Averages since the last time. Here the host waits for the device."""
        self.require_finite()
        return self._window.averages()

    def require_finite(self) -> None:
        """Raise if a loss since the last log, or the last gradient, is not finite."""
        if not all(map(math.isfinite, [*self._window.sums(), self._window.last_norm()])):
            none = self.store.latest() is None
            kept = "there is no checkpoint" if none else "the last checkpoint is intact"
            raise FloatingPointError(
                f"the loss or its gradient is not finite (seen at step {self.step}); {kept}. Lower "
                "the learning rate, or look at the data around that step"
            )


def rank_rows(settings: TrainSettings, engine: Engine) -> list[slice]:
    """This rank's rows of the global batch, cut into micro-batches."""
    share, rest = divmod(settings.global_batch, engine.world)
    if rest:
        raise ValueError(
            f"global_batch must be a multiple of the number of processes {engine.world}, "
            f"got {settings.global_batch}"
        )
    micro = settings.micro_batch or share
    if share % micro:
        raise ValueError(
            f"micro_batch must divide each process's share of the global batch, {share} sequences, "
            f"got {micro}"
        )
    first = engine.rank * share
    return [slice(start, start + micro) for start in range(first, first + share, micro)]


def _resolve(precision: Precision, device: torch.device) -> Literal["fp32", "bf16"]:
    if precision == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return precision


def _recompute(network: Network) -> None:
    if not network.can_recompute:
        raise ValueError(
            f"train.recompute_activations must be false for a network of kind {network.config.kind}, whose "
            "layers cannot be recomputed, got true"
        )
    network.recompute_layers()


def _compiles(settings: TrainSettings, network: Network, device: torch.device, *, done: int) -> bool:
    if settings.compile is True and not network.can_compile:
        raise ValueError(
            f"train.compile must be false or auto for a network of kind {network.config.kind}, which has "
            "nothing to compile, got true"
        )
    if settings.compile == "auto":
        return (
            network.can_compile and device.type == "cuda" and settings.steps - done >= _MIN_STEPS_TO_COMPILE
        )
    return settings.compile
