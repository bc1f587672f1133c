"""Signals, lost ranks, memory: real ones, sent to real processes."""

import math
import signal
import socket
import time

import pytest
import torch

from tests.conftest import ROOT
from tests.stage_process import Faults, StageProcess, rank_variables, run, start_ranks, torchrun
from tests.trainer.rollout_runs import rollout_flags, write_prompts
from tests.trainer.stage_flags import assert_same_run, assert_same_tensors, flags, records, saved_state
from trainer.report.metrics import read_metrics


def wait_for_records(path, count: int, alive) -> None:
    """Until the metrics file holds that many records."""
    deadline = time.time() + 120
    while len(read_metrics(path)) < count:
        assert alive() and time.time() < deadline
        time.sleep(0.01)


SETTINGS = {"epochs": 2, "accumulation_steps": 2, "batch_size": 4, "dropout": 0.1, "eval_interval": 4}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run("pretrain", flags(corpus, folder, "pretrain", **SETTINGS))
    return folder


def test_a_signal_finishes_the_update_and_saves(corpus, tmp_path, whole):
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1)
    # the first half of update 4
    stopped = run("pretrain", argv, Faults(signals={7: signal.SIGTERM}), status=143)
    finishing, last = stopped.error_lines
    assert finishing == "SIGTERM: finishing this update, then saving"
    text = "stopped: by SIGTERM after update 4 of 16, which is saved; --from_resume 1 continues from there"
    assert last == text
    assert saved_state(tmp_path)["update"] == 4
    # again, this time while it evaluates
    run("pretrain", argv, Faults(eval_signal=signal.SIGTERM), status=143)
    run("pretrain", argv)
    assert_same_run(whole, tmp_path)


IN_THREAD = """
import importlib, threading
for name in ("trainer.train_pretrain", "trainer.train_grpo", "llm.training.train"):
    module = importlib.import_module(name)
    def in_thread(main=module.main):
        worker = threading.Thread(target=main)
        worker.start()
        worker.join()
    module.main = in_thread
"""


def test_a_stage_trains_in_a_thread(corpus, tmp_path, whole):
    """As of a notebook or a page: only the main thread may say what a signal does."""
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, num_workers=1)
    (warning,) = run("pretrain", argv, Faults(script=IN_THREAD)).error_lines
    assert warning.startswith("warning: not in the main thread: a signal does not save first")
    assert_same_run(whole, tmp_path)


def test_reinforcement_learning_and_the_engine_train_in_a_thread(corpus, tmp_path):
    grpo = rollout_flags(write_prompts(tmp_path), tmp_path, num_generations=4, max_steps=2)
    assert "done: " in run("grpo", grpo, Faults(script=IN_THREAD)).out
    engine = flags(corpus, tmp_path, "pretrain", epochs=1)
    assert "done: 8 updates" in run("engine", ["--task", "pretrain", *engine], Faults(script=IN_THREAD)).out


def test_a_run_that_is_stopped_before_its_first_update(corpus, whole, tmp_path):
    """While the held-out data are evaluated, which the resumed run does not do again."""
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1)
    run("pretrain", argv, Faults(eval_signal=signal.SIGTERM), status=143)
    assert saved_state(tmp_path)["update"] == 0
    assert "at the start: " not in run("pretrain", argv).out
    assert_same_run(whole, tmp_path)


def test_the_records_of_a_run_that_is_stopped_before_its_first_update(corpus, tmp_path):
    """The first update is logged, and its record has the evaluation before it, as without a signal."""
    settings = {"epochs": 1, "log_interval": 5, "save_interval": 100, "eval_interval": 0, "from_resume": 1}
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings))
    argv = flags(corpus, tmp_path / "stopped", "pretrain", **settings)
    run("pretrain", argv, Faults(eval_signal=signal.SIGTERM), status=143)
    run("pretrain", argv)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert [record[0] for record in records(tmp_path / "stopped")][:2] == [1, 5]


DEAD_PIPE = """
reader, writer = os.pipe()
os.close(reader)
[os.dup2(writer, number) for number in (1, 2)]
"""
FULL_DISK = "[os.dup2(os.open('/dev/full', os.O_WRONLY), number) for number in (1, 2)]"
NONE = "os.closerange(1, 3); sys.stdout = sys.stderr = None"  # as Python begins under `>&- 2>&-`
CLOSED_TERMINAL = """
import threading
master, terminal = os.openpty()
[os.dup2(terminal, number) for number in (1, 2)]
os.close(terminal)

def watch():
    seen = b""
    while b"(6/" not in seen:
        seen += os.read(master, 1000)
    os.close(master)

threading.Thread(target=watch, daemon=True).start()
assert sys.stdout.isatty()
"""


def test_a_console_that_fails_ends_nothing(corpus, tmp_path, whole):
    """A closed terminal, `| tee` that Ctrl-C ended, a full disk behind a log, none at all: the run goes on,
    and saves when asked."""
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, from_resume=1)
    parts = [(CLOSED_TERMINAL, 17, signal.SIGHUP, 9), (DEAD_PIPE, 5, signal.SIGINT, 12)]
    parts.append((FULL_DISK, 5, signal.SIGHUP, 15))
    for console, micro_batch, number, update in parts:
        run("pretrain", argv, Faults(script=console, signals={micro_batch: number}), status=128 + number)
        assert saved_state(tmp_path)["update"] == update
    run("pretrain", argv, Faults(script=NONE))
    assert_same_run(whole, tmp_path)


def test_a_loader_process_that_is_killed_ends_in_one_line(corpus, tmp_path):
    kill = "import threading, time, multiprocessing\n"
    kill += "def wait():\n    while not (found := multiprocessing.active_children()): time.sleep(0.01)\n"
    kill += "    found[0].kill()\n"
    kill += "threading.Thread(target=wait, daemon=True).start()\n"
    kill += "from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as loader\n"
    kill += "loader._try_get_data.__defaults__ = (0.2,)"  # looks at its processes as often, not each 5 s
    argv = flags(corpus, tmp_path, "pretrain", epochs=3, num_workers=1)
    (line,) = run("pretrain", argv, Faults(script=kill, sleep=0.3), status=2).error_lines
    assert (
        line.startswith("error: the data loader processes failed (DataLoader worker")
        and "--num_workers 0" in line
    )


def test_a_signal_that_is_ignored_stays_ignored(corpus, tmp_path):
    """As under nohup."""
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    argv = flags(corpus, tmp_path, "pretrain", epochs=1)
    done = run("pretrain", argv, Faults(script=ignore, signals={3: signal.SIGHUP}))
    assert "done: 8 updates" in done.out and done.error_lines == []


THREE_SECONDS_LATER = """
import itertools, types
import trainer.devices.errors as e
e.time = types.SimpleNamespace(monotonic=itertools.count(0, 3).__next__)
"""  # each time that a signal asks how late it is


def test_a_second_ctrl_c_stops_within_the_update(corpus, tmp_path):
    """The last save is whole, and the run goes on from it."""
    argv = flags(corpus, tmp_path, "pretrain", batch_size=4, accumulation_steps=40, epochs=3, from_resume=1)
    # the second of three updates has the micro-batches 17 to 32
    faults = Faults(script=THREE_SECONDS_LATER, signals={20: signal.SIGINT, 22: signal.SIGINT})
    finishing, stopped = run("pretrain", argv, faults, status=130).error_lines
    assert "a second Ctrl-C stops at once" in finishing
    assert stopped.startswith("stopped: by Ctrl-C") and "which is saved" not in stopped
    assert saved_state(tmp_path)["update"] == 1
    assert "at epoch 1, update 1 of 3" in run("pretrain", argv).out


def test_two_ranks_stop_at_the_same_update(corpus, tmp_path):
    """One of them is told; both save and leave, at the update that both had finished."""
    settings = {"max_steps": 10, "batch_size": 4, "save_interval": 1000}
    argv = flags(corpus, tmp_path, "pretrain", **settings, from_resume=1)
    ranks = start_ranks(2, "pretrain", argv, {1: Faults(signals={5: signal.SIGTERM})})
    assert [rank.wait(60) for rank in ranks] == [143, 143]
    assert "stopped: by SIGTERM after update 5 of 10, which is saved" in ranks[0].error_lines[-1]
    assert saved_state(tmp_path)["update"] == 5 and len(records(tmp_path)) == 5
    ranks = start_ranks(2, "pretrain", argv, {0: Faults(eval_signal=signal.SIGTERM)})  # rank 1 has no signal
    assert [rank.wait(60) for rank in ranks] == [143, 143]
    run("pretrain", argv, ranks=2)
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", **settings), ranks=2)
    assert_same_run(tmp_path / "whole", tmp_path)


def test_a_tokenising_that_is_ended_leaves_nothing_in_the_way(corpus, tmp_path):
    data = tmp_path / "long.jsonl"
    data.write_text(corpus["pretrain"].read_text(encoding="utf-8") * 100, encoding="utf-8")
    argv = flags(corpus, tmp_path, "pretrain", cache_dir=tmp_path / "cache", data_path=data, max_tokens=999)
    process = StageProcess("pretrain", argv)
    deadline = time.time() + 60
    while not list(tmp_path.glob("cache/*.tmp*")) and time.time() < deadline:
        time.sleep(0.002)
    process.send(signal.SIGTERM)
    assert process.wait(60) in (143, -signal.SIGTERM) and not list(tmp_path.rglob("*.pth"))
    run("pretrain", argv)
    assert not list(tmp_path.glob("cache/*.tmp*"))


def test_under_torchrun_a_signal_saves_and_ends_all(corpus, tmp_path):
    import psutil

    argv = flags(
        corpus, tmp_path, "pretrain", epochs=200, batch_size=2, save_interval=100_000, eval_interval=100_000
    )
    launcher = torchrun(ROOT / "trainer/train_pretrain.py", argv)
    metrics = tmp_path / "out/pretrain_32_metrics.jsonl"
    wait_for_records(metrics, 3, lambda: launcher.process.exitcode is None)
    ranks = psutil.Process(launcher.process.pid).children()
    assert len(ranks) == 2
    launcher.send(signal.SIGTERM)
    assert launcher.wait(60) != 0
    err = launcher.err
    _, left = psutil.wait_procs(ranks, timeout=5)  # a process closes its output a moment before it has ended
    assert not [rank for rank in left if rank.is_running() and rank.status() != "zombie"]
    said = [line for line in err.splitlines() if line.startswith("stopped: by SIGTERM after update")]
    assert len(said) == 1, err
    done = int(said[0].split("after update ")[1].split()[0])
    assert saved_state(tmp_path)["update"] == done >= 3


def test_out_of_memory_says_what_to_lower(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain")
    process = run("pretrain", argv, Faults(hog=5), status=2)
    assert len(process.error_lines) == 1 and process.error_lines[0].startswith("error: out of memory (")
    assert "--batch_size" in process.error_lines[0] and "--max_seq_len" in process.error_lines[0]
    assert process.error_lines[0].endswith("; --from_resume 1 continues from the last checkpoint")
    assert saved_state(tmp_path)["update"] in (3, 4)


@pytest.mark.parametrize("faults", [Faults(hog=1), Faults(nan=(1,))], ids=["memory", "nan"])
def test_an_error_before_the_first_save_names_no_checkpoint(corpus, tmp_path, faults):
    argv = flags(corpus, tmp_path, "pretrain", max_bad_updates=1)
    line = run("pretrain", argv, faults, status=2).error_lines[-1]
    assert line.startswith("error: ") and "--from_resume" not in line and "checkpoint" not in line
    assert not list(tmp_path.rglob("*.pth"))


def test_a_port_that_is_taken(corpus, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = StageProcess("pretrain", flags(corpus, tmp_path, "pretrain"), **rank_variables(0, 2, port))
        assert process.wait(60) == 2
    assert process.error_lines[-1].startswith(f"error: the ranks cannot meet at 127.0.0.1:{port}")
    assert "--master_port" in process.error_lines[-1]


# --- updates that are not finite


def test_a_bad_update_is_left_out_on_all_ranks(corpus, tmp_path):
    """Only rank 1 meets it. Weights and optimizer stay those of the update before; training goes on."""
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, batch_size=4, save_interval=1, eval_interval=0)
    faults = {rank: Faults(record=str(tmp_path / f"ids{rank}")) for rank in (0, 1)}
    faults[1].infinite_gradient = (4,)
    faults[0].signals = {4: signal.SIGTERM}
    ranks = start_ranks(2, "pretrain", argv, faults)
    assert [rank.wait(60) for rank in ranks] == [143, 143]
    (warning,) = [line for line in ranks[0].error_lines if line.startswith("warning: update 4 is skipped")]
    assert f"({corpus['pretrain']}:" in warning
    before = torch.load(tmp_path / "checkpoints/pretrain_32_resume_previous.pth", weights_only=True)
    after = saved_state(tmp_path)
    assert (after["update"], before["update"]) == (4, 3)
    assert_same_tensors(before["model"], after["model"])
    assert_same_tensors(before["optimizer"]["state"], after["optimizer"]["state"])
    record = read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")[3]
    assert record["grad_norm"] is None
    ids = [int(i) for rank in (0, 1) for i in (tmp_path / f"ids{rank}").read_text().splitlines()[3].split()]
    assert record["skipped"] == [{"update": 4, "sample_ids": ids}]
    run("pretrain", [*argv, "--from_resume", "1"], ranks=2)
    last = read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")[-1]
    assert last["update"] == 8 and math.isfinite(last["loss"])


def test_too_many_bad_updates_in_a_row_end_the_run(corpus, tmp_path, whole):
    """The checkpoint before them is intact."""
    argv = flags(corpus, tmp_path, "pretrain", **SETTINGS, max_bad_updates=3, from_resume=1)
    process = run("pretrain", argv, Faults(nan=(9, 20, 22, 24)), status=2)
    assert process.error_lines[-1].startswith("error: --max_bad_updates 3: ")
    assert "warning: update 12 is skipped" in process.err
    saved = saved_state(tmp_path)
    assert saved["update"] in (10, 11) and all(value.isfinite().all() for value in saved["model"].values())
