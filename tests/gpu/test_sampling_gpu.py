"""On a GPU the samplers write what they write on a CPU, and keep doing so for long texts in bfloat16."""

import pytest
import torch

from bd3lm.models import Transformer
from bd3lm.sampling import (
    Ancestral,
    AutoregressiveWriter,
    BlockWriter,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Remasking,
    Request,
    SlidingWriter,
    Stopping,
    Writer,
    sample,
)
from tests.oracles.networks import MASK, tiny_transformer

pytestmark = pytest.mark.gpu
CONTEXT = 32
PROMPTS = [[0], [1, 3, 0, 1, 3], [3] * 40, [0, MASK, 1, MASK, MASK, 3]]


def requests(length: int) -> list[Request]:
    return [Request(torch.tensor(prompt), seed, length) for seed, prompt in enumerate(PROMPTS)]


def writers(model: Transformer) -> dict[str, Writer]:
    rules = [FirstHitting(), Ancestral(7), Remasking(steps=9, eta=0.4), MostConfident(threshold=0.7)]
    found: dict[str, Writer] = {
        f"blocks of {n}, {rule}": BlockWriter(
            model, block_size=n, mask_id=MASK, context=CONTEXT, unmasking=rule
        )
        for n in (1, 4)
        for rule in [*rules, EntropyBound(0.2)]
    }
    found["causal clean"] = BlockWriter(model, block_size=4, mask_id=MASK, context=CONTEXT, causal_clean=True)
    found["autoregressive"] = AutoregressiveWriter(model, mask_id=MASK, context=CONTEXT)
    found["sliding"] = SlidingWriter(model, mask_id=MASK, context=CONTEXT)
    return found


def test_the_tokens_are_those_of_a_cpu_in_double_precision():
    here = tiny_transformer(5, context=CONTEXT)
    there = tiny_transformer(5, context=CONTEXT).cuda()
    for (name, on_cpu), on_gpu in zip(writers(here).items(), writers(there).values(), strict=True):
        stopping = Stopping(entropy_floor=0.6, entropy_window=16, redraws=1)
        expected = sample(on_cpu, requests(90), stopping=stopping)
        found = sample(on_gpu, requests(90), stopping=stopping, batch_size=3, device="cuda")
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.tokens, theirs.tokens), name
            assert (mine.evaluations, mine.fill_passes, mine.stopped_by, mine.redraws) == (
                theirs.evaluations,
                theirs.fill_passes,
                theirs.stopped_by,
                theirs.redraws,
            ), name


def test_bfloat16_writes_past_the_context_without_a_mask_left():
    model = tiny_transformer(5, context=CONTEXT, dtype=torch.bfloat16, hidden=64).cuda()
    for name, writer in writers(model).items():
        for text in sample(writer, requests(200), device="cuda"):
            assert len(text.tokens) == 200, name
            assert not (text.tokens == MASK).any(), name
