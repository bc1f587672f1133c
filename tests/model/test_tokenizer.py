"""The shipped vocabulary: special tokens, lossless on any text, the same ids elsewhere, compact on unseen
text."""

import json
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from scripts.train_tokenizer import MAX_TOKEN_BYTES, PIECES
from tests.conftest import ROOT

MODEL = ROOT / "model"

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
RESERVED = [f"<|reserved_{i}|>" for i in range(16)]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *TAGS, *RESERVED]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def test_size_and_special_ids(tokenizer):
    assert len(tokenizer) == 6400
    assert sorted(tokenizer.get_vocab().values()) == list(range(6400))
    assert tokenizer.convert_tokens_to_ids(SPECIALS) == list(range(25))
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 0)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert set(tokenizer.all_special_ids) == {0, 1, 2}


def test_nothing_is_added_around_the_text(tokenizer):
    assert tokenizer.encode("") == []
    assert dict(tokenizer("a")) == {"input_ids": tokenizer.encode("a"), "attention_mask": [1]}
    assert len(tokenizer.encode("a")) == 1


def test_left_padding_with_endoftext(tokenizer):
    batch = tokenizer(["a", "a b c"], padding=True)
    width = len(batch["input_ids"][1])
    assert batch["input_ids"][0] == [0] * (width - 1) + tokenizer.encode("a")
    assert batch["attention_mask"][0] == [0] * (width - 1) + [1]


@pytest.mark.parametrize("special", SPECIALS)
def test_a_special_is_one_token_anywhere(tokenizer, special):
    ids = tokenizer.encode(f"中{special} b{special}{special}")
    assert ids.count(SPECIALS.index(special)) == 3


def test_tags_survive_skip_special_tokens(tokenizer):
    text = "<think>\na\n</think>\n\n<tool_call>\n{}\n</tool_call><tool_response>b</tool_response>"
    ids = tokenizer.encode("<|im_start|>" + text + "<|reserved_3|><|im_end|><|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=150, deadline=None)
@example("a , b ' s .  do n't ?")  # what clean_up_tokenization_spaces would alter
@example(" leading, trailing \r\n\t\n ")
@example("\x00\x01\x7f\x85\u2028\ufeff\ufffe\uffff\U0010ffff")
@example("e\u0301 한국어 ไทย עברית 👩‍👩‍👧 ﬁ Å １２３")  # no normaliser may touch these
@example("1234567890 ١٢٣ ½ x²")
@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from([*SPECIALS, "<|im_", "start|>", "<", "\n", "user", "中"])).map("".join)
)
def test_any_text_comes_back(tokenizer, text):
    """Also text with the spelling of special tokens."""
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_every_byte_has_an_id():
    # The alphabet of byte-level BPE: 256 characters, one for each byte; no text can need anything else.
    vocabulary = Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab(with_added_tokens=False)
    assert len([token for token in vocabulary if len(token) == 1]) == 256
    assert max(len(token) for token in vocabulary if token not in SPECIALS) <= MAX_TOKEN_BYTES


# --- the same ids in programs that know the split pattern as "qwen2"

FILE = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
MERGES = [tuple(pair) for pair in FILE["model"]["merges"]]
TEXTS = [
    "",
    "It's 3 o'clock, WE'LL see: don't panic... they've 1,024 items (50%)!\n\n\tNext line.  ",
    "天气预报：2024年11月22日，北京晴，最高气温12℃；“出门请多穿衣服”——张三说。\r\n　　第二段，价格￥99.50。",
    "def f(x):\n    return {'a': [1, 2], \"b\": x ** 2}  # 注释 comment\n\n\nprint(f(3))\n",
    "混合 mixed 文本with中文and English，e.g. GPT-4o、C++与Python3.11；http://example.com/?q=你好&page=2",
    "naïve café — Ünïcödé, ½ x² ﬁ １２３ ٣ ไทย हिन्दी 한국어 עברית 👩‍👩‍👧 \x00\x7f\u200b\ufeff",
    " \u3000\n \x85\u2028 a\xa0\n\n\r\n  \t",
    '{"name": "weather", "arguments": {"city": "北京", "days": 3}}\n',
]


def test_the_split_pattern_is_qwen2s():
    split, byte_level = FILE["pre_tokenizer"]["pretokenizers"]
    assert split["pattern"]["Regex"] == PIECES == PRETOKENIZE_REGEX
    assert (split["behavior"], split["invert"]) == ("Isolated", False)
    assert (byte_level["use_regex"], byte_level["add_prefix_space"]) == (False, False)
    assert FILE["normalizer"] is None  # llama.cpp applies none either


def test_others_read_the_same():
    """transformers' own class for Qwen2, which composes characters first."""
    ours = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    qwen2 = Qwen2Tokenizer(vocab=FILE["model"]["vocab"], merges=MERGES)
    for text in TEXTS:
        assert ours.encode(normalize("NFC", text)).ids == qwen2.encode(text), text
