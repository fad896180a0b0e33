"""What counts as a number in user input: Python's and numpy's numbers do, bools do not."""

from numbers import Integral, Real


def is_whole(value: object) -> bool:
    """Whether it is an integer of Python or numpy, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a real number of Python or numpy, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)
