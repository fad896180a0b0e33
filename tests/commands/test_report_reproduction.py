"""The commands that measure records again: they parse, and say again what the record says."""

import shlex

import pytest
import tyro

from bd3lm.commands.eval import Eval
from bd3lm.commands.judge import Judge
from bd3lm.commands.lengths import Lengths
from bd3lm.commands.report.reproduction import repeatable
from bd3lm.commands.variance import Variance
from bd3lm.reports.reproduction import commands
from tests.reports import film, judgement, lengths, perplexity, recipe, run, variance

COMMANDS = {"eval": Eval, "variance": Variance, "lengths": Lengths, "judge": Judge}
BLOCKS = recipe("block_diffusion", block_size=4)


def typed(record, of=None) -> str:
    """The one command of a record."""
    of = of or recipe()
    (line,) = commands([(run("a", recipe=of), repeatable(record, of, "block"))])
    return line


def parsed(record, of=None):
    """The same as the command line reads it."""
    bd3lm, name, *words = shlex.split(typed(record, of))
    assert bd3lm == "bd3lm"
    return tyro.cli(COMMANDS[name], args=words)


def test_what_was_measured_with_the_defaults_needs_no_flag():
    assert typed(variance() | {"settings": {"batches": 20, "gradients": 0, "seed": 0}}) == "bd3lm variance a"
    plain = {"judge": "gpt2-large", "count": 300, "top_p": None, "dtype": None}
    record = judgement(settings=plain)
    assert typed({**record, "dtype": "float32"}) == "bd3lm judge a --length 64"
    assert repeatable(film(), recipe(), "block") == film()


def test_a_perplexity():
    plain = parsed(perplexity(("exact", 2.0)))
    assert (plain.models, plain.data, plain.estimator, plain.split) == (("a",), (), "exact", None)
    own = recipe()["data"]["context"]
    assert "--context" not in typed(perplexity(("exact", 2.0), settings={"context": own}))
    assert parsed(perplexity(("exact", 2.0), settings={"context": own - 1})).context == own - 1
    settings = {"split": "test", "replicates": 3, "limit": 8, "seed": 5, "batch_size": 2, "field": "body"}
    other = perplexity(
        ("bound", 2.0),
        data="my text.txt",
        estimator="iw:4",
        settings={**settings, "eos_between_documents": False},
    )
    assert parsed({**other, "dtype": "bfloat16"}) == Eval(
        models=("a",),
        data=("my text.txt",),
        estimator="iw:4",
        eos=False,
        split="test",
        replicates=3,
        sequences=8,
        seed=5,
        batch_size=2,
        field="body",
        dtype="bfloat16",
    )


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
    of = recipe("block_diffusion", block_size=4, **method)
    said = {} if measured is None else {"lean": measured}
    for record in (perplexity(("exact", 2.0)), lengths(), judgement()):
        record["settings"].update(said)
        settings = dict(record["settings"])
        assert parsed(record, of).lean == flag
        assert record["settings"] == settings  # records are left as they are


def test_ancestral_steps_of_a_run_that_leans_were_taken_without():
    of = recipe("block_diffusion", block_size=4, lean=2.0)
    found = parsed(judgement(settings={"unmasking": {"kind": "ancestral", "steps": 9}, "lean": 0.0}), of)
    assert (found.steps, found.lean) == (9, 0.0)


def test_the_others():
    record = variance()
    record["settings"].update(batches=3, gradients=4, seed=1)
    assert parsed(record) == Variance(models=("a",), batches=3, gradients=4, seed=1)
    found = parsed(lengths())
    assert (found.count, found.length, found.entropy_floor, str(found.data)) == (3, 64, 0.0, "data/mine")
    settings = {"steps": 7, "entropy_floor": 3.5, "redraws": 2, "mauve_reference": "h.txt"}
    found = parsed(judgement(settings=settings))
    assert (found.judge, found.count, found.length, found.top_p) == ("judge/one", 30, (64,), 0.9)
    assert (found.steps, found.entropy_floor, found.redraws, str(found.mauve)) == (7, 3.5, 2, "h.txt")
    found = parsed(judgement(settings={"unmasking": {"kind": "Ancestral", "steps": 9}}), BLOCKS)
    assert found.steps == 9
    found = parsed(judgement(settings={"entropy_floor": None, "redraws": 0}))
    assert (found.entropy_floor, found.redraws) == (0.0, 20)
