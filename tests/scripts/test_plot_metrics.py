"""Curves of runs: what is drawn where, and what the user is told when it cannot be."""

import json
from html.parser import HTMLParser
from typing import ClassVar

import pytest

from common.errors import UserError
from scripts import plot_metrics
from scripts.runs import figures
from scripts.runs.run import Run
from tests.conftest import write_jsonl
from tests.stage_process import run

SCRIPT = "scripts/plot_metrics.py"


def record(update: int, **more) -> dict:
    common = {"update": update, "tokens": 100 * update, "seconds": 2.0 * update, "tokens_per_second": 50.0}
    return {**common, "loss": 4.0 - update, "learning_rate": 1e-3, "grad_norm": 1.0, **more}


def run_of(records: list[dict]) -> Run:
    found = Run()
    for each in records:
        found.add(each)
    return found


def draw(runs: dict[str, list[dict]], *how, **more):
    return figures.draw({name: run_of(records) for name, records in runs.items()}, *how, **more)


def drawn(figure) -> dict[str, dict[str, tuple[list, list]]]:
    """Title of a panel -> name of a curve -> x and y values."""
    return {
        axes.get_title(): {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines}
        for axes in figure.axes
    }


def test_one_panel_per_quantity_and_one_curve_per_run():
    runs = {"a": [record(1, initial_eval_loss=4.5), record(2, eval_loss=2.5)], "b": [record(1), record(3)]}
    panels = drawn(draw(runs, "update"))
    assert list(panels) == ["loss", "learning_rate", "grad_norm", "tokens_per_second"]
    losses = {"a": ([1, 2], [3.0, 2.0]), "b": ([1, 3], [3.0, 1.0])}
    assert panels["loss"] == losses | {"a, held-out": ([1, 2], [4.5, 2.5])}
    assert list(drawn(draw(runs, "update", panels=["grad_norm"]))) == ["grad_norm"]
    with pytest.raises(UserError, match="no run has any of these fields"):
        draw(runs, "update", panels=["dead_experts"])


def test_the_mean_loss_is_drawn_where_there_is_one_and_null_leaves_a_gap():
    run = [record(1, mean_loss=9.0), record(2, mean_loss=None, loss=None), record(3)]
    _, values = drawn(draw({"a": run}, "update"))["loss"]["a"]
    assert values[0] == 9.0 and values[1] != values[1] and values[2] == 1.0


def test_a_folder_stands_for_its_runs(tmp_path, call, error_line):
    for name in ("b_64", "a_64"):
        write_jsonl(tmp_path / f"{name}_metrics.jsonl", [record(1)])
    out = call(plot_metrics, tmp_path, tmp_path / "b_64_metrics.jsonl").stdout
    assert out.split()[:3] == ["run", "a_64", "b_64"]
    (tmp_path / "empty").mkdir()
    assert "holds no metrics" in error_line(plot_metrics, tmp_path / "empty")
    assert "add where: --png FILE" in error_line(plot_metrics, tmp_path, "--panels", "loss")
    assert "--smoothing" in error_line(plot_metrics, tmp_path, "--smoothing", 1)


def test_a_png_of_several_runs_is_written_by_the_command(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "sft_64_metrics.jsonl", [record(1, expert_load=[0.5]), record(2)])
    files = [tmp_path / folder / "sft_64_metrics.jsonl" for folder in ("one", "two")]
    done = run(SCRIPT, [*files, "--x", "tokens", "--png", tmp_path / "curves.png"])
    head, *_, wrote = done.out.splitlines()
    assert wrote == f"wrote {tmp_path / 'curves.png'}"
    # of the same name: with their folders
    assert head.split() == ["run", str(tmp_path / "one/sft_64"), str(tmp_path / "two/sft_64")]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_read_or_written_is_one_line(tmp_path, error_line):
    assert "does not exist" in error_line(plot_metrics, tmp_path / "x_metrics.jsonl")
    path = write_jsonl(tmp_path / "x_metrics.jsonl", [{"update": 1}])
    assert f"{path} holds no log records" in error_line(plot_metrics, path)
    write_jsonl(path, [record(1)])
    for name in ("missing/curves.png", "curves.nonsense"):
        assert "cannot be written" in error_line(plot_metrics, path, "--png", tmp_path / name)


# --- the table


def write_run(folder, name, settings: dict | None = None, records=()):
    """The files of a run."""
    if settings is not None:
        (folder / f"{name}_run.json").write_text(json.dumps({"settings": settings, "stage": "a.py"}))
    return write_jsonl(folder / f"{name}_metrics.jsonl", list(records) or [record(1)])


def table(*paths) -> list[list[str]]:
    return plot_metrics.run_table(plot_metrics.read_runs([*map(str, paths)]))


def test_the_table_has_the_settings_that_differ_the_best_run_first(tmp_path):
    same = {"epochs": 2, "use_moe": True, "save_dir": "/x", "reward": "exact"}
    falling = [record(i, eval_loss=4.0 - i / 10) for i in range(1, 5)]
    rising = [record(1, eval_loss=2.0), record(2), record(3, eval_loss=2.5, loss=None)]
    write_run(tmp_path, "a", same | {"learning_rate": 1e-3, "save_weight": "a"}, falling)
    write_run(tmp_path, "b", same | {"learning_rate": 3e-3, "save_weight": "b", "packing": False}, rising)
    write_run(tmp_path, "bare")
    rows = [
        "run loss eval_loss best_eval_loss best_update update tokens seconds learning_rate packing",
        "b 2.0000 2.5000 2.0000 1 3 300 6.0 0.003 0",
        "a 0.0000 3.6000 3.6000 4 4 400 8.0 0.001 -",
        "bare 3.0000 - - - 1 100 2.0 - -",
    ]
    found = [" ".join(row) for row in zip(*table(tmp_path), strict=True)]
    assert found == rows  # few runs are columns
    write_run(tmp_path, "zz")
    assert [" ".join(row) for row in table(tmp_path)][:4] == rows


def test_a_run_from_rewards_shows_them(tmp_path):
    write_run(
        tmp_path, "a", None, [record(1, reward=0.25, eval_reward=0.5, eval_loss=-0.5), record(2, reward=None)]
    )
    found = dict(table(tmp_path))
    names = ("reward", "eval_reward", "best_update")
    assert [found[name] for name in names] == ["0.2500", "0.5000", "1"]
    panels = drawn(figures.draw(plot_metrics.read_runs([str(tmp_path)]), "update"))
    # minus it is no loss to draw
    assert [*panels["loss"]] == ["a"] and [*panels["reward"]] == ["a", "a, held-out"]


def test_what_is_written_this_moment_or_damaged_does_not_hide_the_other_runs(tmp_path, capsys):
    write_run(tmp_path, "good", None, [record(1), record(2)])
    (tmp_path / "started_metrics.jsonl").write_text("")
    with open(tmp_path / "good_metrics.jsonl", "ab") as file:
        file.write(b'\xff\n{"update": 3}\n{"update": 4, "tok')
    assert table(tmp_path)[0] == ["run", "good"] and ["update", "2"] in table(tmp_path)
    assert "started_metrics.jsonl holds no log records" in capsys.readouterr().err
    (tmp_path / "good_metrics.jsonl").unlink()
    with pytest.raises(UserError, match="started"):
        table(tmp_path)


# --- the page


def test_the_html_page_holds_everything_and_takes_no_text_for_markup(tmp_path, call):
    attack = "<script>alert(1)</script>\"'&"
    samples = [{"prompt": attack, "answer": attack + "x" * 9999}]
    records = [
        record(1, warnings=[attack], samples=samples),
        record(2, samples=[{"prompt": attack, "answer": "B"}]),
    ]
    name = "a<img src=x>_中\x1b[31m"
    write_run(tmp_path, name, {"data_path": attack, "seed": 1}, records)
    write_run(tmp_path, "plain", {"seed": 2}, [record(1, eval_loss=2.0)])
    call(plot_metrics, tmp_path, "--html", tmp_path / "runs.html")
    page = (tmp_path / "runs.html").read_text(encoding="utf-8")

    class Tags(HTMLParser):
        found: ClassVar[set[str]] = set()
        texts: ClassVar[list[str]] = []

        def handle_starttag(self, tag, attributes):
            self.found.add(tag)

        def handle_data(self, data):
            self.texts.append(data)

    Tags().feed(page)
    assert not Tags.found & {"script", "img", "link", "iframe", "a"} and {"svg", "table"} <= Tags.found
    text = " ".join(Tags.texts)
    assert text.count(attack) >= 4 and "update 1:" in text and "a<img src=x>_中\\x1b[31m" in text
    assert "xxx …" in text and "x" * 500 not in text and "\x1b" not in page
    assert len(page) < 200_000 and "default-src 'none'" in page
