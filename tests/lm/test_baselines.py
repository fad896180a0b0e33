"""SEDD, D3PM and SSD-LM in a user's hands: they write, are scored where they can be, and refuse the rest."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bd3lm.evaluation import Figure
from bd3lm.lm import Gap, LanguageModel, Settings, load
from bd3lm.lm.generation import build_writer
from bd3lm.methods import D3PMMethod, Method
from bd3lm.models import Transformer
from bd3lm.sampling import Ancestral, BlockFinished, FirstHitting, Remasking, Started, Stopped, TokenRevealed
from tests.lm import (
    BYTES,
    CONTEXT,
    D3PM,
    D3PM_BLOCKS,
    D3PM_UNIFORM,
    END,
    METHODS,
    PROMPTS,
    SEDD,
    SEDD_BLOCKS,
    SEDD_UNIFORM,
    SSD,
    baseline,
    every_baseline,
    of_bytes,
    tokens_of,
)
from tests.lm.test_scoring import chi_square, log_p
from tests.oracles.likelihood import every_text
from tests.oracles.networks import CLEAN, MASK

pytestmark = pytest.mark.sweep(2)

FEW = Settings(steps=4, stop_at_eos=False)
TEMPLATES: list[Any] = [["ab", Gap(3), "cd"], ["", Gap(5)], ["a", Gap(1), "b", Gap(6), "c"]]
scored = pytest.mark.parametrize(
    "method", [SEDD, SEDD_UNIFORM, D3PM, D3PM_UNIFORM], ids=["SEDD", "SEDD uniform", "D3PM", "D3PM uniform"]
)


@pytest.mark.parametrize("model", [of_bytes(size) for size in METHODS.values()], ids=METHODS)
def test_blocks_and_autoregression_write_past_the_context(model: LanguageModel):
    assert model.config.method.writes_past_context
    (text,) = model.generate("", length=CONTEXT + 4, stop_at_eos=False)
    assert len(text.tokens) == CONTEXT + 4


@every_baseline
def test_a_method_knows_whether_it_writes_past_the_context(method: Method):
    model, longer = baseline(method), replace(FEW, length=CONTEXT + 4)
    if method.writes_past_context:
        assert len(model.generate("", longer)[0].tokens) == CONTEXT + 4
    else:
        with pytest.raises(
            ValueError, match=f"length must be at most {CONTEXT}, the network's whole context"
        ):
            model.generate("", longer)


def of_four(method: Method, **changes: Any) -> LanguageModel:
    """The same method for the tokens 0, 1 and 3, the mask being 2."""
    return baseline(
        replace(method, **changes), mask_id=MASK, tokenizer=None, vocab_size=4, context=4, gain=1.5
    )


# --- they write ---


@every_baseline
def test_texts_go_on_from_their_prompts(method):
    model = baseline(method)
    for prompt, found in zip(PROMPTS, model.generate(PROMPTS, FEW), strict=True):
        given = [END, *prompt.encode()]
        assert found.tokens[: len(given)] == given
        assert BYTES.mask_id not in found.tokens
        assert (len(found.tokens), found.sample.stopped_by) == (CONTEXT, "length")
        assert (found.sample.given, found.sample.written) == (len(given), CONTEXT - len(given))
        assert found.text == BYTES.decode(found.tokens)
        assert 0 < found.sample.evaluations <= 4 * 5
    assert len({tuple(each.tokens) for each in model.generate(["ab"] * 4, FEW)}) > 1


@every_baseline
@pytest.mark.parametrize("template", TEMPLATES, ids=str)
def test_templates_are_filled(method, template):
    given: list[int | None] = [END]
    for part in template:
        given += [None] * part.tokens if isinstance(part, Gap) else list(part.encode())
    (found,) = baseline(method).generate(template, FEW)
    assert len(found.tokens) == len(given)
    assert BYTES.mask_id not in found.tokens
    assert all(token in (None, kept) for token, kept in zip(given, found.tokens, strict=True))


@every_baseline
def test_a_text_is_the_same_alone_and_in_any_batch(method):
    model = baseline(method, end_logit=5.0)
    prompts, seeds = [*PROMPTS, "a", ["x", Gap(3), "y"]], list(range(7))
    settings = Settings(steps=4)
    alone = [model.generate([p], settings, seeds=[s])[0] for p, s in zip(prompts, seeds, strict=True)]
    assert len({len(one.tokens) for one in alone}) > 2  # they end at different times
    for batch_size in (3, 32):
        together = model.generate(prompts, settings, seeds=seeds, batch_size=batch_size)
        assert tokens_of(together) == tokens_of(alone)
        assert [each.sample.evaluations for each in together] == [each.sample.evaluations for each in alone]


@every_baseline
def test_the_end_token_ends_a_text(method):
    model = baseline(method, end_logit=5.0)
    reasons = set()
    whole = model.generate(PROMPTS, FEW)
    for short, long in zip(model.generate(PROMPTS, FEW, stop_at_eos=True), whole, strict=True):
        given = long.sample.given
        ends = [place for place, token in enumerate(long.tokens) if token == END and place >= given]
        assert short.tokens == long.tokens[: ends[0] + 1 if ends else CONTEXT]
        reasons.add(short.sample.stopped_by)
    assert "eos" in reasons


@every_baseline
def test_first_tokens_are_written_where_they_were_trained(method):
    (found,) = baseline(replace(method, score_first=True)).generate("", FEW)
    assert (found.sample.given, len(found.tokens)) == (0, CONTEXT)
    with pytest.raises(ValueError, match=r"^prompt 0: the first token of a text must be given"):
        baseline(method).stream([[]], FEW)


@every_baseline
def test_saved_and_loaded_it_writes_the_same(method, tmp_path: Path):
    model = baseline(method)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.config.method == method
    assert tokens_of(again.generate(PROMPTS, FEW)) == tokens_of(model.generate(PROMPTS, FEW))


@every_baseline
def test_events_lead_to_what_generate_gives(method):
    """Under uniform noise a token may be revealed again as another; elsewhere only where none was."""
    model = baseline(method)
    prompts = ["ab", "", ["x", Gap(5), "y"]]
    expected = model.generate(prompts, FEW)
    is_uniform = getattr(method, "process", None) == "uniform"
    texts: dict[int, list[int]] = {}
    stopped = 0
    for event in model.stream(prompts, FEW, batch_size=2):
        if isinstance(event, Started):
            given = event.request.given.tolist()
            texts[event.index] = given + [BYTES.mask_id] * (CONTEXT - len(given))
        elif isinstance(event, TokenRevealed):
            assert is_uniform or texts[event.index][event.position] == BYTES.mask_id
            texts[event.index][event.position] = event.token
        elif isinstance(event, Stopped):
            found = expected[event.index].tokens
            assert texts[event.index][: len(found)] == found == event.sample.tokens.tolist()
            stopped += 1
    assert stopped == 3


# --- how long ---


@pytest.mark.parametrize(
    "method", [SEDD, SEDD_UNIFORM, D3PM_UNIFORM], ids=["SEDD", "SEDD uniform", "D3PM uniform"]
)
def test_one_context_and_no_more(method):
    model = baseline(method)
    assert len(model.generate("ab", FEW, length=9)[0].tokens) == 9
    for prompts in (["a", "ab"], ["x" * 20]):
        with pytest.raises(
            ValueError, match="length must be at most 16, the network's whole context, got 24"
        ):
            model.stream(prompts, FEW, length=24)


@pytest.mark.parametrize(
    ("method", "pieces"), [(D3PM, [16, 24, 32, 33]), (SSD, [*range(4, 33, 4), 33])], ids=str
)
def test_past_the_context(method, pieces):
    """D3PM over masks slides by strides, SSD-LM goes on block by block."""
    model = baseline(method)
    short, long = (model.generate("ab", FEW, length=length)[0] for length in (9, 33))
    assert (len(short.tokens), len(long.tokens)) == (9, 33)
    assert long.tokens[:3] == [END, 97, 98]
    assert BYTES.mask_id not in long.tokens
    ends = [e.stop for e in model.stream("ab", FEW, length=33) if isinstance(e, BlockFinished)]
    assert ends == pieces
    (prompted,) = model.generate("x" * 20, FEW, length=33)
    assert prompted.tokens[:21] == [END, *b"x" * 20]
    assert prompted.sample.written == 12


def test_strides_of_d3pm_over_masks():
    ends = [
        e.stop for e in baseline(D3PM).stream("ab", FEW, length=24, stride=3) if isinstance(e, BlockFinished)
    ]
    assert ends == [16, 19, 22, 24]


def test_ssd_lm_without_a_cache_writes_the_same_inside_the_context():
    model = baseline(SSD)
    cached = model.generate(PROMPTS, FEW)
    assert tokens_of(model.generate(PROMPTS, FEW, cache=False)) == tokens_of(cached)
    assert {each.sample.fill_passes for each in model.generate(PROMPTS, FEW, cache=False)} == {0}
    assert max(each.sample.fill_passes for each in cached) > 0


# --- what can be set ---


def test_the_nucleus_of_the_paper():
    for method, papers in ((SEDD, 0.99), (SEDD_UNIFORM, 0.99), (D3PM, 0.9), (D3PM_UNIFORM, 0.9), (SSD, 0.95)):
        assert method.settled(Settings()).top_p == papers
        assert method.settled(Settings(top_p=0.3)).top_p == 0.3
        model = baseline(method)
        default = tokens_of(model.generate(PROMPTS, FEW))
        assert tokens_of(model.generate(PROMPTS, FEW, top_p=papers)) == default
        assert tokens_of(model.generate(PROMPTS, FEW, top_p=0.05)) != default


def test_the_steps_of_the_paper():
    """SEDD has one more, which takes away the noise that is left."""

    def steps(method: Method, **changes: Any) -> int:
        model = baseline(method)
        writer: Any = build_writer(model.network, model.config, Settings(**changes))
        return writer.unmasking.steps if method is D3PM else writer.steps

    assert [steps(method) for method in (SEDD, SEDD_UNIFORM, D3PM, D3PM_UNIFORM, SSD)] == [
        1001,
        1001,
        6,
        6,
        1000,
    ]
    assert [steps(m, steps=7) for m in (SEDD, SEDD_UNIFORM, D3PM, D3PM_UNIFORM, SSD)] == [8, 8, 7, 7, 7]


def test_passes_follow_the_steps():
    """A network that is told the time is asked at every step; over masks only while there are any."""
    for steps in (1, 3):
        passes = {
            name: baseline(method).generate("ab", FEW, steps=steps, length=13)[0].sample.evaluations
            for name, method in (("sedd", SEDD_UNIFORM), ("d3pm", D3PM_UNIFORM), ("ssd", SSD))
        }
        assert passes == {"sedd": steps + 1, "d3pm": steps, "ssd": steps * 4}
        for method in (SEDD, D3PM):
            assert 1 <= baseline(method).generate("ab", FEW, steps=steps)[0].sample.evaluations <= steps + 1


def test_projections():
    """They differ in what they make of the same answer; greedy leaves no chance but the noise."""
    model = baseline(SSD)
    by = {
        name: tokens_of(model.generate(PROMPTS, FEW, projection=name, steps=8))
        for name in ("sampling", "greedy", "multi_hot")
    }
    assert by["sampling"] == tokens_of(model.generate(PROMPTS, FEW, steps=8))
    assert by["sampling"] != by["greedy"] != by["multi_hot"] != by["sampling"]


@pytest.mark.parametrize(
    ("method", "changes", "why"),
    [
        *(
            (method, changes, "SEDD writes a whole context")
            for method in (SEDD, SEDD_UNIFORM)
            for changes in (
                {"unmasking": Ancestral(5)},
                {"projection": "greedy"},
                {"stride": 4},
                {"cache": False},
            )
        ),
        *(
            (method, changes, "D3PM takes its own steps")
            for method in (D3PM, D3PM_UNIFORM)
            for changes in (
                {"unmasking": Ancestral(5)},
                {"unmasking": Remasking(steps=5)},
                {"projection": "multi_hot"},
            )
        ),
        (D3PM, {"cache": False}, "a network of one block has nothing to cache"),
        (D3PM_UNIFORM, {"stride": 4}, "uniform noise covers a whole context"),
        (D3PM_UNIFORM, {"cache": False}, "uniform noise covers a whole context"),
        (D3PM_BLOCKS, {"stride": 4}, "this model writes blocks of 4"),
        (SEDD_BLOCKS, {"stride": 4}, "SEDD writes blocks of 4 in its own steps"),
        *(
            (SSD, changes, "SSD-LM draws with its projection")
            for changes in (
                {"unmasking": FirstHitting(2)},
                {"stride": 4},
                {"temperature": 0.5},
                {"top_k": 3},
                {"top_p_rule": "exclusive"},
            )
        ),
    ],
    ids=str,
)
def test_what_would_do_nothing_is_refused(method, changes, why):
    (name,) = changes
    with pytest.raises(ValueError, match=rf"^{name} must be left at its default, got .*: {why}$"):
        baseline(method).stream("a", FEW, **changes)


@scored
@pytest.mark.parametrize(
    "changes", [{"temperature": 0.3}, {"top_k": 1}, {"top_p_rule": "exclusive"}], ids=str
)
def test_sharpening_does_something(method, changes):
    model, settings = baseline(method), replace(FEW, top_p=0.1)
    assert tokens_of(model.generate(PROMPTS, settings, **changes)) != tokens_of(
        model.generate(PROMPTS, settings)
    )


@every_baseline
@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_steps_are_whole_numbers(method, steps):
    with pytest.raises(ValueError, match=f"steps must be a whole number from 1 on, got {steps}"):
        baseline(method).stream("a", steps=steps)


# --- how likely a text is ---


@scored
def test_a_text_is_scored_by_the_nelbo(method):
    model = baseline(method)
    whole = ["ab" * 7 + "c", "hello" * 3, "x" * 15]
    texts = whole if getattr(method, "process", None) == "uniform" else ["ab", "hello", "x" * 15]
    alone = [model.log_likelihood(text)[0] for text in texts]
    assert [each.figure for each in alone] == [Figure("nelbo", "bound")] * 3
    assert [each.tokens for each in alone] == [len(text) for text in texts]
    assert all(math.isfinite(each.log_p) and each.log_p < 0 for each in alone)
    assert alone == [model.log_likelihood(text, estimator="nelbo")[0] for text in texts]
    for batch_size in (1, 5, 16):
        together = model.log_likelihood(texts, batch_size=batch_size)
        assert log_p(together) == pytest.approx(log_p(alone), rel=1e-12)
    assert log_p(model.log_likelihood(texts[::-1]))[::-1] == pytest.approx(log_p(alone), rel=1e-12)
    assert log_p(model.log_likelihood(texts, seed=1)) != log_p(alone)


@pytest.fixture
def seen(monkeypatch) -> list[Tensor]:
    """The tokens of every call of a network."""
    calls: list[Tensor] = []
    forward = Transformer.forward

    def watched(network: Transformer, tokens: Tensor, **options: Any) -> Tensor:
        calls.append(tokens.clone())
        return forward(network, tokens, **options)

    monkeypatch.setattr(Transformer, "forward", watched)
    return calls


@pytest.mark.parametrize("method", [SEDD, D3PM], ids=["SEDD", "D3PM"])
def test_over_masks_a_text_stands_in_a_whole_context(method, seen):
    """As when it is written: past its end there are masks."""
    baseline(method).log_likelihood("abc", samples=8)
    assert {tuple(call.shape) for call in seen} == {(8, CONTEXT)}
    tokens = torch.cat(seen)
    assert (tokens[:, 0] == END).all()
    assert (tokens[:, 4:] == BYTES.mask_id).all()
    for place, byte in enumerate(b"abc", start=1):
        assert set(tokens[:, place].tolist()) <= {byte, BYTES.mask_id}
    assert (tokens[:, 1:4] == BYTES.mask_id).any()
    assert (tokens[:, 1:4] != BYTES.mask_id).any()


@pytest.mark.parametrize("method", [SEDD_UNIFORM, D3PM_UNIFORM], ids=["SEDD", "D3PM"])
def test_under_uniform_noise_a_text_fills_the_context(method, seen):
    """The sampler writes whole contexts and cuts them: of a shorter text nobody knows the likelihood."""
    model = baseline(method)
    model.log_likelihood("a" * (CONTEXT - 1), samples=8)
    assert {tuple(call.shape) for call in seen} == {(8, CONTEXT)}
    tokens = torch.cat(seen)
    assert (tokens[:, 0] == END).all()
    assert len(set(tokens[:, 1:].flatten().tolist())) > 5
    with pytest.raises(ValueError, match=rf"text 1 must have {CONTEXT} tokens, .* uniform noise.*, got 4"):
        model.log_likelihood(["a" * (CONTEXT - 1), "abc"])


@pytest.mark.parametrize("method", [SEDD_BLOCKS, D3PM_BLOCKS], ids=["SEDD", "D3PM"])
def test_under_uniform_noise_in_blocks_a_text_is_whole_blocks(method):
    """And the likelihood of a text of fewer blocks is its own, whatever stands in the batch beside it."""
    model = baseline(method)
    short, long = "abc", "a" * (CONTEXT - 1)
    alone, beside = model.log_likelihood([short], samples=4), model.log_likelihood([short, long], samples=4)
    assert all(each.log_p < 0 and each.tokens == 3 for each in (alone[0], beside[0]))
    with pytest.raises(ValueError, match=r"text 0 must have a multiple of 4 tokens, whole blocks.*, got 6"):
        model.log_likelihood("abcde")


def test_in_one_step_d3pm_over_masks_is_exact_and_writes_as_it_scores():
    """All is hidden, and revealed at once: the bound has nothing left to lose."""
    model, rows = of_four(D3PM, steps=1), 1000
    for length in (3, 4):
        texts = every_text(CLEAN, length)
        texts = texts[texts[:, 0] == 1]
        p = [math.exp(each.log_p) for each in model.log_likelihood(texts, samples=1)]
        assert sum(p) == pytest.approx(1.0, abs=1e-9)
        found = model.generate([[1]] * rows, top_p=1.0, length=length, batch_size=rows)
        counts = Counter(tuple(each.tokens) for each in found)
        observed = [counts[tuple(text)] for text in texts.tolist()]
        assert sum(observed) == rows
        assert chi_square(observed, [rows * each for each in p]) > 0.01


@pytest.mark.parametrize(
    "method",
    [D3PM, D3PM_UNIFORM, replace(D3PM, block_size=2), replace(D3PM_UNIFORM, block_size=2)],
    ids=["absorbing", "uniform", "absorbing in blocks", "uniform in blocks"],
)
def test_no_text_of_d3pm_is_written_less_often_than_its_bound_says(method):
    model, rows = of_four(method, steps=3), 4000
    assert isinstance(model.config.method, D3PMMethod)
    texts = every_text(CLEAN, 4)
    texts = texts[texts[:, 0] == 1]
    bounds = [math.exp(each.log_p) for each in model.log_likelihood(texts, samples=300, batch_size=300)]
    assert 0.1 < sum(bounds) < 1.0  # a bound, and not an empty one
    found = model.generate([[1]] * rows, top_p=1.0, batch_size=rows)
    counts = Counter(tuple(each.tokens) for each in found)
    for text, bound in zip(texts.tolist(), bounds, strict=True):
        assert counts[tuple(text)] / rows > bound - 4 * math.sqrt(bound / rows)


@pytest.mark.parametrize(
    "method",
    [SEDD, SEDD_UNIFORM, replace(SEDD_UNIFORM, block_size=2)],
    ids=["absorbing", "uniform", "blocks"],
)
def test_the_bounds_of_sedd_leave_room(method):
    model = of_four(method)
    texts = every_text(CLEAN, 4)
    texts = texts[texts[:, 0] == 1]
    bounds = [math.exp(each.log_p) for each in model.log_likelihood(texts, samples=300, batch_size=300)]
    assert 0.0 < sum(bounds) < 1.0


@scored
@pytest.mark.parametrize("estimator", ["exact", "counts", "iw:2"])
def test_only_a_bound_is_known(method, estimator):
    of_d3pm = "'nelbo' or 'nelbo:ordered'"
    allowed = of_d3pm if method.kind == "d3pm" else "'nelbo', 'nelbo:ordered' or 'nelbo:reference'"
    allowed += f" for method kind {method.kind}"
    said = f"estimator must be {allowed}, whose likelihood is only bounded, got '{estimator}'"
    with pytest.raises(ValueError, match=said):
        baseline(method).log_likelihood("ab", estimator=estimator)


@pytest.mark.parametrize("estimator", ["auto", "paper", "exact", "nelbo", "counts", "iw:2"])
def test_ssd_lm_has_no_likelihood(estimator):
    with pytest.raises(
        ValueError, match=r"SSD-LM \(method kind simplex\) has neither a likelihood nor a bound on one"
    ):
        baseline(SSD).log_likelihood("ab", estimator=estimator)


@scored
def test_texts_that_cannot_be_scored(method):
    model = baseline(method)
    for texts, said in (
        ("x" * 16, "text 0 must have 2 to 16 tokens .*, got 17"),
        (["a", ["a", Gap(2)]], "text 1 must have no gaps"),
        ([5, 258], r"token ids must lie in 0\.\.257, got 258"),
        ([], "texts must hold at least one text, got none"),
    ):
        with pytest.raises(ValueError, match=said):
            model.log_likelihood(texts)
    noisy = baseline(method, dropout=0.5)
    noisy.network.train()
    with pytest.raises(ValueError, match="evaluation mode"):
        noisy.log_likelihood("ab")
    with pytest.raises(ValueError, match="evaluation mode"):
        noisy.stream("ab", FEW)


@every_baseline
def test_weights_that_are_no_numbers_write_nothing(method):
    model = baseline(method)
    with torch.no_grad():
        model.network.output.bias[7] = math.nan
    with pytest.raises(
        FloatingPointError, match="text 0 cannot be written: the model's probabilities are not "
    ):
        model.generate("a", steps=3)
