"""scripts/train_tokenizer.py: a small vocabulary from generated lines, and one-line errors for files it
cannot use."""

import json

import pytest
from transformers import AutoTokenizer

from scripts import train_tokenizer
from scripts.train_tokenizer import read_texts
from tests.conftest import ROOT, write_jsonl


@pytest.fixture
def train(call):
    return lambda *flags: call(train_tokenizer, *flags)


@pytest.fixture
def corpus(tmp_path):
    english = [{"text": f"The baker of village {i} sells bread and honey."} for i in range(60)]
    chinese = [
        {"conversations": [{"role": "user", "content": f"第{i}个村庄的面包师卖什么？面包和蜂蜜。"}]}
        for i in range(60)
    ]
    return write_jsonl(tmp_path / "corpus.jsonl", english + chinese)


def test_train_reload_and_report(train, corpus, tmp_path):
    out = tmp_path / "tokenizer"
    plain = tmp_path / "notes.txt"
    plain.write_text("One record\n\na line.\n", encoding="utf-8")
    options = ["--vocab_size", 400, "--output_dir", out]
    result = train("--data_path", corpus, "--data_path", plain, *options)
    assert (result.returncode, result.stderr) == (0, "")
    assert "400 tokens" in result.stdout
    assert "held out, zh:" in result.stdout and "held out, en:" in result.stdout

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == 400
    first = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    assert tokenizer.convert_tokens_to_ids(first) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    for text in ["The baker 面包师 1234", " \n\t\x00 é 👍 <think> <|im_end|>", "", "don 't , ."]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    shipped = AutoTokenizer.from_pretrained(ROOT / "model")
    assert tokenizer.chat_template == shipped.chat_template

    files = [json.loads((folder / "tokenizer.json").read_text("utf-8")) for folder in (out, ROOT / "model")]
    for part in ("normalizer", "pre_tokenizer", "decoder"):  # what makes it readable to other programs
        assert files[0][part] == files[1][part]

    again = tmp_path / "again"
    options[options.index(out)] = again
    train("--data_path", corpus, "--data_path", plain, *options)
    assert (again / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"text": "good"}\n{"text": "bad\n', "bad.jsonl:2: not valid JSON"),
        (b'{"text": "good"}\n{"body": "no known field"}\n', "bad.jsonl:2: no 'conversations'"),
        (b"\n", "bad.jsonl holds no record"),
    ],
)
def test_a_bad_file_is_named_with_its_line(error_line, tmp_path, content, says):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    assert says in error_line(train_tokenizer, "--data_path", bad, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data_path", "no_such_file.jsonl"], "no_such_file.jsonl: no such file"),
        (["--vocab_size", "200"], "--vocab_size 200 is too small"),
        (["--output_dir", "README.md/x"], "cannot be written"),
    ],
)
def test_a_bad_flag_is_named(error_line, corpus, tmp_path, options, says):
    (tmp_path / "README.md").write_text("a file")
    options = [str(tmp_path / option) if option == "README.md/x" else option for option in options]
    flags = ["--data_path", corpus, "--output_dir", tmp_path / "out", "--vocab_size", 300, *options]
    assert says in error_line(train_tokenizer, *flags)


def test_text_of_every_format(tmp_path):
    records = [
        {"text": "a"},
        {
            "messages": [
                {"role": "user", "content": "b"},
                {"role": "assistant", "reasoning_content": "c", "content": "d"},
            ]
        },
        {"conversations": [{"from": "human", "value": "e"}]},
        {"output": "h", "instruction": "f", "input": "", "history": [["g", "G"]], "id": "not text"},
        {"prompt": "i", "chosen": "j", "rejected": "k"},
        {"prompt": "l", "completion": "m", "tools": [{"type": "function", "function": {"name": "n"}}]},
    ]
    *others, called = read_texts(str(write_jsonl(tmp_path / "x.jsonl", records)))
    assert others == ["a", "b\nd\nc", "e", "g\nG\nf\nh", "i\nj\ni\nk"]
    assert {*called.split("\n")} >= {"l", "m", "n"}
