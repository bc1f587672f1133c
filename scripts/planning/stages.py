"""The stages of a plan: their settings and data, and what they take with a model of some size."""

import argparse
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import UserError
from common.settings import ROOT, ModelConfig, StageArgs
from dataset.files import parts_of
from dataset.lm_dataset import StageDataset
from dataset.token_cache import load_tokenizer
from scripts.planning import rules
from scripts.planning.machine import Cost, measure
from trainer import train_full_sft, train_pretrain
from trainer.data.datasets import epoch_items, epoch_tokens

START = 12.0  # seconds in which a stage starts Python, opens its data and builds its model
N_EVALS = 5  # of a stage
SHARED = ("eval_share", "text_separator", "cache_dir", "device", "dtype")  # flags that are the stages' own


@dataclass(frozen=True)
class Stage:
    """A stage of a plan: its script and settings, its data, and what its model costs."""

    script: Any
    args: StageArgs
    data: StageDataset
    held_out: StageDataset
    ranks: int
    cost: Cost = field(default_factory=Cost)

    @property
    def passes(self) -> float:
        """Passes over the data; of a part of them less than 1."""
        return self.args.epochs * epoch_items(self.data, self.args) / len(self.data)

    @property
    def tokens(self) -> int:
        """Tokens to train."""
        return round(epoch_tokens(self.data, self.args) * self.args.epochs)

    @property
    def updates(self) -> int:
        """Optimizer steps."""
        per_update = self.args.batch_size * self.args.accumulation_steps * self.ranks
        return math.ceil(epoch_items(self.data, self.args) / per_update) * self.args.epochs

    @property
    def evaluation(self) -> float:
        """Seconds of an evaluation."""
        return self.held_out.num_tokens / self.ranks * self.cost.eval_token

    @property
    def seconds(self) -> float:
        """From the first update to the last log record, as `seconds` in the run's metrics: updates, and all
        evaluations but the last. Saving is done beside them; tokenising and starting are not counted."""
        updates = self.tokens / self.ranks * self.cost.token + self.updates * self.cost.update
        return updates + (N_EVALS - 1) * self.evaluation

    @property
    def memory(self) -> float:
        """Bytes of a rank."""
        return self.cost.memory(self.data.mean_tokens * self.args.batch_size)

    def with_depth(self, depth: int) -> "Stage":
        """With a model of so many layers, which has not been measured."""
        shape = {"hidden_size": rules.WIDTH * depth, "num_hidden_layers": depth}
        return replace(self, args=self.args.model_copy(update=shape), cost=Cost())

    def measured(self) -> "Stage":
        """With what its model costs here."""
        return replace(self, cost=measure(self.args, self.data))

    def with_passes(self, passes: float, memory: float) -> "Stage":
        """With so many passes over the data, batch and rate by the rules, and micro-batches that the memory
        (bytes) holds. passes: a whole number, or the share of the data of a single one."""
        epochs, max_tokens = int(passes), 0
        if passes < 1:
            epochs, max_tokens = 1, max(1, round(passes * self.data.num_tokens))
        args = self.args.model_copy(update={"epochs": epochs, "max_tokens": max_tokens})
        tokens = epoch_tokens(self.data, args) * epochs
        item = self.data.mean_tokens * self.ranks
        batch = max(1, min(round(rules.update_tokens(tokens) / item), len(self.data)))
        rate = rules.learning_rate(args.hidden_size, tokens, batch * item)
        numbers = {"batch_size": batch, "accumulation_steps": 1, "learning_rate": float(f"{rate:.1e}")}
        stage = replace(self, args=args.model_copy(update=numbers))
        while stage.memory > memory and stage.args.batch_size > 1:
            half, twice = stage.args.batch_size // 2, stage.args.accumulation_steps * 2
            smaller = {"batch_size": half, "accumulation_steps": twice}
            stage = replace(stage, args=stage.args.model_copy(update=smaller))
        warmup = {"warmup_updates": rules.warmup(stage.updates)}
        return replace(stage, args=stage.args.model_copy(update=warmup))


def open_stages(args: argparse.Namespace, ranks: int) -> list[Stage]:
    """Pretraining and, with --sft_data, SFT, with their data tokenised. Without --tokenizer_path, few data
    get a vocabulary of their own. Raises UserError."""
    tokenizer_path = args.tokenizer_path or ModelConfig().tokenizer_path
    pretrain = open_stage(args, train_pretrain, args.pretrain_data, tokenizer_path, ranks)
    if not args.tokenizer_path:
        report = pretrain.data.cache.report
        size = rules.vocabulary(report["target_bytes"], bytes_per_token(pretrain))
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
        "tokenizer_path": tokenizer_path, "packing": script is train_pretrain, "optimizer": rules.OPTIMIZER,
    }  # fmt: skip
    stage_args = script.Args(**settings)
    data, held_out = script.open_data(stage_args, load_tokenizer(tokenizer_path))
    return Stage(script, stage_args, data, held_out, ranks)


def train_tokenizer(args: argparse.Namespace, size: int) -> str:
    """Train a vocabulary of this size on the data; returns its folder. Raises UserError if none can be
    made."""
    folder = f"{args.save_dir}/tokenizer"
    command = [sys.executable, str(ROOT / "scripts/train_tokenizer.py"), "--vocab_size", str(size)]
    command += ["--output_dir", folder, "--data_path", args.pretrain_data]
    if args.sft_data and args.sft_data != args.pretrain_data:
        command.append(args.sft_data)
    if args.text_separator:
        command += ["--text_separator", args.text_separator]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise UserError("no tokenizer could be made for these data (see above); give --tokenizer_path")
    return folder


def bytes_per_token(stage: Stage) -> float:
    """Bytes of text that a token of the stage spells, on average."""
    report = stage.data.cache.report
    return report["target_bytes"] / report["targets"]
