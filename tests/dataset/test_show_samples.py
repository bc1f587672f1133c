"""`python -m dataset.show_samples`: what a person sees of the labels."""

import subprocess
import sys

import pytest

from common.command_line import one_line_errors
from dataset.lm_dataset import SFTDataset
from dataset.show_samples import main, show

CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"你好 {i} 🙂"}]}
    for i in range(5)
]


@pytest.fixture
def inspect(monkeypatch, capsys):
    """inspect(*options) gives what the command prints."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["inspect", *map(str, options)])
        with one_line_errors():
            main()
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def test_tokens_and_report(write, cache_dir, tokenizer, inspect):
    path = write("a.jsonl", CHATS)
    common = ("--kind", "sft", "--data_path", path, "--cache_dir", cache_dir, "--max_seq_len", 64)
    out = inspect(*common, "--samples", 1, "--table", 1)
    lines = out.splitlines()
    table = [line.split(maxsplit=3) for line in lines if len(line.split()) > 2 and line.split()[2] in ("target", ".")]
    ids = [int(row[1]) for row in table]
    trained = [row[2] == "target" for row in table]
    text = tokenizer.apply_chat_template(CHATS[0]["messages"], return_assistant_tokens_mask=True, return_dict=True)
    assert ids == text["input_ids"] and trained == [bool(x) for x in text["assistant_masks"]]
    assert any(line.startswith(f"sample 0 from {path}:1: {len(ids)} tokens, {sum(trained)} targets") for line in lines)
    assert "<|im_end|>" in table[-2][3] and "\\n" in table[-1][3] and "\033" not in out
    assert "5 records in 1 files" in out
    packed = inspect(*common, "--samples", 1, "--packing", 1)
    assert "row 0: " in packed and "filled" in packed
    assert "sample 0" not in inspect(*common, "--samples", 0)


ODD = "<script>alert('&')</script>\x1b[2J\x00\u202e\n\n龘 🙂\u3000第"
ODD_CHAT = {"messages": [{"role": "user", "content": ODD}, {"role": "assistant", "content": ODD}]}


def test_running_text_marks_what_is_trained(write, cache_dir, tokenizer, inspect, capsys):
    path = write("a.jsonl", [ODD_CHAT])
    seen = ODD.replace("\x1b", "\\x1b").replace("\x00", "\\x00").replace("\u202e", "\\u202e")
    out = inspect("--kind", "sft", "--data_path", path, "--cache_dir", cache_dir, "--samples", 1)
    assert f"<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>assistant\n⟦{seen}<|im_end|>⟧\n" in out
    ds = SFTDataset(path, tokenizer, 768, cache_dir=cache_dir)
    capsys.readouterr()
    show(ds, tokenizer, 1, colour=True)
    out = capsys.readouterr().out
    green = [part.split("\033[0m")[0] for part in out.split("\033[32m")[1:]]
    assert [line for line in green if line] == [line for line in (seen + "<|im_end|>").split("\n") if line]
    assert "⟦" not in out and out.count("\033") == 2 * (len(green) + out.count("\033[90m"))


def test_a_negative_number_of_samples(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["inspect", "--kind", "sft", "--data_path", "x", "--samples", "-1"])
    with pytest.raises(SystemExit), one_line_errors():
        main()
    assert capsys.readouterr().err.startswith("error: --samples -1 is negative")


def test_colours_on_a_terminal(write, cache_dir, tokenizer, capsys):
    ds = SFTDataset(write("a.jsonl", CHATS), tokenizer, 64, cache_dir=cache_dir)
    capsys.readouterr()
    show(ds, tokenizer, 1, colour=True, as_table=True)
    lines = capsys.readouterr().out.splitlines()
    for line in lines[1 : 1 + len(ds[0][0]["input_ids"])]:
        assert line.startswith("\033[32m" if "target" in line else "\033[90m") and line.endswith("\033[0m")


def test_a_reader_who_has_seen_enough(write, cache_dir):
    path = write("a.jsonl", [{"text": "the river 🙂 " * 50}] * 50)
    start = f"{sys.executable} -m dataset.show_samples --kind pretrain --data_path {path} --cache_dir {cache_dir}"
    done = subprocess.run(f"{start} --samples 50 | head -n 12", shell=True, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.count("river") >= 1
