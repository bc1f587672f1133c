"""What a GPU would do, seen on a CPU with fake CUDA tensors (tests/fake_cuda): an update of each stage."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.files import locked
from tests.conftest import ROOT, launch

FOLDER = ROOT / "tests/fake_cuda"
VARLEN = "torch_attn._varlen_attn_backward.default"  # attention in one kernel
CUTLASS = "aten._efficient_attention_backward.default"  # the same
STAGES = ("sft", "sft on an old GPU", "sft in float32", "sft with Muon", "sft recomputed", "lora")
STAGES += ("dpo", "distillation", "grpo", "ppo on an old GPU")
slow = pytest.mark.slow


def run_stages(compiler: str, library: Path, *flags: str) -> str:
    """The last line that tests/fake_cuda/stages.py prints."""
    torch_folder = Path(torch.__file__).parent
    command = [compiler, "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder}/include"]
    command += [FOLDER / "fake_cuda.cpp", "-o", library, f"-L{torch_folder}/lib", "-lc10"]
    subprocess.run([*command, f"-Wl,-rpath,{torch_folder}/lib"], check=True)
    done = launch(FOLDER / "stages.py", *flags, LD_PRELOAD=str(library), PYTHONPATH=str(ROOT))
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def found(tmp_path_factory, request) -> dict[str, dict]:
    """What tests/fake_cuda/stages.py prints."""
    version = torch.__version__.split("+")[0]
    if version != "2.13.0" or torch.version.cuda or not sys.platform.startswith("linux"):
        pytest.skip("the stand-in for CUDA is written for torch 2.13.0 without CUDA, on Linux")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the stand-in for CUDA with")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder
    printed = folder / "fake_cuda.json"  # of whichever worker comes first: it takes half a minute
    with locked(folder / "fake_cuda.lock", "another worker computes them"):
        if not printed.exists():
            flags = ["--slow"] if request.config.getoption("--slow") else []
            printed.write_text(run_stages(compiler, folder / "fake_cuda.so", *flags))
    results = json.loads(printed.read_text())
    for name, result in results.items():
        assert "error" not in result, f"{name}: {result['error']}"
    return results


ROLLOUTS = ("grpo", pytest.param("ppo", marks=slow), "ppo on an old GPU")


@pytest.mark.parametrize("case", ROLLOUTS)
def test_in_decoding_the_host_reads_the_tokens_alone(found, case):
    """Once for all prompts, which are read together, and once for each of the further three tokens; the copy
    of the weights is kept for the held-out prompts (stages.py asserts it)."""
    for part in ("rollout", "held_out"):
        of_decoder = [wait for wait in found[case][part] if "generation.py" in wait or "sampling.py" in wait]
        assert len(of_decoder) == 4 and all(wait.startswith("read: generation.py") for wait in of_decoder)
    assert case != "grpo" or len(found[case]["rollout"]) == 4


@pytest.mark.parametrize("case", [*STAGES, pytest.param("ppo", marks=slow)])
def test_the_host_reads_the_device_once_in_an_update(found, case):
    """Loss, metrics and gradient norm together, which decide whether the update is made."""
    (wait,) = found[case]["waits"]
    assert wait.startswith("read: loop.py")
    assert "aten._fused_adamw_.default" in found[case]["operators"]  # it was made


def test_with_experts_the_host_reads_their_counts_too(found):
    """Once for each layer and micro-batch, of which there are one and two."""
    *counts, last = found["sft with experts"]["waits"]
    assert len(counts) == 2 and all(wait.startswith("counts: model_minimind.py") for wait in counts)
    assert last.startswith("read: loop.py")


def test_attention_is_one_kernel(found):
    without = {case for case, result in found.items() if VARLEN not in result["operators"]}
    assert without == {"sft on an old GPU", "sft in float32", "ppo on an old GPU"}
    assert without == {case for case, result in found.items() if CUTLASS in result["operators"]}


@slow  # an update is compiled by test_compile.py, without fake CUDA tensors
@pytest.mark.parametrize("case", ["sft", "dpo"])
def test_a_compiled_model_is_one_graph(found, case):
    """For batches of all sizes, pairs that begin alike, and more targets than the head computes at once."""
    assert found[case]["graphs"] == [1, 1, 1]


def test_all_tensors_are_on_the_models_own_device(found):
    """In rollouts, too; also on the second GPU of a machine."""
    second = {"sft in float32", "grpo", "ppo"}
    for case, result in found.items():
        right = "cuda:1" if case in second else "cuda:0"
        assert set(result["devices"]) - {"cpu"} == {right}, case
    for case in found.keys() & {"grpo", "ppo", "ppo on an old GPU"}:
        answers = 16 * (4 if case == "grpo" else 1)
        assert answers < sum(found[case]["targets"]) < 4 * answers  # some answers end before the limit
