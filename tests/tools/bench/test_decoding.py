"""The speed of rollouts: both decoders sample as many completions to the same prompts."""

import re
import sys

import pytest

from common.errors import UserError
from model.model_minimind import MiniMindConfig
from tests.conftest import write_jsonl
from tools.bench import decoding
from trainer.trainer_utils import init_model, setup_seed
from trainer.weights.files import save_weights


def measured(monkeypatch, *flags) -> None:
    monkeypatch.setattr(sys, "argv", ["decoding.py", *map(str, flags)])
    decoding.main()


def test_the_ratio_of_rollouts(tmp_path, monkeypatch, capsys):
    setup_seed(0)
    model, _ = init_model(MiniMindConfig(hidden_size=32, num_hidden_layers=1), "none")
    save_weights(model, tmp_path / "full_sft_32.pth")
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{number} and one?"} for number in range(5)])
    size = ["--prompts", 2, "--max_gen_len", 4, "--repeat", 2]
    measured(monkeypatch, "--save_dir", tmp_path, "--data_path", data, *size)
    found = capsys.readouterr().out
    lengths = re.findall(r"^(ours|generate): [\d,]+ tokens/s, ([\d.]+) tokens per completion$", found, re.M)
    assert [name for name, _ in lengths] == ["ours", "generate"]
    # random weights go on
    assert [float(length) for _, length in lengths] == pytest.approx([4.0, 4.0], abs=0.5)
    assert re.search(r"^ratio: [\d.]+ \([\d.]+, [\d.]+\)$", found, re.M)


def test_sizes_must_be_positive(monkeypatch):
    with pytest.raises(UserError, match="must be at least 1"):
        measured(monkeypatch, "--data_path", "x.jsonl", "--prompts", 0)
