"""The differences between two runs that must be bit-identical."""

import re
from collections.abc import Iterator
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
    """What differs between two finished runs, a line for each file."""
    found = []
    for name in ("metrics", "weights", "best_weights", "checkpoint"):
        path, other_path = getattr(right, name), getattr(other, name)
        if name == "best_weights" and not path.exists() and not other_path.exists():
            continue  # nothing was evaluated
        try:
            contents = read_contents(path), read_contents(other_path)
        except (SafetensorError, *UNREADABLE) as error:
            found.append(f"{name}: cannot be read ({reason(error)})")
            continue
        differing = differences(*contents)
        if differing:
            found.append(f"{name}: {len(differing)} values differ, first {differing[0]}")
    return found


def read_contents(path: Path) -> Any:
    """What must be the same in a file of weights, an adapter, a checkpoint or a metrics file."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".jsonl":
        records = read_metrics(path)
        return [{key: value for key, value in each.items() if not TIMES.search(key)} for each in records]
    state = read_file(path)
    if "optimizer" not in state:
        return state
    return {key: state.get(key) for key in STATE}


def differences(right: Any, other: Any) -> list[str]:
    """The tensors and numbers in nested dicts and lists that are not bit-identical, by the way to them."""
    values, other_values = dict(leaves(right)), dict(leaves(other))
    found = []
    for name in values | other_values:
        value, other_value = values.get(name, "missing"), other_values.get(name, "missing")
        if not is_same(value, other_value):
            found.append(f"{name}: {described(other_value)}, not {described(value)}")
    return found


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value in nested dicts and lists with the way to it, such as `optimizer.state.2.step`."""
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


def described(value: Any) -> str:
    """A value as text; of a tensor its type, shape and sum."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} of sum {value.double().sum():.17g}"
    return repr(value)[:100]
