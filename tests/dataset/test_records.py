"""Records: the forms that are understood, and one clear line for each thing that can be wrong with one."""

import json

import numpy as np
import pytest

from common.errors import UserError
from dataset import messages as message_forms
from dataset import records as record_formats
from dataset.batch import collate_shared
from dataset.files import Source
from dataset.lm_dataset import DPODataset
from dataset.messages import BadRecord
from dataset.records import Chat, held_out_key, parse
from tests.dataset.conftest import build, samples_of

USER, BOT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"name": "weather", "arguments": {"city": "北京"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}


def chat_of(*messages, **extra):
    return {"conversations": list(messages), **extra}


def to_chat(record: dict) -> Chat:
    (chat,) = parse(record, "sft").chats
    return chat


def to_pair(record: dict) -> tuple[Chat, ...]:
    return parse(record, "dpo").chats


def said(role: str, content) -> dict:
    return {"role": role, "content": content}


PARTS = [{"type": "thinking", "thinking": "h"}, {"type": "reasoning", "value": "m"}, "a"]
PARTS += [{"type": "tool_call", "value": json.dumps(CALL)}]
CALLS = [{"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "r"}]
FORMS = [
    (chat_of(USER, BOT), [USER, BOT]),
    ({"messages": [USER, BOT], "id": 7, "conversations": None}, [USER, BOT]),  # as Parquet fills it in
    (chat_of(HUMAN, GPT, system="s"), [SYSTEM, USER, BOT]),
    (chat_of({"from": "developer", "value": "s"}, USER, GPT), [SYSTEM, USER, BOT]),
    (chat_of(HUMAN, *CALLS, GPT), [USER, CALLING, said("tool", "r"), BOT]),
    ({"instruction": "q", "input": "", "output": "a", "history": [], "system": ""}, [USER, BOT]),
    ({"instruction": "q", "input": "i", "output": "a"}, [said("user", "q\ni"), BOT]),
    ({"instruction": "q", "output": "a", "history": [["q", "a"]], "system": "s"}, [SYSTEM, USER, BOT, USER, BOT]),
    (chat_of(USER, BOT | {"reasoning_content": "hm", "tools": ""}), [USER, BOT | {"reasoning_content": "hm"}]),
    (chat_of(USER, CALLING | {"content": None, "tool_calls": json.dumps([CALL])}), [USER, CALLING]),
    (chat_of(USER, said("assistant", None) | {"function_call": CALL}), [USER, CALLING]),
    ({"instruction": "q", "context": "c", "response": "a"}, [said("user", "q\nc"), BOT]),
    ({"prompt": "q", "completion": [BOT]}, [USER, BOT]),
    ({"prompt": "q", "response": "a"}, [USER, BOT]),
    ({"question": "q", "answer": "a", "prompt": "unused"}, [USER, BOT]),
    ({"system_prompt": "s", "query": "q", "response": "a"}, [SYSTEM, USER, BOT]),
    (chat_of(SYSTEM, USER, BOT, system="s"), [SYSTEM, USER, BOT]),  # said twice
    (chat_of(USER, BOT, images=[], label=3, mask_history=False, chosen=None, rejected=""), [USER, BOT]),
    (chat_of(USER, said("assistant", PARTS)), [USER, CALLING | {"content": "a", "reasoning_content": "h\nm"}]),
    ({"conversation": [{"human": "q", "assistant": "a"}] * 2}, [USER, BOT] * 2),  # Firefly
    ({"conversation": [{"system": "s", "input": "q", "output": "a"}], "id": 1}, [SYSTEM, USER, BOT]),  # XTuner
    ({"conversation": [{"input": "q", "output": "a", "system": ""}, USER, BOT]}, [USER, BOT] * 2),
    (chat_of(said("user", ["l", "m"]), said("assistant", ["1. a", "2. b"])), [said("user", "l\nm"), said("assistant", "1. a\n2. b")]),
    (chat_of(said("user", ["l\n", "m", " n"]), BOT), [said("user", "l\nm n"), BOT]),  # already apart
    (chat_of(said("user", [{"type": "input_text", "text": "q"}]), said("assistant", [{"type": "output_text", "text": "a", "annotations": []}])), [USER, BOT]),
    *((chat_of(USER, BOT | {name: "hm"}), [USER, BOT | {"reasoning_content": "hm"}]) for name in message_forms.REASONING_FIELDS),
    (chat_of(USER, BOT | {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}), [USER, BOT | {"reasoning_content": "hm"}]),
    (chat_of(USER, BOT | {"reasoning_details": [{"type": "reasoning.summary", "summary": "h"}, {"text": "m"}]}), [USER, BOT | {"reasoning_content": "h\nm"}]),
    (chat_of(USER, BOT | {"reasoning": None, "thinking": "", "thoughts": "hm"}), [USER, BOT | {"reasoning_content": "hm"}]),
    (chat_of(USER, said("assistant", "<think>\nhm</think>\n\na")), [USER, said("assistant", "<think>\nhm</think>\n\na")]),
    (chat_of(USER, CALLING | {"tool_calls": [CALL | {"arguments": ""}]}), [USER, CALLING | {"tool_calls": [CALL | {"arguments": ""}]}]),
    (chat_of(said("user", " \t NUL \x00\r\n"), BOT), [said("user", " \t NUL \x00\r\n"), BOT]),
]  # fmt: skip


@pytest.mark.parametrize(("record", "messages"), FORMS, ids=range(len(FORMS)))
def test_forms_of_conversations(record, messages):
    assert to_chat(record) == Chat(messages, None)


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), TOOL, json.dumps(TOOL), [json.dumps(TOOL)]])
def test_tools_stand_on_a_message_or_beside_the_conversation(tools):
    for record in (
        chat_of(SYSTEM | {"tools": tools}, USER, BOT),
        chat_of(SYSTEM, USER, BOT, tools=tools),
        {"prompt": [SYSTEM, USER], "completion": "a", "functions": tools},
    ):
        assert to_chat(record) == Chat([SYSTEM, USER, BOT], [TOOL])


@pytest.mark.parametrize("switch", message_forms.TRAIN_FLAGS)
def test_turns_that_are_not_trained(switch):
    off, on = BOT | {switch: 0.0}, BOT | {switch: True}
    assert to_chat(chat_of(USER | {switch: 0}, off, USER, on)).masked == (1,)
    assert to_chat(chat_of(USER, off, USER, BOT, system="s")).masked == (2,)


def test_history_and_prompts_are_context():
    assert to_chat(chat_of(USER, BOT, USER, BOT, USER, BOT, mask_history=True)).masked == (1, 3)
    turns = [{"input": "q", "output": "a", "output_with_loss": loss} for loss in (False, True)]
    assert to_chat({"conversation": turns}).masked == (1,)
    pair = to_chat({"prompt": [USER, BOT, USER], "completion": [BOT, USER, BOT]})
    assert pair == Chat([USER, BOT, USER, BOT, USER, BOT], None, masked=(1,))


def test_fields_that_nothing_reads():
    assert parse(chat_of(USER, BOT, id=7, meta=None, label=True), "sft").unread == {"id"}
    others = {
        "context": "c",
        "history": [["q", "a"]],
        "input": "i",
        "output": "o",
        "prompt": "p",
        "text": "t",
    }
    assert parse(chat_of(USER, BOT, **others), "sft").unread == set(others)
    assert parse({"prompt": "q", "completion": "a", "response": "b"}, "sft").unread == {"response"}
    question = {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]], "tools": []}
    assert parse(question, "sft").unread == set()
    assert parse({"text": "t", "url": "u"}, "pretrain").unread == {"url"}


def test_fields_of_messages_and_parts_that_nothing_reads():
    """Counted and named like those of a record, in every form."""
    odd = [USER | {"id": 1, "mood": None}, {"from": "gpt", "value": "a", "emotion": "glad", "thinking": "t"}]
    assert parse(chat_of(*odd), "sft").unread == {"conversations[].id", "conversations[].emotion"}
    part = {"type": "text", "text": "a", "cache_control": {}, "annotations": []}
    beside = {"prompt": [USER], "completion": {"role": "assistant", "content": [part, "b"], "refusal": "no"}}
    assert parse(beside, "sft").unread == {
        "completion[].refusal", "completion[].content[].cache_control", "completion[].content[].annotations"
    }  # fmt: skip
    pair = {"chosen": [USER, BOT | {"score": 1}], "rejected": [USER, BOT | {"rank": 2}]}
    assert parse(pair, "dpo").unread == {"chosen[].score", "rejected[].rank"}
    turns = {"conversation": [{"human": "q", "assistant": "a", "topic": "t"}]}
    assert parse(turns, "sft").unread == {"conversation[].topic"}
    assert parse(chat_of(USER | {"input": "i"}, BOT), "sft").unread == {"conversations[].input"}


# --- pairs

GOOD, BAD = said("assistant", "g"), said("assistant", "b")
WHOLE = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
PAIRS = [
    WHOLE,
    WHOLE | {"prompt": "q"},
    # HuggingFaceH4/ultrafeedback_binarized: the chosen one repeated
    WHOLE | {"prompt": "q", "messages": [USER, GOOD], "score_chosen": 8.5},
    {"prompt": "q", "chosen": "g", "rejected": "b"},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    {"conversations": [HUMAN], "chosen": {"from": "gpt", "value": "g"}, "rejected": BAD},
    {"instruction": "q", "input": "", "chosen": "g", "rejected": "b"},
    {"question": "q", "chosen": "g", "rejected": "b"},
    {"question": "q", "response_j": "g", "response_k": "b", "qid": 1},  # lvwerra/stack-exchange-paired
    {"chosen": "\n\nHuman: q\n\nAssistant: g", "rejected": "\n\nHuman: q\n\nAssistant: b"},  # hh-rlhf
    {"chosen": "Human: q\n\nAssistant: g\n", "rejected": "Human:q\n\nAssistant:b"},
]


@pytest.mark.parametrize("record", PAIRS, ids=range(len(PAIRS)))
def test_every_form_is_the_same_pair(record):
    assert to_pair(record) == (Chat([USER, GOOD]), Chat([USER, BAD]))


def test_a_transcript_of_several_turns_and_the_mention_of_one():
    text = "\n\nHuman: q\n\nAssistant: a\n\nHuman: Who is\n\nHumans: or?\n\nAssistant: "
    chosen, rejected = to_pair({"chosen": f"{text}g", "rejected": f"{text}b"})
    shared = [USER, BOT, said("user", "Who is\n\nHumans: or?")]
    assert chosen == Chat([*shared, GOOD], None, (1,)) and rejected == Chat([*shared, BAD], None, (1,))
    plain = to_pair({"prompt": "q", "chosen": "Not\n\nHuman: me", "rejected": "b"})
    assert plain[0].messages[-1]["content"] == "Not\n\nHuman: me"


def test_of_a_pair_only_what_follows_the_common_beginning_is_trained(tokenizer):
    shared = [USER, GOOD, USER]
    record = {"conversations": shared, "chosen": [BAD, USER, GOOD], "rejected": "x", "system": "s"}
    samples, _ = samples_of(tokenizer, "dpo", [record])
    answers = record["chosen"], [said("assistant", "x")]
    for sample, answer in zip(samples, answers, strict=True):
        messages = [SYSTEM, *shared, *answer]
        whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        prompt = tokenizer.apply_chat_template(messages[:4], add_generation_prompt=True, return_dict=True)
        begin = len(prompt["input_ids"])
        assert sample.tokens.tolist() == whole
        assert not sample.loss_mask[:begin].any() and sample.loss_mask[begin]


def test_pairs_are_cut_alike_or_dropped_and_counted(write, tokenizer, cache_dir):
    words = [" ".join(f"{word}{i}" for i in range(60)) for word in ("a", "b")]
    records = [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": words[0], "rejected": words[1]},  # both are cut
        {"prompt": "q", "chosen": words[0], "rejected": "no"},  # one is
        {"prompt": words[0], "chosen": "yes", "rejected": "no"},  # no room for an answer
        {"prompt": "q", "chosen": words[0] + " x", "rejected": words[0] + " y"},  # the difference is cut off
        {"prompt": "q", "chosen": "same", "rejected": "same"},
    ]
    data = DPODataset(write("x.jsonl", records), tokenizer, 40, cache_dir=cache_dir)
    report = data.cache.report
    assert (report["records"], report["cut"], report["dropped"], len(data)) == (6, 2, 3, 3)
    lengths = [[len(sample["input_ids"]) for sample in data[i]] for i in range(3)]
    assert lengths[1] == [40, 40] and lengths[2][0] == 40 > lengths[2][1]
    for i in range(3):
        chosen, rejected = data[i]
        begin = int(np.flatnonzero(chosen["loss_weight"])[0])
        assert begin == np.flatnonzero(rejected["loss_weight"])[0]
        assert (chosen["input_ids"][:begin] == rejected["input_ids"][:begin]).all()
    batch = collate_shared([data[2], data[0]])
    assert batch["sample_ids"].tolist() == [4, 5, 0, 1]
    assert sum(batch["target_counts"]) == len(batch["targets"])


# --- refusals: (kind, line of the file, what the message says)

# Records whose targets would be the end of a turn alone.
SILENT = [
    ({"instruction": "q", "output": ""}, "'output' is blank; write the text, or remove the record"),
    ({"instruction": "q", "input": "", "output": " \r\n\u3000"}, "'output' is blank"),
    ({"question": "q", "answer": "\u200b\ufeff"}, "'answer' is blank"),  # of no width
    ({"prompt": "q", "completion": [said("assistant", "")]}, "message 2 is blank"),
    (chat_of(HUMAN, {"from": "gpt", "value": ""}), "message 2 is blank"),
    (chat_of(USER, said("assistant", "\n\n")), "message 2 is blank"),
    (chat_of(USER, said("assistant", [""])), "message 2 is blank"),
    (chat_of(USER, BOT, USER, said("assistant", ""), USER, BOT, system="s"), "message 4 is blank"),
    (chat_of(said("user", ""), BOT), "message 1 is blank"),
    ({"instruction": "", "input": " ", "output": "a"}, "message 1 is blank"),
    (
        chat_of(USER, said("assistant", "") | {"reasoning_content": "hm"}),
        "message 2 has reasoning but no answer",
    ),
    ({"instruction": "q", "output": "<think>\nhm\n</think>\n\n"}, "'output' has reasoning but no answer"),
    ({"conversation": [{"human": "q", "assistant": ""}]}, "message 2 is blank"),
]
REASONING, FALSE = BOT | {"reasoning_content": "r"}, {"loss_weight": 0}


def test_a_document_may_stand_under_content(tokenizer):
    """As in Ultra-FineWeb; `text` comes first, then a conversation."""
    web = {"content": "A river.", "score": 0.9}
    samples = [samples_of(tokenizer, "pretrain", [each])[0][0] for each in ({"text": "A river."}, web)]
    assert samples[0].tokens.tolist() == samples[1].tokens.tolist()
    assert held_out_key(web, True) == "A river." and parse(web, "pretrain").unread == {"score"}
    assert held_out_key(web | {"text": "t"}, True) == "t"
    assert held_out_key(chat_of(USER, BOT, content="c"), True) == "q"


BAD_LINES = [
    ("pretrain", b'{"text": "abc', "not valid JSON (Unterminated string"),
    ("pretrain", b'{"text": "a"} {"text": "b"}', "not valid JSON (Extra data"),
    ("pretrain", b"9" * 5000, "not valid JSON"),
    ("pretrain", b'["text"]', "a JSON list, not an object; write {...}"),
    ("pretrain", {"role": "user", "content": "a"}, "no 'text' (its keys: 'role', 'content')"),
    ("pretrain", {"content": 5}, "'content' is 5 instead of text"),
    ("pretrain", {"text": None}, "'text' is null instead of text"),
    ("pretrain", {"text": 5}, "'text' is 5 instead of text"),
    ("pretrain", b'{"text": "\\ud83d\\u4f60"}', "half a character (\\ud83d); write the whole one"),
    ("pretrain", '{"text": "中文"}'.encode("gb18030"), "not UTF-8; save the file as UTF-8: iconv"),
    ("pretrain", chat_of(USER, BOT | FALSE, USER, BOT), "a turn is marked as not trained, but pretraining"),
    ("pretrain", chat_of(USER), "no assistant turn"),
    ("sft", b'{"conversations": [{"role": "user", "content": "\\ud800"}, {"from": "gpt", "value": "a"}]}', "half a"),
    ("sft", chat_of(USER, BOT | {"tool_calls": '[{"name": "\\ud83d"}]'}), "half a character (\\ud83d)"),
    *(("sft", record, message) for record, message in SILENT),
    *(("dpo", WHOLE | {"rejected": value}, "'rejected' is blank") for value in ("", " \n", [], "\u200b")),
    ("dpo", WHOLE | {"rejected": [USER, said("assistant", " ")]}, "the last message of 'rejected' is blank"),
    ("dpo", {"question": "q", "response_j": "g"}, "no 'response_k' (its keys: 'question', 'response_j')"),
    ("dpo", {"question": "q", "response_j": "g", "response_k": ""}, "'response_k' is blank"),
    ("sft", {"question": "q", "response_j": "g", "response_k": "b"}, "'response_j': a preference"),
    ("sft", {"instruction": "q", "output": {"name": "Tom"}}, "'output' is {'name': 'Tom'} instead of text"),
    ("sft", {"instruction": "q", "output": ["a", "b"]}, "'output' is ['a', 'b'] instead of text"),
    ("sft", {"instruction": ["q", "r"], "output": ["a", "b"]}, "'output' is ['a', 'b'] instead of text"),
    ("sft", {"prompt": "q", "completion": []}, "'completion' is [] instead of text"),
    ("sft", {"question": "q", "answer": 5}, "'answer' is 5 instead of text"),
    ("dpo", {"prompt": "q", "chosen": {"text": "g"}, "rejected": "b"}, "'chosen' is {'text': 'g'} instead of text"),
    ("sft", chat_of(USER, said("assistant", "2 + 2 is 4.\n</think>\n\n4")), "message 2 has </think> without <think>"),
    ("sft", chat_of(USER, said("assistant", "</think><think>a</think>b")), "message 2 has </think> without <think>"),
    ("sft", {"instruction": "q", "output": "<think>\nhm"}, "'output' begins with <think>, which does not end"),
    ("sft", chat_of(USER, BOT | {"tool_calls": [CALL | {"arguments": "{'t': 1}"}]}), "'arguments' of 'weather' is not JSON"),
    ("sft", chat_of(USER, BOT | {"tool_calls": [{"function": CALL | {"arguments": "t=1"}}]}), "'arguments' of 'weather' is not"),
    ("sft", chat_of(USER, {"from": "function_call", "value": {"name": "f", "arguments": "{"}}), "'arguments' of 'f' is not"),
    *(("sft", chat_of(USER, BOT | {name: value}), f"'{name}' of message 2: does it train the turn")
      for name in sorted(message_forms.AMBIGUOUS_TRAIN_FLAGS) for value in (True, 0)),
    ("sft", chat_of(USER, BOT | {"train_on": "false"}), "'train_on' is 'false'; it must be true or false"),
    ("sft", chat_of(USER, BOT | {"reasoning": "x", "thinking": "y"}), "'reasoning' and 'thinking' of message 2 differ"),
    ("sft", chat_of(USER, BOT | {"thinking": True}), "'thinking' of message 2 is True instead of text"),
    ("sft", chat_of(USER, BOT | {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}), "'reasoning_details' of message 2"),
    ("sft", chat_of(USER, said("assistant", [5])), "message 2 has a part 5 instead of text"),
    *((kind, record | {"weight": value}, "it sets how much the record counts in the loss")
      for kind, record in (("sft", chat_of(USER, BOT)), ("pretrain", {"text": "x"})) for value in (-1, "heavy", [1], 1e9)),
    ("sft", chat_of(USER, BOT, weight=1, loss_weight=2), "'weight' and 'loss_weight' differ"),
    ("dpo", WHOLE | {"weight": 0.5}, "'weight': a preference cannot have a weight"),
    ("sft", WHOLE, "'chosen': a preference, for train_dpo.py"),
    ("sft", chat_of(USER, BOT, rejected_response="b"), "'rejected_response': a preference"),
    ("sft", {"chosen_messages": [USER, BOT], "rejected_messages": [USER, BOT]}, "a preference"),
    ("sft", chat_of(USER, BOT, images=["1.jpg"]), "'images': the model reads text only"),
    ("sft", chat_of(USER | {"image": "1.jpg"}, BOT), "'image' of message 1: the model reads text only"),
    ("sft", chat_of(USER, BOT, train_on_inputs=True), "'train_on_inputs': only the assistant's turns"),
    ("sft", chat_of(USER, BOT | {"train_detail": [{"x": 1}]}), "'train_detail' of message 2: a turn"),
    ("sft", chat_of(USER, BOT, kto_tag=False), "'kto_tag' is false: it marks a bad answer (KTO)"),
    ("sft", chat_of(USER, BOT, label="False"), "'label' is false: it marks a bad answer (KTO)"),
    ("sft", chat_of(USER, BOT, mask_history="some"), "'mask_history' is 'some'; it must be true or false"),
    ("sft", chat_of(USER, BOT | {"loss_weight": 0.5}), "'loss_weight' is 0.5; it must be true or false"),
    ("sft", chat_of(USER, BOT | {"loss_weight": 0, "train": True}), "fields that say to train it and not to train it"),
    ("sft", chat_of(USER | {"train": True}, BOT), "message 1 asks to train the role user"),
    ("sft", chat_of(USER, BOT, messages=[USER, BOT]), "both 'conversations' and 'messages' in one record"),
    ("sft", {"prompt": "q", "completion": "a", "question": "q", "answer": "a"}, "both 'prompt' and 'question'"),
    ("sft", chat_of(SYSTEM, SYSTEM, USER, BOT), "there must be one system message at most, and it must come first"),
    ("sft", chat_of(SYSTEM, USER, BOT, system="t"), "there must be one system message at most"),
    ("sft", chat_of(USER, SYSTEM, BOT), "there must be one system message at most, and it must come first"),
    ("sft", {"text": "a"}, "no 'conversations', 'messages' or 'instruction' (its keys: 'text')"),
    ("sft", {"conversations": "hi"}, "'conversations' is 'hi' instead of a list of messages"),
    ("sft", chat_of(), "'conversations' is [] instead of a list of messages"),
    ("sft", chat_of("hi", BOT), "message 1 is 'hi' instead of an object with 'role' and 'content'"),
    ("sft", chat_of(USER, {"content": "a"}), "message 2 has the role null; known are"),
    ("sft", chat_of(said("robot", "a")), "message 1 has the role 'robot'; known are"),
    ("sft", chat_of(said(["user"], "a")), "message 1 has the role ['user']"),
    ("sft", chat_of(USER, {"role": "assistant"}), "'content' of message 2 is null instead of text"),
    ("sft", chat_of({"from": "human", "content": "q"}, BOT), "'value' of message 1 is null"),
    ("sft", chat_of(USER, BOT | {"reasoning_content": 1}), "'reasoning_content' of message 2 is 1"),
    ("sft", chat_of(USER | {"reasoning_content": "r"}, BOT), "message 1 has 'reasoning_content', which only"),
    ("sft", chat_of(USER | {"tool_calls": [CALL]}, BOT), "message 1 has 'tool_calls', which only"),
    ("sft", chat_of(USER, said("assistant", [{"type": "image"}])), "message 2 has a part of type 'image'"),
    ("sft", chat_of(USER, said("assistant", [{"type": "text"}])), "message 2 has a part with null"),
    ("sft", chat_of(USER, said("assistant", [])), "message 2 has no content"),
    ("sft", chat_of(USER, said("assistant", ["a", {"type": "thinking", "value": "t"}])), "reasoning, then text"),
    ("sft", chat_of(USER, REASONING | {"content": [{"type": "reasoning", "value": "t"}]}), "'reasoning_content' twice"),
    ("sft", chat_of(USER), "no assistant turn, so there is nothing to learn"),
    ("sft", chat_of(USER, BOT | {"tool_calls": "{oops"}), "'tool_calls' of message 2 is not JSON"),
    ("sft", chat_of(USER, BOT | {"tool_calls": [{"x": 1}]}), "'tool_calls' of message 2 has a call without"),
    ("sft", chat_of(USER, {"from": "function_call", "value": ""}), "message 2 has no tool call"),
    ("sft", chat_of(USER, BOT, tools="nope"), "'tools' is not JSON"),
    ("sft", chat_of(USER, BOT, tools=5), "'tools' is 5 instead of a list of JSON objects"),
    ("sft", chat_of(USER | {"tools": [TOOL]}, BOT, tools=[TOOL]), "'tools' are given more than once"),
    ("sft", {"prompt": "q"}, "no 'completion' or 'response' (its keys: 'prompt')"),
    ("sft", {"prompt": [USER], "completion": [BOT], "context": "c"}, "'prompt' is a list of messages, so"),
    ("sft", {"instruction": "q", "input": 4, "output": "a"}, "'input' is 4 instead of text"),
    ("sft", {"instruction": "q", "output": "a", "history": [["q"]]}, "'history' has ['q'] instead of"),
    ("sft", {"instruction": "q", "output": "a", "history": [["q", 1]]}, "'content' of message 2 is 1"),
    ("sft", chat_of(USER, BOT, tools=[{"name": {"x": 1}}], system=["s"]), "'system' is ['s'] instead of text"),
    ("dpo", {"prompt": "q", "chosen": "a"}, "no 'rejected' (its keys: 'prompt', 'chosen')"),
    ("dpo", {"chosen": "g", "rejected": "b"}, "answers without a question"),
    ("dpo", WHOLE | {"messages": [USER, BAD]}, "the two conversations do not begin with 'messages'"),
    ("dpo", WHOLE | {"chosen": [USER, GOOD, USER]}, "does not end with the assistant"),
    ("dpo", WHOLE | {"rejected": [USER, GOOD | {"role": "robot"}]}, "message 2 has the role 'robot'"),
]  # fmt: skip
GOODS = {"pretrain": {"text": "x"}, "sft": chat_of(USER, BOT), "dpo": WHOLE}


def line_of(record) -> bytes:
    return record if isinstance(record, bytes) else json.dumps(record).encode()


@pytest.fixture(scope="module")
def makers(tokenizer):
    """What makes the samples of each kind; it copies the tokenizer, which takes longer than a few samples."""
    return {kind: samples_of(tokenizer, kind, [])[1] for kind in GOODS}


@pytest.mark.parametrize(("kind", "record", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_record_is_refused_in_one_line(kind, record, message, makers):
    """What reading the file finds is met by the next test."""
    try:
        record = json.loads(line_of(record))
    except ValueError:
        return
    if isinstance(record, dict):
        with pytest.raises(UserError) as caught:
            list(makers[kind].samples([(Source(0, 1), GOODS[kind]), (Source(0, 2), record)]))
        text = str(caught.value)
        assert text.startswith("x.jsonl:2: ") and message in text and "\n" not in text
        assert text.endswith("(with --on_bad_data skip bad records are skipped and listed)")


@pytest.mark.parametrize("kind", GOODS)
@pytest.mark.parametrize("form", ["lines", "array"])
def test_all_bad_records_at_once_can_be_skipped_and_are_listed(kind, form, write, cache_dir, tokenizer):
    bad = [(line_of(record), message) for each, record, message in BAD_LINES if each == kind]
    if form == "array":  # broken elements are told from one another where they begin lines
        bad = [(line, message) for line, message in bad if line.startswith(b"{")]
    lines = [line_of(GOODS[kind]), *(line for line, _ in bad), line_of(GOODS[kind])]
    content, name = b"\n".join(lines), "x.jsonl"
    if form == "array":
        content, name = b"[\n" + b",\n".join(lines) + b"\n]", "x.json"
    path = write(name, content)
    options = {"on_bad_data": "skip", "max_bad_share": 1}
    cache = build(kind, path, tokenizer, cache_dir, **options)
    assert cache.report["records"] == len(lines) and cache.report["bad"] == len(bad)
    assert cache.num_samples == (4 if kind == "dpo" else 2)
    listed = (cache.path / "bad_records.txt").read_text().splitlines()
    places = [f"{path}[{i}]" if form == "array" else f"{path}:{i + 1}" for i in range(1, len(bad) + 1)]
    for entry, where, (_, message) in zip(listed, places, bad, strict=True):
        assert entry.startswith(f"{where}: ")
        assert message in entry or (form == "array" and "not valid JSON" in entry)
    with pytest.raises(UserError) as caught:
        build(kind, path, tokenizer, cache_dir)  # the cache is there, and the default is to stop
    assert str(caught.value).startswith(listed[0]) and "--on_bad_data skip" in str(caught.value)


def test_another_form_is_one_entry(monkeypatch):
    def dialogue(record, key):
        return [said(("user", "assistant")[i % 2], text) for i, text in enumerate(record[key])]

    monkeypatch.setitem(record_formats.FORMATS, "dialogue", dialogue)
    monkeypatch.setitem(record_formats.FORMATS, "ask", record_formats.read_question)
    monkeypatch.setitem(record_formats.ANSWER_FIELDS, "ask", ("reply",))
    assert to_chat({"dialogue": ["q", "a"]}) == to_chat({"ask": "q", "reply": "a"}) == Chat([USER, BOT])
    with pytest.raises(BadRecord, match="both 'dialogue' and 'ask'"):
        to_chat({"dialogue": ["q", "a"], "ask": "q", "reply": "a"})


# --- one definition of a question


QUESTIONS = [
    ({"question": "q", "input": "i", "history": [["h", "r"]]}, [said("user", "h"), said("assistant", "r"), said("user", "q\ni")]),
    ({"query": "q", "context": "c"}, [said("user", "q\nc")]),
    ({"instruction": "q", "input": "i", "context": "c"}, [said("user", "q\ni\nc")]),
    ({"prompt": "q", "input": "i", "system": "s"}, [SYSTEM, said("user", "q\ni")]),
    ({"prompt": "q", "history": [["h", "r"]]}, [said("user", "h"), said("assistant", "r"), USER]),
    ({"prompt": [USER, BOT, USER], "tools": [TOOL]}, [USER, BOT, USER]),
    ({"conversation": [{"human": "q", "assistant": "a"}, {"human": "q"}]}, [USER, BOT, USER]),
    ({"messages": [HUMAN], "system_prompt": "s"}, [SYSTEM, USER]),
]  # fmt: skip


@pytest.mark.parametrize(("record", "messages"), QUESTIONS, ids=range(len(QUESTIONS)))
def test_a_question_is_the_same_in_every_stage(record, messages):
    """With the same fields that are not read, and the same choice of held-out records."""
    record = record | {"id": 7}
    key = next(name for name in record_formats.FORMATS if name in record)
    if key in record_formats.ANSWER_FIELDS:
        answer = record_formats.ANSWER_FIELDS[key][0]
        answered = record | {answer: "a"}
    else:
        answered = record | {key: [*record[key], BOT]}
    sft = parse(answered, "sft")
    pair = parse(record | {"chosen": "a", "rejected": "b"}, "dpo")
    prompt, with_answer = parse(record, "prompt"), parse(answered, "prompt")
    assert (
        sft.chats[0].messages == pair.chats[0].messages == with_answer.chats[0].messages == [*messages, BOT]
    )
    assert prompt.chats[0].messages == messages
    assert {chat.tools is not None for each in (sft, pair, prompt) for chat in each.chats} == {
        "tools" in record
    }
    assert sft.unread == pair.unread == prompt.unread == with_answer.unread == {"id"}
    keys = {
        held_out_key(each, False) for each in (record, answered, record | {"chosen": "a", "rejected": "b"})
    }
    assert keys == {next(message["content"] for message in messages if message["role"] == "user")}


def test_what_a_pair_does_not_read_is_named():
    record = {
        "question": "q",
        "answer": "gold",
        "chosen": "g",
        "rejected": "b",
        "label": True,
        "context": "c",
    }
    assert parse(record, "dpo").unread == {"answer", "label"}


@pytest.mark.parametrize("switch", [{"train": False}, {"loss_weight": 0}, {"loss": False}])
def test_a_turn_of_a_pair_that_must_not_be_trained_is_not(switch, tokenizer):
    """Also of `mask_history`, and of a turn in Firefly's form."""
    off = said("assistant", "x") | switch
    pair = {"prompt": "q", "chosen": [off, USER, GOOD], "rejected": "b"}
    assert [chat.masked for chat in to_pair(pair)] == [(1,), ()]
    masked = {
        "prompt": "q",
        "chosen": [said("assistant", "x"), USER, GOOD],
        "rejected": "b",
        "mask_history": True,
    }
    assert [chat.masked for chat in to_pair(masked)] == [(1,), ()]
    (chosen, _), _ = samples_of(tokenizer, "dpo", [pair])
    assert tokenizer.decode(chosen.tokens[chosen.loss_mask].tolist()) == "g<|im_end|>"
    turn = {"human": "q", "assistant": "x", **switch}
    assert to_chat({"conversation": [turn, {"human": "q", "assistant": "a"}]}).masked == (1,)


def test_a_trained_turn_of_a_pair_must_have_text():
    pair = {"prompt": "q", "chosen": [said("assistant", " "), USER, GOOD], "rejected": "b", "system": "s"}
    with pytest.raises(BadRecord, match=r"^message 2 is blank"):
        to_pair(pair)
    pair["chosen"][0]["train"] = False
    assert to_pair(pair)[0].masked == (2,)


PARTED = [
    {"chosen": [said("user", "p"), GOOD], "rejected": [USER, BAD]},
    {"chosen": [USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]},
    {"chosen": [USER, BOT, said("user", "p"), GOOD], "rejected": [USER, BOT, USER, BAD]},
    {"prompt": "q", "chosen": [USER, GOOD], "rejected": "b"},
    {"chosen": "Human: p\n\nAssistant: g", "rejected": "Human: q\n\nAssistant: b"},
    {"chosen": [USER | {"tools": [TOOL]}, GOOD], "rejected": [USER, BAD]},
]


@pytest.mark.parametrize("record", PARTED, ids=range(len(PARTED)))
def test_a_pair_that_answers_two_questions_is_refused(record, tokenizer):
    with pytest.raises(
        UserError, match=r"x.jsonl:1: 'chosen' and 'rejected' are not answers to the same quest"
    ):
        samples_of(tokenizer, "dpo", [record])


def test_answers_may_go_on_differently():
    """And messages that templates write alike may differ in what they do not write."""
    longer = {"prompt": "q", "chosen": [CALLING, said("tool", "r"), GOOD], "rejected": "b"}
    assert [len(chat.messages) for chat in to_pair(longer)] == [4, 2]
    named = {"chosen": [USER | {"name": "x"}, GOOD], "rejected": [USER, BAD]}
    assert [chat.messages[-1] for chat in to_pair(named)] == [GOOD, BAD]


@pytest.mark.parametrize(("kind", "record"), [
    ("sft", {"prompt": [USER, BOT], "completion": "b"}),
    ("sft", {"prompt": [USER, BOT], "completion": [GOOD]}),
    ("dpo", {"messages": [USER, BOT], "chosen": "g", "rejected": "b"}),
    ("dpo", {"chosen": [USER, BOT, GOOD], "rejected": [USER, BOT, BAD]}),
    ("dpo", {"conversation": [{"human": "q", "assistant": "a"}], "chosen": [GOOD], "rejected": BAD}),
    ("prompt", {"prompt": [USER, BOT], "completion": "b"}),
])  # fmt: skip
def test_an_answer_after_an_answer_is_refused(kind, record):
    with pytest.raises(BadRecord, match=r"^message 3 is an answer after an answer"):
        parse(record, kind)


def test_the_answer_that_is_missing_is_named():
    for record, names in (
        ({"prompt": "q", "answer": "2"}, "'completion' or 'response' (its keys: 'prompt', 'answer')"),
        ({"query": "q", "answers": "[]"}, "'response' or 'answer' (its keys: 'query', 'answers')"),
        (
            {"question": "q", "answers": {"text": ["a"]}},
            "'answer' or 'response' (its keys: 'question', 'answers')",
        ),
        (
            {"instruction": "q", "output": None, "input": ""},
            "'output' or 'response' (its keys: 'instruction', 'input')",
        ),
    ):
        for kind in ("sft", "pretrain"):
            with pytest.raises(BadRecord) as caught:
                parse(record, kind)
            assert str(caught.value).startswith(f"no {names}; write the answer")
