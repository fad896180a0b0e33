"""Stop strings: finding them in the tokens of a text while it is written, and cutting them off."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bd3lm.data import Tokenizer

_MARGIN = 8  # extra tokens to decode, since they affect those after them; also extra characters, to be safe
_STRIDE = 16  # tokens to search before the start of the search window moves on


@dataclass(frozen=True)
class StopStrings:
    """Finds the first of some strings in a text, for `Stopping.find_end`.

    A text ends after the fewest tokens whose text holds a stop string. Every number of tokens is tried, not
    only the end of a block: a prefix may end inside a character, and a decoder may join new tokens to the
    text before, so a string can appear after some tokens and be gone after more. If only block ends were
    tried, the end of a text would depend on where its blocks end.
    """

    tokenizer: Tokenizer
    strings: tuple[str, ...]

    def __call__(self, tokens: Tensor, written_from: int, new_from: int) -> tuple[int, str] | None:
        for begin in range(new_from, len(tokens), _STRIDE):
            start = self._far_enough_back(tokens, written_from, begin)
            context = max(start - _MARGIN, 0)
            seen = tokens[context : begin + _STRIDE].tolist()
            for size in range(begin + 1 - context, len(seen) + 1):
                found = self.first(written_text(self.tokenizer, seen[:size], start - context))
                if found is not None:
                    end = context + size
                    written = written_text(self.tokenizer, tokens[:end].tolist(), written_from)
                    return end, self.first(written) or found
        return None

    def first(self, text: str) -> str | None:
        """The string that begins first in a text, if the text holds any."""
        held = [string for string in self.strings if string in text]
        return min(held, key=text.find, default=None)

    def _far_enough_back(self, tokens: Tensor, written_from: int, begin: int) -> int:
        """The token to read from so that no string is missed that ends at `begin` or later.

        It saves decoding a long text from its start for every token.
        """
        least = max(map(len, self.strings)) + _MARGIN
        back = least
        while (start := begin - back) > written_from:
            context = max(start - _MARGIN, 0)
            if len(written_text(self.tokenizer, tokens[context:begin].tolist(), start - context)) >= least:
                return start
            back *= 2  # some are special tokens, or it takes several tokens to make a character
        return written_from


def written_text(tokenizer: Tokenizer, tokens: Sequence[int], start: int) -> str:
    """The text that tokens[start:] add to the text of the tokens before them.

    Decoded alone, tokens may lose the space before them or start with half a character. A character that
    began before `start` does not count.
    """
    before, whole = tokenizer.decode(tokens[:start]), tokenizer.decode(tokens)
    if whole.startswith(before):
        return whole[len(before) :]
    alone = tokenizer.decode(tokens[start:])
    theirs = shared_start(alone[::-1], whole[::-1])
    return whole[len(whole) - theirs :]


def shared_start(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
