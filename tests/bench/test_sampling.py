"""What a sampling benchmark times: whole texts, as the case says."""

import pytest
import torch

from bd3lm.bench import SamplingCase, Shape, measure_sampling, sampling

CPU = torch.device("cpu")
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "context": 8, "vocabulary": 11}


@pytest.mark.parametrize("method", ["bd3lm", "mdlm", "ar"])
def test_texts_are_written_to_their_full_length_from_one_token(timed, method):
    """So many new tokens as the rate is computed with, for one evaluation each."""
    case = SamplingCase(shape=Shape(method=method, **SHAPE), batch_size=3, length=8, cache=method != "mdlm")
    measure_sampling(case, device=CPU)
    texts = timed[-1]()
    assert [len(text.tokens) for text in texts] == [8, 8, 8]
    assert case.tokens == 3 * 7 == sum(text.sample.evaluations for text in texts)


def test_the_cache_the_nucleus_and_the_precision_are_the_cases(timed, monkeypatch):
    seen = []

    class Model:
        def __init__(self, network, config) -> None:
            self.network = network

        def generate(self, prompts, settings) -> None:
            weights = next(self.network.parameters())
            seen.append((len(prompts), settings.batch_size, settings.cache, settings.top_p, weights.dtype))
            assert not self.network.training
            assert not settings.stop_at_eos

    monkeypatch.setattr(sampling, "LanguageModel", Model)
    shape = Shape(**SHAPE)
    measure_sampling(SamplingCase(shape=shape, length=8), device=CPU)
    measure_sampling(
        SamplingCase(shape=shape, batch_size=2, length=8, cache=False, top_p=1.0, dtype="bfloat16"),
        device=CPU,
    )
    for call in timed:
        call()
    assert seen == [(1, 1, True, 0.9, torch.float32), (2, 2, False, 1.0, torch.bfloat16)]


def test_a_text_of_one_token_leaves_nothing_to_time():
    with pytest.raises(ValueError, match="length must be at least 2, since the first token is given, got 1"):
        SamplingCase(length=1)
