"""Undo what corpora did to their text: the detokenizers of the papers that report perplexities on them.

These corpora come with spaces around punctuation, `@-@` for a hyphen or N for a number. A model of web text
would be charged for reading that, so papers since GPT-2 restore the text first. The rules, their order and
their oddities (every number of the Penn Treebank is 1) are part of the published perplexities and are kept.
"""

import re


class Detokenizer:
    """A table of (pattern, replacement), applied to a text from top to bottom.

    The table is all there is to it, so that a corpus can put it into its fingerprint.
    """

    def __init__(self, *rules: tuple[str, str]) -> None:
        self.rules = rules
        self._compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def __call__(self, text: str) -> str:
        for pattern, replacement in self._compiled:
            text = pattern.sub(replacement, text)
        return text


# As GPT-2 and Megatron-LM read it.
wikitext = Detokenizer(
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

# One Billion Word, as SEDD and MDLM read it.
lm1b = Detokenizer(
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

# Penn Treebank, as GPT-2 read it.
ptb = Detokenizer(
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

# Straight quotation marks, and each passage on a line of its own.
lambada = Detokenizer(
    (r"[“”]", '"'),
    (r"\A\s+|\s+\Z", ""),
    (r"\A", "\n"),
)

# PubMed and arXiv, as MDLM read them.
scientific_papers = Detokenizer(*wikitext.rules, *lm1b.rules)
