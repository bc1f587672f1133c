"""--use_compile: when the model is compiled, what is said of it, and what a machine may lack for it."""

import os
import signal
from contextlib import nullcontext
from functools import partialmethod

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException

from common.errors import Interrupted, UserError
from common.settings import StageArgs
from dataset.lm_dataset import StageDataset
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_dpo, train_pretrain
from trainer.devices import compiling
from trainer.devices.compiling import compile_model, compiler_problem, compiles
from trainer.devices.errors import StopRequest
from trainer.stage import compile_and_wrap

LONG = train_pretrain.Args(packing=True, max_seq_len=512, epochs=2, device="cpu")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Data(StageDataset):
    """Data of so many tokens."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens

    def __len__(self) -> int:
        return self.num_tokens // 100


RUN = Data(500_000_000)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """It has a compiler."""
    monkeypatch.setattr(compiling, "compiler_problem", lambda device: "")


PLAIN = {"packing": False}
# whether a CPU has a matrix unit -> settings of a long run that are compiled, that are not
ON_CPU: dict[bool, tuple[list[dict], list[dict]]] = {
    False: ([{}], [PLAIN, {"use_moe": True}, {"activation_checkpointing": True}, {"parallel": "fsdp"}]),
    True: (
        [PLAIN, {"use_moe": True}, PLAIN | {"dtype": "bfloat16"}],
        [PLAIN | {"dtype": "float32"}, {"parallel": "fsdp"}],
    ),
}


@pytest.mark.parametrize("has_unit", ON_CPU)
def test_which_long_runs_are_compiled_on_a_cpu(has_unit, monkeypatch, capsys):
    """And one line says so. Short runs, other stages and data of one's own never."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_unit)
    monkeypatch.setattr(compiling, "native_bfloat16", lambda device: has_unit)
    compiled, others = ON_CPU[has_unit]
    for settings in compiled:
        args = LONG.model_copy(update=settings)
        assert compiles(args, RUN, CPU)
        out = capsys.readouterr().out
        assert out.startswith("--use_compile auto: the model is compiled") and out.count("\n") == 1
        assert not compiles(args, Data(50_000), CPU)
    for settings in others:
        assert not compiles(LONG.model_copy(update=settings), RUN, CPU)
    assert not compiles(StageArgs(packing=True, max_seq_len=512, epochs=2, device="cpu"), RUN, CPU)
    assert not compiles(LONG, range(10**9), CPU)
    assert capsys.readouterr().out == ""


def test_every_run_is_compiled_on_a_gpu_where_it_can_be(monkeypatch, capsys):
    for args in (LONG, train_dpo.Args(), StageArgs(parallel="fsdp", use_moe=True)):
        assert compiles(args, range(5), CUDA)
    monkeypatch.setattr(compiling, "compiler_problem", lambda device: "Triton is not installed")
    capsys.readouterr()
    assert not compiles(LONG, RUN, CUDA)
    assert capsys.readouterr().err.startswith("warning: --use_compile auto: Triton is not installed")
    with pytest.raises(UserError, match="--use_compile 1: Triton is not installed"):
        compiles(LONG.model_copy(update={"use_compile": True}), RUN, CUDA)
    assert not compiles(LONG.model_copy(update={"use_compile": False}), RUN, CUDA)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_embedding_runs_as_it_is_on_a_cpu_alone(device, monkeypatch):
    """The model is on its device before that decides; `meta` stands for a GPU."""
    monkeypatch.setattr("trainer.stage.compiles", lambda *_: True)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    wrapped = compile_and_wrap(model, LONG, torch.device(device), nullcontext(), RUN)
    embedding = wrapped.get_input_embeddings()
    assert embedding.weight.device.type == device
    assert ("forward" in vars(embedding)) == (device == "cpu")


def test_recomputed_experts_are_not_said_to_be_compiled(capsys):
    """Their layers would not be compiled."""
    settings = {"use_moe": True, "activation_checkpointing": True}
    said = "layers of experts with --activation_checkpointing 1 are not compiled\n"
    assert not compiles(LONG.model_copy(update=settings), RUN, CUDA)
    assert capsys.readouterr().out == f"--use_compile auto: {said}"
    assert not compiles(LONG.model_copy(update=settings), RUN, CPU)
    assert capsys.readouterr().out == ""
    assert not compiles(LONG.model_copy(update=settings | {"use_compile": True}), RUN, CUDA)
    assert capsys.readouterr().err == f"warning: --use_compile 1: {said}"


def test_what_a_machine_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    assert compiler_problem("cuda").startswith("Triton is not installed")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler_problem("cpu") == "there is no compiler no-such-compiler; install one"
    monkeypatch.setenv("CXX", "python3")
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path))
    assert compiler_problem("cpu").startswith("Python's headers are missing")
    (tmp_path / "Python.h").touch()
    assert compiler_problem("cpu") == ""


class Layer(torch.nn.Linear):
    """A module of a task's own; torch compiles none of its own alone."""

    def forward(self, x):
        return super().forward(x)


def broken(graph, inputs):
    """A compiler without kernels, such as Triton on a machine that misses a library."""
    raise RuntimeError("no kernels")


BROKEN = {"forward": broken, "backward": aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=broken)}


@pytest.mark.parametrize("backend", BROKEN)
def test_what_cannot_be_compiled_runs_as_it_is(backend, monkeypatch, capsys):
    """With `auto`, as nobody asked for it, and one warning; `1` ends in the compiler's error. Neither fails
    in the backward pass, which the engine runs in a thread of its own."""
    call = partialmethod(torch.nn.Module.compile, backend=BROKEN[backend])
    monkeypatch.setattr(torch.nn.Module, "compile", call)
    torch.compiler.reset()
    layer, x = Layer(2, 2), torch.ones(3, 2)
    plain = layer(x)
    compile_model(layer, may_fail=True)
    for _ in range(2):
        out = layer(x)
        assert torch.equal(out, plain)
        out.sum().backward()
    assert capsys.readouterr().err.count("the model cannot be compiled and runs uncompiled (no kernels)") == 1
    compile_model(layer)
    with pytest.raises(TorchDynamoException, match="no kernels"):
        layer(x)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("may_fail", [False, True])
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_signal_while_compiling_is_no_error_of_the_compiler(
    number, may_fail, is_saved, monkeypatch, capsys
):
    """The compiler got it, too, and is gone: the run does not go on without it, with other rounding. Where no
    update would be lost it ends before that."""
    came = []

    def killed(graph, inputs):
        os.kill(os.getpid(), number)
        came.append("after the signal")
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=killed))
    torch.compiler.reset()
    layer = Layer(2, 2)
    compile_model(layer, may_fail=may_fail)
    with StopRequest() as request, pytest.raises(Interrupted) as ended:
        request.is_saved = lambda: is_saved
        layer(torch.ones(3, 2))
    assert ended.value.number == number and came == ([] if is_saved else ["after the signal"])
    assert f"by {signal.Signals(number).name} while the model was compiled" in str(ended.value)
    assert "cannot be compiled" not in capsys.readouterr().err


def test_a_signal_while_compiling_waits_for_the_update_where_updates_would_be_lost(monkeypatch, capsys):
    def signalled(graph, inputs):
        os.kill(os.getpid(), signal.SIGTERM)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=signalled))
    torch.compiler.reset()
    layer, x = Layer(2, 2), torch.ones(3, 2)
    plain = layer(x)
    compile_model(layer)
    with StopRequest() as request:
        request.is_saved = lambda: False
        assert torch.equal(layer(x), plain) and request.signal == signal.SIGTERM
    assert "SIGTERM: finishing this update, then saving" in capsys.readouterr().err
