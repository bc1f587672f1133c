"""Curves of runs: what is drawn where, and what the user is told when it cannot be."""

import json
import sys

import pytest

from common.errors import UserError
from scripts import plot_metrics
from tests.conftest import write_jsonl
from tests.stage_process import run

SCRIPT = "scripts/plot_metrics.py"


def record(update: int, **more) -> dict:
    common = {"update": update, "tokens": 100 * update, "seconds": 2.0 * update, "tokens_per_second": 50.0}
    return {**common, "loss": 4.0 - update, "learning_rate": 1e-3, "grad_norm": 1.0, **more}


def drawn(figure) -> dict[str, dict[str, tuple[list, list]]]:
    """Title of a panel -> name of a curve -> x and y values."""
    return {
        axes.get_title(): {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines}
        for axes in figure.axes
    }


@pytest.fixture
def start(monkeypatch):
    def run(*args):
        monkeypatch.setattr(sys, "argv", [SCRIPT, *map(str, args)])
        plot_metrics.main()

    return run


def test_one_panel_per_quantity_and_one_curve_per_run():
    runs = {"a": [record(1), record(2, eval_loss=2.5)], "b": [record(1), record(3)]}
    panels = drawn(plot_metrics.draw(runs, "update"))
    assert list(panels) == ["loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second"]
    assert panels["loss"] == {"a": ([1, 2], [3.0, 2.0]), "b": ([1, 3], [3.0, 1.0])}
    assert panels["eval_loss"]["a"] == ([2], [2.5])
    assert "eval_loss" not in drawn(plot_metrics.draw({"b": runs["b"]}, "update"))  # nothing to draw


def test_a_run_over_another_one_lets_it_show():
    records = [{"update": i, "tokens": i, "seconds": i, "loss": 1.0} for i in range(60)]
    lines = plot_metrics.draw({"a": records, "b": records, "c": records}, "update").axes[0].get_lines()
    assert [line.get_linestyle() for line in lines] == ["-", "--", ":"]


def test_a_run_that_learns_from_rewards_has_panels_of_its_own():
    figures = {"reward": 0.25, "kl": 0.5, "entropy": 1.5, "completion_length": 3.0, "samples": [{"reward": 1.0}]}
    run = [record(1, **figures), record(2, **figures, eval_reward=0.75)]
    panels = drawn(plot_metrics.draw({"a": run}, "update"))
    values = {title: lines["a"][1] for title, lines in panels.items()}
    assert values["reward"] == [0.25, 0.25] and values["eval_reward"] == [0.75]
    assert values["kl"] == [0.5, 0.5] and values["entropy"] == [1.5, 1.5]
    assert values["completion_length"] == [3.0, 3.0]


@pytest.mark.parametrize(("x", "expected"), [("update", [1, 2]), ("tokens", [100, 200]), ("seconds", [2.0, 4.0])])
def test_the_x_axis_is_the_chosen_one(x, expected):
    assert drawn(plot_metrics.draw({"a": [record(1), record(2)]}, x))["loss"]["a"][0] == expected


def test_the_mean_loss_is_drawn_where_there_is_one_and_null_leaves_a_gap():
    run = [record(1, mean_loss=9.0), record(2, mean_loss=None, loss=None), record(3)]
    _, values = drawn(plot_metrics.draw({"a": run}, "update"))["loss"]["a"]
    assert values[0] == 9.0 and values[1] != values[1] and values[2] == 1.0


def test_panels_are_chosen_by_name():
    runs = {"a": [record(1), record(2)]}
    assert list(drawn(plot_metrics.draw(runs, "update", panels=["grad_norm", "eval_loss"]))) == ["grad_norm"]
    with pytest.raises(UserError, match="no run has any of these fields"):
        plot_metrics.draw(runs, "update", panels=["dead_experts"])


def test_a_folder_stands_for_its_runs(tmp_path, start, monkeypatch):
    seen = []
    original = plot_metrics.draw
    monkeypatch.setattr(plot_metrics, "draw", lambda runs, *how: seen.append(list(runs)) or original(runs, *how))
    for name in ("b_64", "a_64"):
        write_jsonl(tmp_path / f"{name}_metrics.jsonl", [record(1)])
    start(tmp_path, tmp_path / "b_64_metrics.jsonl", "--png", tmp_path / "one.png")
    assert seen == [["a_64", "b_64"]]
    with pytest.raises(UserError, match="holds no metrics"):
        (tmp_path / "empty").mkdir() or start(tmp_path / "empty")
    with pytest.raises(UserError, match="--smoothing"):
        start(tmp_path, "--smoothing", 1)


def test_a_png_of_several_runs_is_written_by_the_command(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "sft_64_metrics.jsonl", [record(1, expert_load=[0.5]), record(2)])
    files = [tmp_path / folder / "sft_64_metrics.jsonl" for folder in ("one", "two")]
    done = run(SCRIPT, [*files, "--x", "tokens", "--png", tmp_path / "curves.png"])
    assert done.out == f"wrote {tmp_path / 'curves.png'}\n"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_the_same_file_name_keep_their_folders(tmp_path, start, monkeypatch):
    seen = []
    original = plot_metrics.draw
    monkeypatch.setattr(plot_metrics, "draw", lambda runs, *how: seen.append(list(runs)) or original(runs, *how))
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "sft_64_metrics.jsonl", [record(1)])
    first, second = (tmp_path / folder / "sft_64_metrics.jsonl" for folder in ("one", "two"))
    start(first, second, "--png", tmp_path / "both.png")
    start(first, "--png", tmp_path / "one.png")
    assert seen == [[str(tmp_path / "one/sft_64"), str(tmp_path / "two/sft_64")], ["sft_64"]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "does not exist"),
        ("", "holds no records yet"),
        ("not json\n", "x_metrics.jsonl:1 is not a log record"),
        ("[1]\n", "x_metrics.jsonl:1 is not a log record"),
        (json.dumps({"update": 1}) + "\n", "is not a metrics file"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_named(text, told, tmp_path, start):
    path = tmp_path / "x_metrics.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=told) as error:
        start(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["missing/curves.png", "curves.nonsense"])
def test_a_picture_that_cannot_be_written_is_one_line(name, tmp_path, start):
    metrics = write_jsonl(tmp_path / "x_metrics.jsonl", [record(1)])
    with pytest.raises(UserError, match="cannot be written"):
        start(metrics, "--png", tmp_path / name)


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, start, monkeypatch):
    metrics = write_jsonl(tmp_path / "x_metrics.jsonl", [record(1)])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="needs matplotlib: pip install"):
        start(metrics, "--png", tmp_path / "curves.png")
