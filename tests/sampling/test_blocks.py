"""The block sampler draws from the distribution whose likelihood is exact, whatever batch a row sits in."""

from itertools import product

import pytest
import torch
from scipy import stats
from torch import Tensor

from bd3lm.evaluation import exact_likelihood
from bd3lm.models import BlockCausal, Transformer, TransformerConfig
from bd3lm.objectives import TokenBatch
from bd3lm.sampling import sample_blocks

LETTERS, MASK, LENGTH = 2, 2, 4


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(3)
    config = TransformerConfig(vocab_size=MASK + 1, layers=2, hidden=16, heads=2, context=LENGTH, dropout=0.0)
    network = Transformer(config).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(5.0)
    return network


def every_text(prompt: tuple[int, ...] = ()) -> Tensor:
    return torch.tensor([prompt + rest for rest in product(range(LETTERS), repeat=LENGTH - len(prompt))])


def chi2_p_value(drawn: Tensor, texts: Tensor, probabilities: Tensor) -> float:
    counts = (drawn.unsqueeze(1) == texts).all(-1).sum(0).double()
    expected = probabilities * len(drawn)
    assert counts.sum() == len(drawn)
    assert expected.min() > 5
    return float(stats.chisquare(counts.numpy(), expected.numpy()).pvalue)


def draw(
    model: Transformer, prompt: tuple[int, ...], rows: int, block_size: int, **options: bool | float
) -> Tensor:
    prompts = torch.tensor(prompt, dtype=torch.long).expand(rows, len(prompt))
    samples = sample_blocks(
        model,
        prompts,
        seeds=torch.arange(rows),
        length=LENGTH,
        block_size=block_size,
        mask_id=MASK,
        **options,
    )
    assert (samples.evaluations == LENGTH - len(prompt)).all()
    assert (samples.cache_passes == LENGTH // block_size - 1).all()
    return samples.tokens


@pytest.mark.parametrize("causal_clean", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("prompt", [(), (1,), (0, 1, 1)])
def test_frequencies_match_the_exact_likelihood(
    model: Transformer, prompt: tuple[int, ...], block_size: int, causal_clean: bool
) -> None:
    texts = every_text(prompt)
    batch = TokenBatch.of(texts, prompts=torch.full((len(texts),), len(prompt)))
    exact = exact_likelihood(model, batch, block_size=block_size, mask_id=MASK, causal_clean=causal_clean)
    p = (-exact.nll.sum(1)).exp()
    drawn = draw(model, prompt, 8_000, block_size, causal_clean=causal_clean)
    assert chi2_p_value(drawn, texts, p) > 1e-3


@pytest.mark.parametrize(("temperature", "nucleus_p"), [(0.5, 1.0), (2.0, 1.0), (1.0, 0.6), (0.7, 0.8)])
def test_sharpened_frequencies_match_the_sharpened_chain_rule(
    model: Transformer, temperature: float, nucleus_p: float
) -> None:
    """At block size 1 every token is drawn from its own tempered and truncated conditional."""
    texts = every_text()
    log_p = torch.zeros(len(texts), dtype=torch.float64)
    for place in range(LENGTH):
        seen = torch.cat((texts[:, :place], torch.full((len(texts), 1), MASK)), dim=1)
        with torch.no_grad():
            logits = model.head(model(seen, layout=BlockCausal(place + 1, 1))[:, -1])
        p = torch.softmax(logits[:, :LETTERS] / temperature, -1)
        likeliest, other = p.max(-1).values, p.min(-1).values
        p = torch.where((likeliest >= nucleus_p).unsqueeze(-1) & (p == other.unsqueeze(-1)), 0.0, p)
        p = p / p.sum(-1, keepdim=True)
        log_p += p.gather(1, texts[:, place : place + 1]).squeeze(1).log()
    drawn = draw(model, (), 8_000, 1, temperature=temperature, nucleus_p=nucleus_p)
    counts = (drawn.unsqueeze(1) == texts).all(-1).sum(0).double()
    expected = log_p.exp() * len(drawn)
    assert counts[expected == 0].sum() == 0
    kept = expected >= 5
    pooled = torch.stack((counts[~kept].sum(), expected[~kept].sum()))
    observed = torch.cat((counts[kept], pooled[:1])) if pooled[1] > 0 else counts[kept]
    wanted = torch.cat((expected[kept], pooled[1:])) if pooled[1] > 0 else expected[kept]
    assert stats.chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-3


def test_the_comparison_has_teeth(model: Transformer) -> None:
    """Samples of another block size, a different distribution, are told apart."""
    texts = every_text()
    batch = TokenBatch.of(texts, score_first=True)
    p = (-exact_likelihood(model, batch, block_size=4, mask_id=MASK).nll.sum(1)).exp()
    assert chi2_p_value(draw(model, (), 8_000, 2), texts, p) < 1e-6


def test_a_batch_equals_its_rows_alone(model: Transformer) -> None:
    batch = draw(model, (0,), 16, 2)
    prompt = torch.tensor([[0]])
    for seed in range(16):
        alone = sample_blocks(
            model, prompt, seeds=torch.tensor([seed]), length=LENGTH, block_size=2, mask_id=MASK
        )
        assert torch.equal(alone.tokens[0], batch[seed])


def test_texts_longer_than_the_context_keep_going(model: Transformer) -> None:
    samples = sample_blocks(
        model, torch.tensor([[0]]), seeds=torch.tensor([1]), length=40, block_size=2, mask_id=MASK
    )
    assert samples.tokens.shape == (1, 40)
    assert (samples.tokens != MASK).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": torch.tensor([[MASK]])}, "prompts must not hold the mask token"),
        ({"prompts": torch.empty(0, 2, dtype=torch.long)}, "at least one row"),
        ({"seeds": torch.arange(3)}, "seeds must be int64"),
        ({"length": 5}, "length must be a multiple of block_size 2"),
        ({"length": 0}, "at least the prompts' 1"),
    ],
)
def test_bad_input_is_named(model: Transformer, change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "prompts": torch.tensor([[0]]),
        "seeds": torch.tensor([1]),
        "length": 4,
        "block_size": 2,
        "mask_id": MASK,
    }
    with pytest.raises(ValueError, match=message):
        sample_blocks(model, **(arguments | change))  # type: ignore[arg-type]
