"""Every objective on rows of several texts: each text's nats and gradients are those that it has alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import (
    Absorbing,
    ClippedTimes,
    Cosine,
    Counts,
    DiscreteTimes,
    Draws,
    Floored,
    Linear,
    Times,
    Uniform,
)
from bd3lm.evaluation import Drafts, exact_likelihood, importance_weighted_nll
from bd3lm.evaluation.exact import draw_orders
from bd3lm.evaluation.likelihood import loss_sums
from bd3lm.models import Transformer
from bd3lm.objectives import (
    D3PM,
    Autoregressive,
    BlockDenoiser,
    BlockDiffusionLoss,
    Drafting,
    Objective,
    ScoreEntropy,
    SimplexDiffusionLoss,
    TokenBatch,
    TokenLoss,
)
from tests.oracles.networks import blocks_of, clean_of, mask_of, network_of, tiny_transformer

ROWS = ((8, 4, 12), (4, 20), (24,))  # tokens of the texts of each row
LENGTH = 24
FAMILIES = {family: network_of(family, 5) for family in ("GPT", "Qwen3", "Llama")}
NETWORK = FAMILIES["GPT"]
MASK = mask_of(NETWORK)


class Turn(NamedTuple):
    """An answer in one of the texts: tokens begin..end of a row, in a text that starts at `start`.

    `stop` is where the last block of the answer ends.
    """

    row: int
    start: int
    begin: int
    end: int
    stop: int


def turns(block: int, *, score_first: bool = False) -> list[Turn]:
    """Answers that end inside a block, some of them followed by another turn; one block has one answer."""
    found = []
    for row, sizes in enumerate(ROWS):
        start = 0
        for size in sizes:
            answers = {4: [(1, 3)], 8: [(2, 5)]}.get(size, [(1, 3), (6, size - 3)])
            for begin, end in [(2, size - (size > 8))] if block > 4 else answers:
                first = 0 if score_first and begin < 3 else begin
                stop = min(-(-end // block) * block, size)
                found.append(Turn(row, start, start + first, start + end, start + stop))
            start += size
    return found


def conversations(model: Transformer, *, block: int = 4, score_first: bool = False) -> TokenBatch:
    """The rows: what follows an answer in its block is absent."""
    generator, clean = torch.Generator().manual_seed(0), torch.tensor(clean_of(model))
    tokens = clean[torch.randint(0, len(clean), (len(ROWS), sum(ROWS[0])), generator=generator)]
    scored, absent = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for turn in turns(block, score_first=score_first):
        scored[turn.row, turn.begin : turn.end] = True
        absent[turn.row, turn.end : turn.stop] = True
    numbers = [[2 * text for text, size in enumerate(row) for _ in range(size)] for row in ROWS]
    return TokenBatch(tokens, scored, absent, torch.tensor(numbers))  # numbers may be skipped


def alone(batch: TokenBatch, turn: Turn) -> TokenBatch:
    """A text as it is when the answer was written, as a batch of its own that knows of no others."""
    tokens = batch.tokens[turn.row : turn.row + 1, turn.start : turn.stop]
    place = torch.arange(turn.start, turn.stop).unsqueeze(0)
    answer = (place >= turn.begin) & (place < turn.end)
    return TokenBatch(tokens, answer, place >= turn.end)


def cut(draws: Draws | None, turn: Turn) -> Draws | None:
    """The random numbers of a text; where a row is one block, of its level."""
    if draws is None:
        return None
    size, one = draws.block_size, draws.levels.shape[1] == 1
    blocks = slice(0, 1) if one else slice(turn.start // size, turn.stop // size)
    here = slice(turn.row, turn.row + 1)
    return Draws(
        draws.levels[here, blocks], draws.spare[here, blocks], draws.tokens[here, turn.start : turn.stop]
    )


class OwnNoise(SimplexDiffusionLoss):
    """SSD-LM whose noise is a function of the token and its noise level, and not of its place in the row."""

    def _noisy(self, model: Any, tokens: Tensor, alpha_bar: Tensor, draws: Draws) -> Tensor:
        w = torch.nn.functional.one_hot(tokens, model.vocab_size) * alpha_bar.unsqueeze(-1)
        return model.embed(w.softmax(-1))


Make = Callable[[Transformer, int], Objective]
"""An objective for a network and rows of this length, which is the size of a block where they are one."""


def block_loss(size: int, masking: Any, **options: Any) -> Make:
    loss = {name: options.pop(name) for name in ("algorithm", "next_token") if name in options}
    return lambda model, length: BlockDiffusionLoss(
        reading=blocks_of(min(size, length), mask_id=mask_of(model), **options), masking=masking, **loss
    )


@dataclass(frozen=True)
class Case:
    objective: Make
    block: int = 4
    score_first: bool = False
    families: tuple[str, ...] = ("GPT", "Qwen3", "Llama")
    network: Transformer | None = None


INSIDE = ("GPT",)  # whose mask is a token of its vocabulary, as SEDD, D3PM and SSD-LM need it
TOLD = tiny_transformer(6, adaln=True, time_conditioning=True)
DRAFTER = network_of("Qwen3", 5, additions=3)


def absorbing(model: Transformer) -> Absorbing:
    return Absorbing(model.vocab_size, mask_id=MASK)


CASES = {
    "autoregressive": Case(lambda model, _: Autoregressive(mask_id=mask_of(model))),
    "autoregressive, from the first": Case(
        lambda model, _: Autoregressive(mask_id=mask_of(model), score_first=True), score_first=True
    ),
    "autoregressive, some at random": Case(
        lambda model, _: Autoregressive(mask_id=mask_of(model), random_batch=True)
    ),
    "blocks of 1": Case(block_loss(1, Counts()), block=1),
    "blocks of 2": Case(block_loss(2, Times()), block=2),
    "blocks of 4": Case(block_loss(4, Counts())),
    "blocks of 4, from the first": Case(block_loss(4, Counts()), score_first=True),
    "blocks of 4, complementary": Case(block_loss(4, Counts(complementary=True))),
    "blocks of 4, clipped": Case(block_loss(4, ClippedTimes(low=0.3, high=0.8))),
    "two passes": Case(block_loss(4, Counts(complementary=True), algorithm="two_pass")),
    "next token": Case(block_loss(4, Counts(), causal_clean=True, next_token=0.5)),
    "next token from the first": Case(
        block_loss(2, Counts(), causal_clean=True, next_token=0.5), block=2, score_first=True
    ),
    "next token in two passes": Case(
        block_loss(2, Counts(), causal_clean=True, next_token=0.5, algorithm="two_pass"), block=2
    ),
    "previous token": Case(block_loss(4, Counts(complementary=True), previous_token=True)),
    "previous token from the first": Case(block_loss(4, Counts(), previous_token=True), score_first=True),
    "one block, previous token, from the first": Case(
        block_loss(24, Times(), previous_token=True), block=24, score_first=True
    ),
    "previous token in blocks of 1": Case(block_loss(1, Counts(), previous_token=True), block=1),
    "previous token in two passes": Case(
        block_loss(2, Counts(), previous_token=True, causal_clean=True, algorithm="two_pass"), block=2
    ),
    "told the level": Case(block_loss(4, Times()), network=TOLD, families=INSIDE),
    "told the level in two passes": Case(
        block_loss(2, Times(), algorithm="two_pass"), block=2, network=TOLD, families=INSIDE
    ),
    "one block": Case(block_loss(24, Times()), block=24),
    "one block, previous token": Case(block_loss(24, DiscreteTimes(steps=3), previous_token=True), block=24),
    "one block, next token": Case(
        block_loss(24, Times(), causal_clean=True, next_token=0.5, previous_token=True), block=24
    ),
    "drafts": Case(
        lambda model, _: Drafting(mask_id=mask_of(model), masks=4), network=DRAFTER, families=("Qwen3",)
    ),
    "drafts, first tokens scored": Case(  # which nothing drafts
        lambda model, _: Drafting(mask_id=mask_of(model), masks=4),
        network=DRAFTER,
        families=("Qwen3",),
        score_first=True,
    ),
    "SEDD": Case(lambda model, _: ScoreEntropy(process=absorbing(model), mask_id=MASK), 24, families=INSIDE),
    "SEDD in blocks": Case(
        lambda model, _: ScoreEntropy(process=absorbing(model), mask_id=MASK, block_size=4), families=INSIDE
    ),
    "SEDD in blocks, uniform": Case(
        lambda model, _: ScoreEntropy(
            process=Uniform(model.vocab_size), mask_id=MASK, block_size=1, schedule=Floored(Linear())
        ),
        block=1,
        families=INSIDE,
    ),
    "D3PM": Case(
        lambda model, _: D3PM(process=absorbing(model), mask_id=MASK, steps=3, auxiliary=0.5),
        24,
        families=INSIDE,
    ),
    "D3PM in blocks": Case(
        lambda model, _: D3PM(
            process=absorbing(model), mask_id=MASK, steps=3, block_size=2, schedule=Cosine()
        ),
        block=2,
        families=INSIDE,
    ),
    "D3PM in blocks, uniform": Case(
        lambda model, _: D3PM(process=Uniform(model.vocab_size), mask_id=MASK, steps=3, block_size=1),
        block=1,
        families=INSIDE,
    ),
    "SSD-LM": Case(lambda model, _: OwnNoise(block_size=4, mask_id=MASK), families=INSIDE),
    "SSD-LM, told the level": Case(
        lambda model, _: OwnNoise(block_size=4, mask_id=MASK), network=TOLD, families=INSIDE
    ),
}
EVERY = [
    pytest.param(name, family, id=f"{name}-{family}") for name, c in CASES.items() for family in c.families
]


def setting(name: str, family: str) -> tuple[Transformer, Objective, TokenBatch, Draws | None]:
    case = CASES[name]
    model = case.network or FAMILIES[family]
    objective, batch = (
        case.objective(model, LENGTH),
        conversations(model, block=case.block, score_first=case.score_first),
    )
    return model, objective, batch, objective.seeded_draws(batch, 1)


def gradients(model: Transformer, *losses: TokenLoss) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    total = sum(loss.minimised for loss in losses)
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize(("name", "family"), EVERY)
def test_each_answer_pays_what_it_pays_in_its_text_alone_token_by_token(name, family):
    model, objective, batch, draws = setting(name, family)
    together = objective.loss(model, batch, draws)
    case, apart = CASES[name], []
    for turn in turns(case.block, score_first=case.score_first):
        own = case.objective(model, turn.stop - turn.start)
        loss = own.loss(model, alone(batch, turn), cut(draws, turn))
        apart.append(loss)
        answer = slice(turn.begin, turn.end)
        for field in ("nats", "weight", "auxiliary"):
            one, other = getattr(together, field), getattr(loss, field)
            assert (one is None) == (other is None)
            if one is not None:
                expected = other[0, turn.begin - turn.start : turn.end - turn.start]
                torch.testing.assert_close(one[turn.row, answer], expected, rtol=0, atol=1e-10)
    assert sum(bool(loss.nats.abs().sum() > 0) for loss in apart) > 3
    for found in (together.nats, together.weight, together.auxiliary):  # prompts, and what is absent
        assert found is None or found[~batch.scored].abs().sum() == 0
    expected = gradients(model, *apart)
    for part, gradient in gradients(model, together).items():
        torch.testing.assert_close(gradient, expected[part], rtol=1e-9, atol=1e-9, msg=f"{name}: {part}")
    with torch.no_grad():
        sums = loss_sums(model, objective, batch, draws)
    torch.testing.assert_close(sums, torch.stack((together.nats.sum(), together.weight.sum())).double())


@pytest.mark.parametrize("name", CASES)
def test_no_token_of_a_text_changes_what_another_pays(name):
    """To the last bit; and what is changed does matter to its own text."""
    model, objective, batch, draws = setting(name, CASES[name].families[-1])
    before = objective.loss(model, batch, draws)
    clean = torch.tensor(clean_of(model))
    for start, stop in ((0, 8), (8, 12), (12, 24)):  # a row of three texts
        tokens = batch.tokens.clone()
        here = tokens[0, start:stop]
        tokens[0, start:stop] = clean[(torch.searchsorted(clean, here) + 1) % len(clean)]
        after = objective.loss(model, replace(batch, tokens=tokens), draws)
        same = torch.ones_like(batch.scored)
        same[0, start:stop] = False
        for field in ("nats", "auxiliary"):
            one, other = getattr(before, field), getattr(after, field)
            if one is not None:
                assert torch.equal(one[same], other[same])
        if before.nats[0, start:stop].any():
            assert not torch.equal(before.nats[0, start:stop], after.nats[0, start:stop])


# --- what is absent in the middle of a row ---


def test_what_follows_an_answer_in_its_block_is_not_seen_there_but_by_later_blocks():
    """An answer ends at token 2 of the first block; the turn that follows begins at 3."""
    batch = TokenBatch(
        torch.tensor([[0, 1, 3, 1, 0, 3, 3, 1]]),
        torch.tensor([[False, True, True, False, False, True, True, True]]),
        torch.tensor([[False, False, False, True, False, False, False, False]]),
        torch.zeros(1, 8, dtype=torch.long),
    )
    masked = torch.tensor([[[False, True, True, False, False, True, False, True]]])
    other = replace(batch, tokens=batch.tokens.clone())
    other.tokens[0, 3] = 0
    for reading in (blocks_of(4), blocks_of(4, causal_clean=True), blocks_of(4, previous_token=True)):
        for algorithm in ("single_pass", "two_pass"):
            before, after = (
                BlockDenoiser(NETWORK, each, reading, algorithm=algorithm).nats(masked)[0, 0]
                for each in (batch, other)
            )
            assert torch.equal(before[:4], after[:4])
            assert (before[4:] != after[4:]).tolist() == [False, True, False, True]
    # The network sees the mask in its place: as if the answer was the last of the text.
    ends = TokenBatch(batch.tokens[:, :4], batch.scored[:, :4], batch.absent[:, :4])
    alone_at_the_end = BlockDenoiser(NETWORK, ends, blocks_of(4)).nats(masked[..., :4])
    found = BlockDenoiser(NETWORK, batch, blocks_of(4)).nats(masked)
    torch.testing.assert_close(found[..., :4], alone_at_the_end, rtol=0, atol=1e-10)


def test_prompts_and_what_is_absent_give_no_gradient_of_their_own():
    """All that is minimised is what scored tokens pay: with none scored, no parameter learns."""
    for name in ("autoregressive", "blocks of 4", "next token", "drafts", "SEDD in blocks", "SSD-LM"):
        model, objective, batch, draws = setting(name, CASES[name].families[0])
        unscored = replace(batch, scored=torch.zeros_like(batch.scored))
        loss = objective.loss(model, unscored, draws)
        assert loss.nats.abs().sum() == 0
        assert loss.weight.sum() == 0
        if loss.minimised.requires_grad:
            assert all(gradient.abs().sum() == 0 for gradient in gradients(model, loss).values())


# --- counts of one block, and likelihoods ---


@torch.no_grad()
def test_texts_in_one_block_are_denoised_apart_under_any_masks():
    """Counts are drawn for the block, over all its texts; what is masked is predicted within each."""
    for family, model in FAMILIES.items():
        batch = conversations(model, block=24, score_first=True)
        reading = blocks_of(24, mask_id=mask_of(model), previous_token=True)
        shape = (len(ROWS), 6, LENGTH)
        masked = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
        masked &= batch.scored.unsqueeze(1)
        together = BlockDenoiser(model, batch, reading).nats(masked)
        for turn in turns(24, score_first=True):
            own = replace(reading, block_size=turn.stop - turn.start)
            some = masked[turn.row : turn.row + 1, :, turn.start : turn.stop]
            expected = BlockDenoiser(model, alone(batch, turn), own).nats(some)
            found = together[turn.row : turn.row + 1, :, turn.start : turn.stop]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, msg=family)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("lean", [0.0, 0.7])
def test_likelihoods_are_those_of_each_text(size, lean):
    reading = blocks_of(size, mask_id=MASK, previous_token=True)
    batch = conversations(NETWORK, block=size)
    together = exact_likelihood(NETWORK, batch, reading, lean=lean)
    orders = draw_orders(3, *batch.tokens.shape, size, generator=torch.Generator().manual_seed(0))
    weighted = importance_weighted_nll(NETWORK, batch, reading, orders, lean=lean)
    for turn in turns(size):
        own = alone(batch, turn)
        blocks = slice(turn.begin // size, turn.stop // size)  # of the answer
        after = slice((turn.begin - turn.start) // size, None)
        expected = exact_likelihood(NETWORK, own, reading, lean=lean)
        for field in ("nll", "nelbo", "tokens"):
            found = getattr(together, field)[turn.row, blocks]
            torch.testing.assert_close(found, getattr(expected, field)[0, after], rtol=0, atol=1e-10)
        found = importance_weighted_nll(
            NETWORK, own, reading, [cut(each, turn) for each in orders], lean=lean
        )
        torch.testing.assert_close(weighted[turn.row, blocks], found[0, after], rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("lean", [0.0, 0.7])
def test_the_likelihood_of_one_block_of_several_texts_is_the_product_of_theirs(lean):
    """Texts in one block do not see each other, and the orders of one are the same among those of others."""
    tokens = torch.tensor([[0, 1, 3, 3, 1, 0]])
    scored = torch.tensor([[True, True, True, False, True, True]])
    together = exact_likelihood(
        NETWORK,
        TokenBatch(tokens, scored, None, torch.tensor([[0, 0, 0, 1, 1, 1]])),
        blocks_of(6),
        lean=lean,
    )
    parts = [
        exact_likelihood(NETWORK, TokenBatch(tokens[:, some], scored[:, some]), blocks_of(3), lean=lean)
        for some in (slice(0, 3), slice(3, 6))
    ]
    for field in ("nll", "nelbo"):
        expected = sum(getattr(part, field) for part in parts)
        torch.testing.assert_close(getattr(together, field), expected, rtol=0, atol=1e-10)


# --- what is refused ---


def test_what_cannot_be_right_is_refused():
    batch = conversations(NETWORK)
    firsts = replace(batch, scored=batch.begins, absent=None)
    for objective in (Autoregressive(mask_id=MASK), Autoregressive(mask_id=MASK, random_batch=True)):
        draws = Draws(torch.ones(3, 1), torch.ones(3, 1), torch.full((3, 24), 0.5))
        with pytest.raises(ValueError, match="the first token can be scored only with score_first=True"):
            objective.loss(NETWORK, firsts, draws)
    for objective in (
        BlockDiffusionLoss(reading=blocks_of(8, mask_id=MASK)),
        BlockDiffusionLoss(reading=blocks_of(8, mask_id=MASK), algorithm="two_pass"),
        ScoreEntropy(process=absorbing(NETWORK), mask_id=MASK, block_size=8),
        SimplexDiffusionLoss(block_size=8, mask_id=MASK),
    ):
        with pytest.raises(
            ValueError, match=r"documents must begin at multiples of .* 8, .* token 12 of row 0"
        ):
            objective.loss(NETWORK, batch, objective.seeded_draws(batch, 0))
    with pytest.raises(ValueError, match=r"documents must begin at multiples of .* 3, .* token 8 of row 0"):
        Drafting(mask_id=mask_of(DRAFTER), masks=3).loss(DRAFTER, conversations(DRAFTER))
    uniform = D3PM(process=Uniform(NETWORK.vocab_size), mask_id=MASK, steps=3, block_size=4)
    with pytest.raises(ValueError, match="absent tokens need the absorbing process, or must be whole blocks"):
        uniform.loss(NETWORK, batch, uniform.seeded_draws(batch, 0))
    with pytest.raises(ValueError, match="documents must be None"):
        next(Drafts(mask_id=MASK, masks=4, shifted=True).pairs(NETWORK, batch))


def test_the_first_tokens_of_a_batch():
    batch = conversations(NETWORK)
    firsts = torch.zeros_like(batch.scored)
    for row, starts in enumerate(((0, 8, 12), (0, 4), (0,))):
        firsts[row, list(starts)] = True
    assert torch.equal(batch.begins, firsts)
    plain = replace(batch, documents=None, absent=None).begins
    assert plain.sum() == len(ROWS)
    assert plain[:, 0].all()
