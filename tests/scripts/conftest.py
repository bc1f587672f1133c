"""A tiny saved model, and what runs a script's `main` in this process, as its command line would: starting
Python and torch anew takes seconds."""

import sys
from collections.abc import Callable
from subprocess import CompletedProcess
from types import ModuleType

import pytest
import torch

from common.command_line import one_line_errors
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.weights.files import save_weights
from trainer.weights.paths import weight_path


@pytest.fixture
def weights(tmp_path) -> list[str]:
    """Flags that name a saved model; its shape is in the file, full_sft_32.pth."""
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
    save_weights(MiniMindForCausalLM(config), weight_path(tmp_path, "full_sft", config))
    return ["--save_dir", str(tmp_path)]


@pytest.fixture
def call(monkeypatch, capsys) -> Callable[..., CompletedProcess]:
    """call(module, *args) gives what the command prints and its exit status."""

    def run(module: ModuleType, *args) -> CompletedProcess:
        monkeypatch.setattr(sys, "argv", [str(module.__file__), *map(str, args)])
        status = 0
        capsys.readouterr()
        try:
            with one_line_errors():
                module.main()
        except SystemExit as end:
            status = end.code
        return CompletedProcess(sys.argv, status, *capsys.readouterr())

    return run


@pytest.fixture
def error_line(call) -> Callable[..., str]:
    """error_line(module, *args) gives the one line with which the command refuses."""

    def run(module: ModuleType, *args) -> str:
        done = call(module, *args)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        return done.stderr

    return run
