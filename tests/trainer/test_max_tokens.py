"""--max_tokens: a part of the data in each epoch, what it leaves out in the next; resumed, on two ranks, in a
mixture."""

import re
import signal
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dataset.lm_dataset import PretrainDataset
from dataset.mixing import MixedDataset
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT
from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_run, flags


def test_a_killed_run_of_a_part_of_a_mixture_goes_on_to_the_bit(corpus, tmp_path):
    settings = {
        "max_tokens": 900,
        "epochs": 2,
        "data_path": f"{corpus['pretrain']}:0.5,{corpus['pretrain_eval']}:0.5",
    }
    argvs = {n: flags(corpus, tmp_path / n, "pretrain", **settings, from_resume=1) for n in ("whole", "cut")}
    out = run("pretrain", argvs["whole"]).out
    taken = int(re.search(r"of which an epoch takes ([\d,]+) ", out)[1].replace(",", ""))
    assert abs(taken - 900) < 100
    run("pretrain", argvs["cut"], Faults(signals={5: signal.SIGKILL}), status=-9)
    assert "resuming" in run("pretrain", argvs["cut"]).out
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    more = flags(corpus, tmp_path / "cut", "pretrain", **settings | {"max_tokens": 1800}, from_resume=1)
    error = run("pretrain", more, status=2).error_lines[-1]
    assert "the checkpoint belongs to another run" in error and "max_tokens: 900 -> 1800" in error


@pytest.mark.parametrize("mixed", [False, True])
def test_what_an_epoch_leaves_out_comes_in_the_next(mixed, corpus):
    """After any number of epochs samples were taken equally often, or once more; of a mixture each epoch has
    the shares of the weights."""
    paths, tokenizer = [str(corpus["pretrain"]), str(corpus["pretrain_eval"])], load_tokenizer(ROOT / "model")
    sources = [(path, PretrainDataset(path, tokenizer, 64, cache_dir=corpus["cache"])) for path in paths]
    args = SimpleNamespace(seed=3, max_tokens=900)
    train_set = MixedDataset(sources, [3, 1], args.max_tokens) if mixed else sources[0][1]
    lengths, first = train_set.item_tokens, len(sources[0][1])
    assert abs(train_set.epoch_tokens(args) - 900) < lengths.max()
    times = np.zeros(len(lengths), dtype=int)
    for epoch in range(9):
        items = train_set.items_of_epoch(args, epoch)
        assert len(items) == train_set.epoch_items(args) < len(lengths)
        np.add.at(times, items, 1)
        for part in (times[:first], times[first:]):
            assert not len(part) or part.max() - part.min() <= 1
        if mixed:
            assert abs(lengths[items[items < first]].sum() - 675) <= 2 * lengths[:first].max()
            assert abs(lengths[items[items >= first]].sum() - 225) <= 2 * lengths[first:].max()
    assert times.min() > 0


def test_two_ranks_train_the_samples_of_one(corpus, tmp_path):
    trained = []
    for ranks, size in ((1, 4), (2, 2)):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        settings = {"data_path": corpus["pretrain"], "max_tokens": 550}
        settings |= {"batch_size": size, "epochs": 2}
        faults = Faults(record=str(folder / "ids"))
        run("pretrain", flags(corpus, folder, "pretrain", **settings), faults, ranks=ranks)
        trained.append(Counter((folder / "ids").read_text().split()))
    assert trained[0] == trained[1] and max(trained[0].values()) == 1
