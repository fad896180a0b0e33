"""`bd3lm data`: turn text into token shards for training."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, subcommand

from bd3lm.commands.shared.chats import (
    AnswersFlag,
    ChatTemplateFlag,
    check_template,
    say_cut,
    template_for,
)
from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    FieldFlag,
    MaxDocumentFlag,
    OptionalFolder,
    check_out_folder,
    named,
)
from bd3lm.commands.shared.skipped import say_skipped
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.data import Tokenizer, TokenShards


@dataclass(frozen=True)
class Prepare:
    """Tokenize text into shards for training. Parallel and resumable; writes the same bytes every time."""

    source: Positional[Annotated[str, named("SOURCE")]]
    """A file or folder (.txt .md .jsonl .parquet, also .gz .xz .zst), or a named corpus such as lm1b."""
    out: Positional[Annotated[Path, named("OUT")]]
    """Folder to write. The same command continues where it was stopped."""
    tokenizer: Annotated[
        str | None,
        named(
            "TOKENIZER",
            help="Tokenizer: a folder with tokenizer.json, a run, a GGUF file, box, a hub id, or bytes. "
            "Default: gpt2; for lm1b bert-base-uncased.",
        ),
    ] = None
    workers: int = 1
    """Number of processes that tokenize."""
    eos: bool = True
    """Put an end-of-text token after every document."""
    bos: bool = False
    """Put a beginning-of-text token before every document."""
    folder: OptionalFolder = None
    """Local copy of a named corpus."""
    field: FieldFlag = None
    text_unit: Annotated[
        Literal["file", "line", "paragraph"] | None,
        named(
            "{file,line,paragraph}",
            help="What counts as one document of a .txt file. Default: the whole file in a folder of .txt "
            "files; otherwise a paragraph, which ends at a blank line.",
        ),
    ] = None
    held_out: Annotated[
        int | float | None,
        named(
            "SHARE|INT",
            help="Documents to hold out, from the end: a share below 1, or a number (1 is one document). 0 "
            "holds out none. Default: 0.05 if there is no validation or test file. If given, all files "
            "are read as one text.",
        ),
    ] = None
    max_document: MaxDocumentFlag = None
    chat: Annotated[bool, FlagCreatePairsOff] = False
    """Read conversations (.jsonl, .parquet), and record which tokens belong to answers."""
    chat_template: ChatTemplateFlag = None
    answers: AnswersFlag = "all"

    def run(self) -> int:
        from bd3lm.data import load_corpus, prepare

        if self.chat:
            return self._run_chat()
        for flag, value in (("--chat-template", self.chat_template), ("--answers", self.answers)):
            if value not in (None, "all"):
                raise ValueError(f"{flag} needs --chat, got {value} without it")
        corpus = load_corpus(
            self.source,
            folder=self.folder,
            field=self.field,
            text_unit=self.text_unit,
            held_out=self.held_out,
            max_document=self.max_document,
        )
        say_skipped(corpus)
        shards = prepare(
            corpus,
            self._tokenizer(),
            self.out,
            workers=self.workers,
            eos_between_documents=self.eos,
            bos_before_documents=self.bos,
        )
        return self._say_counts(shards, "documents")

    def _run_chat(self) -> int:
        """Tokenize conversations; all are read and checked before the first is tokenized."""
        from bd3lm.data import ChatFormat, ConversationCorpus, prepare

        for flag, given in (
            ("--no-eos", not self.eos),
            ("--bos", self.bos),
            ("--folder", self.folder is not None),
            ("--field", self.field is not None),
            ("--text-unit", self.text_unit is not None),
        ):
            if given:
                raise ValueError(f"{flag} is for text, and --chat is given: give only one of them")
        check_template(self.chat_template)
        corpus = ConversationCorpus(self.source, held_out=self.held_out, max_document=self.max_document)
        say_skipped(corpus)
        say_cut([corpus])
        tokenizer = self._tokenizer()
        chat = ChatFormat(template=template_for(self.chat_template, tokenizer), answers=self.answers)
        return self._say_counts(
            prepare(corpus, tokenizer, self.out, workers=self.workers, chat=chat), "conversations"
        )

    def _say_counts(self, shards: "TokenShards", what: str) -> int:
        for name in shards.splits:
            split = shards.split(name)
            say(f"{name}: {split.documents:,} {what}, {split.tokens:,} tokens")
        held_out = sum(shards.split(name).documents for name in shards.splits if name != "train")
        say(f"held out: {held_out:,} {what}" if held_out else "held out: none")
        say(f"wrote {self.out}")
        return 0

    def _tokenizer(self) -> "Tokenizer":
        from bd3lm.interop import load_tokenizer

        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer)
        default = "bert-base-uncased" if self.source == "lm1b" else "gpt2"
        try:
            return load_tokenizer(default)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}. {default} is the default tokenizer here; name another with --tokenizer, such as "
                "bytes or a folder from `bd3lm data train-tokenizer`"
            ) from error


@dataclass(frozen=True)
class TrainTokenizer:
    """Train a byte-level BPE tokenizer on a corpus."""

    source: Positional[Annotated[str, named("SOURCE")]]
    """A file, a folder or a named corpus. Only its training split is read; a single document whole."""
    out: Positional[Annotated[Path, named("OUT")]]
    """Folder to write: new, empty, or holding only a tokenizer, which is replaced."""
    vocabulary: int = 8192
    """Number of tokens, special tokens included. A small text may give fewer."""
    folder: OptionalFolder = None
    """Local copy of a named corpus."""
    field: FieldFlag = None
    max_document: MaxDocumentFlag = None

    def run(self) -> int:
        from bd3lm.data import FileCorpus, load_corpus, train_bpe
        from bd3lm.data.tokenizers import CONFIG_FILE, SMALLEST_BPE, TOKENIZER_FILE

        if self.vocabulary < SMALLEST_BPE:
            raise ValueError(
                f"--vocabulary must be at least {SMALLEST_BPE} (256 bytes and two special tokens), "
                f"got {self.vocabulary}"
            )
        # With another tokenizer, existing shards and models would become useless.
        check_out_folder(self.out, may_hold=(TOKENIZER_FILE, CONFIG_FILE))
        options: dict[str, Any] = {
            "folder": self.folder,
            "field": self.field,
            "max_document": self.max_document,
        }
        corpus = load_corpus(self.source, **options)
        say_skipped(corpus)
        if isinstance(corpus, FileCorpus) and corpus.too_small_to_share:
            corpus = load_corpus(self.source, **options, held_out=0)
        tokenizer = train_bpe(corpus.documents("train"), self.vocabulary)
        tokenizer.save(self.out)
        fewer = ""
        if tokenizer.vocab_size < self.vocabulary:
            why = "no other pair of tokens occurs twice within words of the text"
            fewer = f" of the {self.vocabulary:,} requested, because {why}"
        say(f"wrote {self.out}: {tokenizer.vocab_size:,} tokens{fewer}")
        return 0


@dataclass(frozen=True)
class Verify:
    """Check a folder of token shards: report damaged or missing files, and exit with status 1 if any."""

    folder: Positional[Annotated[Path, named("FOLDER")]]
    """Folder that `bd3lm data prepare` wrote."""

    def run(self) -> int:
        from rich.box import SIMPLE
        from rich.table import Table
        from rich.text import Text

        from bd3lm.commands.shared.progress import tracked
        from bd3lm.data.verify import count_verdicts, verify
        from bd3lm.io.console import Console

        screen, notes = Console(), Console(stderr=True)
        total, said = count_verdicts(self.folder), f"reading {self.folder}"
        verdicts = list(tracked(verify(self.folder), said, total=total, console=notes))
        table = Table(box=SIMPLE, show_edge=False)
        for heading in ("split", "file"):
            table.add_column(heading, overflow="fold")
        for heading in ("documents", "tokens"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for each in verdicts:
            counts = ("" if count is None else f"{count:,}" for count in (each.documents, each.tokens))
            found = "whole" if each.problem is None else "not whole"
            table.add_row(Text(each.split or ""), Text(each.file), *counts, found)
        screen.print(table)
        wrong = [each.problem for each in verdicts if each.problem is not None]
        for problem in wrong:
            screen.print(Text(problem), soft_wrap=True)
        if wrong:
            raise ValueError(f"{self.folder} is damaged: {len(wrong)} of {len(verdicts)} checks failed")
        tokens = sum(each.tokens or 0 for each in verdicts)
        screen.print(Text(f"{self.folder} is complete: {tokens:,} tokens"), soft_wrap=True)
        return 0


Kinds = (
    Annotated[Prepare, subcommand("prepare", prefix_name=False)]
    | Annotated[Verify, subcommand("verify", prefix_name=False)]
    | Annotated[TrainTokenizer, subcommand("train-tokenizer", prefix_name=False)]
)


@dataclass(frozen=True)
class Data(Command):
    """Prepare text for training."""

    kind = "data"

    command: OmitArgPrefixes[Kinds]

    def run(self) -> int:
        return self.command.run()
