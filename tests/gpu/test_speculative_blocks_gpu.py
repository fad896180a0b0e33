"""Blocks written several tokens a pass on a GPU, whose passes are recorded, are those of one token a pass."""

import pytest
import torch

from bd3lm.sampling import (
    BlockWriter,
    FirstHitting,
    Request,
    Sharpening,
    Speculation,
    SpeculativeBlockWriter,
    Stopping,
    sample,
)
from tests.oracles.networks import MASK, blocks_of, tiny_transformer

pytestmark = pytest.mark.gpu
CONTEXT = 32
PROMPTS = [[0], [1, 3, 0, 1, 3], [3] * 40, [0, MASK, 1, MASK, MASK, 3]]
SETTINGS = [Sharpening(), Sharpening(top_p=0.8), Sharpening(temperature=0.7, top_k=2), Sharpening(top_k=1)]


@pytest.mark.parametrize("batch_size", [1, 24])
@pytest.mark.parametrize("options", [{"causal_clean": True}, {"previous_token": True}], ids=str)
@pytest.mark.parametrize("block_size", [2, 4])
def test_the_tokens_are_those_without_speculation(
    block_size: int, options: dict[str, bool], batch_size: int
) -> None:
    model = tiny_transformer(5, context=CONTEXT).cuda()
    how = {
        "reading": blocks_of(block_size, **options),
        "context": CONTEXT,
        "unmasking": FirstHitting(lean=0.5),
    }
    writer = SpeculativeBlockWriter(model, speculation=Speculation(drafts=3), **how)
    texts = [
        Request(torch.tensor(prompt), seed, 50, sharpening=sharpening, stopping=stopping)
        for seed, prompt in enumerate(PROMPTS)
        for sharpening in SETTINGS
        for stopping in (Stopping(), Stopping(eos_id=3, entropy_floor=0.6, entropy_window=16, redraws=1))
    ]
    expected = sample(BlockWriter(model, **how), texts, batch_size=batch_size)
    for mine, theirs in zip(sample(writer, texts, batch_size=batch_size), expected, strict=True):
        assert torch.equal(mine.tokens, theirs.tokens)
        assert (mine.stopped_by, mine.redraws, mine.seed) == (
            theirs.stopped_by,
            theirs.redraws,
            theirs.seed,
        )
