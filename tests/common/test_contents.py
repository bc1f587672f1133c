"""What a file is by its first bytes, where weights and tokenizers are read."""

import json

import pytest

from common.contents import check_content, describe, is_binary
from common.errors import UserError
from dataset.token_cache import load_tokenizer
from trainer.weights.files import read_description
from trainer.weights.import_hf import read_folder

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n"
PAGE = b"<!DOCTYPE html>\n<html><body>Sign in</body></html>"
CONFIG = {"model_type": "qwen3", "vocab_size": 8, "hidden_size": 16}


@pytest.mark.parametrize(("content", "what"), [(POINTER, "a Git LFS pointer"), (PAGE, "a saved web page")])
def test_weights_and_tokenizers_that_are_pointers_or_pages(content, what, tmp_path):
    weights, tokenizer, model = tmp_path / "a_16.pth", tmp_path / "tokenizer", tmp_path / "model"
    weights.write_bytes(content)
    with pytest.raises(UserError, match=f"a_16.pth is {what}"):
        read_description(weights)
    for folder in (tokenizer, model):
        folder.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=f"tokenizer.json is {what}"):
        load_tokenizer(tokenizer)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=f"model.safetensors is {what}"):
        read_folder(model)


def test_other_files_are_left_to_whoever_reads_them(tmp_path):
    for name, content in (("a.pth", b"PK\x03\x04"), ("b.json", b"{}"), ("c", b"")):
        (tmp_path / name).write_bytes(content)
        check_content(tmp_path / name)
    assert describe(tmp_path / "b.json", b'{"text": "<html>"}') is None


def test_binary_is_what_no_text_is():
    text = "ein Gruß\0, 河流".encode()
    assert not any(is_binary(raw) for raw in (text, text[:-1], "Gruß".encode("latin-1"), "河".encode("gbk")))
    assert all(is_binary(raw) for raw in (b"\xff\xfe\0\0", b"a\0b\0", bytes(99)))
