"""A disk that is full, a folder that cannot be written: one line, exit status 2, and what was there stays
whole."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.stage_process import Faults, run
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
    argv = flags(corpus, tmp_path, "pretrain", epochs=1, from_resume=1)
    run("pretrain", argv, Faults(signals={5: 15}), status=143)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.pth")}
    assert len(files) >= 3
    process = run("pretrain", argv, Faults(file_limit=min(map(len, files.values())) // 2), status=2)
    line = process.error_lines[0]
    assert ".pth cannot be written (File too large)" in line and "--from_resume 1 continues from" in line
    assert "Traceback" not in process.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pth")} == files
    assert not list(tmp_path.rglob("*.tmp"))
    run("pretrain", argv)
    run("pretrain", flags(corpus, tmp_path / "whole", "pretrain", epochs=1))
    assert_same_run(tmp_path / "whole", tmp_path)


def test_no_room_for_the_metrics(corpus, tmp_path):
    """The weights and the state of a first part of the run are there."""
    settings = {"save_interval": 1000, "eval_interval": 1000, "epochs": 2, "batch_size": 1}
    argv = flags(corpus, tmp_path, "pretrain", **settings, from_resume=1)
    run("pretrain", argv, Faults(signals={5: 15}), status=143)
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


@pytest.mark.skipif(os.name != "posix", reason="rights of folders are another matter there")
def test_a_read_only_folder(corpus, tmp_path):
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    folders = {"save_dir": base / "save_dir", "checkpoint_dir": base / "checkpoint_dir"}
    for folder, rights in zip(folders.values(), (0o777, 0o555), strict=True):
        folder.mkdir()
        folder.chmod(rights)
    # where others may read, too
    files = {name: path for name, path in corpus.items() if path.is_file()}
    corpus = corpus | {name: Path(shutil.copy(path, base)) for name, path in files.items()}
    argv = flags(corpus, tmp_path, "pretrain", **folders)
    faults = Faults()
    if os.getuid() == 0:  # root may write anywhere: give the rights up, in a process that has all loaded
        faults.script = "os.setgroups([]); os.setgid(65534); os.setuid(65534)"
    line = only_line(run("pretrain", argv, faults, status=2))
    told = f"error: --checkpoint_dir {folders['checkpoint_dir']} cannot be written (Permission denied)"
    assert line.startswith(told)
