"""Checks of several processes: their gradients are those of one, and of stock transformers."""

import pytest

from tests.gpu import parts, ranks
from tests.gpu.test_numbers import LIMITS

WAYS = {"ddp": {}, "fsdp": {"parallel": "fsdp"}, "ddp_compiled": {"use_compile": True}}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_ranks(way, gpus, device, ranks_to_check, needs_compiler, tmp_path, record_property):
    """An update of which each rank has its micro-batches, or none."""
    if way == "ddp_compiled":
        needs_compiler()
    count, wrong = ranks_to_check(), []
    cases = [
        (dtype, use_moe)
        for use_moe in parts.SHAPES.values()
        for dtype in parts.dtypes(device)[: 2 if gpus else 1]
    ]
    found = ranks.run("gradients", count, tmp_path, 350, device=device.type, cases=cases, **WAYS[way])[0]
    for (dtype, use_moe), here in zip(cases, found, strict=True):
        shape = "moe" if use_moe else "dense"
        distance, name = parts.worst(here, parts.stock_gradients(use_moe))
        record_property(f"{shape} {dtype}", distance)
        if not distance <= LIMITS[shape, dtype]:  # not a number fails
            wrong.append(f"{shape} {dtype} {name} ({distance:.2g})")
    record_property("ranks", count)
    assert not wrong, f"gradients are not those of stock transformers: {', '.join(wrong)}"
