"""Writers, requests and networks that the tests of the loop share."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Purpose, counter_uniform
from bd3lm.models import BlockReading, Denoiser, DraftReading
from bd3lm.sampling import (
    Ancestral,
    AutoregressiveWriter,
    BlockWriter,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Remasking,
    Request,
    Sample,
    SlidingWriter,
    Speculation,
    SpeculativeWriter,
    Stopping,
    UnmaskingRule,
    Writer,
    sample,
)
from tests.oracles.networks import (
    CLEAN,
    MASK,
    blocks_of,
    mask_of,
    network_of,
    tiny_transformer,
)

EOS = 3
CONTEXT = 12
MODEL = tiny_transformer(9, vocab_size=8)
TIMED = tiny_transformer(3, vocab_size=8, adaln=True, time_conditioning=True, conditioning_dim=32)
LLAMA, QWEN = (network_of(family, 9, vocab_size=7) for family in ("Llama", "Qwen3"))


def blocks(model: Denoiser, block_size: int = 4, **options: Any) -> BlockWriter:
    reading = how_read(block_size, options, mask_of(model))
    return BlockWriter(model, **reading | {"context": CONTEXT} | options)


def how_read(block_size: int, options: dict[str, Any], mask_id: int = MASK) -> dict[str, BlockReading]:
    """The reading, whose options are taken out of those of a writer."""
    told = {name: options.pop(name) for name in ("causal_clean", "previous_token") if name in options}
    return {"reading": blocks_of(block_size, mask_id=mask_id, **told)}


def autoregressive(model: Denoiser, **options: Any) -> AutoregressiveWriter:
    how = {"mask_id": mask_of(model), "context": CONTEXT, "score_first": True}
    return AutoregressiveWriter(model, **how | options)


def speculative(
    model: Any,
    *,
    context: int = CONTEXT,
    score_first: bool = True,
    shifted: bool = True,
    previous_token: bool = False,
    **how: Any,
) -> SpeculativeWriter:
    """Three drafts, and otherwise as `how` says."""
    return SpeculativeWriter(
        model,
        reading=DraftReading(mask_id=mask_of(model), masks=4, shifted=shifted, previous_token=previous_token),
        speculation=Speculation(**{"drafts": 3} | how),
        context=context,
        score_first=score_first,
    )


def sliding(model: Denoiser, context: int = CONTEXT, **options: Any) -> SlidingWriter:
    reading = how_read(context, options, mask_of(model))
    return SlidingWriter(model, context=context, **reading | {"stride": 5} | options)


RULES: dict[str, UnmaskingRule] = {
    "first-hitting": FirstHitting(),
    "two a pass": FirstHitting(2),
    "ancestral": Ancestral(3),
    "remasking": Remasking(steps=6, eta=0.5),
    "threshold": MostConfident(threshold=0.6),
    "two likeliest": MostConfident(tokens_per_pass=2),
    "entropy": EntropyBound(0.6),
}
WRITERS: dict[str, Callable[..., Writer]] = {
    **{name: partial(blocks, unmasking=rule) for name, rule in RULES.items()},
    **{
        f"{name}, causal": partial(blocks, unmasking=RULES[name], causal_clean=True)
        for name in ("first-hitting", "remasking", "threshold")
    },
    **{
        f"{name}, with the token before": partial(blocks, unmasking=RULES[name], previous_token=True)
        for name in ("first-hitting", "remasking", "threshold")
    },
    "blocks of one": partial(blocks, block_size=1),
    "uncached": partial(blocks, cache=False),
    "autoregressive": autoregressive,
    "autoregressive after a first token": partial(autoregressive, score_first=False),
    "autoregressive uncached": partial(autoregressive, cache=False),
    "sliding": sliding,
    "sliding, with the token before": partial(sliding, previous_token=True),
    "sliding and remasking": partial(sliding, unmasking=RULES["remasking"]),
    "sliding by whole contexts": partial(sliding, stride=CONTEXT),
}
every_writer = pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
every_rule = pytest.mark.parametrize("name", [*RULES, "autoregressive", "sliding", "sliding and remasking"])


def tokens(text: str) -> Tensor:
    """ "0_ 13" is a template of four tokens with one gap."""
    return torch.tensor([MASK if c == "_" else int(c) for c in text.replace(" ", "")], dtype=torch.long)


def prompt(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(CLEAN)[torch.randint(0, len(CLEAN), (length,), generator=generator)]


REQUESTS = [
    Request(prompt(0), seed=1, length=7),
    Request(prompt(3), seed=2, length=8),
    Request(prompt(4), seed=3, length=5),
    Request(prompt(9), seed=4, length=9),  # nothing to write
    Request(prompt(8), seed=5, length=13),
    Request(prompt(26), seed=6, length=31),  # the prompt is longer than the context
    Request(tokens("0__1 ____ 3"), seed=7, length=10),
    Request(tokens("____ 1301 1_01 0131 1013 _0"), seed=8, length=23),
    Request(prompt(10), seed=9, length=2 * CONTEXT + 1),
    Request(tokens("0__1 1301 1_01 0131 1013 301"), seed=10, length=23),  # what follows the gaps is given
]

EARLY = Stopping(eos_id=EOS, entropy_floor=1.0, entropy_window=3, redraws=2)


def suited(requests: Sequence[Request], writer: Writer) -> list[Request]:
    """With the writer's mask, and with a first token, where the writer needs one."""
    requests = [
        Request(r.given.masked_fill(r.given == MASK, writer.mask_id), r.seed, r.length) for r in requests
    ]
    if getattr(writer, "score_first", True):
        return requests
    return [Request(torch.cat((torch.tensor([0]), r.given[1:])), r.seed, max(r.length, 2)) for r in requests]


def facts(sample: Sample) -> dict[str, Any]:
    """All that a sample says, but for its place among the requests."""
    return {k: v for k, v in vars(sample).items() if k != "index"} | {"tokens": sample.tokens.tolist()}


class Counting:
    """A network that notes how many rows each of its passes had, and what noise it was told."""

    def __init__(self, model: Denoiser) -> None:
        self.model = model
        self.rows: list[int] = []
        self.told: list[Tensor | None] = []

    def __call__(self, tokens: Tensor, *, noise: Tensor | None = None, **options: Any) -> Tensor:
        assert not torch.is_grad_enabled()
        self.rows.append(len(tokens))
        self.told.append(noise)
        return self.model(tokens, noise=noise, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@cache
def one_by_one(make: Callable[..., Writer]) -> list[tuple[Sample, int]]:
    """Every request alone: its text, and how many passes the network made for it."""
    network = Counting(MODEL)
    writer = make(network)
    found = []
    for request in suited(REQUESTS, writer):
        network.rows.clear()
        (text,) = sample(writer, [request])
        found.append((text, len(network.rows)))
    return found


def drawn(log_p: Tensor, seed: int, position: int, repeat: int = 0) -> int:
    """Gumbel-max with the noise of this position."""
    place = torch.tensor(seed), torch.tensor(position)
    u = counter_uniform(*place, Purpose.TOKEN, len(log_p), repeat=repeat)
    return int((log_p - (-u.log()).log()).argmax())
