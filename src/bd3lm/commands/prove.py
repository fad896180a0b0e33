"""`bd3lm prove`: check a block diffusion model that is small enough to enumerate.

It lists every text that a tiny random model can write. The likelihoods must sum to one, the bounds must lie
in order, and the sampler's frequencies must match the likelihoods.
"""

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from bd3lm.commands.shared.command import Command

if TYPE_CHECKING:
    from torch import Tensor

    from bd3lm.evaluation import ExactLikelihood
    from bd3lm.io.console import Console
    from bd3lm.models import BlockReading, Denoiser, Transformer
    from bd3lm.objectives import TokenBatch

_LETTERS = "abc"
_MASK = len(_LETTERS)
_LENGTH, _BLOCK, _ORDERS = 6, 3, 4
_LEAST_EXPECTED = 5.0  # expected count that a text needs to be its own class in the χ² test
_WEIGHT_SCALE = 0.3  # smaller weights make all texts nearly equally likely, which would prove little


@dataclass(frozen=True)
class Prove(Command):
    """Check the mathematics on a model so small that all its texts can be enumerated.

    The likelihoods must sum to one, the bounds must lie in order, and the sampler must agree with them.
    """

    kind = "prove"

    seed: int = 0
    """Seed of the random weights."""
    samples: int = 20_000
    """Texts to draw for the comparison."""

    def run(self) -> int:
        return 0 if run_proof(self) else 1


def run_proof(flags: Prove, *, console: "Console | None" = None) -> bool:
    """Print the checks; True if everything agrees."""
    import torch
    from rich.text import Text

    from bd3lm.evaluation import exact_likelihood
    from bd3lm.io.console import Console
    from bd3lm.objectives import TokenBatch

    if flags.samples < 100:
        raise ValueError(
            f"samples must be at least 100 for the comparison to mean anything, got {flags.samples}"
        )
    console = console or Console()
    model = _tiny_model(flags.seed)
    texts = torch.tensor(list(product(range(len(_LETTERS)), repeat=_LENGTH)))
    console.print(
        Text.assemble(
            ("A tiny block diffusion model", "bold"),
            f": {len(_LETTERS)} letters, texts of {_LENGTH} in blocks of {_BLOCK}, random weights. It can "
            f"write {len(texts)} texts; all of them are enumerated here.\n",
        )
    )
    batch = TokenBatch.of(texts, score_first=True)
    exact = exact_likelihood(model, batch, _reading())
    log_p = -exact.nll.sum(1)
    total = log_p.exp().sum().item()
    ordered = _print_bounds(console, model, batch, exact, flags.seed)
    fits = _print_samples(console, model, texts, log_p.exp(), flags.samples)
    sums_to_one = abs(total - 1.0) < 1e-9
    console.print(
        Text.assemble(f"\nThe likelihoods of all {len(texts)} texts sum to ", (f"{total:.12f}", "bold"), ".")
    )
    verdict = sums_to_one and ordered and fits
    console.print(
        Text("Everything agrees.", style="green") if verdict else Text("Something disagrees.", style="red")
    )
    return verdict


def _reading() -> "BlockReading":
    from bd3lm.models import BlockReading

    return BlockReading(block_size=_BLOCK, mask_id=_MASK)


def _tiny_model(seed: int) -> "Transformer":
    import torch

    from bd3lm.models import Transformer, TransformerConfig

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
    console: "Console", model: "Denoiser", batch: "TokenBatch", exact: "ExactLikelihood", seed: int
) -> bool:
    """Print averages over the model's own texts: the exact likelihood, and the bounds used when it is out of
    reach."""
    import torch
    from rich.table import Table

    from bd3lm.evaluation import draw_orders, importance_weighted_nll

    p = (-exact.nll.sum(1)).exp()
    tighter = importance_weighted_nll(
        model,
        batch,
        _reading(),
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


def _print_samples(console: "Console", model: "Denoiser", texts: "Tensor", p: "Tensor", samples: int) -> bool:
    """Print sampled frequencies next to exact probabilities, with a χ² test over all texts."""
    import torch
    from rich.progress import track
    from rich.table import Table

    from bd3lm.sampling import BlockWriter, Request, sample

    counts = torch.zeros(len(texts), dtype=torch.float64)
    place = len(_LETTERS) ** torch.arange(_LENGTH - 1, -1, -1)
    chunks = torch.arange(samples).split(2000)
    writer = BlockWriter(model, reading=_reading(), context=_LENGTH)
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


def _pooled(expected: "Tensor", samples: int) -> str:
    """Why there are fewer degrees of freedom than texts: `_chi_squared` pools rare texts."""
    rare = int((expected < _LEAST_EXPECTED).sum())
    if rare < 2:
        return ""
    often = f"{_LEAST_EXPECTED:g} times in {samples:,}"
    return f" (the {rare} texts expected fewer than {often} are pooled)"


def _chi_squared(observed: "Tensor", expected: "Tensor") -> tuple[float, int, float]:
    """Pearson's χ² test. Texts expected fewer than five times are pooled."""
    import torch

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
