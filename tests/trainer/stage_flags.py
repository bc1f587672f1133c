"""Small runs of the stages for tests, and what must be equal when two runs are the same."""

from pathlib import Path

import torch

from common.settings import ROOT, StageArgs
from dataset.token_cache import load_tokenizer
from model.model_minimind import MiniMindForCausalLM
from trainer.report.metrics import read_metrics
from trainer.weights.config import model_config
from trainer.weights.files import save_weights

# figures of a record that are not of time
FIELDS = ("update", "epoch", "loss", "logits_loss", "aux_loss", "learning_rate", "grad_norm", "tokens")
FIELDS += ("initial_eval_loss", "eval_loss", "eval_bpb", "skipped", "expert_load", "expert_max_min")
FIELDS += ("dead_experts", "mean_loss")


def flags(corpus, folder, stage, **extra) -> list[str]:
    """A small run; `extra` replaces its settings."""
    settings = {"data_path": corpus[stage], "eval_data_path": corpus[f"{stage}_eval"]}
    settings |= {"cache_dir": corpus["cache"], "save_dir": folder / "out"}
    settings |= {"checkpoint_dir": folder / "checkpoints", "hidden_size": 32, "num_hidden_layers": 1}
    settings |= {"max_seq_len": 64, "batch_size": 8, "accumulation_steps": 1, "epochs": 2}
    settings |= {"learning_rate": 1e-2, "dtype": "float32", "log_interval": 1, "save_interval": 3}
    settings |= {"eval_interval": 0, "sample_prompts": "none"}
    settings |= {"from_weight": "none"} if stage == "pretrain" else {}
    return [part for key, value in (settings | extra).items() for part in (f"--{key}", str(value))]


def write_start_weights(folder: Path, shapes: dict[str, dict]) -> None:
    """Random weights whose predictions differ, by name."""
    tokenizer = load_tokenizer(ROOT / "model")
    for seed, (name, shape) in enumerate(shapes.items()):
        torch.manual_seed(seed)
        model = MiniMindForCausalLM(model_config(tokenizer, StageArgs(**shape)))
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(4)
        save_weights(model, folder / f"{name}.pth")


def saved_state(folder: Path, name: str = "pretrain_32") -> dict:
    """The newest resume checkpoint of a run."""
    return torch.load(folder / f"checkpoints/{name}_resume.pth", weights_only=True)


def records(folder: Path, name: str = "pretrain_32", fields: tuple[str, ...] = FIELDS) -> list[list]:
    """What the metrics file says about each update."""
    return [[r.get(key) for key in fields] for r in read_metrics(folder / f"out/{name}_metrics.jsonl")]


def assert_same_tensors(a, b) -> None:
    """All tensors in nested dicts and lists are the same bits, all else is equal."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert_same_tensors(value, b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same_tensors(one, other)
    else:
        assert a == b


def assert_same_run(
    one: Path, other: Path, name: str = "pretrain_32", fields: tuple[str, ...] = FIELDS
) -> None:
    """Weights, optimizer and metrics of two runs are the same bits."""
    a, b = saved_state(one, name), saved_state(other, name)
    assert a["update"] == b["update"]
    for part in ("model", "optimizer"):
        assert_same_tensors(a[part], b[part])
    a, b = (torch.load(run / f"out/{name}.pth", weights_only=True) for run in (one, other))
    assert all(torch.equal(value, b[key]) for key, value in a.items())
    assert records(one, name, fields) == records(other, name, fields)
