"""The race to a held-out loss, against a peer that ends where it is told to: at our own initial weights."""

import json
import sys

import pytest

from common.errors import UserError
from model.model_minimind import MiniMindConfig
from scripts.bench import time_to_loss
from tests.scripts.fake_minimind import make_checkout
from trainer.components.model_files import save_weights
from trainer.trainer_utils import init_model, setup_seed

ITS_SCRIPT = """
import os, pathlib, shutil, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert flags["--epochs"] == "1" and flags["--hidden_size"] == "32" and pathlib.Path("../model/tokenizer.json").exists()
assert len(open(flags["--data_path"], encoding="utf-8").readlines()) == 75
shutil.copy(os.environ["ITS_WEIGHTS"], pathlib.Path(flags["--save_dir"], "full_sft_32.pth"))
"""


def race(monkeypatch, *flags) -> None:
    """The script in this process."""
    monkeypatch.setattr(sys, "argv", ["time_to_loss.py", *map(str, flags)])
    time_to_loss.main()


def test_the_race(corpus, tmp_path, monkeypatch, capsys):
    setup_seed(0)
    model, _ = init_model(MiniMindConfig(hidden_size=32, num_hidden_layers=1), "none")
    save_weights(model, tmp_path / "weights.pth")
    monkeypatch.setenv("ITS_WEIGHTS", str(tmp_path / "weights.pth"))
    checkout = make_checkout(tmp_path / "peer", train_full_sft=ITS_SCRIPT)
    ours = ["--data_path", corpus["sft"], "--eval_data_path", corpus["sft_eval"], "--cache_dir", corpus["cache"]]
    ours += ["--hidden_size", 32, "--num_hidden_layers", 1, "--max_seq_len", 64, "--from_weight", "none"]
    ours += ["--batch_size", 8, "--learning_rate", 1e-2, "--eval_interval", 4, "--epochs", 1000]
    own = ["--stage", "sft", "--peer_path", checkout, "--folder", tmp_path / "race", "--json", tmp_path / "race.json"]
    race(monkeypatch, *own, "--", *ours)
    found = json.loads((tmp_path / "race.json").read_text())
    assert found["ours"]["reached"] and found["ours"]["eval_loss"] <= found["peer_eval_loss"]
    assert found["peer_eval_loss"] == pytest.approx(8.76, abs=0.2)  # ln 6400: it has learnt nothing
    assert found["ratio"] == found["peer_seconds"] / found["ours"]["wall_seconds"] > 0
    assert found["ours"]["update"] < 1000  # it was ended there

    (tmp_path / "weights.pth").unlink()  # the peer cannot run again, and need not
    monkeypatch.setattr(time_to_loss, "run_ours", lambda *_: {"wall_seconds": 1.0, "reached": False, "eval_loss": 9.9})
    race(monkeypatch, *own, "--", *ours)
    said = capsys.readouterr().out
    assert "the peer has run before" in said and "NOT reached, 9.9000 at the end" in said
    with pytest.raises(UserError, match=r"failed .*No such file.* its output is in .*peer\.log"):
        race(monkeypatch, *own, "--peer_epochs", 1, "--", *ours, "--max_seq_len", 63)


def test_what_is_missing_is_one_line(corpus, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="not a checkout of minimind"):
        race(monkeypatch, "--peer_path", tmp_path, "--", "--data_path", "x", "--eval_data_path", "y")
    with pytest.raises(UserError, match="give --eval_data_path after --"):
        race(monkeypatch, "--peer_path", tmp_path, "--", "--data_path", "x")
