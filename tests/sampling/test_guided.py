"""Texts that a guide holds to something: drawn from the network's distribution over what it allows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bd3lm.models import Causal
from bd3lm.sampling import Engine, GuidedWriter, Request, Sharpening, Stopped, Stopping, sample
from tests.oracles.networks import log_probabilities, logits_of, mask_of
from tests.sampling.loop_cases import CONTEXT, EOS, MODEL, QWEN, drawn


class NoneTwice:
    """No token follows itself, and none is the first but an odd one; the end token ends after five."""

    def begin(self) -> "NoneTwiceState":
        return NoneTwiceState()


class NoneTwiceState:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed(self) -> Tensor:
        allowed = torch.ones(8, dtype=torch.bool)
        allowed[EOS] = len(self.tokens) >= 5
        if not self.tokens:
            allowed[::2] = False
        else:
            allowed[self.tokens[-1]] = False
        return allowed

    def take(self, token: int) -> None:
        self.tokens.append(token)


class NoneTwiceOfSeven(NoneTwice):
    def begin(self) -> Any:
        state = super().begin()
        whole = state.allowed
        state.allowed = lambda: whole()[:7]  # type: ignore[method-assign]
        return state


def guided(model: Any, **options: Any) -> GuidedWriter:
    how = {"mask_id": mask_of(model), "context": CONTEXT, "score_first": True}
    return GuidedWriter(model, **how | options)


def requests_of(model: Any, number: int, **options: Any) -> list[Request]:
    guide = NoneTwice() if model.vocab_size == 8 else NoneTwiceOfSeven()
    return [
        Request(
            torch.tensor([0, 1, 1][: seed % 4], dtype=torch.long),
            seed,
            10,
            guide=guide,
            stopping=Stopping(eos_id=EOS),
            **options,
        )
        for seed in range(number)
    ]


def by_hand(model: Any, request: Request) -> list[int]:
    """Token after token, with the noise of its position, over what is allowed."""
    assert request.guide is not None
    tokens, state, mask = request.given.tolist(), request.guide.begin(), mask_of(model)
    while len(tokens) < request.length:
        read = torch.tensor([[mask, *tokens]])
        logits = logits_of(model, read, Causal(read.shape[1]))[0, -1]
        logits = torch.where(state.allowed(), logits, -torch.inf)
        log_p = request.sharpening.rows(1, torch.device("cpu"))(
            log_probabilities(logits.view(1, 1, -1), mask)
        )
        tokens.append(drawn(log_p[0, 0], request.seed, len(tokens)))
        state.take(tokens[-1])
        if tokens[-1] == EOS:
            break
    return tokens


@pytest.mark.parametrize("sharpening", [Sharpening(), Sharpening(temperature=0.6, top_p=0.8)], ids=str)
@pytest.mark.parametrize("model", [MODEL, QWEN], ids=["GPT", "Qwen"])
def test_tokens_are_those_of_the_network_over_what_is_allowed(model: Any, sharpening: Sharpening) -> None:
    writer = guided(model)
    requests = requests_of(model, 12, sharpening=sharpening)
    with torch.no_grad():
        expected = [by_hand(model, request) for request in requests]
    for side_by_side in (1, 5):  # in which rows are taken over by others
        found = sample(writer, requests, batch_size=side_by_side)
        assert [text.tokens.tolist() for text in found] == expected
    assert {text[-1] == EOS for text in expected} == {True, False}
    assert not writer._states


def test_nothing_is_left_of_texts_that_nobody_wants_any_more() -> None:
    writer, engine = guided(MODEL), Engine(seats=2)
    handles = [engine.submit(request, writer) for request in requests_of(MODEL, 6)]
    engine.step()
    for handle in handles[:2]:
        handle.abort()
    done = []
    while len(engine):
        done += [event.index for event in engine.step() if isinstance(event, Stopped)]
    assert sorted(done) == [handle.index for handle in handles[2:]]
    assert not writer._states


def test_what_cannot_be_guided_is_refused() -> None:
    writer = guided(MODEL)
    with pytest.raises(ValueError, match="guide must be given"):
        sample(writer, [Request(torch.tensor([0]), 1, 4)])
    with pytest.raises(ValueError, match="a template must not be guided"):
        sample(writer, [Request(torch.tensor([0, mask_of(MODEL), 1]), 1, 4, guide=NoneTwice())])
