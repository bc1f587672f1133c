"""Memory does not grow: over the updates of a run, and with the part of a large cache that was read."""

import re
import signal
import sys
from pathlib import Path

import pytest

from dataset import lm_dataset
from dataset.lm_dataset import PretrainDataset
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags
from trainer.report.metrics import read_metrics


def test_the_memory_of_a_run_is_flat(corpus, tmp_path):
    """Peak memory in the log of a run with packing, samples of all lengths, saves and evaluations."""
    settings = {"epochs": 5, "num_hidden_layers": 1, "batch_size": 1, "packing": 1, "max_seq_len": 200}
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
load, train, loaded = stage.utils.lm_checkpoint, stage.train_epoch, []
def noted(*args, **options):
    state = load(*args, **options)
    loaded.extend((weakref.ref(each), each.nbytes) for each in tree_leaves(state["model"]))
    return state
def counted(*args, **options):
    print("bytes of the checkpoint's weights:", sum(nbytes for tensor, nbytes in loaded if tensor() is not None))
    train(*args, **options)
    print("bytes that were read:", sum(nbytes for _, nbytes in loaded))
stage.utils.lm_checkpoint, stage.train_epoch = noted, counted
"""


def test_a_resumed_run_does_not_keep_its_checkpoint(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", epochs=1)
    run("pretrain", argv, Faults(signals={4: signal.SIGTERM}), status=143)
    said = run("pretrain", [*argv, "--from_resume", "1"], Faults(script=HELD)).out.splitlines()
    held, read = (int(line.split(": ")[1]) for line in said if line.startswith("bytes "))
    assert held == 0 and read > 900_000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_what_was_read_of_a_large_cache_does_not_count(corpus, tmp_path, monkeypatch):
    data = PretrainDataset(str(corpus["pretrain"]), load_tokenizer(ROOT / "model"), 64, True, str(tmp_path))

    def resident() -> int:
        """kB of the cache's files that are mapped in."""
        text = Path("/proc/self/smaps").read_text(encoding="utf-8")
        return sum(
            map(int, re.findall(rf"{re.escape(str(data.cache.path))}/.*\n(?:.*\n)*?Rss: +(\d+) kB", text))
        )

    items = [data[i] for i in range(len(data))]
    assert resident() > 0
    monkeypatch.setattr(data.cache, "is_large", True)
    monkeypatch.setattr(lm_dataset, "ITEMS_PER_RELEASE", 1)
    again = [data[i] for i in range(len(data))]
    assert resident() == 0
    for one, other in zip(sum(items, []), sum(again, []), strict=True):
        assert (
            one["sample_id"] == other["sample_id"]
            and one["input_ids"].tolist() == other["input_ids"].tolist()
        )
