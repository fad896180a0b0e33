"""What a run learns of conversations: answers alone, each as if its conversation were alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bd3lm.data import (
    BatchStream,
    ChatFormat,
    ConversationCorpus,
    PackedConversations,
    TokenShards,
    byte_tokenizer,
    prepare,
)
from bd3lm.data.templates import PLAIN
from bd3lm.methods import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    DrafterMethod,
    Frame,
    LanguageModelConfig,
    Method,
)
from bd3lm.models import Transformer, TransformerConfig
from bd3lm.objectives import TokenBatch, TokenLoss
from bd3lm.runs.plan import plan_run
from bd3lm.runs.recipe import recipe_from_dict
from bd3lm.runs.tuning import Reading, outline, steps_of
from tests.data_room.chats import chats, written
from tests.tiny_recipes import BLOCK, plain

CONTEXT = 192
METHODS: dict[str, Method] = {
    "ar": AutoregressiveMethod(),
    "drafter": DrafterMethod(masks=3),
    "blocks": BlockDiffusionMethod(block_size=4),
    "joint": BlockDiffusionMethod(block_size=16, causal_clean=True, joint=True),
    "one block": BlockDiffusionMethod(),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = tmp_path_factory.mktemp("chats")
    file = written(folder / "chats.jsonl", chats(24, words=2))
    corpus = ConversationCorpus(file, held_out=4)
    return prepare(corpus, byte_tokenizer(), folder / "out", chat=ChatFormat(template=PLAIN))


def network(method: Method) -> Transformer:
    torch.manual_seed(0)
    adds = {"additions": 4} if method.trains_beside else {}
    config = TransformerConfig(
        vocab_size=258, layers=2, hidden=32, heads=2, context=CONTEXT, dropout=0.0, **adds
    )
    made = Transformer(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.1)
    return made.eval()


def loss_of(method: Method, model: Transformer, batch: TokenBatch, seed: int = 0) -> TokenLoss:
    frame = Frame.of(model.config, mask_id=257)
    objective = method.objective(method.tuned_by(frame), frame)
    return objective.loss(model, batch, objective.seeded_draws(batch, seed))


def packed(shards: TokenShards, method: Method) -> PackedConversations:
    return PackedConversations(shards, "train", CONTEXT, packing=method.packing(CONTEXT), skip_long=True)


@pytest.mark.parametrize("name", METHODS)
def test_only_answers_weigh_and_prompts_carry_no_loss(name: str, shards: TokenShards) -> None:
    """Every nat is of a token of an answer, of its end, or of the end tokens that fill its last block."""
    method = METHODS[name]
    rows, model = packed(shards, method), network(method)
    for place in range(0, len(rows), 3):
        batch = rows.batch([place])
        loss = loss_of(method, model, batch)
        assert (loss.nats[~batch.scored] == 0).all()
        assert (loss.weight[~batch.scored] == 0).all()
        assert loss.nats[batch.scored].sum() > 0
        begin = 0
        for document in rows.documents(place):
            first, last = (int(rows._starts[document + step]) for step in (0, 1))
            answers = torch.from_numpy(shards.answers("train", first, last))
            here = slice(begin, begin + last - first)
            assert not (batch.scored[0, here] & ~answers).any()
            begin += -(-(last - first) // rows.packing.unit) * rows.packing.unit


@pytest.mark.parametrize("name", METHODS)
def test_conversations_of_a_sequence_do_not_see_each_other(name: str, shards: TokenShards) -> None:
    """Whatever is said in all the others, the nats of one stay as they are, to rounding."""
    method = METHODS[name]
    rows, model = packed(shards, method), network(method)
    places = [each for each in range(len(rows)) if len(rows.documents(each)) > (name != "one block")]
    for place in places[:2]:
        batch = rows.batch([place])
        before = loss_of(method, model, batch)
        assert batch.documents is not None
        for document in range(len(rows.documents(place))):
            own = batch.documents == document
            noise = torch.randint(257, batch.tokens.shape, generator=torch.Generator().manual_seed(document))
            other = TokenBatch(
                torch.where(own, batch.tokens, noise), batch.scored, batch.absent, batch.documents
            )
            after = loss_of(method, model, other)
            torch.testing.assert_close(after.nats[own], before.nats[own], rtol=1e-4, atol=1e-5)
            if len(rows.documents(place)) > 1:
                assert not torch.allclose(after.nats[~own], before.nats[~own])


@pytest.mark.parametrize("name", ["ar", "drafter"])
def test_a_conversation_pays_among_others_what_it_pays_alone(name: str, shards: TokenShards) -> None:
    """Of methods that draw no masks; of the others `tests/objectives/test_documents.py` shows it."""
    method = METHODS[name]
    rows, model = packed(shards, method), network(method)
    place = max(range(len(rows)), key=lambda each: len(rows.documents(each)))
    batch = rows.batch([place])
    assert batch.documents is not None
    together = loss_of(method, model, batch)
    for document in range(len(rows.documents(place))):
        here = batch.documents[0] == document
        alone = TokenBatch(batch.tokens[:, here], batch.scored[:, here])
        found = loss_of(method, model, alone)
        torch.testing.assert_close(found.nats[0], together.nats[0, here], rtol=1e-4, atol=1e-5)


def test_the_order_is_that_of_the_seed_and_a_run_reads_it(shards: TokenShards, tmp_path: Path) -> None:
    settings: dict[str, Any] = plain(shards.folder, BLOCK, {"data": {"context": CONTEXT, "skip_long": True}})
    recipe = recipe_from_dict(settings, where="here")
    run = plan_run(recipe, tmp_path / "run").build()
    rows = PackedConversations(
        shards, "train", CONTEXT, packing=recipe.method.packing(CONTEXT), skip_long=True
    )
    expected = BatchStream(rows, rows=4, seed=recipe.train.seed)
    for step in range(3):
        one, other = run.trainer.data.batch(step), expected.batch(step)
        for name in ("tokens", "scored", "absent", "documents"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    held_out = [batch for batch in run.held_out.batches if batch.documents is not None]
    assert sum(len(batch.tokens) for batch in held_out) == len(
        PackedConversations(shards, "valid", CONTEXT, packing=recipe.method.packing(CONTEXT), skip_long=True)
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"context": 16}}, "more than the context of 16, and so have"),
        (
            {"data": {"context": CONTEXT, "skip_long": True, "bos_eos": True}},
            "bos_eos must be false for conv",
        ),
        (
            {"data": {"context": CONTEXT, "skip_long": True}, "method": {"kind": "score_entropy"}},
            "only autoregressive models, drafters and block diffusion can learn conversations, got ",
        ),
        ({"data": {"context": 64, "most_context": 32}}, "most_context must be at least the context of 64"),
    ],
)
def test_what_does_not_fit_conversations_is_refused(changes, said, shards, tmp_path) -> None:
    with pytest.raises(ValueError, match=said):
        plan_run(recipe_from_dict(plain(shards.folder, changes), where="here"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nothing_of_a_text_is_too_long(tmp_path: Path) -> None:
    from tests.tiny_recipes import prepared

    data = prepared(tmp_path / "text")
    recipe = recipe_from_dict(plain(data, {"data": {"skip_long": True}}), where="here")
    with pytest.raises(ValueError, match=r"data\.skip_long is for conversations, and the data in .* is text"):
        plan_run(recipe, tmp_path / "run")


@pytest.mark.parametrize(
    ("most", "unit", "longest", "context"),
    [
        (8192, 1, 100, 512),
        (8192, 1, 513, 544),
        (8192, 4, 2001, 2016),
        (8192, 3, 600, 672),  # of 3 and of 32
        (520, 3, 519, 519),  # there is no room for a tile
        (256, 4, 100, 256),
        (96, 4, 90, 96),
        (1000, 16, 2000, 992),
        (256, 256, 10, 256),  # one block
    ],
)
def test_a_sequence_is_as_long_as_is_needed(most: int, unit: int, longest: int, context: int) -> None:
    reading = Reading(most=most, unit=unit)
    assert reading.context(longest) == context
    assert context % unit == 0
    assert context <= most
    assert reading.longest <= most


def test_what_a_model_reads_is_what_its_method_asks() -> None:
    shape = TransformerConfig(vocab_size=258, layers=1, hidden=16, heads=2, context=64)
    for method, unit in ((METHODS["ar"], 1), (METHODS["blocks"], 4), (METHODS["one block"], 64)):
        model = LanguageModelConfig(network=shape, method=method, mask_id=257)
        assert Reading.of(model) == Reading(most=64, unit=unit)
    assert [steps_of(3, 10, 4), steps_of(0.1, 10, 16)] == [8, 1]
    assert outline()["network"] == {"size": "checkpoint", "dropout": 0.0}
