"""`bd3lm sample`: what is wrong with a flag is said in the words of the flag."""

import pytest

from bd3lm.commands.sample import Sample


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"nucleus": 2.0}, r"--nucleus must lie in \(0, 1\], got 2\.0"),
        ({"batch": 0}, "--batch must be a whole number from 1 on, got 0"),
        ({"confidence": 2.0}, r"--confidence must lie in \(0, 1\], got 2\.0"),
        ({"entropy_bound": -1.0}, r"--entropy-bound must not be negative, got -1\.0"),
        ({"entropy_bound": float("nan")}, "--entropy-bound must not be negative, got nan"),
        ({"remask": 3.0, "steps": 5}, r"--remask must lie in \[0, 1\], got 3\.0"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"tokens_per_pass": 0}, "--tokens-per-pass must be at least 1, got 0"),
        ({"steps": 10}, "--steps 10 has no order that leans, and the model's lean is 2: add --lean 0"),
        ({"length": 10**12}, "length must be at most 1,073,741,824, .* got 1,000,000,000,000"),
    ],
    ids=str,
)
def test_flags_are_named_as_they_are_typed(flags, said):
    with pytest.raises(ValueError, match=f"{said}$"):
        Sample(model="box", device="cpu", **flags).run()
