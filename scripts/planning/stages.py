"""The stages of a plan: their settings and data, and what they take with a model of some size."""

import argparse
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import UserError, say
from common.settings import ROOT, ModelConfig, StageArgs
from dataset.files import expand_paths, is_plain_text, parts_of, read_records
from dataset.lm_dataset import StageDataset, collate_flat
from dataset.report import BadRecords
from dataset.token_cache import load_tokenizer
from dataset.tokenizing import Sample, SampleMaker, bytes_of_tokens
from scripts.planning.machine import STATE, Cost, Machine, count_parameters, training_cost
from trainer import train_full_sft, train_pretrain
from trainer.data.datasets import epoch_items, epoch_tokens
from trainer.objectives.next_token import Batch, model_config
from trainer.optim import rules
from trainer.report.metrics import duration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindConfig

WIDTH = 64  # of a model, per layer: --depth 8 is the default model, 512 x 8
START = 12.0  # seconds of a stage before it trains
N_EVALS, EVAL_COST = 5, 0.4  # of a stage; the cost of a token in one, where training it costs 1
FEW_UPDATES = 100
FIRST_RECORDS = 1000  # that are tokenised to tell how long all of them take; of plain text a single part
LITTLE_TEXT = 2e6  # bytes: tokenised in seconds
SHARED = ("eval_share", "text_separator", "cache_dir", "device", "dtype")  # flags that are the stages' own


@dataclass(frozen=True)
class Stage:
    """A stage of a plan: its script and settings, its data, and what the model costs."""

    script: Any
    args: StageArgs
    data: StageDataset
    held_out: StageDataset
    ranks: int
    cost: Cost

    @property
    def tokens(self) -> int:
        """Tokens to train."""
        return round(epoch_tokens(self.data, self.args)) * self.args.epochs

    @property
    def updates(self) -> int:
        """Optimizer steps."""
        per_update = self.args.batch_size * self.args.accumulation_steps * self.ranks
        return math.ceil(epoch_items(self.data, self.args) / per_update) * self.args.epochs

    @property
    def seconds(self) -> float:
        """From its start to its weights, with evaluations."""
        tokens = self.tokens + N_EVALS * EVAL_COST * self.held_out.num_tokens
        return START + tokens / self.ranks * self.cost.token + self.updates * self.cost.update

    @property
    def memory(self) -> float:
        """Bytes of a rank."""
        return self.cost.memory(self.data.mean_tokens * self.args.batch_size)

    def with_model(self, depth: int, cost: Cost, epochs: int, memory: float, share: float = 1.0) -> "Stage":
        """With a model of so many layers and this share of the data: batch and rate by the rules, the
        micro-batch as the memory allows."""
        shape = {"hidden_size": WIDTH * depth, "num_hidden_layers": depth}
        args = self.args.model_copy(update=shape | {"epochs": epochs})
        if share < 1:
            max_tokens = max(1, round(share * self.data.num_tokens))
            args = args.model_copy(update={"max_tokens": max_tokens})
        stage = replace(self, args=rules.chosen(args, self.data, self.ranks), cost=cost)
        while stage.memory > memory and stage.args.batch_size > 1:
            half, twice = stage.args.batch_size // 2, stage.args.accumulation_steps * 2
            smaller = {"batch_size": half, "accumulation_steps": twice}
            stage = replace(stage, args=stage.args.model_copy(update=smaller))
        warmup = {"warmup_updates": rules.warmup(stage.updates)}
        return replace(stage, args=stage.args.model_copy(update=warmup))


def shape_of(depth: int, tokenizer: "PreTrainedTokenizerBase") -> "MiniMindConfig":
    """The config of the model of so many layers."""
    return model_config(tokenizer, ModelConfig(hidden_size=WIDTH * depth, num_hidden_layers=depth))


def check_first(args: argparse.Namespace, machine: Machine, config: "MiniMindConfig") -> None:
    """Raise UserError if the memory does not hold this model, or FEW_UPDATES updates of it take longer than
    --hours. The first block of the text tells, before all of it is tokenised; it also says how long that
    takes."""
    size = f"{config.hidden_size} x {config.num_hidden_layers}"
    if STATE * count_parameters(config) > machine.memory:
        raise UserError(f"{machine.memory / 1e9:.1f} GB of memory do not hold a model of {size}")
    paths = expand_paths(args.pretrain_data)
    text_bytes = sum(os.path.getsize(path) for path in paths)
    if text_bytes < LITTLE_TEXT:
        return
    tokenizer = load_tokenizer(args.tokenizer_path or ModelConfig().tokenizer_path)
    maker = SampleMaker("pretrain", tokenizer, train_pretrain.Args().max_seq_len, BadRecords(paths, "skip"))
    begin = time.monotonic()
    count = 1 if is_plain_text(paths[0]) else FIRST_RECORDS
    records = islice(read_records(paths, args.text_separator or ""), count)
    samples = list(maker.samples(records))
    if not samples:
        return
    spelled = bytes_of_tokens(tokenizer)[np.concatenate([sample.tokens for sample in samples])].sum()
    seconds = (time.monotonic() - begin) * text_bytes / spelled
    if seconds > 60:
        say(f"tokenising {text_bytes / 1e6:,.0f} MB takes about {duration(seconds)}")
    if args.hours == math.inf:
        return
    update_tokens = rules.update_tokens(0)
    cost = training_cost(machine, config, first_batch(samples, update_tokens))
    n_stages = 1 if args.sft_data is None else 2
    least = n_stages * START + FEW_UPDATES * (update_tokens * cost.token / machine.ranks + cost.update)
    if least > 3600 * args.hours:
        raise UserError(
            f"--hours {args.hours:g}: {FEW_UPDATES} updates of a model of {size} take {duration(least)}; "
            "give more time, or a smaller model"
        )


def first_batch(samples: list[Sample], tokens: float) -> Batch:
    """The flat batch of the first samples, of so many tokens or a little more."""
    items, size = [], 0
    for sample in samples:
        fields = {"input_ids": sample.tokens, "loss_mask": sample.loss_mask}
        items.append([fields | {"sample_id": 0, "target_bytes": 0}])
        size += len(sample.tokens)
        if size >= tokens:
            break
    return collate_flat(items)


def open_stages(args: argparse.Namespace, ranks: int) -> list[Stage]:
    """Pretraining and, with --sft_data, SFT, with their data tokenised. Without --tokenizer_path, few data
    get a vocabulary of their own. Raises UserError."""
    tokenizer_path = args.tokenizer_path or ModelConfig().tokenizer_path
    pretrain = open_stage(args, train_pretrain, args.pretrain_data, tokenizer_path, ranks)
    if not args.tokenizer_path:
        size = rules.vocabulary(*spelling(pretrain.data))
        if size is not None:
            tokenizer_path = train_tokenizer(args, size)
            pretrain = open_stage(args, train_pretrain, args.pretrain_data, tokenizer_path, ranks)
    if not args.sft_data:
        return [pretrain]
    return [pretrain, open_stage(args, train_full_sft, args.sft_data, tokenizer_path, ranks)]


def open_stage(args: argparse.Namespace, script: Any, path: str, tokenizer_path: str, ranks: int) -> Stage:
    """A stage with its data and what is the same for all sizes of the model."""
    settings: dict[str, Any] = {name: getattr(args, name) for name in SHARED} | {
        "data_path": ",".join(os.path.abspath(os.path.expanduser(part)) for part in parts_of(path)),
        "save_dir": args.save_dir, "checkpoint_dir": f"{args.save_dir}/checkpoints",
        "tokenizer_path": tokenizer_path,
        "packing": script is train_pretrain, "optimizer": rules.OPTIMIZER,
        "batch_size": None, "learning_rate": None, "accumulation_steps": 1,
    }  # fmt: skip
    stage_args = script.Args(**settings)
    data, held_out = script.open_data(stage_args, load_tokenizer(tokenizer_path))
    return Stage(script, stage_args, data, held_out, ranks, Cost())


def train_tokenizer(args: argparse.Namespace, size: int) -> str:
    """Train a vocabulary of this size on the data; returns its folder. Raises UserError if none can be
    made."""
    folder = f"{args.save_dir}/tokenizer"
    command = [sys.executable, str(ROOT / "scripts/train_tokenizer.py"), "--vocab_size", str(size)]
    command += ["--output_dir", folder, "--data_path", args.pretrain_data]
    if args.sft_data:
        command.append(args.sft_data)
    if args.text_separator:
        command += ["--text_separator", args.text_separator]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError("no tokenizer could be made for these data (see above); give --tokenizer_path")
    return folder


def spelling(data: StageDataset) -> tuple[int, float]:
    """Bytes of text of the targets, and bytes per target."""
    report = data.cache.report
    return report["target_bytes"], report["target_bytes"] / report["targets"]
