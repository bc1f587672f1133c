"""What is done once per machine, before the processes of a run have met."""

import pytest

from llm.training.core import utils
from llm.training.core.config import Config
from llm.training.core.utils import DistributedManager


@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (1, 1), (2, 0)])
def test_data_are_prepared_by_the_first_process_of_each_machine(monkeypatch, rank, local_rank):
    """The others wait for it where the processes meet."""
    launched = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 4, "MASTER_ADDR": "node1"}
    launched |= {"MASTER_PORT": 29500}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(utils, "init_distributed_mode", lambda timeout, device: local_rank)
    done = []
    manager = DistributedManager(Config())
    manager.once(lambda: done.append(1))
    assert manager.setup() == local_rank and done == [1] * (local_rank == 0)
