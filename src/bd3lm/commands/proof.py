"""`bd3lm prove`: a block diffusion model small enough to know everything about.

Every text that a tiny random model can write is enumerated, so its likelihood must sum to one, its bounds
must lie in order, and its sampler must agree with both.
"""

from itertools import product

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from bd3lm.evaluation import ExactLikelihood, draw_orders, exact_likelihood, importance_weighted_nll
from bd3lm.models import BlockReading, Transformer, TransformerConfig
from bd3lm.objectives import TokenBatch
from bd3lm.sampling import BlockWriter, Request, sample

_LETTERS = "abc"
_MASK = len(_LETTERS)
_LENGTH, _BLOCK, _ORDERS = 6, 3, 4
_READING = BlockReading(block_size=_BLOCK, mask_id=_MASK)
_LEAST_EXPECTED = 5.0  # times, for a text to count on its own in a χ² test
_WEIGHT_SCALE = 0.3  # smaller weights give nearly uniform texts, which would prove little


def run_proof(*, seed: int = 0, samples: int = 20_000, console: Console | None = None) -> bool:
    """Print the proof; True when everything agreed."""
    if samples < 100:
        raise ValueError(f"samples must be at least 100 for the comparison to mean anything, got {samples}")
    console = console or Console()
    model = _tiny_model(seed)
    texts = torch.tensor(list(product(range(len(_LETTERS)), repeat=_LENGTH)))
    console.print(
        f"[bold]A tiny block diffusion model[/]: {len(_LETTERS)} letters, texts of {_LENGTH} in blocks of "
        f"{_BLOCK}, random weights. It can write {len(texts)} texts, and here all are accounted for.\n"
    )
    batch = TokenBatch.of(texts, score_first=True)
    exact = exact_likelihood(model, batch, _READING)
    log_p = -exact.nll.sum(1)
    total = log_p.exp().sum().item()
    ordered = _print_bounds(console, model, batch, exact, seed)
    fits = _print_samples(console, model, texts, log_p.exp(), samples)
    sums_to_one = abs(total - 1.0) < 1e-9
    console.print(f"\nThe likelihoods of all {len(texts)} texts sum to [bold]{total:.12f}[/].")
    verdict = sums_to_one and ordered and fits
    console.print("[green]Everything agrees.[/]" if verdict else "[red]Something disagrees.[/]")
    return verdict


def _tiny_model(seed: int) -> Transformer:
    generator = torch.Generator().manual_seed(seed)
    config = TransformerConfig(
        vocab_size=_MASK + 1, layers=2, hidden=16, heads=2, context=_LENGTH, dropout=0.0
    )
    model = Transformer(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(std=_WEIGHT_SCALE, generator=generator)
    return model


def _print_bounds(
    console: Console, model: Transformer, batch: TokenBatch, exact: ExactLikelihood, seed: int
) -> bool:
    """Average figures over the model's own texts: the exact one, and the bounds others must make do with."""
    p = (-exact.nll.sum(1)).exp()
    tighter = importance_weighted_nll(
        model,
        batch,
        _READING,
        draw_orders(
            _ORDERS, len(batch.tokens), _LENGTH, _BLOCK, generator=torch.Generator().manual_seed(seed)
        ),
    )
    figures = [
        ("exact", "=", "log-likelihood, by 2^n − 1 mask patterns", exact.nll),
        ("importance-weighted", "≤", f"{_ORDERS} random orders (expected to lie between)", tighter),
        ("NELBO", "≤", "the paper's bound, without its Monte-Carlo noise", exact.nelbo),
    ]
    table = Table("estimator", "", "perplexity per token", "what it is", title="How likely is a text?")
    values = []
    for name, relation, meaning, nats in figures:
        values.append((p * nats.sum(1)).sum().item() / _LENGTH)
        table.add_row(name, relation, f"{torch.tensor(values[-1]).exp().item():.4f}", meaning)
    console.print(table)
    return values[0] <= values[-1]  # the sampled figure lies between them only in expectation


def _print_samples(console: Console, model: Transformer, texts: Tensor, p: Tensor, samples: int) -> bool:
    """Sampled frequencies beside exact probabilities, with a χ² test over all texts."""
    counts = torch.zeros(len(texts), dtype=torch.float64)
    place = len(_LETTERS) ** torch.arange(_LENGTH - 1, -1, -1)
    chunks = torch.arange(samples).split(2000)
    writer = BlockWriter(model, reading=_READING, context=model.config.context)
    nothing = torch.empty(0, dtype=torch.long)
    for seeds in track(chunks, f"sampling {samples} texts", console=console, transient=True):
        requests = [Request(nothing, seed, _LENGTH) for seed in seeds.tolist()]
        drawn = torch.stack([text.tokens for text in sample(writer, requests, batch_size=len(seeds))])
        counts += torch.bincount((drawn * place).sum(1), minlength=len(texts))
    table = Table("text", "exact probability", "sampled", title="Does the sampler agree?")
    for index in p.argsort(descending=True)[:8].tolist():
        text = "".join(_LETTERS[i] for i in texts[index].tolist())
        table.add_row(text, f"{p[index]:.4f}", f"{counts[index] / samples:.4f}")
    console.print(table)
    expected = p * samples
    chi2, freedom, p_value = _chi_squared(counts, expected)
    console.print(
        f"χ² over all texts: {chi2:.1f} for {freedom} degrees of freedom{_pooled(expected, samples)}, "
        f"p = {p_value:.3f}",
        soft_wrap=True,
    )
    return p_value > 1e-4


def _pooled(expected: Tensor, samples: int) -> str:
    """Why there are fewer degrees of freedom than texts: what `_chi_squared` counts together."""
    rare = int((expected < _LEAST_EXPECTED).sum())
    if rare < 2:
        return ""
    often = f"{_LEAST_EXPECTED:g} times in {samples:,}"
    return f" (the {rare} texts expected fewer than {often} are counted together)"


def _chi_squared(observed: Tensor, expected: Tensor) -> tuple[float, int, float]:
    """Pearson's test; texts too rare to be expected five times are counted together."""
    rare = expected < _LEAST_EXPECTED
    observed = torch.cat((observed[~rare], observed[rare].sum().view(1)))
    expected = torch.cat((expected[~rare], expected[rare].sum().view(1)))
    keep = expected > 0
    chi2 = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = int(keep.sum()) - 1
    if not freedom:
        return 0.0, 0, 1.0
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return chi2.item(), freedom, torch.special.gammaincc(half, chi2 / 2).item()
