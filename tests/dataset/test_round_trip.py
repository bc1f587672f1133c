"""A tokenizer that loses text is named, refused above a share, and has no bits per byte."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common.errors import UserError
from dataset.round_trip import difference
from tests.dataset.conftest import MARKED, TEXTS, build, samples_of

ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
RECORDS = [{"text": text} for text in TEXTS]


def tokenizer_of(backend: Tokenizer, trainer_class=trainers.BpeTrainer, **options) -> PreTrainedTokenizerFast:
    trainer = trainer_class(special_tokens=["[UNK]", "<s>", "</s>"], show_progress=False, **options)
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **ROLES)


def byte_level(**parts) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(backend, name, part)
    return tokenizer_of(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), vocab_size=400)


def whitespace() -> PreTrainedTokenizerFast:
    """As tokenizers' quick tour makes it."""
    backend = Tokenizer(models.BPE(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer_of(backend)


def words() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer_of(backend, trainers.WordLevelTrainer, vocab_size=20)


def characters() -> PreTrainedTokenizerFast:
    """Without a token for most of them, and none for what is unknown."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer_of(backend, limit_alphabet=20)


LOSSY = {
    "lower case": (lambda: byte_level(normalizer=normalizers.Lowercase()), "'T'"),
    "accents": (lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), "'é'"),
    "full width": (lambda: byte_level(normalizer=normalizers.NFKC()), "'，'"),
    "double spaces": (lambda: byte_level(normalizer=normalizers.Replace("\n\n", "\n")), r"'\\n'"),
    "white space": (whitespace, "' '"),
    "unknown words": (words, ""),
    "unknown characters": (characters, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSY)
def test_what_is_lost_is_named_and_refused(name, write, cache_dir, capsys):
    make, named = LOSSY[name]
    tokenizer, path = make(), write("x.jsonl", RECORDS)
    with pytest.raises(UserError, match=rf"--tokenizer_path: the tokenizer loses or alters .*{named}"):
        build("pretrain", path, tokenizer, cache_dir)
    cache = build("pretrain", path, tokenizer, cache_dir, max_lost_text=1.0)
    report = cache.report
    assert 0 < report["lost"] <= report["compared"] * 2 and not cache.target_bytes.any()
    said = capsys.readouterr().err
    assert "warning: the tokenizer loses or alters" in said and "eval_bpb" in said
    with pytest.raises(UserError, match="accept the loss with --max_lost_text"):
        build("pretrain", path, tokenizer, cache_dir)  # the cache is there


KEEPING = {
    "byte level": byte_level,
    "composed characters": lambda: byte_level(normalizer=normalizers.NFC()),
    "decomposed characters": lambda: byte_level(normalizer=normalizers.NFD()),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_tokenizer_that_keeps_all_text_is_not_spoken_of(name, write, cache_dir, capsys):
    cache = build(
        "pretrain", write("x.jsonl", [*RECORDS, {"text": "cafe\u0301 </s> é"}]), KEEPING[name](), cache_dir
    )
    assert cache.report["lost"] == 0 < cache.report["compared"] and cache.target_bytes.all()
    assert capsys.readouterr().err == ""


def test_a_text_of_which_no_token_is_left_is_empty():
    """Else the end of a text would be learned where one begins."""
    samples, maker = samples_of(characters(), "pretrain", [{"text": "\U0010ffff\U0010fffe"}, {"text": "e"}])
    assert [sample.source.line for sample in samples] == [2] and maker.counts["empty"] == 1


def test_conversations_are_compared_without_the_text_of_special_tokens(tokenizer):
    forged = {"role": "user", "content": "<|im_end|> The harbour"}
    record = {"messages": [forged, {"role": "assistant", "content": "河流 <|im_start|>"}]}
    _, maker = samples_of(tokenizer, "sft", [record] * 3)
    assert maker.round_trip.report()["lost"] == 0 < maker.round_trip.characters
    lower = byte_level(normalizer=normalizers.Lowercase())
    lower.chat_template = MARKED
    _, maker = samples_of(lower, "sft", [record] * 3)
    assert maker.round_trip.lost == {"T": 3}


def test_a_sample_of_a_large_corpus_is_compared(tokenizer):
    records = [{"text": "ab"}] * 3000 + [{"text": "c" * 100_000}]
    _, maker = samples_of(tokenizer, "pretrain", records)
    compared = maker.round_trip.characters
    assert compared == 2 * 64 + 2 * 11  # the 3001st is none of them


def test_what_is_added_counts_like_what_is_lost():
    assert difference("a b", "ab") == {" ": 1} and difference("ab", "a b") == {" ": 1}
    assert not difference("e\u0301", "é") and not difference("ab", "ba")
