"""The speed of rollouts and updates: both sides sample as many completions, and the peer's script runs as it is."""

import json
import sys

import pytest

from common.errors import UserError
from model.model_minimind import MiniMindConfig
from scripts.bench import rollouts
from tests.conftest import write_jsonl
from tests.scripts.fake_minimind import make_checkout
from trainer.components.model_files import save_weights
from trainer.trainer_utils import init_model, setup_seed

ENGINE = """
from types import SimpleNamespace

class TorchRolloutEngine:
    def __init__(self, model):
        self.model = model

    def rollout(self, prompt_ids, attention_mask, num_generations, max_new_tokens):
        rows, mask = (x.repeat_interleave(num_generations, dim=0) for x in (prompt_ids, attention_mask))
        options = {"max_new_tokens": max_new_tokens, "do_sample": True, "pad_token_id": 0}
        out = self.model.generate(rows, attention_mask=mask, **options)
        return SimpleNamespace(completion_ids=out[:, prompt_ids.shape[1] :])

def create_rollout_engine(model):
    return TorchRolloutEngine(model)
"""
SCRIPT = """
import json, sys
import torch
from model.model_minimind import MiniMindConfig
from torch.utils.data import DataLoader
from trainer.rollout_engine import create_rollout_engine
from trainer.trainer_utils import LMForRewardModel, SkipBatchSampler, init_model

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert flags["--loss_type"] == "grpo" and flags["--beta"] == "0.1" and flags["--thinking_ratio"] == "0.0"
config = MiniMindConfig(int(flags["--hidden_size"]), int(flags["--num_hidden_layers"]), int(flags["--use_moe"]))
model, tokenizer = init_model(config, "none", device=flags["--device"])
rewards, engine = LMForRewardModel("a folder"), create_rollout_engine(model)
records = [json.loads(line)["conversations"][:-1] for line in open(flags["--data_path"])]
texts = [tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for turns in records]
for batch in DataLoader(texts, batch_sampler=SkipBatchSampler(range(len(texts)), int(flags["--batch_size"]))):
    inputs = tokenizer(batch, padding=True, padding_side="left", return_tensors="pt")
    group, length = int(flags["--num_generations"]), int(flags["--max_gen_len"])
    engine.rollout(inputs["input_ids"], inputs["attention_mask"], num_generations=group, max_new_tokens=length)
    assert rewards.get_score([], "") == 0.0
"""


def measured(monkeypatch, *flags) -> None:
    monkeypatch.setattr(sys, "argv", ["rollouts.py", *map(str, flags)])
    rollouts.main()


def test_ratios_of_rollouts_and_updates(tmp_path, monkeypatch, capsys):
    setup_seed(0)
    model, _ = init_model(MiniMindConfig(hidden_size=32, num_hidden_layers=1), "none")
    save_weights(model, tmp_path / "full_sft_32.pth")
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{number} and one?"} for number in range(5)])
    checkout = make_checkout(tmp_path / "peer")
    for name, text in {"train_grpo": SCRIPT, "rollout_engine": ENGINE}.items():
        (checkout / "trainer" / f"{name}.py").write_text(text, encoding="utf-8")
    size = ["--prompts", 2, "--num_generations", 3, "--max_gen_len", 4, "--repeat", 2]
    where = ["--save_dir", tmp_path, "--data_path", data, "--peer_path", checkout, "--json", tmp_path / "r.json"]
    measured(monkeypatch, *where, *size)
    told = capsys.readouterr().out
    assert "rollouts, ratio: " in told and "updates, ratio: " in told
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    for part, names in {"rollouts": ("ours", "generate"), "updates": ("ours", "MiniMind")}.items():
        assert len(report[part]["ratios"]) == 2
        for name in names:  # random weights hardly ever end an answer
            assert report[part][name]["lengths"] == pytest.approx([4.0, 4.0], abs=0.5)
    ours, theirs = (report["updates"][name]["rates"] for name in ("ours", "MiniMind"))
    assert report["updates"]["ratios"] == pytest.approx([a / b for a, b in zip(ours, theirs, strict=True)])


def test_a_wrong_checkout_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is not a checkout of minimind"):
        measured(monkeypatch, "--data_path", "x.jsonl", "--peer_path", tmp_path)
