"""Which device a process takes, alone and among several, what is refused, and what of CUDA is touched."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from common.errors import UserError
from llm.training import train as engine_command
from trainer.devices import device as device_module
from trainer.devices import process_group as distributed
from trainer.devices import unusable_gpu
from trainer.devices.device import autocast_dtype, mixed_precision, select_device, use_deterministic_kernels


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs, as far as choosing one goes; returns what makes this process a rank of two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def be_rank(rank: int) -> None:
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "node1"}
        launched |= {"MASTER_PORT": 29500, "LOCAL_WORLD_SIZE": 2}
        for name, value in launched.items():
            monkeypatch.setenv(name, str(value))

    return be_rank


def test_alone_any_gpu_can_be_named(two_gpus):
    assert [str(select_device(name)) for name in ("auto", "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"]
    with pytest.raises(UserError, match=r"--device cuda:2 cannot be used \(torch sees 2 CUDA devices"):
        select_device("cuda:2")


def test_several_processes_take_one_gpu_each_and_refuse_a_named_one(two_gpus):
    two_gpus(1)
    assert str(select_device("auto")) == str(select_device("cuda")) == "cuda:1"
    with pytest.raises(UserError, match="--device cuda:1 cannot be shared by several processes"):
        select_device("cuda:1")


def test_a_rank_that_sees_one_gpu_takes_it(two_gpus, monkeypatch):
    """As with `srun --gpus-per-task=1`; torchrun shows all GPUs to every rank."""
    two_gpus(1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert str(select_device("auto")) == str(select_device("cuda")) == "cuda:0"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match=r"torch sees 1 CUDA devices.*start fewer processes"):
        select_device("auto")


def test_ranks_on_one_gpu_are_refused(monkeypatch):
    """Whatever the launcher shows: GPUs are told apart by their UUIDs."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(distributed, "all_gather", lambda own: ["b", own, own])
    with pytest.raises(UserError, match="ranks 1 and 2 have the same GPU, a; start one process per GPU"):
        distributed.check_gpus_differ()


@pytest.fixture
def kernels(monkeypatch):
    """Puts torch's choice of kernels back."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_kernels(kernels, monkeypatch):
    use_deterministic_kernels(False)
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    use_deterministic_kernels(True)
    assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.is_deterministic_algorithms_warn_only_enabled()  # flash attention would take it for a no
    assert not torch.utils.deterministic.fill_uninitialized_memory
    for given, kept in ((":16:8", ":16:8"), (":0:0", ":4096:8")):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
        use_deterministic_kernels(True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == kept


def test_the_engine_checks_its_settings_without_cuda(two_gpus, monkeypatch):
    """The process that starts the others must not hold memory on the first GPU."""

    def touched(*_, **__):
        raise AssertionError("CUDA is touched")

    for owner, name in ((torch.cuda, "_lazy_init"), (torch.amp, "GradScaler"), (torch, "autocast")):
        monkeypatch.setattr(owner, name, touched)
    monkeypatch.setattr(sys, "argv", ["train", "--task", "regression", "--world_size", "2"])
    started = []
    monkeypatch.setattr(engine_command, "spawn", lambda *args: started.append(args[0]))
    engine_command.main()
    assert started == [2]


@pytest.mark.parametrize("emulated", [False, True])
def test_bfloat16_is_emulated_only_when_insisted_on(emulated, monkeypatch, capsys):
    monkeypatch.setattr(device_module, "native_bfloat16", lambda device: not emulated)
    cpu = torch.device("cpu")
    expected = {"auto": not emulated, "bfloat16": not emulated, "bfloat16_emulated": True}
    for dtype, half in expected.items():
        autocast, _ = mixed_precision(dtype, cpu)
        assert (autocast_dtype(autocast, cpu) == torch.bfloat16) == half
        assert ("training in float32" in capsys.readouterr().err) == (emulated and dtype == "bfloat16")


@pytest.mark.parametrize(
    "capability, dtype", [((8, 0), "bfloat16"), ((7, 5), "float16"), ((6, 1), "float32")]
)
def test_the_automatic_dtype_of_a_gpu_is_what_its_tensor_cores_know(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert device_module.automatic_dtype(torch.device("cuda", 0)) == dtype


@pytest.mark.parametrize(
    ("release", "mig", "user", "set_to"),
    [
        ("6.8.0-generic", "Disabled", {}, "expandable_segments:True"),
        ("6.8.0-generic", "", {}, "expandable_segments:True"),  # without nvidia-smi
        ("6.8.0-generic", "Disabled\nEnabled", {}, None),
        ("5.15.167.4-microsoft-standard-WSL2", "[N/A]", {}, None),
        ("6.8.0-generic", "Disabled", {"PYTORCH_ALLOC_CONF": "x:1"}, "x:1"),
        ("6.8.0-generic", "Disabled", {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, None),
    ],
)
def test_where_segments_grow(release, mig, user, set_to, monkeypatch):
    """Not where the first allocation can fail: under Windows, on a part of a GPU."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device_module.platform, "release", lambda: release)
    monkeypatch.setattr(unusable_gpu, "nvidia_smi", lambda fields: mig)
    device_module.use_growing_segments()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == set_to


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_a_seed_gives_the_numbers_of_torch_and_reaches_accelerators_if_there_are_any(
    monkeypatch, has_accelerator
):
    seeds: list[int] = []
    torch.manual_seed(5)
    wanted = torch.rand(3)
    monkeypatch.setattr(device_module, "has_accelerator", lambda: has_accelerator)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    device_module.seed_torch(5)
    assert torch.equal(torch.rand(3), wanted) and seeds == [5] * has_accelerator
