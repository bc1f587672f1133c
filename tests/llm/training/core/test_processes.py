"""What is done once per machine, before the processes of a run have met."""

import os
import tempfile
from pathlib import Path

import psutil
import pytest

from llm.training.core import utils
from llm.training.core.config import Config
from llm.training.core.utils import DistributedManager


@pytest.fixture
def manager(tmp_path, monkeypatch) -> DistributedManager:
    """One of two ranks; the process group is left out."""
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(utils, "init_distributed_mode", lambda timeout, device: 1)
    return DistributedManager(Config())


def test_data_are_prepared_once_and_nothing_is_left_behind(manager, tmp_path):
    done = []
    for rank in range(3):
        manager.once(lambda rank=rank: done.append(rank))
    assert done == [0] and len(list(tmp_path.iterdir())) == 1
    assert manager.setup() == 1 and not list(tmp_path.iterdir())


def test_when_preparing_fails_the_next_process_tries_again(manager):
    done = []
    with pytest.raises(ZeroDivisionError):
        manager.once(lambda: 1 / 0)
    manager.once(lambda: done.append(1))
    assert done == [1]


def test_the_marks_of_killed_runs_are_removed(manager, tmp_path):
    this, user = psutil.Process(), os.getuid()
    begin = f"{this.create_time():.0f}"
    kept = {f"minimind-{this.pid}-{begin}-{user}.prepared", f"minimind-1-5-{user + 1}.prepared", "other"}
    gone = {f"minimind-{this.pid}-5-{user}.prepared", f"minimind-99999999-{begin}-{user}.prepared"}
    for name in kept | gone:
        Path(tmp_path, name).touch()
    manager.once(lambda: None)
    manager.setup()
    assert {path.name for path in tmp_path.iterdir()} == kept
