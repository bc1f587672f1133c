"""Messages: every spelling becomes one form, and what cannot be used says so in one line."""

import json

import pytest

from dataset.records import BadRecord, Turn, parse_message

CALL = {"name": "weather", "arguments": {"city": "北京"}}
ANSWER = {"role": "assistant", "content": "a"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def answer(*parts, **extra):
    return {"role": "assistant", "content": list(parts), **extra}


def part(kind, **values):
    return {"type": kind, **values}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (answer(part("text", text="a")), ANSWER),
        (answer(part("text", value="a")), ANSWER),
        (answer(part("text", text="a", value=None, image_url=None)), ANSWER),  # as Parquet fills in
        (answer({"text": "a"}), ANSWER),
        (answer("a"), ANSWER),
        (answer(part("text", text="a "), part("text", value="\nb")), {**ANSWER, "content": "a \nb"}),
        ({"from": "gpt", "value": [part("text", text="a")]}, ANSWER),
        ({"role": "user", "content": [part("text", value="q")]}, {"role": "user", "content": "q"}),
        (answer(part("text", text="a"), tool_calls=[CALL]), {**CALLING, "content": "a"}),
        (
            answer(
                part("reasoning", value="r"),
                part("text", value="a"),
                part("tool_call", value=json.dumps(CALL)),
            ),
            {**CALLING, "content": "a", "reasoning_content": "r"},
        ),
        (answer(part("thinking", thinking="r"), "a"), {**ANSWER, "reasoning_content": "r"}),
        (
            answer(part("tool_call", value=json.dumps(CALL)), part("tool_call", value=[CALL, CALL])),
            {**CALLING, "tool_calls": [CALL] * 3},
        ),
        (answer(part("text", value="a"), reasoning_content="r"), {**ANSWER, "reasoning_content": "r"}),
        ({"role": "assistant", "content": None, "function_call": CALL}, CALLING),
        ({"role": "function", "name": "f", "content": "r"}, {"role": "tool", "name": "f", "content": "r"}),
        ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
        ({"from": "function_call", "value": json.dumps(CALL)}, CALLING),
    ],
)
def test_spellings_of_a_message(item, message):
    assert parse_message(item, "message 1") == Turn(message, [])


@pytest.mark.parametrize("none", [None, "", " ", "[]", "{}", "null", " [ ] ", [], {}])
def test_no_calls_and_no_tools_in_any_way(none):
    assert parse_message({**ANSWER, "tool_calls": none, "tools": none}, "message 1") == Turn(ANSWER, [])


BAD = [
    (answer(), "'content' of message 1 is an empty list; write the text"),
    (answer(5), "part 1 of 'content' of message 1 is a number instead of an object with 'type' and"),
    (answer({}), "no 'text' of part 1 of 'content' of message 1 (its keys: none); add it"),
    (answer(part("table", text="a")), "part 1 of 'content' of message 1 is of type 'table': the model"),
    (answer(part(["text"], text="a")), "part 1 of 'content' of message 1 is of type ['text']: the model"),
    (answer(part("text")), "no 'text' of part 1 of 'content' of message 1 (its keys: 'type'); add it"),
    (answer(part("text", text=3)), "'text' of part 1 of 'content' of message 1 is a number instead of"),
    (answer(part("image_url", value="1.jpg")), "is of type 'image_url': the model reads text only;"),
    (answer(part("image", image="1.jpg")), "is of type 'image': the model reads text only"),
    (answer("a", part("input_audio", input_audio={})), "part 2 of 'content' of message 1 is of type"),
    (answer(part("video", value="1.mp4")), "is of type 'video': the model reads text only"),
    (answer("a", part("reasoning", value="r")), "part 2 of 'content' of message 1 comes too late; write"),
    (answer(part("tool_call", value="[]")), "'value' of part 1 of 'content' of message 1 holds no call;"),
    (answer(part("tool_call", value=[CALL]), tool_calls=[CALL]), "message 1 gives its 'tool_calls' in"),
    ({"role": "user", "content": [part("reasoning", value="r")]}, "message 1 has 'reasoning_content'"),
    ({"role": "user", "content": "", "reasoning_content": "r"}, "message 1 has 'reasoning_content' but"),
    ({"role": "user", "content": "", "tool_calls": [CALL]}, "message 1 has 'tool_calls' but the role"),
    ({"from": "function_call", "value": "[]"}, "'value' of message 1 holds no call; write {"),
    ({**ANSWER, "tool_calls": [CALL, 5]}, "entry 2 of 'tool_calls' of message 1 is a number instead of"),
    ({**ANSWER, "tool_calls": "[[]]"}, "entry 1 of 'tool_calls' of message 1 is a list instead of a"),
    ({**ANSWER, "tool_calls": "17"}, "'tool_calls' of message 1 is a number instead of a list of JSON"),
    ({**ANSWER, "tool_calls": ["{"]}, "entry 1 of 'tool_calls' of message 1 does not parse as JSON"),
    ({**ANSWER, "images": ["1.jpg"]}, "'images' of message 1: the model reads text only; leave the"),
    ({**ANSWER, "loss_weight": 0.5}, "'loss_weight' of message 1 is 0.5; it is a switch: write true or"),
    ({**ANSWER, "train": "no"}, "'train' of message 1 is 'no'; it is a switch: write true or 1, false"),
    ({**ANSWER, "weight": [0]}, "'weight' of message 1 is [0]; it is a switch"),
    ({**ANSWER, "loss": 2}, "'loss' of message 1 is 2; it is a switch"),
    ({**ANSWER, "train": True, "weight": 0}, "message 1 is to be trained and not to be trained (train,"),
    ({**ANSWER, "train_detail": [{"begin_offset": 0, "end_offset": 3}]}, "'train_detail' of message 1:"),
    ({**ANSWER, "train_on_inputs": True}, "'train_on_inputs' of message 1: only the assistant's turns"),
    ({**ANSWER, "train_on_prompt": True}, "'train_on_prompt' of message 1: only the assistant's turns"),
    ({"role": "user", "content": "q", "loss": True}, "'loss' of message 1 asks to train the role user;"),
]


@pytest.mark.parametrize(("item", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_used_says_so(item, message):
    with pytest.raises(BadRecord) as caught:
        parse_message(item, "message 1")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["loss_weight", "weight", "loss", "train", "training", "train_on_turn"])
@pytest.mark.parametrize(
    ("value", "is_masked"), [(0, True), (0.0, True), (False, True), (1, False), (1.0, False), (True, False)]
)
def test_switches_of_a_turn(key, value, is_masked):
    assert parse_message({**ANSWER, key: value}, "message 1") == Turn(ANSWER, [], is_masked)
    if is_masked:  # the user's turn is no target anyway
        assert parse_message({"role": "user", "content": "q", key: value}, "message 1").is_masked is False
    assert parse_message({**ANSWER, key: None}, "message 1").is_masked is False
