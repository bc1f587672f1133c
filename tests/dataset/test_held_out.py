"""--eval_share: which records are held out, of every kind of data; nothing is in both parts, nothing is lost."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset import blocks
from dataset.held_out import ALL, PASSAGE, Part
from dataset.rollout_prompts import PromptDataset
from dataset.text_files import DocumentPart
from dataset.token_cache import build_token_cache

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
VALUES = st.recursive(
    st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(content=VALUES, shares=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)))
def test_each_content_is_in_one_part_and_a_larger_share_holds_out_more(content, shares):
    small, large = sorted(shares)
    assert Part(small, True).has(content) != Part(small, False).has(content)
    assert Part(large, True).has(content) or not Part(small, True).has(content)
    assert Part(large, True).has(content) == Part(large, True).has(json.loads(json.dumps(content)))


def test_the_share_is_that_of_the_records_and_fixed():
    counts = [sum(Part(share, True).has(f"text {i}") for i in range(20_000)) for share in (0.0, 0.02, 0.5)]
    assert counts[0] == 0 and abs(counts[1] - 400) < 80 and abs(counts[2] - 10_000) < 300
    assert [i for i in range(200) if Part(0.02, True).has(f"text {i}")] == [1, 126, 135, 166]  # in every version


def texts(tokenizer, cache) -> list[str]:
    """The text of each sample."""
    return [tokenizer.decode(cache.tokens[a:b]) for a, b in zip(cache.offsets[:-1], cache.offsets[1:], strict=True)]


@pytest.fixture
def split(tokenizer, cache_dir):
    """split(kind, path) is the text of each sample to train on, and of each that is held out."""

    def of(kind, path, share=0.1, **options):
        options = {"max_length": 64, "cache_dir": cache_dir} | options
        parts = (Part(share), Part(share, held_out=True))
        return [texts(tokenizer, build_token_cache(kind, path, tokenizer, **options, part=part)) for part in parts]

    return of


@pytest.mark.parametrize("kind", RECORDS)
def test_the_same_records_in_any_order_of_records_and_files_and_in_any_form(
    kind, write, split, tokenizer, cache_dir, monkeypatch
):
    whole = texts(tokenizer, build_token_cache(kind, write("a.jsonl", RECORDS[kind]), tokenizer, 64, cache_dir))
    train, held_out = split(kind, write("a.jsonl", RECORDS[kind]))
    assert sorted(train + held_out) == sorted(whole) and not set(train) & set(held_out)
    assert 15 <= len(held_out) / len(whole) * len(QUESTIONS) <= 50
    shuffled = random.Random(1).sample(FORMS[kind], len(QUESTIONS))
    write("b/1.jsonl", shuffled[:100])
    write("b/0.json", json.dumps(shuffled[100:] + shuffled[:9]).encode())  # nine of them twice
    monkeypatch.setattr("dataset.token_cache.SMALL", 0)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 12)
    again = split(kind, write("b/2.jsonl", shuffled[:50]).rsplit("/", 1)[0], num_proc=2)
    assert [set(each) for each in again] == [set(train), set(held_out)]


def test_the_share_is_part_of_a_cache_only_where_there_is_one(write, tokenizer, cache_dir):
    path = write("a.jsonl", RECORDS["pretrain"])
    caches = [
        build_token_cache("pretrain", path, tokenizer, 64, cache_dir, part=part)
        for part in (ALL, Part(0.1), Part(0.1, True), Part(0.2), Part(0.2, True))
    ]
    assert len({cache.path for cache in caches}) == 5
    assert ["part" in cache.meta for cache in caches] == [False, True, True, True, True]
    assert caches[0].report["records"] == sum(cache.report["records"] for cache in caches[1:3]) == 300


@pytest.mark.parametrize(("share", "amount"), [(1e-9, "none"), (0.5, "all")])
def test_a_share_that_leaves_a_part_empty_is_one_line(share, amount, write, tokenizer, cache_dir, split, tmp_path):
    held_out = [record for record in RECORDS["sft"] if Part(0.5, True).has([record["conversations"], None])]
    path = write("a.jsonl", held_out)
    line = rf"--eval_share {share:g} holds out {amount} of the records of \S*a.jsonl; give a "
    with pytest.raises(UserError, match=line):
        split("sft", path, share)
    prompts = [{"prompt": text} for text in QUESTIONS]
    prompts = [each for each in prompts if Part(0.5, True).has([messages(each["prompt"])[:1], None])]
    with pytest.raises(UserError, match=line):
        for is_held_out in (False, True):
            part = Part(share, is_held_out)
            PromptDataset(write("a.jsonl", prompts), tokenizer, 64, str(tmp_path), part=part)


def test_bad_records_count_as_training_data(write, tokenizer, cache_dir, capsys):
    """So that each is reported once, and the few held-out records do not make them a large share."""
    records = [
        record for i, record in enumerate(RECORDS["sft"]) for record in ([record, {"no": i}] if i < 25 else [record])
    ]
    path, options = write("a.jsonl", records), {"on_bad_data": "skip", "cache_dir": cache_dir}
    reports = [
        build_token_cache("sft", path, tokenizer, 64, part=Part(0.1, h), **options).report for h in (False, True)
    ]
    assert [report["skipped_bad_records"] for report in reports] == [25, 0]
    assert sum(report["records"] for report in reports) == 325
    assert capsys.readouterr().out.count("bad records are skipped: 25 of") == 1
    with pytest.raises(UserError, match=r"a.jsonl:2: no 'conversations'"):
        build_token_cache("sft", path, tokenizer, 64, cache_dir, part=Part(0.1))


def test_prompts_are_chosen_by_what_is_asked(write, tokenizer, tmp_path):
    """The answer, and the form, make no difference."""

    def read(records, held_out):
        data = PromptDataset(write("p.jsonl", records), tokenizer, 64, str(tmp_path), part=Part(0.2, held_out))
        assert data.records == len(data) and data.num_tokens == sum(len(prompt.input_ids) for prompt in data)
        return data, {prompt.messages[-1]["content"] for prompt in data}

    one = [{"prompt": text, "answer": "1"} for text in QUESTIONS]
    other = [{"conversations": messages(text, "2")} for text in reversed(QUESTIONS)]
    (train, asked), (held_out, asked_later) = (read(one, held_out) for held_out in (False, True))
    assert asked | asked_later == set(QUESTIONS) and not asked & asked_later and 30 < len(asked_later) < 90
    assert train.fingerprint["data"] != held_out.fingerprint["data"]
    assert train.fingerprint["eval_share"] == 0.2
    assert [read(other, held_out)[1] for held_out in (False, True)] == [asked, asked_later]


# --- plain text ------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(text=st.text(st.sampled_from("ab 山\n\r\x0b\u2028"), max_size=9_000), begins=st.booleans(), ends=st.booleans())
def test_passages_make_up_the_text(text, begins, ends):
    passages = PASSAGE.findall(text)
    assert "".join(passages) == text and all(len(each) <= 2_000 for each in passages)
    document = DocumentPart(b"before", begins, ends)
    document["text"] = text
    stretches = [(stretch, count, h) for h in (False, True) for stretch, count in Part(0.3, h).passages(document)]
    assert sum(len(stretch["text"]) for stretch, _, _ in stretches) == len(text)
    assert sum(count for _, count, _ in stretches) == len(passages)
    assert all(stretch["text"] in text and not stretch.context for stretch, _, _ in stretches)
    if text:
        assert sum(stretch.begins for stretch, _, _ in stretches) == begins
        assert sum(stretch.ends for stretch, _, _ in stretches) == ends


def book(rng: random.Random) -> str:
    """Some 120,000 characters: no two lines are equal."""
    words = ["river", "stone", "walks", "under", "山水", "red", "lies", "slowly"]
    return "".join(f"{i} {' '.join(rng.choices(words, k=rng.randint(0, 25)))}\n" for i in range(1500))


@pytest.mark.parametrize("block", [1 << 13, 1 << 20])
def test_a_book_is_split_by_its_passages(block, write, tokenizer, cache_dir, monkeypatch):
    """Whole lines, each in one part; every token but the first of a stretch is a target once."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block)
    text = book(random.Random(3))
    path = write("book.txt", text.encode())
    caches = [build_token_cache("pretrain", path, tokenizer, 64, cache_dir, part=Part(0.2, h)) for h in (False, True)]
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


def test_a_short_text_goes_where_its_record_goes(write, split):
    texts = [f"text {i}\nof two lines" for i in range(40)]
    train, held_out = split("pretrain", write("a.jsonl", [{"text": text} for text in texts]), 0.3)
    write("folder/all.txt", "\n--\n".join(reversed(texts)).encode())
    again = split("pretrain", write("folder/one.txt", texts[0].encode()).rsplit("/", 1)[0], 0.3, text_separator="--")
    assert [set(each) for each in again] == [set(train), set(held_out)] and held_out
