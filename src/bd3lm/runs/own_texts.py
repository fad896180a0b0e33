"""Texts that a checkpoint writes for its own training, from prompts, each with its own seed.

The file holds lines of JSON with the token ids as they were written. Its first line names the weights, the
prompts, the number of texts and the settings. After an interruption, only missing texts are written. Each
text depends only on its own prompt and seed, so the finished file is always the same, byte for byte.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

from bd3lm.data import Corpus
from bd3lm.data.chat import user_message
from bd3lm.data.corpus import digest
from bd3lm.diffusion import derive_seed
from bd3lm.io.files import make_folder, only_writer, replacing
from bd3lm.lm import Generation, LanguageModel, Settings
from bd3lm.sampling import Event, Stopped

HELD_OUT_SHARE = 0.05
_FORMAT = "bd3lm-own-texts"
_INSTRUCTIONS, _BEGINNINGS = "instructions.txt", "beginnings.txt"


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How many texts to write, and how."""

    texts: int
    length: int
    """Most tokens of a text, its prompt included."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 64
    """Texts written in parallel; it changes none of them."""

    def __post_init__(self) -> None:
        if self.texts < 2:
            raise ValueError(f"texts must be at least 2, since one is held out, got {self.texts}")

    @property
    def settings(self) -> Settings:
        return Settings(
            length=self.length,
            temperature=self.temperature,
            top_p=self.top_p,
            batch_size=self.batch_size,
        )


def builtin_prompts(*, chat: bool) -> list[str]:
    """Prompts that come with this package: questions to an assistant, or beginnings of texts."""
    file = files("bd3lm.runs").joinpath("prompts", _INSTRUCTIONS if chat else _BEGINNINGS)
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line]


class OwnTexts(Corpus):
    """The texts in a complete file; the last ones are held out."""

    name = "own texts"
    splits = ("train", "valid")
    holds_ids = True

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._head = _head(file.readline(), path)

    @property
    def fingerprint(self) -> str:
        return digest(self._head)

    @property
    def description(self) -> str:
        return (
            f"{self._head['texts']:,} texts by the model {self._head['weights'][:12]} (temperature "
            f"{self._head['temperature']:g}, top_p {self._head['top_p']:g})"
        )

    def documents(self, split: str) -> Iterator[str]:
        self.check_split(split)
        first = self._head["texts"] - self._held_out
        with self.path.open("rb") as file:
            next(file)
            for number, line in enumerate(file):
                if (number >= first) == (split == "valid"):
                    yield json.dumps(_text(line, self.path)["tokens"])

    def count(self, split: str) -> int:
        return self._held_out if split == "valid" else self._head["texts"] - self._held_out

    @property
    def _held_out(self) -> int:
        return max(1, round(HELD_OUT_SHARE * self._head["texts"]))


class Author:
    """Writes the missing texts of a file."""

    def __init__(
        self,
        model: LanguageModel,
        weights: str,
        writing: Writing,
        path: Path,
        *,
        prompts: Sequence[str] | None = None,
    ) -> None:
        self.model, self.writing, self.path = model, writing, path
        self._template = None if model.tokenizer is None else model.tokenizer.chat_template
        prompts = prompts or builtin_prompts(chat=self._template is not None)
        self._partial = path.with_name(path.name + ".partial")
        self._texts = [prompts[index % len(prompts)] for index in range(writing.texts)]
        self._prompts = self._as_model_takes(self._texts)
        said = {name: value for name, value in asdict(writing).items() if name != "batch_size"}
        self._head: dict[str, Any] = {
            "format": _FORMAT,
            "weights": weights,
            "law": model.law,
            "dtype": str(model.network.dtype).removeprefix("torch."),
            "prompts": digest([list(prompts), self._prompts[: len(prompts)]]),
            **said,
        }

    def _as_model_takes(self, texts: Sequence[str]) -> list[Any]:
        """Each prompt as the single message of a conversation, if the model has a chat template."""
        tokenizer, template = self.model.tokenizer, self._template
        if tokenizer is None or template is None:
            return list(texts)
        found = {text: user_message(template, text.strip(), tokenizer) for text in dict.fromkeys(texts)}
        return [found[text] for text in texts]

    @cached_property
    def left(self) -> list[int]:
        """The texts that are not written yet."""
        if self.path.is_file():
            with self.path.open("rb") as file:
                self._require_same(_head(file.readline(), self.path), self.path)
            return []
        written: set[int] = set()
        if self._partial.is_file():
            with self._partial.open("rb") as file:
                first = file.readline()
                written = {_text(line, self._partial)["index"] for line in file if line.endswith(b"\n")}
            if written:
                self._require_same(_head(first, self._partial), self._partial)
        return [index for index in range(self.writing.texts) if index not in written]

    def write(self) -> Iterator[None]:
        """Write the missing texts, yielding after each; at the end the file has its final name."""
        if self.path.is_file():
            return
        events = self._events()  # refuses prompts that are too long, before anything is written
        make_folder(self.path.parent)
        with self._partial.open("a+b") as file, only_writer(self._partial):
            self._mend(file)
            for event in events:
                if isinstance(event, Stopped):
                    index = self.left[event.sample.index]
                    file.write(_line(self._record(index, self.model.generation(event.sample))))
                    file.flush()
                    yield
            self._finish(file)

    def _mend(self, file: BinaryIO) -> None:
        """Drop a torn last line, and start a file that holds no text."""
        file.seek(0)
        whole = [len(line) for line in file if line.endswith(b"\n")]
        file.truncate(sum(whole) if len(whole) > 1 else 0)
        if len(whole) < 2:
            file.write(_line(self._head))

    def _events(self) -> Iterator[Event]:
        if not self.left:
            return iter(())
        seeds = [derive_seed(self.writing.seed, "text", index) for index in self.left]
        prompts = [self._prompts[index] for index in self.left]
        return self.model.stream(prompts, self.writing.settings, seeds=seeds, watch=False)

    def _record(self, index: int, text: Generation) -> dict[str, Any]:
        return {
            "index": index,
            "prompt": self._texts[index],
            "seed": text.sample.seed,
            "stopped_by": text.stopped_by,
            "tokens": text.tokens,
            "text": text.completion,
        }

    def _finish(self, file: BinaryIO) -> None:
        """Sort the texts, which came in any order, and give the file its name."""
        file.seek(0)
        places: dict[int, int] = {}
        place = len(file.readline())
        for line in file:
            places[_text(line, self._partial)["index"]] = place
            place += len(line)
        with replacing(self.path) as temporary, temporary.open("wb") as whole:
            whole.write(_line(self._head))
            for index in range(self.writing.texts):
                file.seek(places[index])
                whole.write(file.readline())
        os.unlink(self._partial)

    def _require_same(self, head: dict[str, Any], path: Path) -> None:
        changed = [name for name, value in self._head.items() if head.get(name) != value]
        if changed:
            differences = "; ".join(
                f"{name} {head.get(name)!r:.20}, not {self._head[name]!r:.20}" for name in changed
            )
            raise ValueError(f"{path} holds texts with other settings ({differences}): use another --out")


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _head(line: bytes, path: Path) -> dict[str, Any]:
    head = _values(line)
    if head.get("format") != _FORMAT:
        raise ValueError(f"{path} must begin with a line of format {_FORMAT}, got {line[:80]!r}")
    return head


def _text(line: bytes, path: Path) -> dict[str, Any]:
    text = _values(line)
    if not isinstance(text.get("index"), int) or not isinstance(text.get("tokens"), list):
        raise ValueError(f"{path} must hold one text per line, with its index and tokens, got {line[:80]!r}")
    return text


def _values(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
