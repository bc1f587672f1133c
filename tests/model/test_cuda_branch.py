"""What the model computes on CUDA, computed on a CPU: torch's variable-length attention with a kernel of the
tests, its fused norm, experts in batched products. The CPU's own branch is the reference."""

from importlib import import_module
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from dataset.lm_dataset import collate_flat, collate_shared
from model import attention, fused
from model.experts import group_size
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM, MOEFeedForward
from tests.model.test_model_minimind import (
    SHAPES,
    VOCAB,
    build,
    flat_batch,
    gradients,
    ragged,
    take_gpu_branch,
)
from trainer.devices.wrapping import transformer_layers
from trainer.objectives.lora import TARGETS, add_adapters
from trainer.objectives.next_token import target_log_probs

LENGTHS = [5, 33, 12, 1, 70, 21]


@pytest.fixture
def take_cuda_branch(monkeypatch):
    """A function that makes the model take it from now on; `grouped`: as on a GPU with a kernel for the
    experts."""
    if torch.__version__.split("+")[0] != "2.13.0":
        pytest.skip("the kernel for variable-length attention is registered under names of torch 2.13.0")
    import_module("tests.fake_cuda.varlen")

    def take(grouped: bool) -> None:
        monkeypatch.setattr(fused, "has_varlen_kernel", lambda values: True)
        monkeypatch.setattr(
            attention, "attention_by_sample", lambda *_: pytest.fail("not the branch of CUDA")
        )
        take_gpu_branch(monkeypatch, grouped)

    return take


def results(model: MiniMindForCausalLM, batch: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    """Losses and gradients."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = model(**batch)
    (out.loss / len(batch["targets"]) + out.aux_loss / len(batch["input_ids"])).backward()
    return {"loss": out.loss.detach(), "aux_loss": out.aux_loss.detach()} | gradients(model)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grouped", [True, False])
def test_in_float32_losses_and_gradients_are_the_cpus(shape, grouped, take_cuda_branch):
    model, batch = build(shape).train(), flat_batch(ragged(LENGTHS))
    want = results(model, batch, torch.float32)
    take_cuda_branch(grouped)
    for name, value in results(model, batch, torch.float32).items():
        assert (value - want[name]).abs().max() <= 1e-5 * max(1.0, want[name].abs().max().item()), name


def group(prompt: int, lengths: list[int]) -> list[dict]:
    """Samples of so many targets behind one prompt."""
    rest = {"sample_id": 0, "target_bytes": 0}
    ids = [np.r_[np.arange(prompt) + 1, np.random.RandomState(n).randint(3, VOCAB, n)] for n in lengths]
    return [{"input_ids": x, "loss_mask": np.arange(len(x)) >= prompt, **rest} for x in ids]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("branch", ["cpu", "cuda"])
def test_a_shared_prompt_is_computed_once_and_learned_from_by_all(shape, branch, take_cuda_branch):
    """The losses of samples with a prompt of their own each, on the branch of a CPU, and their gradients."""
    rows = [group(20, [5, 9, 1, 60]), group(1, [3, 3]), group(33, [70, 2]), group(8, [4])]
    model, found = build(shape).train(), []
    for collate in (collate_flat, collate_shared):
        batch = collate(rows)
        if collate is collate_shared and branch == "cuda":
            take_cuda_branch(False)
        log_probs, _ = target_log_probs(model, batch)
        (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
        found.append(gradients(model) | {"loss": log_probs.detach()})
    assert len(batch["input_ids"]) < 0.8 * sum(len(sample["input_ids"]) for row in rows for sample in row)
    for name, value in found[0].items():
        assert (value - found[1][name]).abs().max() <= 1e-5 * max(1.0, value.abs().max().item()), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("branch", ["cpu", "cuda"])
def test_an_empty_micro_batch_has_zero_gradients(shape, branch, take_cuda_branch):
    if branch == "cuda":
        take_cuda_branch(False)
    batch = {name: value[:0] for name, value in flat_batch(ragged([4])).items() if torch.is_tensor(value)}
    batch |= {"max_seqlen": 0, "cu_seqlens": torch.zeros(1, dtype=torch.int32)}
    model = build(shape).train()
    with torch.autocast("cpu", torch.bfloat16, enabled=branch == "cpu"):
        out = model(**batch)
    (out.loss + out.aux_loss).backward()
    assert out.loss == out.aux_loss == 0 and all(not grad.any() for grad in gradients(model).values())


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(0, 4, 1), (1, 4, 1), (300, 4, 1), (1003, 5, 2), (64, 8, 8)]
)
@pytest.mark.parametrize("skew", [0.0, 50.0])
def test_no_token_is_dropped_however_the_experts_are_loaded(tokens, experts, top_k, skew, monkeypatch):
    """With the skew nearly all tokens go to one expert, and the others are idle. Gate and up are one product,
    as in half precision."""
    torch.manual_seed(tokens)
    monkeypatch.setattr(fused, "is_half_training", lambda x: True)
    config = MiniMindConfig(hidden_size=32, use_moe=True, num_experts=experts, num_experts_per_tok=top_k)
    layer, x = MOEFeedForward(config), torch.randn(tokens, 32).abs()
    layer.gate.weight.data[1] += skew
    found = []
    for grouped in (None, True, False):  # None: the experts are called
        monkeypatch.setattr(fused, "HOST", "cpu" if grouped is None else "none")
        monkeypatch.setattr(fused, "has_grouped_mm", lambda x, grouped=grouped: grouped)
        leaf = x.clone().requires_grad_()
        out, _ = layer(leaf)
        out.square().sum().backward()
        found.append([out, leaf.grad, *(p.grad.clone() for p in layer.parameters())])
        layer.zero_grad()
    for want, *others in zip(*found, strict=True):
        for got in others:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert tokens * top_k <= 5 * experts * group_size(tokens * top_k, experts)


class GroupedProducts(TorchDispatchMode):
    """What CUDA's grouped_mm refuses or gets wrong, of all calls: groups without rows; strides of matrices
    that are not multiples of 16 bytes."""

    def __init__(self):
        super().__init__()
        self.calls, self.empty, self.uneven = 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.calls += 1
            self.empty += int((args[2].diff(prepend=args[2].new_zeros(1)) == 0).sum())
            for matrix in args[:2]:
                strides = [stride * matrix.itemsize for stride in matrix.stride() if stride != 1]
                self.uneven += [tuple(matrix.shape)] if any(stride % 16 for stride in strides) else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", [0, 4, 8])
@pytest.mark.parametrize("tokens", [0, 3, 200])
def test_every_expert_has_rows_in_training_and_matrices_fit_cudas_product(rank, tokens, monkeypatch):
    """Nearly all tokens go to one expert; with adapters of this rank, or without."""
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1, use_moe=True, num_experts=6)
    model = MiniMindForCausalLM(config)
    if rank:
        add_adapters(model, rank, 8.0, 0.0, TARGETS)
    layer, x = cast(MOEFeedForward, model.model.layers[0].mlp), torch.randn(tokens, 32).abs().requires_grad_()
    layer.gate.weight.data[1] += 50.0
    with GroupedProducts() as seen, torch.autocast("cpu", torch.bfloat16):
        layer(x)[0].sin().sum().backward()
    assert seen.calls >= 3 * 3 and not seen.empty and not seen.uneven
    monkeypatch.setattr(fused, "HOST", "none")
    with GroupedProducts() as seen, torch.autocast("cpu", torch.bfloat16):
        layer(x)[0].sin().sum().backward()
    assert seen.calls == (3 * 8 if rank else 2 * 3) and not seen.empty and not seen.uneven
    with GroupedProducts() as seen, torch.no_grad():
        layer(x)
    assert seen.calls >= 3 and seen.empty >= 3 * 4  # an answer reads the experts that it uses


@pytest.mark.parametrize(("shape", "grouped"), [("moe", True), ("moe_top2", False)])
def test_compiled_layers_are_one_graph_for_all_shapes(shape, grouped, take_cuda_branch):
    """Captured for the first batch, without a break, and never again; torch writes no kernels here."""
    torch.compiler.reset()
    counters.clear()
    take_cuda_branch(grouped)
    model, plain = build(shape).train(), build(shape).train()
    for layer in transformer_layers(model):
        layer.compile(dynamic=True, backend="eager")
    dtype = torch.bfloat16 if grouped else torch.float32  # torch traces grouped_mm in bfloat16 only
    for lengths in ([17, 33, 5], [40], [300, 20, 10], [1, 2, 3], [8] * 40):
        batch = flat_batch(ragged(lengths))
        batch["host_cu_seqlens"] = batch["cu_seqlens"].numpy()
        got, want = (results(part, batch, dtype)["loss"] for part in (model, plain))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch.compiler.reset()


@pytest.mark.parametrize("branch", ["cpu", "cuda"])
def test_the_compiler_does_not_gather_shared_keys(branch, take_cuda_branch):
    """It would add their gradients by several threads, in another order each time."""
    torch.compiler.reset()
    model, plain, traced = build("dense").train(), build("dense").train(), []

    def noting(graph, _inputs):
        for node in graph.graph.nodes:
            if "getitem" not in str(node.target) or isinstance(node.args[1], torch.fx.Node):
                traced.append(str(node.target))
        return graph.forward

    if branch == "cuda":
        take_cuda_branch(False)
    for layer in transformer_layers(model):
        layer.compile(dynamic=True, backend=noting)
    batch = collate_shared([group(20, [5, 9, 1]), group(33, [70, 2])])
    found = []
    for each in (model, plain):
        log_probs, _ = target_log_probs(each, batch)
        log_probs.sum().backward()
        found.append(gradients(each))
    assert len(traced) > 10 and not any("index_select" in name or "getitem" in name for name in traced)
    assert all(torch.allclose(value, found[1][name], atol=1e-5) for name, value in found[0].items())
    torch.compiler.reset()
