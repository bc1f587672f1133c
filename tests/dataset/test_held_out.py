"""--eval_share: which records are held out, of every kind of data; nothing is in both splits, nothing is
lost."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from dataset import files
from dataset.held_out import Split
from dataset.rollout_prompts import PromptDataset
from tests.dataset.conftest import build, texts_of

QUESTIONS = [f"question {i} 问题" for i in range(300)]


def messages(text: str, answer: str = "yes") -> list[dict]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


@given(key=st.text(), shares=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)))
def test_each_key_is_in_one_split_and_a_larger_share_holds_out_more(key, shares):
    small, large = sorted(shares)
    try:
        key.encode()
    except UnicodeEncodeError:
        return
    assert Split(small, True).includes(key) != Split(small, False).includes(key)
    assert Split(large, True).includes(key) or not Split(small, True).includes(key)
    for same in (f" {key}\n", key.replace(" ", "\n\t ")):  # as templates change it
        assert Split(large, True).includes(key) == Split(large, True).includes(same)


def test_the_form_of_characters_and_punctuation_make_no_difference():
    for i in range(64):
        forms = {f"Café {i}？", f"Cafe\u0301 {i}?", f"CAFÉ {i}？", f"cafe\u0301, {i} ！", f"Café{i}"}
        assert len({Split(0.5, True).includes(form) for form in forms}) == 1


def test_the_share_is_that_of_the_records_and_fixed():
    shares = (0.0, 0.02, 0.5)
    counts = [sum(Split(share, True).includes(f"text {i}") for i in range(20_000)) for share in shares]
    assert counts[0] == 0 and abs(counts[1] - 400) < 80 and abs(counts[2] - 10_000) < 300
    chosen = [i for i in range(200) if Split(0.02, True).includes(f"text {i}")]
    assert chosen == [55, 83]  # in every version


# --- one conversation in many spellings

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"name": "add", "arguments": {"x": 1}}


def openai(question: str) -> dict:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": question[:3]}, question[3:]]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": CALL}]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "3"},
    ]
    return {"messages": turns, "tools": [TOOL], "id": 7, "system": None}


def sharegpt(question: str) -> dict:
    turns = [
        {"from": "human", "value": question},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2"},
    ]
    return {"conversations": turns, "tools": json.dumps([TOOL]), "system": "Add."}


def alpaca(question: str) -> dict:
    return {"instruction": "And?", "input": "", "output": "3", "history": [[question, "2"]]}


def pair(question: str) -> dict:
    return {"chosen": messages(question), "rejected": messages(question, "no")}


SPELLINGS = {
    "openai": ("sft", openai),
    "sharegpt": ("sft", sharegpt),
    "alpaca": ("sft", alpaca),
    "prompt": ("sft", lambda question: {"prompt": question, "completion": "yes"}),
    "messages in a prompt": ("sft", lambda q: {"prompt": messages(q)[:1], "completion": messages(q)[1:]}),
    "pair": ("dpo", pair),
    "answers": ("dpo", lambda question: {"rejected": "no", "chosen": "yes", "question": question}),
    "conversation": ("pretrain", openai),
}


@pytest.fixture
def lines_of(write, tokenizer, cache_dir):
    """lines_of(kind, records, is_held_out) gives the lines of the records in a split of a fifth."""

    def find(kind: str, records: list[dict], is_held_out: bool) -> set[int]:
        path, split = write("x.jsonl", records), Split(0.2, is_held_out)
        if kind == "prompts":
            prompts = PromptDataset(path, tokenizer, 512, split=split)
            return {int(prompt.source.rsplit(":", 1)[1]) for prompt in prompts}
        cache = build(kind, path, tokenizer, cache_dir, 512, split=split)
        return set(cache.sources[:, 1].tolist())

    return find


def test_a_question_is_held_out_of_all_stages_in_every_spelling(lines_of, tokenizer):
    questions = [f"Add one to {i} 加一" for i in range(80)]
    expected = {line for line, q in enumerate(questions, 1) if Split(0.2, True).includes(q)}
    assert 8 < len(expected) < 30
    stages = dict(SPELLINGS)
    stages["text"] = ("pretrain", lambda q: {"text": q, "question": "not read", "answer": "x"})
    stages["ChatML text"] = (
        "pretrain",
        lambda q: {"text": tokenizer.apply_chat_template(sft(q), tools=[TOOL], tokenize=False)},
    )
    for name in ("openai", "sharegpt", "messages in a prompt"):
        stages[f"prompts, {name}"] = ("prompts", SPELLINGS[name][1])
    stages["prompts"] = ("prompts", lambda q: {"prompt": q, "answer": 2})
    for name, (kind, spell) in stages.items():
        records = [spell(question) for question in questions]
        held_out, train = lines_of(kind, records, True), lines_of(kind, records, False)
        assert held_out == expected, name
        assert train == set(range(1, 81)) - expected, name


def sft(question: str) -> list[dict]:
    return [{"role": "system", "content": "s"}, *messages(question), *messages("And?")]


def test_the_same_records_in_any_order_of_records_and_files(write, tokenizer, cache_dir):
    """And all of them in one split or the other."""
    records = [{"conversations": messages(text)} for text in QUESTIONS]
    whole = texts_of(tokenizer, build("sft", write("a.jsonl", records), tokenizer, cache_dir))
    splits = [Split(0.1, is_held_out) for is_held_out in (False, True)]
    train, held_out = (
        texts_of(tokenizer, build("sft", write("a.jsonl", records), tokenizer, cache_dir, split=split))
        for split in splits
    )
    assert sorted(train + held_out) == sorted(whole) and not set(train) & set(held_out)
    assert 15 <= len(held_out) <= 50
    shuffled = random.Random(1).sample(records, len(records))
    write("b/0.json", json.dumps(shuffled[100:] + shuffled[:9]).encode())  # nine of them twice
    folder = write("b/1.jsonl", shuffled[:100]).rsplit("/", 1)[0]
    for split, texts in zip(splits, (train, held_out), strict=True):
        again = texts_of(tokenizer, build("sft", folder, tokenizer, cache_dir, split=split))
        assert set(again) == set(texts)


@pytest.mark.parametrize(("share", "amount"), [(1e-9, "none"), (0.5, "all")])
def test_a_share_that_leaves_a_split_empty_is_one_line(share, amount, write, tokenizer, cache_dir):
    questions = [text for text in QUESTIONS if Split(0.5, True).includes(text)]
    path = write("a.jsonl", [{"prompt": text, "completion": "yes"} for text in questions])
    line = rf"--eval_share {share:g} holds out {amount} of the records of \S*a.jsonl; give a "
    for build_split in (
        lambda split: build("sft", path, tokenizer, cache_dir, split=split),
        lambda split: PromptDataset(path, tokenizer, 64, split=split),
    ):
        with pytest.raises(UserError, match=line):
            for is_held_out in (False, True):
                build_split(Split(share, is_held_out))


def test_bad_records_count_as_training_data(write, tokenizer, cache_dir, capsys):
    """So that each is reported once, and the few held-out records do not make them a large share."""
    records = [{"conversations": messages(text)} for text in QUESTIONS]
    bad = [{"no": i} for i in range(20)] + [{"conversations": messages("\ud83d")}] * 5
    path = write("a.jsonl", "\n".join(json.dumps(each) for each in records[:1] + bad + records[1:]).encode())
    reports = [
        build("sft", path, tokenizer, cache_dir, on_bad_data="skip", split=Split(0.1, is_held_out)).report
        for is_held_out in (False, True)
    ]
    assert [report["bad"] for report in reports] == [25, 0]
    assert sum(report["records"] for report in reports) == 325
    assert capsys.readouterr().out.count("bad records are skipped: 25 of") == 1


# --- plain text


@pytest.mark.parametrize("part_bytes", [20_000, 1 << 20])
def test_of_a_book_the_last_lines_are_held_out(part_bytes, write, tokenizer, cache_dir, monkeypatch):
    """Of each of its parts: whole lines, each in one split."""
    monkeypatch.setattr(files, "PART_BYTES", part_bytes)
    rng = random.Random(3)
    words = ["river", "stone", "walks", "under", "山水", "red", "lies", "slowly"]
    lines = [f"{i} {' '.join(rng.choices(words, k=20))}" for i in range(1000)]
    path = write("book.txt", "\n".join(lines).encode())
    found = []
    for is_held_out in (False, True):
        cache = build("pretrain", path, tokenizer, cache_dir, 9999, split=Split(0.1, is_held_out))
        text = "\n".join(
            tokenizer.decode(cache.tokens[a:b], skip_special_tokens=True).strip("\n")
            for a, b in zip(cache.offsets[:-1], cache.offsets[1:], strict=True)
        )
        found.append([line for line in text.split("\n") if line in set(lines)])
    train, held_out = found
    assert not set(train) & set(held_out) and 90 <= len(held_out) <= 130
    assert len(train) + len(held_out) > 985  # the others span two samples
    if part_bytes > 100_000:
        assert held_out[-1] == lines[-1] and train[0] == lines[0]


def test_a_text_with_few_line_ends_is_divided_by_the_share_all_the_same():
    """Such as a title and one long line, or a line for each chapter."""
    text = "A title\n" + "river " * 5000
    held_out, train = Split(0.02, True).split_text(text), Split(0.02).split_text(text)
    assert train + held_out == text and 590 <= len(held_out) <= 610
