"""torch.compile on flat batches: a model is compiled once, for all sizes of batches."""

import os
from functools import partialmethod

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn.utils import clip_grad_norm_

from model import kernels
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.stage_process import context, finish, free_port, rank_variables
from trainer.devices.compiling import compile_model, warm_up, warm_up_inputs, warm_up_sizes
from trainer.devices.process_group import leave_process_group
from trainer.devices.wrapping import full_tensor, unwrap, wrap_model
from trainer.trainer_utils import init_distributed_mode

IN_PLACE = torch.nn.Module.compile
# tokens and samples; experts are captured once more for the batches of a single sample
WARM_UP = [(1300, 5), (700, 1)]


def flat_batch(tokens: int, samples: int, targets: int = 0) -> dict:
    """Samples of random lengths with random targets, as `collate_flat` lays them out."""
    cuts = torch.randperm(tokens - 1)[: samples - 1].sort().values + 1
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([tokens])])
    lengths = borders.diff()
    ids = torch.randint(0, 100, (tokens,))
    at = torch.randperm(tokens - 1)[: targets or torch.randint(2, tokens, ())]
    positions = torch.cat([torch.arange(n) for n in lengths])
    shape = {"cu_seqlens": borders.int(), "max_seqlen": int(lengths.max()), "position_ids": positions}
    return shape | {"input_ids": ids, "target_index": at, "targets": ids[at + 1]}


def train(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Loss of a forward and backward pass; with experts in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16, enabled=unwrap(model).config.use_moe):
        out = model(**batch)
    (out.loss + out.aux_loss).backward()
    return out.loss.detach()


def model_of(use_moe: bool, width: int = 64, layers: int | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = layers or 2 - use_moe  # experts take three times as long to be captured
    shape = {"hidden_size": width, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100}
    return MiniMindForCausalLM(MiniMindConfig(**shape, num_hidden_layers=layers, use_moe=use_moe)).train()


def check(compiled: torch.nn.Module, plain: torch.nn.Module) -> None:
    """After the warm-up nothing more is compiled, and the losses are those of the model as it is."""
    torch.manual_seed(1)
    tolerance = 1e-3 if plain.config.use_moe else 1e-5
    for tokens, samples in WARM_UP:
        train(compiled, flat_batch(tokens, samples))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for tokens, samples in ((1290, 7), (700, 1), (64, 3), (1300, 40), (2000, 4)):
        batch = flat_batch(tokens, samples)
        torch.testing.assert_close(train(compiled, batch), train(plain, batch), rtol=tolerance, atol=1e-3)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


# a dense model is also compiled by the two ranks below
@pytest.mark.parametrize("use_moe", [pytest.param(False, marks=pytest.mark.slow), True])
def test_graphs_are_captured_once(use_moe, monkeypatch):
    compiled = model_of(use_moe)
    names = list(compiled.state_dict())
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
    compile_model(compiled)  # torch writes no kernels
    assert list(compiled.state_dict()) == names
    check(compiled, model_of(use_moe))


def sizes_at_compiling(batch: dict, monkeypatch) -> list[list[int]]:
    """The sizes with which each graph is handed to the compiler when a model first gets this batch."""
    found = []

    def backend(graph, inputs):
        assert not any("embedding" in str(node.target) for node in graph.graph.nodes)
        sizes = [x.shape if isinstance(x, torch.Tensor) else [x] for x in inputs]
        found.append([n.node.hint if isinstance(n, torch.SymInt) else n for size in sizes for n in size])
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(IN_PLACE, backend=backend))
    compiled = model_of(use_moe=False, layers=1)
    compile_model(compiled)
    train(compiled, batch)
    return found


@pytest.mark.slow
def test_the_first_batch_does_not_decide_what_is_compiled(monkeypatch):
    few = sizes_at_compiling(flat_batch(40, 2), monkeypatch)
    assert few and few == sizes_at_compiling(flat_batch(2900, 9), monkeypatch)


def test_what_a_model_is_compiled_with_does_not_depend_on_small_differences_of_the_first_batch():
    """The compiler chooses by sizes how kernels sum; on a CPU it writes others for more than 4,096."""
    assert warm_up_sizes(flat_batch(40, 2), 512) == warm_up_sizes(flat_batch(2900, 9), 512)
    sizes = [
        warm_up_sizes(flat_batch(*many), 512) for many in ((4200, 9, 4000), (9000, 2, 4000), (9000, 2, 5000))
    ]
    assert sizes == [(8192, 2048, 8), (8192, 2048, 8), (8192, 6144, 8)]


@pytest.mark.slow
def test_sums_depend_neither_on_the_first_batch_nor_on_the_threads(monkeypatch):
    """As in a run that is resumed without the compiler's cache, on two threads."""
    monkeypatch.setattr(inductor, "force_disable_caches", True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = []
        for tokens, samples in ((40, 2), (2900, 9)):
            torch.compiler.reset()
            model = model_of(use_moe=False, layers=1)
            compile_model(model)
            torch.manual_seed(1)
            train(model, flat_batch(tokens, samples))
            torch.manual_seed(2)
            batch = flat_batch(3000, 7)
            for _ in range(8):
                model.zero_grad()
                train(model, batch)
                gradients.append([parameter.grad for parameter in model.parameters()])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for other in gradients[1:] for x, y in zip(other, gradients[0], strict=True))


def test_compiling_leaves_no_trace():
    """Neither in the random numbers nor in the experts' counters."""
    model = model_of(use_moe=True)
    kwargs, seen = flat_batch(64, 3), []
    before, random = [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()

    def count(**inputs):
        seen.append(len(inputs["input_ids"]))
        torch.rand(3)
        return model._call_impl(**inputs)

    for _ in range(2):
        inputs = warm_up_inputs(kwargs, *warm_up_sizes(kwargs, 512))
        warm_up(model, count, inputs)
    assert seen == [2048, 2048]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, model.buffers(), before))
    meta = {name: kwargs[name].to("meta") for name in ("input_ids", "cu_seqlens")}
    assert warm_up_sizes(meta, 512) == (512, 256, 8)  # not on a CPU


# --- several ranks

IDS = dict.fromkeys(
    ("input_ids", "position_ids", "target_index", "targets"), torch.zeros(0, dtype=torch.int64)
)
EMPTY = IDS | {"cu_seqlens": torch.zeros(1, dtype=torch.int32), "max_seqlen": 0}
CASES = [("ddp", False), ("fsdp", True)]
WIDE = 256  # then a layer is larger than DDP's first bucket, at whose border it would be cut


def of_itself(q, k, v, *_) -> torch.Tensor:
    """In place of the attention on a CPU, which reads the lengths, so that a graph breaks there."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return (v + 0.1 * q * k).to(v.dtype)


def _rank(rank: int, port: int, folder: str, cases: list[tuple[str, bool]]) -> None:
    """Notes the number of graphs after each batch, and the losses and gradients beside those of a plain
    model."""
    os.environ |= rank_variables(rank, 2, port)
    torch.set_num_threads(1)
    init_distributed_mode()
    kernels.fast_attention_by_sample = of_itself
    compile_in_place, found = torch.nn.Module.compile, {}
    for parallel, use_moe in cases:
        torch.compiler.reset()
        counter = CompileCounter()
        torch.nn.Module.compile = partialmethod(compile_in_place, backend=counter)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=use_moe)
        pair = []
        for use_compile in (True, False):
            model = model_of(use_moe, width=WIDE, layers=1)
            if use_compile:
                compile_model(model)
            pair.append(wrap_model(model, torch.device("cpu"), parallel, autocast=autocast))
        torch.manual_seed(1 + rank)
        graphs, results = [], []
        for batch in (
            EMPTY,
            flat_batch(WIDE, 3),
            flat_batch(70, 1),
            EMPTY,
            flat_batch(400, 9),
            flat_batch(129, 2),
        ):
            for model in pair:
                model.zero_grad()
                loss = train(model, batch)
                results += [(float(loss), float(full_tensor(clip_grad_norm_(model.parameters(), 1e9))))]
            graphs.append(counter.frame_count)
        found[parallel, use_moe] = graphs, results
    torch.save(found, f"{folder}/{rank}")
    leave_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, request) -> list[dict]:
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    cases = CASES if request.config.getoption("--slow") else CASES[:1]
    finish([context.Process(target=_rank, args=(rank, port, str(folder), cases)) for rank in (0, 1)], 300)
    return [torch.load(folder / str(rank)) for rank in (0, 1)]


@pytest.mark.parametrize(("parallel", "use_moe"), [CASES[0], pytest.param(*CASES[1], marks=pytest.mark.slow)])
def test_ranks_compile_once(ranks, parallel, use_moe):
    """For all sizes of batches: a dense model as one graph, but for its padding on a CPU; none for an empty
    batch, with which epochs begin under DDP."""
    for found in ranks:
        graphs, results = found[parallel, use_moe]
        if use_moe:  # the second batch is a single sample
            assert graphs[0] == 0 and graphs[2:] == [graphs[2]] * 4
        else:
            assert graphs == [0, *[graphs[1]] * 5] and graphs[1] < 6
        for compiled, plain in zip(results[::2], results[1::2], strict=True):
            assert compiled == pytest.approx(plain, rel=1e-3 if use_moe else 1e-5, abs=1e-6)
        assert [norm > 0 for _, norm in results[::2]] == [False, True, True, False, True, True]
