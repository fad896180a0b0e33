"""Orders that lean to the left, by hand: which place is the next, drawn among those that are left."""

from collections.abc import Sequence
from itertools import permutations
from math import exp


def chance(order: Sequence[int], places: Sequence[int], lean: float) -> float:
    """That the order in which the places are revealed begins like this.

    A place is e^lean times as likely to be the next as the one to its right (Plackett–Luce).
    """
    left, probability = set(places), 1.0
    for place in order:
        probability /= sum(exp(lean * (place - other)) for other in left)
        left.remove(place)
    return probability


def law_of_orders(places: Sequence[int], lean: float) -> dict[tuple[int, ...], float]:
    """Every order of the places, with its probability."""
    return {order: chance(order, places, lean) for order in permutations(places)}


def law_of_next(places: Sequence[int], number: int, lean: float) -> dict[tuple[int, ...], float]:
    """Every set (from the left to the right) that the first so many of an order may be."""
    law: dict[tuple[int, ...], float] = {}
    for begins in permutations(places, min(number, len(places))):
        chosen = tuple(sorted(begins))
        law[chosen] = law.get(chosen, 0.0) + chance(begins, places, lean)
    return law
