"""The text of a run as sequences: documents end to end, or conversations packed into sequences."""

import sys
from collections.abc import Sequence

from bd3lm.data import OrderedBatches, PackedConversations, TokenShards, WrappedTokens
from bd3lm.data.sequences import Sequences
from bd3lm.io.terminal import say
from bd3lm.methods import Method
from bd3lm.objectives import TokenBatch
from bd3lm.runs.sections import DataRecipe


def sequences_of(recipe: DataRecipe, shards: TokenShards, split: str, method: Method) -> Sequences:
    """The sequences of a split, as its data and the method need them."""
    if shards.meta.inputs.chat is None:
        if recipe.skip_long:
            raise ValueError(
                f"data.skip_long is for conversations, and the data in {shards.folder} is text, where "
                "nothing is too long"
            )
        return WrappedTokens(
            shards, split, recipe.context, bos_eos=recipe.bos_eos, score_first=method.score_first
        )
    if recipe.bos_eos:
        raise ValueError(
            "data.bos_eos must be false for conversations, because the chat template sets how they begin"
        )
    return PackedConversations(
        shards, split, recipe.context, packing=method.packing(recipe.context), skip_long=recipe.skip_long
    )


def held_out_batches(recipe: DataRecipe, shards: TokenShards, method: Method) -> Sequence[TokenBatch]:
    """The held-out sequences of some data, in batches; none if nothing was held out."""
    split = _held_out_split(shards)
    if split is None:
        return ()
    sequences = sequences_of(recipe, shards, split, method)
    return OrderedBatches(sequences, rows=recipe.validation_batch, limit=recipe.validation_sequences)


def why_nothing_is_held_out(recipe: DataRecipe, shards: TokenShards, method: Method) -> str | None:
    """Why `held_out_batches` is empty: no text was held out, or too little; None if it is not empty."""
    split = _held_out_split(shards)
    if split is None:
        return f"the data in {shards.folder} has no valid or test split"
    sequences = sequences_of(recipe, shards, split, method)
    return None if len(sequences) else sequences.why_empty


def say_what_is_left_out(sequences: Sequences) -> None:
    """Report how many conversations are too long for the context, if any are."""
    if isinstance(sequences, PackedConversations) and sequences.skipped:
        number = sequences.shards.split(sequences.split).documents
        say(
            f"left out {sequences.skipped:,} of {number:,} conversations, which are longer than the context "
            f"of {sequences.context:,}",
            to=sys.stderr,
        )


def _held_out_split(shards: TokenShards) -> str | None:
    return next((name for name in ("valid", "test") if name in shards.splits), None)
