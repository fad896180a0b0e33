"""What is wrong with the flags of `bd3lm sample`, before torch is there."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bd3lm.commands.shared.records import check_new_file
from bd3lm.io.files import read_text
from bd3lm.limits import check_alternatives, check_temperature

if TYPE_CHECKING:
    from bd3lm.commands.sample import Sample

_MOST_SCHEMA = 1_000_000  # bytes; a grammar may have a tenth of that in characters


def check_ways(flags: "Sample") -> None:
    """Refuse flags that would contradict each other."""
    if flags.remask is not None and flags.steps is None:
        raise ValueError("--remask needs --steps, the number of steps for each block")
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
            f"--lean is for an order that is drawn, and {chosen[0]} has its own; only --lean 0 goes with it"
        )


def bias_of(said: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """What --logit-bias adds to which tokens."""
    found: dict[int, float] = {}
    for each in said:
        token, _, number = each.partition("=")
        try:
            added = float(number)
        except ValueError:
            added = math.nan
        if not token.isdecimal() or not -100 <= added <= 100:
            raise ValueError(f"--logit-bias must be ID=NUMBER, of a number from -100 to 100, got {each}")
        if int(token) in found:
            raise ValueError(f"--logit-bias must name each token once, got {token} again")
        found[int(token)] = added
    return tuple(found.items())


def check_numbers(flags: "Sample") -> None:
    """In the words of the flags, where Python's arguments have other names."""
    if flags.length is not None and flags.max_new_tokens is not None:
        raise ValueError(
            f"only one of --length and --max-new-tokens may be given, got {flags.length} and "
            f"{flags.max_new_tokens}"
        )
    for name, count in (
        ("--steps", flags.steps),
        ("--tokens-per-pass", flags.tokens_per_pass),
        ("--max-new-tokens", flags.max_new_tokens),
        ("--length", flags.length),
        ("--top-k", flags.top_k),
        ("--entropy-window", flags.entropy_window),
        ("--stride", flags.stride),
        ("--fills", flags.fills),
    ):
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    check_speculation(flags)
    bias_of(flags.logit_bias)
    if flags.alternatives is not None:
        check_alternatives(flags.alternatives, "--alternatives")
        if flags.out is None:
            raise ValueError(
                f"--alternatives needs --out, whose lines tell them, got {flags.alternatives} without one"
            )
    if flags.fills is not None and flags.template is None:
        raise ValueError(f"--fills is for --template, whose gaps are filled, got {flags.fills} without one")
    if flags.batch_size < 1:
        raise ValueError(f"--batch-size must be a whole number from 1 on, got {flags.batch_size}")
    for name, share in (("--top-p", flags.top_p), ("--confidence", flags.confidence)):
        if share is not None and not 0.0 < share <= 1.0:
            raise ValueError(f"{name} must lie in (0, 1], got {share}")
    if flags.remask is not None and not 0.0 <= flags.remask <= 1.0:
        raise ValueError(f"--remask must lie in [0, 1], got {flags.remask}")
    if flags.entropy_bound is not None and not flags.entropy_bound >= 0.0:
        raise ValueError(f"--entropy-bound must not be negative, got {flags.entropy_bound}")
    check_temperature(flags.temperature, "--temperature")


def check_speculation(flags: "Sample") -> None:
    """Refuse a number of drafts that is none, and what goes without any."""
    asked = "off" if flags.speculation == "0" else flags.speculation
    if asked not in (None, "auto", "off") and not asked.isdecimal():
        raise ValueError(f"--speculation must be auto, off or a number of drafts, got {asked!r}")
    if flags.candidates < 1:
        raise ValueError(f"--candidates must be at least 1, got {flags.candidates}")
    if flags.scheme == "rejection" and asked in (None, "auto", "off"):
        raise ValueError(
            "--scheme rejection needs --speculation N, a number of drafts: one that the clock chose would "
            f"make texts depend on it, got {'none' if asked is None else asked}"
        )
    if flags.candidates > 1 and asked == "off":
        raise ValueError(f"--candidates {flags.candidates} needs --speculation auto or N, got off")


def check_film(film: Path | None, texts: int, out: Path | None) -> None:
    """Refuse a film of several texts, one that is not called .svg, and one that would overwrite a file."""
    if film is None:
        return
    if film == out:
        raise ValueError(f"--film and --out must be two files, got {film} for both")
    if texts != 1:
        raise ValueError(f"--film is of one text, got {texts}")
    if film.suffix != ".svg":
        raise ValueError(f"--film must be a file called .svg, got {film}")
    check_new_file(film, "--film")


def read_schema(path: Path) -> str:
    """The JSON schema in a file, which may be a pipe."""
    try:
        return read_text(path, most=_MOST_SCHEMA, piped=True)
    except OSError as error:
        raise ValueError(f"--json-schema {path} could not be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--json-schema: {error}") from None
