"""Small runs of the stages that learn from rewards, for tests, and what must be equal when two runs are the
same."""

from pathlib import Path

import pytest

from tests.conftest import write_jsonl
from tests.trainer.stage_flags import flags, records

SAMPLED = ("loss", "grad_norm", "reward", "entropy", "completion_length", "kl", "clip_ratio", "samples")
SAMPLED += ("eval_reward",)
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
    own |= {"batch_size": 4, "max_seq_len": 32, "eval_interval": 3, "epochs": 1}
    return flags(prompts, folder, "rl", **own | extra)


def assert_close_figures(one: Path, other: Path, name: str, fields: tuple[str, ...] = SAMPLED) -> None:
    """The metrics of two runs are equal up to rounding."""
    first, second = records(one, name, fields), records(other, name, fields)
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        for field, x, y in zip(fields, a, b, strict=True):
            if field == "samples" or x is None:
                assert x == y, field
            else:
                assert x == pytest.approx(y, rel=1e-4, abs=1e-6), field
