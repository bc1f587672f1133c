"""The differences between two runs that must be bit-identical."""

import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import reason
from tools.verify.launch import Run
from trainer.report.metrics import read_metrics
from trainer.run.checkpoint import UNREADABLE, read_file

TIMES = re.compile(r"second|_wait$|^mfu|_mb$")  # fields of a record that differ from run to run
# fields of a checkpoint; the others hold times and the name of the run
STATE = ("model", "optimizer", "scaler", "epoch", "step", "update", "tokens", "samples_done", "best_eval")


def compare_runs(right: Run, other: Run) -> list[str]:
    """What differs between two finished runs: of each file the first value, and how many there are."""
    by_file = [compare_metrics(read_metrics(right.metrics), read_metrics(other.metrics))]
    for name in ("weights", "best_weights", "checkpoint"):
        path, other_path = getattr(right, name), getattr(other, name)
        if name == "best_weights" and not path.exists() and not other_path.exists():
            continue  # nothing was evaluated
        try:
            by_file.append(differences(read_contents(path), read_contents(other_path), name))
        except (SafetensorError, *UNREADABLE) as error:
            by_file.append([f"{name}: cannot be read ({reason(error)})"])
    return [f"{found[0]} ({len(found)} in all)" for found in by_file if found]


def compare_metrics(right: list[dict], other: list[dict]) -> list[str]:
    """Differences of the records, one by one: other values, or records missing, repeated or out of order."""
    found = []
    for a, b in zip_longest(right, other, fillvalue={}):
        update = (a or b)["update"]
        found += differences(without_times(a), without_times(b), f"update {update}")
    return found


def without_times(record: dict) -> dict:
    """A record without the fields that differ from run to run."""
    return {key: value for key, value in record.items() if not TIMES.search(key)}


def read_contents(path: Path) -> dict:
    """What must be the same in a file of weights, an adapter or a checkpoint."""
    if path.suffix == ".safetensors":
        return load_file(path)
    state = read_file(path)
    if "optimizer" not in state:
        return state
    return {key: state.get(key) for key in STATE}


def differences(right: Any, other: Any, name: str) -> list[str]:
    """Every tensor or number in nested dicts and lists that is not bit-identical, and by how much."""
    if isinstance(right, (list, tuple)) and isinstance(other, (list, tuple)):
        right, other = dict(enumerate(right)), dict(enumerate(other))
    if isinstance(right, dict) and isinstance(other, dict):
        found = []
        for key in right | other:
            found += differences(right.get(key, "missing"), other.get(key, "missing"), f"{name}.{key}")
        return found
    if described(right) != described(other):
        return [f"{name}: {described(other)}, not {described(right)}"]
    if not isinstance(right, Tensor):
        return []
    count = int((value_bytes(right) != value_bytes(other)).any(dim=1).sum())
    if count == 0:
        return []
    largest = (right.double() - other.double()).abs().max().item()
    return [f"{name}: {count} of {right.numel()} values differ, by at most {largest:.3g}"]


def described(value: Any) -> str:
    """A value as text, in which NaN equals NaN and 0.0 differs from -0.0; of a tensor its type and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def value_bytes(tensor: Tensor) -> Tensor:
    """The bytes of each value [N, size of a value]."""
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8)
