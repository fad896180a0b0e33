"""What a client is told of a text while it is written: never half a character, or half a stop string."""

from collections.abc import Sequence

from bd3lm.data import Tokenizer
from bd3lm.lm.stops import shared_start, written_text

_CONTEXT = 8  # tokens that are decoded before new ones, for what they do to them
_HALF = "\ufffd"
_PATIENCE = 8  # tokens that may be half a character; what is none after so many never will be


class Telling:
    """The text of one request, piece by piece. All pieces together are its completion."""

    def __init__(self, tokenizer: Tokenizer, given: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens = list(given)
        self._decoded = len(given)
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self.told = ""

    @property
    def is_whole(self) -> bool:
        """Whether no token is held back that may be part of a character."""
        return self._decoded == len(self._tokens)

    def more(self, start: int, tokens: Sequence[int]) -> str:
        """What can be told once these stand from `start` on; those that were given are no news."""
        self._tokens += tokens[max(len(self._tokens) - start, 0) :]
        self._held += self._whole_characters()
        safe = len(self._held) - max((_overlap(self._held, string) for string in self._stop), default=0)
        told, self._held = self._held[:safe], self._held[safe:]
        self.told += told
        return told

    def _whole_characters(self) -> str:
        """What tokens not yet decoded add, as far as they make characters."""
        context, end = max(self._decoded - _CONTEXT, 0), len(self._tokens)
        for stop in range(end, max(self._decoded, end - _PATIENCE), -1):
            text = written_text(self._tokenizer, self._tokens[context:stop], self._decoded - context)
            if not text.endswith(_HALF):
                self._decoded = stop
                return text
        if end - self._decoded < _PATIENCE:
            return ""
        text = written_text(self._tokenizer, self._tokens[context:], self._decoded - context)
        self._decoded = end
        return text

    def rest(self, completion: str) -> str:
        """What is left to tell of a finished text."""
        return completion[shared_start(self.told, completion) :]


def _overlap(text: str, string: str) -> int:
    """How much of a string's beginning a text ends with."""
    return next((n for n in range(min(len(string), len(text)), 0, -1) if text.endswith(string[:n])), 0)
