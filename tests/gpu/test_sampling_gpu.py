"""On a GPU the samplers write what they write on a CPU, and keep doing so for long texts in bfloat16.

In double precision passes are replayed but made of the plain kernels; in single precision and below they are
made of the fused ones (`models/decoding.py`), which count few tokens otherwise than many: hence the batches.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bd3lm.models import DraftReading, NetworkConfig, Transformer
from bd3lm.sampling import (
    Ancestral,
    AutoregressiveWriter,
    BlockWriter,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Remasking,
    Request,
    Sharpening,
    SlidingWriter,
    Speculation,
    SpeculativeBlockWriter,
    SpeculativeWriter,
    Stopped,
    Stopping,
    Writer,
    sample,
    without_replays,
    write,
)
from tests.oracles.networks import MASK, blocks_of, tiny_transformer
from tests.oracles.strangers import KeepingConfig, PlainConfig, stranger
from tests.sampling.asking import ending

pytestmark = pytest.mark.gpu
CONTEXT = 32
PROMPTS = [[0], [1, 3, 0, 1, 3], [3] * 40, [0, MASK, 1, MASK, MASK, 3]]


def requests(length: int) -> list[Request]:
    return [Request(torch.tensor(prompt), seed, length) for seed, prompt in enumerate(PROMPTS)]


def writers(model: Transformer) -> dict[str, Writer]:
    rules = [FirstHitting(), Ancestral(7), Remasking(steps=9, eta=0.4), MostConfident(threshold=0.7)]
    if not model.uses_noise:
        rules.append(FirstHitting(lean=1.0))
    found: dict[str, Writer] = {
        f"blocks of {n}, {rule}": BlockWriter(model, reading=blocks_of(n), context=CONTEXT, unmasking=rule)
        for n in (1, 4)
        for rule in [*rules, EntropyBound(0.2)]
    }
    found["blocks of 16"] = BlockWriter(model, reading=blocks_of(16), context=CONTEXT)
    found["causal clean"] = BlockWriter(model, reading=blocks_of(4, causal_clean=True), context=CONTEXT)
    found["with the token before"] = BlockWriter(
        model, reading=blocks_of(4, previous_token=True), context=CONTEXT
    )
    if not model.uses_noise:
        found["autoregressive"] = AutoregressiveWriter(model, mask_id=MASK, context=CONTEXT)
    found["sliding"] = SlidingWriter(model, reading=blocks_of(CONTEXT), context=CONTEXT)
    found["sliding, with the token before"] = SlidingWriter(
        model, reading=blocks_of(CONTEXT, previous_token=True), context=CONTEXT
    )
    return found


NETWORKS: dict[str, dict] = {
    "plain kernels": {"dtype": torch.float64},
    "fused kernels": {"dtype": torch.float32, "hidden": 64, "heads": 2},
    "fused kernels, adaptive norms": {"dtype": torch.float32, "hidden": 64, "heads": 2, "adaln": True},
    "told the time": {
        "dtype": torch.float32,
        "hidden": 64,
        "heads": 2,
        "adaln": True,
        "time_conditioning": True,
    },
}


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("batch_size", [1, 3, 32])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_tokens_are_those_of_a_cpu(network: str, batch_size: int):
    here = tiny_transformer(5, context=CONTEXT, **NETWORKS[network])
    there = tiny_transformer(5, context=CONTEXT, **NETWORKS[network]).cuda()
    texts = requests(90) + [Request(torch.tensor([1]), seed, 90) for seed in range(10, 30)]
    for (name, on_cpu), on_gpu in zip(writers(here).items(), writers(there).values(), strict=True):
        stopping = Stopping(entropy_floor=0.6, entropy_window=16, redraws=1)
        expected = sample(on_cpu, ending(texts, stopping))
        found = sample(on_gpu, ending(texts, stopping), batch_size=batch_size)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.tokens, theirs.tokens), name
            assert (mine.evaluations, mine.fill_passes, mine.stopped_by, mine.redraws) == (
                theirs.evaluations,
                theirs.fill_passes,
                theirs.stopped_by,
                theirs.redraws,
            ), name


@pytest.mark.parametrize("network", NETWORKS)
def test_chances_are_those_of_a_cpu(network: str):
    here = tiny_transformer(5, context=CONTEXT, **NETWORKS[network])
    there = tiny_transformer(5, context=CONTEXT, **NETWORKS[network]).cuda()
    pairs = [(name, (one, writers(there)[name])) for name, one in writers(here).items()]
    if not here.uses_noise:
        pairs += [
            (f"{kind.__name__}, speculative", (speculating(here), speculating(there)))
            for kind, speculating in SPECULATING.items()
        ]
    for name, both in pairs:
        told = []
        for writer in both:
            writer.alternatives = 2
            events = write(writer, requests(90), watch=True)
            samples = sorted((e.sample for e in events if isinstance(e, Stopped)), key=lambda s: s.index)
            told.append(samples)
        for mine, theirs in zip(*told, strict=True):
            assert torch.equal(mine.tokens, theirs.tokens), name
            assert [each or 0.0 for each in mine.log_p or ()] == pytest.approx(
                [each or 0.0 for each in theirs.log_p or ()], abs=1e-3
            ), name
            for one, other in zip(mine.alternatives, theirs.alternatives, strict=True):
                assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-3), name


SPECULATING: dict[type[Writer], Callable[[Transformer], Writer]] = {
    SpeculativeWriter: lambda model: SpeculativeWriter(
        model,
        reading=DraftReading(mask_id=MASK, masks=4, shifted=False),
        speculation=Speculation(drafts=3),
        context=CONTEXT,
    ),
    SpeculativeBlockWriter: lambda model: SpeculativeBlockWriter(
        model, reading=blocks_of(4), speculation=Speculation(drafts=3), context=CONTEXT
    ),
}
TIMED = {"vocab_size": 50258, "layers": 12, "hidden": 768, "heads": 12, "context": 1024}


def plainly(writer: Writer, texts: list[Request], batch_size: int) -> list[torch.Tensor]:
    """The texts by passes of plain kernels, launched one by one on the same device."""
    writer.model.attention_backend = "dense"
    try:
        with without_replays():
            return [text.tokens for text in sample(writer, texts, batch_size=batch_size)]
    finally:
        writer.model.attention_backend = "auto"


@pytest.mark.parametrize("batch_size", [1, 24])
@pytest.mark.parametrize("block_size", [None, 4, 16])
def test_at_the_size_that_is_timed_the_tokens_are_those_of_plain_passes(
    block_size: int | None, batch_size: int
):
    """In single precision; `bd3lm bench sample` times the same network, nucleus and rule in bfloat16."""
    model = tiny_transformer(5, dtype=torch.float32, **TIMED).cuda()
    common: dict[str, Any] = {"context": 1024, "sharpening": Sharpening(top_p=0.9)}
    if block_size is None:
        writer: Writer = AutoregressiveWriter(model, mask_id=MASK, **common)
    else:
        writer = BlockWriter(model, reading=blocks_of(block_size), **common)
    texts = [Request(torch.tensor([0]), seed, 96) for seed in range(batch_size)]
    found = [text.tokens for text in sample(writer, texts, batch_size=batch_size)]
    expected = plainly(writer, texts, batch_size)
    assert len({tuple(tokens.tolist()) for tokens in expected}) == batch_size
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("block_size", [None, 4])
def test_in_bfloat16_texts_are_as_frequent_as_by_plain_passes(block_size: int | None):
    """A sum in another order may turn a text, so what is compared is how often each text is written."""
    model = tiny_transformer(5, context=CONTEXT, dtype=torch.bfloat16, hidden=64, heads=2).cuda()
    common: dict[str, Any] = {"context": CONTEXT, "sharpening": Sharpening(top_p=0.9)}
    if block_size is None:
        writer: Writer = AutoregressiveWriter(model, mask_id=MASK, **common)
    else:
        writer = BlockWriter(model, reading=blocks_of(block_size), **common)
    number = 40_000
    texts = [Request(torch.tensor([0]), seed, 5) for seed in range(2 * number)]
    fused = [text.tokens for text in sample(writer, texts[:number], batch_size=4096)]
    plain = plainly(writer, texts[number:], 4096)  # other seeds: the two are independent
    one, other = (Counter(tuple(tokens.tolist()) for tokens in each) for each in (fused, plain))
    assert len(one | other) > 10
    for text in one | other:
        many, few = one[text], other[text]
        assert abs(many - few) < 4.5 * (many + few) ** 0.5, text


def test_bfloat16_writes_past_the_context_without_a_mask_left():
    model = tiny_transformer(5, context=CONTEXT, dtype=torch.bfloat16, hidden=64).cuda()
    for name, writer in writers(model).items():
        for text in sample(writer, requests(200)):
            assert len(text.tokens) == 200, name
            assert not (text.tokens == MASK).any(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_are_no_numbers_are_found_out(dtype):
    model = tiny_transformer(5, context=CONTEXT, hidden=64, heads=2, dtype=dtype).cuda()
    model.final_norm.weight.data[3] = torch.nan
    for writer in writers(model).values():
        with pytest.raises(FloatingPointError, match="cannot be written"):
            sample(writer, requests(64))


@pytest.mark.parametrize("previous_token", [False, True])
@pytest.mark.parametrize(
    "rule", [FirstHitting(), FirstHitting(2, lean=1.0), Ancestral(7), Remasking(steps=9)], ids=str
)
@pytest.mark.parametrize("alternatives", [None, 0, 3])
def test_the_host_does_not_wait_while_blocks_are_written(rule, previous_token, alternatives):
    """From the third block on, by when every pass has been recorded; so too with chances, unless they are
    read."""
    model = tiny_transformer(5, context=CONTEXT, hidden=64, heads=2, dtype=torch.bfloat16).cuda()
    writer = BlockWriter(
        model,
        reading=blocks_of(8, previous_token=previous_token),
        context=CONTEXT,
        unmasking=rule,
    )
    writer.alternatives = alternatives
    rows = writer.open([Request(torch.tensor([0]), 1, 128)], width=128)
    with torch.no_grad():
        for _ in range(4):
            list(writer.write(rows))
        with no_waiting():
            for _ in range(8):
                list(writer.write(rows))
    assert not (rows.text[0, :96] == MASK).any()


@pytest.mark.parametrize("alternatives", [None, 0, 3])
def test_the_host_does_not_wait_while_tokens_are_written(alternatives):
    model = tiny_transformer(5, context=CONTEXT, hidden=64, heads=2, dtype=torch.bfloat16).cuda()
    writer = AutoregressiveWriter(model, mask_id=MASK, context=CONTEXT)
    writer.alternatives = alternatives
    rows = writer.open([Request(torch.tensor([0]), 1, 64)], width=64)
    with torch.no_grad():
        for _ in range(4):
            list(writer.write(rows))
        with no_waiting():
            for _ in range(40):
                list(writer.write(rows))
    assert not (rows.text[0, :44] == MASK).any()


@pytest.mark.parametrize("network", NETWORKS)
def test_what_was_recorded_for_one_batch_serves_the_next_until_the_weights_are_others(network: str):
    here = tiny_transformer(5, context=CONTEXT, **NETWORKS[network])
    there = tiny_transformer(5, context=CONTEXT, **NETWORKS[network]).cuda()
    on_cpu, on_gpu = (BlockWriter(m, reading=blocks_of(4), context=CONTEXT) for m in (here, there))

    def assert_same(seed: int) -> None:
        text = [Request(torch.tensor([0, 1]), seed, 60)]
        (expected,), (found,) = sample(on_cpu, text), sample(on_gpu, text)
        assert torch.equal(found.tokens, expected.tokens)

    for seed in range(3):
        assert_same(seed)
    assert bool(on_gpu._left) != there.config.adaln
    for model in (here, there):  # in place, and past torch's counters, as fused optimizers write them
        for weight in model.parameters():
            weight.data.mul_(0.9)
    assert_same(3)
    for model in (here, there):  # other tensors, as loading or moving makes them
        for weight in model.parameters():
            weight.data = weight.data * 1.1
    assert_same(4)


@pytest.mark.parametrize("config", [KeepingConfig, PlainConfig])
def test_passes_that_wait_for_the_device_are_written_all_the_same(config: type[NetworkConfig]) -> None:
    """A recording of one would fail: a network that does not say otherwise is never recorded."""
    width = {"width": 8} if config is PlainConfig else {}
    network = stranger(config(vocab_size=4, context=CONTEXT, **width))
    head, looked = network.head, []
    network.head = lambda states: head(states * float(states.isfinite().all()))
    for device in ("cpu", "cuda"):
        network.to(device)
        writer = BlockWriter(network, reading=blocks_of(4), context=CONTEXT)
        looked.append([text.tokens.tolist() for text in sample(writer, requests(48), batch_size=4)])
    assert looked[0] == looked[1]
