"""Checks of whole programs on the device: every stage in every dtype, rollouts that are repeated and resumed,
decoding, the server."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from model.generation import generate
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from scripts.demo.world import make_corpus
from tests.conftest import ROOT, write_jsonl
from tests.gpu import parts
from tests.gpu.parts import dtypes
from trainer.devices.wrapping import decoding_model
from trainer.run.paths import weight_path
from trainer.weights.files import save_weights

pytestmark = pytest.mark.slow
UPDATES, BATCH = 3, 4
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "max_seq_len": 128}
STAGES: dict[str, tuple[str, str, dict[str, Any]]] = {  # script, kind of data, flags
    "pretrain": ("pretrain", "text", {}),
    "pretrain_muon": ("pretrain", "text", {"optimizer": "muon"}),
    "pretrain_recomputed": ("pretrain", "text", {"activation_checkpointing": 1}),
    "pretrain_workers": ("pretrain", "text", {"num_workers": 2, "packing": 1}),
    "pretrain_moe": ("pretrain", "text", {"use_moe": 1}),
    "full_sft": ("full_sft", "chat", {"eval_share": 0.1}),
    "lora": ("lora", "chat", {"from_weight": "full_sft"}),
    "dpo": ("dpo", "pairs", {"from_weight": "full_sft"}),
    "distillation": ("distillation", "chat", {"from_weight": "full_sft", "from_teacher_weight": "full_sft"}),
    "grpo": ("grpo", "prompts", {"num_generations": 4, "beta": 0.1}),
    "ppo": ("ppo", "prompts", {}),
    "agent": ("agent", "sums", {"num_generations": 4, "max_seq_len": 512}),
}
ROLLOUTS = {
    "from_weight": "full_sft",
    "max_gen_len": 16,
    "num_iterations": 1,
    "reward": "tests.gpu.rewards:even_characters",
}


def write_data(folder: Path, kind: str, count: int = UPDATES * BATCH) -> Path:
    """A file of so many records for a kind of stage."""
    corpus, numbers = make_corpus(0), range(count)
    records = {
        "text": corpus["pretrain.jsonl"][:count],
        "chat": corpus["sft.jsonl"][:count],
        "prompts": [{"prompt": f"Say {i} in words.", "answer": str(i)} for i in numbers],
        "sums": [{"prompt": f"What is {i} plus 2?", "answer": str(i + 2)} for i in numbers],
        "pairs": [
            {
                "chosen": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}],
                "rejected": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "No!"}],
            }
            for i in numbers
        ],
    }
    return write_jsonl(folder / f"{kind}.jsonl", records[kind])


def command(stage: str, folder: Path, device: torch.device, **flags: Any) -> list[str]:
    """The command line of a small run of a stage in this folder."""
    settings = SHAPE | {"batch_size": BATCH, "accumulation_steps": 1, "epochs": 1, "log_interval": 1}
    settings |= {f"{kind}_dir": folder / kind for kind in ("save", "checkpoint", "cache")}
    settings |= {"learning_rate": 1e-3, "device": device.type} | flags
    words = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, str(ROOT / f"trainer/train_{stage}.py"), *words]


def run(*commands: list[str]) -> list[str]:
    """What commands print, which run at the same time. Raises AssertionError with the last line of one that
    fails."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(words, cwd=ROOT, **streams) for words in commands]
    try:
        texts = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for words, process, text in zip(commands, started, texts, strict=True):
        print(text)
        said = text.strip().splitlines()[-1:]
        assert process.returncode == 0, f"{Path(words[1]).name}: {said[0] if said else process.returncode}"
    return texts


def records_of(folder: Path, weight: str) -> list[dict[str, Any]]:
    """What a run has recorded of its updates."""
    (path,) = folder.glob(f"save/{weight}*_metrics.jsonl")
    return list(map(json.loads, path.read_text().splitlines()))


def losses(folder: Path, weight: str) -> list[float]:
    """The loss of each logged update; NaN where it was not finite."""
    return [math.nan if record["loss"] is None else record["loss"] for record in records_of(folder, weight)]


def write_start(folder: Path) -> None:
    """Random weights named full_sft to start from."""
    config = MiniMindConfig(hidden_size=SHAPE["hidden_size"], num_hidden_layers=SHAPE["num_hidden_layers"])
    torch.manual_seed(0)
    save_weights(MiniMindForCausalLM(config), weight_path(folder / "save", "full_sft", config))


@pytest.mark.parametrize("stage", STAGES)
def test_stages(stage, device, tmp_path, record_property):
    """Three updates of a stage in each dtype of the device: it ends well, with finite losses."""
    script, kind, flags = STAGES[stage]
    if kind in ("prompts", "sums"):
        flags = ROLLOUTS | flags
    if "full_sft" in flags.values() or flags.get("from_weight") == "full_sft":
        write_start(tmp_path)
    else:
        flags = {"from_weight": "none"} | flags
    data, weights, commands = write_data(tmp_path, kind), {}, []
    for dtype in dtypes(device):
        weights[dtype] = f"{stage}_{dtype}"
        name = {"lora_name": weights[dtype]} if script == "lora" else {"save_weight": weights[dtype]}
        own = {"data_path": data, "dtype": dtype, "cache_dir": tmp_path / f"cache_{dtype}"}
        commands.append(command(script, tmp_path, device, **own, **name, **flags))
    begin = time.monotonic()
    run(*commands)
    record_property("s", round(time.monotonic() - begin, 1))
    for dtype, weight in weights.items():
        found = losses(tmp_path, weight)
        assert found and all(map(math.isfinite, found)), f"{dtype}: losses {found}"


@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_deterministic_rollouts(stage, device, tmp_path):
    """Two runs with --deterministic 1 that write rollouts: the same bits."""
    write_start(tmp_path)
    flags = ROLLOUTS | {"data_path": write_data(tmp_path, "prompts"), "deterministic": 1}
    flags |= {"num_generations": 4} if stage == "grpo" else {}
    names = ("first", "second")
    run(*(command(stage, tmp_path, device, save_weight=name, **flags) for name in names))
    same_weights(tmp_path, *names)
    has_learned(tmp_path, names[0])


def has_learned(folder: Path, weight: str) -> None:
    """Raise AssertionError if the rewards of all completions of a run were alike."""
    found = [record.get("reward_std", 0.0) for record in records_of(folder, weight)]
    assert any(found), f"the rewards are alike, so nothing is learned: their deviations are {found}"


def same_weights(folder: Path, *names: str) -> None:
    """Raise AssertionError unless two runs have the same weights and losses, bit by bit."""
    first, second = (torch.load(folder / f"save/{name}_{SHAPE['hidden_size']}.pth") for name in names)
    other = [name for name, value in first.items() if not torch.equal(value, second[name])]
    assert not other, f"{len(other)} tensors have other bits, {other[0]} the first"
    assert losses(folder, names[0]) == losses(folder, names[1])


def test_resume_of_a_rollout(device, tmp_path):
    """GRPO with two updates to a rollout, resumed from between them after a kill, against a run that was not
    killed: the same bits, with --deterministic 1."""
    write_start(tmp_path)
    data = write_data(tmp_path, "prompts", 8 * BATCH)
    flags = ROLLOUTS | {"num_iterations": 2, "num_generations": 4, "deterministic": 1, "save_interval": 5}
    flags |= {"learning_rate": 1e-4, "from_resume": 1}
    words = {
        name: command("grpo", tmp_path, device, data_path=data, save_weight=name, **flags)
        for name in ("whole", "killed")
    }
    run(words["whole"])
    with open(tmp_path / "killed.log", "wb") as log:
        process = subprocess.Popen(words["killed"], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    metrics = tmp_path / "save/killed_64_metrics.jsonl"
    # by then update 5, the first of its rollout, is saved
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 7):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run was over before it could be killed"
    assert "resuming killed at epoch 1, update 5 of 16" in run(words["killed"])[0]
    same_weights(tmp_path, *words)
    has_learned(tmp_path, "whole")


def tokens_of(model: Any, count: int, new: int, dtype: torch.dtype) -> tuple[list[list[int]], float]:
    """What so many answers at once consist of, and the tokens per second of the second time."""
    prompts = [list(range(10, 30 + i)) for i in range(count)]
    seeds = [[Sampling(seed=i)] for i in range(count)]
    half = torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32)
    for _ in range(2):
        begin = time.perf_counter()
        with half:
            groups = generate(model, prompts, seeds, new, [2], count)
        seconds = time.perf_counter() - begin
    answers = [answer.tokens for (answer,) in groups]
    return answers, sum(map(len, answers)) / seconds


def test_decoding(gpus, device, record_property):
    """One answer alone and 16 at once: the same tokens in float32, and the tokens per second of both."""
    width, count, new = (512, 16, 128) if gpus else (64, 4, 24)
    trained = parts.new_model(False, width).eval().to(device)
    for dtype in dtypes(device)[:2] if gpus else ["float32"]:
        model: Any = decoding_model(trained, getattr(torch, dtype))
        found, rates = zip(
            *(tokens_of(model, n, new, getattr(torch, dtype)) for n in (1, count)), strict=True
        )
        for number, rate in zip((1, count), rates, strict=True):
            record_property(f"{dtype} tokens/s of {number}", round(rate))
        # in half precision, and on a GPU, rounding may draw another token
        assert gpus or found[0][0] == found[1][0], "answers that are drawn together have other tokens"


def test_server(device, tmp_path):
    """The server answers a question with weights on the device."""
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        pytest.skip("needs the server's packages: pip install -r requirements-serve.txt")
    write_start(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "scripts/serve_openai_api.py", f"--save_dir={tmp_path / 'save'}"]
    words += ["--weight=full_sft", f"--port={port}", f"--device={device.type}"]
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ)
    body = {"model": "full_sft_64", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        answer, end = None, time.monotonic() + 120
        while answer is None and process.poll() is None and time.monotonic() < end:
            try:
                answer = json.load(urllib.request.urlopen(request, timeout=60))
            except urllib.error.HTTPError as error:
                pytest.fail(f"the server answers with {error.code}: {error.read().decode()[:300]}")
            except OSError:
                time.sleep(0.2)
        said = (tmp_path / "server.log").read_text().strip().splitlines()
        assert answer, f"the server gives no answer; {said[-1] if said else ''}"
        assert answer["usage"]["completion_tokens"] >= 1
    finally:
        process.terminate()
        process.wait(30)
