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
_HALF_LIFE = 2000  # drafts of the first place, after which what was seen counts half
_PRIOR = (2.0, 4.0)  # right, of so many, before any is seen
_REMEMBERED = 9  # times of a number, whose median counts
_ENOUGH = 3  # times, of which one may be far off
_HOPE = 1.1  # a number is tried if the best is at most so much better, by an estimate
_PATIENCE = 64  # rounds between two tries of a number, and 100 more for each time that it is slower


class _Alike:
    """Rounds of batches of about one size."""

    def __init__(self) -> None:
        self.times: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self.rounds = 0
        self.tried: dict[int, int] = defaultdict(int)  # in which round last

    def known(self) -> list[int]:
        return sorted(drafts for drafts, times in self.times.items() if times)

    def seconds(self, drafts: int, like: "_Alike | None" = None) -> float:
        """What a round takes: as measured, or in the proportion that batches like these have, or along the
        line through two that were measured."""
        known = sorted(self.known(), key=lambda each: abs(each - drafts))
        one = median(self.times[known[0]])
        if known[0] == drafts:
            return one
        if like is not None:
            return one * like.seconds(drafts) / like.seconds(known[0])
        if len(known) == 1:
            return one
        other = median(self.times[known[1]])
        slope = max((other - one) / (known[1] - known[0]), 0.0)
        return max(one + slope * (drafts - known[0]), min(one, other) / 2)

    def is_measured(self, drafts: int) -> bool:
        return len(self.times[drafts]) >= _ENOUGH


class Pacing:
    """Chooses the number of drafts for batches of a writer, and learns from every round."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.numbers = tuple(each for each in NUMBERS if each <= most)
        self.clock = clock
        self._sizes: dict[int, _Alike] = {}
        self._asked = [0.0] * self.most
        self._right = [0.0] * self.most
        # Of other candidates that are right none has drafts behind it, so that more drafts may be right at a
        # place than there are looks at the next.
        self._followed = [0.0] * self.most
        self._followable = [0.0] * self.most

    @property
    def most(self) -> int:
        return self.numbers[-1]

    def choose(self, rows: int) -> int:
        """How many tokens to draft in the next round of so many texts."""
        size = _size(rows)
        alike = self._sizes.setdefault(size, _Alike())
        like = self._most_like(size)
        known = alike.known() or ([] if like is None else like.known())
        if not known:
            return 0  # what speculation is measured against; then one draft, two, while that seems to pay
        of = alike if alike.known() or like is None else like
        rates = {drafts: self.expected(drafts) / of.seconds(drafts, like) for drafts in self.numbers}
        best = max(known, key=lambda drafts: rates[drafts])
        if not alike.is_measured(best):
            return best
        if not alike.is_measured(0):
            return 0  # what speculation is measured against
        for drafts in self.numbers:
            if not alike.is_measured(drafts) and rates[best] < _HOPE * rates[drafts]:
                return drafts
        return self._tried_again(alike, rates, best)

    def _tried_again(self, alike: _Alike, rates: dict[int, float], best: int) -> int:
        """The best number; now and then another, which may have become better, or was mistaken for worse."""
        alike.rounds += 1
        others = [each for each in self.numbers if each != best]
        for drafts in sorted(others, key=lambda each: alike.tried[each]):
            patience = _PATIENCE + 100 * (rates[best] / rates[drafts] - 1.0)
            if alike.rounds - alike.tried[drafts] > len(others) * patience:
                alike.tried[drafts] = alike.rounds
                return drafts
        return best

    def note(
        self, rows: int, drafts: int, seconds: float | None, asked: Sequence[int], right: Sequence[int]
    ) -> None:
        """A round, or several, of so many texts: the seconds if they say what another will take, and by place
        how many drafts were verified and right."""
        if seconds is not None:
            self._sizes.setdefault(_size(rows), _Alike()).times[drafts].append(seconds)
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
            if self._asked[place]:  # else as at the place before
                chance, of = self._right[place] + _PRIOR[0], self._asked[place] + _PRIOR[1]
            right, followable = chance / of, self._followable[place]
            tokens += reached * right
            reached *= min(right, self._followed[place] / followable) if followable else right
        return tokens

    def _most_like(self, size: int) -> _Alike | None:
        """Batches of the nearest other size of which several numbers are known."""
        others = {
            each: alike for each, alike in self._sizes.items() if each != size and len(alike.known()) > 1
        }
        return others[min(others, key=lambda each: abs(each - size))] if others else None


def _size(rows: int) -> int:
    """A number that batches of about the same size share: four for each doubling, from 8 on."""
    steps = max(rows.bit_length() - 3, 0)
    return 4 * steps + -(-rows // (1 << steps))
