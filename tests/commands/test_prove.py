"""The proof is convinced by what is right, and not by what is wrong."""

import io
import re

import pytest
import torch
from rich.console import Console
from scipy import stats

from bd3lm import evaluation, sampling
from bd3lm.cli import main
from bd3lm.commands import prove
from tests.commands import fails


def run(**options) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=200)
    return prove.run_proof(prove.Prove(**options), console=console), console.file.getvalue()


@pytest.mark.parametrize("seed", [0, 1])
def test_it_holds(seed):
    agreed, printed = run(seed=seed, samples=2000)
    assert agreed
    assert "Everything agrees." in printed
    assert "The likelihoods of all 729 texts sum to 1.000000000000." in printed


def test_it_says_why_there_are_fewer_degrees_of_freedom_than_texts():
    _, printed = run(samples=2000)
    found = re.search(
        r"for (\d+) degrees of freedom \(the (\d+) texts expected fewer than 5 times in 2,000 are pooled",
        printed,
    )
    assert found is not None
    freedom, rare = map(int, found.groups())
    assert freedom == 729 - rare + 1 - 1  # what is rare is one more, and the frequencies sum to one
    assert prove._pooled(torch.tensor([3.0, 9.0]), 12) == ""


def test_it_notices_a_sampler_of_another_model(monkeypatch):
    honest = sampling.BlockWriter
    other = prove._tiny_model(5)
    monkeypatch.setattr(sampling, "BlockWriter", lambda model, **options: honest(other, **options))
    agreed, printed = run(samples=2000)
    assert not agreed
    assert "Something disagrees." in printed


def test_it_notices_probabilities_that_do_not_sum_to_one(monkeypatch):
    honest = evaluation.exact_likelihood

    def generous(*args, **options):
        exact = honest(*args, **options)
        return type(exact)(nll=exact.nll - 1e-6, nelbo=exact.nelbo, tokens=exact.tokens)

    monkeypatch.setattr(evaluation, "exact_likelihood", generous)
    assert not run(samples=500)[0]


def test_it_notices_a_bound_below_the_likelihood(monkeypatch):
    honest = evaluation.exact_likelihood

    def too_low(*args, **options):
        exact = honest(*args, **options)
        return type(exact)(nll=exact.nll, nelbo=0.9 * exact.nll, tokens=exact.tokens)

    monkeypatch.setattr(evaluation, "exact_likelihood", too_low)
    assert not run(samples=500)[0]


def test_the_test_of_fit_is_pearsons():
    observed = torch.tensor([18.0, 22.0, 30.0, 30.0], dtype=torch.float64)
    expected = torch.tensor([25.0, 25.0, 25.0, 25.0], dtype=torch.float64)
    chi2, freedom, p = prove._chi_squared(observed, expected)
    theirs = stats.chisquare(observed.numpy(), expected.numpy())
    assert (chi2, p) == pytest.approx((theirs.statistic, theirs.pvalue))
    assert freedom == 3
    rare = torch.tensor([50.0, 40.0, 4.0, 4.0, 2.0], dtype=torch.float64)  # the last three count as one
    assert prove._chi_squared(rare, rare)[1] == 2


def test_the_command(capsys):
    assert main(["prove", "--samples", "500"]) == 0
    assert "Everything agrees." in capsys.readouterr().out
    assert "samples must be at least 100" in fails(capsys, "prove", "--samples", "5")
