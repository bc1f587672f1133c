"""From text to samples: nothing lost in splitting, cuts at turns, and bytes that add up."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from dataset.tokenizing import ChatTokenizer, DocumentTokenizer, TokenizerSpec
from tests.conftest import without_first_line_breaks
from tests.dataset.conftest import samples_of

RELAXED = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60) | st.lists(
    st.sampled_from(["the river ", "北京", "🙂", "𠮷", "\n\n", "  ", "é", "<|im_end|>", "a" * 9]),
    min_size=1,
    max_size=30,
).map("".join)


def split(samples, array):
    return np.split(array, np.cumsum(samples.lengths)[:-1])


# --- pretraining


@RELAXED
@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(2, 24), st.booleans())
def test_every_token_of_a_document_is_a_target_once(tokenizer, other_tokenizer, texts, max_length, shipped):
    tok = tokenizer if shipped else other_tokenizer
    samples = samples_of(tok, "pretrain", [{"text": text} for text in texts], max_length)
    pieces, trained = split(samples, samples.tokens), split(samples, samples.loss_mask)
    assert samples.lengths.max() <= max_length
    for line, text in enumerate(texts, 1):
        mine = [i for i in range(len(pieces)) if samples.lines[i] == line]
        targets = [t for i in mine for t in pieces[i][trained[i]].tolist()]
        assert targets == [*tok.encode(text, add_special_tokens=False), tok.eos_token_id]
        assert pieces[mine[0]][0] == tok.bos_token_id
        for before, after in itertools.pairwise(mine):
            assert pieces[after][0] == pieces[before][-1] and len(pieces[before]) == max_length
        assert samples.target_bytes[mine].sum() == len(text.encode())
        assert all(not t[0] and t[1:].all() for t in (trained[i] for i in mine))
    assert samples.counts["documents_split"] == sum(
        len(tok.encode(text, add_special_tokens=False)) + 2 > max_length for text in texts
    )


CHARACTERS = st.text(st.sampled_from("🙂𠮷龘é北a "), min_size=1, max_size=40)


def spelled(tok, token_ids):
    """The bytes of tokens of a byte-level vocabulary, by the vocabulary's own definition."""
    return sum(map(len, tok.convert_ids_to_tokens(token_ids)))


@RELAXED
@given(CHARACTERS, st.integers(2, 9), st.booleans())
def test_a_sample_cut_inside_a_character_counts_the_bytes_that_it_spells(
    tokenizer, other_tokenizer, text, length, mine
):
    tok = tokenizer if mine else other_tokenizer
    samples = samples_of(tok, "pretrain", [{"text": text}], length)
    for tokens, mask, counted in zip(
        split(samples, samples.tokens), split(samples, samples.loss_mask), samples.target_bytes, strict=True
    ):
        ids = [i for i in tokens[mask].tolist() if i != tok.eos_token_id]
        assert counted == spelled(tok, ids)
    assert samples.target_bytes.sum() == len(text.encode())
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}
    for cut in range(8, 8 + length * 3):
        chat = samples_of(tok, "sft", [record], cut)
        ids = chat.tokens[chat.loss_mask].tolist()
        assert chat.target_bytes.sum() == spelled(tok, [i for i in ids if i != tok.eos_token_id])


@pytest.mark.parametrize(("is_byte_level", "reached"), [(True, [1, 2, 1, 1]), (False, [1, 3, 0, 1])])
def test_bytes_of(tokenizer, is_byte_level, reached):
    make = DocumentTokenizer(TokenizerSpec.of(tokenizer), 64)
    make.is_byte_level, make.entry_lengths = is_byte_level, np.array([1, 2])
    ends = np.array([1, 2, 2, 3])
    assert make.bytes_of("a河b", np.array([0, 1, 0, 0]), ends).tolist() == reached


@pytest.mark.parametrize("normalizer", [None, "NFC", "prefix"])
def test_bytes_of_other_tokenizers(normalizer):
    """Byte fallback, as in Llama's vocabulary; a normaliser that changes the length of the text; a blank
    before it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if normalizer == "NFC":
        backend = Tokenizer(
            models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
        )
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        entries = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b"]
        backend = Tokenizer(
            models.BPE(
                {entry: i for i, entry in enumerate(entries)}, [], unk_token="<unk>", byte_fallback=True
            )
        )
        backend.normalizer = normalizers.Replace(" ", "▁") if normalizer is None else normalizers.Prepend("▁")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    tok = PreTrainedTokenizerFast(tokenizer_object=backend)
    tok.add_special_tokens({"bos_token": "<s>"})
    text = "a🙂b e\u0301 𠮷ab"
    samples = samples_of(tok, "pretrain", [{"text": text}], 2)
    assert samples.target_bytes.sum() == len(text.encode())
    if normalizer is None:  # the first token of a character stands for all of it
        assert samples.target_bytes.tolist() == [1, 4, 0, 0, 0, 1, 1, 1, 2, 0, 1, 4, 0, 0, 0, 1, 1]


def test_empty_documents_are_counted_and_give_no_sample(tokenizer):
    samples = samples_of(tokenizer, "pretrain", [{"text": ""}, {"text": "a"}, {"text": ""}], 8)
    assert samples.lengths.tolist() == [3] and samples.lines.tolist() == [2]
    assert samples.counts == {"records": 3, "documents": 3, "empty_documents": 2}


@pytest.mark.parametrize(
    ("roles", "start", "end"),
    [
        ({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, [1], [2]),
        ({"eos_token": "<|endoftext|>"}, [0], [0]),  # as GPT-2
        ({"pad_token": "<|endoftext|>"}, [], [0]),
        ({"bos_token": "<|im_start|>"}, [1], []),
        ({}, [], []),
    ],
)
def test_document_marks_of_tokenizers_that_lack_some(small_tokenizer, roles, start, end):
    tok = small_tokenizer(**roles)
    samples = samples_of(tok, "pretrain", [{"text": "the river"}], 64)
    text = tok.encode("the river", add_special_tokens=False)
    assert samples.tokens.tolist() == [*start, *text, *end]
    unseen = 0 if start else len(tok.decode(text[:1]))  # without a start the first token is no target
    assert samples.target_bytes.tolist() == [len("the river") - unseen]


def test_a_tokenizer_that_drops_and_adds_spaces(small_tokenizer):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.WordLevel({"[UNK]": 0, "▁the": 1, "▁river": 2, "<s>": 3, "</s>": 4}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.Strip()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    tok = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    samples = samples_of(tok, "pretrain", [{"text": "  the river \n"}, {"text": "   "}], 64)
    assert samples.tokens.tolist() == [3, 1, 2, 4] and samples.tokens.dtype == np.uint8
    assert samples.target_bytes.tolist() == [len("  the river \n")]
    assert samples.counts["empty_documents"] == 1


# --- SFT: cuts and drops


def conversation(*turns):
    return {
        "messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    }


def test_pretraining_takes_a_conversation_as_sft_renders_it(tokenizer):
    """Chosen record by record; what follows is a target, the user's words too, and no byte is counted
    twice."""
    record, text = conversation("What? 北京", "the river", "And?", "a <|im_end|> b"), {"text": "the river"}
    sft = samples_of(tokenizer, "sft", [record], 1000)
    for max_length in (1000, 9):
        both = samples_of(tokenizer, "pretrain", [record, text], max_length)
        mine = [i for i in range(len(both.lengths)) if both.lines[i] == 1]
        pieces = [split(both, both.tokens)[i].tolist() for i in mine]
        assert pieces[0] + [token for piece in pieces[1:] for token in piece[1:]] == sft.tokens.tolist()
        assert sum(split(both, both.loss_mask)[i].sum() for i in mine) == len(sft.tokens) - 1
        special = set(tokenizer.all_special_ids)
        words = [token for token in sft.tokens[1:].tolist() if token not in special]
        assert both.target_bytes[mine].sum() == spelled(tokenizer, words)
        assert (both.counts["conversations"], both.counts["documents"]) == (1, 1)


def test_a_long_conversation_is_cut_behind_the_last_turn_that_fits(tokenizer):
    record = conversation("one", "first answer", "two", "second answer", "three", "third answer")
    whole = samples_of(tokenizer, "sft", [record], 1000)
    # behind each assistant's end token
    ends = np.flatnonzero(whole.tokens == tokenizer.eos_token_id)[1::2] + 1
    for max_length in range(ends[0], len(whole.tokens) + 1):
        samples = samples_of(tokenizer, "sft", [record], max_length)
        fits = len(whole.tokens) <= max_length
        kept = len(whole.tokens) if fits else ends[ends <= max_length][-1]
        assert samples.tokens.tolist() == whole.tokens[:kept].tolist()
        assert samples.loss_mask.tolist() == whole.loss_mask[:kept].tolist()
        assert samples.counts["cut_at_turn"] == (not fits) and samples.counts["cut_inside_turn"] == 0


def test_an_answer_too_long_is_cut_inside_and_one_out_of_reach_dropped(tokenizer):
    record = conversation("question", "an answer of several words")
    whole = samples_of(tokenizer, "sft", [record], 1000)
    first, end = np.flatnonzero(whole.loss_mask)[[0, -1]]
    for max_length in range(2, end + 1):
        samples = samples_of(tokenizer, "sft", [record], max_length)
        if max_length > first:
            assert samples.tokens.tolist() == whole.tokens[:max_length].tolist()
            assert samples.loss_mask.sum() == max_length - first
            assert samples.counts["cut_inside_turn"] == 1
        else:
            assert len(samples.tokens) == 0
            assert samples.counts["dropped_without_label"] == 1 and samples.counts["cut_inside_turn"] == 0


@RELAXED
@given(st.lists(st.lists(TEXT, min_size=2, max_size=6), min_size=1, max_size=4), st.integers(4, 60))
def test_whatever_is_cut_each_sample_has_labels_and_whole_turns(tokenizer, conversations, max_length):
    samples = samples_of(tokenizer, "sft", [conversation(*turns) for turns in conversations], max_length)
    inside = 0
    for tokens, trained in zip(
        split(samples, samples.tokens), split(samples, samples.loss_mask), strict=True
    ):
        if len(tokens) == 0:
            continue
        assert len(tokens) <= max_length and trained.any() and not trained[0]
        inside += bool(trained[-1]) and tokens[-1] != tokenizer.eos_token_id
    assert inside <= samples.counts["cut_inside_turn"]
    assert len(samples.lengths) + samples.counts["dropped_without_label"] == len(conversations)


@RELAXED
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=2, max_size=6))
def test_target_bytes_are_those_of_the_answers(tokenizer, turns):
    samples = samples_of(tokenizer, "sft", [conversation(*turns)], 10_000)
    answers = [without_first_line_breaks(text) for text in turns[1::2]]
    assert samples.target_bytes.tolist() == [sum(len(text.encode()) for text in answers)]


def test_a_conversation_that_begins_with_the_assistant_never_trains_its_first_token(small_tokenizer):
    tok = small_tokenizer(eos_token="<|im_end|>")
    tok.chat_template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    samples = samples_of(tok, "sft", [{"messages": [{"role": "assistant", "content": "the river"}]}], 64)
    assert samples.loss_mask.tolist() == [False] + [True] * (len(samples.tokens) - 1)


# --- the tokenizer


def test_padding_and_truncation_of_the_latest_call_do_not_change_the_fingerprint(small_tokenizer):
    tok = small_tokenizer(pad_token="<|endoftext|>", eos_token="<|im_end|>")
    before = TokenizerSpec.of(tok)
    tok(["a", "the river"], padding=True, truncation=True, max_length=2)
    assert TokenizerSpec.of(tok).fingerprint == before.fingerprint
    tok.chat_template += " "
    assert TokenizerSpec.of(tok).fingerprint != before.fingerprint


def test_tokenizers_that_cannot_be_used(small_tokenizer):
    with pytest.raises(UserError, match="no fast backend"):
        TokenizerSpec.of(object())
    tok = small_tokenizer(eos_token="<|im_end|>")
    tok.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        ChatTokenizer(TokenizerSpec.of(tok), 64)
    DocumentTokenizer(TokenizerSpec.of(tok), 64)
