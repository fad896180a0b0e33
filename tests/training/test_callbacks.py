"""Callbacks of a run: what they write, what they show, and to whom."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from bd3lm.diffusion import ClippedTimes
from bd3lm.objectives import Objective
from bd3lm.training import CsvLog, LikelihoodValidator, ProgressBar
from bd3lm.training.callbacks import describe, model_flop_utilisation
from tests.training.tiny import AR, COUNTS, HELD_OUT, Crash, crash_at, network, tiny_trainer


class OfOnesOwn(Objective):
    """A class unknown to the library: a likelihood that draws nothing at random."""

    is_bound, is_random = True, False

    def draw(self, rows, length, *, generator, device):
        return None

    def loss(self, model, batch, draws):
        raise NotImplementedError


def at(step: int, *, main: bool = True) -> SimpleNamespace:
    """The parts of a trainer that a log reads."""
    engine = SimpleNamespace(is_main=main, device=SimpleNamespace(type="cpu"), world=1)
    settings = SimpleNamespace(steps=100)
    network = SimpleNamespace(uses_noise=False)
    return SimpleNamespace(
        step=step,
        tokens_seen=32 * step,
        engine=engine,
        settings=settings,
        objective=AR,
        validators=[LikelihoodValidator(HELD_OUT, AR)],
        network=network,
        validation_due=False,
    )


def screen(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


def shown(console: Console) -> str:
    return console.file.getvalue()


# --- metrics.csv ---


def test_one_row_per_entry_and_one_column_per_figure(tmp_path):
    log = CsvLog(tmp_path / "metrics.csv")
    log.on_start(at(0))
    log.on_log(at(1), {"train_nats": 2.5, "learning_rate": 1e-4})
    log.on_log(at(2), {"train_nats": 1 / 3, "learning_rate": 2e-4})
    log.on_log(at(3), {"train_nats": 2.0, "learning_rate": 2e-4, "valid_nats": 1.5})  # one more column
    log.on_log(at(4), {"train_nats": 1.0, "learning_rate": 2e-4})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,tokens,train_nats,learning_rate,valid_nats",
        "1,32,2.5,0.0001,",
        "2,64,0.333333333,0.0002,",
        "3,96,2,0.0002,1.5",
        "4,128,1,0.0002,",
    ]
    assert log.rows()[0] == {"step": "1", "tokens": "32", "train_nats": "2.5", "learning_rate": "0.0001"}


def test_the_columns_of_a_real_run(tmp_path):
    tiny_trainer(
        tmp_path, replace(COUNTS, reading=replace(COUNTS.reading, causal_clean=True), next_token=1.0), steps=3
    ).run()
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",") == [
        "step",
        "tokens",
        "train_nats",
        "learning_rate",
        "gradient_norm",
        "tokens_per_second",
        "auxiliary_nats",
        "valid_nats",
        "valid_perplexity",
    ]


def test_a_resumed_run_drops_the_rows_after_its_checkpoint(tmp_path):
    with pytest.raises(Crash):
        tiny_trainer(tmp_path, COUNTS, crash_at(7)).run()
    log = CsvLog(tmp_path / "metrics.csv")
    assert [int(row["step"]) for row in log.rows()] == [1, 2, 3, 4, 5, 6, 7]
    log.on_start(at(4))
    assert [int(row["step"]) for row in log.rows()] == [1, 2, 3, 4]


def test_rows_cut_short_by_a_full_disk_are_dropped(tmp_path):
    """Whatever byte the file ends at, a resumed run keeps whole rows and does not fail."""
    path = tmp_path / "metrics.csv"
    log = CsvLog(path)
    log.on_start(at(0))
    for step in (8, 9, 10, 11):
        log.on_log(at(step), {"train_nats": 2.5, "learning_rate": 1e-4})
    data, rows = path.read_bytes(), log.rows()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        again = CsvLog(path)
        again.on_start(at(100))
        kept = again.rows()
        assert kept == rows[: len(kept)], f"the file ended in {data[max(0, end - 20) : end]!r}"


@pytest.mark.parametrize(
    ("damaged", "rows"),
    [
        (b"stXp,train_nats\n1,2.5\n2,2.4\n", 0),  # one byte of the header
        (b"step,train_nats\n1,2.5\nx\xff,2.4\n", 1),
        (b"step,train_nats\n1,2.5\n2,2.4,7\n", 1),
        (b"step,train_nats\n1,2.5\n" + b"9" * 5000 + b",2.4\n", 1),
    ],
)
def test_rows_that_cannot_be_read_are_kept_in_another_file_and_named(damaged, rows, tmp_path):
    path = tmp_path / "metrics.csv"
    for copy in ("metrics.damaged.csv", "metrics.damaged1.csv"):
        path.write_bytes(damaged)
        log = CsvLog(path)
        with pytest.warns(UserWarning, match=f"metrics.csv is damaged.* kept as {copy}"):
            log.on_start(at(100))
        assert len(log.rows()) == rows
        assert (tmp_path / copy).read_bytes() == damaged


def test_only_the_main_process_writes(tmp_path):
    log = CsvLog(tmp_path / "metrics.csv")
    log.on_start(at(0, main=False))
    log.on_log(at(1, main=False), {"train_nats": 1.0})
    assert not (tmp_path / "metrics.csv").exists()
    console = screen(terminal=True)
    bar = ProgressBar(console)
    bar.on_start(at(0, main=False))
    bar.on_log(at(1, main=False), {"train_nats": 1.0, "valid_nats": 1.0})
    bar.on_end(at(1, main=False))
    assert shown(console) == ""


# --- the progress bar ---


def test_off_a_terminal_only_validations_make_a_line(tmp_path):
    console = screen(terminal=False)
    tiny_trainer(tmp_path, COUNTS, ProgressBar(console, description="block")).run()
    lines = shown(console).splitlines()
    assert [line.split(",")[0] for line in lines] == [f"block: step {step}/10" for step in (3, 6, 9, 10)]
    assert all("valid perplexity" in line and "tok/s" in line for line in lines)
    assert "\x1b" not in shown(console)


def test_on_a_terminal_there_is_a_bar_that_goes_away():
    console = screen(terminal=True)
    bar = ProgressBar(console, description="block")
    bar.on_start(at(0))
    bar.on_log(at(40), {"train_nats": 1.25, "tokens_per_second": 1234.0})
    bar.on_end(at(40))
    assert "40/100" in shown(console)
    assert "loss 1.250, 1,234 tok/s" in shown(console)
    bar.on_end(at(40))  # also called if a run failed before


# --- one line for people ---


@pytest.mark.parametrize(("low", "label"), [(0.3, "loss (no bound) 1.500"), (0.0, "loss 1.500")])
def test_a_clipped_loss_is_called_no_bound(low, label):
    trainer = at(1)
    trainer.objective = replace(COUNTS, masking=ClippedTimes(low=low, high=1.0))
    assert describe(trainer, {"train_nats": 1.5}) == label


def test_a_line_has_what_was_measured():
    figures = {"train_nats": 1.5, "valid_perplexity": 12.34, "tokens_per_second": 98765.4}
    assert describe(at(1), figures) == "loss 1.500, valid perplexity 12.3, 98,765 tok/s"
    drawn = at(1)
    drawn.validators = [LikelihoodValidator(HELD_OUT, COUNTS)]
    assert describe(drawn, {"valid_perplexity": 12.34}) == "valid perplexity ≤ about 12.3 (one random draw)"
    for judge, training in ((OfOnesOwn(), AR), (AR, replace(AR, random_batch=True)), (AR, COUNTS)):
        exact = at(1)
        exact.validators, exact.objective = [LikelihoodValidator(HELD_OUT, judge)], training
        assert describe(exact, {"valid_perplexity": 12.34}) == "valid perplexity 12.3"
    assert describe(at(1), {"valid_nats": 2.0}) == "valid loss (no bound) 2.000"
    assert describe(at(1), {}) == ""


@pytest.mark.parametrize("tied", [False, True])
def test_flop_utilisation(tied, tmp_path, monkeypatch):
    """The head is a product for every token, even if it shares the embedding's weights."""
    trainer = tiny_trainer(tmp_path, COUNTS, model=network(tied=tied))
    assert model_flop_utilisation(trainer, 1e6) is None  # a CPU has no data sheet here
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    gpu = SimpleNamespace(
        engine=SimpleNamespace(device=SimpleNamespace(type="cuda"), world=2), network=trainer.network
    )
    layers = sum(p.numel() for layer in trainer.network.layers for p in layer.parameters())
    head = trainer.network.output.weight.numel() + trainer.network.output.bias.numel()
    counted = layers + trainer.network.final_norm.weight.numel() + head
    assert model_flop_utilisation(gpu, 1e9) == pytest.approx(6 * counted * 1e9 / (2 * 989e12))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Voodoo 2")
    assert model_flop_utilisation(gpu, 1e9) is None


def test_a_step_whose_validation_is_due_is_logged_once(tmp_path):
    """A run killed between the row of a validation and the checkpoint that records it validates again."""
    first = CsvLog(tmp_path / "metrics.csv")
    first.on_start(at(0))
    for step in (1, 2):
        first.on_log(at(step), {"train_nats": 1.0, "valid_nats": 2.0})
    again, trainer = CsvLog(tmp_path / "metrics.csv"), at(2)
    trainer.validation_due = True
    again.on_start(trainer)
    assert [row["step"] for row in again.rows()] == ["1"]
