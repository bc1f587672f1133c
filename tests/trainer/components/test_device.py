"""Which device a process takes, alone and among several, and what is refused."""

import pytest
import torch

from common.errors import UserError
from trainer.components.device import select_device


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs, as far as choosing one goes; returns what makes this process a rank of two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def be_rank(rank: int) -> None:
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "node1", "MASTER_PORT": 29500}
        for name, value in launched.items():
            monkeypatch.setenv(name, str(value))

    return be_rank


def test_alone_any_gpu_can_be_named(two_gpus):
    assert [str(select_device(name)) for name in ("auto", "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"]
    with pytest.raises(UserError, match=r"--device cuda:2 cannot be used \(torch sees 2 CUDA devices"):
        select_device("cuda:2")


@pytest.mark.parametrize("rank", [0, 1])
def test_several_processes_take_one_gpu_each_and_all_refuse_a_named_one(two_gpus, rank):
    two_gpus(rank)
    assert str(select_device("auto")) == str(select_device("cuda")) == f"cuda:{rank}"
    for name in ("cuda:0", "cuda:1"):
        with pytest.raises(UserError, match=f"--device {name} cannot be shared by several processes; with auto"):
            select_device(name)


def test_a_third_process_on_two_gpus_is_refused(two_gpus):
    two_gpus(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", "2"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "3")):
            patch.setenv(name, value)
        with pytest.raises(UserError, match="start fewer processes"):
            select_device("auto")


def test_hidden_gpus_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(UserError, match=r"torch sees 0 CUDA devices, CUDA_VISIBLE_DEVICES='-1'"):
        select_device("cuda")
    assert str(select_device("auto")) in ("cpu", "mps")


def test_an_incomplete_environment_is_refused_before_any_work(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE=2 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        select_device("cpu")
