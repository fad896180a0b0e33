"""What of a folder of text is not read is said before the work on the rest."""

import sys
from typing import TYPE_CHECKING

from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.data import Corpus


def say_skipped(corpus: "Corpus") -> None:
    """A line on standard error, where anything is passed over."""
    if corpus.skipped is not None:
        say(corpus.skipped, to=sys.stderr)
