"""What belongs to every run, here in a stage script: settings from a file, early stopping, TensorBoard, a log
file, the settings beside the metrics."""

import json
import platform
import signal

import pytest
import torch

from tests.stage_process import Faults, run
from tests.trainer.stage_flags import assert_same_run, flags, saved_state
from trainer.report.metrics import read_metrics

RUN = """
training: {epochs: 9, batch_size: 5, patience: 2, min_delta: 0.2, seed: 3}
logging: {tensorboard_dir: FOLDER}
"""


def test_file_and_command_line_in_a_stage_script(corpus, tmp_path):
    """Each overrides the one before; early stopping ends a killed run where it ends the whole one."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argvs = {}
    for name in ("whole", "killed"):
        (tmp_path / f"{name}.yaml").write_text(RUN.replace("FOLDER", str(tmp_path / name / "curves")))
        settings = {"batch_size": 8, "eval_interval": 4, "log_file": tmp_path / name / "run.log"}
        argv = flags(corpus, tmp_path / name, "pretrain", **settings)
        at = argv.index("--epochs")
        del argv[at : at + 2]  # the file says it
        argvs[name] = [*argv, "--config", str(tmp_path / f"{name}.yaml"), "--from_resume", "1"]
    done = run("pretrain", argvs["whole"])
    state = saved_state(tmp_path / "whole")
    assert (
        state["fingerprint"]["epochs"],
        state["fingerprint"]["seed"],
        state["fingerprint"]["global_batch"],
    ) == (9, 3, 8)
    assert "stopping: EarlyStopping: eval_loss got no better than" in done.out and state["epoch"] < 8
    assert state["callbacks"]["EarlyStopping"]["waited"] <= 2
    run("pretrain", argvs["killed"], Faults(signals={9: signal.SIGKILL}), status=-9)
    assert "stopping: EarlyStopping" in run("pretrain", argvs["killed"]).out
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    metrics = read_metrics(tmp_path / "killed/out/pretrain_32_metrics.jsonl")
    curves = EventAccumulator(str(tmp_path / "killed/curves/pretrain_32")).Reload()
    assert [point.step for point in curves.Scalars("loss")] == [record["update"] for record in metrics]
    log = (tmp_path / "whole/run.log").read_text()
    assert "model: " in log and "Epoch:[1/9]" in log and "stopping: EarlyStopping" in log


def test_the_settings_of_a_run_lie_beside_its_metrics(corpus, tmp_path):
    """Of each start, also after a kill, with another number of ranks, and where the file was damaged
    meanwhile."""
    path, secret = tmp_path / "out/pretrain_32_run.json", {"SWANLAB_API_KEY": "hush"}
    argv = flags(corpus, tmp_path, "pretrain", seed=4, from_resume=1)
    run("pretrain", argv, Faults(signals={5: signal.SIGKILL}), status=-9, **secret)
    first = json.loads(path.read_text())
    assert (first["stage"], first["settings"]["seed"]) == ("train_pretrain.py", 4)
    assert first["settings"]["batch_size"] == 8 and first["settings"]["packing"] is False
    assert (
        first["environment"].items() >= {"ranks": 1, "dtype": "float32", "torch": torch.__version__}.items()
    )
    assert first["starts"][0]["command"][1:] == argv and "hush" not in path.read_text()
    run("pretrain", [*argv, "--batch_size", "4"], Faults(signals={3: signal.SIGTERM}), 2, 143)
    second = json.loads(path.read_text())
    assert second["settings"]["batch_size"] == 4 and second["environment"]["ranks"] == 2
    updates = [start["update"] for start in second["starts"]]
    assert second["starts"][0] == first["starts"][0] and len(updates) == 2 and 0 < updates[1] < 5
    rounding = f"to rounding from update {updates[1]} on (ranks: 1 -> 2)"
    assert (first["results"], second["results"]) == ("bit for bit", rounding)
    machine = second["starts"][1]
    assert machine["machine"] == platform.node() and machine["environment"]["processor"]
    path.write_text(path.read_text()[:-20])
    run("pretrain", argv)
    third = json.loads(path.read_text())
    (start,) = third["starts"]
    assert start["update"] > updates[1]
    assert third["results"] == f"{rounding}; to rounding from update {start['update']} on (ranks: 2 -> 1)"


def test_patience_without_held_out_data_is_refused(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", patience=2, eval_data_path="none")
    assert "early stopping needs held-out data" in run("pretrain", argv, status=2).error_lines[-1]


# --- what may change when a run is resumed, since it changes no number of the training


def test_a_metric_that_no_validation_gives_is_told_before_the_first_update(corpus, tmp_path):
    """Also at a resume, where another one may be named: the weights are the same, the best are chosen anew."""
    settings = {"epochs": 2, "eval_interval": 4, "from_resume": 1}
    whole, killed = (flags(corpus, tmp_path / name, "pretrain", **settings) for name in ("whole", "killed"))
    run("pretrain", whole)
    (line,) = run("pretrain", [*killed, "--monitor", "eval_los"], status=2).error_lines
    assert line == "error: --monitor: validation does not report 'eval_los'; it reports eval_bpb, eval_loss"
    assert not list(tmp_path.glob("killed/*/*.pth"))
    run("pretrain", killed, Faults(signals={6: signal.SIGKILL}), status=-signal.SIGKILL)
    before = saved_state(tmp_path / "killed")
    assert before["best_eval"] is not None and before["monitored"] == "min eval_loss"
    run("pretrain", [*killed, "--monitor", "eval_los"], status=2)
    assert saved_state(tmp_path / "killed")["update"] == before["update"]
    run("pretrain", [*killed, "--monitor", "eval_bpb", "--mode", "max", "--patience", "9"])
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    metrics = read_metrics(tmp_path / "killed/out/pretrain_32_metrics.jsonl")
    later = [r["eval_bpb"] for r in metrics if "eval_bpb" in r and r["update"] > before["update"]]
    state = saved_state(tmp_path / "killed")
    assert len(later) >= 2 and state["best_eval"] == max(later)
    assert state["callbacks"]["EarlyStopping"]["monitor"] == "eval_bpb"


def test_a_state_of_older_code_that_compared_more_settings_is_resumed(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1)
    run("pretrain", argv, Faults(signals={6: signal.SIGTERM}), status=143)
    path = tmp_path / "checkpoints/pretrain_32_resume.pth"
    state = saved_state(tmp_path)
    state["fingerprint"] |= {"monitor": "eval_los", "mode": "max"}
    del state["monitored"]
    torch.save(state, path)
    assert "done: 8 updates" in run("pretrain", argv).out


@pytest.mark.parametrize("log", ["log_dir", "log_file", "a log of somebody else", "checkpoint_dir"])
def test_a_log_beside_the_weights_stays_where_it_is(corpus, tmp_path, log):
    """Two new runs of a name: the second sets the files of the first aside, and goes on writing the log."""
    out, states = tmp_path / "out", tmp_path / "checkpoints"
    settings = {"epochs": 1, "num_hidden_layers": 1, "eval_interval": 0}
    flag, value, path = {
        "log_dir": ("log_dir", out, out / "pretrain_32.log"),
        "log_file": ("log_file", out / "pretrain_32.txt", out / "pretrain_32.txt"),
        "a log of somebody else": ("log_file", "none", out / "pretrain_32.log"),
        "checkpoint_dir": ("log_dir", states, states / "pretrain_32.log"),
    }[log]
    settings |= {flag: value}
    for number in (1, 2):
        if log == "a log of somebody else":  # of `tee`
            path.parent.mkdir(exist_ok=True)
            path.write_text("done:" * number)
        run("pretrain", flags(corpus, tmp_path, "pretrain", **settings))
    assert path.read_text().count("done:") == 2
    assert sorted(file.name for file in (out / "earlier_1").iterdir())[0] == "pretrain_32.json"
    assert not (out / "earlier_1" / path.name).exists() and not (states / "earlier_1" / path.name).exists()
