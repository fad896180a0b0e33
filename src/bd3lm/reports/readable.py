"""Makes texts from outside displayable in every page and file."""

import unicodedata

_KEPT = "\n\t\u200c\u200d"  # joiners too: some scripts, and some emoji, need them
_PICTURES = 0x2400  # ␀, followed by the pictures of the other control characters


class _Shown(dict[int, str]):
    """The replacement for each code point, computed when it first occurs."""

    def __missing__(self, code: int) -> str:
        self[code] = _shown(code)
        return self[code]


def readable(text: str) -> str:
    """Show control characters as ␛ or \\x9b, and drop invisible characters that reorder text.

    Characters that XML or UTF-8 cannot hold become the replacement character.
    """
    return text.replace("\r\n", "\n").translate(_SHOWN)


def _shown(code: int) -> str:
    sign = chr(code)
    category = unicodedata.category(sign)
    if sign in _KEPT:
        return sign
    if category == "Cc":
        return chr(_PICTURES + code) if code < 0x20 else "␡" if code == 0x7F else f"\\x{code:02x}"
    if category == "Cf":
        return ""
    return "\ufffd" if category == "Cs" or code in (0xFFFE, 0xFFFF) else sign


_SHOWN = _Shown()
