"""What a GPU would do, seen on a CPU with fake CUDA tensors (tests/fake_cuda): the host reads it
once in an update, and what a checkpoint holds returns to it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, launch

FOLDER = ROOT / "tests/fake_cuda"
KERNEL = ("dense", "Muon", "Muon float16", "recomputed", "shared")  # have attention in one kernel
BY_SAMPLE = ("old GPU", "float32", "shared, old GPU")
EMPTY = ("empty", "empty float32")
IN_ONE_KERNEL = "torch_attn._varlen_attn_backward.default"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    """The stand-in for CUDA."""
    if (
        torch.__version__.split("+")[0] != "2.13.0"
        or torch.version.cuda
        or not sys.platform.startswith("linux")
    ):
        pytest.skip("the stand-in for CUDA is written for torch 2.13.0 without CUDA, on Linux")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the stand-in for CUDA with")
    library = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    folder = Path(torch.__file__).parent
    options = ["-shared", "-fPIC", "-std=c++20", f"-I{folder}/include", FOLDER / "fake_cuda.cpp", "-o"]
    options += [library]
    subprocess.run([compiler, *options, f"-L{folder}/lib", "-lc10", f"-Wl,-rpath,{folder}/lib"], check=True)
    return str(library)


@pytest.fixture(scope="module")
def found(library) -> dict[str, dict[str, list[str]]]:
    """What tests/fake_cuda/updates.py prints."""
    return json.loads(launch(FOLDER / "updates.py", LD_PRELOAD=library, PYTHONPATH=str(ROOT)).stdout)


READ = "read: loop.py"  # the figures of an update, which also decide whether it is made


@pytest.mark.parametrize("mode", [*KERNEL, *BY_SAMPLE, *EMPTY])
def test_the_host_reads_the_device_once_in_an_update(found, mode):
    """And not for its record."""
    waits = found[mode]["waits"]
    assert len(waits) == 1 and waits[0].startswith(READ), waits
    assert "aten._fused_adamw_.default" in found[mode]["operators"]  # an update was made


def test_with_experts_the_host_waits_for_their_counts_too(found):
    """Once for each layer and micro-batch, of which there are one and two."""
    *counts, last = found["MoE"]["waits"]
    assert len(counts) == 2 and all(wait.startswith("counts: model_minimind.py") for wait in counts), counts
    assert last.startswith(READ)
    assert "aten._fused_adamw_.default" in found["MoE"]["operators"]


@pytest.mark.parametrize("batches", [2, 7])
def test_an_evaluation_reads_its_sums_once(found, batches):
    waits = found[f"evaluation of {batches}"]["waits"]
    assert len(waits) == 1 and waits[0].startswith("item: loop.py"), waits


def test_each_gpu_and_dtype_has_its_kernels(found):
    operators = {mode: set(result["operators"]) for mode, result in found.items()}
    assert all(IN_ONE_KERNEL in operators[mode] for mode in KERNEL)
    assert not any(IN_ONE_KERNEL in operators[mode] for mode in BY_SAMPLE)
    # sorts; the gradients of keys that several samples share are summed in the same order each time
    slow = [mode for mode in (*KERNEL, *BY_SAMPLE) if "aten.index_put.default" in operators[mode]]
    assert slow == ["shared", "shared, old GPU"]


def test_rollouts_are_written_on_the_models_own_device(library):
    """Of PPO's shape; also on the second GPU of a machine, and on a Mac's, which draws on the host."""
    found = json.loads(launch(FOLDER / "rollouts.py", LD_PRELOAD=library, PYTHONPATH=str(ROOT)).stdout)
    devices = {
        "cuda:0": ["cuda:0"],
        "cuda:1": ["cuda:1"],
        "cuda:1 greedy": ["cuda:1"],
        "mps": ["cpu", "mps:0"],
    }
    assert {name: mode["devices"] for name, mode in found.items()} == devices
    for mode in found.values():
        assert len(mode["lengths"]) == 16 and min(mode["lengths"]) < max(mode["lengths"]) == 6


def test_a_run_resumed_within_a_rollout_has_its_tensors_on_the_gpu(library):
    """A checkpoint is read on the host."""
    out = launch(FOLDER / "resumed.py", LD_PRELOAD=library, PYTHONPATH=str(ROOT)).stdout
    runs = json.loads(out.splitlines()[-1])
    assert len(runs) == 2
    for run in runs.values():
        assert run == {"batches": ["cuda"], "optimizer": ["cuda"]}
