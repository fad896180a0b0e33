"""`bd3lm adapt`: turn a checkpoint into a drafter, a joint model or a block model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional

from bd3lm.commands.shared.command import flags_of
from bd3lm.commands.shared.flags import (
    DeviceFlag,
    OptionalFloat,
    OptionalFolder,
    OptionalInt,
    named,
)
from bd3lm.commands.shared.recipes import RecipeCommand, check_later_stages
from bd3lm.commands.shared.starting import (
    check_overrides,
    go_on,
    own_tokenizer,
    show_with_memory,
    train,
)
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.data import Corpus, Tokenizer
    from bd3lm.runs.recipe import Recipe

_OWN = ("own_texts", "own_length", "own_prompts", "own_temperature", "own_top_p", "own_batch")
_MODEL = "MODEL comes first, without a flag: bd3lm adapt MODEL --to drafter"


@dataclass(frozen=True)
class Adapt(RecipeCommand):
    """Turn a checkpoint into a drafter, a joint model or a block model.

    drafter: the weights stay the same, bit for bit; low-rank additions learn to draft the tokens that the
    model would write next. joint: all weights learn to write block by block, and keep writing token by token.
    block: all weights learn to write block by block. Set any field of the recipes with `--any.field value`.
    """

    kind = "adapt"

    model: Positional[Annotated[str | None, named("[MODEL]")]] = None
    """The checkpoint to start from: a run, model folder or hub id."""
    to: Annotated[Literal["drafter", "joint", "block"] | None, named("{drafter,joint,block}")] = None
    """What to turn the checkpoint into."""
    data: OptionalFolder = None
    """Train on these token shards, prepared with the model's tokenizer."""
    text: Annotated[tuple[str, ...], named("FILE ...")] = ()
    """Train on these files or folders of text. They are tokenized to OUT/data first."""
    own: Annotated[bool, FlagCreatePairsOff] = False
    """Train on texts that the model writes first, to OUT/own.jsonl. With --text: train on both."""
    out: OptionalFolder = None
    """Folder of the run. Default: runs/adapt-TO."""
    steps: OptionalInt = None
    """Training steps, all stages together. Default: 1,000."""
    block_size: OptionalInt = None
    """Tokens per block. Default: 4. --to block starts with smaller blocks."""
    masks: OptionalInt = None
    """Tokens that are drafted in training. Default: 3."""
    rank: OptionalInt = None
    """Rank of the low-rank additions to the weights. Default: 64."""
    aim: Annotated[Literal["hard", "soft", "overlap"] | None, named("{hard,soft,overlap}")] = None
    """Train a drafter in one stage with this loss. Default: two stages, soft and then overlap."""
    own_texts: OptionalInt = None
    """--own: how many texts the model writes. Default: enough for the steps, if the texts are long."""
    own_length: OptionalInt = None
    """--own: most tokens of a text, its prompt included. Default: the context of training."""
    own_prompts: Annotated[str | None, named("FILE")] = None
    """--own: prompts, one per line, or .jsonl with a field prompt. Default: a list in bd3lm."""
    own_temperature: OptionalFloat = None
    """--own: sampling temperature. Default: 1."""
    own_top_p: OptionalFloat = None
    """--own: draw only from the most likely tokens with this probability. Default: 1, all tokens."""
    own_batch: OptionalInt = None
    """--own: texts written in parallel. The texts do not depend on it. Default: 64."""
    only_text: Annotated[bool, FlagCreatePairsOff] = False
    """Write and tokenize the text, then stop. Pass OUT/data to --data later, under torchrun too."""
    resume: bool = False
    """Continue the run in --out, with its own recipes or with the same command."""
    device: DeviceFlag = None
    show: bool = False
    """Print the recipes and the memory that they need, then stop."""

    def run(self) -> int:
        from bd3lm.commands.shared.models import check_models, one_model

        check_models([] if self.model is None else [self.model], device=self.device)
        if self.model is None:
            return go_on(self, hint=_MODEL)
        self._check()
        prompts = self._own_prompts()

        source = str(one_model(self.model))
        stages = self._stages(source)
        tokenizer = self._tokenizer(source)
        if self.show:
            show_with_memory(stages, source)
            return 0
        if self.text or self.own:
            self._prepare(source, tokenizer, stages, prompts)
        if self.only_text:
            return 0
        return train(stages, self._folder, resume=self.resume, device=self.device)

    @property
    def _folder(self) -> Path:
        return self.out or Path("runs") / f"adapt-{self.to}"

    # --- the request ---

    def _check(self) -> None:
        """Refuse what is wrong before torch is loaded."""
        from bd3lm.runs.adapting import Choices
        from bd3lm.runs.folders import check_not_begun
        from bd3lm.runs.outline import check_outline
        from bd3lm.runs.presets import Stage

        if self.to is None:
            raise ValueError("--to must be given: drafter, joint or block")
        recipes = Choices(to=self.to, **self._chosen).stages()
        if self.data is not None and (self.text or self.own):
            other = "--own" if self.own else "--text"
            raise ValueError(
                f"--data is text that is already tokenized, and {other} is given too: give only one of them"
            )
        if self.data is None and not (self.text or self.own or self.show):
            raise ValueError(
                "there is no text to train on: give --data FOLDER, --text FILE ... or, to let the model "
                "write it, --own"
            )
        if self.data is not None and self.only_text:
            raise ValueError(f"--only-text needs --text or --own, got --data {self.data}")
        self._check_own()
        for file in self.text:
            if not Path(file).expanduser().exists():
                raise ValueError(f"--text must be files or folders of text, and {file} does not exist")
        if self.data is not None and not self.data.expanduser().is_dir():
            raise ValueError(
                f"--data must be a folder of token shards, and {self.data} does not exist; for text files "
                "use --text"
            )
        if (self.text or self.own) and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "--text and --own work in one process: first run `bd3lm adapt ... --only-text`, then train "
                "under torchrun with --data OUT/data"
            )
        if not self.resume and not self.show:
            check_not_begun(self._folder)
        stages = [Stage(name, recipe) for name, recipe in recipes.items()]
        check_outline(stages, self.overrides, where=f"adapt --to {self.to}", reads_data=False)

    def _check_own(self) -> None:
        from bd3lm.limits import check_temperature

        for flag in flags_of(type(self)):
            value = getattr(self, flag.field)
            if flag.field in _OWN and value is not None and not self.own:
                raise ValueError(f"{flag.name} needs --own, got {value} without it")
        for name, least in (("own_texts", 2), ("own_length", 2), ("own_batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.own_temperature is not None:
            check_temperature(self.own_temperature, "--own-temperature")
        if self.own_top_p is not None and not 0.0 < self.own_top_p <= 1.0:
            raise ValueError(f"--own-top-p must lie in (0, 1], got {self.own_top_p}")

    def _own_prompts(self) -> list[str] | None:
        from bd3lm.commands.shared.prompts import read_prompts

        return None if self.own_prompts is None else read_prompts(self.own_prompts, flag="--own-prompts")

    @property
    def _chosen(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("steps", "block_size", "masks", "rank", "aim")}

    def _stages(self, source: str) -> "list[tuple[str, Recipe]]":
        """The recipes, checked against the model that they start from."""
        from bd3lm import interop
        from bd3lm.runs.adapting import DATA, Choices, check_can_become
        from bd3lm.runs.merging import merge
        from bd3lm.runs.plan import check_start
        from bd3lm.runs.recipe import parse_overrides
        from bd3lm.runs.stages import resolve_recipes

        overrides = parse_overrides(self.overrides)
        check_overrides(overrides, hint=_MODEL, text="--text FILE ... or --own")
        config = interop.config_of(interop.resolve(source))
        choices = Choices(to=str(self.to), most_context=config.network.context, **self._chosen)
        data = str(self.data or (self._folder / "data" if self.text or self.own else DATA))
        recipes = {name: merge(recipe, {"data": {"path": data}}) for name, recipe in choices.stages().items()}
        first = next(iter(recipes))
        recipes[first] = merge(recipes[first], {"start_from": source})
        stages = resolve_recipes(recipes, overrides, where=f"adapt --to {self.to}")
        check_later_stages(stages)
        check_can_become(config, source, stages[0][1])
        for _, recipe in stages:
            check_start(recipe, source, reads=self.data is not None)
        return stages

    def _tokenizer(self, source: str) -> "Tokenizer | None":
        """The model's own tokenizer, which its training text must use."""
        return own_tokenizer(source, needed_by="--text and --own need") if self.text or self.own else None

    # --- the text ---

    def _prepare(
        self,
        source: str,
        tokenizer: "Tokenizer | None",
        stages: "Sequence[tuple[str, Recipe]]",
        prompts: list[str] | None,
    ) -> None:
        """Write the model's own texts, if asked, and tokenize everything."""
        from bd3lm.commands.shared.skipped import say_skipped
        from bd3lm.data import FileCorpus, IdsOf, JoinedCorpus, prepare

        assert tokenizer is not None
        files: list[Corpus] = [FileCorpus(file) for file in self.text]
        parts = files
        if self.own:
            own = self._written(source, stages, prompts)
            parts = [own, *(IdsOf(each, tokenizer) for each in files)]
        corpus = JoinedCorpus(parts)
        say_skipped(corpus)
        folder = self._folder / "data"
        shards = prepare(corpus, tokenizer, folder, eos_between_documents=not corpus.holds_ids)
        counts = (f"{name} {shards.split(name).tokens:,}" for name in shards.splits)
        say(f"text in {folder}: {', '.join(counts)} tokens")

    def _written(
        self, source: str, stages: "Sequence[tuple[str, Recipe]]", prompts: list[str] | None
    ) -> "Corpus":
        """The model's own texts; missing ones are written first."""
        import torch

        from bd3lm import interop
        from bd3lm.commands.shared.progress import tracked
        from bd3lm.commands.shared.records import weights_digest
        from bd3lm.commands.shared.writing import sampling_dtype
        from bd3lm.io.console import Console
        from bd3lm.lm import load
        from bd3lm.models.devices import pick_device
        from bd3lm.runs.own_texts import Author, OwnTexts, Writing

        recipe = stages[0][1]
        path = interop.resolve(source)
        dtype = sampling_dtype(None, self.device)
        model = load(path, device=pick_device(self.device), dtype=getattr(torch, dtype) if dtype else None)
        if "causal" in model.record.method.laws and self.to != "block":
            model = model.with_law("causal")  # the law that drafts are for, and that a joint model must keep
        length = self.own_length or recipe.data.context
        read = sum(each.train.steps * each.train.global_batch * each.data.context for _, each in stages)
        writing = Writing(
            texts=self.own_texts or max(2, -(-read // length)),
            length=length,
            temperature=1.0 if self.own_temperature is None else self.own_temperature,
            top_p=1.0 if self.own_top_p is None else self.own_top_p,
            seed=recipe.train.seed,
            batch_size=self.own_batch or 64,
        )
        file = self._folder / "own.jsonl"
        author = Author(model, weights_digest(path), writing, file, prompts=prompts)
        if left := len(author.left):
            say(f"{source} writes {left:,} of {writing.texts:,} texts to {file}")
        for _ in tracked(author.write(), "writing texts", total=left, console=Console()):
            pass
        return OwnTexts(file)
