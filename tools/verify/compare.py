"""The differences between two runs that must be bit-identical."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainer.report.metrics import read_metrics
from trainer.weights.tensor_file import read_file

TIMING_FIELDS = re.compile(r"second|_wait$|^mfu|_mb$")  # fields of a record that differ from run to run
# fields of a checkpoint; the others hold times and the name of the run
STATE_FIELDS = ("model", "optimizer", "scaler", "epoch", "step", "update", "tokens")
STATE_FIELDS += ("samples_done", "best_eval")


def compare_runs(right: Path, other: Path) -> list[str]:
    """What differs between the files of two finished runs, a line for each file: weights, also the best and
    kept ones, adapters, checkpoint, metrics."""
    differences = []
    for path in sorted(right.rglob("*")):
        name = path.relative_to(right)
        if path.suffix not in (".pth", ".safetensors", ".jsonl") or path.stem.endswith("_previous"):
            continue
        if not (other / name).exists():
            differences.append(f"{name} is missing")
            continue
        values, others = dict(leaves(content(path))), dict(leaves(content(other / name)))
        keys = values | others
        differing = [key for key in keys if not is_same(values.get(key), others.get(key))]
        if differing:
            differences.append(f"{name}: {len(differing)} values differ, the first is {differing[0]}")
    return differences


def content(path: Path) -> Any:
    """What must be the same in a file."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".jsonl":
        records = read_metrics(path)
        fields = [
            [item for item in record.items() if not TIMING_FIELDS.search(item[0])] for record in records
        ]
        return [dict(items) for items in fields]
    state = read_file(path)
    return {key: state.get(key) for key in STATE_FIELDS} if "optimizer" in state else state


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value in nested dicts and lists with its path, such as `optimizer.state.2.step`."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield name, value
        return
    for key, part in value.items():
        yield from leaves(part, f"{name}.{key}" if name else str(key))


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are bit-identical: NaN equals NaN, 0.0 differs from -0.0."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return repr(a) == repr(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
