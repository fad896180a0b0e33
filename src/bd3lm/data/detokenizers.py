"""Undo what corpora did to their text: the detokenizers of the papers that report perplexities on them.

These corpora come with spaces around punctuation, `@-@` for a hyphen or N for a number. A model of web text
would be charged for reading that, so papers since GPT-2 restore the text first. The rules, their order and
their oddities (every number of the Penn Treebank is 1) are part of the published perplexities and are kept.
Each table is applied from top to bottom.
"""

import re
from collections.abc import Callable

Detokenizer = Callable[[str], str]
Rules = tuple[tuple[re.Pattern[str], str], ...]


def _rules(*pairs: tuple[str, str]) -> Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


def _apply(rules: Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


_WIKITEXT = _rules(
    (r"s '", "s'"),  # a plural's possessive
    (r"/' [0-9]/", r"/'[0-9]/"),  # as published: it was meant to be a pattern and matches next to nothing
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (r" : ", ": "),
    (r" ; ", "; "),
    (r" \. ", ". "),
    (r" ! ", "! "),
    (r" \? ", "? "),
    (r" , ", ", "),
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (r" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)

_LM1B = _rules(
    (r"http : / / ", "http://"),
    (r"https : / / ", "https://"),
    (r" '(\w+)", r"'\1"),
    (r" (\w+) \. ", r" \1. "),
    (r" (\w+) \.$", r" \1."),
    (r" \? ", "? "),
    (r" \?$", "?"),
    (r" ! ", "! "),
    (r" !$", "!"),
    (r" , ", ", "),
    (r" : ", ": "),
    (r" ; ", "; "),
    (r" / ", "/"),
    (r'" ([^"]+) "', r'"\1"'),
    (r"' ([^']+) '", r"'\1'"),
    (r"\( ([^()]+) \)", r"(\1)"),
    (r"\[ ([^\[\]]+) \]", r"[\1]"),
    (r"\$ ", "$"),
    (r"£ ", "£"),
)

_PTB = _rules(
    (r" 's", "'s"),
    (r"s ' ", "s' "),
    (r" n't", "n't"),
    (r" \n ", "\n"),
    (r"\\/", "/"),
    (r" N(?= )", " 1"),  # N N N shares its spaces
    (r"\$ 1", "$1"),
    (r"# 1", "#1"),
    (r"<unk>", "?"),
)


def wikitext(text: str) -> str:
    """WikiText: as GPT-2 and Megatron-LM read it."""
    return _apply(_WIKITEXT, text)


def lm1b(text: str) -> str:
    """One Billion Word: as SEDD and MDLM read it."""
    return _apply(_LM1B, text)


def ptb(text: str) -> str:
    """Penn Treebank: as GPT-2 read it."""
    return _apply(_PTB, text)


def lambada(text: str) -> str:
    """LAMBADA: straight quotation marks, and each passage on a line of its own."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


def scientific_papers(text: str) -> str:
    """PubMed and arXiv: WikiText's rules, then those of One Billion Word, as MDLM read them."""
    return lm1b(wikitext(text))
