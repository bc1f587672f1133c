"""The runs that the page draws: which there are, their curves also while they grow, nothing from elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from scripts.runs.run import Run
from scripts.serve.page import runs_router
from tests.conftest import ROOT


def record(update: int, **more: Any) -> dict:
    base = {"update": update, "tokens": 100 * update, "seconds": update / 2, "loss": 5.0}
    base |= {"mean_loss": 1 / update, "learning_rate": 1e-3, "grad_norm": float(update % 7)}
    return base | {"seconds_left": 9.0} | more


def append(path: Path, *records: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


@pytest.fixture
def get(tmp_path):
    app = FastAPI()
    app.include_router(runs_router(tmp_path))
    with TestClient(app) as client:
        yield lambda path: client.get(f"/api/{path}")


def test_runs_of_the_folder_and_the_folders_in_it_newest_first(tmp_path, get):
    append(tmp_path / "old_64_metrics.jsonl", record(1))
    append(
        tmp_path / "demo" / "new_64_metrics.jsonl", record(1), record(2, loss=float("nan"), mean_loss=None)
    )
    append(tmp_path / "other.jsonl", record(1))
    os.utime(tmp_path / "old_64_metrics.jsonl", (1, 1))
    runs = get("runs").json()["runs"]
    assert [run["name"] for run in runs] == ["demo/new_64", "old_64"] and runs[0]["age"] < 100
    assert runs[0]["size"] == (tmp_path / "demo/new_64_metrics.jsonl").stat().st_size
    columns = get("runs/demo/new_64").json()["columns"]
    assert columns["update"] == [1, 2] and columns["mean_loss"] == [1.0, None]
    assert columns["seconds_left"] == [9.0, 9.0]


def test_a_run_comes_with_its_settings_figures_warnings_and_samples(tmp_path, get):
    path = tmp_path / "about_64_metrics.jsonl"
    samples = [{"prompt": "a", "answer": "b"}]
    append(
        path,
        record(1, warnings=["few updates"], samples=samples, eval_loss=2.5, initial_eval_loss=9.0),
        record(2),
    )
    settings = {"settings": {"seed": 1, "save_dir": "/x"}}
    (tmp_path / "about_64_run.json").write_text(json.dumps(settings))
    answer = get("runs/about_64").json()
    assert answer["settings"] == {"stage": "none", "seed": "1"}  # not where it lies
    assert answer["warnings"] == [[1, "few updates"]] and answer["samples"] == [["a", [[1, "b"]]]]
    assert answer["figures"]["best_eval_loss"] == 2.5 and answer["figures"]["loss"] == 0.5
    assert answer["columns"]["update"] == [0, 1, 2] and answer["columns"]["eval_loss"] == [9.0, 2.5, None]
    assert answer["columns"]["tokens"][0] == 0 and answer["columns"]["mean_loss"] == [None, 1.0, 0.5]
    append(path, *map(record, range(3, 1500)))
    with open(path, "a") as file:
        file.write('{"update": 1500, "tok')  # it is being written
    columns = get("runs/about_64").json()["columns"]
    assert len(columns["update"]) <= 513 and columns["update"][-1] == 1499


def test_a_run_lives_as_long_as_its_process_holds_its_lock(tmp_path, get):
    """However long ago its last record was; where no lock says it, nobody knows."""
    for name in ("held_64", "free_64", "elsewhere_64"):
        append(tmp_path / f"{name}_metrics.jsonl", record(1))
        os.utime(tmp_path / f"{name}_metrics.jsonl", (1, 1))
    (tmp_path / ".free_64_save_dir.lock").touch()
    hold = "import sys; from common.files import lock_output; lock_output('held_64', save_dir=sys.argv[1])"
    hold += "; print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as holder:
        holder.stdout.readline()
        alive = {run["name"]: run["alive"] for run in get("runs").json()["runs"]}
        holder.kill()
    assert alive == {"held_64": True, "free_64": False, "elsewhere_64": None}
    assert not any(run["alive"] for run in get("runs").json()["runs"])


def test_no_name_leads_out_of_the_folder(tmp_path, get):
    append(tmp_path.parent / "beside_metrics.jsonl", record(1))
    append(tmp_path / "demo" / "new_64_metrics.jsonl", record(1))
    for name in (
        "../beside",
        "..%2fbeside",
        "demo/../../beside",
        str(tmp_path.parent / "beside"),
        "demo",
        "x",
    ):
        assert get(f"runs/{name}").status_code in (404, 307)


def test_one_bad_file_or_record_costs_itself(tmp_path, get):
    good = tmp_path / "good_64_metrics.jsonl"
    append(good, record(1, warnings=["half a character: \ud800"]))
    others = [record(2, warnings=5), record(3, samples="x"), record(4, samples=[1], skipped=7), {"update": 5}]
    append(good, *others, record(6, loss=10**400), record(7, big=1e308), record(8, big=1e308), record(9))
    with open(good, "a") as file:
        file.write("[1]\nnull\n{\n" + "[" * 100_000 + "\n")
    (tmp_path / "good_64_run.json").write_text('{"settings": [1]}')
    (tmp_path / os.fsdecode(b"caf\xe9_64_metrics.jsonl")).write_bytes(good.read_bytes())
    os.mkfifo(tmp_path / "pipe_64_metrics.jsonl")
    (tmp_path / "folder_64_metrics.jsonl").mkdir()
    gone = tmp_path / "gone_64_metrics.jsonl"
    gone.symlink_to(tmp_path / "nowhere")
    assert {run["name"] for run in get("runs").json()["runs"]} == {"good_64", "caf\\udce9_64"}
    for name in ("good_64", "caf%5Cudce9_64"):
        answer = get(f"runs/{name}").json()
        assert answer["columns"]["update"] == [1, 7, 8, 9] and answer["settings"] == {}
        assert answer["warnings"] == [[1, "half a character: \ud800"]]
    for name in ("pipe_64", "folder_64", "gone_64"):
        assert get(f"runs/{name}").status_code == 404
    good.chmod(0)
    if not os.access(good, os.R_OK):  # root reads everything
        assert get("runs/good_64").status_code == 404


def test_another_look_reads_what_was_added_and_a_rewritten_file_anew(tmp_path, get, monkeypatch):
    path, added = tmp_path / "a_64_metrics.jsonl", []
    add = Run.add
    monkeypatch.setattr(Run, "add", lambda run, one: added.append(one["update"]) or add(run, one))
    updates = lambda: get("runs/a_64").json()["columns"]["update"]  # noqa: E731
    append(path, record(1), record(2))
    with open(path, "a") as file:
        file.write('{"update": 3,')
    assert updates() == [1, 2]
    with open(path, "a") as file:
        file.write(json.dumps(record(3))[len('{"update": 3,') :] + "\n")
    assert updates() == updates() == [1, 2, 3] and added == [1, 2, 3]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))  # the run was resumed
    append(path, record(3, loss=1.0))
    assert updates() == [1, 2, 3] and added == [1, 2, 3] * 2
