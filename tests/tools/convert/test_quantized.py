"""Weights in 8 and 4 bits, against plain loops; 4 bits also against gguf's Q4_0."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize

from tools.convert.products import GROUP
from tools.convert.quantized import quantize


def test_8_bits_are_the_nearest_of_255_steps_of_a_row():
    torch.manual_seed(0)
    weight = torch.randn(5, 70)
    weight[3] = 0
    weight[2, 7] = -9.0
    quantized = quantize(weight, 8)
    assert quantized.codes.shape == (5, 96) and not quantized.codes[:, 70:].any()
    for row, codes, scale in zip(weight, quantized.codes, quantized.scales[:, 0], strict=True):
        assert scale == row.abs().max() / 127
        for value, code in zip(row.tolist(), codes.tolist(), strict=False):
            assert abs(value - code * float(scale)) <= float(scale) / 2 * (1 + 1e-5)
    assert (quantized.values(70) - weight).abs().max() <= quantized.scales.max() / 2 * (1 + 1e-5)
    assert quantized.values(70)[2, 7] == pytest.approx(-9.0)


def test_4_bits_are_q4_0_of_gguf():
    torch.manual_seed(0)
    weight = torch.randn(6, 4 * GROUP)
    weight[1, :GROUP] = 0
    q4_0 = GGMLQuantizationType.Q4_0
    reference = dequantize(gguf_quantize(weight.numpy(), q4_0), q4_0)
    own = quantize(weight, 4).values(4 * GROUP).numpy()
    steps = np.abs(reference).reshape(6, -1, GROUP).max(axis=2, keepdims=True) / 8
    # gguf rounds by the scale before it is rounded itself: a tie may fall the other way
    difference = np.abs(own - reference).reshape(6, -1, GROUP)
    assert (difference <= steps * 1.01).all() and (difference > steps / 2).mean() < 0.01


def test_how_codes_are_packed():
    torch.manual_seed(0)
    quantized = quantize(torch.randn(2, GROUP), 4)
    packed = np.frombuffer(quantized.packed(), np.uint8).astype(int).reshape(2, GROUP // 2)
    for row in range(2):
        for j in range(GROUP // 2):
            low, high = packed[row, j] & 15, packed[row, j] >> 4
            assert low - 8 == quantized.codes[row, j] and high - 8 == quantized.codes[row, j + GROUP // 2]
    wide = quantize(torch.randn(2, 40), 8)
    assert np.array_equal(np.frombuffer(wide.packed(), np.int8).reshape(2, 64), wide.codes.numpy())
