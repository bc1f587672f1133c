"""Prompts of reinforcement learning: what is a prompt, what its reference answer, and what is refused."""

import json

import pytest

from common.errors import UserError
from dataset.held_out import Split
from dataset.messages import BadRecord
from dataset.records import parse
from dataset.rollout_prompts import PromptDataset, collate_prompts, to_prompt

QUESTION = {"role": "user", "content": "1+1=?"}
ANSWER = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("record", "messages", "answer"),
    [
        ({"prompt": "1+1=?", "answer": "2"}, [QUESTION], "2"),
        ({"prompt": [QUESTION], "answer": 2}, [QUESTION], 2),
        ({"prompt": [QUESTION]}, [QUESTION], None),
        ({"prompt": "1+1=?", "completion": "2"}, [QUESTION], "2"),
        ({"question": "1+1=?", "answer": "2"}, [QUESTION], "2"),
        ({"conversations": [QUESTION, ANSWER]}, [QUESTION], "2"),
        ({"messages": [QUESTION]}, [QUESTION], None),
        ({"conversations": [QUESTION, ANSWER, QUESTION]}, [QUESTION, ANSWER, QUESTION], None),
        ({"conversations": [{"from": "human", "value": "1+1=?"}], "gt": ["2"]}, [QUESTION], "2"),
        (
            {"conversations": [QUESTION, {"role": "assistant", "content": ""}], "gt": ["2", "3"]},
            [QUESTION],
            ["2", "3"],
        ),
        ({"conversations": [QUESTION, {"role": "assistant", "content": " \n"}]}, [QUESTION], None),
        ({"conversations": [QUESTION, {"role": "assistant", "content": "无"}]}, [QUESTION], None),
        ({"prompt": "1+1=?", "answer": "无"}, [QUESTION], "无"),
        ({"prompt": "1+1=?", "response": "2"}, [QUESTION], "2"),
        ({"question": "1+1=?", "answer": 2}, [QUESTION], 2),
        ({"instruction": "1+1=?", "output": ["2", "two"]}, [QUESTION], ["2", "two"]),
        ({"instruction": "1+1=?"}, [QUESTION], None),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, [QUESTION], "2"),
        ({"prompt": [QUESTION], "answer": ANSWER}, [QUESTION], None),
        ({"question": "1+1=?", "answer": [ANSWER]}, [QUESTION], "2"),
        ({"question": "1+1=?", "answer": "2", "prompt": "templated"}, [QUESTION], "2"),
        ({"prompt": "1+1=?", "completion": "it is 2", "answer": "2"}, [QUESTION], "2"),
        ({"messages": [QUESTION, ANSWER | {"content": "<think>\n1, 2.\n</think>\n\n2"}]}, [QUESTION], "2"),
        ({"messages": [QUESTION, ANSWER | {"reasoning_content": "1, 2."}]}, [QUESTION], "2"),
        ({"prompt": [QUESTION], "reward_model": {"style": "rule", "ground_truth": "2"}}, [QUESTION], "2"),
        ({"prompt": [QUESTION], "reward_model": {"ground_truth": "3"}, "answer": "2"}, [QUESTION], "2"),
        ({"prompt": "1+1=?", "system": "Count."}, [{"role": "system", "content": "Count."}, QUESTION], None),
    ],
)
def test_forms(record, messages, answer):
    chat, found = to_prompt(parse(record, "prompt"))
    assert chat.messages == messages and found == answer


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": 7},
        {"prompt": []},
        {"text": "1+1=2"},
        {"conversations": [ANSWER]},
        {"conversations": [QUESTION, ANSWER, ANSWER]},
    ],
)
def test_what_is_no_prompt_is_refused(record):
    with pytest.raises(BadRecord):
        to_prompt(parse(record, "prompt"))


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_a_prompt_ends_where_the_answer_begins(tokenizer, tmp_path):
    path = write(
        tmp_path / "rl.jsonl",
        [{"prompt": "1+1=?", "answer": "2", "gt": [2]}, {"messages": [QUESTION, ANSWER]}],
    )
    prompts = PromptDataset(path, tokenizer, 64)
    wanted = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False)
    assert [tokenizer.decode(prompt.input_ids) for prompt in prompts] == [wanted] * 2
    assert (
        prompts[0].record == {"prompt": "1+1=?", "answer": "2", "gt": [2]}
        and prompts[1].record["answer"] == "2"
    )
    assert prompts.source(1) == f"{path}:2"
    one_line = str(tmp_path / "rl.json")
    (tmp_path / "rl.json").write_text(json.dumps([{"prompt": "1+1=?"}, {"prompt": "2+2=?"}]))
    sources = [prompt.source for prompt in PromptDataset(one_line, tokenizer, 64)]
    assert sources == [f"{one_line}[0]", f"{one_line}[1]"]
    assert collate_prompts([prompts[1]])["sample_ids"].tolist() == [1]


def test_a_share_of_the_prompts_begins_with_thoughts(tokenizer, tmp_path):
    """The same ones whenever the data are read."""
    path = write(tmp_path / "rl.jsonl", [{"prompt": f"{i}+1=?"} for i in range(400)])
    kinds = []
    for ratio in (0.25, 0.25, 0.75):
        prompts = PromptDataset(path, tokenizer, 64, thinking_ratio=ratio)
        kinds.append([tokenizer.decode(prompt.input_ids).endswith("<think>") for prompt in prompts])
        assert abs(sum(kinds[-1]) / 400 - ratio) < 0.07
    assert kinds[0] == kinds[1]


def test_tools_of_the_record_are_offered_instead_of_the_environment_s(tokenizer, tmp_path):
    """And the rewards see which were offered."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "calculate")
    ]
    rows = [{"prompt": "1+1=?", "tools": json.dumps(tools[:1])}, {"prompt": "1+2=?"}]
    prompts = PromptDataset(write(tmp_path / "rl.jsonl", rows), tokenizer, 256, tools=tools[1:])
    assert [prompt.tools for prompt in prompts] == [tools[:1], tools[1:]]
    assert [prompt.record["tools"] for prompt in prompts] == [tools[:1], tools[1:]]
    assert [f'"{name}"' in tokenizer.decode(prompts[1].input_ids) for name in ("add", "calculate")] == [
        False,
        True,
    ]
    assert PromptDataset(prompts.paths[0], tokenizer, 256).fingerprint != prompts.fingerprint


def test_long_prompts_are_left_out_and_counted(tokenizer, tmp_path, capsys):
    path = write(tmp_path / "rl.jsonl", [{"prompt": "word " * 200}, {"prompt": "short"}])
    assert len(PromptDataset(path, tokenizer, 64)) == 1
    assert f"1 prompts of {path}, 1 left out (more than 64 tokens)" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"none of the 2 records can be used .*left out as too long 2"):
        PromptDataset(path, tokenizer, 8)


def test_fields_that_only_the_reward_sees_are_counted(tokenizer, tmp_path, capsys):
    rows = [
        {"prompt": "1+1=?", "context": "c", "level": 3, "answer": "2"},
        {"question": "q", "answer": "a", "id": 1},
    ]
    rows.append({"messages": [QUESTION | {"mood": "calm"}, ANSWER], "context": "c", "level": None})
    path = write(tmp_path / "rl.jsonl", rows)
    prompts = PromptDataset(path, tokenizer, 64)
    assert prompts[0].record == rows[0] and prompts[0].messages == [QUESTION | {"content": "1+1=?\nc"}]
    line = f"3 prompts of {path}; fields for the reward alone: context 1, id 1, level 1, messages[].mood 1\n"
    assert capsys.readouterr().out == line


def test_what_cannot_be_judged_is_a_bad_record(tokenizer, tmp_path):
    """A check sees what the reward will see."""
    seen = []

    def check(record):
        seen.append(record)
        if record.get("answer") != "2":
            raise BadRecord("no two")

    rows = [{"messages": [QUESTION, ANSWER]}, {"prompt": "1+1=?", "gt": ["3"]}]
    path = write(tmp_path / "rl.jsonl", rows)
    with pytest.raises(UserError, match=f"{path}:2: no two"):
        PromptDataset(path, tokenizer, 64, check=check)
    assert seen == [rows[0] | {"answer": "2"}, rows[1] | {"answer": "3"}]
    assert len(PromptDataset(path, tokenizer, 64, check=check, on_bad_data="skip", max_bad_share=1)) == 1


def test_bad_records(tokenizer, tmp_path, monkeypatch):
    path = write(tmp_path / "rl.jsonl", [{"prompt": 7}, *({"prompt": "1+1=?"} for _ in range(19))])
    with pytest.raises(UserError, match=f"{path}:1: 'prompt' is 7 instead of text"):
        PromptDataset(path, tokenizer, 64)
    assert len(PromptDataset(path, tokenizer, 64, on_bad_data="skip")) == 19
    with pytest.raises(UserError, match=f"{path}:1: "):
        PromptDataset(path, tokenizer, 64, on_bad_data="skip", max_bad_share=0.01)
    for record, message in (
        ({"prompt": "1+1=?", "weight": 0.3}, "'weight': a prompt cannot have a weight; remove this field"),
        ({"prompt": " "}, "message 1 is blank"),
        (
            {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]},
            "message 1 is",
        ),
    ):
        with pytest.raises(UserError, match=f"odd.jsonl:1: {message}"):
            PromptDataset(write(tmp_path / "odd.jsonl", [record]), tokenizer, 64)
    half = write(tmp_path / "half.jsonl", [{"prompt": "\ud83d"}])
    with pytest.raises(UserError, match=rf"{half}:1: half a character \(\\ud83d\)"):
        PromptDataset(half, tokenizer, 64)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="this tokenizer has no chat template"):
        PromptDataset(half, tokenizer, 64)
    (tmp_path / "x.txt").write_text("Read me.")
    monkeypatch.undo()
    with pytest.raises(UserError, match="is plain text, which contains no prompts"):
        PromptDataset(str(tmp_path / "x.txt"), tokenizer, 64)


def test_what_was_read_held_out_and_not_read_is_named(tokenizer, tmp_path, capsys):
    path = write(tmp_path / "rl.jsonl", [{"prompt": f"{i}+1=?"} for i in range(60)])
    (tmp_path / "b.pdf").write_text("x")
    counts = [
        len(PromptDataset(str(tmp_path), tokenizer, 64, split=Split(0.2, is_held_out)))
        for is_held_out in (False, True)
    ]
    assert sum(counts) == 60 and 4 < counts[1] < 25
    assert capsys.readouterr().out.splitlines() == [
        f"{counts[0]:,} prompts of {path} (not read: {tmp_path}/b.pdf)",
        f"{counts[1]:,} prompts of {path} (held out; not read: {tmp_path}/b.pdf)",
    ]
