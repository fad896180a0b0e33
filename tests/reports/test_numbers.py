"""Numbers as people read them."""

import pytest

from bd3lm.reports.numbers import capital, chain, perplexity_text, plain, shortened, with_error


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (39.4223, 1.814, "39.4 ± 1.8"),
        (384.2, 12.4, "384 ± 12"),
        (5.31, 0.0204, "5.310 ± 0.020"),
        (1234.5, 0.3, "1,234.50 ± 0.30"),
        (2.0, 0.00001, "2.000 ± 0.000"),
        (0.002054, 0.000121, "0.00205 ± 0.00012"),
        (1234567.8, 345678.9, "1,234,568 ± 345,679"),
        (0.0, 0.25, "0.00 ± 0.25"),
        (39.4223, None, "39.42"),
        (39.4223, 0.0, "39.42"),
        (None, None, "∞"),
    ],
)
def test_with_error(value, error, text):
    assert with_error(value, error) == text
    assert with_error(value, error, sign="≤ ") == f"≤ {text}"


def test_a_perplexity_says_what_it_is():
    figure = {"perplexity": 39.4223, "perplexity_error": 1.814}
    texts = [perplexity_text({**figure, "meaning": meaning}) for meaning in ("exact", "bound", "neither")]
    assert texts == ["39.4 ± 1.8", "≤ 39.4 ± 1.8", "≈ 39.4 ± 1.8"]


def test_the_rest():
    assert [plain(value) for value in (0.0, 0.0471, 0.5, 9.876, 123.45, 12345.6)] == [
        "0.000",
        "0.0471",
        "0.500",
        "9.88",
        "123.5",
        "12,346",
    ]
    assert chain((560, 1350)) == "560 + 1,350"
    assert chain((560,), "owner/name") == "? + 560"
    assert [shortened(count) for count in (7, 922_000, 110_000_000, 1_300_000_000)] == [
        "7",
        "922k",
        "110M",
        "1.3B",
    ]
    assert capital("block") == "Block"
    assert capital("") == ""
