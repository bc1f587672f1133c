"""Checks that start runs: every stage killed and resumed, and the speed on samples of usual lengths."""

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dataset.token_cache import load_tokenizer
from scripts.demo.world import make_corpus
from tests.conftest import ROOT, write_jsonl
from tests.gpu import parts
from tests.gpu.conftest import FREE_GPU_BYTES
from trainer.devices.compiling import compiler_problem

pytestmark = pytest.mark.slow
# verify_resume's stages with flags that change what a GPU computes
STAGES: dict[str, tuple[str, dict[str, object]]] = {
    "pretrain": ("pretrain", {"optimizer": "muon", "num_workers": 2, "packing": 1}),
    "sft": ("sft", {"activation_checkpointing": 1}),
    "sft_float16": ("sft", {"dtype": "float16"}),
    "sft_float32": ("sft", {"dtype": "float32"}),  # on an NVIDIA GPU attention by CUTLASS's kernel
    "sft_moe": ("sft", {"num_experts_per_tok": 2}),
    "lora": ("lora", {}),
    "dpo": ("dpo", {}),
    "distillation": ("distillation", {}),
    "grpo": ("grpo", {"num_iterations": 2, "beta": 0.1}),
    "ppo": ("ppo", {"num_iterations": 2}),
    "agent": ("agent", {}),
}
METRICS = ("tokens_per_second", "mfu", "matmul_peak_tflops", "data_wait", "peak_memory_mb")


def verify_resume(stage: str, ranks: int, use_moe: bool, flags: dict[str, object]) -> None:
    """Run scripts/verify_resume.py with --deterministic 1: bitwise the same weights, optimizer and records as
    a run that was not killed."""
    command = [sys.executable, "scripts/verify_resume.py", "--stage", stage, "--kills", "3", "--seed", "1"]
    command += ["--ranks", str(ranks), "--use_moe", str(int(use_moe)), "--"]
    flags = {"deterministic": 1, "epochs": 1, "accumulation_steps": 1, "batch_size": 4} | flags
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    lines = done.stdout.strip().splitlines() or ["it prints nothing"]
    reasons = [line for line in lines if line.startswith(("FAIL", "error"))]
    assert done.returncode == 0, (reasons or lines[-1:])[0]
    assert re.search(r"from update [1-9]", done.stdout), "no run was killed in training"


@pytest.mark.parametrize("case", STAGES)
def test_resume(case, device):
    """Some updates of a stage; killed three times and resumed it ends with the same bits."""
    stage, flags = STAGES[case]
    if flags.get("dtype", "float32") not in parts.dtypes(device):
        pytest.skip(f"this device has no arithmetic for {flags['dtype']}")
    compiled = int(case == "pretrain" and device.type == "cuda")  # once: it takes long
    verify_resume(stage, 1, case == "sft_moe", {"device": device.type, "use_compile": compiled} | flags)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_resume_of_ranks(parallel, ranks):
    """The same of several processes."""
    verify_resume("sft", min(3, ranks), False, {"parallel": parallel, "use_compile": 0})


@pytest.mark.parametrize("use_moe", [0, 1])
def test_speed(use_moe, gpus, device, tmp_path, record_property):
    """scripts/benchmark.py in the form of long runs, packed rows of samples of 200 to 700 tokens in large
    micro-batches, plain and compiled: figures to send in. The loader keeps up with the GPU, where compiling
    pays."""
    data = long_samples(tmp_path / "pretrain.jsonl", 1000 if gpus else 24)
    settings = {"stage": "pretrain", "use_moe": use_moe, "data_path": data, "cache_dir": tmp_path / "cache"}
    settings |= {"json": tmp_path / "figures.json", "max_seq_len": 768, "device": device.type}
    settings |= {"packing": 1, "accumulation_steps": 1, "batch_size": 2}
    if gpus:
        settings["batch_size"] = 16 * min(4, int(torch.cuda.mem_get_info()[0] / FREE_GPU_BYTES))
        record_property("rows", settings["batch_size"])
    else:  # only that it runs
        settings |= {"hidden_size": 64, "num_hidden_layers": 2, "warmup": 1, "updates": 2, "repeat": 1}
    forms, speeds = {"plain": 0}, []
    if device.type != "mps" and not compiler_problem(device.type):
        forms["compiled"] = 1
    for name, use_compile in forms.items():
        flags = [f"--{key}={value}" for key, value in (settings | {"use_compile": use_compile}).items()]
        command = [sys.executable, "scripts/benchmark.py", *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, f"{name}: {done.stderr.strip().splitlines()[-1:]}"
        figures = json.loads((tmp_path / "figures.json").read_text())
        for metric in METRICS:
            if metric in figures:
                record_property(f"{name} {metric}", figures[metric])
        assert figures["data_wait"] < 0.1, f"{name}: the GPU waits for data"
        speeds.append(figures["tokens_per_second"])
    assert not gpus or speeds[-1] >= speeds[0], "compiled training is slower"


def long_samples(path: Path, count: int) -> Path:
    """A file of so many documents of 200 to 700 tokens."""
    tokenizer, numbers = load_tokenizer(ROOT / "model"), random.Random(0)
    texts = itertools.cycle(record["text"] for record in make_corpus(0)["pretrain.jsonl"])
    documents = []
    for _ in range(count):
        tokens, wanted = [], numbers.randint(200, 690)
        while len(tokens) < wanted:
            tokens += tokenizer(next(texts) + "\n", add_special_tokens=False)["input_ids"]
        documents.append({"text": tokenizer.decode(tokens[:wanted])})
    return write_jsonl(path, documents)
