"""Speed as a ratio: another trainer in its own process (tools/bench/peers.py), in turn with ours, on the
tokens of the same samples."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np
import torch

from common.errors import UserError
from common.launcher import launch
from common.settings import ROOT
from dataset.lm_dataset import StageDataset
from model.model_minimind import MiniMindConfig
from trainer.data.datasets import epoch_order
from trainer.devices.device import autocast_dtype
from trainer.devices.wrapping import unwrap
from trainer.run.state import TrainState

# Fields of the model's shape for which MiniMind's scripts have no flag
BEYOND_FLAGS = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
BEYOND_FLAGS += ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "router_aux_loss_coef")
FLAGS = ("hidden_size", "num_hidden_layers", "use_moe", "batch_size", "accumulation_steps")
FLAGS += ("learning_rate", "grad_clip", "max_seq_len")
TOLERANCE = 0.02  # relative, of the losses: bfloat16 against float32 over the updates of a benchmark
SCRIPTS = {"sft": "trainer/train_full_sft.py", "pretrain": "trainer/train_pretrain.py"}  # of MiniMind


def check_peer(options: argparse.Namespace) -> None:
    """Raise UserError for wrong settings of a peer, before anything is built."""
    if options.peer == "minimind":
        if options.peer_path is None:
            raise UserError("--peer minimind needs --peer_path, a checkout of jingyaogong/minimind")
        script = Path(options.peer_path, SCRIPTS[options.stage])
        if not script.is_file():
            raise UserError(f"--peer_path {options.peer_path} is not a checkout of minimind: no {script}")
    elif options.stage != "sft":
        raise UserError("--peer trl is for --stage sft; for pretraining use --peer minimind")
    if launch().world_size > 1:
        raise UserError("a peer is compared with a single process; start it with python, not with torchrun")


def first_samples(dataset: StageDataset, seed: int, count: int) -> list[dict[str, list[int]]]:
    """Tokens and labels (-100: no target) of the first `count` samples of our first epoch, in order. Raises
    UserError if there are fewer."""
    items = (dataset[item] for item in epoch_order(len(dataset), seed, 0))
    rows = []
    for sample in islice(chain.from_iterable(items), count):
        labels = np.where(sample["loss_mask"], sample["input_ids"].astype(np.int64), -100)
        rows.append({"input_ids": sample["input_ids"].tolist(), "labels": labels.tolist()})
    if len(rows) < count:
        needed = f"{len(rows)} samples, {count} are needed"
        raise UserError(f"--data_path holds only {needed}; use fewer --updates or --repeat")
    return rows


def peer_settings(
    options: argparse.Namespace, tokenizer: Any, state: TrainState, folder: Path
) -> dict[str, Any]:
    """What tools/bench/peers.py gets: our settings, so that both train the same model in the same way."""
    config = cast(MiniMindConfig, state.lm_config)
    flags: dict[str, Any] = {"device": str(state.device)}
    for name in FLAGS:
        value = getattr(state.args, name)
        flags[name] = int(value) if isinstance(value, bool) else value
    stock = json.loads(config.to_json_string(use_diff=False))
    stock.pop("model_type")
    return {
        "peer": options.peer,
        "stage": options.stage,
        "path": str(Path(options.peer_path or ".").resolve()),
        "data": str(folder / "data.jsonl"),
        "weights": str(folder / "weights.pth"),
        "folder": str(folder / "out"),
        "tokenizer": str(Path(tokenizer.name_or_path).resolve()),
        "pad_id": tokenizer.pad_token_id or 0,
        "flags": flags,
        "shape": {name: getattr(config, name) for name in BEYOND_FLAGS},
        "stock": stock,
        "bf16": autocast_dtype(state.autocast, state.device) == torch.bfloat16,
    }


class Peer:
    """Another trainer on the first samples of our epoch, in a process that ends when this context manager
    exits."""

    def __init__(self, options: argparse.Namespace, data: StageDataset, tokenizer: Any, state: TrainState):
        """options: of scripts/benchmark.py. state: ours, untrained: for the weights, settings and device of
        both."""
        self.name, args = options.peer, state.args
        self.folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        folder = Path(self.folder.name)
        updates = options.warmup + options.repeat * options.updates
        samples = first_samples(data, args.seed, updates * args.accumulation_steps * args.batch_size)
        lines = [json.dumps(sample) + "\n" for sample in samples]
        (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
        torch.save(unwrap(state.model).state_dict(), folder / "weights.pth")
        settings = peer_settings(options, tokenizer, state, folder)
        # its imports come from its checkout, not from ours, its caches are in `folder`
        env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        env |= {"TOKENIZERS_PARALLELISM": "false"}
        env["PYTHONPATH"] = settings["path"] if self.name == "minimind" else ""
        self.log = open(folder / "log", "w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (until exit)
        command = [sys.executable, str(ROOT / "tools/bench/peers.py")]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(command, cwd=folder, env=env, encoding="utf-8", **streams)
        self.stdin, self.stdout = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        self._send(json.dumps(settings))

    def train(self, micro_batches: int) -> dict[str, Any]:
        """Train on the next micro-batches: `seconds`, and `tokens`, `targets` and `loss` of each. Raises
        UserError if the peer failed; the message quotes its last line."""
        self._send(str(micro_batches))
        reply = self.stdout.readline()
        if not reply:
            self.process.wait(60)
            self.log.seek(0)
            lines = [line.strip() for line in self.log if line.strip()]
            why = lines[-1] if lines else "it printed nothing"
            if why.startswith("ModuleNotFoundError"):
                why += f"; install it for {sys.executable}"
            raise UserError(f"--peer {self.name} cannot train: {why}")
        return json.loads(reply)

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # `train` reports why
            print(line, file=self.stdin, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        with suppress(BrokenPipeError):
            self.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()
        self.folder.cleanup()


def compare_losses(ours: list[float], replies: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The losses of all updates, ours and the peer's, and whether they agree. steps: micro-batches of an
    update."""
    targets = np.concatenate([reply["targets"] for reply in replies]).reshape(-1, steps)
    losses = np.concatenate([reply["loss"] for reply in replies]).reshape(-1, steps)
    theirs = (losses * targets).sum(1) / targets.sum(1)
    largest = float((abs(np.array(ours) - theirs) / abs(theirs)).max())
    comparison = {"ours": ours, "peer": theirs.tolist(), "largest_difference": largest}
    return comparison | {"agree": largest <= TOLERANCE}
