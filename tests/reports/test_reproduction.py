"""Commands in captions: one for all that was measured in the same way."""

from bd3lm.reports.reproduction import Typed, measured_by, unmasking
from tests.reports import perplexity, run, samples


def test_one_command_for_what_was_measured_in_the_same_way():
    a, b = run("a"), run("b c")
    plain = perplexity(("exact", 2.0))

    def made(flags: str, text: str = "") -> dict:
        return {**plain, "command": Typed("bd3lm eval", flags, text)}

    ptb, lm1b, few = made("--seed 1", "p t b"), made("--seed 1", "lm1b"), made("--seed 1 --sequences 4")
    assert measured_by([(a, ptb), (a, lm1b), (b, ptb), (b, lm1b), (a, few), (a, few)]) == (
        " Measured by `bd3lm eval a 'b c' --data 'p t b' lm1b --seed 1`, "
        "`bd3lm eval a --seed 1 --sequences 4`."
    )
    assert measured_by([(a, made(""))]) == " Measured by `bd3lm eval a`."
    assert measured_by([(a, samples(("Once", "upon")))]) == ""


def test_ways_of_unmasking():
    expected = "remasking", {"steps": 9, "eta": 0.6}
    assert unmasking({"kind": "remasking", "steps": 9, "eta": 0.6}) == expected
