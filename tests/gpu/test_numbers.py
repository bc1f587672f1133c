"""Numbers of training: gradients against stock transformers', losses and attention against a CPU's."""

import time

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from model.attention import attention
from model.layout import flat_layout
from model.model_minimind import Attention, MiniMindConfig
from tests.gpu import parts
from tests.gpu.parts import SHAPES, dtypes, micro_batch, new_state

# largest differences of a loss, in nats, while training takes it from 8.9 to less than 0.2
LOSSES = {"float32": 0.05, "bfloat16": 0.3, "float16": 0.3}
PRODUCTS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-2}  # distances of attention
# torch writes kernels of their own for up to 512 and up to 1,024 rows
WARM_UP = ((700, 600), (500, 300), (300,))
OTHER_LENGTHS = ((280,), (5,) * 90, (11,), (250, 4), (63, 700), (900, 800))


@pytest.mark.parametrize("shape", [pytest.param("dense", marks=pytest.mark.slow), "moe"])
@pytest.mark.parametrize(
    "recomputed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "recomputed"]
)
def test_gradients(recomputed, shape, device, record_property):
    """What an update gives the optimizer, tensor by tensor, in each dtype; also with
    --activation_checkpointing 1."""
    for dtype in dtypes(device):
        state = new_state(device, dtype, SHAPES[shape], activation_checkpointing=recomputed)
        parts.check_gradients(parts.gradients(state), shape, dtype, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled(shape, device, record_property):
    """With --use_compile 1 the gradients are right (with experts in float32, whose limit is tighter), and after
    the first updates nothing is compiled for batches of other sizes."""
    parts.skip_without_compiler(device)
    torch.compiler.reset()
    counters.clear()
    dtype = "float32" if SHAPES[shape] else dtypes(device)[:2][-1]
    begin = time.monotonic()
    state = new_state(device, dtype, SHAPES[shape], compiled=True)
    parts.check_gradients(parts.gradients(state), shape, dtype, record_property)
    for number, lengths in enumerate(WARM_UP):
        parts.update(state, [micro_batch(number, lengths)])
    record_property("seconds to compile", time.monotonic() - begin)
    graphs = counters["stats"]["unique_graphs"]
    record_property("graphs", graphs)
    record_property("breaks", sum(counters["graph_break"].values()))
    for number, lengths in enumerate(OTHER_LENGTHS):
        parts.update(state, [micro_batch(number, lengths)])
    added = counters["stats"]["unique_graphs"] - graphs
    assert graphs, "nothing is compiled"
    assert not added, f"{added} more graphs for batches of other sizes"


def train(device: torch.device, dtype: str, use_moe: bool, optimizer: str) -> Tensor:
    """The loss of each of ten updates on the same micro-batches, of which one is empty."""
    state, losses = new_state(device, dtype, use_moe, optimizer), []
    if dtype == "float16":  # a scale at which no update overflows
        state.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    micro_batches = [micro_batch(0, (17, 33, 5)), micro_batch(1, (64, 9)), micro_batch(2, ())]
    for _ in range(10):
        losses.append(parts.update(state, micro_batches))
    return torch.tensor(losses)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_losses(optimizer, device, record_property):
    """Ten updates in each dtype, against float32 on the CPU."""
    for shape, use_moe in SHAPES.items():
        right = train(torch.device("cpu"), "float32", use_moe, optimizer)
        for dtype in dtypes(device):
            losses = train(device, dtype, use_moe, optimizer)
            difference = float((losses - right).abs().max())
            record_property(f"{shape} {dtype}", difference)
            assert difference <= LOSSES[dtype], f"{shape}, {dtype}: losses are not those of a CPU"
        assert right[-1] < 0.2, f"{shape}: the loss does not fall"


def dense_attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Softmax attention in float64, q [N, H, D], k and v [N, G, D], sees bool [N, N] -> [N, H, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shared", [False, True], ids=["own_keys", "shared_prefix"])
def test_attention(head_dim, shared, device, record_property):
    """Outputs and gradients of attention within samples, against a softmax over all keys in float64; also
    where the last two samples continue the first one. On an NVIDIA GPU it is one kernel."""
    lengths = [200, 1, 64, 333]
    before = [0, 0, 200, 200] if shared else [0, 0, 0, 0]  # keys of the first sample that each begins with
    ends = torch.tensor([0, *lengths]).cumsum(0)
    sees, rows = torch.zeros(int(ends[-1]), int(ends[-1]), dtype=torch.bool), []
    for begin, end, first in zip(ends[:-1].tolist(), ends[1:].tolist(), before, strict=True):
        sees[begin:end, begin:end] = torch.ones(end - begin, end - begin).tril().bool()
        sees[begin:end, :first] = True
        rows += [torch.arange(first), torch.arange(begin, end)]
    seen = torch.tensor([0, *(n + first for n, first in zip(lengths, before, strict=True))]).cumsum(0).int()
    keys = (torch.cat(rows).to(device), seen.to(device), int(seen.diff().max()), seen.numpy())
    shared_keys = keys if shared else None
    layout = flat_layout(ends.int().to(device), max(lengths), ends.int().numpy(), shared_keys)
    layer = Attention(MiniMindConfig(), 0)

    torch.manual_seed(head_dim)
    inputs = [torch.randn(len(sees), heads, head_dim) for heads in (8, 4, 4)]
    grad = torch.randn_like(inputs[0])
    exact = [x.double().requires_grad_() for x in inputs]
    right = dense_attention(*exact, sees)
    right_grads = torch.autograd.grad(right, exact, grad.double())
    for dtype in dtypes(device):
        there = [x.to(device, getattr(torch, dtype)).requires_grad_() for x in inputs]
        out = attention(layer, *there, layout)
        grads = torch.autograd.grad(out, there, grad.to(out))
        distances = [parts.gap(a, b) for a, b in zip((out, *grads), (right, *right_grads), strict=True)]
        record_property(dtype, max(distances))
        assert max(distances) <= PRODUCTS[dtype], f"{dtype}: attention or its gradients are wrong"
