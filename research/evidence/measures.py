"""What can be measured of a trained model, as data."""

from dataclasses import asdict, dataclass, field
from typing import Any

from bd3lm.sampling import EntropyBound, FirstHitting, MostConfident, UnmaskingRule

TRAINED_ON = "wikipedia"
ZERO_SHOT = ("ptb", "wikitext", "lm1b", "lambada", "ag_news", "elife", "acl", "openwebtext")


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Of held-out Wikipedia or another corpus, on its first sequences. Choices are made on `valid`.

    `estimator` is one of `bd3lm eval`, or next-token: the network's own likelihood as an autoregressive one.
    What takes many passes is measured on a `part`, and compares with other figures of that part only. `lean`
    is of the order in which a block is revealed.
    """

    data: str = TRAINED_ON
    split: str = "test"
    estimator: str
    sequences: int = 768
    replicates: int = 1
    part: bool = False
    lean: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Variance:
    """Of the loss over blocks, for some of the rules of `bd3lm variance`."""

    rules: tuple[str, ...]
    batches: int = 8


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts to be judged: of whole contexts, end tokens or not.

    One whose last context falls below the `floor`, in nats, is drawn again, up to 20 times, as in the paper.
    """

    contexts: int = 1
    count: int = 128
    steps: int | None = None
    unmasking: UnmaskingRule = field(default_factory=FirstHitting)
    floor: float | None = 4.0


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Lengths of documents, each from an end token to the next, to low entropy or to the limit."""

    count: int = 200
    contexts: int = 16
    floor: float = 4.0


Measure = Perplexity | Variance | Texts | Documents


def describe(measure: Measure) -> dict[str, Any]:
    """A measure as JSON: what tells its results from those of others."""
    plain = {"kind": type(measure).__name__.lower(), **asdict(measure)}
    if isinstance(measure, Texts):
        plain["unmasking"] = rule_values(measure.unmasking)
    if isinstance(measure, Variance):
        plain["rules"] = list(measure.rules)
    return plain


def rule_values(rule: UnmaskingRule) -> dict[str, Any]:
    """What a rule is set to. Spelt out here: a field that the library adds is none of the results'."""
    match rule:
        case FirstHitting(tokens_per_pass=tokens, lean=lean):
            return {"kind": "first_hitting", "tokens_per_pass": tokens, "lean": lean}
        case MostConfident(threshold=threshold, tokens_per_pass=tokens):
            return {"kind": "most_confident", "threshold": threshold, "tokens_per_pass": tokens}
        case EntropyBound(bound=bound):
            return {"kind": "entropy_bound", "bound": bound}
    raise ValueError(f"unmasking must be FirstHitting, MostConfident or EntropyBound, got {rule}")
