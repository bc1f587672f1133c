"""The benchmark measures what it says: its counts are those of the data, its arithmetic that of torch's own counter."""

import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dataset.lm_dataset import SFTDataset
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.conftest import ROOT, launch
from trainer.speed import training_flops
from trainer.trainer_utils import epoch_loader, load_tokenizer


@pytest.mark.parametrize("stage", ["sft", "pretrain"])
def test_figures(corpus, tmp_path, stage):
    small = ["--hidden_size", 32, "--num_hidden_layers", 1, "--max_seq_len", 64, "--batch_size", 4]
    out = tmp_path / "figures.json"
    launch(
        ROOT / "scripts/benchmark.py", "--stage", stage, "--data_path", corpus[stage], "--cache_dir", corpus["cache"],
        *small, "--accumulation_steps", 2, "--warmup", 1, "--updates", 3, "--json", out,
    )  # fmt: skip
    figures = json.loads(out.read_text())
    assert figures["tokens_per_second"] > 0 and 0 < figures["mfu"] < 1
    assert 0 < figures["padded_share"] < 1 and 0 <= figures["data_wait"] < 1
    assert figures["peak_memory_mb"] > 50


def test_counted_arithmetic_is_torchs(corpus):
    """torch counts matrix products only, and attention per sample; the masked half of attention is left out here."""
    dataset = SFTDataset(str(corpus["sft"]), load_tokenizer(ROOT / "model"), 64, cache_dir=corpus["cache"])
    batch = next(iter(epoch_loader(dataset, 6, 0, 0)))
    config = MiniMindConfig(hidden_size=64, num_hidden_layers=2)
    model = MiniMindForCausalLM(config)
    batch.pop("sample_ids"), batch.pop("target_bytes")
    counter = FlopCounterMode(display=False)
    with counter:
        model(**batch).loss.backward()
    attention = sum(
        flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" in str(op)
    )  # forward and backward of every sample, whole squares
    matrices = counter.get_total_flops() - attention
    rows = [math.ceil(len(batch[name]) / 64) * 64 for name in ("input_ids", "targets")]  # the model fills up to these
    ours = training_flops(config, *rows, batch["cu_seqlens"])
    squares = float(batch["cu_seqlens"].diff().double().square().sum())
    ours_attention = 6.0 * config.num_hidden_layers * squares * config.num_attention_heads * config.head_dim
    assert ours - ours_attention == pytest.approx(matrices, rel=1e-6)
    assert torch.is_tensor(batch["targets"])
