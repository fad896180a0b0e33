"""The chat session, at a terminal or from a pipe: answers messages and runs /commands."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from rich.text import Text

from bd3lm.commands.chat.answers import Answerer
from bd3lm.commands.chat.conversation import Conversation, check_template, check_text
from bd3lm.commands.chat.display import Piped, Show, Typed, Watched
from bd3lm.commands.chat.lines import PASTE_END, Lines, read_first, read_pasted, read_rest
from bd3lm.commands.shared.command import unwrapped
from bd3lm.commands.shared.writing import summary
from bd3lm.io.console import Console
from bd3lm.io.signals import Terminated, forget_stops
from bd3lm.io.terminal import one_entry
from bd3lm.parsing import did_you_mean

if TYPE_CHECKING:
    from bd3lm.commands.sample import Sample

SETTINGS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_p_rule",
    "top_k",
    "seed",
    "law",
    "lean",
    "steps",
    "tokens_per_pass",
    "confidence",
    "entropy_bound",
    "unmasking",
    "speculation",
    "scheme",
    "candidates",
)
"""The settings that /set changes, named like the flags of `bd3lm sample`."""

_OTHER_NAMES = {"speculate": "speculation", "max_tokens": "max_new_tokens"}
_UNSAID = ("default", "none")
_NUMBERS = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}


class Session:
    """A conversation with a model, until the input ends."""

    def __init__(
        self,
        answerer: Answerer,
        talk: Conversation,
        lines: Lines,
        *,
        name: str,
        console: Console,
        notes: Console,
        drafts: bool = False,
    ) -> None:
        self.answerer, self.talk, self.lines, self.name = answerer, talk, lines, name
        self.console, self.notes = console, notes
        self._set_drafts(drafts)
        self._dropped = 0
        self._attempt = 0
        self._ended = False
        self._commands: Mapping[str, tuple[str, str, Callable[[str], None]]] = {
            "help": ("", "show this", self._help),
            "new": ("", "forget the conversation", self._new),
            "undo": ("", "forget the last message and its answer", self._undo),
            "again": ("", "answer the last message again, with the next seed", self._again),
            "system": (
                "[TEXT]",
                "set the system message; without TEXT, remove it",
                self._system,
            ),
            "set": ("NAME VALUE", "change a setting; the value default resets it", self._set),
            "show": ("", "show the settings and how much of the context is used", self._show),
            "drafts": ("on|off", "show drafts while an answer is written", self._drafts),
            "paste": ("", f"type a message of many lines; {PASTE_END} on a line ends it", self._paste),
            "save": ("FILE", "write the conversation to a new file, as a line of JSON", self._save),
            "load": ("FILE", "continue a conversation from such a file", self._load),
            "quit": ("", "quit; so does Ctrl-D", self._quit),
        }

    # --- the loop ---

    def run(self) -> None:
        """Run until /quit, the end of input, or Ctrl-C twice."""
        if self.lines.is_live:
            context = f"context {self.talk.context:,} tokens"
            self._note(f"{self.name} · {context} · /help shows the commands, Ctrl-D ends")
        was_stopped = False
        while not self._ended:
            try:
                first = read_first(self.lines)
                was_stopped = False
                self._take(read_rest(first, self.lines))
            except EOFError:
                if self.lines.is_live:
                    self.console.print()  # after the prompt
                break
            except KeyboardInterrupt as stop:
                if isinstance(stop, Terminated) or not self.lines.is_live:
                    raise
                forget_stops()
                self.console.print()
                if was_stopped:
                    break
                was_stopped = True
                self._note("Ctrl-C again, Ctrl-D or /quit quits")
            except (ValueError, OSError) as error:
                # A person can correct a mistake; a script must not continue as if the line had worked.
                if not self.lines.is_live or isinstance(error, BrokenPipeError):
                    raise
                self._note(one_entry(str(error)), style="red")
        if self.answerer.done:
            self._note(summary(self.answerer.done, self.answerer.seconds))

    def _take(self, said: str) -> None:
        """Handle a message or a command; two slashes begin a message with one slash."""
        if said.startswith("//"):
            self._answer(said[1:])
        elif said.startswith("/"):
            self._do(said)
        elif said.strip():
            self._answer(said)

    def _do(self, said: str) -> None:
        name, _, rest = said[1:].partition(" ")
        if name not in self._commands:
            known = ", ".join(f"/{each}" for each in self._commands)
            guess = did_you_mean(name, self._commands).replace("'", "")
            raise ValueError(
                f"there is no command /{name:.40}{guess or ','} there are {known}; // begins a message"
            )
        takes, _, work = self._commands[name]
        rest = rest.strip()
        if rest and not takes:
            raise ValueError(f"/{name} takes nothing after it, got {rest!r:.80}")
        if not rest and takes and not takes.startswith("["):
            raise ValueError(f"/{name} must be followed by {takes}")
        work(rest)

    # --- answers ---

    def _answer(self, message: str, *, attempt: int = 0) -> None:
        """Answer a message; the conversation then includes both, unless there is no answer."""
        answerer = self.answerer
        window = self.talk.window(message, answerer.choices.max_new_tokens)
        if window.dropped > self._dropped:
            number = (
                "the oldest exchange" if window.dropped == 1 else f"the {window.dropped} oldest exchanges"
            )
            self._note(
                f"{number} no longer fit{'s' * (window.dropped == 1)} in the context of "
                f"{self.talk.context:,} tokens, and the model does not see "
                f"{'it' if window.dropped == 1 else 'them'}"
            )
        self._dropped = window.dropped
        answer = answerer.answer(
            window.tokens,
            seed=answerer.choices.seed + attempt,
            show=self._new_show(len(window.tokens)),
            may_stop=self.lines.is_live,
        )
        if answer.generation is None and not answer.text:
            self._note("stopped before there was an answer; the message is removed")
            return
        self._attempt = attempt
        self.talk.exchanges.append((message, answer.text))
        if answer.generation is None:
            self._note("stopped; the partial answer is kept")
        elif answer.generation.stopped_by == "length":
            full = len(answer.generation.tokens) >= self.talk.context
            why = "the context is full" if full else "max_new_tokens"
            self._note(f"the answer is cut off at {answer.generation.sample.written:,} tokens: {why}")
        if self.lines.is_live:
            self.console.print()

    def _new_show(self, given: int) -> Show:
        if not self.console.is_terminal:
            return Piped(self.console)
        if self.is_drafting:
            mask = self.answerer.model.config.mask_id
            return Watched(self.console, self.talk.tokenizer, mask, given=given)
        return Typed(self.console)

    def _note(self, line: str, style: str = "dim") -> None:
        self.notes.print(Text(line, style=style), soft_wrap=not self.notes.is_terminal)

    # --- commands ---

    def _help(self, _: str) -> None:
        for name, (takes, what, _work) in self._commands.items():
            self._note(f"  {f'/{name} {takes}':<18} {what}")
        self._note(f"  settings: {', '.join(SETTINGS)}")
        self._note("  A line that ends in a backslash continues on the next line. Ctrl-C stops an answer.")

    def _new(self, _: str) -> None:
        self.talk.exchanges.clear()
        self._dropped = 0
        self._note("a new conversation")

    def _undo(self, _: str) -> None:
        message = self._last()[0]
        self.talk.exchanges.pop()
        self._attempt = 0
        self._note(f"removed: {message!r:.60}")

    def _again(self, _: str) -> None:
        exchange = self._last()
        number = len(self.talk.exchanges)
        self.talk.exchanges.pop()
        try:
            self._answer(exchange[0], attempt=self._attempt + 1)
        finally:
            if len(self.talk.exchanges) < number:  # no new answer came
                self.talk.exchanges.append(exchange)

    def _last(self) -> tuple[str, str]:
        if not self.talk.exchanges:
            raise ValueError("there is no answer yet")
        return self.talk.exchanges[-1]

    def _system(self, text: str) -> None:
        system = text or None
        if system is not None:
            check_text(system, "the system message", self.talk.most_characters)
        check_template(self.talk.template, system, self.talk.tokenizer)
        self.talk.system = system
        self._note("no system message" if system is None else "the system message applies from now on")

    def _set(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        name = name.removeprefix("--").replace("-", "_")
        name = _OTHER_NAMES.get(name, name)
        if name not in SETTINGS:
            raise ValueError(
                f"/set must name one of {', '.join(SETTINGS)}, got {name!r:.40}{did_you_mean(name, SETTINGS)}"
            )
        if not text.strip():
            raise ValueError(f"/set {name} must be followed by a value, or by default")
        choices = self.answerer.choices
        changed = replace(choices, **{name: setting_value(type(choices), name, text.strip())})
        self.answerer.choose(changed)
        self._note(f"{name} is {_shown(getattr(changed, name))}")

    def _show(self, _: str) -> None:
        choices, talk = self.answerer.choices, self.talk
        for name in SETTINGS:
            self._note(f"  {name:<16} {_shown(getattr(choices, name))}")
        self._note(f"  {'drafts':<16} {'on' if self.is_drafting else 'off'}")
        if talk.system is not None:
            self._note(f"  {'system':<16} {talk.system!r:.100}")
        tokens = len(talk.window("", choices.max_new_tokens).tokens)
        number = len(talk.exchanges)
        self._note(
            f"  {number} exchange{'s' * (number != 1)}; the conversation uses {tokens:,} of {talk.context:,} "
            "tokens of the context"
        )
        if self.answerer.done:
            self._note(f"  {summary(self.answerer.done, self.answerer.seconds)}")

    def _drafts(self, asked: str) -> None:
        if asked not in ("on", "off"):
            raise ValueError(f"/drafts must be on or off, got {asked!r:.40}")
        self._set_drafts(asked == "on")
        self._note(f"drafts are {asked}")

    def _set_drafts(self, on: bool) -> None:
        if on and not self.console.is_terminal:
            raise ValueError("drafts need a terminal, and standard output is not one")
        self.is_drafting = on

    def _paste(self, _: str) -> None:
        pasted = read_pasted(self.lines)
        if pasted.strip():
            self._answer(pasted)

    def _save(self, file: str) -> None:
        self._last()
        self._note(f"wrote {self.talk.save(file)}")

    def _load(self, file: str) -> None:
        self.talk.load(file)
        self._dropped = self._attempt = 0
        number = len(self.talk.exchanges)
        self._note(f"{number} exchange{'s' * (number != 1)} read from {file}")

    def _quit(self, _: str) -> None:
        self._ended = True


def setting_value(command: type["Sample"], name: str, text: str) -> Any:
    """The value of a setting, parsed like the flag of that name."""
    (flag,) = [each for each in fields(command) if each.name == name]
    if text in _UNSAID:
        return flag.default
    hint, _ = unwrapped(get_type_hints(command, include_extras=True)[name])
    if name == "unmasking":
        return tuple(text.split())
    try:
        return TypeAdapter(hint).validate_python(text)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        allowed = _NUMBERS.get(first["type"]) or first["ctx"].get("expected", "another value")
        raise ValueError(f"{name} must be {allowed}, got {text!r:.80}") from None


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "default"
    return "default" if value is None else str(value)
