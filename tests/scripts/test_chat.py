"""Chat from a pipe and with --prompt, on a small model with random weights."""

import subprocess
import sys

import pytest
import torch

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts import chat
from tests.conftest import ROOT
from trainer.components.checkpoint import save_weights
from trainer.components.run_files import weight_path

CHAT = ROOT / "scripts" / "chat.py"


@pytest.fixture
def weights(tmp_path) -> list[str]:
    """Flags that name a saved model; its shape is in the file."""
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1)
    save_weights(MiniMindForCausalLM(config), weight_path(tmp_path, "full_sft", config))
    return ["--save_dir", str(tmp_path), "--max_new_tokens", "12"]


def test_one_prompt_is_repeatable(weights, call):
    greedy = [*weights, "--prompt", "hello", "--temperature", "0"]
    shape = ("--hidden_size", "32", "--num_hidden_layers", "1")  # may be given
    first, second = call(chat, *greedy), call(chat, *greedy, *shape, "--seed", "5")
    assert "model: " in first.stdout and first.stdout == second.stdout
    sampled = [call(chat, *weights, "--prompt", "hello", "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_conversation_from_a_pipe(weights):
    command = [sys.executable, str(CHAT), *weights]
    done = subprocess.run(command, input="hello\nand then?\n\nnew\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("> ") >= 5  # four lines and the end of the input


def test_mistakes(weights, call):
    done = call(chat, *weights, "--weight", "nothing", "--prompt", "x")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "nothing_*.pth do not exist" in done.stderr
    done = call(chat, *weights, "--temperature", "-1", "--prompt", "x")
    assert done.returncode == 2 and done.stderr.startswith("error: --temperature")
