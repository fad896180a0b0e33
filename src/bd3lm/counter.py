"""Random numbers as a function of a counter: the same (seed, position, purpose) gives the same number.

A sampler that draws noise this way gives each row its own stream. The numbers of a row depend neither on the
rest of the batch nor on how many rows are still running. The function is SplitMix64 (Steele, Lea and Flood):
a 64-bit mixing function over a Weyl sequence. int64 arithmetic wraps, so it runs on any device.
"""

import hashlib
from enum import IntEnum
from numbers import Integral

import torch
from torch import Tensor

# Public for the kernel that generates the same numbers on the GPU.
GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio in 64 bits
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
PURPOSES = 4  # positions per key; a larger number would change every number ever drawn
MOST_POSITIONS = 2**40  # longer than any text; positions beyond it are for repeated draws


class Purpose(IntEnum):
    """What a random number decides, so that two uses at one position never share it."""

    TOKEN = 0  # which token is revealed
    ORDER = 1  # when a position is revealed
    REMASK = 2  # when a revealed position is masked again
    NOISE = 3  # the Gaussian noise of a continuous diffusion


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; the shift of int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _fold(key: Tensor, word: Tensor) -> Tensor:
    """A new key for each value of `word`."""
    return _mix(key + (word + 1) * GOLDEN)


def counter_uniform(
    seed: Tensor, position: Tensor, purpose: Purpose, entries: int, *, repeat: int | Tensor = 0
) -> Tensor:
    """Uniforms (..., entries) in the open interval (0, 1), float64.

    `seed` and `position` are int64 and broadcast to the leading shape. `repeat` counts earlier draws at the
    same position; it may be an int64 tensor that broadcasts too. The numbers are odd multiples of 2^-53, so
    neither 0 nor 1 occurs and every number is exact.
    """
    # The purpose lies in the low bits of the position: two bits hold four.
    word = (position + repeat * MOST_POSITIONS) * PURPOSES + int(purpose)
    key = _fold(_mix(seed), word).unsqueeze(-1)
    words = _mix(key + torch.arange(1, entries + 1, device=key.device) * GOLDEN)
    return (_shift_right(words, 12).double() + 0.5) * 2.0**-52


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed for a generator, derived from its purpose: derive_seed(seed, "masks", step).

    A numpy integer gives the same seed as the Python int of equal value, although its repr differs.
    """
    plain = tuple(
        int(part) if isinstance(part, Integral) and not isinstance(part, int) else part for part in parts
    )
    digest = hashlib.sha256(repr(plain).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
