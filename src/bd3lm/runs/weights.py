"""The network that a run starts with: fresh or from a model, whole or sharded by rows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

from bd3lm import interop
from bd3lm.data import TokenShards
from bd3lm.diffusion import derive_seed
from bd3lm.interop.weights import Shape, skeleton
from bd3lm.methods import LanguageModelConfig
from bd3lm.models import Network, NetworkConfig
from bd3lm.models.deferred import CannotDefer, DeferredWeights, Recording
from bd3lm.runs.merging import CHECKPOINT
from bd3lm.runs.recipe import Recipe

_HEAD = "output.weight"  # a separate parameter if embeddings are not tied


def whole_network(
    recipe: Recipe, config: LanguageModelConfig, shards: TokenShards, start_from: str | None
) -> Network:
    """A fresh network, or the network of `start_from`, with all weights in memory."""
    with _first_draws(recipe):
        network = _built(recipe, config)
    if start_from is not None:
        path = interop.resolve(start_from)
        other, its_config = interop.load(path)
        require_same_tokenizer(path, its_config, start_from, shards)
        theirs = {name: tuple(p.shape) for name, p in other.named_parameters()}
        lacking = _lacking(network, theirs, path, its_config, start_from)
        network.load_state_dict(other.state_dict(), strict=not lacking)
        network.fill_in(lacking)
    if config.trains_beside:
        network.learn_beside()
    return network


def sharded_network(
    recipe: Recipe, config: LanguageModelConfig, shards: TokenShards, start_from: str | None
) -> tuple[Network, DeferredWeights | None]:
    """The same network without its weights, and a recipe for each weight that makes it row by row, with the
    same bits.

    A network whose construction does more than can be recorded comes whole, with nothing to make.
    """
    stored = None
    if start_from is not None:
        path = interop.resolve(start_from)
        stored = interop.open_rows(path)
        require_same_tokenizer(path, stored.config, start_from, shards)
    recording, network = Recording(), skeleton(config.network)
    lacking: frozenset[str] = frozenset()
    if stored is not None:
        lacking = _lacking(network, stored.shapes, path, stored.config, str(start_from))
    try:
        if stored is None or lacking or next(network.buffers(), None) is not None:
            with _first_draws(recipe), recording:
                network = _built(recipe, config)
        if stored is not None:
            for name, parameter in network.named_parameters():
                if name not in lacking:
                    recording.give(parameter, partial(stored.rows, name))
            with recording:
                network.fill_in(lacking)
        weights = DeferredWeights(network, recording)
    except CannotDefer:
        return whole_network(recipe, config, shards, start_from), None
    if config.trains_beside:
        network.learn_beside()
    return network, weights


@contextmanager
def _first_draws(recipe: Recipe) -> Iterator[None]:
    """Draw weights on the CPU, whatever the training device, and leave the generator untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(recipe.train.seed, "weights"))
        yield


def _built(recipe: Recipe, config: LanguageModelConfig) -> Network:
    network = config.network.build()
    if (initialised_as := recipe.network.initialised_as) is not None:
        network.start_as(initialised_as)
    return network


def require_same_tokenizer(path: Path, config: LanguageModelConfig, source: str, shards: TokenShards) -> None:
    """Refuse a model whose own tokenizer differs from the data's."""
    if (tokenizer := interop.tokenizer_for(path, config)) is None:
        return
    try:
        shards.require_tokenizer(tokenizer)
    except ValueError as error:
        raise ValueError(
            f"start_from {source} has its own tokenizer, and {error}; prepare text with `bd3lm data prepare "
            f"SOURCE DATA --tokenizer {source}` and train on it with --data.path DATA"
        ) from None


def _lacking(
    network: Network, theirs: Mapping[str, Shape], path: Path, config: LanguageModelConfig, source: str
) -> frozenset[str]:
    """The parameters that a network has and the model it starts from lacks; a ValueError if it cannot start
    from it."""
    ours = {name: tuple(p.shape) for name, p in network.named_parameters()}
    lacking = network.may_lack & (ours.keys() - theirs.keys())
    require_same_network(theirs, {n: s for n, s in ours.items() if n not in lacking}, source)
    if differ := list(_told_by_no_shape(config.network, network.config)):
        raise ValueError(
            f"start_from must have the network of this recipe, got {source}, whose "
            f"{'; whose '.join(differ)}; --network.size {CHECKPOINT} takes the network from there"
        )
    return lacking


def _told_by_no_shape(theirs: NetworkConfig, ours: NetworkConfig) -> Iterator[str]:
    """Differences between networks of equal parameters, such as the base of rotary positions."""
    if ours.input_vocab_size > ours.vocab_size and theirs.input_vocab_size == theirs.vocab_size:
        theirs = theirs.with_mask_apart()
    for each in fields(ours):
        there, here = getattr(theirs, each.name, None), getattr(ours, each.name)
        if there != here and each.name not in {"vocab_size", "context", *ours.may_differ}:
            yield f"{each.name} {'are' if each.name == 'heads' else 'is'} {there} and not {here}"


def require_same_network(theirs: Mapping[str, Shape], ours: Mapping[str, Shape], source: str | None) -> None:
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
            f"({first}: {theirs.get(first, 'missing')} there, {ours.get(first, 'missing')} here){hint}; "
            f"--network.size {CHECKPOINT} takes the network from there"
        )


def _tied(shapes: Mapping[str, Shape]) -> str:
    return "untied" if _HEAD in shapes else "tied"
