"""Files that survive a kill: written whole or not at all, read without running what is in them."""

import contextlib
import io
import os
import pickle
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.files import atomic_write
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from tests.trainer.stage_flags import assert_same_tensors
from trainer.checkpoint.file import write_checkpoint
from trainer.checkpoint.state import copy_to_host, first_difference, load_into
from trainer.optim.build import build_optimizer
from trainer.trainer_utils import lm_checkpoint
from trainer.weights.files import read_model
from trainer.weights.tensor_file import Writer, read_file

CONFIG = MiniMindConfig(hidden_size=32, num_hidden_layers=1)


def trained(seed: int = 0) -> tuple[MiniMindForCausalLM, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = MiniMindForCausalLM(CONFIG)
    optimizer = build_optimizer(model, 1e-2, 0.1)
    model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
    optimizer.step()
    return model, optimizer


def save(name: str, folder: Path, step: int = 1, **more) -> None:
    lm_checkpoint(CONFIG, name, *trained(), 0, step, save_dir=folder, **more)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path):
    trap = tmp_path / "trap"
    for path in (tmp_path / "w_32_resume.pth", tmp_path / "w_32.pth"):
        torch.save({"model": Malicious(str(trap))}, path)
    with pytest.raises(UserError):
        lm_checkpoint(CONFIG, "w", save_dir=tmp_path)
    with pytest.raises(UserError, match="not a readable weights file"):
        read_model(tmp_path / "w_32.pth")
    (tmp_path / "w_32.pth").write_bytes(pickle.dumps(Malicious(str(trap))))
    with pytest.raises(UserError, match="not a readable weights file"):
        read_model(tmp_path / "w_32.pth")
    assert not trap.exists()


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory):
    """A folder with a newest checkpoint (step 2) and the one before it (step 1)."""
    folder = tmp_path_factory.mktemp("saves")
    model, optimizer = trained()
    for step in (1, 2):
        extra = {"run": {"seed": 1, "name": "a"}, "record": {"update": step, "loss": 0.5}}
        lm_checkpoint(CONFIG, "w", model, optimizer, 0, step, save_dir=folder, **extra)
    return folder


CHANGES = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "zero"]), st.floats(0, 1), st.integers(0, 255))
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=CHANGES, tail=st.booleans())
# "this record is a folder": torch read other bytes
@example(changes=[("flip", 0.7496830476895798, 16)], tail=True)
def test_a_damaged_checkpoint_is_noticed_wherever_it_is_damaged(two_saves, tmp_path, changes, tail):
    """Any bytes changed anywhere: the state is the saved one, or the one before it with a warning. Nothing
    else."""
    newest = two_saves / "w_32_resume.pth"
    data = bytearray(newest.read_bytes())
    for kind, where, value in changes:
        # the directory of the zip file is at its end
        at = int(where * (min(len(data), 4000) if tail else len(data)))
        at = len(data) - 1 - at if tail else at
        at = max(0, min(at, len(data) - 1))
        if kind == "flip" and data:
            data[at] ^= value
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = bytes([value] * 3)
        elif kind == "zero":
            data[at : at + 512] = bytes(len(data[at : at + 512]))
    shutil.copy(two_saves / "w_32_resume_previous.pth", tmp_path)
    (tmp_path / "w_32_resume.pth").write_bytes(data)
    whole = {path.name: torch.load(path, weights_only=True) for path in two_saves.glob("*.pth")}
    with contextlib.redirect_stderr(io.StringIO()) as err:
        state = lm_checkpoint(CONFIG, "w", save_dir=tmp_path)
    del state["loaded_from"]
    if "warning: damaged checkpoint" in err.getvalue():
        assert_same_tensors(state, whole["w_32_resume_previous.pth"])
    else:
        assert_same_tensors(state, whole["w_32_resume.pth"])


def test_a_damaged_state_never_takes_the_place_of_the_one_before(tmp_path, monkeypatch, capsys):
    """Killed between the two renames of the save after it, the run still has a state."""
    model, optimizer = trained()
    for step in (1, 2):
        save("w", tmp_path, step)
    newest = tmp_path / "w_32_resume.pth"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    assert lm_checkpoint(CONFIG, "w", save_dir=tmp_path)["step"] == 1
    replace, renames = os.replace, []

    def killed(source, target):
        renames.append(os.path.basename(target))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        lm_checkpoint(CONFIG, "w", model, optimizer, 0, 3, save_dir=tmp_path)
    monkeypatch.setattr(os, "replace", replace)
    assert renames == ["w_32_resume.pth"]  # at its place at once
    assert lm_checkpoint(CONFIG, "w", save_dir=tmp_path)["step"] == 1
    for step, before in ((4, 1), (5, 4)):
        lm_checkpoint(CONFIG, "w", model, optimizer, 0, step, save_dir=tmp_path)
        assert lm_checkpoint(CONFIG, "w", save_dir=tmp_path)["step"] == step
        assert read_file(tmp_path / "w_32_resume_previous.pth")["step"] == before


def test_the_writer_keeps_the_order_and_tells_of_a_failure(tmp_path):
    done, gate = [], threading.Event()
    writer = Writer()
    writer.submit(lambda: (gate.wait(10), done.append(1)))
    writer.submit(lambda: done.append(2))
    writer.check()
    assert done == []  # nobody waited
    gate.set()
    writer.wait()
    assert done == [1, 2]
    (tmp_path / "file").write_bytes(b"")
    writer.submit(lambda: atomic_write(tmp_path / "file" / "below", lambda file: None))
    with pytest.raises(UserError, match="cannot be written"):
        for _ in range(100):
            time.sleep(0.01)
            writer.check()
    writer.submit(lambda: done.append(3))
    with pytest.raises(UserError, match="cannot be written"):
        writer.wait()
    assert done == [1, 2]  # after a failure nothing more is written


def test_what_is_written_in_the_background_is_the_state_of_the_call(tmp_path):
    """Weights that change while the file is being written do not reach it."""
    model, optimizer = trained()
    want = {key: value.clone() for key, value in model.state_dict().items()}
    weights, optimizer_state = copy_to_host(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    for state in optimizer.state.values():
        state["exp_avg"].add_(1.0)
    write_checkpoint(tmp_path / "w.pth", {"model": weights, "optimizer": optimizer_state})
    saved = read_file(tmp_path / "w.pth")
    assert_same_tensors(saved["model"], want)
    load_into(model, optimizer, saved)
    assert_same_tensors(dict(model.state_dict()), want)
    assert max(state["exp_avg"].abs().max() for state in optimizer.state.values()) < 1


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_a_state_from_before_the_first_step_changes_nothing(kind):
    """Neither of the run that saves it nor of one that goes on from it."""
    runs = []
    for _ in range(3):
        torch.manual_seed(0)
        model = MiniMindForCausalLM(CONFIG)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        runs.append((model, optimizer if kind == "sgd" else build_optimizer(model, 1e-2, 0.1, kind)))
    weights, optimizer_state = copy_to_host(*runs[1])
    load_into(*runs[2], {"model": weights, "optimizer": optimizer_state})
    for model, optimizer in runs:
        for _ in range(2):
            model(torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for model, _ in runs[1:]:
        assert_same_tensors(dict(model.state_dict()), dict(runs[0][0].state_dict()))


def test_tensors_without_a_stride_of_their_own_are_compared():
    """Of no elements, as a rollout has of which nothing is trained, and of one number that is repeated."""
    empty, repeated = torch.tensor([], dtype=torch.int64).as_strided((0,), (0,)), torch.tensor([7]).expand(3)
    for value in (empty, repeated):
        assert first_difference({"a": value}, {"a": value.clone()}) is None
    assert "has other values" in str(first_difference(repeated, torch.tensor([7, 7, 8])))
