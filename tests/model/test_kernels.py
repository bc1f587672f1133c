"""Which of torch's attention kernels are called, and how, with stand-ins for them."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from model import kernels, varlen
from model.layout import Samples

ENDS = torch.tensor([0, 4], dtype=torch.int32)
SAMPLES = Samples(ENDS, 4, ENDS)
DEVICE = torch.device("cpu")


def of_torch_2_11(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert window_size == (-1, 0)
    return q + 1


def of_later_ones(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    assert window_size == (-1, 0) and enable_gqa
    return q + 2


@pytest.fixture
def torch_has(monkeypatch):
    """torch_has(kernel): model/varlen.py as it is where torch has this kernel."""

    def load(kernel):
        monkeypatch.setattr(torch_varlen, "varlen_attn", kernel)
        importlib.reload(varlen)

    yield load
    monkeypatch.undo()
    importlib.reload(varlen)


@pytest.mark.parametrize(("kernel", "more"), [(of_torch_2_11, 1), (of_later_ones, 2)])
def test_grouped_heads_are_named_to_a_kernel_that_wants_it(kernel, more, torch_has):
    """And no version cuts the graph of a compiled call."""
    torch_has(kernel)
    q, k = torch.ones(4, 2, 8), torch.ones(4, 1, 8)
    assert torch.equal(varlen.fast_varlen_attention(q, k, k, SAMPLES, SAMPLES), q + more)
    torch.compiler.reset()
    compiled = torch.compile(varlen.fast_varlen_attention, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, k, SAMPLES, SAMPLES), q + more)


def test_an_amd_gpu_has_the_kernel_that_works(torch_has, monkeypatch):
    """Whatever number it reports."""

    def missing(q, *_, **__):
        raise RuntimeError("HIP error: invalid device function")

    values = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(4, 2, 64), device=DEVICE)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(kernels, "amd_has_varlen_kernel", False)
    for kernel, works in ((of_later_ones, True), (missing, False)):
        torch_has(kernel)
        kernels.try_amd_kernel(DEVICE)
        assert kernels.has_varlen_kernel(values) is works
