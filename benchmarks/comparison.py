"""Speed as a ratio: another trainer in its own process (benchmarks/peers.py), in turn with ours, on the
tokens of the same samples."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
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
from dataset.order import epoch_order
from model.model_minimind import MiniMindConfig
from trainer.callbacks.train_state import TrainState
from trainer.devices.device import autocast_dtype
from trainer.devices.wrapping import unwrap

# Fields of the model's shape for which MiniMind's scripts have no flag
SHAPE_FIELDS = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
SHAPE_FIELDS += ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "router_aux_loss_coef")
FLAGS = ("hidden_size", "num_hidden_layers", "use_moe", "max_seq_len")
RECIPE = ("batch_size", "accumulation_steps", "learning_rate", "grad_clip")  # ours where speed is compared
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
    elif options.until_loss is not None:
        raise UserError("--until_loss compares with --peer minimind only")
    if launch().world_size > 1:
        raise UserError("a peer is compared with a single process; start it with python, not with torchrun")


def write_samples(path: Path, dataset: StageDataset, order: Iterable[int], count: int | None = None) -> None:
    """Write tokens and labels (-100: no target) of the first `count` samples of these items, or of all.
    Raises UserError if there are fewer."""
    rows = []
    for sample in islice(chain.from_iterable(dataset[item] for item in order), count):
        labels = np.where(sample["loss_weight"] != 0, sample["input_ids"].astype(np.int64), -100)
        rows.append({"input_ids": sample["input_ids"].tolist(), "labels": labels.tolist()})
    if count is not None and len(rows) < count:
        needed = f"{len(rows)} samples, {count} are needed"
        raise UserError(f"--data_path holds only {needed}; use fewer --updates or --repeat")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def peer_settings(
    options: argparse.Namespace, tokenizer: Any, state: TrainState, folder: Path
) -> dict[str, Any]:
    """What benchmarks/peers.py gets: our settings, so that both train the same model in the same way, or
    with --until_loss the same model by the peer's own recipe."""
    config = cast(MiniMindConfig, state.lm_config)
    flags: dict[str, Any] = {"device": str(state.device)}
    own_recipe = options.until_loss is not None
    for name in FLAGS if own_recipe else FLAGS + RECIPE:
        value = getattr(state.args, name)
        flags[name] = int(value) if isinstance(value, bool) else value
    stock = json.loads(config.to_json_string(use_diff=False))
    stock.pop("model_type")
    return {
        "peer": options.peer,
        "stage": options.stage,
        "path": str(Path(options.peer_path or ".").resolve()),
        "data": str(folder / "data.jsonl"),
        "held_out": str(folder / "held_out.jsonl"),
        "own_flags": shlex.split(options.peer_flags) if own_recipe else None,
        "weights": str(folder / "weights.pth"),
        "folder": str(folder / "out"),
        "tokenizer": str(Path(tokenizer.name_or_path).resolve()),
        "pad_id": tokenizer.pad_token_id or 0,
        "flags": flags,
        "shape": {name: getattr(config, name) for name in SHAPE_FIELDS},
        "stock": stock,
        "bf16": autocast_dtype(state.autocast, state.device) == torch.bfloat16,
    }


class Peer:
    """Another trainer on the samples of our first epoch, in a process that ends when this context manager
    exits. is_over: its run has come to its end."""

    def __init__(
        self,
        options: argparse.Namespace,
        data: StageDataset,
        held_out: StageDataset | None,
        tokenizer: Any,
        state: TrainState,
    ):
        """options: of scripts/benchmark.py. state: ours, untrained: for the weights, settings and device of
        both."""
        self.name, args, self.is_over = options.peer, state.args, False
        self.folder = tempfile.TemporaryDirectory(prefix="benchmark-")
        folder = Path(self.folder.name)
        (folder / "run").mkdir()
        order, count = epoch_order(len(data), args.seed, 0), None
        if options.until_loss is None:
            updates = options.warmup + options.repeat * options.updates
            count = updates * args.accumulation_steps * args.batch_size
        else:
            write_samples(folder / "held_out.jsonl", cast(Any, held_out), range(len(cast(Any, held_out))))
        write_samples(folder / "data.jsonl", data, order, count)
        torch.save(unwrap(state.model).state_dict(), folder / "weights.pth")
        settings = peer_settings(options, tokenizer, state, folder)
        # its imports come from its checkout, not from ours, its caches are in `folder`
        env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        env |= {"TOKENIZERS_PARALLELISM": "false"}
        env["PYTHONPATH"] = settings["path"] if self.name == "minimind" else ""
        self.log = open(folder / "log", "w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (until exit)
        command = [sys.executable, str(ROOT / "benchmarks/peers.py")]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen(command, cwd=folder / "run", env=env, encoding="utf-8", **streams)
        self.stdin, self.stdout = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        self._send(json.dumps(settings))

    def train(self, micro_batches: int) -> dict[str, Any]:
        """Train on the next micro-batches: `seconds`, and `tokens`, `targets` and `loss` of each. Raises
        UserError if the peer failed; the message quotes its last line."""
        reply = self._ask(str(micro_batches))
        self.is_over = reply.pop("is_over")
        return reply

    def held_out_loss(self) -> float:
        """Nats per token."""
        return self._ask("evaluate")["loss"]

    def _ask(self, line: str) -> dict[str, Any]:
        self._send(line)
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
