"""A GPU that torch cannot use: one line that says why, and what to do."""

import pytest
import torch

from common.errors import UserError
from trainer.devices import device, unusable_gpu
from trainer.devices.unusable_gpu import check_architecture, why_unseen


def test_why_torch_sees_no_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA: install one with it" in why_unseen()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    old = "The NVIDIA driver on your system is too old (found version 11040)."

    def init() -> None:
        raise RuntimeError(f"{old}\nmore")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert why_unseen().startswith(f"{old}; update the driver to one for CUDA 13.0, or install a torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES='7' may hide it" in why_unseen()


def test_training_says_that_torch_cannot_use_the_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    (tmp_path / "version").write_text("NVRM version: 999.1\n")
    monkeypatch.setattr(unusable_gpu, "DRIVER", tmp_path / "version")
    with pytest.raises(UserError, match="sees 0 CUDA devices, but there is one: this torch is built without"):
        device.select_device("cuda")
    monkeypatch.setattr(device.os.path, "exists", lambda path: True)
    if device.select_device("auto").type == "cpu":  # on a Mac MPS
        warning = capsys.readouterr().err
        assert (
            warning.count("\n") == 1 and "has an NVIDIA GPU, but torch cannot use it: this torch" in warning
        )


BUILT = ["sm_75", "sm_80", "sm_86", "sm_90", "compute_90"]


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (12, 0)])
def test_a_gpu_with_kernels_is_taken(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILT)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    check_architecture(torch.device("cuda", 0))


@pytest.mark.parametrize(
    "built, capability, advice", [(BUILT, (6, 1), "an older torch"), (BUILT[:-1], (12, 0), "update torch")]
)
def test_a_gpu_without_kernels_is_refused(built, capability, advice, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA X100")
    with pytest.raises(UserError, match=f"no kernels for the NVIDIA X100.*{advice}.*--device cpu"):
        check_architecture(torch.device("cuda", 0))


def test_an_amd_gpu_is_judged_by_trial(monkeypatch):
    """Whether it has kernels, and whether it is good at bfloat16: gfx906 reports (9, 0), and is not."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "AMD X100")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    check_architecture(gpu)

    def fails(*_, **__):
        raise RuntimeError("HIP error: invalid device function")

    monkeypatch.setattr(torch, "ones", fails)
    with pytest.raises(UserError, match=r"no kernels for the AMD X100 \(HIP error: invalid device function"):
        check_architecture(gpu)
    for bfloat16, is_good in ((4e13, True), (1.1e13, False)):
        rates = {torch.bfloat16: bfloat16, torch.float32: 1e13}
        monkeypatch.setattr(device, "matrix_rate", lambda _, dtype, seconds, rates=rates: rates[dtype])
        device.amd_multiplies_bfloat16.cache_clear()
        assert device.native_bfloat16(gpu) is is_good
    device.amd_multiplies_bfloat16.cache_clear()
