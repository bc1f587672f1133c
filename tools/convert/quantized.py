"""The weights of a model in 8 or 4 bits, in the form of the page to send.

    8 bits  whole numbers from -127 to 127, one scale for each row
    4 bits  whole numbers from -8 to 7, one scale for each group of 32 columns of a row

Matrices are rounded to the nearest of these values; norms and routers stay float32. A scale is the largest
magnitude of its weights, divided by the largest code. In 4 bits it has the sign with which that weight
becomes -8, as in llama.cpp's Q4_0.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.convert.products import GROUP, ZERO

LARGEST = 127  # largest code in 8 bits


class Quantized(NamedTuple):
    """A matrix [R, C] as whole numbers.

    codes: int8 [R, columns], where columns is C, filled up with zeros to a multiple of GROUP. scales:
    float32, [R, 1] in 8 bits, [R, columns / GROUP] in 4 bits.
    """

    codes: Tensor
    scales: Tensor
    bits: int

    def packed(self) -> bytes:
        """The codes as bytes, for the page's products. In 4 bits, byte j of a group has the codes of columns
        j (lower half) and j + 16, each plus ZERO."""
        codes = self.codes
        if self.bits == 4:
            low, high = (codes + ZERO).to(torch.uint8).unflatten(1, (-1, 2, GROUP // 2)).unbind(2)
            codes = low + (high << 4)
        return codes.numpy().tobytes()

    def values(self, columns: int) -> Tensor:
        """The weights that the codes represent, float32 [R, C]. columns: C."""
        wide = self.codes.unflatten(1, (self.scales.shape[1], -1)) * self.scales[..., None]
        return wide.flatten(1)[:, :columns].contiguous()


def quantize(weight: Tensor, bits: int) -> Quantized:
    """Quantize a matrix [R, C] of finite numbers to 8 or 4 bits."""
    weight = F.pad(weight.float(), (0, -weight.shape[1] % GROUP))
    if bits == 8:
        scales = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    else:
        groups = weight.unflatten(1, (-1, GROUP))
        largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))[..., 0]
        scales = (largest / -ZERO).half().float()  # half of the bits are zeros, which gzip compresses well
    parts = weight.unflatten(1, (scales.shape[1], -1))
    codes = (parts / scales.where(scales != 0, 1)[..., None]).round()
    codes = codes.clamp(-LARGEST, LARGEST) if bits == 8 else codes.clamp(-ZERO, ZERO - 1)
    return Quantized(codes.to(torch.int8).flatten(1), scales, bits)
