"""What is not bit-identical in the files of two finished runs: metrics, weights, checkpoint."""

from collections import defaultdict
from math import inf
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import reason
from trainer.components import preference
from trainer.components.checkpoint import UNREADABLE, read_file, read_state
from trainer.components.metrics import read_metrics
from trainer.components.sharded import with_tensors

FIELDS = ("update", "epoch", "step", "loss", "mean_loss", "logits_loss", "aux_loss", "learning_rate", "grad_norm")
FIELDS += (*preference.METRICS, "cross_entropy", "divergence", "eval_accuracy", "eval_divergence")
FIELDS += ("reward", "reward_std", "entropy", "completion_length", "kl", "clipped", "samples", "eval_reward")
FIELDS += ("tokens", "eval_loss", "eval_bpb", "skipped", "overflows", "expert_load", "dead_experts")  # no speed, time
STATE = ("model", "optimizer", "scaler", "epoch", "step", "update", "tokens", "samples_done", "best_eval")


class FinishedRun(Protocol):
    """The files of a run."""

    metrics: Path
    weights: Path
    best_weights: Path
    checkpoint: Path


def differences(right: Any, found: Any, name: str) -> list[str]:
    """Every tensor or number in nested dicts and lists that is not bit-identical, and by how much."""
    if isinstance(right, (list, tuple)) and isinstance(found, (list, tuple)):
        right, found = dict(enumerate(right)), dict(enumerate(found))
    if isinstance(right, dict) and isinstance(found, dict):
        pairs = ((key, right.get(key, "missing"), found.get(key, "missing")) for key in right | found)
        return [text for key, a, b in pairs for text in differences(a, b, f"{name}.{key}")]
    a, b = (f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else repr(v) for v in (right, found))
    if a != b:  # as text, NaN equals NaN, and 0.0 differs from -0.0
        return [f"{name}: {b}, not {a}"]
    if not isinstance(right, Tensor) or not right.numel():
        return []
    a, b = (tensor.reshape(-1, 1).contiguous().view(torch.uint8) for tensor in (right, found))
    differing = int((a != b).any(dim=1).sum())
    largest = (right.double() - found.double()).abs().nan_to_num(nan=inf).max().item()
    return [f"{name}: {differing} of {len(a)} values differ, by at most {largest:.3g}"] if differing else []


def compare_metrics(right: list[dict], found: list[dict]) -> list[str]:
    """Differences of the records, by update: other values, or records missing, duplicated or out of order."""
    updates: dict[int, tuple[dict, dict]] = defaultdict(lambda: ({}, {}))
    for side, records in enumerate((right, found)):
        for line, record in enumerate(records, start=1):
            row = updates[record["update"]][side]
            row |= {"records": row.get("records", 0) + 1, "line": line} | {key: record.get(key) for key in FIELDS}
    return [text for n in sorted(updates) for text in differences(*updates[n], f"update {n}")]


def read_weights_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, or of an adapter."""
    return load_file(path) if path.suffix == ".safetensors" else read_file(path)


def compare_runs(right: FinishedRun, found: FinishedRun) -> list[str]:
    """Differences between two finished runs: the first update that differs, and the first tensor in each file."""
    differing = [compare_metrics(read_metrics(right.metrics), read_metrics(found.metrics))]
    for name in ("weights", "best_weights", "checkpoint"):
        try:
            if name == "checkpoint":
                states = [with_tensors(read_state(run.checkpoint)) for run in (right, found)]
                states = [{key: state.get(key) for key in STATE} for state in states]
            else:
                states = [read_weights_file(getattr(run, name)) for run in (right, found)]
            differing.append(differences(states[0], states[1], name))
        except (SafetensorError, *UNREADABLE) as error:
            differing.append([f"{name}: cannot be read ({reason(error)})"])
    return [f"{texts[0]} ({len(texts)} in all)" for texts in differing if texts]
