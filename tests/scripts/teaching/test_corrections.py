"""Corrections in all forms of SFT, and those that contradict each other."""

import pytest

from common.errors import UserError
from scripts.teaching.corrections import merged, read_corrections
from tests.conftest import write_jsonl


def turn(role: str, text: str, **more) -> dict:
    return {"role": role, "content": text} | more


def test_forms(tmp_path):
    """As the page saves them, as a question with its answer, and a conversation with two answers."""
    page = {
        "messages": [
            turn("user", "a"),
            turn("assistant", "b", train=False),
            turn("user", "c"),
            turn("assistant", "d"),
        ]
    }
    short = {"instruction": "e", "output": "f", "wordings": ["g", "h"]}
    two = {
        "conversations": [
            turn("user", "i"),
            turn("assistant", "j"),
            turn("user", "k"),
            turn("assistant", "l"),
        ]
    }
    found = read_corrections(str(write_jsonl(tmp_path / "c.jsonl", [page, short, two, short])))
    assert [(each.question, each.text, len(each.messages)) for each in found] == [
        ("c", "d", 3), ("e", "f", 1), ("i", "j", 1), ("k", "l", 3)
    ]  # fmt: skip
    assert found[1].wordings == ["g", "h"] and found[1].source.endswith("c.jsonl:2")
    # what is written is read again as the same, and trains the same answers
    again = read_corrections(str(write_jsonl(tmp_path / "again.jsonl", [each.record() for each in found])))
    assert [each.record() for each in again] == [each.record() for each in found]


def test_contradictions_are_named(tmp_path):
    lines = [{"prompt": "Who are you?", "response": "Lumen."}, {"prompt": "x", "response": "y"}]
    lines.append({"prompt": "who are you", "response": "Corvo."})
    path = write_jsonl(tmp_path / "c.jsonl", lines)
    with pytest.raises(
        UserError, match=r"c\.jsonl:1 and .*c\.jsonl:3 correct the same question .* remove one"
    ):
        read_corrections(str(path))


@pytest.mark.parametrize(
    "record, message",
    [
        ({"text": "no conversation"}, "no 'conversations'"),
        ({"prompt": "a", "response": " "}, "'response' is blank"),
        ({"messages": [turn("assistant", "a")]}, "must follow a message of the user"),
        ({"messages": [turn("user", "a"), turn("assistant", "b", train=False)]}, "no answer is trained"),
        ({"prompt": "a", "response": "b", "wordings": "c"}, "'wordings' must be a list"),
    ],
)
def test_mistakes_are_one_line(tmp_path, record, message):
    path = write_jsonl(tmp_path / "c.jsonl", [{"prompt": "x", "response": "y"}, record])
    with pytest.raises(UserError, match=f"c.jsonl:2: .*{message}"):
        read_corrections(str(path))


def test_new_corrections_replace_earlier_ones_of_the_same_question(tmp_path):
    def read(name: str, *pairs: tuple[str, str]) -> list:
        records = [{"prompt": question, "response": answer} for question, answer in pairs]
        return read_corrections(str(write_jsonl(tmp_path / f"{name}.jsonl", records)))

    found, replaced = merged(
        read("kept", ("a", "1"), ("b", "2")), read("new", ("B", "3"), ("c", "4"), ("a", "1"))
    )
    assert [(each.question, each.text) for each in found] == [("a", "1"), ("B", "3"), ("c", "4")]
    assert replaced == 1
