"""The names of a run's files in `out/` and `checkpoints/`; they are MiniMind's."""

from pathlib import Path
from typing import Protocol


class NamedShape(Protocol):
    """What of a model's shape is in its file names: a MiniMindConfig, or the settings of a run."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def use_moe(self) -> bool: ...


def run_name(weight: str, lm_config: NamedShape) -> str:
    """The stem of all files of a run, e.g. `full_sft_512_moe`."""
    return f"{weight}_{lm_config.hidden_size}{'_moe' if lm_config.use_moe else ''}"


def weight_path(save_dir: str | Path, weight: str, lm_config: NamedShape) -> Path:
    """The file of the fp16 weights for use: `<save_dir>/<weight>_<hidden_size>[_moe].pth`."""
    return Path(save_dir) / f"{run_name(weight, lm_config)}.pth"


def metrics_path(save_dir: str | Path, run: str) -> Path:
    """The file of the log records of a run of this `run_name`."""
    return Path(save_dir) / f"{run}_metrics.jsonl"


def resume_path(checkpoint_dir: str | Path, weight: str, lm_config: NamedShape) -> Path:
    """The file of the state to resume from: `<checkpoint_dir>/<weight>_<hidden_size>[_moe]_resume.pth`."""
    return Path(checkpoint_dir) / f"{run_name(weight, lm_config)}_resume.pth"
