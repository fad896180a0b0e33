"""Tokens with their log-probabilities, as responses show them."""

from collections.abc import Callable, Sequence
from functools import lru_cache

from bd3lm.data import Tokenizer
from bd3lm.serving.link import Line
from bd3lm.serving.telling import Telling

_LEAST = -9999.0  # OpenAI's value for an impossible token: JSON has no infinity

Alternatives = Sequence[tuple[int, float]]


class Names:
    """The names of single tokens, cached because the same ones are often likely."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.of: Callable[[int], str] = lru_cache(maxsize=1 << 16)(self._name)
        self._bytes: Callable[[int], bytes | None] = lru_cache(maxsize=1 << 16)(tokenizer.token_bytes)

    def _name(self, token: int) -> str:
        """The token's text, which may be half a character. A special token has no text but a name."""
        decode = self._tokenizer.decode
        return decode([token]) or decode([token], skip_special=False)

    def told(self, token: int, log_p: float) -> Line:
        found = self._bytes(token)
        return {
            "token": self.of(token),
            "bytes": None if found is None else list(found),
            "logprob": in_json(log_p),
        }


def in_json(log_p: float) -> float:
    return max(_LEAST, log_p)


class TokenChances:
    """The written tokens of one text in order, and where each begins in the written text."""

    def __init__(self, names: Names, tokenizer: Tokenizer, prompt: Sequence[int], number: int) -> None:
        self._names, self._number = names, number
        self._text = Telling(tokenizer, prompt, ())
        self._at = len(prompt)

    def more(
        self,
        start: int,
        tokens: Sequence[int],
        log_p: Sequence[float | None],
        alternatives: Sequence[Alternatives],
    ) -> list[Line]:
        """The entries for new tokens, given those from `start` on. Given tokens have no entry."""
        found = []
        for token, chance, others in list(zip(tokens, log_p, alternatives, strict=True))[self._at - start :]:
            offset = self._offset(token)
            if chance is not None:
                top = [self._names.told(*each) for each in others[: self._number]]
                found.append({**self._names.told(token, chance), "top": top, "offset": offset})
        return found

    def _offset(self, token: int) -> int:
        """Where the next token begins. All parts of one character begin where the character does."""
        text = self._text
        before, was_whole = len(text.told), text.is_whole
        text.more(self._at, [token])
        self._at += 1
        name = self._names.of(token)
        if was_whole or not text.is_whole or not text.told.endswith(name):
            return before
        return len(text.told) - len(name)  # so the text before it is not part of a character
