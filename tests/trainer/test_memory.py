"""Memory does not grow over the updates of a run."""

import signal

from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags
from trainer.report.metrics import read_metrics


def test_the_memory_of_a_run_is_flat(corpus, tmp_path):
    """Peak memory in the log of a run with packing, samples of all lengths, saves and evaluations."""
    settings = {"epochs": 6, "num_hidden_layers": 1, "batch_size": 1, "packing": 1, "max_seq_len": 200}
    settings |= {"save_interval": 20, "eval_interval": 0}
    run("pretrain", flags(corpus, tmp_path, "pretrain", **settings))
    found = [record["memory_mb"] for record in read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")]
    warm = len(found) // 3  # by then every kernel has been compiled and every size has been met
    # pages that the allocator takes early or late come to 13 MB
    assert len(found) > 40 and found[-1] - found[warm] < 32, found[:: len(found) // 10]


HELD = """
import weakref
from torch.utils._pytree import tree_leaves
import trainer.train_pretrain as stage
from trainer import stage as stages
load, train, loaded = stages.newest_checkpoint, stage.train_epoch, []
def noted(*args, **options):
    state = load(*args, **options)
    loaded.extend((weakref.ref(each), each.nbytes) for each in tree_leaves(state["model"]))
    return state
def counted(*args, **options):
    print("bytes of the checkpoint's weights:", sum(nbytes for tensor, nbytes in loaded if tensor() is not None))
    train(*args, **options)
    print("bytes that were read:", sum(nbytes for _, nbytes in loaded))
stages.newest_checkpoint, stage.train_epoch = noted, counted
"""


def test_a_resumed_run_does_not_keep_its_checkpoint(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", epochs=1)
    run("pretrain", argv, Faults(signals={4: signal.SIGTERM}), status=143)
    said = run("pretrain", [*argv, "--from_resume", "1"], Faults(script=HELD)).out.splitlines()
    held, read = (int(line.split(": ")[1]) for line in said if line.startswith("bytes "))
    assert held == 0 and read > 900_000
