"""--unmasking as a rule, and the flags for speculation as settings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bd3lm.parsing import did_you_mean, parse
from bd3lm.sampling import Scheme, Speculation, UnmaskingRule

if TYPE_CHECKING:
    from bd3lm.methods import Method


def unmasking_rule(words: Sequence[str], method: "Method") -> UnmaskingRule | None:
    """The rule that --unmasking names. It has the model's lean unless the flag sets one."""
    if not words:
        return None
    rule: Any = named_rule(words, UnmaskingRule.members())
    says_lean = any(word.startswith("lean=") for word in words)
    return rule if says_lean or not rule.can_lean else replace(rule, lean=method.order_lean)


def speculation_of(asked: str | None, scheme: Scheme, candidates: int) -> Speculation | None:
    """Speculation from --speculation, --scheme and --candidates; None leaves it to the model."""
    if asked is None and candidates == 1:
        return None
    of = Speculation.of(int(asked) if asked is not None and asked.isdecimal() else asked or "auto")
    return replace(of, scheme=scheme, candidates=candidates)


def named_rule(words: Sequence[str], kinds: Mapping[str, type[Any]], *, flag: str = "--unmasking") -> Any:
    """The rule named by KIND [field=value ...], out of `kinds`."""
    kind, *rest = words
    if kind not in kinds:
        raise ValueError(
            f"{flag} must name one of {', '.join(kinds)}, got {kind!r}{did_you_mean(kind, kinds)}"
        )
    values: dict[str, str] = {}
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(
                f"{flag} takes KIND [field=value ...], got {word!r} after {kind}: put the model and prompts "
                "before the flag"
            )
        if name in values:
            raise ValueError(f"{flag} {kind}: {name} is given twice")
        values[name] = value
    try:
        return parse(kinds[kind], values, where=f"{flag} {kind}")
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from None
