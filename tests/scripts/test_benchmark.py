"""The benchmark measures what it says: its counts are those of the data, its arithmetic that of torch's own
counter, and a peer trains on the same samples to the same losses."""

import json
import math

import pytest
from torch.utils.flop_counter import FlopCounterMode

from dataset.batch import training_flops
from dataset.lm_dataset import SFTDataset
from dataset.order import epoch_loader, epoch_order
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import benchmark
from tests.conftest import ROOT
from tests.scripts.fake_minimind import make_checkout

SMALL = ["--hidden_size", 32, "--num_hidden_layers", 1, "--max_seq_len", 64, "--batch_size", 4]


def test_figures(corpus, tmp_path, call):
    out = tmp_path / "figures.json"
    flags = ["--stage", "pretrain", "--data_path", corpus["pretrain"], "--cache_dir", corpus["cache"], *SMALL]
    flags += ["--json", out, "--accumulation_steps", 2, "--warmup", 1, "--updates", 3]
    assert call(benchmark, *flags).returncode == 0
    figures = json.loads(out.read_text())
    assert figures["tokens_per_second"] > 0 and 0 < figures["mfu"] <= 1
    assert 0 <= figures["data_wait"] < 1 and figures["matmul_peak_tflops"] > 0
    assert figures["peak_memory_mb"] > 50


def test_a_peer_in_turn_on_the_same_samples_with_the_same_losses(corpus, tmp_path, call):
    """The peer is a checkout whose model is transformers' Qwen3."""
    out = tmp_path / "figures.json"
    done = call(
        benchmark, "--data_path", corpus["sft"], "--cache_dir", corpus["cache"], *SMALL,
        "--max_seq_len", 256,
        "--dtype", "float32", "--learning_rate", 1e-2, "--warmup", 1, "--updates", 2,
        "--repeat", 2, "--peer", "minimind", "--peer_path", make_checkout(tmp_path / "peer"), "--json", out,
    )  # fmt: skip
    found = json.loads(out.read_text())
    assert len(found["pairs"]) == 2
    assert found["ratio_median"] == pytest.approx(sum(pair["ratio"] for pair in found["pairs"]) / 2)
    losses = found["losses"]
    assert len(losses["ours"]) == len(losses["peer"]) == 5  # updates, warm-up included
    assert losses["ours"][0] == pytest.approx(losses["peer"][0], rel=1e-6)
    assert losses["ours"] == pytest.approx(losses["peer"], rel=1e-3) and losses["agree"]
    assert losses["ours"][-1] < losses["ours"][0] - 0.1  # the weights did move
    assert "losses of 5 updates on the same targets agree" in done.stdout


@pytest.mark.slow
def test_until_a_loss_each_by_its_own_recipe(corpus, tmp_path, call):
    out, data = tmp_path / "figures.json", ["--data_path", corpus["sft"], "--cache_dir", corpus["cache"]]
    options = [
        *data,
        *SMALL,
        "--eval_share",
        0.2,
        "--dtype",
        "float32",
        "--optimizer",
        "muon",
        "--updates",
        2,
    ]
    options += ["--accumulation_steps", 1, "--learning_rate", 1e-3, "--epochs", 40, "--json", out]
    recipe = "--batch_size 4 --accumulation_steps 1 --learning_rate 1e-4 --grad_clip 1 --epochs 1"
    peer = ["--peer", "minimind", "--peer_path", make_checkout(tmp_path / "peer"), "--peer_flags", recipe]
    done = call(benchmark, *options, *peer, "--until_loss", 8.0)
    found = json.loads(out.read_text())
    assert found["ours"]["loss"] <= 8.0 < found["minimind"]["loss"] < 8.8
    assert found["ours"]["seconds"] > 0 and found["minimind"]["tokens"] > 100
    assert "ours: reached: " in done.stdout and "minimind: not reached at the end of its run: " in done.stdout
    # both evaluate the same targets of the same weights
    frozen = ["--learning_rate", 1e-12, "--peer_flags", recipe.replace("1e-4", "1e-12")]
    call(benchmark, *options, *peer, *frozen, "--until_loss", 9.0)
    found = json.loads(out.read_text())
    assert found["ours"]["loss"] == pytest.approx(found["minimind"]["loss"], rel=1e-6)
    assert found["ours"]["tokens"] == pytest.approx(
        found["minimind"]["tokens"], rel=0.01
    )  # of two micro-batches


def test_a_mistake_is_one_line(corpus, tmp_path, error_line):
    data = ["--data_path", corpus["sft"], "--cache_dir", corpus["cache"], *SMALL]
    checkout = make_checkout(tmp_path / "a", model_minimind="import no_such_package")
    peer = ["--peer", "minimind", "--peer_path", checkout]
    for flags, expected in (
        (["--peer", "minimind"], "needs --peer_path"),
        (["--peer", "minimind", "--peer_path", tmp_path], "is not a checkout of minimind: no "),
        (["--stage", "pretrain", "--peer", "trl"], "--peer trl is for --stage sft"),
        ([*peer, "--optimizer", "muon"], "--peer minimind trains with AdamW: add --optimizer adamw"),
        (["--until_loss", 3], "--until_loss needs held-out data: --eval_data_path or --eval_share"),
        (["--until_loss", 3, "--peer", "trl", "--eval_share", 0.1], "compares with --peer minimind only"),
        (["--json", "none/a.json"], "--json none/a.json: there is no folder none"),
        (["--repeat", 0], "must be at least 1"),
        (["--bath_size", 2], "--bath_size is unknown; did you mean --batch_size"),
        ([*peer, "--updates", 1], "No module named 'no_such_package'; install it for"),
        ([*peer, "--updates", 100], " are needed"),
    ):
        assert expected in error_line(benchmark, *data, *flags)


def test_counted_arithmetic_is_torchs(corpus):
    """torch counts matrix products only, and attention per sample; the masked half of attention is left out
    here."""
    dataset = SFTDataset(str(corpus["sft"]), load_tokenizer(ROOT / "model"), 64, cache_dir=corpus["cache"])
    batch = next(iter(epoch_loader(dataset, epoch_order(len(dataset), 0, 0), 6)))
    config = MiniMindConfig(hidden_size=64, num_hidden_layers=2)
    model = MiniMindForCausalLM(config)
    counter = FlopCounterMode(display=False)
    with counter:
        model(**batch.model_inputs(), targets=batch["targets"]).loss.backward()
    attention = sum(
        flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" in str(op)
    )  # forward and backward of every sample, whole squares
    matrices = counter.get_total_flops() - attention
    # the model fills up to these
    rows = [math.ceil(len(batch[name]) / 64) * 64 for name in ("input_ids", "targets")]
    ours = training_flops(config, *rows, batch["host_cu_seqlens"])
    squares = float(batch["cu_seqlens"].diff().double().square().sum())
    ours_attention = 6.0 * config.num_hidden_layers * squares * config.num_attention_heads * config.head_dim
    assert ours - ours_attention == pytest.approx(matrices, rel=1e-6)
