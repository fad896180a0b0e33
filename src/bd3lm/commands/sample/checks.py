"""Checks of the flags of `bd3lm sample`, made before torch is loaded."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bd3lm.commands.shared.records import check_new_file
from bd3lm.io.files import read_text
from bd3lm.limits import check_alternatives, check_counts, check_temperature

if TYPE_CHECKING:
    from bd3lm.commands.sample import Sample

_MOST_SCHEMA = 1_000_000  # bytes; a grammar may have a tenth of that in characters


def check_ways(flags: "Sample") -> None:
    """Refuse flags that contradict each other."""
    if flags.remask is not None and flags.steps is None:
        raise ValueError("--remask needs --steps, the number of steps per block")
    ways = {
        "--steps": flags.steps,
        "--tokens-per-pass": flags.tokens_per_pass,
        "--confidence": flags.confidence,
        "--entropy-bound": flags.entropy_bound,
        "--unmasking": flags.unmasking or None,
    }
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise ValueError(f"only one of {', '.join(ways)} may be given, got {' and '.join(chosen)}")
    if flags.lean and chosen and chosen != ["--tokens-per-pass"]:
        raise ValueError(
            f"--lean needs an order that is drawn, and {chosen[0]} has its own order; only --lean 0 may be "
            "given with it"
        )


def bias_of(said: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """The tokens and numbers that --logit-bias names."""
    found: dict[int, float] = {}
    for each in said:
        token, _, number = each.partition("=")
        try:
            added = float(number)
        except ValueError:
            added = math.nan
        if not token.isdecimal() or not -100 <= added <= 100:
            raise ValueError(f"--logit-bias must be ID=NUMBER with a number from -100 to 100, got {each}")
        if int(token) in found:
            raise ValueError(f"--logit-bias must name each token once, got {token} twice")
        found[int(token)] = added
    return tuple(found.items())


def check_numbers(flags: "Sample") -> None:
    """Refuse numbers out of range; errors name the flags rather than Python's arguments."""
    if flags.length is not None and flags.max_new_tokens is not None:
        raise ValueError(
            f"only one of --length and --max-new-tokens may be given, got {flags.length} and "
            f"{flags.max_new_tokens}"
        )
    check_counts(
        steps=flags.steps,
        tokens_per_pass=flags.tokens_per_pass,
        max_new_tokens=flags.max_new_tokens,
        length=flags.length,
        top_k=flags.top_k,
        entropy_window=flags.entropy_window,
        stride=flags.stride,
        fills=flags.fills,
    )
    check_speculation(flags)
    bias_of(flags.logit_bias)
    if flags.alternatives is not None:
        check_alternatives(flags.alternatives, "--alternatives")
        if flags.out is None:
            raise ValueError(
                f"--alternatives needs --out, which records them, got {flags.alternatives} without it"
            )
    if flags.fills is not None and flags.template is None:
        raise ValueError(f"--fills needs --template, whose gaps it fills, got {flags.fills} without it")
    if flags.batch_size < 1:
        raise ValueError(f"--batch-size must be a whole number, at least 1, got {flags.batch_size}")
    for name, share in (("--top-p", flags.top_p), ("--confidence", flags.confidence)):
        if share is not None and not 0.0 < share <= 1.0:
            raise ValueError(f"{name} must lie in (0, 1], got {share}")
    if flags.remask is not None and not 0.0 <= flags.remask <= 1.0:
        raise ValueError(f"--remask must lie in [0, 1], got {flags.remask}")
    if flags.entropy_bound is not None and not flags.entropy_bound >= 0.0:
        raise ValueError(f"--entropy-bound must not be negative, got {flags.entropy_bound}")
    check_temperature(flags.temperature, "--temperature")


def check_speculation(flags: "Sample") -> None:
    """Refuse an invalid number of drafts, and flags that need drafts if there are none."""
    asked = "off" if flags.speculation == "0" else flags.speculation
    if asked not in (None, "auto", "off") and not asked.isdecimal():
        raise ValueError(f"--speculation must be auto, off or a number of drafts, got {asked!r}")
    if flags.candidates < 1:
        raise ValueError(f"--candidates must be at least 1, got {flags.candidates}")
    if flags.scheme == "rejection" and asked in (None, "auto", "off"):
        raise ValueError(
            "--scheme rejection needs --speculation N: with auto, timing would choose the number of drafts "
            f"and change the texts; got {'none' if asked is None else asked}"
        )
    if flags.candidates > 1 and asked == "off":
        raise ValueError(f"--candidates {flags.candidates} needs --speculation auto or N, got off")


def check_film(film: Path | None, texts: int, out: Path | None) -> None:
    """Refuse an animation of several texts, a file not named .svg, and a file that exists."""
    if film is None:
        return
    if film == out:
        raise ValueError(f"--film and --out must be different files, got {film} for both")
    if texts != 1:
        raise ValueError(f"--film shows one text, got {texts}")
    if film.suffix != ".svg":
        raise ValueError(f"--film must be a file named .svg, got {film}")
    check_new_file(film, "--film")


def read_schema(path: Path) -> str:
    """The JSON schema in a file, which may be a pipe."""
    try:
        return read_text(path, most=_MOST_SCHEMA, piped=True)
    except OSError as error:
        raise ValueError(f"--json-schema {path} could not be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--json-schema: {error}") from None
