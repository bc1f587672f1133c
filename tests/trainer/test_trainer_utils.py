"""The helpers that MiniMind users know, by their names and signatures."""

import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from dataset.order import epoch_order, rank_share
from model.model_minimind import MiniMindConfig
from trainer import trainer_utils as utils
from trainer.loop import train_epoch


def test_names_and_signatures():
    want = {
        utils.init_distributed_mode: "",
        utils.setup_seed: "seed",
        utils.get_lr: "current_step total_steps lr",
        utils.init_model: "lm_config from_weight tokenizer_path save_dir device",
        utils.SkipBatchSampler.__init__: "self sampler batch_size skip_batches",
        utils.lm_checkpoint: "lm_config weight model optimizer epoch step wandb save_dir",
        utils.Logger: "text",
        utils.is_main_process: "",
        train_epoch: "state epoch loader iters start_step wandb",
    }
    for function, names in want.items():
        assert " ".join(inspect.signature(function).parameters).startswith(names), function


@given(st.integers(0, 200), st.integers(1, 9), st.integers(0, 30))
def test_skipping_leaves_out_exactly_the_batches_done(count, batch_size, skip):
    order = np.random.default_rng(0).permutation(count)
    everything = list(utils.SkipBatchSampler(order, batch_size))
    assert sum(everything, []) == order.tolist()
    sampler = utils.SkipBatchSampler(order, batch_size, skip)
    assert list(sampler) == everything[skip:] and len(sampler) == len(everything[skip:])
    assert list(utils.SkipBatchSampler(iter(order.tolist()), batch_size, skip)) == everything[skip:]


def test_a_checkpoint_holds_the_id_of_the_tracker_given_as_a_run_or_as_its_module(tmp_path):
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
    run = SimpleNamespace(id="abc")
    for wandb in (run, SimpleNamespace(get_run=lambda: run)):
        utils.lm_checkpoint(config, "x", torch.nn.Linear(2, 2), wandb=wandb, save_dir=tmp_path)
        assert utils.lm_checkpoint(config, "x", save_dir=tmp_path)["wandb_id"] == "abc"


@given(st.integers(0, 300), st.integers(1, 8), st.integers(1, 5), st.integers(0, 5))
def test_the_ranks_share_one_order(count, batch_size, ranks, epoch):
    order = epoch_order(count, 42, epoch)
    assert sorted(order.tolist()) == list(range(count))
    shares = [rank_share(order, batch_size, rank, ranks) for rank in range(ranks)]
    steps = math.ceil(count / (batch_size * ranks))
    batches = [list(utils.SkipBatchSampler(share, batch_size, 0, steps)) for share in shares]
    for k in range(steps):  # global micro-batch k is slice k of the order
        slice_k = order[k * batch_size * ranks : (k + 1) * batch_size * ranks].tolist()
        assert sum((batches[rank][k] for rank in range(ranks)), []) == slice_k


def test_a_tokenizer_too_large_for_the_model_is_refused():
    with pytest.raises(UserError, match="6400 tokens, the model's vocabulary 100"):
        utils.init_model(MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=100), "none")
