"""The block at the 50th update: what it says of which figures, and that a run prints it once."""

import re
from dataclasses import replace

import pytest

from common.settings import StageArgs, settings_of
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags
from trainer.components.diagnosis import Figures, causes, explain

CPU = Figures(
    tokens_per_second=1200.0, mfu=0.55, peak=0.41e12, seconds_left=3660.0, batch_tokens=1500.0, batch_samples=8.0,
    padding=0.72, pad_rows=0.02, data=0.01, sync=0.0, exchange=0.0, save=0.001, evaluate=0.0, dtype="bfloat16",
    num_workers=0, use_compile=False, packing=False, max_seq_len=768, device="cpu", bfloat16=True, ranks=1,
    local_ranks=1, gpus=0, cuda_build=True, nvidia=False, cores=2, threads=2, load=2.1,
)  # fmt: skip
GPU = replace(CPU, device="cuda", gpus=1, nvidia=True, cores=16, threads=1, load=1.0, mfu=0.5, batch_tokens=16000.0)
OLD_GPU = replace(GPU, bfloat16=False, dtype="float16")

# figures of a run without fault, what is different, and what the one cause that is named must hold
CASES = [
    (CPU, {"data": 0.3}, "30% of the time waits for data: --num_workers 2"),
    (CPU, {"data": 0.3, "num_workers": 2}, "--num_workers 4"),
    (CPU, {"sync": 0.25, "ranks": 2}, "25% of the time waits for slower ranks"),
    (GPU, {"exchange": 0.4, "ranks": 8, "local_ranks": 8, "gpus": 8}, "40% of the time exchanges gradients.*--acc"),
    (CPU, {"save": 0.2}, "20% of the time saves.*--save_interval"),
    (CPU, {"evaluate": 0.5}, "50% of the time evaluates.*--eval_interval"),
    (CPU, {"dtype": "float32"}, "--dtype float32.*good at bfloat16: --dtype auto"),
    (GPU, {"dtype": "float16"}, "--dtype float16.*good at bfloat16: --dtype auto"),
    (CPU, {"bfloat16": False}, "--dtype bfloat16.*emulate: --dtype auto"),
    (OLD_GPU, {"dtype": "float32"}, "half precision: --dtype float16"),
    (GPU, {"gpus": 4}, "1 of 4 visible GPUs used: torchrun --nproc_per_node 4"),
    (CPU, {"gpus": 1, "nvidia": True}, "a GPU is visible but not used: --device auto"),
    (CPU, {"nvidia": True}, "torch cannot use the NVIDIA GPU"),
    (CPU, {"nvidia": True, "cuda_build": False}, "install a CUDA build"),
    (CPU, {"threads": 1}, "1 of 2 cores used: OMP_NUM_THREADS=2"),
    (CPU, {"local_ranks": 2, "ranks": 2}, "4 threads .2 in each process. share 2 cores: OMP_NUM_THREADS=1"),
    (CPU, {"load": 5.0}, "other programs use this machine: 5.0 processes want its 2 cores"),
    (CPU, {"mfu": 0.2, "batch_tokens": 150.0}, "only 150 tokens.*--batch_size, --packing 1"),
    (CPU, {"mfu": 0.2, "batch_tokens": 150.0, "packing": True}, r"only 150 tokens.*\(--batch_size\)"),
    (GPU, {"mfu": 0.2}, "--use_compile 1"),
    (CPU, {"mfu": None, "batch_tokens": 32.0, "save": 0.2}, "--save_interval"),  # a task that counts no arithmetic
]
FINE = [CPU, GPU, OLD_GPU, replace(CPU, load=0.0), replace(CPU, dtype="float32", bfloat16=False)]
FINE += [replace(CPU, load=6.5, num_workers=4, cores=4, threads=4), replace(CPU, threads=1, local_ranks=2, ranks=2)]
FINE += [replace(GPU, mfu=0.2, use_compile=True), replace(CPU, mfu=0.5, batch_tokens=100.0)]


@pytest.mark.parametrize(("figures", "change", "cause"), CASES)
def test_a_cause_is_named_with_what_helps(figures, change, cause):
    assert not causes(figures)
    found = causes(replace(figures, **change))
    assert len(found) == 1 and re.search(cause, found[0]), found
    known = {f"--{name}" for name in settings_of(StageArgs)}
    assert set(re.findall(r"--[a-z]\w*", found[0])) <= known | {"--nproc_per_node"}
    assert explain(replace(figures, **change))[-1] == f"  slow? {found[0]}"


@pytest.mark.parametrize("figures", FINE)
def test_a_run_without_fault_is_accused_of_nothing(figures):
    assert not causes(figures)


def test_causes_add_up_and_no_cause_is_said_to_be_none():
    assert len(causes(replace(CPU, data=0.3, dtype="float32", threads=1))) == 3
    assert "none of the usual causes" in explain(replace(CPU, mfu=0.1))[-1]
    assert len(explain(CPU)) == 3  # nothing to say


def test_the_figures_are_in_the_block():
    text = "\n".join(explain(CPU))
    for part in ("1,200 tokens/s", "mfu 55%", "0.41 TFLOP/s", "bfloat16", "1.0% waiting for data", "0.1% saving"):
        assert part in text
    assert "1,500 tokens in 8.0 samples" in text and "padded to 768 it would be 72% padding" in text
    assert "left: 1 h 01 min" in text and "2.0% of the rows computed are padding rows" in text and "ranks" not in text
    two = "\n".join(explain(replace(CPU, ranks=2, sync=0.05, exchange=0.07)))
    assert "5.0% waiting for other ranks" in two and "7.0% exchanging gradients" in two
    unknown = "\n".join(explain(replace(CPU, mfu=None, batch_samples=0.0, pad_rows=0.0)))
    assert "mfu" not in unknown and "samples" not in unknown and "padding rows" not in unknown


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_prints_it_once_at_its_50th_update_also_after_a_resume(corpus, tmp_path, ranks):
    """40 updates, a signal, 80 more: the second process counts its own."""
    settings = {"batch_size": 2 // ranks, "log_interval": 1000, "save_interval": 1000, "epochs": 4, "max_seq_len": 32}
    settings["num_hidden_layers"] = 1
    argv = flags(corpus, tmp_path, "pretrain", from_resume=1, eval_interval=0, **settings)
    first = run("pretrain", argv, Faults(signals={40: 15}), ranks=ranks, status=143)
    assert "speed of updates" not in first.out
    blocks = run("pretrain", argv, ranks=ranks).out.split("speed of updates 11 to 50: ")
    assert len(blocks) == 2
    assert ("waiting for other ranks" in blocks[1]) == (ranks == 2)
    tokens, mfu = re.match(r"([\d,]+) tokens/s, mfu (\d+)% of", blocks[1]).groups()
    assert int(tokens.replace(",", "")) > 0 and 0 <= int(mfu) < 100
