"""A lost rank: one line, and soon. Ranks that are started again meet."""

import re
import signal

import torch.distributed as dist

from tests.stage_process import Faults, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, flags


def test_a_rank_notices_a_killed_one(corpus, tmp_path):
    """Soon, by one line that says how to go on."""
    argv = flags(corpus, tmp_path, "pretrain", batch_size=4)
    ranks = start_ranks(2, "pretrain", argv, {1: Faults(signals={3: signal.SIGKILL})})
    assert [rank.wait(60) for rank in ranks] == [2, -signal.SIGKILL]
    (line,) = [line for line in ranks[0].error_lines if line.startswith("error: ")]
    assert line.startswith("error: rank 0: another rank ended") and "Traceback" not in ranks[0].err
    assert line.endswith("--from_resume 1 continues from the last checkpoint")


def test_a_rank_that_ends_with_an_error_ends_the_others(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", batch_size=4)
    full = "import trainer.loop as l\nfrom common.errors import UserError\n"
    full += "def fail(*_):\n    raise UserError('its disk is full')\nl.train_update = fail\n"
    ranks = start_ranks(2, "pretrain", argv, {1: Faults(script=full)})
    assert [rank.wait(60) for rank in ranks] == [2, 2]
    assert "another rank ended" in ranks[0].err and "error: its disk is full" in ranks[1].err


def test_a_rank_that_hangs_is_noticed_by_the_others(corpus, tmp_path):
    """SIGSTOP: its connections stay open. The store is torchrun's, so that rank 0 may hang as well."""
    argv = flags(corpus, tmp_path, "pretrain", rank_timeout=2)
    ranks = start_ranks(3, "pretrain", argv, {0: Faults(signals={2: signal.SIGSTOP})})
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
    env = {"MASTER_PORT": str(store.port)}
    argv = flags(corpus, tmp_path / "again", "pretrain", **settings, from_resume=1)
    for victim, micro_batch in ((1, 2), (0, 6)):
        ranks = start_ranks(
            2, "pretrain", argv, {victim: Faults(signals={micro_batch: signal.SIGKILL})}, **env
        )
        assert ranks[victim].wait() == -signal.SIGKILL, ranks[victim].err
        ranks[1 - victim].send(signal.SIGKILL)  # as torchrun does, sooner or later
        ranks[1 - victim].wait()
    # rank 0 must not take what is in the store for rank 1
    late = {1: Faults(script="import time; time.sleep(0.7)")}
    ranks = start_ranks(2, "pretrain", argv, late, **env)
    assert [rank.wait() for rank in ranks] == [0, 0] and "resuming pretrain at epoch 1" in ranks[0].out
    assert_same_run(tmp_path / "whole", tmp_path / "again", "pretrain_32")
