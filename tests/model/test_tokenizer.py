"""The shipped vocabulary: ids of the special tokens, lossless on any text, and compact on text it has not seen."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from scripts.train_tokenizer import MAX_TOKEN_BYTES, characters_per_token, read_records

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
HOLDOUT_EVERY = 20  # as in training

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
RESERVED = [f"<|reserved_{i}|>" for i in range(16)]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *TAGS, *RESERVED]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REPOSITORY / "model")


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


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


@settings(max_examples=500, deadline=None)
@example("a , b ' s .  do n't ?")  # what clean_up_tokenization_spaces would alter
@example(" leading, trailing \r\n\t\n ")
@example("\x00\x01\x7f\x85\u2028\ufeff\ufffe\uffff\U0010ffff")
@example("e\u0301 한국어 ไทย עברית 👩‍👩‍👧 ﬁ Å １２３")  # no normaliser may touch these
@example("1234567890 ١٢٣ ½ x²")
@given(st.text(max_size=200))
def test_any_text_comes_back(tokenizer, text):
    assert decode(tokenizer, tokenizer.encode(text)) == text


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*SPECIALS, "<|im_", "start|>", "<", "\n", " ", "user", "é", "中"]) | st.text(max_size=5))
)
def test_text_with_the_spelling_of_special_tokens_comes_back(tokenizer, pieces):
    text = "".join(pieces)
    assert decode(tokenizer, tokenizer.encode(text)) == text


def test_every_byte_has_an_id():
    # The alphabet of byte-level BPE: 256 characters, one for each byte; no text can need anything else.
    vocabulary = Tokenizer.from_file(str(REPOSITORY / "model" / "tokenizer.json")).get_vocab(with_added_tokens=False)
    assert len([token for token in vocabulary if len(token) == 1]) == 256
    assert max(len(token) for token in vocabulary if token not in SPECIALS) <= MAX_TOKEN_BYTES


def test_pieces(tokenizer):
    def pieces(text):
        return [tokenizer.decode([i]) for i in tokenizer.encode(text)]

    assert pieces("2024") == ["2", "0", "2", "4"]
    assert pieces("x 37") == ["x", " 3", "7"]
    assert pieces("it, and") == ["it", ", and"]
    for role in ("system", "user", "assistant", "tool"):  # a header's newline never joins the newlines behind it
        assert pieces(f"<|im_start|>{role}\n\n\nb") == ["<|im_start|>", role, "\n", "\n\n", "b"]


@pytest.mark.skipif(
    not SHARED_DATA.is_dir(), reason=f"needs the real text in {SHARED_DATA}, which is not part of the project"
)
def test_compression_on_text_kept_out_of_training():
    backend = Tokenizer.from_file(str(REPOSITORY / "model" / "tokenizer.json"))
    held_out = {}
    for name in ("pretrain_zh_en", "sft_zh_en", "sft_zh_en_32k"):
        held_out[name] = list(read_records(SHARED_DATA / f"{name}.jsonl"))[HOLDOUT_EVERY - 1 :: HOLDOUT_EVERY]
    everything = characters_per_token(backend, [text for texts in held_out.values() for text in texts])
    assert everything["zh"] >= 1.40
    assert everything["en"] >= 3.1
    for name in ("sft_zh_en", "sft_zh_en_32k"):
        figures = characters_per_token(backend, held_out[name])
        assert figures["zh"] >= 1.40, name
        assert figures["en"] >= 3.1, name
