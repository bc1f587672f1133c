"""Files that are replaced whole, and locks between processes: one run of a name, however it ends."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import files
from common.errors import ReadError, UserError
from common.files import (
    atomic_write,
    files_in,
    free_path,
    is_file,
    is_folder,
    is_running,
    is_taken,
    is_there,
    link,
    lock_output,
    locked,
    new_path,
    open_regular,
    output_lock,
    read_errors,
    read_object,
    sync,
)
from tests.conftest import ROOT
from tests.stage_process import rank_variables
from trainer.weights.tensor_file import DAMAGED

HOLD = """
import os, sys, time
from common.files import lock_output
lock_output(sys.argv[1], save_dir=sys.argv[2], checkpoint_dir=sys.argv[3])
child = os.fork()  # such as a data loader process
if child:
    print(child, flush=True)
time.sleep(60)
"""
LOCKED = """
import sys
from pathlib import Path
from common.files import locked
with locked(Path(sys.argv[1]), "waiting for the other"):
    print("held", flush=True)
    sys.stdin.read()
"""


def popen(code: str, *args, **env: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, args)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | env, **pipes)


@pytest.fixture
def folders(tmp_path):
    return tmp_path / "out", tmp_path / "checkpoints"


@pytest.fixture(autouse=True)
def release():
    """What a test locks is free afterwards; a run keeps it until its process ends."""
    yield
    while files._held:
        files._held.pop().close()


# --- writing


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_folder_that_cannot_be_flushed(tmp_path, monkeypatch, number):
    """Network shares and file systems in user space refuse it; a disk that fails is an error."""

    def refuse(descriptor):
        raise OSError(number, "")

    monkeypatch.setattr(os, "fsync", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError):
            sync(tmp_path)
    else:
        sync(tmp_path)


def test_absent_is_what_the_system_calls_absent(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    places = ["file", "file/below", "dangling", "none", "no/folder", "", "x" * 300, "nul\0"]
    for name, tell in ((name, tell) for name in places for tell in (is_there, is_file, is_folder)):
        usual = {is_there: Path.exists, is_file: Path.is_file, is_folder: Path.is_dir}[tell]
        expected = False if len(name) == 300 else usual(tmp_path / name)
        assert tell(tmp_path / name) is tell(str(tmp_path / name)) is expected, (name, tell)
    assert is_taken(tmp_path / "dangling") and not is_taken(tmp_path / "none")
    assert files_in(tmp_path, "f*") == [tmp_path / "file"] and files_in(tmp_path / "none") == []
    assert files_in(tmp_path) == sorted(tmp_path.iterdir()) and files_in(tmp_path / "file") == []
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ReadError, match="symbolic links"):
        is_there(tmp_path / "loop")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_what_cannot_be_looked_at_is_an_error(tmp_path, monkeypatch, number):
    def fails(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    path = tmp_path / "file"
    path.touch()
    for name in ("stat", "lstat", "listdir"):
        monkeypatch.setattr(os, name, fails)
    for tell in (is_there, is_taken, is_file, is_folder, files_in):
        with pytest.raises(ReadError, match=f"file cannot be read at present .{os.strerror(number)}"):
            tell(path)


@pytest.mark.parametrize("error", [(errno.EINVAL, "offset"), ("no archive",)])
def test_of_a_damaged_file_no_oserror_is_left(tmp_path, error):
    """Code that catches the errors of a damaged file must not catch those of the disk."""
    with pytest.raises(ValueError, match=error[-1]), read_errors(tmp_path / "file"):
        raise OSError(*error)
    assert not any(issubclass(each, OSError) for each in DAMAGED)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    def fails(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(UserError, match=r"file cannot be written \(No space left on device\)"):
        atomic_write(tmp_path / "file", fails)
    with pytest.raises(UserError, match="file already exists"), new_path(tmp_path / "file"):
        pass
    with pytest.raises(RuntimeError, match="of the model"), new_path(tmp_path / "folder") as place:
        place.mkdir()
        raise RuntimeError("of the model")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == b"old"
    with pytest.raises(UserError, match=r"file/x cannot be written \(File exists\)"):
        atomic_write(tmp_path / "file/x", lambda file: None)


def test_a_copy_that_finds_no_room_leaves_nothing_behind(tmp_path, monkeypatch):
    """On a file system without links a second name is a copy."""
    (tmp_path / "state").write_bytes(b"x" * 100)

    def refuse(*_):
        raise OSError(errno.EPERM, "no links")

    def half(source, copy):
        copy.write(b"x" * 50)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    link(tmp_path / "state", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"x" * 100
    monkeypatch.setattr(shutil, "copyfileobj", half)
    with pytest.raises(UserError, match="No space left"):
        link(tmp_path / "state", tmp_path / "second")
    assert sorted(os.listdir(tmp_path)) == ["copy", "state"]


def test_what_a_kill_left_behind_is_replaced_not_written_to(tmp_path):
    """It may be a second name of a file that is in use, or belong to another user."""
    used = tmp_path / "used"
    used.write_bytes(b"in use")
    os.link(used, tmp_path / ".file.tmp")
    atomic_write(tmp_path / "file", lambda file: file.write(b"new"))
    assert used.read_bytes() == b"in use" and (tmp_path / "file").read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path)) == ["file", "used"]


# --- the output of a run


def test_a_second_run_of_the_name_is_refused_at_once_until_the_first_is_killed(folders):
    """A child that outlives the first does not hold the name."""
    first = popen(HOLD, "pretrain_32", *folders)
    child = int(first.stdout.readline())
    out, checkpoints = folders
    holder = f"process {first.pid} on {socket.gethostname()}"
    try:
        assert is_running("pretrain_32", out)
        other = {"save_dir": out.parent / "b", "checkpoint_dir": checkpoints}
        for kept, own in ((out, {"save_dir": out}), (checkpoints, other)):
            with pytest.raises(UserError) as error:
                lock_output("pretrain_32", **own)
            taken = f"{holder} is training a run of this name and writes to {kept}; "
            assert str(error.value) == taken + "wait for it, stop it, or choose another --save_weight"
        lock_output("pretrain_32_moe", save_dir=out, checkpoint_dir=checkpoints)  # another name
        lock_output("pretrain_32", save_dir=out.parent / "elsewhere")
        first.kill()
        first.wait()
        os.kill(child, 0)  # alive
        assert is_running("pretrain_32", out) is False and is_running("other", out) is None
        lock_output("pretrain_32", save_dir=out, checkpoint_dir=checkpoints)
    finally:
        os.kill(child, signal.SIGKILL)
        first.kill()
        first.communicate()
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert (out / ".pretrain_32_save_dir.lock").read_text() == f"{holder}\n"


def test_rank_0_alone_reserves_the_name(folders, monkeypatch):
    for name, value in (rank_variables(1, 2, 29500) | {"LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    lock_output("pretrain_32", save_dir=folders[0], checkpoint_dir=folders[1])
    assert not folders[0].exists()
    monkeypatch.setenv("RANK", "0")
    lock_output("pretrain_32", save_dir=folders[0], checkpoint_dir=folders[1])
    assert [path.name for path in folders[1].iterdir()] == [".pretrain_32_checkpoint_dir.lock"]


def test_one_folder_for_both_or_one_that_cannot_be_written(tmp_path):
    """Closing one of two record locks of a file would release both: each flag has a file of its own."""
    lock_output("pretrain_32", save_dir=tmp_path, checkpoint_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error:
        lock_output("pretrain_32", save_dir=tmp_path, checkpoint_dir=tmp_path / "file" / "x")
    told = f"--checkpoint_dir {tmp_path}/file/x cannot be written (Not a directory); give another folder"
    assert str(error.value) == told


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "lockf", refuse)
    lock_output("pretrain_32", save_dir=tmp_path)
    with locked(tmp_path / "x.lock", "waiting"):
        pass


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_shared_file_is_waited_for_and_that_is_said_once_per_machine(tmp_path, local_rank):
    path = tmp_path / "cache.lock"
    other = popen(LOCKED, path)
    assert other.stdout.readline() == "held\n"
    waiting = popen(LOCKED, path, **rank_variables(local_rank, 2, 29500))
    try:
        if local_rank == 0:
            assert waiting.stdout.readline() == "waiting for the other\n"
        else:
            time.sleep(1)
        assert waiting.poll() is None
    finally:
        other.kill()
        other.communicate()
    assert waiting.communicate("", timeout=30)[0] == "held\n" and waiting.returncode == 0


# --- a folder in which anything may lie


@pytest.mark.parametrize("mode", ["rb", "ab", "a+b"])
def test_only_a_regular_file_is_opened_and_a_pipe_is_not_waited_for(tmp_path, mode):
    (tmp_path / "file").write_bytes(b"text")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "pipe link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket"))
        for name in ("pipe", "folder", "pipe link", "socket"):
            for links in (True, False):
                with pytest.raises(OSError), open_regular(tmp_path / name, mode, links):
                    pass
    with open_regular(tmp_path / "file", mode) as file:
        if mode == "rb":
            assert file.read() == b"text"
        else:
            assert file.write(b"!") == 1
    assert (tmp_path / "file").read_bytes() == (b"text" if mode == "rb" else b"text!")


def test_links_are_followed_or_not_also_that_of_the_folder(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_bytes(b"text")
    (tmp_path / "folder/link").symlink_to("file")
    (tmp_path / "linked").symlink_to("folder")
    (tmp_path / "folder/dangling").symlink_to(tmp_path / "made")
    for path in ("folder/link", "linked/file", "linked/link"):
        with open_regular(tmp_path / path) as file:
            assert file.read() == b"text"
        for mode in ("rb", "ab"):
            with pytest.raises(OSError), open_regular(tmp_path / path, mode, links=False):
                pass
    with pytest.raises(OSError), open_regular(tmp_path / "folder/dangling", "ab", links=False):
        pass
    assert not (tmp_path / "made").exists()
    with open_regular(tmp_path / "folder/new", "ab", links=False) as file:
        file.write(b"new")
    assert (tmp_path / "folder/new").read_bytes() == b"new"


def test_a_json_file_that_holds_no_object_is_an_empty_one(tmp_path):
    path = tmp_path / "a.json"
    assert read_object(path) == {}
    for content in (b"[1]", b"5", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b""):
        path.write_bytes(content)
        assert read_object(path) == {}
    path.write_text('{"a": 1}')
    (tmp_path / "link.json").symlink_to(path)
    assert read_object(path, links=False) == read_object(tmp_path / "link.json") == {"a": 1}
    assert read_object(tmp_path / "link.json", links=False) == {}
    path.unlink()
    os.mkfifo(path)
    assert read_object(path) == {}


def test_a_pipe_in_the_place_of_a_lock_says_nothing_of_a_run(tmp_path):
    os.mkfifo(output_lock("pretrain_32", tmp_path))
    assert is_running("pretrain_32", tmp_path) is None


def test_a_free_path(tmp_path):
    path = tmp_path / "a run.jsonl"
    assert free_path(path) == path
    path.touch()
    (tmp_path / "a run_2.jsonl").symlink_to("nowhere")
    assert free_path(path) == tmp_path / "a run_3.jsonl"
    assert free_path(path, may_replace=lambda each: each.is_symlink()).name == "a run_2.jsonl"
    assert free_path(path, longest=3).name == "a r.jsonl"
    (tmp_path / "a r.jsonl").mkdir()
    assert free_path(path, longest=3).name == "a_2.jsonl"  # no blank at the end
