"""The loop: what it computes, that it resumes as if it had never stopped, and how it ends when it must."""

import math
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bd3lm.diffusion import Counts, derive_seed
from bd3lm.models import Transformer
from bd3lm.objectives import Autoregressive, TokenLoss
from bd3lm.training import Engine, OptimizerSettings, Trainer, TrainSettings
from bd3lm.training.log_window import LogWindow
from tests.training.processes import run_processes
from tests.training.tiny import (
    AR,
    CLIPPED,
    COUNTS,
    LEARNED,
    MASK,
    NEXT_TOKEN,
    ROWS,
    Crash,
    Sentences,
    Watcher,
    checkpoint,
    crash_at,
    network,
    rows,
    sentences,
    signal_at,
    state,
    tiny_trainer,
)

pytestmark = pytest.mark.sweep(3)

# --- what a step computes ---


@pytest.mark.parametrize(
    ("objective", "family"),
    [(AR, "GPT"), (NEXT_TOKEN, "Llama"), (COUNTS, "GPT"), (AR, "Qwen3"), (NEXT_TOKEN, "GPT")],
    ids=["ar", "next_token, Llama", "counts", "ar, Qwen3", "next_token"],
)
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_the_trainer_equals_a_plain_loop(objective, family, micro_batch, tmp_path):
    """Warm-up, clipping, weight decay on matrices, AdamW and the EMA, in double precision."""
    plain = network(dropout=0.0, family=family).double()
    settings = OptimizerSettings(lr=0.02, warmup_steps=3, weight_decay=0.1, clip_norm=0.7)
    ours = tiny_trainer(
        tmp_path,
        objective,
        model=network(dropout=0.0, family=family).double(),
        optimizer=settings,
        micro_batch=micro_batch,
        steps=5,
        validate=False,
    )
    named = dict(plain.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and name != "embedding.weight"]
    others = [p for name, p in named.items() if p.ndim == 1 or name == "embedding.weight"]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.999),
        eps=1e-8,
        foreach=False,
    )
    ema = {name: p.detach().clone() for name, p in named.items()}
    norms = []
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, step / 3)
        batch = Sentences().batch(step)
        chance = torch.Generator().manual_seed(derive_seed(0, "masks", step))
        loss = objective(plain, batch, generator=chance)
        total = loss.minimised
        (total / loss.weight.sum()).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.7).item())
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.8, (1 + step + 1) / (10 + step + 1))
        ema = {name: decay * ema[name] + (1 - decay) * named[name].detach() for name in ema}

    ours.run()
    assert min(norms) > 0.7, "a test in which nothing was clipped"
    assert [float(row["gradient_norm"]) for row in rows(tmp_path)] == pytest.approx(norms, rel=1e-6)
    for name, parameter in ours.network.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=0, atol=1e-7)
        torch.testing.assert_close(ours.ema.tensors()[name].double(), ema[name], rtol=0, atol=1e-6)


def test_two_steps_by_hand(tmp_path):
    """One number is trained on the loss 3·w: AdamW moves it by the learning rate, whatever the gradient."""

    @dataclass(frozen=True, kw_only=True)
    class Slope(Autoregressive):
        def loss(self, model, batch, draws=None):
            w = model.output.bias[0]
            weight = torch.ones(batch.tokens.shape)
            return TokenLoss(nats=3.0 * w * weight, weight=weight)

    trainer = tiny_trainer(
        tmp_path,
        Slope(mask_id=MASK),
        validate=False,
        steps=3,
        ema_decay=0.9,
        optimizer=OptimizerSettings(lr=0.1, warmup_steps=2, clip_norm=None),
    )
    seen = []
    trainer.callbacks.append(
        Watcher(
            lambda t: seen.append((t.network.output.bias[0].item(), t.ema.tensors()["output.bias"][0].item()))
        )
    )
    trainer.run()
    # Rates 0, 0.05, 0.1; decays 2/11, 3/12, 4/13, all below 0.9.
    weights = [0.0, -0.05, -0.15]
    averages = [0.0, 9 / 12 * -0.05, 4 / 13 * (9 / 12 * -0.05) + 9 / 13 * -0.15]
    assert [w for w, _ in seen] == pytest.approx(weights, abs=1e-6)
    assert [average for _, average in seen] == pytest.approx(averages, abs=1e-6)
    assert [float(row["learning_rate"]) for row in rows(tmp_path)] == pytest.approx([0.0, 0.05, 0.1])
    assert [float(row["gradient_norm"]) for row in rows(tmp_path)] == pytest.approx([3.0, 3.0, 3.0])


@pytest.mark.parametrize(
    ("objective", "micros", "family"),
    [
        (AR, [2], "GPT"),
        (replace(AR, random_batch=True), [1], "GPT"),  # its parts have unequal weights
        (COUNTS, [2, 1], "GPT"),
        (NEXT_TOKEN, [1], "Llama"),
        (NEXT_TOKEN, [1], "GPT"),
        (LEARNED, [1], "GPT"),
        (COUNTS, [2], "Qwen3"),
        (CLIPPED, [2], "GPT"),
    ],
)
def test_accumulation_is_one_large_batch(objective, micros, family, tmp_path):
    """Without dropout. Sums are taken in another order, so to 1e-5 for weights of order one after ten
    steps."""
    for micro in (ROWS, *micros):
        tiny_trainer(tmp_path / str(micro), objective, dropout=0.0, micro_batch=micro, family=family).run()
    for micro in micros:
        assert worst_difference(tmp_path / str(micro), tmp_path / str(ROWS)) < 1e-5
        for one, other in zip(rows(tmp_path / str(micro)), rows(tmp_path / str(ROWS)), strict=True):
            assert numbers(one) == pytest.approx(numbers(other), rel=1e-4)
        for key, value in state(tmp_path / str(micro))["objective"].items():
            assert value == pytest.approx(state(tmp_path / str(ROWS))["objective"][key], rel=1e-4)


def test_the_loss_is_divided_by_the_tokens_of_the_global_batch(tmp_path):
    """Micro-batches with unequal numbers of scored tokens: not a mean of means."""
    objective = replace(AR, random_batch=True)
    trainer = tiny_trainer(tmp_path, objective, dropout=0.0, micro_batch=1, steps=1, validate=False)
    model = network(dropout=0.0)
    batch = Sentences().batch(0)
    loss = objective(model, batch, generator=torch.Generator().manual_seed(derive_seed(0, "masks", 0)))
    per_row = loss.weight.sum(1)
    assert len(set(per_row.tolist())) > 1
    trainer.run()
    assert float(rows(tmp_path)[0]["train_nats"]) == pytest.approx(loss.mean().item(), rel=1e-5)


# --- stopped and resumed ---

CASES = {
    "ar": AR,
    "random batch": replace(AR, random_batch=True),
    "counts": COUNTS,
    "complementary": replace(COUNTS, masking=Counts(complementary=True)),
    "next token": NEXT_TOKEN,
    "learned proposal": LEARNED,
    "clip search": CLIPPED,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, Path]:
    """Each case trained without interruption."""
    folders = {}
    for name, objective in CASES.items():
        folders[name] = tmp_path_factory.mktemp("whole")
        tiny_trainer(folders[name], objective).run()
    return folders


def assert_same(folder: Path, whole: Path) -> None:
    """Bit for bit: weights, averages, moments, learned and counted statistics, and metrics."""
    assert checkpoint(folder) == checkpoint(whole)
    assert rows(folder) == rows(whole)


def resumed(folder: Path, objective, **options) -> Trainer:
    trainer = tiny_trainer(
        folder, objective, model=network(seed=99), **options
    )  # other weights, to be replaced
    assert trainer.resume()
    return trainer


@pytest.mark.parametrize(
    ("case", "step"),
    [  # what learns, and what does not with its draws, at both
        ("ar", 5),
        ("random batch", 9),
        ("counts", 5),
        ("counts", 9),
        ("complementary", 5),
        ("next token", 9),
        *(("learned proposal", step) for step in (5, 7, 9)),
        *(("clip search", step) for step in (5, 9)),
    ],
)
def test_a_crash_between_checkpoints(case, step, uninterrupted, tmp_path):
    """Checkpoints are after 4 and 8. A proposal learns after 3, 6, 9, so its moments are pending at the
    checkpoints."""
    with pytest.raises(Crash):
        tiny_trainer(tmp_path, CASES[case], crash_at(step)).run()
    trainer = resumed(tmp_path, CASES[case])
    assert trainer.step == step // 4 * 4
    trainer.run()
    assert_same(tmp_path, uninterrupted[case])


@pytest.mark.parametrize(
    ("family", "objective"), [("Llama", NEXT_TOKEN), ("Llama", CLIPPED), ("Qwen3", AR), ("Qwen3", LEARNED)]
)
def test_modern_networks_come_to_the_same_after_a_crash_and_a_stop(family, objective, tmp_path):
    """Both in one run, each with different initial weights, including a mask outside the vocabulary."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trained = tiny_trainer(whole, objective, family=family)
    trained.run()
    new = network(family=family).mask_vector
    assert torch.equal(trained.network.mask_vector, new) == isinstance(objective, Autoregressive)
    with pytest.raises(Crash):
        tiny_trainer(broken, objective, crash_at(6), family=family).run()
    watchers = [signal_at(8, signal.SIGTERM)], []
    for step, more in zip((4, 8), watchers, strict=True):
        trainer = tiny_trainer(broken, objective, *more, model=network(seed=99 + step, family=family))
        assert trainer.resume()
        assert trainer.step == step
        trainer.run()
    assert_same(broken, whole)


def killed(folder: str, family: str) -> None:
    """A process that trains until it kills itself, six steps in."""

    def kill(trainer: Trainer) -> None:
        if trainer.step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    tiny_trainer(Path(folder), NEXT_TOKEN, Watcher(kill), family=family).run()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_modern_networks_continue_after_their_process_was_killed(family, tmp_path):
    """In another process, from the checkpoint of step 4, to the same bits."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_processes("tests.training.test_trainer.killed", str(broken), family, world=1, may_die=[0])
    trainer = tiny_trainer(broken, NEXT_TOKEN, model=network(seed=99, family=family))
    assert trainer.resume()
    assert trainer.step == 4
    trainer.run()
    tiny_trainer(whole, NEXT_TOKEN, family=family).run()
    assert_same(broken, whole)


def test_the_cases_that_learn_do_learn(uninterrupted):
    """Otherwise the tests above would prove less than they claim."""
    ranges = {
        (row["clip_low"], row["clip_high"]) for row in rows(uninterrupted["clip search"]) if row["clip_low"]
    }
    assert ranges != {("0", "1")}
    assert state(uninterrupted["clip search"])["objective"] != {"low": 0.0, "high": 1.0}
    learned = state(uninterrupted["learned proposal"], 4)
    assert len(learned["objective"]["second_moments"]) == 4
    assert sum(learned["statistics"]["count_moments"][1]) == ROWS * 2  # the blocks of one step


@pytest.mark.parametrize(
    ("case", "number", "step"),
    [  # each case at each step, and with each signal
        ("counts", signal.SIGTERM, 5),
        ("counts", signal.SIGINT, 8),
        ("learned proposal", signal.SIGINT, 5),
        ("learned proposal", signal.SIGTERM, 8),
        ("clip search", signal.SIGTERM, 5),
        ("clip search", signal.SIGINT, 8),
    ],
)
def test_a_signal_saves_and_stops(case, number, step, uninterrupted, tmp_path):
    trainer = tiny_trainer(tmp_path, CASES[case], signal_at(step, number))
    before = signal.getsignal(number)
    trainer.run()
    assert (trainer.step, trainer.stopped_by, trainer.store.latest()) == (step, "signal", step)
    assert signal.getsignal(number) is before
    again = resumed(tmp_path, CASES[case])
    assert again.step == step
    again.run()
    assert_same(tmp_path, uninterrupted[case])


@pytest.mark.parametrize("case", ["counts", "clip search"])
@pytest.mark.parametrize("step", [6, 10])
def test_a_signal_at_a_step_that_validates(case, step, uninterrupted, tmp_path):
    """The clip range would have been searched again here, or the last figures taken."""
    tiny_trainer(tmp_path, CASES[case], signal_at(step, signal.SIGTERM)).run()
    resumed(tmp_path, CASES[case]).run()
    assert (
        checkpoint(tmp_path)["tensors.safetensors"] == checkpoint(uninterrupted[case])["tensors.safetensors"]
    )
    assert_same(tmp_path, uninterrupted[case])


@pytest.mark.parametrize("stop", ["crash", "signal"])
def test_metrics_averaged_over_several_steps_survive_a_stop_in_between(stop, tmp_path):
    """Logged every 5 steps, stopped in the middle of a window."""
    tiny_trainer(tmp_path / "whole", log_every=5, validate=False).run()
    stopped = tmp_path / "stopped"
    watcher = crash_at(6) if stop == "crash" else signal_at(7, signal.SIGTERM)
    trainer = tiny_trainer(stopped, COUNTS, log_every=5, validate=False)
    train_step = trainer.train_step

    def watched():
        train_step()
        watcher.do(trainer)

    trainer.train_step = watched
    if stop == "crash":
        with pytest.raises(Crash):
            trainer.run()
    else:
        trainer.run()
    resumed(stopped, COUNTS, log_every=5, validate=False).run()
    whole = rows(tmp_path / "whole")
    assert [row for row in rows(stopped) if row["step"] in ("5", "10")] == whole


def test_speed_counts_all_tokens_read_in_the_steps_since_the_start(monkeypatch):
    """Sums of an earlier process took an unknown time; unscored tokens count as read."""
    now = iter(range(100))
    monkeypatch.setattr("bd3lm.training.log_window.time.perf_counter", lambda: float(next(now)))
    window = LogWindow()
    window.restore([600.0, 0.0, 300.0], torch.device("cpu"))
    window.restart()
    window.add(torch.tensor([100.0, 0.0, 50.0], dtype=torch.float64), torch.tensor(1.0), 0.1, tokens=80)
    averages = window.averages()  # one second for the step, and one until now
    assert averages["tokens_per_second"] == 80 / 2
    assert averages["train_nats"] == 700 / 350


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGINT, 0.0), (signal.SIGTERM, 1.5)])
def test_a_second_signal_stops_at_once(number, seconds, tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("bd3lm.training.signals.time.monotonic", lambda: now)

    def twice(trainer: Trainer) -> None:
        nonlocal now
        signal.raise_signal(number)
        now += seconds
        signal.raise_signal(number)

    before = signal.getsignal(number)  # ignored, if a shell started the tests in the background
    trainer = tiny_trainer(tmp_path, COUNTS, Watcher(twice))
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert trainer.step == 1
    assert signal.getsignal(number) is before


def test_a_forwarded_sigterm_is_the_same_request(tmp_path):
    """A scheduler signals torchrun and its processes, and torchrun then signals these again."""

    def twice(trainer: Trainer) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    trainer = tiny_trainer(tmp_path, COUNTS, Watcher(twice))
    trainer.run()
    assert (trainer.step, trainer.stopped_by) == (2, "signal")


def test_a_signal_is_answered_while_the_step_goes_on(tmp_path, monkeypatch, capfd):
    trainer = tiny_trainer(tmp_path, COUNTS)
    draws = trainer._draws

    def signalled():
        if trainer.step == 3:
            signal.raise_signal(signal.SIGTERM)
            said.append(capfd.readouterr().err)
        return draws()

    said: list[str] = []
    monkeypatch.setattr(trainer, "_draws", signalled)
    trainer.run()
    assert said == ["finishing step 4, then saving; press Ctrl-C again to quit at once\n"]
    assert (trainer.step, trainer.store.latest()) == (4, 4)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(damage, uninterrupted, tmp_path):
    with pytest.raises(Crash):
        tiny_trainer(tmp_path, COUNTS, crash_at(9)).run()
    newest = tmp_path / "checkpoints" / "step-00000008" / "tensors.safetensors"
    data = bytearray(newest.read_bytes())
    if damage == "missing":
        newest.unlink()
    else:
        data[-5] ^= 1
        newest.write_bytes(data[:-100] if damage == "truncated" else data)
    with pytest.warns(UserWarning, match="skipping the damaged checkpoint .*step-00000008"):
        trainer = resumed(tmp_path, COUNTS)
    assert trainer.step == 4
    trainer.run()
    assert_same(tmp_path, uninterrupted["counts"])


class _Second(Engine):
    """The second process of a run, as far as one process can act it; it gets its own texts for the first
    one's."""

    is_main = False

    def broadcast_text(self, text):
        return text


def test_every_process_resumes_the_statistics_by_name_and_one_of_them_the_sums(tmp_path):
    """All must pool the same names: a process without them would skip a sum that the others wait for."""
    tiny_trainer(tmp_path, LEARNED, steps=4).run()
    first, second = resumed(tmp_path, LEARNED), resumed(tmp_path, LEARNED, engine=_Second())
    sums, zeros = first._pooled_statistics(), second._pooled_statistics()
    assert sums["count_moments"].any()
    assert {name: value.shape for name, value in zeros.items()} == {n: v.shape for n, v in sums.items()}
    assert not any(value.any() for value in zeros.values())


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path):
    trainer = tiny_trainer(tmp_path)
    assert not trainer.resume()
    assert trainer.step == 0


def test_a_longer_run_goes_on_from_a_finished_one(uninterrupted, tmp_path):
    tiny_trainer(tmp_path, COUNTS, steps=8).run()
    resumed(tmp_path, COUNTS).run()
    assert (
        checkpoint(tmp_path)["tensors.safetensors"]
        == checkpoint(uninterrupted["counts"])["tensors.safetensors"]
    )


# --- when it cannot go on ---


class BadFromStep:
    """NaN, from some step on, in the loss or only in its gradient."""

    def __init__(self, step: int, where: str) -> None:
        self.step, self.where = step, where

    def objective(self, data: Sentences) -> Autoregressive:
        step, where = self.step, self.where

        @dataclass(frozen=True, kw_only=True)
        class Bad(Autoregressive):
            def loss(self, model, batch, draws=None):
                loss = super().loss(model, batch, draws)
                if not torch.equal(batch.tokens, data.batch(step).tokens):
                    return loss
                if where == "loss":
                    return replace(loss, nats=loss.nats * math.nan, total=loss.total * math.nan)
                return replace(loss, total=_bad_gradient(loss.total))

        return Bad(mask_id=MASK)


def _bad_gradient(nats: Tensor) -> Tensor:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.inf

    return Bad.apply(nats)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize(("bad", "log_every"), [(6, 1), (6, 100), (7, 100)])
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_last_checkpoint(
    where, bad, log_every, tmp_path
):
    data = Sentences()
    trainer = tiny_trainer(
        tmp_path, BadFromStep(bad, where).objective(data), data=data, log_every=log_every, validate=False
    )
    with pytest.raises(
        FloatingPointError, match=r"not finite \(seen at step [78]\); the last checkpoint is intact"
    ):
        trainer.run()
    assert trainer.store.steps() == [4]
    healthy = tiny_trainer(tmp_path, AR, validate=False)
    assert healthy.resume()
    assert all(tensor.isfinite().all() for tensor in healthy.network.state_dict().values())


def test_before_the_first_checkpoint_none_is_promised(tmp_path):
    data = Sentences()
    trainer = tiny_trainer(tmp_path, BadFromStep(1, "loss").objective(data), data=data, validate=False)
    with pytest.raises(FloatingPointError, match=r"not finite \(seen at step 2\); there is no checkpoint\."):
        trainer.run()


def test_a_watcher_that_fails_does_not_keep_the_others_from_ending(tmp_path):
    ended = []

    class Ends(Watcher):
        def on_end(self, trainer):
            ended.append(trainer.step)

    with pytest.raises(Crash):
        tiny_trainer(tmp_path, COUNTS, crash_at(2), Ends(lambda _: None)).run()
    assert ended == [2]


# --- what it refuses ---


def test_batches_that_cannot_be_divided_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"micro_batch must divide each process's share .* 4 sequences, got 3"
    ):
        tiny_trainer(tmp_path, micro_batch=3)
    with pytest.raises(
        ValueError, match="global_batch must be a multiple of the number of processes 3, got 4"
    ):
        tiny_trainer(tmp_path, engine=Engine(world=3))


@pytest.mark.parametrize("name", ["steps", "global_batch", "micro_batch", "log_every", "validate_every"])
def test_settings_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        TrainSettings(**{"steps": 1, name: 0})


def test_precision_and_compile_are_choices_of_three():
    with pytest.raises(ValueError, match="precision must be 'auto', 'fp32' or 'bf16', got 'fp16'"):
        TrainSettings(steps=1, precision="fp16")
    with pytest.raises(ValueError, match="compile must be true, false or 'auto', got 'on'"):
        TrainSettings(steps=1, compile="on")


# --- what is left to it ---


class _FakeGpu(Engine):
    """Claims to be a GPU, and leaves the network where it is."""

    def wrap(self, module, **_):
        return module


@pytest.mark.parametrize(
    ("asked", "device", "steps", "compiled"),
    [
        ("auto", "cuda", 200, True),
        ("auto", "cuda", 199, False),
        ("auto", "cpu", 10_000, False),
        (True, "cpu", 1, True),
        (False, "cuda", 10_000, False),
    ],
)
def test_a_run_that_is_long_enough_is_compiled_on_a_gpu(
    asked, device, steps, compiled, tmp_path, monkeypatch
):
    trunks = []
    monkeypatch.setattr(Transformer, "compile_trunk", lambda network: trunks.append(network))
    engine = _FakeGpu(device=torch.device(device))
    trainer = tiny_trainer(tmp_path, engine=engine, steps=steps, compile=asked)
    assert trainer.settings.compile is compiled
    assert trunks == [trainer.network] * compiled


def test_steps_that_a_checkpoint_holds_need_no_compiling(tmp_path, monkeypatch):
    monkeypatch.setattr(Transformer, "compile_trunk", lambda network: None)
    tiny_trainer(tmp_path, steps=4, validate=False).run()
    engine = _FakeGpu(device=torch.device("cuda"))
    compiled = [tiny_trainer(tmp_path, engine=engine, steps=n).settings.compile for n in (203, 204)]
    assert compiled == [False, True]


def test_without_an_average_the_weights_themselves_are_validated_and_resumed(tmp_path):
    seen = []

    def validated(trainer: Trainer) -> dict[str, float]:
        seen.append({name: weight.clone() for name, weight in trainer.network.named_parameters()})
        return {}

    trainer = tiny_trainer(tmp_path, ema_decay=0.0, validate=False)
    trainer.validators.append(validated)
    trainer.run()
    named = dict(trainer.network.named_parameters())
    again = tiny_trainer(tmp_path, ema_decay=0.0, model=network(seed=1))
    assert again.resume()
    for name, weight in again.network.named_parameters():
        assert torch.equal(seen[-1][name], named[name]), name
        assert torch.equal(weight, named[name]), name


# --- how often ---


def test_logs_validations_and_checkpoints_happen_on_schedule(tmp_path):
    """Logs, validations and checkpoints happen at their multiples and at the end. A validation makes a log
    entry."""
    tiny_trainer(tmp_path, COUNTS, steps=11, log_every=4, validate_every=3, checkpoint_every=5).run()
    found = rows(tmp_path)
    assert [int(row["step"]) for row in found] == [3, 4, 6, 8, 9, 11]
    assert [int(row["step"]) for row in found if row["valid_nats"]] == [3, 6, 9, 11]
    assert [int(row["step"]) for row in found if row["train_nats"]] == [4, 8, 11]
    assert [int(row["tokens"]) for row in found] == [int(row["step"]) * ROWS * 8 for row in found]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (5, 10, 11)
    ]


def test_validation_uses_the_averaged_weights_without_dropout_and_leaves_no_trace(tmp_path):
    seen = {}

    def look(trainer: Trainer) -> dict[str, float]:
        seen["training"] = trainer.network.training
        seen["weight"] = trainer.network.output.bias.detach().clone()
        seen["average"] = trainer.ema.tensors()["output.bias"].clone()
        return {"figure": 1.0}

    looked = tiny_trainer(tmp_path / "a", COUNTS, steps=4, validate=False)
    looked.validators.append(look)
    looked.run()
    assert seen["training"] is False
    assert torch.equal(seen["weight"], seen["average"])
    assert not torch.equal(looked.network.output.bias, seen["average"])
    tiny_trainer(tmp_path / "b", COUNTS, steps=4, validate=False).run()
    assert (
        checkpoint(tmp_path / "a", 4)["tensors.safetensors"]
        == checkpoint(tmp_path / "b", 4)["tensors.safetensors"]
    )


def test_every_checkpoint_carries_the_run_state(uninterrupted):
    assert state(uninterrupted["counts"], 8)["run"] == {"recipe": "tiny"}
    assert state(uninterrupted["counts"], 8)["step"] == 8


def test_training_learns(tmp_path):
    """Ten steps are few, but the made-up language is easy."""
    tiny_trainer(tmp_path, AR, steps=60, dropout=0.0, validate_every=30).run()
    nats = [float(row["valid_nats"]) for row in rows(tmp_path) if row["valid_nats"]]
    assert nats[-1] < nats[0] < 1.2 * math.log(MASK)
    assert sentences(1, 0).max() < MASK


# --- helpers ---


def numbers(row: dict[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value}


def worst_difference(one: Path, other: Path) -> float:
    """Compare all tensors of the last checkpoints."""
    from safetensors.torch import load

    ours, theirs = (load(checkpoint(folder)["tensors.safetensors"]) for folder in (one, other))
    assert ours.keys() == theirs.keys()
    return max((ours[name].double() - theirs[name].double()).abs().max().item() for name in ours)


def test_a_run_that_dies_right_after_a_checkpoint_has_logged_its_step(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path)
    save = trainer.save

    def dying(*score: float | None) -> None:
        save(*score)
        if trainer.step == 4:
            raise SystemError("killed")

    monkeypatch.setattr(trainer, "save", dying)
    with pytest.raises(SystemError, match="killed"):
        trainer.run()
    again = tiny_trainer(tmp_path)
    assert again.resume()
    again.run()
    assert [row["step"] for row in rows(tmp_path)] == [str(step) for step in range(1, 11)]
