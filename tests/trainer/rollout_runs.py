"""Small runs of the stages that learn from rewards, for tests, and what must be equal when two runs are the
same."""

import signal
from pathlib import Path

import pytest

from tests.conftest import write_jsonl
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_tensors, flags, saved_state
from trainer.report.metrics import read_metrics

SAMPLED = (
    "loss",
    "grad_norm",
    "reward",
    "entropy",
    "completion_length",
    "kl",
    "clip_ratio",
    "samples",
    "eval_reward",
)
# Ends the process, as kill -9 would, or stops it, as SIGTERM would, before the Nth token of all rollouts.
IN_A_ROLLOUT = """
import signal
from model import generation
step, count = generation.Decoder.step, [0]
def counted(decoder, *args):
    count[0] += 1
    if count[0] == {token}:
        os.kill(os.getpid(), signal.{signal})
    return step(decoder, *args)
generation.Decoder.step = counted
"""


def write_prompts(folder: Path) -> dict[str, Path]:
    """24 prompts to train on and 5 held-out ones."""
    words = ["river", "stone", "山水", "fox", "red", "blue", "walks", "在", "under", "the", "a", "sees"]
    return {
        "rl": write_jsonl(folder / "rl.jsonl", [{"prompt": f"{a} {b}?"} for a in words for b in words[:2]]),
        "rl_eval": write_jsonl(folder / "test.jsonl", [{"prompt": f"{word}!"} for word in words[:5]]),
        "cache": folder / "cache",
    }


def rollout_flags(prompts: dict[str, Path], folder: Path, **extra) -> list[str]:
    """A small run; `extra` replaces its settings."""
    own = {"from_weight": "none", "reward": "length,repetition=0.5", "max_gen_len": 6, "save_interval": 2}
    own |= {"batch_size": 4, "max_seq_len": 32, "eval_interval": 3, "epochs": 1, "sample_prompts": "auto"}
    return flags(prompts, folder, "rl", **own | extra)


def figures(folder: Path, name: str, fields: tuple[str, ...] = SAMPLED) -> list[list]:
    """What the metrics file says about each update."""
    return [
        [record.get(key) for key in fields] for record in read_metrics(folder / f"out/{name}_metrics.jsonl")
    ]


def assert_same_run(one: Path, other: Path, name: str, fields: tuple[str, ...] = SAMPLED) -> None:
    """Weights, optimizer and metrics of two runs are the same bits."""
    a, b = saved_state(one, name), saved_state(other, name)
    for part in ("model", "optimizer", "update"):
        assert_same_tensors(a[part], b[part])
    assert figures(one, name, fields) == figures(other, name, fields)


def assert_close_figures(one: Path, other: Path, name: str, fields: tuple[str, ...] = SAMPLED) -> None:
    """The metrics of two runs are equal up to rounding."""
    first, second = figures(one, name, fields), figures(other, name, fields)
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        for field, x, y in zip(fields, a, b, strict=True):
            assert x == (y if field == "samples" or x is None else pytest.approx(y, rel=1e-4, abs=1e-6)), (
                field
            )


def assert_goes_on_with_another_grouping(stage, prompts, folder, name, before, after, **settings) -> None:
    """A run that is stopped between two updates of a rollout goes on with another (--batch_size,
    --accumulation_steps, processes)."""
    settings |= {"num_iterations": 2, "eval_interval": 0, "save_interval": 1000}

    def again(grouping, **more) -> list[str]:
        grouping = dict(zip(("batch_size", "accumulation_steps"), grouping, strict=False))
        return rollout_flags(prompts, folder, **settings | grouping | more)

    at = Faults(signals={3 * before[1]: signal.SIGTERM})  # in the third update: it is made, and saved
    run(stage, again(before), at, ranks=before[2], status=128 + signal.SIGTERM)
    assert saved_state(folder, name)["update"] == 3
    run(stage, again(after, from_resume=1), ranks=after[2])
    assert saved_state(folder, name)["update"] == 12
