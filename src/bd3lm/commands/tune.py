"""`bd3lm tune`: fine-tune a model on conversations, with the loss of its own method."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional

from bd3lm.commands.shared.chats import (
    AnswersFlag,
    ChatTemplateFlag,
    check_template,
    say_cut,
    template_for,
)
from bd3lm.commands.shared.command import flags_of
from bd3lm.commands.shared.flags import (
    DeviceFlag,
    MaxDocumentFlag,
    OptionalFloat,
    OptionalFolder,
    OptionalInt,
    named,
)
from bd3lm.commands.shared.recipes import RecipeCommand
from bd3lm.commands.shared.starting import (
    check_overrides,
    go_on,
    own_tokenizer,
    show_with_memory,
    train,
)
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.data import ConversationCorpus, TokenShards
    from bd3lm.methods import LanguageModelConfig
    from bd3lm.runs.recipe import Recipe
    from bd3lm.runs.tuning import Reading

_MODEL = "MODEL comes first, then the files: bd3lm tune MODEL chats.jsonl --out RUN"
_OF_FILES = ("chat_template", "answers", "held_out", "max_document", "only_text")


@dataclass(frozen=True)
class Tune(RecipeCommand):
    """Fine-tune a model on the answers in conversations.

    Autoregressive, joint and block models are trained with their own loss: all weights or, with --rank,
    low-rank additions to them. Of a drafter only the drafting part is trained. The chat template is saved
    with the model. Set any field of the recipe with `--any.field value`.
    """

    kind = "tune"

    model: Positional[Annotated[str | None, named("[MODEL]")]] = None
    """The model to fine-tune: a run, model folder or hub id."""
    files: Positional[Annotated[tuple[str, ...], named("[FILE ...]")]] = ()
    """Conversations: .jsonl (also .gz .xz .zst) or .parquet files, or folders of them."""
    data: OptionalFolder = None
    """Train on what `bd3lm data prepare --chat` wrote with the model's tokenizer, in place of FILE."""
    out: OptionalFolder = None
    """Folder of the run. Default: runs/tune."""
    steps: OptionalInt = None
    """Training steps. Default: as many as --epochs needs."""
    epochs: OptionalFloat = None
    """How often each conversation is read. Default: 3."""
    rank: OptionalInt = None
    """Train low-rank additions of this rank instead of the weights themselves."""
    chat_template: ChatTemplateFlag = None
    answers: AnswersFlag = "all"
    held_out: Annotated[
        int | float | None,
        named(
            "SHARE|INT",
            help="Conversations to hold out, from the end: a share below 1, or a number. 0 holds out none. "
            "Default: 0.05, unless the file names say which split they are.",
        ),
    ] = None
    skip_long: Annotated[bool, FlagCreatePairsOff] = False
    """Leave out conversations longer than the model's context, and say how many."""
    max_document: MaxDocumentFlag = None
    only_text: Annotated[bool, FlagCreatePairsOff] = False
    """Tokenize the conversations, then stop. Pass OUT/data to --data later, under torchrun too."""
    resume: bool = False
    """Continue the run in --out, with its own recipe or with the same command."""
    device: DeviceFlag = None
    show: bool = False
    """Print the recipe and the memory that it needs, then stop."""

    def run(self) -> int:
        from bd3lm.commands.shared.models import check_models, one_model

        check_models([] if self.model is None else [self.model], device=self.device)
        if self.model is None:
            return go_on(self, hint=_MODEL)
        self._check()
        corpora = self._corpora()
        say_cut(corpora)  # reads all conversations, so mistakes in them appear before torch is loaded

        from bd3lm import interop
        from bd3lm.runs.tuning import Reading

        source = str(one_model(self.model))
        config = interop.config_of(interop.resolve(source))
        reading = Reading.of(config)
        self._stages(config, source, reading.context(0), steps=1, reads=False)
        with self._prepared(source, corpora, reading) as shards:
            if self.only_text:
                return 0
            stages = self._stages_for(config, source, reading, shards)
            if self.show:
                show_with_memory(stages, source)
                return 0
        return train(stages, self._folder, resume=self.resume, device=self.device)

    @property
    def _folder(self) -> Path:
        return self.out or Path("runs") / "tune"

    # --- the request ---

    def _check(self) -> None:
        """Refuse what is wrong before torch is loaded."""
        from bd3lm.runs.folders import check_not_begun
        from bd3lm.runs.merging import ONLY
        from bd3lm.runs.outline import check_outline
        from bd3lm.runs.presets import Stage
        from bd3lm.runs.tuning import outline

        if self.steps is not None and self.epochs is not None:
            raise ValueError("--steps and --epochs both set the length of training: give only one of them")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"--steps must be at least 1, got {self.steps}")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"--rank must be at least 1, got {self.rank}")
        if self.epochs is not None and not 0.0 < self.epochs <= 10_000:
            raise ValueError(f"--epochs must be above 0 and at most 10,000, got {self.epochs:g}")
        if self.data is not None:
            self._check_data(self.data)
        elif not self.files:
            raise ValueError(
                f"there are no conversations to train on: give files, or --data FOLDER; {_MODEL}"
            )
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "files are tokenized by one process: first run `bd3lm tune ... --only-text`, then train "
                "under torchrun with --data OUT/data"
            )
        check_template(self.chat_template)
        if not self.resume and not self.show:
            check_not_begun(self._folder)
        check_outline([Stage(ONLY, outline())], self.overrides, where="tune", reads_data=False)

    def _check_data(self, data: Path) -> None:
        if self.files:
            raise ValueError(
                "--data is conversations that are already tokenized, and files are given too: give only one "
                f"of them, got {self.files[0]}"
            )
        for flag in flags_of(type(self)):
            if flag.field in _OF_FILES and getattr(self, flag.field) != flag.default:
                raise ValueError(f"{flag.name} needs files of conversations, got --data {data}")
        if not data.expanduser().is_dir():
            raise ValueError(
                f"--data must be a folder that `bd3lm data prepare --chat` wrote, and {data} does not exist"
            )

    def _corpora(self) -> "list[ConversationCorpus]":
        from bd3lm.commands.shared.skipped import say_skipped
        from bd3lm.data import ConversationCorpus

        def corpus(file: str, held_out: float | None) -> ConversationCorpus:
            return ConversationCorpus(file, held_out=held_out, max_document=self.max_document)

        found = [corpus(file, self.held_out) for file in self.files]
        if self.held_out is None:
            found = [
                corpus(file, 0) if each.too_small_to_share else each
                for file, each in zip(self.files, found, strict=True)
            ]
        for each in found:
            say_skipped(each)
        return found

    def _stages(
        self, config: "LanguageModelConfig", source: str, context: int, *, steps: int, reads: bool
    ) -> "list[tuple[str, Recipe]]":
        """The recipe, checked against the model that it starts from."""
        from bd3lm.runs.merging import ONLY
        from bd3lm.runs.plan import check_start
        from bd3lm.runs.recipe import parse_overrides
        from bd3lm.runs.stages import resolve_recipes
        from bd3lm.runs.tuning import tuning_recipe

        overrides = parse_overrides(self.overrides)
        check_overrides(overrides, hint=_MODEL, text="files of conversations")
        data = str(self.data or self._folder / "data")
        recipe = tuning_recipe(
            config,
            source,
            data=data,
            context=context,
            steps=steps,
            rank=self.rank,
            skip_long=self.skip_long,
        )
        stages = resolve_recipes({ONLY: recipe}, overrides, where="tune")
        for _, each in stages:
            check_start(each, source, reads=reads)
        return stages

    def _stages_for(
        self, config: "LanguageModelConfig", source: str, reading: "Reading", shards: "TokenShards"
    ) -> "list[tuple[str, Recipe]]":
        """The recipe for these conversations: their context, and the steps for --epochs."""
        from bd3lm.runs.texts import sequences_of
        from bd3lm.runs.tuning import EPOCHS, steps_of

        longest = max(int(shards.lengths(name).max()) for name in shards.splits)
        context = reading.context(longest)
        stages = self._stages(config, source, context, steps=self.steps or 1, reads=not self.show)
        (_, recipe), *_ = stages
        sequences = len(sequences_of(recipe.data, shards, "train", recipe.method))
        if self.steps is not None:
            return stages
        epochs = EPOCHS if self.epochs is None else self.epochs
        steps = steps_of(epochs, sequences, recipe.train.global_batch)
        if os.environ.get("RANK", "0") == "0":
            say(f"{sequences:,} sequences of {context:,} tokens, read {epochs:g} times: {steps:,} steps")
        return self._stages(config, source, context, steps=steps, reads=not self.show)

    # --- the conversations ---

    @contextmanager
    def _prepared(
        self, source: str, corpora: "Sequence[ConversationCorpus]", reading: "Reading"
    ) -> "Iterator[TokenShards]":
        """The conversations as tokens: in OUT/data or, with --show, in a temporary folder."""
        from bd3lm.data import ChatFormat, JoinedCorpus, TokenShards, prepare
        from bd3lm.interop import config_of

        if self.data is not None:
            shards = TokenShards(self.data)
            if shards.meta.inputs.chat is None:
                raise ValueError(
                    f"--data must hold conversations, and {self.data} holds text: to train on text use "
                    f"`bd3lm train --from {source} --data.path {self.data}`"
                )
            yield shards
            return
        tokenizer = own_tokenizer(source, needed_by="conversations are prepared with")
        chat = ChatFormat(
            template=template_for(self.chat_template, tokenizer),
            answers=self.answers,
            begin=not config_of(source).method.score_first,
            longest=None if self.skip_long else reading.longest,
        )
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "data" if self.show else self._folder / "data"
            is_new = not self._folder.exists()
            try:
                shards = prepare(JoinedCorpus(corpora), tokenizer, folder, chat=chat)
            except ValueError:
                if is_new and self._folder.is_dir() and not any(self._folder.iterdir()):
                    self._folder.rmdir()
                raise
            counts = (f"{name} {shards.split(name).documents:,}" for name in shards.splits)
            say(f"conversations{'' if self.show else f' in {folder}'}: {', '.join(counts)}")
            yield shards
