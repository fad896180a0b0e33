"""The inputs of `bd3lm sample`: prompts from a file, and templates with gaps."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from bd3lm.io.files import local_path
from bd3lm.io.reading import ENCODING, MAX_DOCUMENT, DocumentTooLong, numbered_lines
from bd3lm.parsing import template_parts

if TYPE_CHECKING:  # prompts are read before torch is loaded, and these imports load it
    from bd3lm.lm import Gap

STANDARD_INPUT = "-"
MAX_PROMPTS, MAX_CHARACTERS = 1_000_000, 100_000_000
"""The most lines and the most characters in total, since prompts are kept in memory. A line is a document."""
_JSON_LINES = ".jsonl"

Template: TypeAlias = "Sequence[str | Gap]"


def read_prompts(source: str, flag: str = "--prompts-from") -> list[str]:
    """Read prompts from a file, or from standard input if it is -: one per line, or JSON lines.

    Blank lines are skipped. A file named .jsonl holds JSON objects with a field `prompt`. Standard input has
    no name: it is read as JSON lines if its first line is such an object. Endless input is refused.
    """
    where = "standard input" if source == STANDARD_INPUT else source
    try:
        with _opened(source) as text:
            lines = list(_lines(text, where, flag))
    except OSError as error:
        raise ValueError(f"{flag} {source} could not be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} must be UTF-8 text, and {where} is not: {error}") from None
    if not lines:
        raise ValueError(f"{flag} must hold at least one prompt, and {where} is empty")
    is_json = source.endswith(_JSON_LINES) or (
        source == STANDARD_INPUT and _prompt_field(lines[0][1]) is not None
    )
    if not is_json:
        return [line for _, line in lines]
    prompts = []
    for number, line in lines:
        prompt = _prompt_field(line)
        if prompt is None:
            raise ValueError(
                f"{where} line {number} must be a JSON object with a text in its field prompt, got {line:.80}"
            )
        prompts.append(prompt)
    return prompts


@contextmanager
def _opened(source: str) -> Iterator[IO[str]]:
    """Text whose lines end only at line feeds: a prompt may contain other line ends, such as U+2028."""
    if source != STANDARD_INPUT:
        with local_path(source).open(encoding=ENCODING, newline="\n") as text:
            yield text
        return
    text = TextIOWrapper(sys.stdin.buffer, encoding=ENCODING, newline="\n")
    try:
        yield text
    finally:
        text.detach()  # closing it would close standard input


def _lines(text: IO[str], where: str, flag: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers, up to the maximum."""
    size = 0
    try:
        for number, line in numbered_lines(text, where, MAX_DOCUMENT):
            line = line.removesuffix("\n").removesuffix("\r")
            size += len(line)
            if number > MAX_PROMPTS or size > MAX_CHARACTERS:
                raise ValueError(
                    f"{flag} must have at most {MAX_PROMPTS:,} lines, with {MAX_CHARACTERS:,} characters in "
                    f"total, and {where} has more at line {number:,}"
                )
            if line.strip():
                yield number, line
    except DocumentTooLong as error:
        raise ValueError(
            f"{flag} must have prompts of at most {MAX_DOCUMENT:,} characters, and {error.where}, is longer"
        ) from None


def _prompt_field(line: str) -> str | None:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = value.get("prompt") if isinstance(value, dict) else None
    return prompt if isinstance(prompt, str) else None


def parse_template(template: str) -> "list[str | Gap]":
    """Split "The {3} sat." into parts. {3} is a gap of 3 tokens; {{ and }} are braces."""
    from bd3lm.lm import Gap

    return [Gap(part) if isinstance(part, int) else part for part in template_parts(template, "--template")]


def template_text(template: Template) -> str:
    """The text from which `parse_template` makes this template."""
    return "".join(
        part.replace("{", "{{").replace("}", "}}") if isinstance(part, str) else f"{{{part.tokens}}}"
        for part in template
    )
