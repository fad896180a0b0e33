"""The part of a text that is safe to send while it is written: no half characters, no half stop strings."""

from collections.abc import Sequence

from bd3lm.data import Tokenizer
from bd3lm.lm.stops import shared_start, written_text

_CONTEXT = 8  # earlier tokens to decode with new ones, since they affect them
_HALF = "\ufffd"
_PATIENCE = 8  # tokens that may be half a character; if they still are not one, they never will be


class Telling:
    """The text of one request, piece by piece. All pieces together are its completion."""

    def __init__(self, tokenizer: Tokenizer, given: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens = list(given)
        self._decoded = len(given)
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self.told = ""

    @property
    def is_whole(self) -> bool:
        """Whether every token is decoded, with none held back as part of a character."""
        return self._decoded == len(self._tokens)

    def more(self, start: int, tokens: Sequence[int]) -> str:
        """The text that can be sent after these tokens from `start` on. Tokens already known are skipped."""
        self._tokens += tokens[max(len(self._tokens) - start, 0) :]
        self._held += self._whole_characters()
        safe = len(self._held) - max((_overlap(self._held, string) for string in self._stop), default=0)
        told, self._held = self._held[:safe], self._held[safe:]
        self.told += told
        return told

    def _whole_characters(self) -> str:
        """The text of the tokens not yet decoded, up to the last whole character."""
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
        """The rest of a finished text that was not sent yet."""
        return completion[shared_start(self.told, completion) :]


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of a text are the beginning of a string."""
    return next((n for n in range(min(len(string), len(text)), 0, -1) if text.endswith(string[:n])), 0)
