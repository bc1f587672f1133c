"""Checks of one process: gradients against stock transformers', losses against a CPU's, waits for the GPU,
attention, float16, rollouts, the same bits each time, compiled layers, recomputed ones,
Muon, loaders."""

import copy
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from model.attention import Spans, flat_attention
from model.generation import generate
from model.model_minimind import MiniMindConfig
from model.sampling import Sampling
from tests.gpu import parts
from tests.gpu.parts import LENGTHS, SHAPES, dtypes, micro_batch, new_state, samples, train
from tests.model.test_model_minimind import stock
from trainer.data.datasets import epoch_loader, epoch_order
from trainer.devices.device import native_bfloat16, use_deterministic_kernels
from trainer.devices.wrapping import decoding_model
from trainer.objectives.next_token import to_device
from trainer.optim.muon import Muon
from trainer.run.state import TrainState

# Largest distances from what is right, as a share of its norm: some three times what rounding makes of them.
# In half precision rounding sends a few tokens to other experts. What is wrong is off by 1
# (tests/scripts/test_gpu_check.py).
LIMITS = {("dense", "float32"): 1e-3, ("dense", "bfloat16"): 0.1, ("dense", "float16"): 0.05}
LIMITS |= {("moe", "float32"): 1e-3, ("moe", "bfloat16"): 0.6, ("moe", "float16"): 0.4}
# likewise, in training
LOSSES = {("dense", "float32"): 1e-4, ("dense", "bfloat16"): 1e-3, ("dense", "float16"): 1e-3}
LOSSES |= {("moe", "float32"): 1e-4, ("moe", "bfloat16"): 1e-2, ("moe", "float16"): 1e-2}
ROLLOUTS = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.05}  # of log-probabilities, in nats
PRODUCTS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 1e-2}  # of single products


def test_gradients(device, record_property):
    """What an update gives the optimizer, tensor by tensor, against stock transformers in float32 on the
    CPU."""
    wrong = []
    for shape, use_moe in SHAPES.items():
        for dtype in dtypes(device):
            here = parts.gradients(new_state(device, dtype, use_moe))
            distance, name = parts.worst(here, parts.stock_gradients(use_moe))
            record_property(f"{shape} {dtype}", distance)
            if not distance <= LIMITS[shape, dtype]:  # not a number fails
                wrong.append(f"{shape} {dtype} {name} ({distance:.2g})")
    assert not wrong, f"gradients are not those of stock transformers: {', '.join(wrong)}"


@pytest.mark.slow
def test_losses(device, record_property):
    """Ten updates in each dtype, against float32 on the CPU: the largest relative difference of a loss."""
    wrong = []
    for shape, use_moe in SHAPES.items():
        right = torch.tensor(train(new_state(torch.device("cpu"), "float32", use_moe), 10))
        for dtype in dtypes(device):
            state = new_state(device, dtype, use_moe)
            if dtype == "float16":  # a scale at which no update overflows
                state.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
            difference = float(((torch.tensor(train(state, 10)) - right) / right).abs().max())
            record_property(f"{shape} {dtype}", difference)
            if not difference <= LOSSES[shape, dtype]:
                wrong.append(f"{shape} {dtype}")
    assert not wrong, f"the losses of {', '.join(wrong)} are not those of a CPU in float32"


@contextmanager
def waits_are_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Raise an error at whatever makes the host wait for the GPU, except `Tensor.tolist`, of which the
    number of values that it has read from the GPU is noted."""
    read, reads = Tensor.tolist, []

    def noted(tensor: Tensor) -> Any:
        if tensor.is_cuda:
            reads.append(tensor.numel())
        torch.cuda.set_sync_debug_mode("default")
        values = read(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return values

    torch.cuda.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", noted)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield reads
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_host_waits(gpus, device, monkeypatch):
    """In an update of a dense model the host reads the GPU once, and waits for nothing else; the second of
    the same size, in each mode."""
    if not gpus:
        pytest.skip("needs a CUDA GPU, of which torch tells each wait")
    modes = [(dtype, "adamw") for dtype in dtypes(device)] + [(dtypes(device)[-1], "muon")]
    waits, numbers = {}, {}
    for dtype, optimizer in modes:
        state = new_state(device, dtype, False, optimizer)
        window = [{k: v.pin_memory() if isinstance(v, Tensor) else v for k, v in micro_batch(i, LENGTHS[i]).items()}
                  for i in range(2)]  # fmt: skip
        parts.update(state, window)
        try:
            with waits_are_errors(monkeypatch) as reads:
                parts.update(state, window)
            numbers[f"{dtype} {optimizer}"] = len(reads)
        except RuntimeError as error:
            waits[f"{dtype} {optimizer}"] = str(error).splitlines()[0]
    assert not waits, f"the host waits in an update: {waits}"
    assert set(numbers.values()) == {1}, f"the host reads the GPU more than once in an update: {numbers}"


def gap(here: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative distance of a tensor from the right one."""
    return max(parts.gap(a, b) for a, b in zip(here, right, strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_attention(shared, gpus, device, record_property):
    """The variable-length kernel, forward and backward, against float32 on the CPU; also where the last two
    samples continue the first one."""
    if not gpus or not native_bfloat16(device):
        pytest.skip(
            "the kernel of torch.nn.attention.varlen needs a CUDA GPU from Ampere on; others compute by sample"
        )
    for head in (64, 96, 128):
        check_attention(head, shared, device, record_property)


def check_attention(head: int, shared: bool, device: torch.device, record_property) -> None:
    """`test_attention` with heads of one size."""
    lengths = torch.tensor([0, 200, 1, 64, 333]).cumsum(0).to(torch.int32)
    torch.manual_seed(head)
    inputs = {
        name: torch.randn(int(lengths[-1]), count, head) for name, count in {"q": 8, "k": 4, "v": 4}.items()
    }
    grad = torch.randn(int(lengths[-1]), 8, head)
    before = [0, 0, 200, 200] if shared else []
    right = attend({name: x.clone().requires_grad_() for name, x in inputs.items()}, lengths, grad, before)
    for dtype in ("bfloat16", "float16"):
        there = {n: x.to(device, getattr(torch, dtype)).requires_grad_() for n, x in inputs.items()}
        found = attend(there, lengths.to(device), grad.to(device, getattr(torch, dtype)), before)
        distance = gap(found, right)
        record_property(f"{head} {dtype}", distance)
        assert distance <= PRODUCTS[dtype], f"in {dtype} outputs or gradients are not those of a CPU"


def attend(
    inputs: dict[str, Tensor], lengths: Tensor, grad: Tensor, before: Sequence[int] = ()
) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values; `before`: with so many of the first rows
    each sample begins."""
    q, k, v = inputs.values()
    spans = Spans(lengths, int(lengths.diff().max()), lengths.cpu())
    if before:
        own = torch.arange(len(q)).split(spans.host_cu_seqlens.diff().tolist())
        rows = [torch.cat((torch.arange(count), each)) for count, each in zip(before, own, strict=True)]
        ends = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
        keys = Spans(ends.to(q.device), max(map(len, rows)), ends)
        spans = spans._replace(shared_prefix=(torch.cat(rows).to(q.device), keys))
    out = flat_attention(q, k, v, spans)
    return [out.detach(), *torch.autograd.grad(out, [q, k, v], grad)]


@pytest.mark.parametrize("length", [MiniMindConfig().max_position_embeddings])
def test_long_attention(length, gpus, device, record_property):
    """One sample of the greatest length: outputs and gradients of some queries, against softmax written out
    in float64 on the CPU."""
    length = length if gpus else 512
    torch.manual_seed(0)
    rows = torch.randperm(length)[:64]
    shapes = {"q": (length, 2, 64), "k": (length, 1, 64), "v": (length, 1, 64)}
    inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
    grad = torch.zeros(length, 2, 64).index_copy_(0, rows, torch.randn(64, 2, 64))
    exact = {name: x.double().requires_grad_() for name, x in inputs.items()}
    scores = torch.einsum("rhd,nd->rhn", exact["q"][rows], exact["k"][:, 0]) / 8.0
    future = torch.arange(length) > rows[:, None]
    out = scores.masked_fill(future[:, None], -torch.inf).softmax(-1) @ exact["v"][:, 0]
    right = [out.detach(), *torch.autograd.grad(out, list(exact.values()), grad[rows].double())]
    for dtype in dtypes(device):
        there = {n: x.to(device, getattr(torch, dtype)).requires_grad_() for n, x in inputs.items()}
        ends = torch.tensor([0, length], dtype=torch.int32)
        output, *grads = attend(there, ends.to(device), grad.to(device, getattr(torch, dtype)))
        distance = gap([output[rows.to(device)], *grads], right)
        record_property(dtype, distance)
        assert distance <= PRODUCTS[dtype], f"in {dtype} outputs or gradients are wrong at {length:,} tokens"


def test_overflow(gpus, device, record_property):
    """In float16 an update whose gradient overflows changes no weight and halves the scale; once the scale
    fits, updates are made."""
    state = new_state(device, "float32", False, width=64)
    state.autocast = torch.autocast(device.type, dtype=torch.float16)
    state.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**38)
    window = [micro_batch(0, (12, 5))]
    before = [p.detach().clone() for p in state.model.parameters()]
    parts.update(state, window)  # makes the optimizer's state
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True)), (
        "it was not skipped"
    )
    assert state.scaler.get_scale() == 2.0**37
    for _ in range(36):
        parts.update(state, window)
    record_property("scale", state.scaler.get_scale())
    assert 1.0 < state.scaler.get_scale() < 2.0**37
    assert not any(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True)), (
        "no update"
    )


def test_rollouts(device, record_property):
    """Answers that are drawn together: each token's log-probability is that of stock transformers on the
    CPU."""
    wrong = []
    for shape, use_moe in SHAPES.items():
        model = parts.new_model(use_moe).eval()
        reference = stock(model)
        prompts = [list(range(10, 10 + n)) for n in (3, 40, 17)]
        for name in dtypes(device)[:2]:
            dtype = getattr(torch, name)
            there: Any = decoding_model(copy.deepcopy(model).to(device), dtype)
            seeds = [[Sampling(seed=10 * i + j) for j in range(3)] for i in range(len(prompts))]
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                groups = generate(there, prompts, seeds, 24, [2])
            distances = []
            for prompt, answers in zip(prompts, groups, strict=True):
                for answer in answers:
                    with torch.no_grad():
                        logits = reference(torch.tensor([prompt + answer.tokens])).logits[
                            0, len(prompt) - 1 : -1
                        ]
                    right = logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
                    distances.append((torch.tensor(answer.logprobs) - right).abs().mean())
            distance = float(torch.stack(distances).mean())
            record_property(f"{shape} {name}", distance)
            if not distance <= ROLLOUTS[name]:
                wrong.append(f"{shape} {name}")
    assert not wrong, (
        f"log-probabilities of answers in {', '.join(wrong)} are not those of stock transformers"
    )


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
            if len(digests) > 1:
                others.append(f"{shape} {dtype}")
    use_deterministic_kernels(False)
    assert not others, f"other bits in {', '.join(others)}"


def without_step(state: TrainState) -> TrainState:
    """With the optimizer's own step again, which `parts.gradients` has replaced."""
    del state.optimizer.step
    return state


OTHER_LENGTHS = ((300,), (5,) * 90, (11,), (250, 4), (63, 700))  # of more tokens, or fewer, than LENGTHS


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled(shape, device, needs_compiler, record_property):
    """With --use_compile 1 the gradients are those of stock transformers, and nothing is compiled after the
    first updates, over batches of other sizes."""
    needs_compiler()
    torch.compiler.reset()
    counters.clear()
    dtype, begin = dtypes(device)[:2][-1], time.monotonic()
    state = new_state(device, dtype, SHAPES[shape], use_compile=True)
    distance, name = parts.worst(parts.gradients(state), parts.stock_gradients(SHAPES[shape]))
    record_property(dtype, distance)
    assert distance <= LIMITS[shape, dtype], f"gradients are not those of stock transformers: {name}"
    train(without_step(state), 3)
    record_property("seconds to compile", round(time.monotonic() - begin, 1))
    graphs = counters["stats"]["unique_graphs"]
    for number, lengths in enumerate(OTHER_LENGTHS):
        parts.update(state, [micro_batch(number, lengths)])
    record_property("graphs", graphs)
    record_property("breaks", sum(counters["graph_break"].values()))
    assert graphs, "nothing is compiled"
    assert counters["stats"]["unique_graphs"] == graphs, (
        "the model is compiled again for batches of other sizes"
    )


def test_recomputed(device, record_property):
    """With --activation_checkpointing 1 an update has the same gradients and needs less memory."""
    wrong = []
    for shape, use_moe in SHAPES.items():
        for dtype in dtypes(device):
            plain, recomputed = (
                parts.gradients(new_state(device, dtype, use_moe, width=64, activation_checkpointing=on))
                for on in (False, True)
            )
            distance, name = parts.worst(recomputed, plain)
            record_property(f"{shape} {dtype}", distance)
            if not distance <= PRODUCTS[dtype]:
                wrong.append(f"{shape} {dtype} {name} ({distance:.2g})")
    assert not wrong, f"recomputed layers have other gradients: {', '.join(wrong)}"
    batch = micro_batch(0, (256,) * 8)
    few = {"target_index": batch["target_index"][:64], "targets": batch["targets"][:64]}  # of a small head
    peaks = []
    for on in (False, True):
        state = new_state(device, "float32", False, width=64, depth=8, activation_checkpointing=on)
        parts.update(state, [batch | few])  # makes the optimizer's state
        peaks.append(parts.peak_of(device, partial(parts.update, state, [batch | few])))
    record_property("memory", round(peaks[1] / peaks[0], 2))
    assert peaks[1] < 0.7 * peaks[0], f"recomputing layers needs {peaks[1] / peaks[0]:.0%} of the memory"


def orthogonalized(matrix: Tensor) -> Tensor:
    """Newton-Schulz iterations of Muon, as its author wrote them, of one matrix [m, n]."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon(device, record_property):
    """Three steps of Muon on stacks of matrices, against each matrix by itself in float64 on the CPU."""
    torch.manual_seed(0)
    shapes = [(48, 96), (48, 96), (128, 64), (64, 64)]
    starts = [torch.randn(shape) for shape in shapes]
    grads = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    weights = [nn.Parameter(start.to(device, copy=True)) for start in starts]
    lr, decay = 0.02, 0.5
    optimizer = Muon([{"params": weights}], {weight: len(weight) for weight in weights}, lr, decay)
    right, momenta = [start.double() for start in starts], [torch.zeros(shape).double() for shape in shapes]
    for step in grads:
        for number, grad in enumerate(step):
            weights[number].grad = grad.to(device)
            momenta[number] = 0.95 * momenta[number] + 0.05 * grad.double()
            update = orthogonalized(0.95 * momenta[number] + 0.05 * grad.double())
            size = 0.2 * max(shapes[number]) ** 0.5
            right[number] = right[number] * (1 - lr * decay) - lr * size * update
        optimizer.step()
    moved = zip(weights, right, starts, strict=True)
    distance = max(parts.gap(here.cpu().double() - start, there - start) for here, there, start in moved)
    record_property("distance", distance)
    assert distance <= (0.02 if native_bfloat16(device) else 1e-3), "steps of Muon are wrong"


def test_workers(device, record_property):
    """Micro-batches that two processes make and the device is given from pinned memory, against those of this
    process."""
    if device.type == "cuda":
        torch.cuda.init()  # as in training, before the loader is made
    data = [samples(number, (40 + number % 7,)) for number in range(64)]
    here, there = (
        [
            to_device(batch, device)
            for batch in epoch_loader(data, epoch_order(len(data), 0, 0), 4, num_workers=workers)
        ]
        for workers in (0, 2)
    )
    assert len(here) == len(there) == 16
    for right, found in zip(here, there, strict=True):
        for name in ("input_ids", "targets", "target_index", "cu_seqlens"):
            assert torch.equal(right[name], found[name]), f"{name} of a micro-batch is not what was made"
    if device.type == "cuda":
        batch = next(iter(epoch_loader(data, epoch_order(len(data), 0, 0), 4, num_workers=2)))
        assert batch["input_ids"].is_pinned(), "the loader's memory is not pinned"
