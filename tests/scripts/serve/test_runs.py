"""The runs that the page draws: which there are, their curves also while they grow, nothing from elsewhere."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from scripts.serve.page import runs_router


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
    append(path, record(1, warnings=["few updates"], samples=samples, eval_loss=2.5), record(2))
    settings = {"settings": {"seed": 1, "save_dir": "/x"}}
    (tmp_path / "about_64_run.json").write_text(json.dumps(settings))
    answer = get("runs/about_64").json()
    assert answer["settings"] == {"stage": "none", "seed": "1"}  # not where it lies
    assert answer["warnings"] == [[1, "few updates"]] and answer["samples"] == [["a", [[1, "b"]]]]
    assert answer["figures"]["best_eval_loss"] == 2.5 and answer["figures"]["loss"] == 0.5
    append(path, *map(record, range(3, 1500)))
    with open(path, "a") as file:
        file.write('{"update": 1500, "tok')  # it is being written
    columns = get("runs/about_64").json()["columns"]
    assert len(columns["update"]) <= 512 and columns["update"][-1] == 1499


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
