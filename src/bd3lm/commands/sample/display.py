"""How a terminal shows texts while they are written: a single text live, several as they finish."""

import time
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from rich.live import Live
from rich.text import Text

from bd3lm.commands.shared.writing import Display
from bd3lm.data import Tokenizer
from bd3lm.io.console import Console
from bd3lm.io.files import write_atomically
from bd3lm.io.terminal import printable
from bd3lm.lm import Generation
from bd3lm.reports import film_svg, record_film
from bd3lm.sampling import BlockStarted, Drafted, Event, Started, Stopped, TokenHidden, TokenRevealed

_MASK_SIGN = "░"
_FRAMES_PER_SECOND = 20
_SHOWN = 2000  # last tokens that are redrawn: more than fit on a screen


class Animation(Display):
    """Shows the end of a text live, with its drafts, and at last the whole text.

    If writing is stopped, it shows what there is.
    """

    watches = True

    def __init__(self, console: Console, tokenizer: Tokenizer, mask_id: int, *, shown_from: int = 0) -> None:
        self.console, self.tokenizer, self.mask_id = console, tokenizer, mask_id
        self.shown_from = shown_from  # tokens before it are not redrawn
        self.live = Live(console=console, refresh_per_second=_FRAMES_PER_SECOND, transient=True)
        self.tokens: list[int] = []
        self.drafts: dict[int, int] = {}  # by position
        self.drawn = float("-inf")
        self.finished: Generation | None = None

    def __enter__(self) -> "Animation":
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()
        if self.finished is not None:
            print_text(self.console, self.finished, many=False)
            return
        while self.tokens and self.tokens[-1] == self.mask_id:
            self.tokens.pop()
        if self.tokens:  # stopped by Ctrl-C or an error
            self.console.print(self._shown(self.shown_from, {}), soft_wrap=True)

    def event(self, event: Event) -> None:
        match event:
            case Started(request=request):
                self.tokens, self.drafts = request.given.tolist(), {}
            case BlockStarted(stop=stop):
                self.tokens += [self.mask_id] * (stop - len(self.tokens))
            case TokenRevealed(position=position, token=token):
                self.tokens[position] = token
                self.drafts.pop(position, None)
            case Drafted(positions=positions, tokens=tokens):
                self.drafts = dict(zip(positions, tokens, strict=True))
            case Stopped():
                self.drafts = {}
            case TokenHidden(position=position):
                self.tokens[position] = self.mask_id
        if time.perf_counter() - self.drawn > 1 / _FRAMES_PER_SECOND:
            self.drawn = time.perf_counter()
            self.live.update(self._tail())

    def text(self, text: Generation) -> None:
        self.finished = text

    def _tail(self) -> Text:
        """The last lines, as many as fit on the terminal."""
        first = max(len(self.tokens) - _SHOWN, self.shown_from)
        drafts = {place: token for place, token in self.drafts.items() if place >= first}
        lines = self._shown(first, drafts).wrap(self.console, self.console.width)
        return Text("\n").join(lines[-max(self.console.height - 2, 1) :])

    def _shown(self, first: int, drafts: Mapping[int, int]) -> Text:
        """The text from a position on, with drafts inside and ahead of it."""
        seen = {**dict(enumerate(self.tokens[first:], first)), **drafts}

        def kind(place: int) -> str:
            return "draft" if place in drafts else "mask" if seen[place] == self.mask_id else "text"

        shown, before = Text(), list[int]()
        for which, run in groupby(sorted(seen), kind):
            tokens = [seen[place] for place in run]  # decoded together: a character may be several tokens
            if which == "mask":
                shown.append(_MASK_SIGN * len(tokens), style="dim")
            elif which == "text":
                shown.append(printable(self.tokenizer.decode(tokens)))
            else:
                shown.append(printable(self._ahead(before, tokens)), style="dim italic")
            before = tokens if which == "text" else []
        return shown

    def _ahead(self, text: list[int], drafts: list[int]) -> str:
        """Drafts decoded after the text; alone they may lack a space or part of a character."""
        alone, together = (self.tokenizer.decode(tokens) for tokens in (text, text + drafts))
        pairs = enumerate(zip(alone, together, strict=False))
        return together[next((at for at, (one, other) in pairs if one != other), len(alone)) :]


class Printer(Display):
    """Prints finished texts in the order of the prompts, so the output does not depend on timing.

    If writing is interrupted, texts that wait for an earlier one are printed at the end.
    """

    def __init__(self, console: Console, texts: int) -> None:
        self.console, self.many = console, texts > 1
        self.waiting: dict[int, Generation] = {}
        self.next = 0

    def __exit__(self, *_: object) -> None:
        for index in sorted(self.waiting):
            print_text(self.console, self.waiting.pop(index), many=self.many)

    def text(self, text: Generation) -> None:
        self.waiting[text.sample.index] = text
        while self.next in self.waiting:
            self.next += 1
            print_text(self.console, self.waiting.pop(self.next - 1), many=self.many)


class Film(Display):
    """Records how a single text is written, for an animated SVG."""

    watches = True

    def __init__(self, file: Path) -> None:
        self.file = file
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def write(self, tokenizer: Tokenizer, mask_id: int) -> None:
        if not self.events:
            raise ValueError(
                f"--film {self.file} cannot be drawn: an earlier command, which was stopped, has already "
                "written the text to --out; write it again to another --out"
            )
        write_atomically(
            self.file, film_svg(record_film(self.events, tokenizer.decode, mask_id=mask_id)).encode()
        )


def print_text(console: Console, generation: Generation, *, many: bool) -> None:
    """Print a text: unchanged into a file or a pipe; on a terminal wrapped at words, without control
    characters."""
    text, written = generation.text or "", generation.completion or ""
    sample = generation.sample
    if many:
        title = f"text {sample.index}: {len(sample.tokens)} tokens, stopped by {sample.stopped_by}"
        console.rule(Text(title, style="bold"), align="left")
    if not console.is_terminal:
        console.file.write(text + "\n")
        return
    given = text[: len(text) - len(written)]
    console.print(Text.assemble((printable(given), "dim"), printable(written)))
