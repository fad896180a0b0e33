"""The reference implementation's numbers from its checkpoints: logits and losses to 1e-5 in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bd3lm.interop import load, save, save_reference
from bd3lm.methods import BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import Bidirectional, BlockCausal, BlockDiffusion, BlockReading, Transformer
from bd3lm.objectives import BlockDenoiser, TokenBatch
from tests.interop.small import PARITY

BLOCKS, ONE_BLOCK = "bd3lm-block4", "mdlm-noblocks"
TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


def vectors(name: str) -> dict[str, Tensor]:
    return load_file(PARITY / name / "vectors.safetensors")


def training_logits(model: Transformer, config: LanguageModelConfig, data: dict[str, Tensor]) -> Tensor:
    """Raw logits of the noisy tokens, with the layout used in training."""
    assert isinstance(config.method, BlockDiffusionMethod)
    length, block_size = data["x0"].shape[1], config.method.block_size
    if block_size == length:
        return model.head(model(data["xt"], layout=Bidirectional(length)))
    tokens = torch.cat((data["xt"], data["x0"]), dim=1)
    return model.head(model(tokens, layout=BlockDiffusion(length, block_size)))


@pytest.fixture(params=[BLOCKS, ONE_BLOCK])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_logits(name: str) -> None:
    data = vectors(name)
    model, config = load(PARITY / name)
    with torch.no_grad():
        torch.testing.assert_close(training_logits(model, config, data), data["logits"], **TOLERANCE)


def test_loss_written_out(name: str) -> None:
    data = vectors(name)
    model, config = load(PARITY / name)
    mask_id = config.mask_id
    with torch.no_grad():
        logits = training_logits(model, config, data)
    logits[..., mask_id] = -torch.inf
    nats = -logits.log_softmax(-1).gather(-1, data["x0"].unsqueeze(-1)).squeeze(-1)
    loss = torch.where(data["xt"] == mask_id, nats / data["t"], 0.0)
    torch.testing.assert_close(loss, data["loss_per_token"], **TOLERANCE)


@pytest.mark.parametrize("algorithm", ["single_pass", "two_pass"])
def test_loss_by_the_library(name: str, algorithm: str) -> None:
    data = vectors(name)
    model, config = load(PARITY / name)
    method = config.method
    assert isinstance(method, BlockDiffusionMethod)
    denoiser = BlockDenoiser(
        model,
        TokenBatch.of(data["x0"], score_first=True),
        BlockReading(block_size=method.block_size, mask_id=config.mask_id),
        algorithm=algorithm,
    )
    hidden = data["xt"] == config.mask_id
    with torch.no_grad():
        nats = denoiser.nats(hidden.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(nats / data["t"], data["loss_per_token"], **TOLERANCE)


def test_vectors_mask_some_tokens_and_not_all(name: str) -> None:
    """Shows that the tests above cover both."""
    data = vectors(name)
    hidden = data["xt"] == load(PARITY / name)[1].mask_id
    assert 0 < hidden.sum() < hidden.numel()
    assert torch.equal(hidden, data["loss_per_token"] != 0)
    assert torch.equal(data["xt"][~hidden], data["x0"][~hidden])


def test_decoding_without_a_cache() -> None:
    data = vectors(BLOCKS)
    model, _ = load(PARITY / BLOCKS)
    tokens = data["decode_input"]
    with torch.no_grad():
        logits = model.head(model(tokens, layout=BlockCausal(tokens.shape[1], 4)))
    torch.testing.assert_close(logits[:, -4:], data["decode_logits"], **TOLERANCE)


@pytest.mark.parametrize("segment", [4, 8, 16])
def test_decoding_through_the_cache(segment: int) -> None:
    """Clean blocks fill the cache, `segment` tokens per pass; the noisy block is read against it."""
    data = vectors(BLOCKS)
    model, _ = load(PARITY / BLOCKS)
    tokens = data["decode_input"]
    clean, noisy = tokens[:, :-4], tokens[:, -4:]
    cache = model.new_cache(tokens.shape[0], segment=segment)
    with torch.no_grad():
        for part in clean.split(segment, dim=1):
            model(part, layout=BlockCausal(part.shape[1], 4, keys_only=True), cache=cache)
            cache.advance(part.shape[1])
        logits = model.head(model(noisy, layout=BlockCausal(4, 4), cache=cache))
    torch.testing.assert_close(logits, data["decode_logits"], **TOLERANCE)


def test_what_the_configs_say() -> None:
    _, blocks = load(PARITY / BLOCKS)
    assert blocks.method == BlockDiffusionMethod(block_size=4)
    assert (blocks.network.vocab_size, blocks.network.context, blocks.network.heads) == (61, 32, 2)
    assert blocks.network.adaln
    assert not blocks.network.time_conditioning
    _, one = load(PARITY / ONE_BLOCK)
    assert one.method == BlockDiffusionMethod(block_size=32)  # its config says 4, which is unused


def test_rewritten_checkpoints_give_the_same_logits(name: str, tmp_path: Path) -> None:
    """The reference's file, converted to our format and back, loses nothing."""
    data = vectors(name)
    model, config = load(PARITY / name)
    save(model, config, f"{tmp_path}/ours")
    save_reference(*load(f"{tmp_path}/ours"), f"{tmp_path}/theirs")
    again, same = load(f"{tmp_path}/theirs")
    assert same == config
    with torch.no_grad():
        assert torch.equal(training_logits(again, same, data), training_logits(model, config, data))
    written = load_file(f"{tmp_path}/theirs/model.safetensors")
    original = load_file(PARITY / name / "model.safetensors")
    assert set(original) - set(written) == {"sampling_eps_min", "sampling_eps_max"}
    assert all(torch.equal(tensor, original[key]) for key, tensor in written.items())
