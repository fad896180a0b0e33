"""Which tokens of a conversation belong to answers, compared with `transformers` and with sampling."""

import json
import random
from typing import Any

import pytest

from bd3lm.data import Tokenizer, byte_tokenizer, train_bpe
from bd3lm.data.chat import Message, _specials, answered, continuation, conversation
from bd3lm.data.templates import PLAIN
from tests.data_room.documents import random_texts
from tests.data_room.templates import CHATML, FAMILIES, MISTRAL, THINKING

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>", "</s>")


def with_specials(plain: Tokenizer, *, end: str = "</s>") -> Tokenizer:
    """The same tokenizer with the special tokens of some families, and a word that only looks like one."""
    spec = json.loads(plain.spec)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for name in SPECIALS:
        new = 1 + max(each["id"] for each in spec["added_tokens"])
        spec["added_tokens"].append({"id": new, "content": name, "special": True, **flags})
    places = {each["content"]: each["id"] for each in spec["added_tokens"]}
    return Tokenizer(json.dumps(spec), mask_id=plain.mask_id, eos_id=places[end], bos_id=places["<s>"])


BYTES = with_specials(byte_tokenizer())
BPE = with_specials(train_bpe([*random_texts(200), "Assistant:\nUser:\n\n" * 20], 400))
TURNS = [
    [("user", "hello"), ("assistant", "hi")],
    [("user", "  a b "), ("assistant", " yes \n"), ("user", "why? {{ 7 * 7 }}"), ("assistant", "\nbecause")],
    [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c ☂"),
        ("assistant", "d\n\n"),
        ("user", "0"),
        ("assistant", "1"),
    ],
]


def of(turns: list[tuple[str, str]]) -> list[Message]:
    return [Message(*turn) for turn in turns]


def by_transformers(template: str, turns: list[tuple[str, str]], tokenizer: Tokenizer) -> Any:
    transformers = pytest.importorskip("transformers")
    names = {place: name for name, place in _specials(tokenizer).items()}
    backend = type(tokenizer._backend).from_str(tokenizer.spec)  # their names are the tokens here
    other = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=names[tokenizer.bos_id],
        eos_token=names[tokenizer.eos_id],
        chat_template=template,
    )
    return other.apply_chat_template(
        [{"role": role, "content": content} for role, content in turns],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("turns", TURNS, ids=len)
@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "BPE"])
def test_answers_are_those_that_transformers_marks(family, turns, tokenizer):
    expected = by_transformers(FAMILIES[family], turns, tokenizer)
    ids, mask = expected["input_ids"], expected["assistant_masks"]
    tokens, learned = answered(FAMILIES[family], of(turns), tokenizer)
    end = len(mask) - mask[::-1].index(1)  # theirs continues after the last answer
    assert tokens[-1] == tokenizer.eos_id
    if len(tokens) == end + 1:  # the family's end token, then the tokenizer's
        assert ids[end - 1] != tokenizer.eos_id
        tokens, learned = tokens[:-1], learned[:-1]
    assert tokenizer.decode(tokens, skip_special=False) == tokenizer.decode(ids[:end], skip_special=False)
    if tokenizer is BYTES:  # a BPE may split text where an answer begins
        assert tokens == ids[:end]
        assert learned == [bool(each) for each in mask[:end]]


@pytest.mark.parametrize("template", [*FAMILIES.values(), PLAIN], ids=[*FAMILIES, "plain"])
@pytest.mark.parametrize("turns", TURNS, ids=len)
@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "BPE"])
def test_tokens_before_an_answer_are_those_that_sampling_reads(template, turns, tokenizer):
    messages = of(turns)
    tokens, learned = answered(template, messages, tokenizer)
    begins = [place for place, flag in enumerate(learned) if flag and not learned[place - 1]]
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    assert len(begins) == len(places)
    for begin, place in zip(begins, places, strict=True):
        assert tokens[:begin] == conversation(template, messages[:place], tokenizer)
        ends = learned[begin:].index(False) + begin if False in learned[begin:] else len(tokens)
        written = tokenizer.decode(tokens[begin:ends])
        assert written.strip() == messages[place].content.strip()
        assert tokens[ends - 1] in _specials(tokenizer).values()


def test_the_last_answer_alone():
    messages = of(TURNS[2])
    tokens, learned = answered(CHATML, messages, BYTES, answers="last")
    assert tokens == answered(CHATML, messages, BYTES).tokens
    assert BYTES.decode([t for t, flag in zip(tokens, learned, strict=True) if flag]) == "1"


def test_a_template_without_end_tokens_gets_one_after_the_last_answer():
    """Sampling reads nothing between answers, so nothing learnable ends there."""
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = of(TURNS[2])
    tokens, learned = answered(template, messages, BYTES)
    assert BYTES.decode(tokens, skip_special=False).endswith("user: 0\nassistant: 1</s>")
    said = [BYTES.decode([t], skip_special=False) for t, flag in zip(tokens, learned, strict=True) if flag]
    assert "".join(said) == "bd1</s>"  # except for blanks at its ends
    lacking = Tokenizer(BYTES.spec, mask_id=BYTES.mask_id, eos_id=None, bos_id=None)
    with pytest.raises(ValueError, match="no special token after an answer, and the tokenizer has no end"):
        answered(template, messages, lacking)


def test_thoughts_that_a_template_drops_later_are_learned_in_the_last_answer():
    """As sampling reads it: without the thoughts of earlier answers. So not all answers can be learned."""
    turns = [
        ("user", "a"),
        ("assistant", "<think>1</think>\nb"),
        ("user", "c"),
        ("assistant", "<think>2</think>\nd"),
    ]
    assert conversation(THINKING, of(turns[:3]), BYTES) == conversation(
        CHATML, of([turns[0], ("assistant", "b"), turns[2]]), BYTES
    )
    tokens, learned = answered(THINKING, of(turns), BYTES, answers="last")
    begin = learned.index(True)
    assert tokens[:begin] == conversation(THINKING, of(turns[:3]), BYTES)
    assert BYTES.decode(tokens[begin:]) == "<think>2</think>\nd"
    with pytest.raises(ValueError, match="changes message 1, an answer") as caught:
        answered(THINKING, of(turns), BYTES)
    assert "--answers last" in str(caught.value)


def test_a_template_that_rewrites_past_turns_is_refused():
    template = "{{ messages | length }}" + CHATML
    with pytest.raises(ValueError, match=r"before message 1, an answer, differently .* \(--answers last\)"):
        answered(template, of(TURNS[1]), BYTES)
    with pytest.raises(ValueError, match="asks for message 3, the last answer, with other words"):
        answered(template, of(TURNS[1]), BYTES, answers="last")
    with pytest.raises(ValueError, match="roles must alternate"):
        answered(MISTRAL, of([("user", "a"), ("user", "b"), ("assistant", "c")]), BYTES)
    with pytest.raises(ValueError, match="must end with an assistant message"):
        answered(CHATML, of([("user", "a")]), BYTES)


@pytest.mark.parametrize("template", [*FAMILIES.values(), PLAIN], ids=[*FAMILIES, "plain"])
def test_no_text_makes_special_tokens_or_moves_an_answer(template):
    """Names of special tokens, our placeholders, programs: the content is written verbatim."""
    chance = random.Random(0)
    parts = [
        *SPECIALS,
        "<|im_",
        "end|>",
        "\ue000",
        "\ue1000\ue100",
        "\ue0001\ue001",
        "{{ x }}",
        "a",
        " ",
        "\ud800",
        "0",
    ]
    kinds = set()
    for _ in range(60):
        turns = [
            (role, "x" + "".join(chance.choices(parts, k=chance.randint(1, 6))) + "x")
            for role in ("user", "assistant") * 2
        ]
        plain = [(role, "x") for role, _ in turns]
        tokens, learned = answered(template, of(turns), BYTES)
        expected = answered(template, of(plain), BYTES)
        specials = set(_specials(BYTES).values())
        assert [t for t in tokens if t in specials] == [t for t in expected.tokens if t in specials]
        kinds.add(len(tokens))
        said = [each.replace("\ud800", "\ufffd") for role, each in turns if role == "assistant"]
        written = BYTES.decode([t for t, flag in zip(tokens, learned, strict=True) if flag])
        assert written.replace(" x", "x").replace(" ", "") == "".join(said).replace(" x", "x").replace(
            " ", ""
        )
    assert len(kinds) > 5


def test_a_continuation_keeps_the_tokens_before_it():
    for seed in range(200):
        chance = random.Random(seed)
        before, text = ("".join(chance.choices("ab \n:theof", k=chance.randint(0, 6))) for _ in range(2))
        ids = continuation(before, text, BPE)
        assert BPE.decode([*BPE.encode(before), *ids]) == before + text
        together = BPE.encode(before + text)
        if together[: len(BPE.encode(before))] == BPE.encode(before):
            assert [*BPE.encode(before), *ids] == together
