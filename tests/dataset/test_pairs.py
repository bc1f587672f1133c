"""Preferences: every spelling of a pair is the same two conversations; how pairs are cut, dropped and laid
out."""

import json

import numpy as np
import pytest

from common.errors import UserError
from dataset.json_values import BadRecord
from dataset.lm_dataset import DPODataset, collate_pairs
from dataset.records import to_pair
from dataset.report import format_report
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT, write_jsonl

QUESTION = {"role": "user", "content": "q"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in "gb")
SAME = {
    "two conversations": {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "with the prompt repeated": {"prompt": "q", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "with the chosen one repeated": {  # HuggingFaceH4/ultrafeedback_binarized
        "prompt": "q",
        "prompt_id": "0",
        "chosen": [QUESTION, GOOD],
        "rejected": [QUESTION, BAD],
        "messages": [QUESTION, GOOD],
        "score_chosen": 8.5,
        "score_rejected": 2.0,
    },
    "texts": {"prompt": "q", "chosen": "g", "rejected": "b"},
    "messages": {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
    "one message": {"messages": [QUESTION], "chosen": GOOD, "rejected": BAD},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "g"},
        "rejected": {"from": "gpt", "value": "b"},
    },
    "Alpaca": {"instruction": "q", "input": "", "chosen": "g", "rejected": "b"},
    "question": {"question": "q", "chosen": "g", "rejected": "b"},
}


@pytest.mark.parametrize("form", SAME)
def test_every_form_is_the_same_pair(form):
    for chat, answer in zip(to_pair(SAME[form]), (GOOD, BAD), strict=True):
        assert chat.messages == [QUESTION, answer] and chat.masked == () and chat.tools is None


def test_what_both_share_is_not_trained():
    """With a system message and tools beside; what follows the first difference is."""
    shared = [QUESTION, GOOD, QUESTION]
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = {"conversations": shared, "chosen": [BAD, QUESTION, GOOD], "rejected": "x", "system": "s"}
    record |= {"tools": tools}
    chosen, rejected = to_pair(record)
    assert [message["role"] for message in chosen.messages][:2] == ["system", "user"]
    assert chosen.masked == rejected.masked == (2,) and chosen.tools == tools
    assert len(chosen.messages) == 7 and len(rejected.messages) == 5


def test_a_conversation_beside_two_others_is_no_third_one():
    whole = SAME["two conversations"]
    for messages in ([QUESTION, BAD], [QUESTION, GOOD, QUESTION, GOOD]):
        with pytest.raises(BadRecord, match="'chosen' and 'rejected' do not begin with 'messages'"):
            to_pair(whole | {"messages": messages})


def test_a_bad_message_is_named_with_its_side():
    whole = SAME["two conversations"]
    with pytest.raises(BadRecord, match="with 'rejected': message 2 has the unknown role 'robot'"):
        to_pair(whole | {"rejected": [QUESTION, GOOD | {"role": "robot"}]})
    with pytest.raises(BadRecord, match="'chosen' does not end with a message of the assistant"):
        to_pair(whole | {"chosen": [QUESTION, GOOD, QUESTION]})
    with pytest.raises(BadRecord, match="answers without a question"):
        to_pair({"chosen": "g", "rejected": "b"})


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ROOT / "model")


def dataset(folder, tokenizer, records, length) -> DPODataset:
    data = write_jsonl(folder / "pairs.jsonl", records)
    return DPODataset(str(data), tokenizer, length, cache_dir=folder / "cache")


def said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def test_pairs_are_cut_alike_or_dropped_and_counted(tmp_path, tokenizer):
    words = [" ".join(f"{word}{i}" for i in range(60)) for word in ("a", "b")]
    records = [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": words[0], "rejected": words[1]},  # both are cut
        {"prompt": "q", "chosen": words[0], "rejected": "no"},  # one is
        {"prompt": words[0], "chosen": "yes", "rejected": "no"},  # no room for an answer
        {
            "chosen": [said("user", "q"), said("assistant", "a")],
            "rejected": [said("user", words[0]), said("assistant", "a")],
        },
        {"prompt": "q", "chosen": words[0] + " x", "rejected": words[0] + " y"},  # the difference is cut off
        {"prompt": "q", "chosen": "same", "rejected": "same"},
    ]
    data = dataset(tmp_path, tokenizer, records, 40)
    report = data.cache.report
    assert (
        report["pairs"],
        report["pairs_cut"],
        report["dropped_without_label"],
        report["dropped_alike"],
    ) == (
        7,
        2,
        2,  # one of them for its rejected answer alone
        2,
    )
    assert "pairs 7, cut 2 (28.6%), dropped as alike 2 (28.6%)" in format_report(report, data.cache.files)
    assert len(data) == 3 and [data.cache.source(2 * i).split(":")[-1] for i in range(3)] == ["1", "2", "3"]
    lengths = [[len(sample["input_ids"]) for sample in data[i]] for i in range(3)]
    assert lengths[1] == [40, 40] and lengths[2][0] == 40 > lengths[2][1]
    for i in range(3):
        chosen, rejected = data[i]
        begin = int(np.flatnonzero(chosen["loss_mask"])[0])
        assert begin == np.flatnonzero(rejected["loss_mask"])[0]
        assert (chosen["input_ids"][:begin] == rejected["input_ids"][:begin]).all()
    text = tokenizer.decode(data[0][0]["input_ids"][data[0][0]["loss_mask"]])
    assert text.endswith("yes<|im_end|>")
    batch = collate_pairs([data[2], data[0]])
    assert batch["sample_ids"].tolist() == [4, 5, 0, 1]
    assert sum(batch["target_counts"]) == len(batch["targets"])
    with pytest.raises(IndexError):
        data[3]


def test_data_without_a_usable_pair_is_refused_with_the_reason(tmp_path, tokenizer):
    with pytest.raises(UserError, match="pairs 1, dropped as alike 1"):
        dataset(tmp_path, tokenizer, [{"prompt": "q", "chosen": "a", "rejected": "a"}], 40)
    with pytest.raises(UserError, match=r"pairs.jsonl:1: no 'rejected'"):
        dataset(tmp_path, tokenizer, [json.loads('{"prompt": "q", "chosen": "a"}')], 40)
