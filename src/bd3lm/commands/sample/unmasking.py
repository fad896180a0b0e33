"""The order in which `bd3lm sample` reveals tokens: from its flags to a rule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bd3lm.parsing import did_you_mean, parse
from bd3lm.sampling import EntropyBound, FirstHitting, MostConfident, Remasking, UnmaskingRule

if TYPE_CHECKING:
    from bd3lm.commands.sample import Sample
    from bd3lm.methods import Method


def how_to_unmask(flags: "Sample", method: "Method") -> dict[str, Any]:
    """The settings that the flags ask for: an unmasking rule, or steps of the method's own."""
    if flags.unmasking:
        rule = named_rule(flags.unmasking, UnmaskingRule.members())
        says_lean = any(word.startswith("lean=") for word in flags.unmasking)
        return {
            "unmasking": rule if says_lean or not rule.can_lean else replace(rule, lean=method.order_lean)
        }
    if flags.remask is not None and flags.steps is not None:
        return {"unmasking": Remasking(steps=flags.steps, eta=flags.remask)}
    if flags.confidence is not None:
        return {"unmasking": MostConfident(threshold=flags.confidence)}
    if flags.entropy_bound is not None:
        return {"unmasking": EntropyBound(flags.entropy_bound)}
    if flags.tokens_per_pass is not None and (method.has_order or flags.tokens_per_pass > 1):
        return {"unmasking": FirstHitting(flags.tokens_per_pass, method.order_lean)}
    return method.in_steps(flags.steps)


def named_rule(words: Sequence[str], kinds: Mapping[str, type[Any]], *, flag: str = "--unmasking") -> Any:
    """The rule that KIND [field=value ...] asks for, of the rules by their kinds."""
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
                f"{flag} takes KIND [field=value ...], got {word!r} after {kind}: a model and prompts go "
                "before the flag"
            )
        if name in values:
            raise ValueError(f"{flag} {kind}: {name} is given twice")
        values[name] = value
    try:
        return parse(kinds[kind], values, where=f"{flag} {kind}")
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())) from None
