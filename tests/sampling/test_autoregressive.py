"""Texts written token by token follow the chain rule, enumerated on networks small enough."""

import pytest
import torch
from torch import Tensor

from bd3lm.models import Transformer
from bd3lm.sampling import AutoregressiveWriter, Request, Sharpening, sample
from tests.oracles.networks import FAMILIES, MASK, mask_of, network_of, tiny_transformer
from tests.oracles.sampling import Law, Tokens, chi_square, in_tokens, sharpened
from tests.sampling.asking import drawn_by

pytestmark = pytest.mark.sweep(3)

M = MASK
FITS, FAILS = 1e-3, 1e-6  # p-values of samples that follow a law, and of those that do not


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_transformer(2)


def written(
    model: Transformer,
    *,
    given: Tokens,
    length: int = 4,
    rows: int = 1_000,
    context: int = 8,
    sharpening: Sharpening | None = None,
    **options: object,
) -> list[Tensor]:
    """Texts of the seeds 0, 1, …"""
    writer = AutoregressiveWriter(model, mask_id=mask_of(model), context=context, **options)
    requests = [Request(torch.tensor(given, dtype=torch.long), seed, length) for seed in range(rows)]
    return [text.tokens for text in sample(writer, drawn_by(requests, sharpening), batch_size=rows)]


@pytest.mark.parametrize(
    ("score_first", "given", "length"),
    [
        (True, (), 4),
        (True, (1, 0), 5),
        (True, (M, 3, M, 0), 5),
        (False, (3,), 5),
        (False, (1, 0, 3, 3), 7),
        (False, (1, M, 0, 3, M), 6),
    ],
    ids=str,
)
def test_tokens_follow_the_chain_rule(
    model: Transformer, score_first: bool, given: Tokens, length: int
) -> None:
    law = in_tokens(model, given, length, score_first=score_first)
    drawn = written(model, given=given, length=length, score_first=score_first)
    assert chi_square(drawn, law) > FITS


@pytest.mark.parametrize("cache", [True, False])
def test_a_bias_is_added_to_the_logits(model: Transformer, cache: bool) -> None:
    """By enumeration, of two requests side by side; one keeps a token out, one has no bias."""
    given, length, bias = (1, 0), 4, ((0, -100.0), (3, 1.5))
    writer = AutoregressiveWriter(model, mask_id=mask_of(model), context=8, cache=cache, biased=True)
    start = torch.tensor(given)
    requests = [Request(start, seed, length, logit_bias=bias) for seed in range(1_000)]
    requests += [Request(start, seed, length) for seed in range(1_000)]
    texts = [text.tokens for text in sample(writer, requests, batch_size=2_000)]
    plain = written(model, given=given, length=length, cache=cache)
    assert all(map(torch.equal, texts[1_000:], plain))
    assert all(0 not in text[2:].tolist() for text in texts[:1_000])
    added = torch.zeros(model.vocab_size)
    for token, number in bias:
        added[token] = number
    whole = in_tokens(model, given, length, score_first=False)
    law = tilted(whole, added, len(given))
    assert chi_square(texts[:1_000], law) > FITS
    assert chi_square(texts[:1_000], whole) < FAILS


def tilted(law: Law, added: Tensor, start: int) -> Law:
    """The law whose every next token has its probability times exp(added), normalised again."""
    found = {}
    for text in law:
        p = 1.0
        for at in range(start, len(text)):
            following: dict[int, float] = {}
            for other, q in law.items():
                if other[:at] == text[:at]:
                    following[other[at]] = following.get(other[at], 0.0) + q
            weights = {token: q * added[token].exp().item() for token, q in following.items()}
            p *= weights[text[at]] / sum(weights.values())
        found[text] = p
    return found


def test_the_mask_before_the_text_is_told_apart(model: Transformer) -> None:
    drawn = written(model, given=(3,), score_first=True)
    assert chi_square(drawn, in_tokens(model, (3,), 4, score_first=True)) > FITS
    assert chi_square(drawn, in_tokens(model, (3,), 4, score_first=False)) < FAILS


@pytest.mark.parametrize(
    ("score_first", "given", "how"),
    [
        (True, (), {"temperature": 0.6}),
        (True, (), {"temperature": 2.0, "top_p": 0.8, "top_p_rule": "exclusive"}),
        (False, (0,), {"top_p": 0.8}),
        (False, (0,), {"temperature": 1.5, "top_k": 2, "top_p": 0.7}),
    ],
    ids=str,
)
def test_sharpened_tokens_follow_the_sharpened_chain_rule(
    model: Transformer, score_first: bool, given: Tokens, how: dict[str, float]
) -> None:
    law = in_tokens(model, given, 4, score_first=score_first, sharpen=sharpened(**how))
    drawn = written(model, given=given, score_first=score_first, sharpening=Sharpening(**how))
    assert chi_square(drawn, law) > FITS


@pytest.mark.parametrize("score_first", [True, False])
def test_past_the_context_the_cache_slides(model: Transformer, score_first: bool) -> None:
    """A token sees two inputs; through their keys those before, which computed afresh it would not."""

    def law(afresh: bool) -> Law:
        return in_tokens(model, (1, 0, 3), 6, score_first=score_first, context=2, afresh=afresh)

    drawn = written(model, given=(1, 0, 3), length=6, score_first=score_first, context=2)
    assert chi_square(drawn, law(afresh=False)) > FITS
    assert chi_square(drawn, law(afresh=True)) < FAILS


@pytest.mark.parametrize(("score_first", "context"), [(True, 2), (False, 2), (False, 1)])
def test_without_a_cache_all_is_computed_afresh(model: Transformer, score_first: bool, context: int) -> None:
    options = {"score_first": score_first, "context": context}
    drawn = written(model, given=(1, 0), length=4, cache=False, rows=300, **options)
    assert chi_square(drawn, in_tokens(model, (1, 0), 4, afresh=True, **options)) > FITS


@pytest.mark.parametrize("score_first", [True, False])
def test_without_a_cache_the_texts_are_the_same(model: Transformer, score_first: bool) -> None:
    cached, recomputed = (
        written(model, given=(1, M, 3), length=7, rows=16, score_first=score_first, cache=cache)
        for cache in (True, False)
    )
    assert torch.equal(torch.stack(cached), torch.stack(recomputed))


@pytest.mark.parametrize(("given", "got"), [((), "none"), ((M, 1), rf"\[{M}\]")])
def test_a_first_token_that_nothing_predicts_must_be_given(
    model: Transformer, given: Tokens, got: str
) -> None:
    message = (
        "request 0: given must begin with a token, since this model was not trained to predict the first "
        f"one, got {got}"
    )
    with pytest.raises(ValueError, match=message):
        written(model, given=given, rows=1)


B = 3  # the mask of networks of today, beside their vocabulary


@pytest.mark.parametrize(
    ("family", "score_first", "given", "length", "context", "how"),
    [
        ("Llama", True, (), 4, 8, {}),
        ("Llama", False, (1, B, 0, 2, B), 6, 2, {}),
        ("Llama", False, (1,), 5, 8, {"temperature": 1.5, "top_k": 2, "top_p": 0.7}),
        ("Qwen3", False, (2,), 4, 8, {}),
        ("Qwen3", True, (B, 2, B), 5, 2, {"temperature": 0.6}),
    ],
    ids=str,
)
def test_networks_of_today_follow_the_chain_rule(
    family: str, score_first: bool, given: Tokens, length: int, context: int, how: dict[str, float]
) -> None:
    """Within the context and past it."""
    model = network_of(family, 2)
    options = {"score_first": score_first, "context": context}
    law = in_tokens(model, given, length, **options, sharpen=sharpened(**how))
    drawn = written(model, given=given, length=length, **options, sharpening=Sharpening(**how))
    assert chi_square(drawn, law) > FITS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("context", "cache"), [(20, True), (4, True), (4, False)], ids=str)
def test_greedy_texts_have_the_likeliest_token_at_each_place(family: str, context: int, cache: bool) -> None:
    """Within the context and past it, whichever of the two names greedy goes by."""
    model = network_of(family, 2, vocab_size=9)
    options = {"score_first": False, "context": context}
    law = in_tokens(model, (1,), 12, **options, afresh=not cache, sharpen=sharpened(top_k=1))
    (certain,) = law
    assert len(set(certain)) > 2
    for greedy in (Sharpening(top_k=1), Sharpening(temperature=0.0)):
        drawn = written(model, given=(1,), length=12, rows=3, sharpening=greedy, cache=cache, **options)
        assert {tuple(text.tolist()) for text in drawn} == {certain}


def test_a_network_that_is_told_the_time_is_refused() -> None:
    clock = tiny_transformer(2, adaln=True, time_conditioning=True, conditioning_dim=16)
    with pytest.raises(ValueError, match="model must not be conditioned on the noise level"):
        written(clock, given=(1,), rows=1)


@pytest.mark.parametrize("context", [0, -1])
def test_a_context_without_tokens_is_refused(model: Transformer, context: int) -> None:
    with pytest.raises(ValueError, match=f"context must be at least 1, got {context}"):
        written(model, given=(1,), rows=1, context=context)
