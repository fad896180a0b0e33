"""The chat template that a user asks for, and what is said of conversations that are read."""

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
        help="How conversations become text: a Jinja template; plain, which comes with bd3lm; or none, for "
        "texts and their continuations (prompt and completion). By default the one of the tokenizer, where "
        "it has one.",
    ),
]
AnswersFlag = Annotated[
    Literal["all", "last"],
    named("{all,last}", help="Learn all answers of a conversation, or the last alone. (default: all)"),
]


def check_template(asked: str | None) -> None:
    """Refuse a template that is not there."""
    from bd3lm.data.templates import named_template

    if asked is not None and asked != NONE:
        named_template(asked)


def template_for(asked: str | None, tokenizer: "Tokenizer") -> str | None:
    """The text of the template that is asked for; None for texts that need none."""
    from bd3lm.data.templates import named_template

    if asked is None:
        return tokenizer.chat_template
    return None if asked == NONE else named_template(asked)


def say_cut(corpora: "Sequence[ConversationCorpus]") -> None:
    """Read and check all conversations, and say of how many the end is left out."""
    if cut := sum(corpus.cut for corpus in corpora):
        what = "1 conversation" if cut == 1 else f"{cut:,} conversations"
        say(f"left out what stands behind the last answer of {what}", to=sys.stderr)
