"""Speed as a ratio: another trainer in its own process, in turn with ours, on the same samples.

`Peer` starts that process (scripts/bench/peers.py). It reports the tokens and labels of every micro-batch that it
trained on. Its real tokens are those that are not padding, and `compare_losses` trains our model on the same
micro-batches from the same weights to compare the losses.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.launcher import launch
from common.settings import ROOT
from dataset.data_files import iter_blocks, parse_block
from dataset.formats import to_chat, to_text
from dataset.lm_dataset import StageDataset, TokenDataset, collate_flat
from dataset.token_cache import TokenCache
from model.model_minimind import MiniMindConfig
from trainer.components.device import autocast_dtype
from trainer.components.loaders import epoch_order
from trainer.components.state import TrainState

# Fields of the model's shape for which MiniMind's scripts have no flag
BEYOND_FLAGS = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
BEYOND_FLAGS += ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "router_aux_loss_coef")
FLAGS = ("hidden_size", "num_hidden_layers", "use_moe", "batch_size", "accumulation_steps")
FLAGS += ("learning_rate", "grad_clip", "max_seq_len")
SCRIPTS = {"sft": "trainer/train_full_sft.py", "pretrain": "trainer/train_pretrain.py"}  # of MiniMind
TOLERANCE = 0.02  # relative, of the loss: bfloat16 against float32 over the updates of a benchmark


def check_peer(peer: str, stage: str, path: str | None, python: str | None) -> None:
    """Raise UserError for wrong settings of a peer, before anything is built."""
    if peer == "minimind" and not path:
        raise UserError("--peer minimind needs --peer_path, the folder of a checkout of jingyaogong/minimind")
    if peer == "minimind" and not Path(path or "", SCRIPTS[stage]).is_file():
        raise UserError(f"--peer_path {path} is not a checkout of minimind: it has no {SCRIPTS[stage]}")
    if python and not shutil.which(python):
        raise UserError(f"--peer_python {python} cannot be started; give the path of a Python")
    if peer == "trl" and stage != "sft":
        raise UserError("--peer trl is for --stage sft; for pretraining use --peer minimind")
    if launch().world_size > 1:
        raise UserError("a peer is compared with a single process; start it with python, not with torchrun")


# --- the same samples ------------------------------------------------------------------------------------------------


def first_samples(dataset: TokenDataset, seed: int, count: int) -> list[int]:
    """The first `count` samples of our first epoch, in order, that begin a record: a peer truncates a long document,
    so it never trains on the later pieces.

    Raises:
        UserError: there are fewer.
    """
    cache, samples = dataset.cache, []
    for item in epoch_order(len(dataset), seed, 0):
        for sample in dataset[item]:
            i = sample["sample_id"]
            if i == 0 or tuple(cache.sources[i]) != tuple(cache.sources[i - 1]):
                samples.append(i)
        if len(samples) >= count:
            return samples[:count]
    needed = f"{len(samples)} records, {count} are needed"
    raise UserError(f"--data_path holds only {needed}; use fewer --updates or --repeat")


def records_of(cache: TokenCache, samples: list[int], text_separator: str | None = None) -> list[dict[str, Any]]:
    """The records of the samples in MiniMind's format: `{"text"}` or `{"conversations"}`. text_separator: the line
    between documents of plain text, as the cache was built with."""
    places = [tuple(map(int, cache.sources[i])) for i in samples]
    wanted, records = set(places), {}
    for block in iter_blocks(cache.files, text_separator or ""):
        for line, record in parse_block(block):
            if (block.file, line) in wanted:
                records[block.file, line] = record
        if len(records) == len(wanted):
            break
    form = minimind_chat if cache.meta["kind"] == "sft" else lambda record: {"text": to_text(record)}
    return [form(records[place]) for place in places]


def minimind_chat(record: dict[str, Any]) -> dict[str, Any]:
    """A conversation in MiniMind's format: tools and tool calls as JSON text, the tools in a system message."""
    chat = to_chat(record)
    messages = [
        message | ({"tool_calls": json.dumps(message["tool_calls"])} if message.get("tool_calls") else {})
        for message in chat.messages
    ]
    if chat.tools:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0] = messages[0] | {"tools": json.dumps(chat.tools, ensure_ascii=False)}
    return {"conversations": messages}


def tokens_of(dataset: TokenDataset, samples: list[int]) -> list[dict[str, list[int]]]:
    """Tokens and labels (-100: no target) of samples, for a peer that does not tokenise."""
    rows, plain = [], TokenDataset(dataset.cache)
    for i in samples:
        (sample,) = plain[i]
        labels = np.where(sample["loss_mask"], sample["input_ids"].astype(np.int64), -100)
        rows.append({"input_ids": sample["input_ids"].tolist(), "labels": labels.tolist()})
    return rows


# --- the other process -----------------------------------------------------------------------------------------------


class Peer:
    """Another trainer on the first samples of our epoch, in a process that ends when this context manager exits."""

    def __init__(self, args: Any, data: StageDataset, tokenizer: Any, weights: dict[str, Tensor], state: TrainState):
        """args: of scripts/benchmark.py. weights: initial, of both trainers. state: ours, for the shape and device."""
        self.args, self.folder = args, tempfile.TemporaryDirectory(prefix="benchmark-")
        folder, config = Path(self.folder.name), cast(MiniMindConfig, state.lm_config)
        updates = args.warmup + args.repeat * args.updates
        samples = first_samples(data, args.seed, updates * args.accumulation_steps * args.batch_size)
        own = args.peer == "minimind"  # it tokenises by itself
        records = records_of(data.cache, samples, args.text_separator) if own else tokens_of(data, samples)
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / "data.jsonl").write_text(text, encoding="utf-8")
        torch.save(weights, folder / "weights.pth")
        flags = {name: getattr(args, name) for name in FLAGS} | {"device": str(state.device)}
        settings = {
            "peer": args.peer,
            "stage": args.stage,
            "path": str(Path(args.peer_path or ".").resolve()),
            "data": str(folder / "data.jsonl"),
            "weights": str(folder / "weights.pth"),
            "folder": str(folder / "out"),
            "tokenizer": str(Path(tokenizer.name_or_path).resolve()),
            "pad_id": tokenizer.pad_token_id or 0,
            "flags": {name: int(value) if isinstance(value, bool) else value for name, value in flags.items()},
            "shape": {name: getattr(config, name) for name in BEYOND_FLAGS},
            "stock": stock_shape(config),
            "bf16": autocast_dtype(state.autocast, state.device) == torch.bfloat16,
        }
        self.log = open(folder / "log", "w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (open until exit)
        self.process = subprocess.Popen(
            [args.peer_python or sys.executable, str(ROOT / "scripts/bench/peers.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=folder,
            env=self._environment(folder),
            encoding="utf-8",
        )
        self.stdin, self.stdout = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)  # pipes
        self._send(json.dumps(settings))

    def _environment(self, folder: Path) -> dict[str, str]:
        """Imports come from the peer's checkout, not from ours; its caches are in `folder`."""
        env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env.pop("PYTHONPATH", None)
        own = {"PYTHONPATH": str(Path(self.args.peer_path).resolve())} if self.args.peer == "minimind" else {}
        return env | own

    def train(self, micro_batches: int) -> dict[str, Any]:
        """Train on the next micro-batches: seconds, and rows, padded size and loss of each.

        Raises:
            UserError: the peer failed; the message quotes its last line.
        """
        self._send(str(micro_batches))
        reply = json.loads(self.stdout.readline() or "{}")
        if "seconds" not in reply:
            self.process.wait(60)
            self.log.seek(0)
            last = ([line.strip() for line in self.log if line.strip()] or ["it printed nothing"])[-1]
            raise UserError(f"--peer {self.args.peer} cannot train: {reply.get('error', last)}")
        reply["tokens"] = sum(len(row["input_ids"]) for batch in reply["micro_batches"] for row in batch["rows"])
        return reply

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


def stock_shape(config: MiniMindConfig) -> dict[str, Any]:
    """The shape for transformers' Qwen3 classes, which have every field but the model's name."""
    shape = json.loads(config.to_json_string(use_diff=False))
    shape.pop("model_type")
    return shape


# --- the same losses -------------------------------------------------------------------------------------------------


def flat_batch(micro_batch: dict[str, Any]) -> dict[str, Any]:
    """A peer's micro-batch in our format: its tokens and targets without padding."""
    rows = [
        {"input_ids": np.array(row["input_ids"]), "loss_mask": np.array(row["labels"]) != -100}
        | {"sample_id": i, "target_bytes": 0}
        for i, row in enumerate(micro_batch["rows"])
    ]
    return collate_flat([rows])


def compare_losses(ours: Any, micro_batches: list[dict[str, Any]], accumulation_steps: int) -> dict[str, Any]:
    """Train ours from its initial weights on a peer's micro-batches, and compare the losses of all updates.

    `ours.restart()` restores the initial weights, `ours.update(window)` trains and returns the loss per target.
    """
    ours.restart()
    mine, theirs = [], []
    for first in range(0, len(micro_batches), accumulation_steps):
        window = micro_batches[first : first + accumulation_steps]
        flat = [flat_batch(micro_batch) for micro_batch in window]
        targets = [len(batch["targets"]) for batch in flat]
        theirs.append(sum(b["loss"] * n for b, n in zip(window, targets, strict=True)) / sum(targets))
        mine.append(float(ours.update(flat)))
    largest = max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))
    return {"ours": mine, "peer": theirs, "largest_difference": largest, "agree": largest <= TOLERANCE}
