"""--eval_share: which records are held out, of every kind of data; nothing is in both splits, nothing is
lost."""

import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset import files
from dataset.chat_labels import ChatTemplate
from dataset.held_out import PASSAGE, Split, first_question, question_in
from dataset.plain_text import DocumentPart
from dataset.records import Chat, to_chat
from dataset.rollout_prompts import PromptDataset
from dataset.tokenizing import ChatTokenizer, DocumentTokenizer, PairTokenizer, TokenizerSpec
from tests.dataset.conftest import build

QUESTIONS = [f"question {i} 问题" for i in range(300)]


def messages(text: str, answer: str = "yes") -> list[dict]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


RECORDS = {
    "pretrain": [{"text": text} for text in QUESTIONS],
    "sft": [{"conversations": messages(text)} for text in QUESTIONS],
    "dpo": [{"chosen": messages(text), "rejected": messages(text, "no")} for text in QUESTIONS],
}
FORMS = {  # the same records, written otherwise
    "pretrain": [{"id": 7, "text": text} for text in QUESTIONS],
    "sft": [
        {"instruction": text, "output": "yes"}
        if i % 2
        else {"messages": [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]}
        for i, text in enumerate(QUESTIONS)
    ],
    "dpo": [{"rejected": "no", "chosen": "yes", "prompt": text} for text in QUESTIONS],
}


@given(key=st.text(), shares=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)))
def test_each_key_is_in_one_split_and_a_larger_share_holds_out_more(key, shares):
    small, large = sorted(shares)
    assert Split(small, True).includes(key) != Split(small, False).includes(key)
    assert Split(large, True).includes(key) or not Split(small, True).includes(key)
    for same in (f" {key}\n", key.replace(" ", "\n\t ")):  # as templates change it
        assert Split(large, True).includes(key) == Split(large, True).includes(same)


def test_the_form_of_characters_makes_no_difference():
    """Some tokenizers give the same tokens for them."""
    for i in range(64):
        forms = {f"Café {i}？", f"Cafe\u0301 {i}?", f"CAFÉ {i}？", f"cafe\u0301 {i}？"}
        assert len({Split(0.5, True).includes(form) for form in forms}) == 1


def test_the_first_question_is_the_first_message_of_the_user():
    """Whatever the assistant said before it."""
    greeting = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "hello"}]
    assert first_question(greeting + messages("why?")) == "why?"


def test_a_record_that_is_too_deep_to_choose_is_training_data():
    def key_of(record):
        raise RecursionError

    assert Split(0.5).includes_record({}, key_of) and not Split(0.5, True).includes_record({}, key_of)


def test_the_share_is_that_of_the_records_and_fixed():
    counts = [
        sum(Split(share, True).includes(f"text {i}") for i in range(20_000)) for share in (0.0, 0.02, 0.5)
    ]
    assert counts[0] == 0 and abs(counts[1] - 400) < 80 and abs(counts[2] - 10_000) < 300
    assert [i for i in range(200) if Split(0.02, True).includes(f"text {i}")] == [
        19,
        43,
        63,
        118,
        130,
    ]  # in every version


def texts(tokenizer, cache) -> list[str]:
    """The text of each sample."""
    return [
        tokenizer.decode(cache.tokens[a:b])
        for a, b in zip(cache.offsets[:-1], cache.offsets[1:], strict=True)
    ]


@pytest.fixture
def split(tokenizer, cache_dir):
    """split(kind, path) is the text of each sample to train on, and of each that is held out."""

    def of(kind, path, share=0.1, **options):
        options = {"max_length": 64, "cache_dir": cache_dir} | options
        splits = (Split(share), Split(share, held_out=True))
        return [texts(tokenizer, build(kind, path, tokenizer, **options, split=each)) for each in splits]

    return of


@pytest.mark.parametrize("kind", RECORDS)
def test_the_same_records_in_any_order_of_records_and_files_and_in_any_form(
    kind, write, split, tokenizer, cache_dir, monkeypatch
):
    whole = texts(tokenizer, build(kind, write("a.jsonl", RECORDS[kind]), tokenizer, 64, cache_dir))
    train, held_out = split(kind, write("a.jsonl", RECORDS[kind]))
    assert sorted(train + held_out) == sorted(whole) and not set(train) & set(held_out)
    assert 15 <= len(held_out) / len(whole) * len(QUESTIONS) <= 50
    shuffled = random.Random(1).sample(FORMS[kind], len(QUESTIONS))
    write("b/1.jsonl", shuffled[:100])
    write("b/0.json", json.dumps(shuffled[100:] + shuffled[:9]).encode())  # nine of them twice
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 12)
    again = split(kind, write("b/2.jsonl", shuffled[:50]).rsplit("/", 1)[0])
    assert [set(each) for each in again] == [set(train), set(held_out)]


@pytest.mark.parametrize(("share", "amount"), [(1e-9, "none"), (0.5, "all")])
def test_a_share_that_leaves_a_split_empty_is_one_line(
    share, amount, write, tokenizer, cache_dir, split, tmp_path
):
    questions = [text for text in QUESTIONS if Split(0.5, True).includes(text)]
    path = write("a.jsonl", [{"conversations": messages(text)} for text in questions])
    line = rf"--eval_share {share:g} holds out {amount} of the records of \S*a.jsonl; give a "
    with pytest.raises(UserError, match=line):
        split("sft", path, share)
    prompts = write("a.jsonl", [{"prompt": text} for text in questions])
    with pytest.raises(UserError, match=line):
        for is_held_out in (False, True):
            PromptDataset(prompts, tokenizer, 64, str(tmp_path), split=Split(share, is_held_out))


def test_bad_records_count_as_training_data(write, tokenizer, cache_dir, capsys):
    """So that each is reported once, and the few held-out records do not make them a large share."""
    records = [
        record
        for i, record in enumerate(RECORDS["sft"])
        for record in ([record, {"no": i}] if i < 25 else [record])
    ]
    path, options = write("a.jsonl", records), {"on_bad_data": "skip", "cache_dir": cache_dir}
    reports = [
        build("sft", path, tokenizer, 64, split=Split(0.1, h), **options).report for h in (False, True)
    ]
    assert [report["skipped_bad_records"] for report in reports] == [25, 0]
    assert sum(report["records"] for report in reports) == 325
    assert capsys.readouterr().out.count("bad records are skipped: 25 of") == 1
    with pytest.raises(UserError, match=r"a.jsonl:2: no 'conversations'"):
        build("sft", path, tokenizer, 64, cache_dir, split=Split(0.1))


# --- one conversation in many spellings

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {}}}},
}


def conversation(
    question: str, answers: Sequence[str] = ("2",), system: str = "", calls: bool = False
) -> dict:
    """A record in OpenAI's form: a question, with `calls` a call of a tool and its result, and the
    answers."""
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": question})
    if calls:
        turns.append(
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"x": 1}}]}
        )
        turns.append({"role": "tool", "content": "2"})
    turns.append({"role": "assistant", "content": answers[0]})
    for answer in answers[1:]:
        turns += [{"role": "user", "content": "Next?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns} | ({"tools": [TOOL]} if calls else {})


def called(turn: dict) -> dict:
    """The call of a turn that makes one."""
    return turn["tool_calls"][0]


def arguments_as_text(record: dict) -> dict:
    for turn in filter(lambda turn: "tool_calls" in turn, record["messages"]):
        called(turn)["arguments"] = json.dumps(called(turn)["arguments"])
    return record


def calls_with_id(record: dict) -> dict:
    for turn in record["messages"]:
        if "tool_calls" in turn:
            turn["tool_calls"] = [{"id": "call_7", "type": "function", "function": called(turn)}]
        elif turn["role"] == "tool":
            turn["tool_call_id"] = "call_7"
    return record


def function_call(record: dict) -> dict:
    for turn in filter(lambda turn: "tool_calls" in turn, record["messages"]):
        turn |= {"function_call": called(turn), "tool_calls": None, "content": None}
    return record


def empty_reasoning_and_nulls(record: dict) -> dict:
    for turn in record["messages"]:
        turn |= {"name": None, "train": None} | (
            {"reasoning_content": ""} if turn["role"] == "assistant" else {}
        )
    return record | {"system": None, "id": 3}


def keys_in_another_order(record: dict) -> dict:
    turns = [dict(reversed(turn.items())) for turn in record["messages"]]
    return {**{key: value for key, value in record.items() if key != "messages"}, "messages": turns}


def content_in_parts(record: dict) -> dict:
    for turn in record["messages"]:
        text = turn["content"]
        parts = [{"type": "text", "text": text[:3]}, {"type": "text", "value": text[3:]}]
        turn["content"] = parts + [
            {"type": "tool_call", "value": json.dumps(c)} for c in turn.pop("tool_calls", [])
        ]
    return record


def sharegpt(record: dict) -> dict:
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    turns = []
    for turn in record["messages"]:
        if "tool_calls" in turn:
            turns.append({"from": "function_call", "value": json.dumps(called(turn))})
        else:
            turns.append({"from": names[turn["role"]], "value": turn["content"]})
    tools = {"tools": json.dumps(record["tools"])} if "tools" in record else {}
    return {"conversations": turns} | tools


def alpaca(record: dict) -> dict:
    """Where it can be: without calls."""
    turns = record["messages"]
    if "tools" in record:
        return record
    system = {"system": turns.pop(0)["content"]} if turns[0]["role"] == "system" else {}
    texts = [turn["content"] for turn in turns]
    history = [list(pair) for pair in zip(texts[:-2:2], texts[1:-2:2], strict=True)]
    return {"instruction": texts[-2], "input": "", "history": history, "output": texts[-1]} | system


SPELLINGS: list[Callable[[dict], dict]] = [
    arguments_as_text,
    calls_with_id,
    function_call,
    empty_reasoning_and_nulls,
    keys_in_another_order,
    content_in_parts,
    sharegpt,
    alpaca,
]


def respelled(record: dict, spell: Callable[[dict], dict]) -> dict:
    return spell(json.loads(json.dumps(record)))


def pair_of(record: dict) -> dict:
    turns = record["messages"]
    return record | {"chosen": turns, "rejected": [*turns[:-1], {"role": "assistant", "content": "No."}]}


def rendered(tokenizer, record: dict) -> dict:
    """A record of pretraining, made of a conversation by the chat template."""
    text = tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), tokenize=False)
    return {"text": text}


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), min_size=1, max_size=20)
RECORD = st.builds(conversation, WORDS, st.lists(WORDS, min_size=1, max_size=3), WORDS, st.booleans())


@settings(max_examples=12, deadline=None)
@given(record=RECORD)
def test_a_conversation_has_one_key_in_every_spelling_and_stage(record, tokenizer):
    """And each spelling of it gives the same tokens, so it would be trained as the same sample."""
    spec = TokenizerSpec.of(tokenizer)
    sft, pairs, texts = (
        make(spec, 64, Split(0.5)) for make in (ChatTokenizer, PairTokenizer, DocumentTokenizer)
    )
    sft.counts = {"special_texts": 0}  # pyrefly: ignore[bad-assignment]
    tokens, question = sft.labelled(to_chat(record))[0].tokens, sft.split_key(record)
    assert question == next(turn["content"] for turn in record["messages"] if turn["role"] == "user")
    for spell in SPELLINGS:
        other = respelled(record, spell)
        assert sft.split_key(other) == question, spell.__name__
        assert np.array_equal(sft.labelled(to_chat(other))[0].tokens, tokens), spell.__name__
    assert pairs.split_key(pair_of(record)) == texts.split_key(rendered(tokenizer, record)) == question


def test_no_held_out_conversation_is_trained_in_another_spelling_or_stage(write, tokenizer, cache_dir):
    records = [
        conversation(f"Add one to {i} 加一", [str(i)], "Be brief." * (i % 2), i % 3 > 0) for i in range(100)
    ]
    spelled = {spell.__name__: ("sft", [respelled(each, spell) for each in records]) for spell in SPELLINGS}
    stages = spelled | {
        "sft": ("sft", records),
        "sft of the beginnings": (
            "sft",
            [conversation(f"Add one to {i} 加一", ["other"]) for i in range(100)],
        ),
        "dpo": ("dpo", [pair_of(each) for each in records]),
        "pretrain": ("pretrain", [rendered(tokenizer, each) for each in records]),
        "pretrain on conversations": ("pretrain", records),
    }

    def lines(name: str, is_held_out: bool) -> set[int]:
        kind, data = stages[name]
        path, split = write(f"{name}.jsonl", data), Split(0.2, is_held_out)
        return set(build(kind, path, tokenizer, 256, cache_dir, split=split).sources[:, 1].tolist())

    held_out = lines("sft", True)
    assert 10 < len(held_out) < 35
    for name in stages:
        assert lines(name, True) == held_out, name
        assert not lines(name, False) & held_out, name
    for is_held_out in (True, False):
        path = write("prompts.jsonl", records)
        prompts = PromptDataset(path, tokenizer, 256, str(cache_dir), split=Split(0.2, is_held_out))
        found = {int(prompt.source.rsplit(":", 1)[1]) for prompt in prompts}
        assert (found == held_out) is is_held_out and (not found & held_out) is not is_held_out


LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
WITH_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("template", [LLAMA2, WITH_DEFAULT])
def test_the_question_of_a_text_that_another_template_made(template):
    chat = ChatTemplate(template, {"bos_token": "<s>"})
    around = chat.around_question()
    turns = conversation(" What is it?\n\nSay it. ", ["This."] * 2)["messages"]
    for messages in (turns, [{"role": "system", "content": "Be brief."}, *turns]):
        text, _ = chat.render(Chat(messages, None), find_turns=False)
        assert (question_in(text, around) or "").strip() == "What is it?\n\nSay it."
        assert (question_in(text[: text.index("Say")], around) or "").strip() == "What is it?"  # cut off
        assert (question_in(text[: text.index(" it?")], around) or "").strip() == "What is"
    assert question_in("What is it?", around) is None
    for unclear in (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "same",
    ):
        assert question_in(text, ChatTemplate(unclear, {}).around_question()) is None


# --- plain text


@settings(max_examples=25)
@given(
    text=st.text(st.sampled_from("ab 山\n\r\x0b\u2028"), max_size=9_000),
    begins=st.booleans(),
    ends=st.booleans(),
)
def test_passages_make_up_the_text(text, begins, ends):
    passages = PASSAGE.findall(text)
    assert "".join(passages) == text and all(len(each) <= 2_000 for each in passages)
    document = DocumentPart(text, begins, ends, "before")
    stretches = {h: list(Split(0.3, h).passages(document)) for h in (False, True)}
    for is_held_out, found in stretches.items():
        mine = [passage for passage in passages if Split(0.3, is_held_out).includes(passage)]
        assert "".join(stretch["text"] for stretch in found) == "".join(mine)
        assert sum(stretch.num_records for stretch in found) == len(mine)
    both = [stretch for found in stretches.values() for stretch in found]
    assert all(stretch["text"] in text and not stretch.context for stretch in both)
    if text:
        assert sum(stretch.begins for stretch in both) == begins
        assert sum(stretch.ends for stretch in both) == ends


def book(rng: random.Random) -> str:
    """Some 120,000 characters: no two lines are equal."""
    words = ["river", "stone", "walks", "under", "山水", "red", "lies", "slowly"]
    return "".join(f"{i} {' '.join(rng.choices(words, k=rng.randint(0, 25)))}\n" for i in range(1500))


@pytest.mark.parametrize("block", [1 << 13, 1 << 20])
def test_a_book_is_split_by_its_passages(block, write, tokenizer, cache_dir, monkeypatch):
    """Whole lines, each in one part; every token but the first of a stretch is a target once."""
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    text = book(random.Random(3))
    path = write("book.txt", text.encode())
    caches = [build("pretrain", path, tokenizer, 64, cache_dir, split=Split(0.2, h)) for h in (False, True)]
    train, held_out = (cache.report for cache in caches)
    assert held_out["records"] + train["records"] >= len(PASSAGE.findall(text.strip("\n")))
    assert 0.05 < held_out["target_bytes"] / len(text.encode()) < 0.4
    assert train["documents"] + held_out["documents"] == 1  # which part has the beginning
    seen: list[set[str]] = []
    for cache in caches:
        joined, tokens = "", np.array(cache.tokens)
        for begin, end in zip(cache.offsets[:-1].tolist(), cache.offsets[1:].tolist(), strict=True):
            follows = joined and begin and tokens[begin] == tokens[begin - 1]
            joined += tokenizer.decode(tokens[begin + bool(follows) : end], skip_special_tokens=True)
        seen.append({line for line in joined.splitlines() if line in text.splitlines()})
    assert not seen[0] & seen[1] and len(seen[0] | seen[1]) > 1450
    specials = [int(np.isin(cache.tokens, tokenizer.all_special_ids).sum()) for cache in caches]
    assert sum(specials) == 2  # where the book begins and ends, and nowhere else
