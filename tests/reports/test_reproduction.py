"""Commands in captions: they parse, and say again what the record says."""

import shlex

import pytest
import tyro

from bd3lm.cli.judging import Judge
from bd3lm.cli.lengths import Lengths
from bd3lm.cli.measuring import Eval, Variance
from bd3lm.reports.reproduction import FLAGS, commands, unmasking
from tests.reports import judgement, lengths, perplexity, recipe, run, variance

COMMANDS = {"perplexity": Eval, "variance": Variance, "lengths": Lengths, "judgement": Judge}
BLOCKS = recipe("block_diffusion", block_size=4)


def parsed(record, of=None):
    """The one command of a record, as the command line reads it."""
    text = commands([(of or run("a"), record)])
    words = shlex.split(text.strip("`"))
    assert words[:2] == ["bd3lm", FLAGS[record["kind"]][0]]
    return tyro.cli(COMMANDS[record["kind"]], args=words[2:])


@pytest.mark.parametrize("kind", FLAGS)
def test_flags_are_left_out_at_the_defaults_of_the_command(kind):
    defaults = {f.name: f.default for f in COMMANDS[kind].__dataclass_fields__.values()}
    for flag, value in FLAGS[kind][1].values():
        name = flag.removeprefix("--").replace("-", "_")
        assert name in defaults
        if value is not None and name != "split":  # a text's split is valid where it has one
            assert value == defaults[name]


def test_a_perplexity():
    plain = parsed(perplexity(("exact", 2.0)))
    assert (plain.models, plain.data, plain.estimator, plain.split) == (("a",), (), "exact", None)
    settings = {"split": "test", "replicates": 3, "limit": 8, "seed": 5, "batch_size": 2}
    other = perplexity(
        ("bound", 2.0),
        data="my text.txt",
        estimator="iw:4",
        settings={**settings, "eos_between_documents": False},
    )
    found = parsed({**other, "dtype": "bfloat16"})
    assert (found.data, found.estimator, found.eos) == (("my text.txt",), "iw:4", False)
    assert (found.split, found.replicates, found.sequences, found.seed, found.batch) == ("test", 3, 8, 5, 2)
    assert found.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("own", "measured", "flag"),
    [
        (None, None, None),
        (None, 0.0, None),
        (None, 2.0, 2.0),
        (0.0, 0.0, None),
        (0.0, 0.25, 0.25),
        (2.0, 2.0, None),
        (2.0, 0.0, 0.0),
        (2.0, 1.0, 1.0),
    ],
)
def test_a_lean_is_said_where_it_is_not_the_runs_own(own, measured, flag):
    """None: of a recipe, or a record, from before there was one."""
    method = {} if own is None else {"lean": own}
    of = run("a", recipe=recipe("block_diffusion", block_size=4, **method))
    said = {} if measured is None else {"lean": measured}
    for record in (perplexity(("exact", 2.0)), lengths(), judgement()):
        record["settings"].update(said)
        settings = dict(record["settings"])
        assert parsed(record, of).lean == flag
        assert record["settings"] == settings  # records are left as they are


def test_an_autoregressive_run_needs_no_lean():
    record = perplexity(("exact", 2.0), settings={"lean": 0.0})
    assert commands([(run("a"), record)]) == "`bd3lm eval a --estimator exact`"
    assert "--lean" not in commands([(run("a"), judgement(settings={"lean": 0.0}))])


def test_ancestral_steps_of_a_run_that_leans_were_taken_without():
    of = run("a", recipe=recipe("block_diffusion", block_size=4, lean=2.0))
    found = parsed(judgement(settings={"unmasking": {"kind": "ancestral", "steps": 9}, "lean": 0.0}), of)
    assert (found.steps, found.lean) == (9, 0.0)


def test_the_others():
    record = variance()
    record["settings"].update(batches=3, gradients=4, seed=1)
    found = parsed(record)
    assert (found.batches, found.gradients, found.seed) == (3, 4, 1)
    found = parsed(lengths())
    assert (found.count, found.length, found.entropy_floor, str(found.data)) == (3, 64, 0.0, "data/mine")
    found = parsed(judgement(settings={"steps": 7, "entropy_floor": 3.5, "redraws": 2}))
    assert (found.judge, found.count, found.length, found.nucleus) == ("judge/one", 30, (64,), 0.9)
    assert (found.steps, found.entropy_floor, found.redraws) == (7, 3.5, 2)
    found = parsed(
        judgement(settings={"unmasking": {"kind": "ancestral", "steps": 9}}), run("a", recipe=BLOCKS)
    )
    assert found.steps == 9
    found = parsed(judgement(settings={"entropy_floor": None, "redraws": 0}))
    assert (found.entropy_floor, found.redraws) == (0.0, 20)


def test_one_command_for_what_was_measured_in_the_same_way():
    a, b = run("a"), run("b c")
    records = [perplexity(("exact", 2.0), data=name) for name in ("ptb", "lm1b")]
    few = perplexity(("exact", 2.0), settings={"limit": 4})
    assert commands([(a, records[0]), (a, records[1]), (b, records[0]), (b, records[1]), (a, few)]) == (
        "`bd3lm eval a 'b c' --data ptb lm1b --estimator exact`, "
        "`bd3lm eval a --estimator exact --sequences 4`"
    )


def test_ways_of_unmasking():
    expected = "remasking", {"steps": 9, "eta": 0.6}
    assert unmasking({"kind": "remasking", "steps": 9, "eta": 0.6}) == expected
