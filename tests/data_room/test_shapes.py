"""The forms of conversations in open data sets, and rows that are not conversations."""

from typing import Any

import pytest

from bd3lm.data.shapes import FIELDS, ROLES, conversation_of

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOLD = {"role": "system", "content": "s"}


def turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in conversation_of(row).messages]


@pytest.mark.parametrize(
    ("row", "system"),
    [
        ({"messages": [ASKED, ANSWERED]}, False),
        ({"messages": [TOLD, ASKED, ANSWERED], "id": 7}, True),
        ({"messages": [TOLD, ASKED, ANSWERED], "system": "s"}, True),
        ({"messages": [ASKED, ANSWERED], "system": "s"}, True),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, False),
        ({"conversation": [{"from": "Human", "value": "q"}, {"from": "bot", "value": "a"}]}, False),
        ({"conversations": [ASKED, ANSWERED], "system": ""}, False),
        ({"conversations": [{"from": "system", "value": "s"}, ASKED, ANSWERED]}, True),
        ({"prompt": "q", "completion": "a"}, False),
        ({"prompt": [TOLD, ASKED], "completion": [ANSWERED]}, True),
        ({"prompt": "q", "response": "a"}, False),
        ({"instruction": "q", "output": "a"}, False),
        ({"instruction": "q", "input": "", "output": "a", "text": "…"}, False),
        ({"instruction": "q", "input": None, "output": "a", "system": "s"}, True),
        ({"question": "q", "answer": "a"}, False),
        ({"messages": None, "question": "q", "answer": "a"}, False),
    ],
)
def test_every_shape_is_the_same_conversation(row, system):
    expected = [("user", "q"), ("assistant", "a")]
    assert turns(row) == [("system", "s")] * system + expected
    assert conversation_of(row).is_text == (isinstance(row.get("prompt"), str) and not system)
    assert row.keys() & FIELDS


def test_an_instruction_comes_with_its_input():
    assert turns({"instruction": "Sum up.", "input": "A text.", "output": "T."}) == [
        ("user", "Sum up.\n\nA text."),
        ("assistant", "T."),
    ]


@pytest.mark.parametrize("role", ROLES)
def test_every_name_of_a_role_is_known(role):
    row = {"messages": [TOLD, {"role": role.upper(), "content": "x"}, ASKED, ANSWERED]}
    assert turns(row)[1] == (ROLES[role], "x")


def test_messages_after_the_last_answer_are_left_out():
    found = conversation_of({"messages": [ASKED, ANSWERED, ASKED, TOLD]})
    assert [each.content for each in found.messages] == ["q", "a"]
    assert found.cut == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1], "must be an object with fields, got list"),
        ({}, "must have the fields of a conversation \\(messages; conversations; .*\\), got none"),
        ({"text": "x", "id": 1}, "got text, id"),
        ({"prompt": "q", "completion": None}, "got prompt, completion"),
        ({"messages": "q"}, "must have a list of messages in its field 'messages', got str"),
        ({"messages": []}, "in its field 'messages', got an empty list"),
        (
            {"messages": [ASKED, ANSWERED] * 1_001},
            "at most 2,000 messages in its field 'messages', got 2,002",
        ),
        ({"messages": [ASKED, "a"]}, r"must have an object as messages\[1\], got str"),
        (
            {"messages": [{"content": "q"}, ANSWERED]},
            r"role and content, or from and value, in messages\[0\]",
        ),
        ({"messages": [{"role": "tool", "content": "q"}]}, r"messages\[0\].role, got 'tool'"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, r"messages\[0\].role, got \['user'\]"),
        ({"messages": [ASKED, {"role": "assistant", "content": " \n"}]}, r"messages\[1\].content, got none"),
        ({"messages": [ASKED, {"role": "assistant", "content": 3}]}, r"messages\[1\].content, got int"),
        ({"conversations": [{"from": "human", "value": None}]}, r"conversations\[0\].value, got NoneType"),
        ({"messages": [TOLD, ASKED]}, "has no message of the assistant, so there is nothing to learn"),
        ({"messages": [ANSWERED, ASKED, ANSWERED]}, "begins with an answer"),
        ({"prompt": "", "completion": "a"}, "must have text as prompt, got none"),
        ({"prompt": "q", "completion": "  "}, "must have text as completion, got none"),
        ({"prompt": "q", "completion": [ANSWERED]}, "list of messages in its field 'prompt', got str"),
        ({"instruction": "q", "input": 3, "output": "a"}, "must have text in its field 'input', got int"),
        ({"question": 1, "answer": "a"}, "list of messages in its field 'question', got int"),
        ({"system": 1, "question": "q", "answer": "a"}, "must have text as system, got int"),
    ],
)
def test_other_rows_are_refused_in_one_line(row, said):
    with pytest.raises(ValueError, match=said) as caught:
        conversation_of(row)
    assert "\n" not in str(caught.value)
