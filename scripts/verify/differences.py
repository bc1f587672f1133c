"""What is not bit-identical in the files of two finished runs: metrics, weights, checkpoint."""

import re
from collections import defaultdict
from math import inf
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import reason
from trainer.components.checkpoint import UNREADABLE, read_file, read_state
from trainer.components.metrics import read_metrics

TIMED = re.compile(r"second|_wait$|^mfu$|^memory_mb$")  # fields of a record that differ from run to run
STATE = ("model", "optimizer", "scaler", "epoch", "step", "update", "tokens", "samples_done", "best_eval")


class FinishedRun(Protocol):
    """The files of a run."""

    metrics: Path
    weights: Path
    best_weights: Path
    checkpoint: Path


def differences(right: Any, other: Any, name: str) -> list[str]:
    """Every tensor or number in nested dicts and lists that is not bit-identical, and by how much."""
    if isinstance(right, (list, tuple)) and isinstance(other, (list, tuple)):
        right, other = dict(enumerate(right)), dict(enumerate(other))
    if isinstance(right, dict) and isinstance(other, dict):
        pairs = ((key, right.get(key, "missing"), other.get(key, "missing")) for key in right | other)
        return [text for key, a, b in pairs for text in differences(a, b, f"{name}.{key}")]
    a, b = (f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else repr(v) for v in (right, other))
    if a != b:  # as text, NaN equals NaN, and 0.0 differs from -0.0
        return [f"{name}: {b}, not {a}"]
    if not isinstance(right, Tensor) or not right.numel():
        return []
    a, b = (tensor.reshape(-1, 1).contiguous().view(torch.uint8) for tensor in (right, other))
    differing = int((a != b).any(dim=1).sum())
    largest = (right.double() - other.double()).abs().nan_to_num(nan=inf).max().item()
    return [f"{name}: {differing} of {len(a)} values differ, by at most {largest:.3g}"] if differing else []


def compare_metrics(right: list[dict], other: list[dict]) -> list[str]:
    """Differences of the records, by update: other values, or records missing, duplicated or out of order."""
    updates: dict[int, tuple[dict, dict]] = defaultdict(lambda: ({}, {}))
    for side, records in enumerate((right, other)):
        for line, record in enumerate(records, start=1):
            row = updates[record["update"]][side]
            known = {key: value for key, value in record.items() if not TIMED.search(key)}
            row |= {"records": row.get("records", 0) + 1, "line": line} | known
    return [text for n in sorted(updates) for text in differences(*updates[n], f"update {n}")]


def compare_runs(right: FinishedRun, other: FinishedRun) -> list[str]:
    """Differences between two finished runs: the first update that differs, and the first tensor in each file."""
    differing = [compare_metrics(read_metrics(right.metrics), read_metrics(other.metrics))]
    for name in ("weights", "best_weights", "checkpoint"):
        try:
            if name == "checkpoint":
                states = [read_state(run.checkpoint) for run in (right, other)]
                states = [{key: state.get(key) for key in STATE} for state in states]
            else:
                files = [getattr(run, name) for run in (right, other)]  # of LoRA, adapters
                states = [load_file(path) if path.suffix == ".safetensors" else read_file(path) for path in files]
            differing.append(differences(states[0], states[1], name))
        except (SafetensorError, *UNREADABLE) as error:
            differing.append([f"{name}: cannot be read ({reason(error)})"])
    return [f"{texts[0]} ({len(texts)} in all)" for texts in differing if texts]
