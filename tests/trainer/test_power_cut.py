"""What must reach the disk, and in which order, so that a power cut leaves old or new files whole: write,
flush the file, rename, flush the folder. Watched from inside a real run."""

import json
from pathlib import Path

import pytest

from tests.stage_process import Faults, run
from tests.trainer.stage_flags import flags

WATCH = """
import json
log = open({log!r}, "a", buffering=1)
fsync, replace, rename = os.fsync, os.replace, os.rename

def watched_fsync(descriptor):
    status = os.fstat(descriptor)
    path = os.readlink(f"/proc/self/fd/{{descriptor}}")
    fsync(descriptor)
    log.write(json.dumps(["flush", path, [status.st_ino, status.st_size]]) + "\\n")

def watched(how):
    def move(source, target, **options):
        paths = [source] if os.path.isfile(source) else [entry.path for entry in os.scandir(source)]
        files = {{str(path): [os.stat(path).st_ino, os.stat(path).st_size] for path in paths}}
        how(source, target, **options)
        log.write(json.dumps(["move", os.path.abspath(target), files]) + "\\n")
    return move

os.fsync, os.replace, os.rename = watched_fsync, watched(replace), watched(rename)
"""


@pytest.fixture(scope="module")
def events(corpus, tmp_path_factory) -> tuple[Path, list]:
    """The flushes and renames in a run on a fresh cache, and where its files lie."""
    folder = tmp_path_factory.mktemp("run")
    settings = {"epochs": 1, "batch_size": 4, "cache_dir": folder / "cache", "num_hidden_layers": 1}
    argv = flags(corpus, folder, "pretrain", **settings, save_interval=2, eval_interval=4)
    run("pretrain", argv, Faults(script=WATCH.format(log=str(folder / "log"))))
    return folder, [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def test_a_file_is_flushed_before_it_gets_its_name_and_its_folder_afterwards(events):
    folder, log = events
    moved = set()
    for at, (kind, target, files) in enumerate(log):
        if kind != "move" or not target.startswith(str(folder)):
            continue
        moved.add(Path(target).name)
        rotated = target.endswith("_previous.pth")  # it was flushed when it was written
        flushed = [content for kind, _, content in log[:at] if kind == "flush"]
        for path, content in ({} if rotated else files).items():
            assert content in flushed, f"{path} was not flushed before its rename"
        parent = str(Path(target).parent)
        assert any(k == "flush" and path == parent for k, path, _ in log[at : at + 4]), (
            f"{parent} after {target}"
        )
    states = {"pretrain_32_resume.pth", "pretrain_32_resume_previous.pth"}
    assert states | {"pretrain_32.pth", "pretrain_best_32.pth", "pretrain_32_metrics.jsonl"} <= moved
    assert any(target.startswith(str(folder / "cache")) for kind, target, _ in log if kind == "move")


def test_the_metrics_are_flushed_at_the_end(events):
    folder, log = events
    path = folder / "out/pretrain_32_metrics.jsonl"
    assert ["flush", str(path), [path.stat().st_ino, path.stat().st_size]] in log
