"""The kernel that draws tokens on CUDA: the plain draw's, for real vocabularies and in a graph.

Run with `pytest --gpu -m gpu tests/gpu`.
"""

from itertools import product

import pytest
import torch

from bd3lm.diffusion import subs_at_masks
from bd3lm.sampling import Sharpening
from tests.sampling.drawing_cases import (
    Case,
    assert_it_ends_whatever_the_logits_are,
    assert_the_bound_of_a_gumbel_number_holds,
    drawn,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
VOCABULARY = 50258
NUCLEI = [
    Sharpening(top_p=p, top_p_rule=rule)
    for p, rule in product((0.05, 0.5, 0.9, 1.0), ("inclusive", "exclusive"))
]


def assert_nearly_equal_tokens(case: Case) -> None:
    """Tokens differ where two scores are nearly the same, and hardly ever."""
    found, expected, ahead = drawn(case, CUDA)
    unequal = found != expected
    assert unequal.double().mean() <= 1e-3
    assert (ahead[unequal].abs() < 1e-4).all()


@pytest.mark.parametrize("rule", NUCLEI, ids=lambda r: f"{r.top_p}-{r.top_p_rule}")
@pytest.mark.parametrize("logits", ["random", "flat", "ties", "peaked"])
@pytest.mark.parametrize("rows", [1, 7, 256])
def test_tokens_are_those_of_the_plain_draw(rows, logits, rule):
    mask_id = VOCABULARY - 1
    case = Case(rows=rows, vocabulary=VOCABULARY, mask_id=mask_id, rule=rule, logits=logits, padding=46)
    assert_nearly_equal_tokens(case)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_temperature_precision_and_turn(dtype, temperature):
    rule = Sharpening(temperature=temperature, top_p=0.8)
    case = Case(rows=64, vocabulary=VOCABULARY, mask_id=0, rule=rule, dtype=dtype, repeats=64)
    assert_nearly_equal_tokens(case)


@pytest.mark.parametrize("rule", NUCLEI, ids=lambda r: f"{r.top_p}-{r.top_p_rule}")
@pytest.mark.parametrize(("vocabulary", "mask_id"), [(2, 1), (11, 4), (1025, 1024), (4097, 5)])
def test_small_vocabularies(vocabulary, mask_id, rule):
    assert_nearly_equal_tokens(Case(rows=50, vocabulary=vocabulary, mask_id=mask_id, rule=rule))


@pytest.mark.parametrize(
    "rule", [Sharpening(top_p=0.9), Sharpening(top_k=5), Sharpening(temperature=0.5)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_sharpening_draws_from_logits_what_it_draws_from_log_probabilities(rule, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (3.0 * torch.randn(5, 4, 1000, generator=generator)).to(CUDA, dtype)
    seeds, positions = torch.arange(5, device=CUDA), torch.arange(20, device=CUDA).view(5, 4)
    expected = rule.rows(1, CUDA).draw(subs_at_masks(logits, 999), seeds, positions, repeat=3)
    for repeat in (3, torch.tensor(3, device=CUDA), torch.tensor([3], device=CUDA)):
        found = rule.rows(1, CUDA).draw_logits(logits, 999, seeds, positions, repeat=repeat)
        assert torch.equal(found, expected)


def test_a_graph_draws_from_the_values_it_is_replayed_on():
    rule = Sharpening(top_p=0.5)  # about one row in two needs another round
    generator = torch.Generator(CUDA).manual_seed(0)
    logits = torch.zeros(16, 1, VOCABULARY, device=CUDA, dtype=torch.bfloat16)
    seeds = torch.zeros(16, device=CUDA, dtype=torch.int64)
    positions, repeat = torch.zeros_like(seeds).unsqueeze(1), torch.zeros_like(seeds[:1])
    rule.rows(1, CUDA).draw_logits(logits, 7, seeds, positions, repeat=repeat)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = rule.rows(1, CUDA).draw_logits(logits, 7, seeds, positions, repeat=repeat)
    for turn in range(5):
        logits.normal_(std=3.0, generator=generator)
        seeds.random_(generator=generator)
        positions.random_(1000, generator=generator)
        repeat.fill_(turn)
        graph.replay()
        expected = rule.rows(1, CUDA).draw(subs_at_masks(logits, 7), seeds, positions, repeat=repeat)
        assert torch.equal(tokens, expected)


def test_it_ends_even_where_logits_are_no_numbers():
    assert_it_ends_whatever_the_logits_are(CUDA)


def test_what_decides_whether_a_score_is_computed_is_never_below_it():
    assert_the_bound_of_a_gumbel_number_holds(CUDA)
