"""`--parallel hsdp`: two machines of two ranks (here on one). Shards within a machine, copies across
them."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.stage_process import Faults, StageProcess, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, flags, records, saved_state

MESH = """
import trainer.train_pretrain as stage
wrap = stage.utils.compile_and_wrap
def noted(*args):
    model = wrap(*args)
    first = next(model.parameters())
    print("mesh", *first.device_mesh.shape, first.numel() // first.to_local().numel())
    return model
loss_fn = stage.Objective.loss
def counted(objective, model, batch, args):  # what waits for the micro-batches that are left
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    groups = [group for state in states for group in state._fsdp_param_groups]
    params = [p for g in groups for p in g.fsdp_params if hasattr(p, "_unsharded_param")]
    whole = [grad for p in params for grad in (p.unsharded_accumulated_grad, p._unsharded_param.grad)]
    parts = [g._partial_reduce_output for g in groups]
    print("held", *(sum(each.nbytes for each in kind if each is not None) for kind in (whole, parts)))
    return loss_fn(objective, model, batch, args)
stage.utils.compile_and_wrap, stage.Objective.loss = noted, counted
"""
SETTINGS = {"epochs": 1, "num_hidden_layers": 1, "save_interval": 2, "eval_interval": 1000}
SETTINGS |= {"accumulation_steps": 2, "batch_size": 1}


def four_ranks(
    corpus, folder: Path, faults: dict[int, Faults] | None = None, **settings
) -> list[StageProcess]:
    """Four ranks as two launchers of two each start them."""
    local = {rank: f"os.environ['LOCAL_RANK'] = '{rank % 2}'\n" for rank in range(4)}
    faults = {rank: (faults or {}).get(rank, Faults()) for rank in range(4)}
    for rank, script in local.items():
        faults[rank].script = script + faults[rank].script
    argv = flags(corpus, folder, "pretrain", **SETTINGS | settings)
    return start_ranks(4, "pretrain", argv, faults, LOCAL_WORLD_SIZE="2")


def parameters(folder: Path) -> int:
    """Numbers of the model; tied ones count once."""
    state = saved_state(folder)["model"]
    return sum(value.numel() for name, value in state.items() if name != "lm_head.weight")


def end(ranks: list[StageProcess]) -> None:
    assert [rank.wait() for rank in ranks] == [0] * 4, ranks[0].err


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Path:
    """A run that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    ranks = four_ranks(corpus, folder, {0: Faults(script=MESH)}, parallel="hsdp")
    end(ranks)
    assert "mesh 2 2 2\n" in ranks[0].out  # machines, ranks of each, shards of a parameter
    held = {line for line in ranks[0].out.splitlines() if line.startswith("held ")}
    assert held == {"held 0 0", f"held 0 {2 * parameters(folder)}"}  # float32, half of the gradients
    return folder


def test_the_losses_are_those_of_one_process(corpus, whole, tmp_path):
    whole_batch = SETTINGS | {"batch_size": 4}
    run("pretrain", flags(corpus, tmp_path, "pretrain", **whole_batch))
    one, other = records(whole), records(tmp_path)
    assert len(one) == len(other) >= 4
    for a, b in zip(one, other, strict=True):
        assert a[0] == b[0] and a[7] == b[7] and a[2] == pytest.approx(b[2], abs=1e-5)


def test_a_killed_run_resumes_bit_for_bit(corpus, whole, tmp_path):
    ranks = four_ranks(corpus, tmp_path, {3: Faults(signals={4: signal.SIGKILL})}, parallel="hsdp")
    assert [rank.wait() for rank in ranks] == [2, 2, 2, -9]
    assert "error: rank 0: another rank ended" in ranks[0].err
    end(four_ranks(corpus, tmp_path, parallel="hsdp", from_resume=1))
    assert_same_run(whole, tmp_path)


@pytest.mark.slow
def test_shards_of_one_machine_resume_as_shards_of_all(corpus, whole, tmp_path):
    """The file is that of any run."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    argv = {"epochs": 2, "from_resume": 1, "extend_epochs": 1}
    end(four_ranks(corpus, tmp_path, parallel="fsdp", **argv))
    assert len(records(tmp_path)) == 2 * len(records(whole))


def test_unequal_machines_are_refused(corpus, tmp_path):
    """Two ranks on one, the third on another."""
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, parallel="hsdp")
    ranks = start_ranks(3, "pretrain", argv, LOCAL_WORLD_SIZE="2")
    assert [rank.wait() for rank in ranks] == [2, 2, 2]
    assert (
        ranks[0]
        .error_lines[-1]
        .startswith("error: --parallel hsdp: each machine must have the same number of ranks")
    )
