"""--max_tokens: a part of the data, the beginning of each epoch's order; resumed, on two ranks, in a mixture."""

import re
import signal

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


def test_two_ranks_train_the_samples_of_one(corpus, tmp_path):
    trained = []
    for ranks, size in ((1, 4), (2, 2)):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        settings = {"max_tokens": 900, "batch_size": size, "epochs": 1}
        faults = Faults(record=str(folder / "ids"))
        run("pretrain", flags(corpus, folder, "pretrain", **settings), faults, ranks=ranks)
        trained.append(sorted(map(int, (folder / "ids").read_text().split())))
    whole = tmp_path / "whole"
    whole.mkdir()
    faults = Faults(record=str(whole / "ids"))
    run("pretrain", flags(corpus, whole, "pretrain", batch_size=4, epochs=1), faults)
    in_order = list(map(int, (whole / "ids").read_text().split()))
    assert trained[0] == trained[1] == sorted(in_order[: len(trained[0])])
    assert 0 < len(trained[0]) < len(in_order)
