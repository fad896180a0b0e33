"""From a recipe to a run: a plan, checked as a whole, and the objects it builds."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from bd3lm import interop
from bd3lm.data import (
    BatchStream,
    PydocCorpus,
    Tokenizer,
    TokenShards,
    prepare,
    train_bpe,
)
from bd3lm.data.meta import META_FILE
from bd3lm.interop.weights import parameter_shapes
from bd3lm.io.console import Console
from bd3lm.io.tensors import Later
from bd3lm.io.terminal import say
from bd3lm.methods import Frame, LanguageModelConfig
from bd3lm.models import NetworkConfig
from bd3lm.models.devices import require_room
from bd3lm.objectives import Objective
from bd3lm.parsing import raise_problems
from bd3lm.runs.folders import CHECKPOINTS, METRICS_FILE
from bd3lm.runs.memory import TrainingMemory, training_memory
from bd3lm.runs.merging import CHECKPOINT
from bd3lm.runs.recipe import Recipe, recipe_to_dict
from bd3lm.runs.sections import BUILTIN, DataRecipe, check_data
from bd3lm.runs.texts import (
    held_out_batches,
    say_what_is_left_out,
    sequences_of,
    why_nothing_is_held_out,
)
from bd3lm.runs.tracking import check_trackers, make_trackers, sample_texts
from bd3lm.runs.weights import require_same_network, require_same_tokenizer, sharded_network, whole_network
from bd3lm.training import (
    CheckpointStore,
    ClipSearchValidator,
    CsvLog,
    Engine,
    GradientVarianceValidator,
    HeldOut,
    LikelihoodValidator,
    NelboVarianceValidator,
    ProgressBar,
    Trainer,
    Validator,
)
from bd3lm.training.trainer import rank_rows

_BYTES_OF_A_WEIGHT = 4 * 4  # parameter, gradient and AdamW's two moments, in float32
_BYTES_OF_A_FROZEN_WEIGHT = 4


@dataclass(frozen=True)
class Run:
    """A run ready to start, and everything needed to release its model."""

    trainer: Trainer
    config: LanguageModelConfig
    shards: TokenShards
    held_out: HeldOut
    out: Path
    nothing_held_out: str | None = None
    """Why there is nothing to validate on; None if there is something."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.shards.tokenizer

    def export(self) -> Path:
        """Write the EMA weights, config and tokenizer to out/model, in the native format. If the model is an
        addition to another, only the additions are written."""
        engine, average = self.trainer.engine, self.trainer.ema.tensors()
        folder = self.out / interop.RUN_MODEL

        def write(whole: Callable[[str], torch.Tensor]) -> None:
            tensors = {
                name: Later(tuple(each.shape), each.dtype, partial(whole, name))
                for name, each in average.items()
            }
            interop.save_tensors(tensors, self.config, folder)
            self.tokenizer.save(folder)

        engine.with_whole(average, write)  # each process holds at most one whole tensor
        engine.barrier()
        return folder


@dataclass(frozen=True)
class _Reading:
    """The text of a run, and its tokenizer."""

    shards: TokenShards
    config: LanguageModelConfig
    objective: Objective
    stream: BatchStream
    held_out: HeldOut
    validators: list[Validator]
    nothing_held_out: str | None

    @classmethod
    def of(cls, recipe: Recipe, shards: TokenShards, engine: Engine) -> "_Reading":
        """All data of the run, checked against the recipe."""
        shards.check(partial(say, to=sys.stderr) if engine.is_main else lambda line: None)
        config = _config(recipe, _Tokens.of(shards))
        objective = _objective(recipe, config)
        held_out = HeldOut(held_out_batches(recipe.data, shards, recipe.method))
        nothing = why_nothing_is_held_out(recipe.data, shards, recipe.method)
        stream = _stream(recipe, shards)
        if engine.is_main:
            say_what_is_left_out(stream.sequences)
        return cls(
            shards,
            config,
            objective,
            stream,
            held_out,
            _validators(recipe, config, held_out, nothing),
            nothing,
        )


@dataclass(frozen=True)
class Plan:
    """A checked run: everything known before its network and its text exist."""

    recipe: Recipe
    out: Path
    engine: Engine
    store: CheckpointStore
    reading: _Reading | None
    """None for the built-in corpus, which is prepared when the run is built."""

    def build(
        self, *, data_folder: Path | None = None, console: Console | None = None, label: str = "training"
    ) -> Run:
        """Build the run. The built-in corpus goes to `data_folder`, by default the run's own folder."""
        recipe, engine = self.recipe, self.engine
        reading = self.reading
        if reading is None:
            shards = prepare_builtin(recipe.data, data_folder or self.out / "data", engine)
            reading = _Reading.of(recipe, shards, engine)
        config, shards = reading.config, reading.shards
        # A run with a checkpoint continues from it; it needs its start only if it is an addition to that
        # model.
        going_on = self.store.latest() is not None and not config.trains_beside
        start_from = None if going_on else recipe.start_from
        if start_from is not None and config.trains_beside:
            config = _beside(config, start_from)
        trackers = make_trackers(recipe, self.out)
        samples = sample_texts(recipe, config, shards.tokenizer, self.out, trackers)
        if engine.parallel == "fsdp":
            network, first_weights = sharded_network(recipe, config, shards, start_from)
        else:
            network, first_weights = whole_network(recipe, config, shards, start_from), None
        trainer = Trainer(
            network=network,
            first_weights=first_weights,
            objective=reading.objective,
            data=reading.stream,
            settings=recipe.train,
            optimizer=recipe.optimizer,
            engine=engine,
            store=self.store,
            validators=[*reading.validators, *samples],
            callbacks=[
                CsvLog(self.out / METRICS_FILE),
                *trackers,  # one that cannot work is reported before there is a progress bar
                ProgressBar(console, description=label),
            ],
            run_state={
                "recipe": recipe_to_dict(recipe),
                "data_fingerprint": shards.fingerprint,
                "tokenizer_fingerprint": shards.tokenizer.fingerprint,
            },
        )
        if engine.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
        return Run(
            trainer=trainer,
            config=config,
            shards=shards,
            held_out=reading.held_out,
            out=self.out,
            nothing_held_out=reading.nothing_held_out,
        )


def plan_run(
    recipe: Recipe, out: Path, *, engine: Engine | None = None, before: Recipe | None = None
) -> Plan:
    """Check a run that will write to `out` before anything is trained for it: late errors cost hours.

    A stage that starts from the model of `before` must have its network and its tokenizer.
    """
    engine, recipe = engine or Engine(), with_network_of_start(recipe)
    if _only_adds(recipe) and recipe.start_from is None:
        what = (
            f"method.kind {recipe.method.kind}" if recipe.method.trains_beside else "network.additions_at all"
        )
        raise ValueError(f"{what} adds to a model: give --from MODEL, or set start_from")
    rank_rows(recipe.train, engine)
    check_trackers(recipe, engine)
    store = open_store(recipe, out)
    _require_room(recipe, engine)
    shards = None if recipe.data.path == BUILTIN else open_shards(recipe.data.path)
    if before is not None and (before.data.path == BUILTIN) == (shards is None):
        ours, theirs = _Tokens.builtin(recipe.data), _Tokens.builtin(before.data)
        if shards is not None:
            shards.require_tokenizer(open_shards(before.data.path).tokenizer)
            ours = theirs = _Tokens.of(shards)
        require_same_network(
            parameter_shapes(_shape(before, theirs)),
            parameter_shapes(_shape(recipe, ours)),
            recipe.start_from,
        )
    if shards is not None:
        reading = _Reading.of(recipe, shards, engine)
        sample_texts(recipe, reading.config, shards.tokenizer, out)  # checks that the prompts fit
        return Plan(recipe, out, engine, store, reading)
    # The tokenizer of the built-in text is trained later. Its size is known, and its mask is the last token.
    _objective(recipe, _config(recipe, _Tokens.builtin(recipe.data)))
    return Plan(recipe, out, engine, store, None)


def _only_adds(recipe: Recipe) -> bool:
    """Whether a run trains only additions to the weights of another model."""
    return recipe.method.trains_beside or _shape(recipe, _Tokens(2, 1)).adds_everywhere


def _require_room(recipe: Recipe, engine: Engine) -> None:
    """Refuse a network whose weights, gradients and moments do not fit in memory, before it is created."""
    numbers = _shape(recipe, _Tokens(2, 1)).parameters  # the vocabulary is known later, and is a small part
    share = numbers // engine.world if engine.parallel == "fsdp" else numbers
    bytes_of_each = _BYTES_OF_A_FROZEN_WEIGHT if _only_adds(recipe) else _BYTES_OF_A_WEIGHT
    require_room(share * bytes_of_each, engine.device, what=f"training a network of {numbers:,} parameters")


def open_store(recipe: Recipe, out: Path) -> CheckpointStore:
    """The checkpoints of a run."""
    return CheckpointStore(
        out / CHECKPOINTS, keep_last=recipe.checkpoint.keep_last, keep_best=recipe.checkpoint.keep_best
    )


def _stream(recipe: Recipe, shards: TokenShards) -> BatchStream:
    train = sequences_of(recipe.data, shards, "train", recipe.method)
    return BatchStream(
        train, rows=recipe.train.global_batch, seed=recipe.train.seed, skip=recipe.data.skip or 0
    )


def prepare_builtin(recipe: DataRecipe, folder: Path, engine: Engine) -> TokenShards:
    """The built-in corpus in a folder; one process prepares it if it is missing."""
    if engine.is_main and not _is_prepared(recipe, folder):
        corpus = PydocCorpus()
        tokenizer = train_bpe(corpus.documents("train"), recipe.builtin_vocabulary)
        prepare(corpus, tokenizer, folder, progress=False)
    engine.barrier()
    return TokenShards(folder)


def _is_prepared(recipe: DataRecipe, folder: Path) -> bool:
    """Whether all of it exists; damaged or interrupted data is prepared again."""
    try:
        shards = TokenShards(folder)
        shards.check()
        return shards.tokenizer.vocab_size == recipe.builtin_vocabulary
    except (FileNotFoundError, ValueError):
        return False


def run_data(recipe: DataRecipe, run: Path) -> TokenShards:
    """The data that a run, or one stage, was trained on. Nothing is prepared again."""
    if recipe.path != BUILTIN:
        return open_shards(recipe.path)
    for place in (run / "data", run.parent / "data"):
        if (place / META_FILE).is_file():
            return TokenShards(place)
    raise ValueError(
        f"{run} was trained on the built-in corpus, whose tokens must be in {run / 'data'} or next to it, "
        "got neither: name the data with --data"
    )


def open_shards(path: str) -> TokenShards:
    """The folder that `data.path` names."""
    check_data(path)
    return TokenShards(path)


def _beside(config: LanguageModelConfig, start_from: str) -> LanguageModelConfig:
    """The config of an addition to a model: it names that model, and has the same context."""
    path = interop.resolve(start_from)
    theirs = interop.config_of(path)
    network = replace(config.network, context=theirs.network.context)
    return replace(config, network=network, base=interop.base_of(start_from, path, theirs))


class _Tokens(NamedTuple):
    """The token ids of some data."""

    number: int
    mask_id: int

    @classmethod
    def of(cls, shards: TokenShards) -> "_Tokens":
        return cls(shards.tokenizer.vocab_size, shards.tokenizer.mask_id)

    @classmethod
    def builtin(cls, recipe: DataRecipe) -> "_Tokens":
        return cls(recipe.builtin_vocabulary, recipe.builtin_vocabulary - 1)


def _config(recipe: Recipe, tokens: _Tokens) -> LanguageModelConfig:
    """What the model of a run is released with."""
    network = _shape(recipe, tokens)
    method = recipe.method.after(recipe.objective)
    return LanguageModelConfig(network=network, method=method, mask_id=tokens.mask_id)


def _objective(recipe: Recipe, config: LanguageModelConfig) -> Objective:
    """The objective of a run; options that do not fit together are refused."""
    return recipe.method.objective(recipe.objective, config.frame)


def _shape(recipe: Recipe, tokens: _Tokens) -> NetworkConfig:
    """The network for some data: it predicts all tokens, or all but a mask token with a vector of its own."""
    context = recipe.data.reads
    shape = recipe.network.config(vocab_size=tokens.number, context=context)
    apart = shape.input_vocab_size - tokens.number
    if apart and tokens.mask_id != tokens.number - 1:
        raise ValueError(
            f"network.mask_vector needs data whose mask is its last token, got the mask {tokens.mask_id} of "
            f"{tokens.number:,} tokens"
        )
    return recipe.network.config(vocab_size=tokens.number - apart, context=context) if apart else shape


def with_network_of_start(recipe: Recipe) -> Recipe:
    """The recipe with the shape of the checkpoint it starts from, if its network's size is `checkpoint`."""
    if not recipe.network.is_checkpoints:
        return recipe
    source = recipe.start_from
    if source is None:
        raise ValueError(
            f"network.size {CHECKPOINT} needs a model to start from: give --from MODEL, or start_from"
        )
    path = interop.resolve(source)
    config = interop.config_of(path)
    theirs = config.network
    if recipe.data.reads > theirs.context:
        name = "data.context" if recipe.data.most_context is None else "data.most_context"
        raise ValueError(
            f"{name} must be at most the context of {source}, {theirs.context:,}, whose network is used, got "
            f"{recipe.data.reads:,}"
        )
    if recipe.data.path != BUILTIN:
        shards = open_shards(recipe.data.path)
        require_same_tokenizer(path, config, source, shards)
        theirs = _reading(theirs, _Tokens.of(shards), source)
    recipe = replace(recipe, network=recipe.network.from_checkpoint(theirs))
    ours = recipe.network.config(vocab_size=theirs.vocab_size, context=recipe.data.reads)
    raise_problems(recipe.conflicts(Frame.of(ours, mask_id=ours.input_vocab_size - 1)))
    return recipe


def check_start(recipe: Recipe, source: str, *, reads: bool) -> None:
    """Refuse a recipe that cannot start from a model; the text is checked too if it `reads` it now."""
    path = interop.resolve(source)
    if interop.config_of(path).base is not None:
        interop.load(path)  # checks that its base model has not changed
    _started(recipe, source, reads=reads)


def memory_of(recipe: Recipe, source: str) -> TrainingMemory:
    """The memory that training with a recipe needs, starting from a model."""
    theirs = interop.config_of(source)
    found = _started(recipe, source, reads=False)
    network = found.network.config(vocab_size=theirs.network.vocab_size, context=found.data.reads)
    return training_memory(LanguageModelConfig(network=network, method=found.method, mask_id=theirs.mask_id))


def _started(recipe: Recipe, source: str, *, reads: bool) -> Recipe:
    data = recipe.data if reads else replace(recipe.data, path=BUILTIN)
    return with_network_of_start(replace(recipe, start_from=source, data=data))


def _reading(network: NetworkConfig, tokens: _Tokens, source: str) -> NetworkConfig:
    """A checkpoint's network for the tokens of some data: with a mask vector of its own if the data has one
    more token, its mask."""
    known = network.input_vocab_size
    if tokens.number == known:
        return network
    if tokens == (network.vocab_size + 1, network.vocab_size):
        return network.with_mask_apart()
    raise ValueError(
        f"start_from must be a model that reads the {tokens.number:,} tokens of the data, or all but its "
        f"mask if that is the last, got {source}, which reads {known:,}"
    )


def _validators(
    recipe: Recipe, config: LanguageModelConfig, held_out: HeldOut, nothing_held_out: str | None
) -> list[Validator]:
    seed, trackers, search = recipe.train.seed, recipe.trackers, recipe.objective.search
    if not len(held_out.batches):
        measured = trackers.gradient_variance_batches or trackers.nelbo_variance_batches
        if search is not None or measured or trackers.sample_texts:
            raise ValueError(
                f"{nothing_held_out}; the clip search, the variance trackers and sample texts need at least "
                "one sequence to validate on: prepare the data with --held-out"
            )
        return []
    judge = recipe.method.validation(recipe.objective, config.frame)
    validators: list[Validator] = [LikelihoodValidator(held_out, judge, seed)]
    if search is not None:
        validators.append(ClipSearchValidator(held_out, seed))
    if trackers.nelbo_variance_batches:
        validators.append(NelboVarianceValidator(held_out, trackers.nelbo_variance_batches, seed))
    if trackers.gradient_variance_batches:
        validators.append(GradientVarianceValidator(held_out, trackers.gradient_variance_batches))
    return validators
