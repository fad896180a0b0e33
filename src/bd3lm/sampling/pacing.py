"""How many tokens to draft in a round, chosen while texts are written.

The cost of a round depends on the machine, on the number of texts that share it and on the number of drafts.
Its gain depends on how often the draft at each place is right. Both are measured on the rounds that run
anyway, and the number with the most tokens per second is used. Zero drafts is one of the choices.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

NUMBERS = (0, 1, 2, 3, 4, 6, 8)
"""The numbers of drafts to choose from."""
_HALF_LIFE = 2000  # drafts at the first place after which an observation counts half
_PRIOR = (2.0, 4.0)  # right drafts and all drafts, before any are seen
_REMEMBERED = 9  # times for each number; their median counts
_ENOUGH = 3  # times for a median that ignores one outlier
_HOPE = 1.1  # try a number if the best is at most this much better, by an estimate
_PATIENCE = 64  # rounds between two tries of a number; 100 more for each factor by which it is slower


class _Alike:
    """Rounds of batches of about the same size."""

    def __init__(self) -> None:
        self.times: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self.rounds = 0
        self.tried: dict[int, int] = defaultdict(int)  # the round of the last try

    def known(self) -> list[int]:
        return sorted(drafts for drafts, times in self.times.items() if times)

    def seconds(self, drafts: int, like: "_Alike | None" = None) -> float:
        """The time of a round: as measured; or in proportion to `like`, batches of another size; or on the
        line through two measured numbers."""
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
    """Chooses the number of drafts for a writer's batches, and learns from every round."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.numbers = tuple(each for each in NUMBERS if each <= most)
        self.clock = clock
        self._sizes: dict[int, _Alike] = {}
        self._asked = [0.0] * self.most
        self._right = [0.0] * self.most
        # An alternative candidate that is right has no drafts behind it. So a place can have more right
        # drafts than the next place has drafts to verify.
        self._followed = [0.0] * self.most
        self._followable = [0.0] * self.most

    @property
    def most(self) -> int:
        return self.numbers[-1]

    def choose(self, rows: int) -> int:
        """The number of drafts for the next round of a batch of this size."""
        size = _size(rows)
        alike = self._sizes.setdefault(size, _Alike())
        like = self._most_like(size)
        known = alike.known() or ([] if like is None else like.known())
        if not known:
            return 0  # the baseline; afterwards one draft, two, and so on while that seems to pay
        of = alike if alike.known() or like is None else like
        rates = {drafts: self.expected(drafts) / of.seconds(drafts, like) for drafts in self.numbers}
        best = max(known, key=lambda drafts: rates[drafts])
        if not alike.is_measured(best):
            return best
        if not alike.is_measured(0):
            return 0  # the baseline of speculation
        for drafts in self.numbers:
            if not alike.is_measured(drafts) and rates[best] < _HOPE * rates[drafts]:
                return drafts
        return self._tried_again(alike, rates, best)

    def _tried_again(self, alike: _Alike, rates: dict[int, float], best: int) -> int:
        """The best number; sometimes another, which may have become better or been underestimated."""
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
        """Record one or several rounds: their seconds, if these predict another round, and how many drafts
        were verified and right at each place."""
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
        """The expected number of tokens that a text gains in a round."""
        tokens = reached = 1.0
        chance, of = _PRIOR
        for place in range(drafts):
            if self._asked[place]:  # otherwise use the place before
                chance, of = self._right[place] + _PRIOR[0], self._asked[place] + _PRIOR[1]
            right, followable = chance / of, self._followable[place]
            tokens += reached * right
            reached *= min(right, self._followed[place] / followable) if followable else right
        return tokens

    def _most_like(self, size: int) -> _Alike | None:
        """Batches of the nearest other size with several measured numbers."""
        others = {
            each: alike for each, alike in self._sizes.items() if each != size and len(alike.known()) > 1
        }
        return others[min(others, key=lambda each: abs(each - size))] if others else None


def _size(rows: int) -> int:
    """A bucket for batches of similar sizes: four buckets for each doubling, from 8 on."""
    steps = max(rows.bit_length() - 3, 0)
    return 4 * steps + -(-rows // (1 << steps))
