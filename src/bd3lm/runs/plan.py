"""From a recipe to a run: here, and for its method in `methods`, plain values become objects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from rich.console import Console

from bd3lm import interop
from bd3lm.config import LanguageModelConfig
from bd3lm.data import (
    BatchStream,
    PydocCorpus,
    Tokenizer,
    TokenShards,
    WrappedTokens,
    prepare,
    saved_tokenizer,
    train_bpe,
)
from bd3lm.diffusion import derive_seed
from bd3lm.interop import weights
from bd3lm.interop.weights import Shape, parameter_shapes
from bd3lm.io.files import local_path
from bd3lm.methods import build_method, build_objective, validation_objective
from bd3lm.models import Transformer, TransformerConfig
from bd3lm.objectives import (
    D3PM,
    Autoregressive,
    BlockDiffusionLoss,
    Objective,
    ScoreEntropy,
    SimplexDiffusionLoss,
)
from bd3lm.runs.presets import network_config
from bd3lm.runs.recipe import (
    BlockDiffusionRecipe,
    ClippedMasking,
    DataRecipe,
    Recipe,
    recipe_to_dict,
)
from bd3lm.training import (
    Callback,
    CheckpointStore,
    ClipSearchValidator,
    CsvLog,
    Engine,
    GradientVarianceValidator,
    HeldOut,
    LikelihoodValidator,
    NelboVarianceValidator,
    ProgressBar,
    TensorBoardLog,
    Trainer,
    Validator,
    WandbLog,
)
from bd3lm.training.distributed import whole
from bd3lm.training.trainer import rank_rows

_HEAD = "output.weight"  # a parameter of its own where embeddings are not tied


@dataclass(frozen=True)
class Run:
    """A run ready to start, and what is needed to release its model."""

    trainer: Trainer
    config: LanguageModelConfig
    shards: TokenShards
    held_out: HeldOut
    out: Path
    nothing_held_out: str | None = None
    """Why there is nothing to validate on; None where there is something."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.shards.tokenizer

    def export(self) -> Path:
        """Write the EMA weights, config and tokenizer to out/model, in this project's format."""
        engine = self.trainer.engine
        average = {}
        for name, tensor in self.trainer.ema.tensors().items():
            gathered = whole(tensor)  # by all processes, one tensor at a time; one of them keeps it
            if engine.is_main:
                average[name] = gathered
        folder = self.out / interop.RUN_MODEL
        if engine.is_main:
            network = weights.build(
                self.config.network, average, device="cpu", dtype=None, where=str(self.out)
            )
            interop.save(network, self.config, folder)
            self.tokenizer.save(folder)
        engine.barrier()
        return folder


def build_run(
    recipe: Recipe,
    out: Path,
    *,
    engine: Engine,
    data_folder: Path | None = None,
    console: Console | None = None,
    label: str = "training",
    objective: Objective | None = None,
) -> Run:
    """Everything a recipe describes, writing under `out`; the built-in corpus goes to `data_folder`.

    An `objective` is trained with in place of the recipe's. It must be for the same model: the recipe says
    which model is released. Checkpoints hold its repr, by which it is known again when the run is resumed.
    """
    _check_trackers(recipe, engine)
    shards = open_data(recipe.data, data_folder or out / "data", engine)
    context = recipe.data.context
    store = open_store(recipe, out)
    # A run that has a checkpoint goes on from it, and no longer needs what it started from.
    network, config = _network(recipe, shards, recipe.start_from if store.latest() is None else None)
    method = recipe.method
    tokenizer = shards.tokenizer
    of_recipe = build_objective(
        method, context=context, mask_id=tokenizer.mask_id, vocab_size=tokenizer.vocab_size
    )
    record = recipe_to_dict(recipe)
    if objective is not None:
        _check_objective(objective, of_recipe)
        record["method"] = {"kind": method.kind, "objective": repr(objective)}
    trained = of_recipe if objective is None else objective
    held_out = HeldOut(held_out_batches(recipe.data, shards), method.score_first)
    trainer = Trainer(
        network=network,
        objective=trained,
        data=_stream(recipe, shards),
        settings=recipe.train,
        optimizer=recipe.optimizer,
        engine=engine,
        store=store,
        score_first=method.score_first,
        validators=_validators(recipe, trained, held_out, shards),
        callbacks=_callbacks(recipe, out, console, label),
        run_state={
            "recipe": record,
            "objective": None if objective is None else repr(objective),
            "data_fingerprint": shards.fingerprint,
            "tokenizer_fingerprint": shards.tokenizer.fingerprint,
        },
    )
    if engine.is_main:
        out.mkdir(parents=True, exist_ok=True)
    return Run(
        trainer=trainer,
        config=config,
        shards=shards,
        held_out=held_out,
        out=out,
        nothing_held_out=why_nothing_is_held_out(recipe.data, shards),
    )


_OBJECTIVES = (Autoregressive, BlockDiffusionLoss, D3PM, ScoreEntropy, SimplexDiffusionLoss)


def _check_objective(objective: Objective, of_recipe: Objective) -> None:
    """Refuse an objective that trains another model than the recipe's, or that could not be known again."""
    if isinstance(objective, _OBJECTIVES) and not isinstance(objective, type(of_recipe)):
        raise ValueError(
            f"objective must train the method of the recipe, {type(of_recipe).__name__}, got "
            f"{type(objective).__name__}"
        )
    for name in ("reading", "block_size", "mask_id", "score_first"):
        own, expected = getattr(objective, name, None), getattr(of_recipe, name, None)
        if own is not None and own != expected:
            raise ValueError(
                f"objective must be for the model of the recipe, whose {name} is {expected}, got {own}"
            )
    if " object at 0x" in repr(objective):
        raise ValueError(
            "objective must have a repr that says its settings, by which a checkpoint knows it again, got "
            f"{objective!r}: make it, and all that it holds, dataclasses"
        )


def check_run(recipe: Recipe, out: Path, *, engine: Engine, before: Recipe | None = None) -> None:
    """Run the checks of `build_run` that need neither the network nor prepared data.

    A stage that starts from the model of `before` must also have its network and its tokenizer. Checking all
    stages before the first is trained saves hours.
    """
    rank_rows(recipe.train, engine)
    _check_trackers(recipe, engine)
    open_store(recipe, out)
    _callbacks(recipe, out, None, "")
    data = recipe.data
    shards = None if data.path == "builtin" else open_shards(data.path)
    # The tokenizer of built-in text is trained later, but its size is known, and any mask id will do here.
    vocabulary = data.builtin_vocabulary if shards is None else shards.tokenizer.vocab_size
    mask_id = 0 if shards is None else shards.tokenizer.mask_id
    config = _config(recipe, vocabulary, mask_id)
    objective = build_objective(recipe.method, context=data.context, mask_id=mask_id, vocab_size=vocabulary)
    if before is not None and (before.data.path == "builtin") == (shards is None):
        size = before.data.builtin_vocabulary if shards is None else vocabulary
        if shards is not None:
            shards.require_tokenizer(open_shards(before.data.path).tokenizer)
        _require_same_network(
            parameter_shapes(_shape(before, size)), parameter_shapes(config.network), recipe.start_from
        )
    if shards is not None:
        _stream(recipe, shards)
        held_out = HeldOut(held_out_batches(data, shards), recipe.method.score_first)
        _validators(recipe, objective, held_out, shards)


def _check_trackers(recipe: Recipe, engine: Engine) -> None:
    if recipe.trackers.gradient_variance_batches and engine.world > 1:
        raise ValueError("trackers.gradient_variance_batches needs a run of one process")


def open_store(recipe: Recipe, out: Path) -> CheckpointStore:
    """The checkpoints of a run."""
    return CheckpointStore(
        out / "checkpoints", keep_last=recipe.checkpoint.keep_last, keep_best=recipe.checkpoint.keep_best
    )


def _stream(recipe: Recipe, shards: TokenShards) -> BatchStream:
    train = WrappedTokens(shards, "train", recipe.data.context, bos_eos=recipe.data.bos_eos)
    return BatchStream(
        train, rows=recipe.train.global_batch, seed=recipe.train.seed, skip=recipe.data.skip or 0
    )


def open_data(recipe: DataRecipe, builtin_folder: Path, engine: Engine) -> TokenShards:
    """The shards a recipe names; the built-in corpus is prepared first, by one process."""
    if recipe.path != "builtin":
        return open_shards(recipe.path)
    if engine.is_main:
        corpus = PydocCorpus()
        tokenizer = train_bpe(corpus.documents("train"), recipe.builtin_vocabulary)
        prepare(corpus, tokenizer, builtin_folder, progress=False)
    engine.barrier()
    return TokenShards(builtin_folder)


def open_shards(path: str) -> TokenShards:
    """The folder that `data.path` names."""
    if not local_path(path).is_dir():
        raise ValueError(
            f"data.path must be a folder of token shards, got {path}, which does not exist; "
            f"make it with `bd3lm data prepare SOURCE {path}` or, if it moved, say where: --data.path "
            "(train), --data (eval)"
        )
    return TokenShards(path)


def _network(
    recipe: Recipe, shards: TokenShards, start_from: str | None
) -> tuple[Transformer, LanguageModelConfig]:
    """A fresh network, or that of `start_from`, with the config its checkpoints are released with."""
    config = _config(recipe, shards.tokenizer.vocab_size, shards.tokenizer.mask_id)
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU, whatever they are trained on
        torch.default_generator.manual_seed(derive_seed(recipe.train.seed, "weights"))
        network = Transformer(config.network)
        if recipe.network.initialisation == "identity":
            network.start_as_identity()
    if start_from is not None:
        _start_from(network, start_from, shards)
    return network, config


def _config(recipe: Recipe, vocab_size: int, mask_id: int) -> LanguageModelConfig:
    method = build_method(recipe.method, context=recipe.data.context, mask_id=mask_id)
    return LanguageModelConfig(network=_shape(recipe, vocab_size), method=method)


def _shape(recipe: Recipe, vocab_size: int) -> TransformerConfig:
    return network_config(
        recipe.network.size, vocab_size=vocab_size, context=recipe.data.context, **recipe.network.shape
    )


def _start_from(network: Transformer, source: str, shards: TokenShards) -> None:
    """Take another model's weights, after making sure that its tokens mean the same."""
    path = interop.resolve(source)
    if (tokenizer := saved_tokenizer(path)) is not None:
        shards.require_tokenizer(tokenizer)
    other, _ = interop.load(path)
    theirs = {name: tuple(p.shape) for name, p in other.named_parameters()}
    ours = {name: tuple(p.shape) for name, p in network.named_parameters()}
    _require_same_network(theirs, ours, source)
    network.load_state_dict(other.state_dict())


def _require_same_network(theirs: Mapping[str, Shape], ours: Mapping[str, Shape], source: str | None) -> None:
    if theirs != ours:
        names = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
        first = names[0]
        differ = "1 parameter differs" if len(names) == 1 else f"{len(names)} parameters differ"
        hint = ""
        if names == [_HEAD]:
            hint = (
                f"; its embeddings are {_tied(theirs)} and those of this recipe {_tied(ours)}: network.tied"
            )
        raise ValueError(
            f"start_from must have the network of this recipe, got {source}, where {differ} "
            f"({first}: {theirs.get(first, 'missing')} there, {ours.get(first, 'missing')} here){hint}"
        )


def _tied(shapes: Mapping[str, Shape]) -> str:
    return "untied" if _HEAD in shapes else "tied"


def held_out_batches(recipe: DataRecipe, shards: TokenShards) -> Sequence[torch.Tensor]:
    """The held-out sequences of some data, in batches; none where nothing was held out."""
    split = _held_out_split(shards)
    if split is None:
        return ()
    sequences = WrappedTokens(shards, split, recipe.context, bos_eos=recipe.bos_eos)
    return _HeldOutBatches(sequences, recipe.validation_sequences, recipe.validation_batch)


def why_nothing_is_held_out(recipe: DataRecipe, shards: TokenShards) -> str | None:
    """Why `held_out_batches` has none: no text was held out, or too little; None where it has some."""
    split = _held_out_split(shards)
    if split is None:
        return f"the data in {shards.folder} has no valid or test split"
    if len(WrappedTokens(shards, split, recipe.context, bos_eos=recipe.bos_eos)):
        return None
    frame = " less BOS and EOS" if recipe.bos_eos else ""
    tokens = shards.split(split).tokens
    return f"the {split} split has {tokens:,} tokens, less than one context of {recipe.context:,}{frame}"


def _held_out_split(shards: TokenShards) -> str | None:
    return next((name for name in ("valid", "test") if name in shards.splits), None)


class _HeldOutBatches(Sequence[torch.Tensor]):
    """The first `limit` sequences in batches of `rows`, read from the shards when asked for."""

    def __init__(self, sequences: WrappedTokens, limit: int | None, rows: int) -> None:
        self._sequences, self._rows = sequences, rows
        self._starts = range(len(sequences))[:limit:rows]

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        start = self._starts[index]
        return torch.from_numpy(self._sequences[start : min(start + self._rows, self._starts.stop)])


def _validators(
    recipe: Recipe, objective: Objective, held_out: HeldOut, shards: TokenShards
) -> list[Validator]:
    seed, trackers = recipe.train.seed, recipe.trackers
    masking = recipe.method.masking if isinstance(recipe.method, BlockDiffusionRecipe) else None
    asked = masking.search if isinstance(masking, ClippedMasking) else None
    search = objective.search
    if not len(held_out.batches):
        if search is not None or trackers.gradient_variance_batches or trackers.nelbo_variance_batches:
            raise ValueError(
                f"{why_nothing_is_held_out(recipe.data, shards)}, and the clip search and the variance "
                "trackers need a sequence to validate on; prepare the data with --held-out"
            )
        return []
    if asked is not None and search is None:
        raise ValueError(f"method.masking.search needs an objective that searches a range, got {objective}")
    lean = recipe.method.lean if isinstance(recipe.method, BlockDiffusionRecipe) else 0.0
    judge = validation_objective(objective, lean=lean, uses_noise=recipe.network.time_conditioning)
    validators: list[Validator] = [LikelihoodValidator(held_out, judge, seed)]
    if search is not None:
        validators.append(ClipSearchValidator(held_out, seed))
    if trackers.nelbo_variance_batches:
        validators.append(NelboVarianceValidator(held_out, trackers.nelbo_variance_batches, seed))
    if trackers.gradient_variance_batches:
        validators.append(GradientVarianceValidator(held_out, trackers.gradient_variance_batches))
    return validators


def _callbacks(recipe: Recipe, out: Path, console: Console | None, label: str) -> list[Callback]:
    callbacks: list[Callback] = [CsvLog(out / "metrics.csv"), ProgressBar(console, description=label)]
    if recipe.trackers.tensorboard:
        callbacks.append(TensorBoardLog(out / "tensorboard"))
    if recipe.trackers.wandb_project:
        callbacks.append(WandbLog(project=recipe.trackers.wandb_project, name=out.name, folder=out))
    return callbacks
