"""From conversations to tokens, with a mark on the tokens of answers, as `prepare` does it.

A text with its continuation needs no template: the text is tokenized like a prompt, its continuation after
it, and the end token comes last.
"""

import hashlib
from dataclasses import dataclass
from itertools import chain

import numpy as np

from bd3lm.data.chat import Answered, Answers, answered, continuation
from bd3lm.data.conversations import Said
from bd3lm.data.encoding import Encoded
from bd3lm.data.meta import Chat, DType, on_disk
from bd3lm.data.shapes import Conversation
from bd3lm.data.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How conversations become tokens."""

    template: str | None
    """The chat template. None for texts with their continuations, which need none."""
    answers: Answers = "all"
    begin: bool = True
    """Begin each text with the tokenizer's BOS token, if it has one."""
    longest: int | None = None
    """Refuse conversations with more tokens than this."""

    @property
    def record(self) -> Chat:
        """The part that decides the tokens, for meta.json."""
        template = None if self.template is None else hashlib.sha256(self.template.encode()).hexdigest()
        return Chat(template=template, answers=self.answers, begin=self.begin)

    def encode(self, said: Conversation, tokenizer: Tokenizer) -> Answered:
        """The tokens of a conversation, and which of them are learned."""
        if self.template is not None:
            found = answered(self.template, said.messages, tokenizer, answers=self.answers)
        elif said.is_text:
            found = self._text(said, tokenizer)
        else:
            raise ValueError(
                "needs a chat template, which this tokenizer does not have: give one with --chat-template "
                "FILE, or use --chat-template plain, which comes with bd3lm"
            )
        if self.longest is not None and len(found.tokens) > self.longest:
            raise ValueError(f"has {len(found.tokens):,} tokens, more than the limit of {self.longest:,}")
        return found

    def _text(self, said: Conversation, tokenizer: Tokenizer) -> Answered:
        prompt, completion = (each.content for each in said.messages)
        begin = [tokenizer.bos_id] if self.begin and tokenizer.bos_id is not None else []
        given = [*begin, *tokenizer.encode(prompt)]
        if tokenizer.eos_id is None:
            raise ValueError("needs an end token, which this tokenizer does not have")
        learned = [*continuation(prompt, completion, tokenizer), tokenizer.eos_id]
        return Answered([*given, *learned], [False] * len(given) + [True] * len(learned))


@dataclass(frozen=True)
class ConversationEncoder:
    """Turns documents of a conversation corpus into tokens."""

    tokenizer: Tokenizer
    dtype: DType
    chat: ChatFormat

    def __call__(self, documents: list[str]) -> Encoded:
        said = list(map(Said.loads, documents))
        found = list(map(self._encode, said))
        lengths = np.fromiter((len(each.tokens) for each in found), np.uint32, len(found))
        ends = np.cumsum(lengths.astype(np.int64))
        return Encoded(
            np.fromiter(
                chain.from_iterable(each.tokens for each in found), on_disk(self.dtype), int(ends[-1])
            ),
            ends,
            lengths,
            np.fromiter(map(_bytes, said), np.int64, len(said)),
            np.fromiter(chain.from_iterable(each.learned for each in found), np.bool_, int(ends[-1])),
        )

    def _encode(self, said: Said) -> Answered:
        try:
            found = self.chat.encode(said.conversation, self.tokenizer)
        except ValueError as error:
            raise ValueError(f"{said.where}: {error}") from None
        if self.tokenizer.mask_id in found.tokens:
            raise ValueError(f"{said.where}: the chat template writes the mask token")
        return found


def _bytes(said: Said) -> int:
    """The bytes of the messages, without what the template adds around them."""
    return sum(len(each.content.encode()) for each in said.conversation.messages)
