"""A disk that is full, a folder that cannot be written: one line, exit status 2, and what was there stays
whole."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.stage_process import Faults, run, start_ranks
from tests.trainer.stage_flags import assert_same_run, flags
from trainer.report.metrics import read_metrics


def only_line(process) -> str:
    """The error line, which is alone."""
    assert len(process.error_lines) == 1, process.err
    assert process.error_lines[0].startswith("error: ")
    return process.error_lines[0]


def test_no_room_for_the_checkpoint(corpus, tmp_path):
    """The limit is set while it runs, so that an older checkpoint and weights are there: they stay as they
    were."""
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1, batch_size=4)
    run("pretrain", argv, Faults(signals={5: 15}), ranks=2, status=143)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.pth")}
    assert len(files) >= 3
    limit = Faults(file_limit=min(map(len, files.values())) // 2)
    processes = start_ranks(2, "pretrain", argv, dict.fromkeys(range(2), limit))
    assert [process.wait(60) for process in processes] == [2, 2]
    line = processes[0].error_lines[0]
    checkpoint = f"{tmp_path}/checkpoints/pretrain_32_resume.pth"
    assert line.startswith(f"error: {checkpoint} cannot be written (File too large)")
    assert line.endswith("; --from_resume 1 then goes on from the last checkpoint, if there is one")
    assert "Traceback" not in processes[0].err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pth")} == files
    assert not list(tmp_path.rglob("*.tmp"))
    run("pretrain", argv, ranks=2)
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", epochs=1, batch_size=4), ranks=2)
    assert_same_run(tmp_path / "whole", tmp_path)


def test_no_room_for_the_metrics(corpus, tmp_path):
    argv = flags(corpus, tmp_path, "pretrain", save_interval=1000, eval_interval=1000, epochs=2, batch_size=1)
    line = only_line(run("pretrain", argv, Faults(file_limit=24_000), status=2))
    assert line.startswith(
        f"error: {tmp_path}/out/pretrain_32_metrics.jsonl cannot be written (File too large)"
    )
    assert len(read_metrics(tmp_path / "out/pretrain_32_metrics.jsonl")) >= 5


@pytest.mark.parametrize("flag", ["save_dir", "checkpoint_dir", "cache_dir"])
def test_a_folder_that_cannot_be_made(corpus, tmp_path, flag):
    (tmp_path / "file").write_text("")
    argv = flags(corpus, tmp_path, "pretrain", **{flag: tmp_path / "file" / "out"})
    line = only_line(run("pretrain", argv, status=2))
    assert str(tmp_path / "file") in line and f"--{flag}" in line


@pytest.mark.parametrize("flag", ["save_dir", "checkpoint_dir"])
def test_a_read_only_folder(corpus, tmp_path, flag):
    if os.name != "posix":
        pytest.skip("rights of folders are another matter there")
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    folders = {name: base / name for name in ("save_dir", "checkpoint_dir")}
    for name, folder in folders.items():
        folder.mkdir()
        folder.chmod(0o555 if name == flag else 0o777)
    folder = folders[flag]
    # where others may read, too
    files = {name: path for name, path in corpus.items() if path.is_file()}
    corpus = corpus | {name: Path(shutil.copy(path, base)) for name, path in files.items()}
    argv = flags(corpus, tmp_path, "pretrain", **folders)
    # root may write anywhere: give the rights up, in a process that has everything loaded
    if os.getuid() == 0:
        script = "os.setgroups([]); os.setgid(65534); os.setuid(65534)"
        line = only_line(run("pretrain", argv, Faults(script=script), status=2))
    else:
        line = only_line(run("pretrain", argv, status=2))
    assert line.startswith(f"error: --{flag} {folder} cannot be written (Permission denied)")
