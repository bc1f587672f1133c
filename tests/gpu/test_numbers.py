"""Checks of one process: losses against a CPU's, waits for the GPU, attention and grouped products, the same bits each
time, compilations."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from common.settings import StageArgs
from dataset.lm_dataset import collate_flat
from model.feed_forward import GROUP, grouped_linear, has_grouped_mm
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM, flat_attention
from trainer.components.device import (
    mixed_precision,
    native_bfloat16,
    native_float16,
    prepare_device,
    use_deterministic_kernels,
)
from trainer.components.optimizer import build_optimizer
from trainer.components.parallel import wrap_model
from trainer.components.state import TrainState
from trainer.loop import train_update, update_size
from trainer.trainer_utils import next_token_loss

LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-2}  # largest relative difference of a loss from the CPU's
SHAPES = {"dense": False, "moe": True}
LENGTHS = ((17, 33, 5), (64, 64, 3, 9), (100,), (7, 1, 40), (12, 90, 31))  # tokens of the samples of micro-batches


def micro_batch(number: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Random samples of these lengths; every token but the first is a target."""
    numbers = np.random.default_rng(number)
    samples = [
        {"input_ids": numbers.integers(3, 6400, n), "loss_mask": np.ones(n, bool), "sample_id": i, "target_bytes": n}
        for i, n in enumerate(lengths)
    ]
    return collate_flat([samples])


def new_state(
    place: torch.device, dtype: str, use_moe: bool, optimizer: str = "adamw", use_compile: bool = False
) -> TrainState:
    """A small model ready to be trained, the same at every call."""
    prepare_device(place)
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=256, num_hidden_layers=4, use_moe=use_moe)
    autocast, scaler = mixed_precision(dtype, place)
    model = wrap_model(MiniMindForCausalLM(config), place, use_compile=use_compile, autocast=autocast)
    return TrainState(
        args=StageArgs(seed=0),
        lm_config=config,
        model=model.train(),
        optimizer=build_optimizer(model, 1e-3, 0.1, optimizer),
        scaler=scaler,
        autocast=autocast,
        device=place,
        loss_fn=next_token_loss,
        schedule=lambda *_: 1e-3,
        run={"samples": 100, "global_batch": 1, "epochs": 1},
    )


def train(state: TrainState, updates: int) -> list[float]:
    """The loss of each update: two micro-batches, of other sizes in every update, the last one empty now and then."""
    losses = []
    for update in range(updates):
        lengths = [LENGTHS[(2 * update + i) % len(LENGTHS)] for i in range(2)]
        window = [micro_batch(2 * update + i, each if (update, i) != (2, 1) else ()) for i, each in enumerate(lengths)]
        targets, tokens, _ = update_size(state, [state.size(batch) for batch in window])
        losses.append(train_update(state, window, targets, tokens)[0])
        state.update += 1
    return torch.stack(losses).sum(dim=-1).tolist()


def dtypes(device: torch.device) -> list[str]:
    """Those in which this machine can train."""
    half = ["bfloat16"] if native_bfloat16(device) else []
    return ["float32", *half, *(["float16"] if native_float16(device) else [])]


@pytest.mark.slow
def test_losses(device, record_property):
    """Ten updates in each dtype, against float32 on the CPU: the largest relative difference of a loss."""
    wrong = []
    for shape, use_moe in SHAPES.items():
        right = torch.tensor(train(new_state(torch.device("cpu"), "float32", use_moe), 10))
        for dtype in dtypes(device):
            here = torch.tensor(train(new_state(device, dtype, use_moe), 10))
            difference = float(((here - right) / right).abs().max())
            record_property(f"{shape} {dtype}", difference)
            wrong += [f"{shape} {dtype}"] * (not difference <= LIMITS[dtype])
    assert not wrong, f"the losses of {', '.join(wrong)} are not those of a CPU in float32"


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise an error at whatever makes the host wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_host_waits(gpus, device):
    """Updates during which the host must not wait for the GPU, in each mode; batches of new sizes."""
    if not gpus:
        pytest.skip("needs a GPU")
    modes = [(shape, dtype, "adamw") for shape in SHAPES for dtype in dtypes(device)]
    modes += [(shape, dtypes(device)[-1], "muon") for shape in SHAPES]
    waits = {}
    for shape, dtype, optimizer in modes:
        state = new_state(device, dtype, SHAPES[shape], optimizer)
        window = [{k: v.pin_memory() if isinstance(v, Tensor) else v for k, v in micro_batch(i, LENGTHS[i]).items()}
                  for i in range(2)]  # fmt: skip
        sizes = update_size(state, [state.size(batch) for batch in window])[:2]
        train_update(state, window, *sizes)
        try:
            with no_waiting():
                train_update(state, window, *sizes)
        except RuntimeError as error:
            waits[f"{shape} {dtype} {optimizer}"] = str(error).splitlines()[0]
    assert not waits, f"the host waits in an update: {waits}"


def gap(here: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative distance of a tensor from the right one (not finite: infinite)."""
    pairs = [(a.detach().float().cpu(), b.detach().float().cpu()) for a, b in zip(here, right, strict=True)]
    distances = torch.stack([(a - b).norm() / b.norm().clamp(min=1e-6) for a, b in pairs])
    return float(distances.nan_to_num(torch.inf).max())


def test_grouped_products(device, record_property):
    """The experts' grouped product against one product for each: idle experts, rows of NaN behind the last expert's."""
    for dtype in dtypes(device):
        torch.manual_seed(0)
        type_ = getattr(torch, dtype)
        layers = [nn.Linear(128, 256, bias=False, device=device, dtype=type_) for _ in range(6)]
        counts = [2 * GROUP, 0, GROUP, 3 * GROUP, 0, 0]
        ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
        used = sum(counts)
        x = torch.randn(used + 4 * GROUP, 128, device=device, dtype=type_)
        right = torch.cat([layer(part) for layer, part in zip(layers, x[:used].split(counts), strict=True)])
        grad = torch.randn_like(right)
        right_grads = torch.autograd.grad(right, [layer.weight for layer in layers], grad)
        x[used:] = torch.nan if has_grouped_mm(x) else 0.0  # the other way reads them
        poison = torch.full((1 << 24,), torch.nan, device=device)  # what the kernel allocates may hold anything
        del poison
        here = grouped_linear(x, layers, ends, GROUP)[:used]
        here_grads = torch.autograd.grad(here, [layer.weight for layer in layers], grad)
        distance = gap([here, *here_grads], [right, *right_grads])
        record_property(dtype, distance)
        assert distance <= LIMITS[dtype], (
            f"in {dtype} outputs or gradients are not those of one product for each expert"
        )


@pytest.mark.parametrize("head", [64, 96, 128])
def test_attention(head, gpus, device, record_property):
    """The variable-length kernel, forward and backward, against float32 on the CPU."""
    if not gpus or not native_bfloat16(device):
        pytest.skip("the kernel of torch.nn.attention.varlen needs a GPU from Ampere on; others compute by sample")
    lengths = torch.tensor([0, 200, 1, 64, 333]).cumsum(0).to(torch.int32)
    torch.manual_seed(head)
    inputs = {name: torch.randn(int(lengths[-1]), count, head) for name, count in {"q": 8, "k": 4, "v": 4}.items()}
    grad = torch.randn(int(lengths[-1]), 8, head)
    right = attend({name: x.clone().requires_grad_() for name, x in inputs.items()}, lengths, grad)
    for dtype in ("bfloat16", "float16"):
        there = {n: x.to(device, getattr(torch, dtype)).requires_grad_() for n, x in inputs.items()}
        distance = gap(attend(there, lengths.to(device), grad.to(device, getattr(torch, dtype))), right)
        record_property(dtype, distance)
        assert distance <= LIMITS[dtype], f"in {dtype} outputs or gradients are not those of a CPU"


def attend(inputs: dict[str, Tensor], lengths: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    q, k, v = inputs.values()
    out = flat_attention(q, k, v, (lengths, int(lengths.diff().max()), lengths.cpu()))
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], grad)]


@pytest.mark.slow
def test_same_bits(device, monkeypatch):
    """Three trainings with --deterministic 1, from the same start, end with the same weights."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    use_deterministic_kernels(True)
    others = []
    for shape, use_moe in SHAPES.items():
        for dtype in dtypes(device):
            digests = set()
            for _ in range(3):
                state = new_state(device, dtype, use_moe)
                train(state, 6)
                weights = torch.cat([p.detach().flatten() for p in state.model.parameters()]).cpu()
                digests.add(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
            others += [f"{shape} {dtype}"] * (len(digests) > 1)
    use_deterministic_kernels(False)
    assert not others, f"other bits in {', '.join(others)}"


@pytest.mark.parametrize("shape", SHAPES)
def test_compilations(shape, gpus, device, record_property):
    """With --use_compile 1 nothing is compiled after the first updates, over batches of other sizes."""
    if not gpus:
        pytest.skip("compiling takes minutes on a CPU, where the tests count it: bash scripts/test.sh --slow")
    torch.compiler.reset()
    counters.clear()
    state = new_state(device, dtypes(device)[:2][-1], SHAPES[shape], use_compile=True)
    train(state, 3)
    graphs = counters["stats"]["unique_graphs"]
    train(state, 10)
    record_property("graphs", graphs)
    record_property("breaks", sum(counters["graph_break"].values()))
    assert counters["stats"]["unique_graphs"] == graphs, "layers are compiled again for batches of other sizes"
