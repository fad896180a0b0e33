"""Reports files in a folder of text that are not read, before work on the rest begins."""

import sys
from typing import TYPE_CHECKING

from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.data import Corpus


def say_skipped(corpus: "Corpus") -> None:
    """Print a line on standard error if anything is skipped."""
    if corpus.skipped is not None:
        say(corpus.skipped, to=sys.stderr)
