"""The laws of the samplers, enumerated: every choice that could be made, with its probability.

A law is a dict from texts to probabilities. The network is asked about one state of one block at a time, and
sees what a mask written out pair by pair lets it see.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise, product
from math import log, prod

import numpy as np
import torch
from scipy import stats

from bd3lm.models import Transformer

from .networks import MASK, Written, log_probabilities, logits_of, mask_of
from .orders import law_of_next

Tokens = tuple[int, ...]
Law = dict[Tokens, float]
Row = list[float]  # a probability for each token of the vocabulary
Sharpen = Callable[[Row], Row]
Conditional = Callable[[Tokens, float | None], list[Row]]
"""One distribution a place, for a block as it stands, at a mask rate (None: the network is not told)."""
BlockLaw = Callable[[Conditional, Tokens, Tokens], Law]
"""The law of a block that begins in some state and has some masked places."""

LEAST_ALPHA = 1e-3  # networks are told −log α of at least this α


# How texts are put together ------------------------------------------------------------------------------


def in_blocks(
    model: Transformer,
    given: Tokens,
    length: int,
    block_size: int,
    block_law: BlockLaw,
    *,
    context: int = 64,
    afresh: bool = False,
    causal_clean: bool = False,
    sharpen: Sharpen = list,
) -> Law:
    """Block after block, each of which sees `context − block_size` tokens before it.

    `afresh` the network is shown no others; otherwise those before have left their trace in these.
    """
    window = context - block_size

    def written_after(past: Tokens, block: Tokens, masked: Tokens) -> Law:
        shown = past[max(len(past) - window, 0) :] if afresh else past

        def sees(query: int, key: int) -> bool:
            start = query // block_size * block_size
            causal = causal_clean and query < len(shown)
            return start - window <= key <= (query if causal else start + block_size - 1)

        return block_law(asking(model, shown, block_size, sees, sharpen), block, masked)

    ends = range(block_size, length + block_size, block_size)
    return _piece_by_piece(given, length, ends, written_after, mask_of(model))


def in_strides(
    model: Transformer,
    given: Tokens,
    length: int,
    context: int,
    stride: int,
    block_law: BlockLaw,
    *,
    sharpen: Sharpen = list,
) -> Law:
    """A whole context first, then strides, each at the end of a context in which all see all."""
    conditional = asking(model, (), context, lambda _query, _key: True, sharpen)

    def written_after(past: Tokens, piece: Tokens, masked: Tokens) -> Law:
        before = past[len(past) + len(piece) - context :] if past else ()
        places = tuple(len(before) + place for place in masked)
        law = block_law(conditional, before + piece, places)
        return {window[len(before) :]: p for window, p in law.items()}

    ends = range(context, length + context, stride)
    return _piece_by_piece(given, length, ends, written_after, mask_of(model))


def in_tokens(
    model: Transformer,
    given: Tokens,
    length: int,
    *,
    score_first: bool,
    context: int = 64,
    afresh: bool = False,
    sharpen: Sharpen = list,
) -> Law:
    """The chain rule of a causal network; with `score_first` the mask stands before the text."""

    def sees(query: int, key: int) -> bool:
        return query - context < key <= query

    def written_after(past: Tokens, piece: Tokens, masked: Tokens) -> Law:
        if not masked:
            return {piece: 1.0}
        inputs = ((mask_of(model),) if score_first else ()) + past
        shown = inputs[-context:] if afresh else inputs
        last = asking(model, shown[:-1], 1, sees, sharpen)(shown[-1:], None)[0]
        return {(token,): p for token, p in enumerate(last)}

    return _piece_by_piece(given, length, range(1, length + 1), written_after, mask_of(model))


def _piece_by_piece(
    given: Tokens,
    length: int,
    ends: Iterable[int],
    written_after: Callable[[Tokens, Tokens, Tokens], Law],
    mask: int,
) -> Law:
    """Pieces up to each end, given what lies before; what lies past the length stays masked for good."""
    law: Law = {(): 1.0}
    for end in ends:
        start = len(next(iter(law)))
        if start >= length:
            break
        piece = (given + (mask,) * end)[start:end]
        masked = tuple(i for i, token in enumerate(piece) if token == mask and start + i < length)
        following: Law = defaultdict(float)
        for past, p in law.items():
            for written, q in written_after(past, piece, masked).items():
                following[past + written] += p * q
        law = {text: p for text, p in following.items() if p > 0.0}
    return {text[:length]: p for text, p in law.items()}


def asking(
    model: Transformer, past: Tokens, size: int, sees: Callable[[int, int], bool], sharpen: Sharpen = list
) -> Conditional:
    """The network's distributions at the `size` places after the past."""
    places = range(len(past) + size)
    mask = tuple(tuple(sees(query, key) for key in places) for query in places)

    @cache
    def ask(block: Tokens, rate: float | None) -> list[Row]:
        told = -log(max(1.0 - rate, LEAST_ALPHA)) if model.uses_noise else None
        return [sharpen(row) for row in _probabilities(model, past, block, mask, told)]

    return ask


@cache  # one call of the network a state, for all laws that come by it
@torch.no_grad()
def _probabilities(
    model: Transformer, past: Tokens, block: Tokens, mask: tuple[tuple[bool, ...], ...], told: float | None
) -> list[Row]:
    noise = None if told is None else torch.tensor([[0.0] * len(past) + [told] * len(block)])
    layout = Written(len(mask), lambda query, key: mask[query][key])
    logits = logits_of(model, torch.tensor([past + block]), layout, noise=noise)[0, len(past) :]
    return log_probabilities(logits, mask_of(model)).exp().tolist()


# How a block is filled -----------------------------------------------------------------------------------


def in_every_order(
    conditional: Conditional, block: Tokens, masked: Tokens, together: int = 1, lean: float = 0.0
) -> Law:
    """Hidden tokens one by one, or so many at once, in an order that is uniformly random, or leans."""
    if not masked:
        return {block: 1.0}
    law: Law = defaultdict(float)
    for chosen, probability in law_of_next(masked, together, lean).items():
        left = tuple(place for place in masked if place not in chosen)
        for state, p in _drawn(conditional(block, None), block, chosen):
            for final, q in in_every_order(conditional, state, left, together, lean).items():
                law[final] += p * q * probability
    return law


def together(size: int) -> BlockLaw:
    return partial(in_every_order, together=size)


def leaning(lean: float, together: int = 1) -> BlockLaw:
    return partial(in_every_order, together=together, lean=lean)


def by_hitting_times(conditional: Conditional, block: Tokens, masked: Tokens, before: float = 1.0) -> Law:
    """The same with a network that is told the time, for two tokens at most: integrals over the mask rates.

    Hidden tokens are revealed at rates uniform in (0, before); the largest of n has density n·x^{n−1} at
    x·before, and is any of the n.
    """
    if not masked:
        return {block: 1.0}
    n, law = len(masked), defaultdict(float)
    nodes, weights = np.polynomial.legendre.leggauss(10)
    for x, width in zip((nodes + 1) / 2, weights / 2, strict=True):
        rate = float(before * x)
        for place in masked:
            left = tuple(other for other in masked if other != place)
            for state, p in _drawn(conditional(block, rate), block, (place,)):
                for final, q in by_hitting_times(conditional, state, left, rate).items():
                    law[final] += float(width * x ** (n - 1)) * p * q  # n of the density, 1/n of the choice
    return law


def in_steps(rates: Sequence[float], eta: float = 0.0, mask: int = MASK) -> BlockLaw:
    """Steps down the mask rates 1 = rates[0] > … > rates[T] = 0, in which each place goes its own way.

    From t to s a masked token is revealed with probability (α_s − (1 − σ)α_t)/(1 − α_t), and one that was
    revealed masked again with probability σ = η·min(1, (1 − α_s)/α_t).
    """

    def law_of(conditional: Conditional, block: Tokens, masked: Tokens) -> Law:
        law: Law = {block: 1.0}
        for rate_t, rate_s in pairwise(rates):
            alpha_t, alpha_s = 1 - rate_t, 1 - rate_s
            sigma = eta * min(1.0, rate_s / alpha_t) if alpha_t else eta
            appears = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
            following: Law = defaultdict(float)
            for state, p in law.items():
                rows = conditional(state, rate_t)
                ways = []
                for place in masked:
                    if state[place] == mask:
                        ways.append(
                            [(mask, 1 - appears)] + [(v, appears * q) for v, q in enumerate(rows[place])]
                        )
                    else:
                        ways.append([(state[place], 1 - sigma), (mask, sigma)])
                for outcome in product(*ways):
                    q = prod(probability for _, probability in outcome)
                    if q > 0.0:
                        tokens = tuple(token for token, _ in outcome)
                        following[_with(state, masked, tokens)] += p * q
            law = following
        return law

    return law_of


def by_choice(choose: Callable[[list[Row], dict[int, int]], set[int]], mask: int = MASK) -> BlockLaw:
    """Draw a token at every masked place, keep those that `choose` names, and draw the others again.

    A network that is told the time is told the share of masks that it sees, also of those past the end.
    """

    def law_of(conditional: Conditional, block: Tokens, masked: Tokens) -> Law:
        @cache
        def law_from(block: Tokens, masked: Tokens) -> Law:
            if not masked:
                return {block: 1.0}
            law: Law = defaultdict(float)
            rows = conditional(block, block.count(mask) / len(block))
            for state, p in _drawn(rows, block, masked):
                kept = choose(rows, {place: state[place] for place in masked})
                left = tuple(place for place in masked if place not in kept)
                for final, q in law_from(_with(state, left, (mask,) * len(left)), left).items():
                    law[final] += p * q
            return law

        return law_from(block, masked)

    return law_of


def likeliest(count: int = 1, threshold: float | None = None, mask: int = MASK) -> BlockLaw:
    """The draws of highest probability, and all of at least the threshold."""

    def choose(rows: list[Row], drawn: dict[int, int]) -> set[int]:
        p = {place: rows[place][token] for place, token in drawn.items()}
        # The masks of an empty block are alike but for rounding; then the first comes first.
        ordered = sorted(drawn, key=lambda place: (-round(p[place], 6), place))
        sure = {place for place in drawn if threshold is not None and p[place] >= threshold}
        return sure | set(ordered[:count])

    return by_choice(choose, mask)


def least_entropy(bound: float) -> BlockLaw:
    """The longest run of least entropies whose sum without the largest stays within the bound."""

    def choose(rows: list[Row], drawn: dict[int, int]) -> set[int]:
        entropy = {place: -sum(p * log(p) for p in rows[place] if p > 0.0) for place in drawn}
        ordered = sorted(drawn, key=lambda place: (round(entropy[place], 6), place))
        runs = [ordered[:count] for count in range(1, len(ordered) + 1)]
        return set(max((run for run in runs if sum(entropy[i] for i in run[:-1]) <= bound), key=len))

    return by_choice(choose)


def _drawn(rows: list[Row], block: Tokens, places: Sequence[int]) -> Iterator[tuple[Tokens, float]]:
    """Every way to fill the places, each from its own distribution."""
    for tokens in product(range(len(rows[0])), repeat=len(places)):
        p = prod(rows[place][token] for place, token in zip(places, tokens, strict=True))
        if p > 0.0:
            yield _with(block, places, tokens), p


def _with(block: Tokens, places: Sequence[int], tokens: Sequence[int]) -> Tokens:
    changed = dict(zip(places, tokens, strict=True))
    return tuple(changed.get(place, token) for place, token in enumerate(block))


# How a distribution is sharpened -------------------------------------------------------------------------


def sharpened(
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    top_p_rule: str = "inclusive",
) -> Sharpen:
    """Temperature, then top-k, then nucleus, token by token."""

    def sharpen(row: Row) -> Row:
        row = _normalised([p ** (1 / temperature) for p in row])
        likeliest = sorted(range(len(row)), key=lambda token: -row[token])
        if top_k is not None:
            row = _normalised([p if token in likeliest[:top_k] else 0.0 for token, p in enumerate(row)])
        kept: list[int] = []
        for token in likeliest:
            total = sum(row[other] for other in kept)
            enough = total >= top_p if top_p_rule == "inclusive" else total + row[token] > top_p
            if kept and enough and top_p < 1.0:
                break
            kept.append(token)
        return _normalised([p if token in kept else 0.0 for token, p in enumerate(row)])

    return sharpen


def _normalised(row: Row) -> Row:
    total = sum(row)
    return [p / total for p in row]


# How samples are held against a law ----------------------------------------------------------------------


def chi_square(texts: Iterable[torch.Tensor], law: Law) -> float:
    """The p-value of the texts; those of which fewer than five are expected count as one kind."""
    assert abs(sum(law.values()) - 1.0) < 1e-9
    counts = Counter(tuple(text.tolist()) for text in texts)
    impossible = set(counts) - set(law)
    assert not impossible, f"the law has no {impossible}"
    total = sum(counts.values())
    observed, expected = [0], [0.0]
    for text, p in law.items():
        if p * total >= 5:
            observed.append(counts[text])
            expected.append(p * total)
        else:
            observed[0] += counts[text]
            expected[0] += p * total
    if expected[0] < 5:  # too few even together
        few = (observed.pop(0), expected.pop(0))
        largest = expected.index(max(expected))
        observed[largest], expected[largest] = observed[largest] + few[0], expected[largest] + few[1]
    return float(stats.chisquare(observed, expected).pvalue)


def distance(law: Law, other: Law) -> float:
    """Total variation: the largest difference of the probabilities of any event."""
    return sum(abs(law.get(text, 0.0) - other.get(text, 0.0)) for text in {*law, *other}) / 2
