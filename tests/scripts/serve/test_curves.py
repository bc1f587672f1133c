"""The curves that the web page gets: which runs, thinned how, also while they grow; nothing from
elsewhere."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from scripts.serve.curves import POINTS, curves
from tests.scripts.serve.scripted_server import ScriptedServer


def record(update: int, **more: Any) -> dict:
    base = {"update": update, "tokens": 100 * update, "seconds": update / 2, "loss": 5.0}
    base |= {"mean_loss": 1 / update}
    return {**base, "learning_rate": 1e-3, "grad_norm": float(update % 7), "seconds_left": 9.0, **more}


def append(path: Path, *records: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def get(folder):
    with ScriptedServer(folder) as server:

        def ask(path: str) -> Any:
            with urlopen(f"{server.address}api/{path}", timeout=10) as answer:
                return json.loads(answer.read())

        yield ask


def test_runs_of_the_folder_and_the_folders_in_it_newest_first(folder, get):
    append(folder / "old_64_metrics.jsonl", record(1))
    append(folder / "demo" / "new_64_metrics.jsonl", record(1), record(2))
    append(folder / "other.jsonl", record(1))
    os.utime(folder / "old_64_metrics.jsonl", (1, 1))
    runs = get("runs")["runs"]
    assert [run["name"] for run in runs] == ["demo/new_64", "old_64"]
    assert runs[0]["size"] == (folder / "demo/new_64_metrics.jsonl").stat().st_size and runs[0]["age"] < 100
    answer = get("runs/demo/new_64")
    assert answer["columns"]["update"] == [1, 2] and answer["columns"]["mean_loss"] == [1.0, 0.5]


def test_no_name_leads_out_of_the_folder(folder, get, tmp_path):
    append(tmp_path / "secret_metrics.jsonl", record(1))
    append(folder.parent / "beside_metrics.jsonl", record(1))
    (folder / "link_metrics.jsonl").symlink_to(tmp_path / "secret_metrics.jsonl")
    (folder / "linked").symlink_to(tmp_path)
    names = ["../beside", "link", "linked/secret", str(tmp_path / "secret"), "demo/../../beside", "", "\0"]
    names += ["demo"]
    assert not {run["name"] for run in get("runs")["runs"]} & {*names}
    for name in [*names, *map(quote, names), quote("../beside", safe="")]:
        with pytest.raises((HTTPError, ValueError)) as refused:
            get(f"runs/{quote(name)}" if "\0" in name else f"runs/{name}")
        assert refused.type is ValueError or refused.value.code in (404, 307)


def test_a_run_comes_with_its_settings_figures_warnings_and_samples(folder, get, tmp_path):
    more = {"warnings": ["few updates"], "samples": [{"prompt": "a", "answer": "x" * 9999}, {"prompt": 1}, 2]}
    append(
        folder / "about_64_metrics.jsonl",
        record(1, **more, eval_loss=2.5),
        record(2, eval_loss=2.75, reward=None),
    )
    answer = get("runs/about_64")
    assert answer["settings"] == {} and answer["warnings"] == [[1, "few updates"]]
    assert answer["samples"] == [["a", [[1, "x" * 400 + " …"]]], ["1", [[1, "none"]]]]
    figures = {"update": 2, "tokens": 200, "seconds": 1.0, "loss": 0.5, "eval_loss": 2.75}
    assert answer["figures"] == figures | {"best_eval_loss": 2.5, "best_update": 1}
    about = folder / "about_64_run.json"
    about.write_text(
        json.dumps({"settings": {"seed": 1, "packing": True, "save_dir": "/x", "odd": math.nan}})
    )
    settings = {"stage": "none", "seed": "1", "packing": "1", "odd": "nan"}
    assert get("runs/about_64")["settings"] == settings  # although the metrics did not change
    about.write_text('{"settings": [')
    assert get("runs/about_64")["settings"] == {}
    (tmp_path / "secret.json").write_text(json.dumps({"settings": {"seed": 1}}))
    about.unlink()
    about.symlink_to(tmp_path / "secret.json")
    assert get("runs/about_64")["settings"] == {}


def test_damaged_lines_are_left_out_and_counted(folder, get):
    path = folder / "damaged_64_metrics.jsonl"
    append(path, record(1))
    with open(path, "ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"update": "2"}\n' + b"[" * 5000 + b"\n\n")
    append(path, record(3, mean_loss=None, grad_norm=math.inf, expert_load=["x"], eval_loss=2.5))
    answer = get("runs/damaged_64")
    assert (answer["records"], answer["damaged"]) == (2, 5)
    assert answer["columns"]["mean_loss"] == [1.0, None] and answer["columns"]["grad_norm"] == [1.0, None]
    assert answer["columns"]["eval_loss"] == [None, 2.5] and "expert_load" not in answer["columns"]


def test_a_growing_file_is_read_on_and_a_replaced_one_anew(folder, get):
    path = folder / "growing_64_metrics.jsonl"
    append(path, *map(record, (1, 2, 3)))
    assert get("runs/growing_64")["columns"]["update"] == [1, 2, 3]
    append(path, record(4))
    with open(path, "a") as file:
        file.write('{"update": 5, "tokens": 500, "seconds": 2.5, "mean')  # half a line: it is being written
    assert get("runs/growing_64")["columns"]["update"] == [1, 2, 3, 4]
    with open(path, "a") as file:
        file.write('_loss": 0.25, "new": 7}\n')
    columns = get("runs/growing_64")["columns"]
    assert columns["mean_loss"][3:] == [0.25, 0.25] and columns["new"] == [None] * 4 + [7]
    append(path.with_suffix(".new"), record(1, mean_loss=7.0), *map(record, range(2, 7)))
    path.with_suffix(".new").replace(path)  # resumed from an earlier update, or another run of this name
    answer = get("runs/growing_64")
    assert (answer["records"], answer["damaged"]) == (6, 0) and answer["columns"]["mean_loss"][0] == 7.0
    assert "new" not in answer["columns"]


@pytest.mark.parametrize("count", [POINTS, POINTS + 1, 3 * POINTS + 5])
def test_a_long_run_is_thinned_to_means_and_extremes(tmp_path, count):
    rng = random.Random(count)
    losses = [rng.uniform(0, 9) for _ in range(count)]
    path = tmp_path / "long_metrics.jsonl"
    more = {"expert_load": [0.25, 0.75], "skipped": [{"update": 1}, {"update": 2}]}
    append(path, *(record(i, mean_loss=loss, **more) for i, loss in enumerate(losses, 1)))
    answer = curves(path, POINTS)
    stride, columns = answer["stride"], answer["columns"]
    assert len(columns["update"]) <= POINTS < 2 * math.ceil(count / stride) + 2
    groups = [losses[at : at + stride] for at in range(0, count, stride)]
    assert columns["mean_loss"] == pytest.approx([sum(group) / len(group) for group in groups], rel=1e-5)
    assert columns["update"] == [min(count, at + stride) for at in range(0, count, stride)]
    assert columns["expert_load"] == [[0.25, 0.75]] * len(groups)
    assert columns["skipped"] == [2 * len(group) for group in groups]
    if stride > 1:
        assert columns["mean_loss_high"] == pytest.approx([max(group) for group in groups], rel=1e-5)
        assert columns["mean_loss_low"] == pytest.approx([min(group) for group in groups], rel=1e-5)
