"""Generative perplexity against a plain loop, under a judge for whom every token of the window matters."""

import math
import statistics
import zlib
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bd3lm.evaluation import Judgement, judge_texts
from bd3lm.evaluation.judging import check_windows, judged_tokens, mean_and_error, sliding_windows

END = "$"  # in a text: the judge's end token


class HashJudge:
    """log p is a hash of the token and of all that stands before it in its row: all of the context counts."""

    name, dtype, eos_id, context = "hash", "float64", 7, None

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def encode(self, text: str) -> list[int]:
        return [self.eos_id if letter == END else ord(letter) for letter in text]

    def log_p(self, tokens: Tensor) -> Tensor:
        self.shapes.append(tuple(tokens.shape))
        rows = [[0.0] + [hashed(row[: i + 1]) for i in range(1, len(row))] for row in tokens.tolist()]
        return torch.tensor(rows, dtype=torch.float64)


def hashed(tokens: Sequence[int]) -> float:
    return -10 * zlib.crc32(repr(list(tokens)).encode()) / 2**32


def plain_loop(tokens: Sequence[int], window: int, stride: int, end: int = HashJudge.eos_id) -> list[float]:
    """The nats of each scored token: the window that scores it is the first, a stride on, that reaches it."""
    nats = []
    for place in range(1, len(tokens)):
        start = 0
        while start + window <= place:
            start += stride
        if tokens[place] != end:
            nats.append(-hashed(tokens[start : place + 1]))
    return nats


def letters(number: int, first: int = 0) -> str:
    return "".join(chr(97 + (first + 7 * i * i) % 26) for i in range(number))


WINDOWS = [(8, 4), (8, 3), (8, 7), (8, 1), (2, 1), (5, 2)]


def edges(window: int, stride: int) -> list[int]:
    """Lengths in tokens, the end token that comes first included, at which something could go wrong."""
    around = (2, window, window + stride, window + 2 * stride, 2 * window, 3 * window + stride)
    return sorted({length + step for length in around for step in (-1, 0, 1) if length + step >= 2})


@pytest.mark.parametrize(("window", "stride"), WINDOWS)
def test_it_is_the_plain_loop_at_all_edges_of_the_window(window, stride):
    for length in edges(window, stride):
        text = letters(length - 1)
        found = judge_texts(HashJudge(), [[text]], window=window, stride=stride)
        expected = plain_loop([HashJudge.eos_id, *map(ord, text)], window, stride)
        assert found.tokens.tolist() == [len(expected)] == [length - 1]
        assert found.nats.item() == pytest.approx(math.fsum(expected), abs=1e-9)
        assert found.perplexity == pytest.approx(math.exp(statistics.fmean(expected)))


@pytest.mark.parametrize(("window", "stride"), WINDOWS)
def test_every_token_but_the_first_is_scored_once_and_in_context(window, stride):
    for length in (0, 1, *edges(window, stride)):
        scored = []
        for each in sliding_windows(0, length, window, stride):
            assert each.stop - each.start <= window
            for place in range(each.first, each.stop):
                assert place - each.start >= min(place, window - stride)
                scored.append(place)
        assert scored == list(range(1, length))


@pytest.mark.parametrize("batch_size", [1, 3, 4, 5, 100])
def test_batch_and_padding_change_nothing_and_the_last_batch_counts(batch_size):
    window, stride = 8, 3
    texts = [[letters(length, first=length)] for length in (20, 1, 7, 8, 0, 31, 3, 2, 1)]
    judge = HashJudge()
    found = judge_texts(judge, texts, window=window, stride=stride, batch_size=batch_size)
    assert sum(shape[0] for shape in judge.shapes) == 22
    assert judge.shapes[-1][0] == (22 % batch_size or batch_size)  # mostly not full
    for text, nats, tokens in zip(texts, found.nats.tolist(), found.tokens.tolist(), strict=True):
        alone = plain_loop(judged_tokens(judge, text), window, stride)
        assert (nats, tokens) == (pytest.approx(math.fsum(alone), abs=1e-9), len(alone))


def test_end_tokens_are_context_and_never_scored():
    documents = ["once", "", f"up{END}on", "a time"]
    judge = HashJudge()
    tokens = judged_tokens(judge, documents)
    end = judge.eos_id
    assert tokens == [end, *b"once", end, *b"up", end, *b"on", end, *b"a time"]
    found = judge_texts(judge, [documents], window=6, stride=2)
    expected = plain_loop(tokens, 6, 2)
    assert len(expected) == found.tokens.item() == len("onceupona time")
    assert found.nats.item() == pytest.approx(math.fsum(expected), abs=1e-9)
    apart = judge_texts(judge, [[document] for document in documents], window=6, stride=2)
    assert found.nats.item() != pytest.approx(apart.nats.sum().item())


def test_the_figures_are_their_definitions():
    nats, tokens, characters = [30.0, 8.0, 45.0], [10, 4, 20], 100
    found = Judgement(torch.tensor(nats), torch.tensor(tokens), characters)
    mean = sum(nats) / sum(tokens)
    spread = sum((n - mean * t) ** 2 for n, t in zip(nats, tokens, strict=True))
    error = math.sqrt(3 / 2 * spread) / sum(tokens)
    assert found.nats_per_token == pytest.approx(mean)
    assert found.standard_error == pytest.approx(error)
    assert found.perplexity == pytest.approx(math.exp(mean))
    assert found.perplexity_error == pytest.approx(math.exp(mean) * error)
    assert found.bits_per_character == pytest.approx(sum(nats) / math.log(2) / characters)


def test_one_text_has_no_standard_error():
    found = Judgement(torch.tensor([30.0]), torch.tensor([10]), 50)
    assert (found.standard_error, found.perplexity_error) == (None, None)
    assert mean_and_error([4.0]) == (4.0, None)


def test_the_standard_error_covers_the_truth_as_often_as_it_says():
    """Texts of many lengths whose tokens share a level; 1.96 errors hold the truth about 95 times in 100."""
    generator = torch.Generator().manual_seed(1)
    covered, trials, truth = 0, 1000, 3.0
    for _ in range(trials):
        tokens = torch.randint(20, 60, (50,), generator=generator)
        level = truth + 0.5 * torch.randn(50, generator=generator, dtype=torch.float64)
        noise = torch.randn(50, generator=generator, dtype=torch.float64) * tokens.sqrt()
        found = Judgement(level * tokens + noise, tokens, 1)
        covered += abs(found.nats_per_token - truth) < 1.96 * found.standard_error
    assert 0.92 < covered / trials < 0.97


def test_mean_entropy_is_a_mean_over_samples():
    values = [4.0, 5.5, 3.25, 6.0]
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert error == pytest.approx(statistics.stdev(values) / 2)


def test_characters_count_once_and_end_tokens_not():
    found = judge_texts(HashJudge(), [["naïve ☂", "b"], ["c"]])
    assert found.characters == 9


def test_whoever_watches_sees_every_batch():
    seen = []

    def watch(batches):
        for batch in batches:
            yield batch
            seen.append(len(batch))

    judge_texts(HashJudge(), [[letters(30)]], window=8, stride=4, batch_size=4, watch=watch)
    assert seen == [4, 3]


@pytest.mark.parametrize(
    ("window", "stride", "said"),
    [
        (1, 1, "window must be from 2 to inf, what hash can read, got 1"),
        (8, 8, "stride must be from 1 to 7, less than the window, got 8"),
        (8, 0, "stride must be from 1 to 7, less than the window, got 0"),
    ],
)
def test_windows_that_leave_a_token_without_context_are_refused(window, stride, said):
    with pytest.raises(ValueError, match=said):
        judge_texts(HashJudge(), [["abc"]], window=window, stride=stride)


def test_a_window_longer_than_the_judge_reads_is_refused():
    judge = HashJudge()
    judge.context = 32
    check_windows(judge, 32, 31)
    with pytest.raises(ValueError, match="window must be from 2 to 32, what hash can read, got 33"):
        check_windows(judge, 33, 16)


@pytest.mark.parametrize("texts", [[], [[]], [[""], []]])
def test_nothing_to_score_is_an_error(texts):
    with pytest.raises(ValueError, match="texts must hold at least one token to score, got none"):
        judge_texts(HashJudge(), texts)


def test_bad_batch_is_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        judge_texts(HashJudge(), [["abc"]], batch_size=0)


def test_probabilities_that_are_not_finite_are_said():
    class Broken(HashJudge):
        def log_p(self, tokens: Tensor) -> Tensor:
            return super().log_p(tokens) / 0.0

    with pytest.raises(FloatingPointError, match="hash gives probabilities that are not finite in float64"):
        judge_texts(Broken(), [["abc"]])
