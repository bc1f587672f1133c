"""Curves of runs: what is drawn where, and what the user is told when it cannot be."""

import json
from html.parser import HTMLParser
from typing import ClassVar

import pytest

from common.errors import UserError
from scripts import plot_metrics
from scripts.runs import figures
from scripts.runs.run import Run
from scripts.text_table import text_table
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
    runs = {"a": [record(1), record(2, eval_loss=2.5)], "b": [record(1), record(3)]}
    panels = drawn(draw(runs, "update"))
    assert list(panels) == ["loss", "learning_rate", "grad_norm", "tokens_per_second"]
    losses = {"a": ([1, 2], [3.0, 2.0]), "b": ([1, 3], [3.0, 1.0])}
    assert panels["loss"] == losses | {"a, held-out": ([2], [2.5])}
    only_b = drawn(draw({"b": runs["b"]}, "update"))
    assert only_b["loss"] == {"b": losses["b"]}  # nothing more to draw


def test_the_mean_loss_is_drawn_where_there_is_one_and_null_leaves_a_gap():
    run = [record(1, mean_loss=9.0), record(2, mean_loss=None, loss=None), record(3)]
    _, values = drawn(draw({"a": run}, "update"))["loss"]["a"]
    assert values[0] == 9.0 and values[1] != values[1] and values[2] == 1.0


def test_panels_are_chosen_by_name():
    runs = {"a": [record(1), record(2)]}
    assert list(drawn(draw(runs, "update", panels=["grad_norm", "eval_loss"]))) == ["grad_norm"]
    with pytest.raises(UserError, match="no run has any of these fields"):
        draw(runs, "update", panels=["dead_experts"])


def test_a_folder_stands_for_its_runs(tmp_path, call, error_line):
    for name in ("b_64", "a_64"):
        write_jsonl(tmp_path / f"{name}_metrics.jsonl", [record(1)])
    out = call(plot_metrics, tmp_path, tmp_path / "b_64_metrics.jsonl").stdout
    assert [line.split()[0] for line in out.splitlines()] == ["run", "a_64", "b_64"]
    (tmp_path / "empty").mkdir()
    assert "holds no metrics" in error_line(plot_metrics, tmp_path / "empty")
    assert "add where to: --png FILE" in error_line(plot_metrics, tmp_path, "--panels", "loss")
    assert "--smoothing" in error_line(plot_metrics, tmp_path, "--smoothing", 1)


def test_a_png_of_several_runs_is_written_by_the_command(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "sft_64_metrics.jsonl", [record(1, expert_load=[0.5]), record(2)])
    files = [tmp_path / folder / "sft_64_metrics.jsonl" for folder in ("one", "two")]
    done = run(SCRIPT, [*files, "--x", "tokens", "--png", tmp_path / "curves.png"])
    head, *rows, wrote = done.out.splitlines()
    assert head.startswith("run ") and wrote == f"wrote {tmp_path / 'curves.png'}"
    names = [row.split()[0] for row in rows]  # of the same name: with their folders
    assert names == [str(tmp_path / "one/sft_64"), str(tmp_path / "two/sft_64")]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "does not exist"),
        ("", "holds no log records"),
        ("[1]\n", "is not a metrics file"),
        (json.dumps({"update": 1}) + "\n", "is not a metrics file"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_named(text, told, tmp_path, error_line):
    path = tmp_path / "x_metrics.jsonl"
    if text is not None:
        path.write_text(text)
    line = error_line(plot_metrics, path)
    assert told in line and str(path) in line


@pytest.mark.parametrize("name", ["missing/curves.png", "curves.nonsense"])
def test_a_picture_that_cannot_be_written_is_one_line(name, tmp_path, error_line):
    metrics = write_jsonl(tmp_path / "x_metrics.jsonl", [record(1)])
    assert "cannot be written" in error_line(plot_metrics, metrics, "--png", tmp_path / name)


# --- the table


def write_run(folder, name, settings: dict | str | None = None, records=()):
    """The files of a run."""
    if settings is not None:
        text = settings if isinstance(settings, str) else json.dumps({"settings": settings, "stage": "a.py"})
        (folder / f"{name}_run.json").write_text(text)
    return write_jsonl(folder / f"{name}_metrics.jsonl", list(records) or [record(1)])


def table(*paths) -> list[list[str]]:
    rows = plot_metrics.run_rows(plot_metrics.read_runs([*map(str, paths)]))
    return [line.split() for line in text_table(rows).split("\n")]


def test_the_table_has_the_settings_that_differ_the_best_run_first(tmp_path):
    same = {"epochs": 2, "use_moe": True, "save_dir": "/x", "reward": "exact"}
    falling = [record(i, eval_loss=4.0 - i / 10) for i in range(1, 5)]
    rising = [record(1, eval_loss=2.0), record(2), record(3, eval_loss=2.5, loss=None)]
    write_run(tmp_path, "a", same | {"learning_rate": 1e-3, "save_weight": "a"}, falling)
    write_run(tmp_path, "b", same | {"learning_rate": 3e-3, "save_weight": "b", "packing": False}, rising)
    write_run(tmp_path, "damaged", '{"settings": [')
    head, *rows = table(tmp_path)
    figures = ["loss", "eval_loss", "best_eval_loss", "best_update", "update", "tokens", "seconds"]
    assert head == ["run", *figures, "learning_rate", "packing"]
    assert [" ".join(row) for row in rows] == [
        "b 2.0000 2.5000 2.0000 1 3 300 6.0 0.003 0",
        "a 0.0000 3.6000 3.6000 4 4 400 8.0 0.001 -",
        "damaged 3.0000 - - - 1 100 2.0 - -",
    ]
    assert table(tmp_path / "damaged_metrics.jsonl")[0] == ["run", "loss", "update", "tokens", "seconds"]


def test_a_table_fits_a_terminal():
    """Chinese characters take two columns; columns that do not fit stand below, beside the names."""
    rows = [["run", "loss", "data"], ["中文", "1.0", "x" * 40], ["a", "2.0", "y"]]
    first, second = plot_metrics.fitting_blocks(rows, 20)
    assert first == [row[:2] for row in rows] and plot_metrics.fitting_blocks(rows[::2], 80) == [rows[::2]]
    assert second == [["run", "data"], ["中文", "…" + "x" * 27], ["a", "y"]]
    assert text_table(first).split("\n") == ["run   loss", "中文   1.0", "a      2.0"]


def test_a_run_from_rewards_shows_them(tmp_path):
    write_run(
        tmp_path, "a", None, [record(1, reward=0.25, eval_reward=0.5, eval_loss=-0.5), record(2, reward=None)]
    )
    head, row = table(tmp_path)
    found = dict(zip(head, row, strict=True))
    names = ("reward", "eval_reward", "best_update")
    assert [found[name] for name in names] == ["0.2500", "0.5000", "1"]
    panels = drawn(figures.draw(plot_metrics.read_runs([str(tmp_path)]), "update"))
    # minus it is no loss to draw
    assert [*panels["loss"]] == ["a"] and [*panels["reward"]] == ["a", "a, held-out"]


def test_what_is_written_this_moment_or_damaged_does_not_hide_the_other_runs(tmp_path, capsys):
    write_run(tmp_path, "good", None, [record(1), record(2)])
    (tmp_path / "started_metrics.jsonl").write_text("")
    (tmp_path / "other_metrics.jsonl").write_text("words\n")
    with open(tmp_path / "good_metrics.jsonl", "ab") as file:
        file.write(b'\xff\n{"update": 3}\n{"update": 4, "tok')
    assert [row[0] for row in table(tmp_path)] == ["run", "good"]
    told = capsys.readouterr().err
    assert "good_metrics.jsonl: damaged lines, left out: 2" in told and "started" in told and "other" in told
    (tmp_path / "good_metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"other_metrics.jsonl holds no log records.*started"):
        table(tmp_path)


# --- the page


def test_the_html_page_holds_everything_and_takes_no_text_for_markup(tmp_path, call):
    attack = "<script>alert(1)</script>\"'&"
    samples = [{"prompt": attack, "answer": attack + "x" * 9999}, {"prompt": 1}, "no sample", None]
    records = [
        record(1, warnings=[attack, 3], samples=samples),
        record(2, samples=[{"prompt": attack, "answer": "B"}]),
    ]
    name = "a<img src=x>$b_中\x1b[31m"
    write_run(tmp_path, name, {"data_path": attack, "seed": 1}, records)
    write_run(tmp_path, "_plain", {"seed": 2}, [record(1, eval_loss=2.0)])
    call(plot_metrics, tmp_path, "--html", tmp_path / "runs.html")
    page = (tmp_path / "runs.html").read_text(encoding="utf-8")

    class Tags(HTMLParser):
        found: ClassVar[set[str]] = set()
        texts: ClassVar[list[str]] = []

        def handle_starttag(self, tag, attributes):
            self.found.add(tag)
            for key, value in attributes:
                assert not key.startswith("on") and "url(" not in str(value).replace("url(#", ""), (tag, key)
                assert key not in ("src", "href") and (not key.endswith("href") or value.startswith("#")), (
                    tag,
                    key,
                )

        def handle_data(self, data):
            self.texts.append(data)

    Tags().feed(page)
    assert (
        not Tags.found & {"script", "img", "link", "iframe", "a", "image"} and {"svg", "table"} <= Tags.found
    )
    text = " ".join(Tags.texts)
    assert text.count(attack) >= 4 and "update 1:" in text and "a<img src=x>$b_中\\x1b[31m" in text
    assert "xxx …" in text and "x" * 500 not in text and "\x1b" not in page
    assert len(page) < 200_000 and "default-src 'none'" in page
