"""How many tokens to draft in a round: chosen while texts are written, by what rounds cost and yield.

What a round costs depends on the machine, on how many texts share it and on how many tokens it drafts; what
it yields, on how often drafts are right, place by place. Both are measured on the rounds that are run anyway,
and the number with the most tokens a second is used. None at all is one of the choices.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

NUMBERS = (0, 1, 2, 3, 4, 6, 8)
"""Of drafts, among which one is chosen."""
_FIRST = 3  # before anything is known
_HALF_LIFE = 2000  # drafts of the first place, after which what was seen counts half
_PRIOR = (2.0, 4.0)  # right, of so many, before any is seen
_REMEMBERED = 9  # times of a number, whose median counts
_SETTLED = 4  # times of the first number, before others are tried: a short text does not pay for that
_WORTH_TRYING = 0.9  # of the best rate, by an estimate that may be wrong
_PATIENCE = (
    64  # rounds between two trials of a number that is not the best, and 100 for each unit it is worse
)


class Pacing:
    """Chooses the number of drafts for batches of a writer, and learns from every round."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.numbers = tuple(each for each in NUMBERS if each <= most)
        self.clock = clock
        self._times: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._rounds: dict[int, int] = defaultdict(int)  # since another number was tried
        self._asked = [0.0] * self.numbers[-1]
        self._right = [0.0] * self.numbers[-1]
        # Of other candidates that are right none has drafts behind it, so that more drafts may be right at a
        # place than there are looks at the next.
        self._followed = [0.0] * self.numbers[-1]
        self._followable = [0.0] * self.numbers[-1]

    @property
    def most(self) -> int:
        return self.numbers[-1]

    def choose(self, rows: int) -> int:
        """How many tokens to draft in the next round of so many texts."""
        size = _alike(rows)
        known = [each for each in self.numbers if self._times[size, each]]
        if not known:
            return self._first_for(size)
        best = max(known, key=lambda drafts: self._rate(size, drafts))
        if len(self._times[size, best]) < _SETTLED:
            return best
        if not self._times[size, 0]:
            return 0  # what speculation is measured against
        for drafts in self.numbers:
            if drafts not in known and self._rate(size, drafts) > _WORTH_TRYING * self._rate(size, best):
                return drafts
        return self._retried(size, best, known)

    def _retried(self, size: int, best: int, known: list[int]) -> int:
        """The best number, or now and then the second best, about which one may have been wrong."""
        others = [each for each in known if each != best]
        if not others:
            return best
        second = max(others, key=lambda drafts: self._rate(size, drafts))
        self._rounds[size] += 1
        loss = self._rate(size, best) / self._rate(size, second) - 1.0
        if self._rounds[size] < _PATIENCE + 100 * loss:
            return best
        self._rounds[size] = 0
        return second

    def note(
        self, rows: int, drafts: int, seconds: float | None, asked: Sequence[int], right: Sequence[int]
    ) -> None:
        """A round, or several, of so many texts: the seconds if they say what another will take, and by place
        how many drafts were verified and right."""
        if seconds is not None:
            self._times[_alike(rows), drafts].append(seconds)
        if not drafts:
            return
        keep = 0.5 ** (asked[0] / _HALF_LIFE)
        for place in range(drafts):
            self._asked[place] = keep * self._asked[place] + asked[place]
            self._right[place] = keep * self._right[place] + right[place]
        for place in range(drafts - 1):
            self._followed[place] = keep * self._followed[place] + asked[place + 1]
            self._followable[place] = keep * self._followable[place] + asked[place]

    def expected(self, drafts: int) -> float:
        """Tokens that a text gains in a round."""
        tokens = reached = 1.0
        chance, of = _PRIOR
        for place in range(drafts):
            if self._asked[place]:
                chance, of = self._right[place] + _PRIOR[0], self._asked[place] + _PRIOR[1]
            right = chance / of
            tokens += reached * right
            followable = self._followable[place]
            reached *= min(right, self._followed[place] / followable) if followable else right
        return tokens

    def _rate(self, size: int, drafts: int) -> float:
        return self.expected(drafts) / self._seconds(size, drafts)

    def _seconds(self, size: int, drafts: int) -> float:
        """What a round takes: as measured, or along the line through two that were."""
        times = self._times[size, drafts]
        if times:
            return median(times)
        known = sorted(
            (each for each in self.numbers if self._times[size, each]), key=lambda each: abs(each - drafts)
        )
        one = median(self._times[size, known[0]])
        if len(known) < 2:
            return one
        other = median(self._times[size, known[1]])
        slope = max((other - one) / (known[1] - known[0]), 0.0)
        return max(one + slope * (drafts - known[0]), min(one, other) / 2)

    def _first_for(self, size: int) -> int:
        """For batches of a size not yet seen: what is best for those most like it."""
        others = {each for (each, _), times in self._times.items() if times}
        if not others:
            return min(_FIRST, self.most)
        nearest = min(others, key=lambda each: abs(each - size))
        known = [each for each in self.numbers if self._times[nearest, each]]
        return max(known, key=lambda drafts: self._rate(nearest, drafts))


def _alike(rows: int) -> int:
    """A number that batches of nearly the same size share: four for each doubling, from 8 on."""
    steps = max(rows.bit_length() - 3, 0)
    return 4 * steps + -(-rows // (1 << steps))
