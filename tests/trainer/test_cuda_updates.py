"""What a GPU would do, seen on a CPU with fake CUDA tensors (tests/fake_cuda): the host does not wait for it
within an update, and what a checkpoint holds returns to it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, launch

FOLDER = ROOT / "tests/fake_cuda"
DENSE, OLD = ("dense", "Muon", "Muon float16"), ("dense float16, old GPU", "dense float32")
GROUPED, BATCHED = ("MoE", "recomputed"), ("MoE, Ampere", "MoE float16", "MoE float32")
SHARED = ("shared", "shared, old GPU")
EMPTY = ("MoE empty", "MoE empty float32")
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


@pytest.mark.parametrize("mode", [*DENSE, *OLD, *GROUPED, *BATCHED, *SHARED, *EMPTY])
def test_the_host_waits_for_nothing(found, mode):
    assert found[mode]["waits"] == []
    assert "aten._fused_adamw_.default" in found[mode]["operators"]  # an update was made


@pytest.mark.parametrize("batches", [2, 7])
def test_an_evaluation_reads_its_sums_once(found, batches):
    waits = found[f"evaluation of {batches}"]["waits"]
    assert len(waits) == 1 and waits[0].startswith("item: loop.py"), waits


def test_each_gpu_and_dtype_has_its_kernels(found):
    operators = {mode: set(result["operators"]) for mode, result in found.items() if "evaluation" not in mode}
    assert set(operators) == {*DENSE, *OLD, *GROUPED, *BATCHED, *SHARED, *EMPTY}
    assert all(IN_ONE_KERNEL in operators[mode] for mode in (*DENSE, *GROUPED, "MoE, Ampere", "MoE float16"))
    assert not any(IN_ONE_KERNEL in operators[mode] for mode in (*OLD, "MoE float32"))
    # with fewer key heads than query heads torch computes it without a kernel
    for mode in (*OLD, "MoE float32"):
        assert (
            "attention of 4 heads to 4" in operators[mode]
            and "attention of 4 heads to 2" not in operators[mode]
        )
    # of the second micro-batch, to the gradients of the first
    assert all("aten._foreach_add_.List" in names for names in operators.values())
    assert all("aten._grouped_mm.default" in operators[mode] for mode in GROUPED)
    for mode in BATCHED:
        assert "aten._grouped_mm.default" not in operators[mode] and "aten.bmm.default" in operators[mode]
    # they sort or wait
    slow = {"aten.index_put.default", "aten._index_put_impl_.default", "aten.nonzero.default"}
    assert [mode for mode, each in operators.items() if slow & each] == list(SHARED)
    # of keys: sorts, always alike
    assert all(slow & operators[mode] == {"aten.index_put.default"} for mode in SHARED)


def test_an_update_is_few_kernels_and_moves_few_bytes(library):
    """Of the default model, in bfloat16, and of one with experts; the launches are those of a micro-batch that
    follows others."""
    found = json.loads(launch(FOLDER / "traffic.py", LD_PRELOAD=library, PYTHONPATH=str(ROOT)).stdout)
    assert found["kernels"]["GB of an update"] <= 140 < 240 < found["eager"]["GB of an update"]
    most = {"eager": 70, "kernels": 50, "one expert of four": 79, "two experts of four": 95}
    assert found.keys() == most.keys()
    for name, figures in found.items():
        assert figures["launches for each layer"] <= most[name], name


def test_a_rollout_waits_once_for_eight_tokens(library):
    """And once for the first tokens, when the prompts are read: 17 tokens of 18 completions, three times. Each
    time the log-probabilities are read behind the tokens, when the device is done."""
    rollouts = json.loads(launch(FOLDER / "rollouts.py", LD_PRELOAD=library, PYTHONPATH=str(ROOT)).stdout)
    assert "aten.cumsum.default" in rollouts["sampled"]["operators"]  # has no deterministic kernel
    assert "aten.cumsum.default" not in rollouts.pop("deterministic")["operators"]
    # the experts' matrices are not stacked anew for each token
    for name in ("aten.stack.default", "aten.cat.default", "aten._foreach_copy_.default"):
        assert not rollouts["MoE"]["operators"].get(name)
    assert rollouts["MoE"]["operators"]["aten._grouped_mm.default"] == 8 * 3
    for found in rollouts.values():
        assert len(found["waits"]) == 2 * 3 and {wait.split(":")[0] for wait in found["waits"]} == {"read"}
        assert found["operators"]["aten.embedding.default"] == 8  # a forward for each token


def test_a_decoded_token_is_few_launches(library):
    """Of models of width 512 with 8 layers; recorded a token is one, and what eight of them need is four."""
    found = json.loads(launch(FOLDER / "launches.py", LD_PRELOAD=library, PYTHONPATH=str(ROOT)).stdout)
    most = {"bfloat16": 150, "float32, as chats draw": 165, "MoE, bfloat16": 300}
    assert found.keys() == most.keys()
    for name, (one_by_one, recorded) in found.items():
        assert 100 < one_by_one <= most[name]
        assert 1 <= recorded <= 1.5


def test_a_run_resumed_within_a_rollout_has_its_tensors_on_the_gpu(library):
    """A checkpoint is read on the host."""
    out = launch(FOLDER / "resumed.py", LD_PRELOAD=library, PYTHONPATH=str(ROOT)).stdout
    runs = json.loads(out.splitlines()[-1])
    assert len(runs) == 2
    for run in runs.values():
        assert run == {"batches": ["cuda"], "optimizer": ["cuda"]}
