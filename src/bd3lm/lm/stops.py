"""Strings that end a text: found among its tokens while these are written, and cut off its text."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bd3lm.data import Tokenizer

_MARGIN = 8  # tokens that are decoded for what they do to those after them; characters to be on the safe side
_STRIDE = 16  # tokens that are looked at before what stands far before them is left behind


@dataclass(frozen=True)
class StopStrings:
    """Finds the first of some strings in a text, for `Stopping.find_end`.

    A text ends after the fewest tokens whose text holds one. Every number of tokens is tried, not only the
    end of a block: a prefix may end inside a character, and a decoder may join what follows to what came
    before, so a string that is there after some tokens may be gone after more. Otherwise the end of a text
    would depend on where its blocks end.
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
        """The string that begins first in a text, of those that the text holds."""
        held = [string for string in self.strings if string in text]
        return min(held, key=text.find, default=None)

    def _far_enough_back(self, tokens: Tensor, written_from: int, begin: int) -> int:
        """From where on tokens must be read for no string to be missed that ends at `begin` or later.

        Long texts are not read from their beginning for every token.
        """
        least = max(map(len, self.strings)) + _MARGIN
        back = least
        while (start := begin - back) > written_from:
            context = max(start - _MARGIN, 0)
            if len(written_text(self.tokenizer, tokens[context:begin].tolist(), start - context)) >= least:
                return start
            back *= 2  # there are special tokens among them, or several tokens make a character
        return written_from


def written_text(tokenizer: Tokenizer, tokens: Sequence[int], start: int) -> str:
    """What tokens[start:] add to the text of those before: the end of the whole text.

    Decoded alone they may read otherwise: without the space before them, or as half a character. A character
    that was begun before `start` is not theirs.
    """
    before, whole = tokenizer.decode(tokens[:start]), tokenizer.decode(tokens)
    if whole.startswith(before):
        return whole[len(before) :]
    alone = tokenizer.decode(tokens[start:])
    theirs = shared_start(alone[::-1], whole[::-1])
    return whole[len(whole) - theirs :]


def shared_start(one: str, other: str) -> int:
    """How many characters two texts have in common before they differ."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
