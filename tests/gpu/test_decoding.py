"""Decoding: log-probabilities against stock transformers', speed, and the server on the last GPU."""

import json
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

from dataset.token_cache import load_tokenizer
from model.generation import generate
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import Sampling
from tests.conftest import ROOT
from tests.gpu import parts
from tests.gpu.parts import SHAPES, dtypes
from tests.model.test_model_minimind import stock
from trainer.devices.wrapping import decoding_model
from trainer.weights.files import save_weights
from trainer.weights.paths import weight_path

LOG_PROBS = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}  # limits of distances, in nats
STEP = 611  # of the model that counts


def write(
    model: Any,
    prompts: list[list[int]],
    samplings: list[list[Sampling]],
    new: int | list[int],
    slots: int,
    end: int = 2,
) -> Any:
    """The answers to each prompt, in the dtype of the model; `new`: how many tokens they have, if the token
    `end` does not come before."""
    return generate(model, prompts, samplings, new, [end], slots)


@pytest.mark.parametrize("shape", [pytest.param("dense", marks=pytest.mark.slow), "moe"])
def test_log_probabilities(shape, device, record_property):
    """Of answers that are written together, drawn and greedy: those of stock transformers; a greedy token is
    the likeliest. There are more answers than slots, and the first prompt is by far the longest: so rows of
    the cache are moved, and used again by shorter answers. One answer ends with its first token, while others
    of its prompt go on."""
    model = parts.new_model(SHAPES[shape]).eval()
    reference = stock(model)
    prompts, new = [list(range(10, 10 + n)) for n in (600, 40, 17, 3)], [5, 24, 11, 16]
    with torch.no_grad():
        end = int(reference(torch.tensor(prompts[1:2])).logits[0, -1].argmax())
    samplings = [
        [Sampling(0.0), Sampling(seed=10 * i), Sampling(seed=10 * i + 1)] for i in range(len(prompts))
    ]
    for dtype in dtypes(device)[:2]:
        there = decoding_model(parts.new_model(SHAPES[shape]).eval().to(device), getattr(torch, dtype))
        distances, below = [], []
        written = write(there, prompts, samplings, new, 7, end)
        for prompt, answers, longest in zip(prompts, written, new, strict=True):
            for answer, sampling in zip(answers, samplings[0], strict=True):
                ended = answer.tokens.index(end) + 1 if end in answer.tokens else longest
                assert len(answer.tokens) == ended, "an answer ends too early or too late"
                with torch.no_grad():
                    logits = reference(torch.tensor([prompt + answer.tokens])).logits[0]
                log_probs = logits[len(prompt) - 1 : -1].log_softmax(-1)
                right = log_probs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
                if sampling.is_greedy:
                    below.append(float((log_probs.amax(-1) - right).max()))
                distances.append(float((torch.tensor(answer.logprobs) - right).abs().mean()))
        record_property(dtype, max(distances))
        assert max(distances) <= LOG_PROBS[dtype], f"{dtype}: log-probabilities are wrong"
        assert max(below) <= 2 * LOG_PROBS[dtype], f"{dtype}: a greedy token is not the likeliest"


def test_decoding_speed(gpus, device, record_property):
    """One answer alone and 16 at once: tokens per second, to send in; in float32 on a CPU the same tokens."""
    width, new = (512, 128) if gpus else (64, 24)
    model = parts.new_model(False, width).eval().to(device)
    for dtype in dtypes(device)[:2] if gpus else ["float32"]:
        there, first = decoding_model(model, getattr(torch, dtype)), {}
        for count in (1, 16):
            prompts = [list(range(10, 30 + i)) for i in range(count)]
            samplings = [[Sampling(seed=i)] for i in range(count)]
            write(there, prompts, samplings, new, count)  # what is done once only
            begin = time.perf_counter()
            answers = [answer.tokens for (answer,) in write(there, prompts, samplings, new, count)]
            seconds = time.perf_counter() - begin
            record_property(f"{dtype} tokens/s of {count}", sum(map(len, answers)) / seconds)
            first[count] = answers[0]
        assert gpus or first[1] == first[16], "answers that are written together have other tokens"


def counting_model() -> MiniMindForCausalLM:
    """A model after whose token n the token n + STEP is by far the likeliest, in any dtype."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
    model = MiniMindForCausalLM(MiniMindConfig(**shape))
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(STEP, 0))
    return model.eval()


def ask(port: int, body: dict[str, Any], process: subprocess.Popen, log: Path) -> dict[str, Any]:
    """The server's reply to a request, once it listens; fails if it ends or refuses."""
    url, end = f"http://127.0.0.1:{port}/v1/completions", time.monotonic() + 120
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    while process.poll() is None and time.monotonic() < end:
        try:
            return json.load(urllib.request.urlopen(request, timeout=60))
        except urllib.error.HTTPError as error:
            pytest.fail(f"the server answers with {error.code}: {error.read().decode()[:300]}")
        except OSError:
            time.sleep(0.2)
    lines = log.read_text().strip().splitlines() or ["it prints nothing"]
    pytest.fail(f"the server gives no answer; {lines[-1]}")


@pytest.mark.slow
def test_server(gpus, device, tmp_path):
    """The server on the last of the GPUs, with a model that counts: three answers that are written together,
    each of the right tokens."""
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        pytest.skip("needs the server's packages: pip install -r requirements-serve.txt")
    model = counting_model()
    save_weights(model, weight_path(tmp_path, "counting", model.config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = f"cuda:{gpus - 1}" if gpus else device.type
    command = [sys.executable, "scripts/serve_openai_api.py", "--weight=counting", f"--save_dir={tmp_path}"]
    log = tmp_path / "server.log"
    with open(log, "wb") as file:
        command += [f"--port={port}", f"--device={place}"]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        prompts = ["The first", "A second", "One more"]
        body = {"model": "counting_64", "prompt": prompts, "max_tokens": 40, "temperature": 0}
        choices = ask(port, body, process, log)["choices"]
    finally:
        process.terminate()
        process.wait(30)
    tokenizer = load_tokenizer(ROOT / "model")
    for prompt, choice in zip(prompts, choices, strict=True):
        last = tokenizer(prompt)["input_ids"][-1]
        right = [(last + STEP * number) % 6400 for number in range(1, 41)]
        assert choice["text"] == tokenizer.decode(right), f"wrong tokens on {place}"
