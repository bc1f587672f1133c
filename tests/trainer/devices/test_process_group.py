"""A lost rank: one line, and soon. Ranks that leave together say nothing. Ranks that are started again
meet."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from common.errors import Interrupted, UserError
from tests.stage_process import Faults, context, free_port, rank_variables, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, flags
from trainer.devices.process_group import leave_process_group, meet
from trainer.run.errors import training_errors
from trainer.trainer_utils import init_distributed_mode


def _rank(rank: int, port: int, folder: str, ending: str) -> None:
    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ |= rank_variables(rank, 2, port)
    init_distributed_mode()
    with training_errors():
        if ending.startswith("killed") and rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if ending == "error" and rank:
            raise UserError("its disk is full")
        if ending in ("killed", "error"):
            meet()
        if ending == "signal":
            meet()
            raise Interrupted(signal.SIGTERM, "by SIGTERM")
        time.sleep(rank)
        leave_process_group()


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, list[tuple[int, str]]]:
    """Exit status and stderr of two ranks, by how they end."""
    started = {}
    for ending in ("killed", "error", "signal", "together"):
        folder = tmp_path_factory.mktemp(ending)
        port = free_port()
        ranks = [context.Process(target=_rank, args=(rank, port, str(folder), ending)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        started[ending] = folder, ranks
    found = {}
    for ending, (folder, ranks) in started.items():
        for process in ranks:
            process.join(50)
            assert process.exitcode is not None, f"{ending}: a rank hangs"
        found[ending] = [
            (process.exitcode, Path(folder, str(i)).read_text()) for i, process in enumerate(ranks)
        ]
    return found


def test_a_rank_notices_a_killed_one(ended):
    (status, text), (killed, _) = ended["killed"]
    assert (status, killed) == (2, -signal.SIGKILL)
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith("error: rank 0: another rank ended")
    assert lines[0].endswith("--from_resume 1 goes on from the last checkpoint") and "Traceback" not in text


def test_a_rank_that_ends_with_an_error_ends_the_others(ended):
    (status, text), (failed, why) = ended["error"]
    assert (status, failed) == (2, 2) and "another rank ended" in text and "error: its disk is full" in why


def test_ranks_that_leave_together_or_by_a_signal_say_nothing_of_it(ended):
    for ending, status in (("together", 0), ("signal", 128 + signal.SIGTERM)):
        for code, text in ended[ending]:
            assert code == status and "ended while" not in text and "Traceback" not in text, (ending, text)


def test_a_rank_that_hangs_is_noticed_by_the_others(corpus, tmp_path):
    """SIGSTOP: its connections stay open. The store is torchrun's, so that rank 0 may hang as well."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    argv = flags(corpus, tmp_path, "pretrain", rank_timeout=3)
    ranks = start_ranks(3, "pretrain", argv, {0: Faults(signals={2: signal.SIGSTOP})}, **env)
    others = ranks[1:]
    assert [rank.wait(60) for rank in others] == [2, 2], others[0].err
    for rank in others:
        (line,) = [line for line in rank.error_lines if line.startswith("error: ")]
        assert re.match(r"error: rank \d: another rank ended while this one waited for it, hangs, or", line)
    ranks[0].send(signal.SIGKILL)


def test_ranks_that_torchrun_starts_again_resume_by_themselves(corpus, tmp_path):
    """With one store, torchrun's, for all attempts: a rank killed before the first checkpoint, then one after
    it."""
    settings = {"from_weight": "none", "epochs": 1, "batch_size": 4}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), ranks=2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    argv = flags(corpus, tmp_path / "again", "pretrain", **settings, from_resume=1)
    for victim, micro_batch in ((1, 2), (0, 6)):
        ranks = start_ranks(
            2, "pretrain", argv, {victim: Faults(signals={micro_batch: signal.SIGKILL})}, **env
        )
        assert ranks[victim].wait() == -signal.SIGKILL, ranks[victim].err
        ranks[1 - victim].send(signal.SIGKILL)  # as torchrun does, sooner or later
        ranks[1 - victim].wait()
    # rank 0 must not take what is in the store for rank 1
    late = {1: Faults(script="import time; time.sleep(3)")}
    ranks = start_ranks(2, "pretrain", argv, late, **env)
    assert [rank.wait() for rank in ranks] == [0, 0] and "resuming pretrain at epoch 1" in ranks[0].out
    assert_same_run(tmp_path / "whole", tmp_path / "again", "pretrain_32")
