"""Chat templates as flags name them, and what a command reports about conversations."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from bd3lm.commands.shared.flags import named
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.data import ConversationCorpus, Tokenizer

NONE = "none"

ChatTemplateFlag = Annotated[
    str | None,
    named(
        "FILE|plain|none",
        help="Chat template: a Jinja file; plain, which comes with bd3lm; or none, for pairs of prompt and "
        "completion. Default: the tokenizer's own template, if it has one.",
    ),
]
AnswersFlag = Annotated[
    Literal["all", "last"],
    named("{all,last}", help="Train on all answers of a conversation, or only on the last. (default: all)"),
]


def check_template(asked: str | None) -> None:
    """Refuse a template that does not exist."""
    from bd3lm.data.templates import named_template

    if asked is not None and asked != NONE:
        named_template(asked)


def template_for(asked: str | None, tokenizer: "Tokenizer") -> str | None:
    """The text of the template; None for pairs of prompt and completion, which need none."""
    from bd3lm.data.templates import named_template

    if asked is None:
        return tokenizer.chat_template
    return None if asked == NONE else named_template(asked)


def say_cut(corpora: "Sequence[ConversationCorpus]") -> None:
    """Read and check all conversations, and report how many are cut after their last answer."""
    if cut := sum(corpus.cut for corpus in corpora):
        what = "1 conversation" if cut == 1 else f"{cut:,} conversations"
        say(f"left out the messages after the last answer in {what}", to=sys.stderr)
