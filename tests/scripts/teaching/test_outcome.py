"""Which answers count as learned."""

import pytest

from scripts.teaching.corrections import read_corrections
from scripts.teaching.outcome import counts
from scripts.teaching.version import item
from tests.conftest import write_jsonl

CALL = {"name": "find", "arguments": {"city": "Rome", "days": 2}}


@pytest.mark.parametrize(
    "call", [CALL, {"function": CALL}, {"name": "find", "arguments": '{"city": "Rome", "days": 2}'}]
)
@pytest.mark.parametrize(
    "after, learned",
    [
        ('<tool_call>\n{"name": "find", "arguments": {"days": 2, "city": "Rome"}}\n</tool_call>', 1),
        ('<tool_call>{"name": "find", "arguments": {"days": 3, "city": "Rome"}}</tool_call>', 0),
        ("", 0),
        ("Rome", 0),
    ],
)
def test_an_answer_that_is_a_call_of_a_tool(tmp_path, call, after, learned):
    """The same call counts, in any order of its arguments."""
    said = [
        {"role": "user", "content": "The weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tools = [{"name": "find", "parameters": {"type": "object", "properties": {}}}]
    (found,) = read_corrections(str(write_jsonl(tmp_path / "c.jsonl", [{"messages": said, "tools": tools}])))
    asked = item(found, found.messages, "correction")
    assert counts([asked | {"after": after}], "correction") == (learned, 1)
    assert asked["reference"].startswith("<tool_call>")  # which the lines of the outcome show


def test_a_text_needs_no_call():
    asked = {"kind": "correction", "messages": [{"role": "user", "content": "a"}], "reference": "Good day!"}
    call = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    assert counts([asked | {"after": "good day"}], "correction") == (1, 1)
    assert counts([asked | {"after": "Good day!" + call}], "correction") == (0, 1)
