"""Each YAML file that is shipped starts a run, and two that belong together follow on each other."""

import math
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.stage_process import StageProcess, run
from tests.trainer.stage_flags import saved_state
from trainer.report.metrics import read_metrics

CONFIGS = ROOT / "llm/training/configs"
CHAINS = {
    "regression": ["regression"],
    "dense": ["pretrain", "full_sft"],
    "moe": ["pretrain_moe", "full_sft_moe"],
}


def overrides(folder: Path, corpus: dict[str, Path], config: str) -> list[str]:
    """What makes a shipped run tiny, and puts its files and data elsewhere."""
    settings = {"save_dir": folder / "out", "checkpoint_dir": folder / "checkpoints", "device": "cpu"}
    settings |= {"epochs": 1, "hidden_size": 32, "batch_size": 8, "log_interval": 1}
    if config == "regression":
        settings |= {"num_samples": 80}
    else:
        kind = "sft" if "sft" in config else "pretrain"
        settings |= {"data_path": corpus[kind], "eval_data_path": corpus[f"{kind}_eval"]}
        settings |= {"cache_dir": corpus["cache"], "num_hidden_layers": 2, "max_seq_len": 64}
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def start(folder: Path, corpus: dict[str, Path], config: str) -> StageProcess:
    """Run a config by the command that its head shows."""
    text = (CONFIGS / f"{config}.yaml").read_text(encoding="utf-8")
    (command,) = re.findall(r"^# +python -m llm\.training\.train (.+)$", text, flags=re.M)
    command = command.replace("llm/training", f"{ROOT}/llm/training").replace("FILE", "replaced.jsonl")
    return run("engine", [*shlex.split(command), *overrides(folder, corpus, config)])


@pytest.mark.parametrize("chain", CHAINS)
def test_it_trains_for_a_few_updates(corpus, tmp_path, chain):
    for config in CHAINS[chain]:
        given = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text(encoding="utf-8"))
        weight = given.get("checkpoint", {}).get("save_weight", "regression")
        name = f"{weight}_32{'_moe' if config.endswith('_moe') else ''}"
        process = start(tmp_path, corpus, config)
        metrics = read_metrics(tmp_path / f"out/{name}_metrics.jsonl")
        assert 3 <= len(metrics) <= 20 and all(math.isfinite(record["loss"]) for record in metrics)
        assert math.isfinite(metrics[-1]["eval_loss"]) and f"done: {len(metrics)} updates" in process.out
        saved = saved_state(tmp_path, name)
        # what is not overridden holds
        assert saved["fingerprint"]["learning_rate"] == given["training"]["learning_rate"]
        assert ("EarlyStopping" in saved["callbacks"]) == (config == "regression")
        experts = [key for key in saved["model"] if "mlp.experts.3." in key]
        assert bool(experts) == config.endswith("_moe") and (metrics[-1]["aux_loss"] > 0) == bool(experts)
        if config.startswith("full_sft"):
            assert "weights: pretrain" in process.out and saved["fingerprint"]["from_weight_sha256"]
