"""torch.compile on flat batches: each layer is compiled once, for all layers and sizes of batches."""

import pytest
import torch
from torch._dynamo.utils import counters

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.components.parallel import transformer_layers, wrap_model

LARGE, MIDDLE, SMALL = 1300, 800, 300  # tokens; inductor has kernels of their own for up to 512 and 1,024 rows


def flat_batch(tokens: int, samples: int) -> dict:
    """Samples of random lengths with random targets, as `collate_flat` lays them out."""
    cuts = torch.randperm(tokens - 1)[: samples - 1].sort().values + 1
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([tokens])])
    lengths = borders.diff()
    ids, at = torch.randint(0, 100, (tokens,)), torch.randperm(tokens - 1)[: torch.randint(2, tokens, ())]
    positions = torch.cat([torch.arange(n) for n in lengths])
    shape = {"cu_seqlens": borders.int(), "max_seqlen": int(lengths.max()), "position_ids": positions}
    return shape | {"input_ids": ids, "target_index": at, "targets": ids[at + 1]}


def train(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Loss of a forward and backward pass."""
    with torch.autocast("cpu", torch.bfloat16, enabled=model.config.use_moe):  # where the grouped product compiles
        out = model(**batch)
    (out.loss + out.aux_loss).backward()
    return out.loss.detach()


def model_of(use_moe: bool, layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100}
    return MiniMindForCausalLM(MiniMindConfig(**shape, num_hidden_layers=layers, use_moe=use_moe)).train()


def check(compiled: torch.nn.Module, plain: torch.nn.Module, warm_up: list[int]) -> None:
    """After the warm-up nothing more is compiled, and the losses are those of the model as it is."""
    torch.manual_seed(1)
    tolerance = 1e-3 if plain.config.use_moe else 1e-5
    for tokens in warm_up:
        train(compiled, flat_batch(tokens, 5))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for tokens, samples in ((1290, 7), (1409, 2), (700, 1), (64, 3), (LARGE, 40), (333, 9), (2000, 4), (1001, 6)):
        batch = flat_batch(tokens, samples)
        torch.testing.assert_close(train(compiled, batch), train(plain, batch), rtol=tolerance, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("use_moe", [False, True])
def test_graphs_are_captured_once(use_moe):
    compiled = model_of(use_moe)
    for block in transformer_layers(compiled):
        block.compile(dynamic=True, backend="eager")  # torch writes no kernels
    check(compiled, model_of(use_moe), [LARGE])


@pytest.mark.slow
@pytest.mark.parametrize("use_moe", [False, True])
def test_kernels_are_compiled_once(use_moe):
    compiled = wrap_model(model_of(use_moe, layers=8), torch.device("cpu"), use_compile=True)
    check(compiled, model_of(use_moe, layers=8), [LARGE, MIDDLE, SMALL])
    assert counters["stats"]["unique_graphs"] < 10  # eight layers share them


def test_experts_in_float32_compile_around_what_does_not():
    compiled, plain = model_of(use_moe=True, layers=1), model_of(use_moe=True, layers=1)
    for block in transformer_layers(compiled):
        block.compile(dynamic=True, backend="eager")
    batch = flat_batch(200, 3)
    losses = []
    for model in (compiled, plain):
        out = model(**batch)
        out.loss.backward()
        losses.append(out.loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-3)
