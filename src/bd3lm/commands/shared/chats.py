"""The chat template that a user asks for, and what is said of conversations that are read."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from bd3lm.commands.shared.flags import named
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.data import ConversationCorpus, Tokenizer

PLAIN, NONE = "plain", "none"
_LARGEST = 4_000_000  # bytes

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
    if asked in (None, PLAIN, NONE):
        return
    file = Path(str(asked)).expanduser()
    if not file.is_file():
        raise ValueError(f"--chat-template must be a file, plain or none, and there is no file {asked}")
    if file.stat().st_size > _LARGEST:
        raise ValueError(f"--chat-template must have at most {_LARGEST:,} bytes, got {file.stat().st_size:,}")


def template_for(asked: str | None, tokenizer: "Tokenizer") -> str | None:
    """The text of the template that is asked for; None for texts that need none."""
    from bd3lm.data.templates import PLAIN as TEXT

    if asked is None:
        return tokenizer.chat_template
    if asked == NONE:
        return None
    if asked == PLAIN:
        return TEXT
    try:
        return Path(asked).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat-template {asked} is not UTF-8 text: {error}") from error


def say_cut(corpora: "Sequence[ConversationCorpus]") -> None:
    """Read and check all conversations, and say of how many the end is left out."""
    if cut := sum(corpus.cut for corpus in corpora):
        what = "1 conversation" if cut == 1 else f"{cut:,} conversations"
        say(f"left out what stands behind the last answer of {what}", to=sys.stderr)
