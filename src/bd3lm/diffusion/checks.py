"""What counts as a number where users give one; Python's and numpy's do, bools do not."""

from numbers import Integral, Real


def is_whole(value: object) -> bool:
    """Whether it is an integer, of Python's or of numpy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a real number, of Python's or of numpy's, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)
