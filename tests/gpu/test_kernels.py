"""What the path of a GPU stands on, each once and by itself: where one of these fails, it explains what fails
later."""

import numpy as np
import pytest
import torch

from model.attention import attention
from model.layout import flat_layout
from model.model_minimind import Attention, MiniMindConfig
from model.sampling import Sampling, draw
from tests.gpu.parts import dtypes
from trainer.devices.device import matrix_rate, use_deterministic_kernels
from trainer.optim.muon import orthogonalized


def attention_norm(device: torch.device, dtype: str) -> float:
    """The norm of the keys' gradient of attention within three samples."""
    ends, numbers = np.array([0, 200, 201, 598], np.int32), torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(598, heads, 64, generator=numbers).to(device, getattr(torch, dtype)).requires_grad_()
        for heads in (8, 4, 4)
    )
    layout = flat_layout(torch.from_numpy(ends).to(device), 397, ends)
    attention(Attention(MiniMindConfig(), 0), q, k, v, layout).float().square().sum().backward()
    return float(k.grad.norm())


def test_kernel_attention(device, record_property):
    """Forward and backward, in each dtype about the same."""
    right = attention_norm(torch.device("cpu"), "float32")
    for dtype in dtypes(device):
        norm = attention_norm(device, dtype)
        record_property(dtype, norm)
        assert norm == pytest.approx(right, rel=0.02), f"{dtype}: {norm}, not {right}"


def test_kernel_deterministic_attention(device, record_property):
    """With --deterministic 1 there is a kernel too, and it gives the same bits again."""
    use_deterministic_kernels(True)
    try:
        for dtype in dtypes(device):
            norms = [attention_norm(device, dtype) for _ in range(3)]
            record_property(dtype, norms[0])
            assert len(set(norms)) == 1, f"{dtype}: {norms}"
    finally:
        use_deterministic_kernels(False)


def test_kernel_matrix_product(device, record_property):
    """Speed of large products, in TFLOP/s."""
    for dtype in dtypes(device):
        record_property(dtype, matrix_rate(device, getattr(torch, dtype), seconds=0.05) / 1e12)


def test_kernel_hash_tensor(device):
    """The checksum of weights, which tells whether a checkpoint is restored, is that of a CPU."""
    values = torch.arange(1000.0)
    assert torch.hash_tensor(values.to(device)).item() == torch.hash_tensor(values).item()


def test_kernel_sampling(device, record_property):
    """Tokens are drawn from rows of logits, those of which one is far the likeliest."""
    logits = torch.randn(4, 6400, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(4), torch.tensor([7, 70, 700, 6399])] = 100.0
    tokens, _ = draw(logits.to(device), [Sampling(0.7, 50, 0.9, seed) for seed in range(4)], [0] * 4)
    assert tokens.tolist() == [7, 70, 700, 6399]


def test_kernel_orthogonalized(device, record_property):
    """Muon's Newton-Schulz iteration: singular values become about 1."""
    shape = (8, 128, 400) if device.type == "cpu" else (8, 512, 1600)
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for dtype in [each for each in dtypes(device) if each != "float16"]:
        found = orthogonalized(matrices.to(device, getattr(torch, dtype))).float()
        mean_square = float(found.square().mean() * shape[-1])
        record_property(dtype, mean_square)
        assert 0.5 < mean_square < 1.5
