"""What lies in --save_dir: odd entries cost themselves, for trainings, runs, models and uploads alike."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from scripts.serve.folders import files_in, scan
from tests.scripts.serve.servers import web
from tests.scripts.serve.test_training import KEY, Client, make_client

FACTS = {"parameters": 1.0, "width": 64, "depth": 1, "seconds": 60.0, "limit": "data", "unwise": []}
FACTS |= {"memory": 1.0, "memory_free": 1.0, "disk": 1.0, "disk_free": 1.0}
FACTS["stages"] = [
    {"run": "pretrain_64", "is_pretraining": True, "passes": 1.0, "updates": 2, "seconds": 60.0}
]
RECORD = '{"update": 1, "tokens": 1, "seconds": 1, "loss": 2}\n'


def fill(folder: Path) -> None:
    """A folder as a training leaves it."""
    folder.mkdir(parents=True)
    (folder / "run.sh").write_text("exit")
    (folder / "plan_facts.json").write_text(json.dumps(FACTS))
    (folder / "pretrain_64_metrics.jsonl").write_text(RECORD)
    (folder / "pretrain_64.pth").write_bytes(b"weights")
    (folder / "job.log").write_text("== started run.sh\n")


def dangling(name: str) -> Callable[[Path], None]:
    return lambda folder: replaced(folder / name).symlink_to(folder / "nowhere")


def endless(name: str) -> Callable[[Path], None]:
    return lambda folder: replaced(folder / name).symlink_to(name)


def pipe(name: str) -> Callable[[Path], None]:
    return lambda folder: os.mkfifo(replaced(folder / name))


def holds(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: replaced(folder / name).write_text(content) and None


def replaced(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


STAGE = FACTS["stages"][0]
DEEP = "[" * 100_000
ODD = {
    "a dangling link": dangling("x"),
    "a link to itself": endless("x"),
    "a pipe": pipe("x"),
    **{f"dangling {name}": dangling(name) for name in ("job.json", "job.log", "pretrain_64.pth", "pretrain_64_metrics.jsonl")},
    **{
        f"a pipe {name}": pipe(name)
        for name in ("job.json", "job.log", "report.html", "plan_facts.json", "pretrain_64_metrics.jsonl")
    },
    **{f"a pipe {name}": pipe(name) for name in ("pretrain_64.json", "pretrain_64_run.json")},
    "a pipe as lock": pipe(".pretrain_64_save_dir.lock"),
    "facts without stages": holds("plan_facts.json", "{}"),
    "facts that are a list": holds("plan_facts.json", "[1]"),
    "deep facts": holds("plan_facts.json", DEEP),
    "a stage without a name": holds("plan_facts.json", json.dumps(FACTS | {"stages": [{}]})),
    "stages that are a number": holds("plan_facts.json", json.dumps(FACTS | {"stages": 5})),
    "no stage": holds("plan_facts.json", json.dumps(FACTS | {"stages": []})),
    "seconds that are none": holds("plan_facts.json", json.dumps(FACTS | {"stages": [STAGE | {"seconds": None}]})),
    "seconds without end": holds("plan_facts.json", json.dumps(FACTS | {"seconds": float("nan")})),
    "advice without end": holds("plan_facts.json", json.dumps(FACTS | {"unwise": [{"key": "disk", "need": float("inf")}]})),
    "a stage elsewhere": holds("plan_facts.json", json.dumps(FACTS | {"stages": [STAGE | {"run": "../good/pretrain_64"}]})),
    "deep job.json": holds("job.json", DEEP),
    "odd job.json": holds("job.json", '{"name": {"a": 1}, "hours": "x"}'),
    "deep settings": holds("pretrain_64_run.json", DEEP),
    "facts of the run that are a list": holds("pretrain_64_run.json", '{"settings": {}, "facts": [1]}'),
    "deep story of the weights": holds("pretrain_64.json", DEEP),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd") / "out"
    fill(folder / "good")
    with ExitStack() as stack:
        yield make_client(stack, folder)


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_entry_costs_itself(server, odd):
    folder = server.folder / "odd"
    fill(folder)
    ODD[odd](folder)
    try:
        jobs, runs, models = answers(server)
    finally:
        unblock(folder)
        shutil.rmtree(folder)
    assert jobs["good"]["state"] == "cut" and jobs["good"]["plan"] == FACTS
    assert "good/pretrain_64" in runs and "good/pretrain_64" in models
    assert "odd" in jobs and ("odd/pretrain_64" in models) == ("pretrain_64.pth" not in odd)
    assert ("odd/pretrain_64" in runs) == ("pretrain_64_metrics" not in odd)


def unblock(folder: Path) -> None:
    """Let go whoever waits for a pipe, where a test fails."""
    for path in folder.iterdir():
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def answers(server: Client) -> tuple[dict, list, list]:
    """What each of the three lists says; each is JSON that a browser reads."""

    def get(path: str) -> dict:
        answer = web.get(server.address + path, headers=KEY, timeout=20)
        assert answer.status_code == 200
        return json.loads(answer.text, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))

    jobs = {job["name"]: job for job in get("api/train")["jobs"]}
    for path in ("api/runs/good/pretrain_64", "api/runs/odd/pretrain_64"):
        web.get(server.address + path, headers=KEY, timeout=20)
    return (
        jobs,
        [run["name"] for run in get("api/runs")["runs"]],
        [each["id"] for each in get("v1/models")["data"]],
    )


def test_a_scan_has_the_files_of_a_folder_and_of_the_folders_in_it(tmp_path):
    for name in ("a", "b/c", "b/d/e", ".hidden/f", "g/h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "folder").symlink_to(tmp_path / "b")
    found = {folder.relative_to(tmp_path).as_posix(): list(files) for folder, files in scan(tmp_path).items()}
    assert found == {".": ["a", "link"], "b": ["c"], "folder": ["c"], "g": ["h"]}
    assert list(files_in(tmp_path, links=False)) == ["a"]
    file = files_in(tmp_path / "b")["c"]
    assert (file.size, file.mtime, file.is_link) == (3, (tmp_path / "b/c").stat().st_mtime, False)
    assert scan(tmp_path / "nowhere") == {tmp_path / "nowhere": {}}


@pytest.mark.parametrize("lost", ["b", "c/d", "c"])
def test_what_is_renamed_or_forbidden_this_moment_is_left_out_alone(tmp_path, monkeypatch, lost):
    """A name that was listed is gone when it is looked at; a folder may not be read."""
    for name in ("a", "b", "c/d", "c/e"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    real = os.scandir

    @contextmanager
    def scandir(folder):
        if Path(folder) == tmp_path / lost:
            raise PermissionError(errno.EACCES, "not allowed", str(folder))
        with real(folder) as entries:
            listed = list(entries)
        if (tmp_path / lost).is_file() and (tmp_path / lost).parent == Path(folder):
            (tmp_path / lost).rename(tmp_path.parent / f"{tmp_path.name} elsewhere")
        yield iter(listed)

    monkeypatch.setattr(os, "scandir", scandir)
    found = {
        (folder / name).relative_to(tmp_path).as_posix()
        for folder, files in scan(tmp_path).items()
        for name in files
    }
    assert found == {name for name in ("a", "b", "c/d", "c/e") if not name.startswith(lost)}
