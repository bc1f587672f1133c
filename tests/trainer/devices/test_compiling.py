"""--use_compile auto: when the layers are compiled, and what is said of it."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._dynamo import config as dynamo

from common.settings import StageArgs
from dataset.lm_dataset import StageDataset
from model import fused
from trainer import train_pretrain
from trainer.devices import wrapping
from trainer.devices.wrapping import compiles, has_compiler, operations, use_kernels

LONG = train_pretrain.Args(packing=True, max_seq_len=512, epochs=2, device="cpu")


class Data(StageDataset):
    """Data of so many tokens."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RUN = Data(500_000_000)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A CPU with a compiler and without a matrix unit."""
    monkeypatch.setattr(wrapping, "has_compiler", lambda device: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with dynamo.patch(suppress_errors=False):
        yield


def add_matrix_unit(monkeypatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(wrapping, "native_bfloat16", lambda device: True)


def test_long_packed_runs_are_compiled_and_one_line_says_so(capsys):
    assert compiles(LONG, RUN, CPU) is True
    out = capsys.readouterr().out
    assert out.startswith("--use_compile auto: the layers are compiled") and out.count("\n") == 1


@pytest.mark.parametrize(
    "other", [{"packing": False}, {"use_moe": True}, {"activation_checkpointing": True}, {"parallel": "fsdp"}]
)
def test_other_runs_are_not(other, capsys):
    assert compiles(replace(LONG, **other), RUN, CPU) is False
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "other", [{"packing": False}, {"use_moe": True}, {"dtype": "bfloat16", "packing": False}]
)
def test_with_a_matrix_unit_all_long_runs_are(other, monkeypatch):
    add_matrix_unit(monkeypatch)
    assert compiles(replace(LONG, **other), RUN, CPU)
    assert not compiles(replace(LONG, packing=False, dtype="float32"), RUN, CPU)
    assert not compiles(replace(LONG, parallel="fsdp"), RUN, CPU)


def test_what_was_not_measured_is_not(monkeypatch):
    """Other stages, data of one's own, short runs, a machine without a compiler."""
    assert not compiles(LONG, Data(50_000), CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapping, "has_compiler", lambda device: False)
        assert not compiles(LONG, RUN, CPU)
    add_matrix_unit(monkeypatch)
    assert not compiles(StageArgs(packing=True, max_seq_len=512, epochs=2, device="cpu"), RUN, CPU)
    assert not compiles(LONG, range(10**9), CPU)


def test_what_compiling_needs_is_looked_for(monkeypatch, tmp_path):
    """On a CPU a C++ compiler; for CUDA Triton, and the C compiler that it takes: CC, else gcc, else
    clang."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not has_compiler("cpu")
    for name in ("g++", "clang", "Python.h"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(wrapping.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(wrapping, "find_spec", lambda name: name)
    assert has_compiler("cpu") and has_compiler("cuda")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert has_compiler("cpu") and not has_compiler("cuda")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(wrapping, "find_spec", lambda name: None)
    assert has_compiler("cpu") and not has_compiler("cuda")
    (tmp_path / "Python.h").unlink()
    assert not has_compiler("cpu")


@pytest.mark.parametrize(
    "other", [{}, {"packing": False}, {"use_moe": True}, {"parallel": "fsdp"}, {"dtype": "float16"}]
)
def test_on_a_gpu_all_long_runs_in_half_precision_are(other, monkeypatch):
    for native in (False, True):
        monkeypatch.setattr(wrapping, "native_bfloat16", lambda device, native=native: native)
        assert compiles(replace(LONG, **other), RUN, GPU) is native
    for short in (replace(LONG, dtype="float32"), replace(LONG, activation_checkpointing=True)):
        assert not compiles(replace(short, packing=False), RUN, GPU)
    per_token = operations(LONG, Data(1))
    assert compiles(LONG, Data(int(wrapping.MIN_FLOPS_PER_GPU / per_token) + 1), GPU)
    assert not compiles(LONG, Data(int(wrapping.MIN_FLOPS_PER_GPU / per_token) - 1), GPU)


def test_what_cannot_be_compiled_runs_as_it_is():
    """With `auto`: nobody asked for wrapping. `1` ends in the compiler's error."""

    def broken(graph, inputs):
        raise RuntimeError("no kernels")

    layer, x = torch.nn.Linear(2, 2), torch.ones(3, 2)
    for auto in (False, True):
        torch.compiler.reset()
        args = LONG if auto else replace(LONG, use_compile=True)
        assert compiles(args, RUN, CPU)
        compiled = torch.compile(layer, backend=broken)
        if auto:
            assert torch.equal(compiled(x), layer(x))
        else:
            with pytest.raises(Exception, match="no kernels"):
                compiled(x)


def test_zero_and_one_stay(capsys):
    assert compiles(replace(LONG, use_compile=False), RUN, CPU) is False
    assert compiles(replace(LONG, use_compile=True, packing=False), Data(500), CPU) is True
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("settings", "tokens", "on"),
    [
        ({}, 500_000_000, True),
        ({}, 50_000, False),  # too short
        ({"use_compile": True}, 50_000, True),
        ({"use_compile": False}, 500_000_000, False),
        ({"dtype": "float32"}, 500_000_000, False),
        ({}, None, True),  # rollouts: their number of tokens is not known
    ],
)
def test_a_gpu_takes_the_kernels_where_they_pay(settings, tokens, on, monkeypatch, capsys):
    monkeypatch.setattr(fused, "KERNELS", not on)
    args = replace(LONG, **{"dtype": "bfloat16"} | settings)
    monkeypatch.setattr(wrapping, "autocast_dtype", lambda *_: getattr(torch, args.dtype))
    train_set = range(9) if tokens is None else Data(tokens)
    use_kernels(args, train_set, GPU, nullcontext())
    assert fused.KERNELS is on
    assert capsys.readouterr().out.count("\n") == (on and args.use_compile is None)


def test_without_a_compiler_no_gpu_takes_the_kernels(monkeypatch):
    monkeypatch.setattr(wrapping, "has_compiler", lambda device: False)
    monkeypatch.setattr(wrapping, "autocast_dtype", lambda *_: torch.bfloat16)
    use_kernels(replace(LONG, use_compile=True), RUN, GPU, nullcontext())
    assert not fused.KERNELS
