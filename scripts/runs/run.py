"""What a run came to: its metrics file, and the settings in the file beside it. The table, the curves and the
page of `plot_metrics.py` and the web page show it."""

import json
import math
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.metrics import complete_lines, log_record
from trainer.weights.paths import settings_path

ENDING = "_metrics.jsonl"
FORECAST = "plan.json"  # in the folder of the runs, of scripts/plan.py
AXES = ("update", "tokens", "seconds")  # of the curves; each record has them
LATEST = (*AXES, "loss", "eval_loss", "reward", "eval_reward")  # figures: the last finite value counts
RESULTS = ("loss", "eval_loss", "best_eval_loss", "best_update", "reward", "eval_reward")
# settings that say where a run lies and how often it reports, not what it does
PLACES = {"save_weight", "save_dir", "checkpoint_dir", "cache_dir", "tensorboard_dir", "log_file", "log_dir"}
PLACES |= {"from_resume", "resume_from", "log_interval", "eval_interval", "save_interval"}
PROMPTS, ANSWERS, WARNINGS, CHARACTERS = 8, 5, 20, 400  # that are kept of a run; characters of a text
# records that are read at a time, some four milliseconds of work; seconds behind them
BLOCK, PAUSE = 500, 0.001


class Run:
    """What the records of a run come to; `add` takes them one by one, the oldest first.

    path: of the metrics file. records: their finite numbers by name. figures: values of RESULTS and AXES, as
    far as there are any. warnings: (update, text).
    samples: prompt -> (update, answer), the first and the last ones; an answer that did not change is not
    repeated. rollout: the same of the last rollout.
    skipped: updates that were. diverged: whether the last loss is no finite number.
    settings, about: what the file beside holds.
    """

    def __init__(self, path: Path = Path()) -> None:
        self.path = path
        self.records: list[dict[str, float]] = []
        self.figures: dict[str, float] = {}
        self.warnings: list[tuple[int, str]] = []
        self.samples: dict[str, list[tuple[int, str]]] = {}
        self.rollout: dict[str, list[tuple[int, str]]] = {}
        self.skipped, self.diverged = 0, False
        self.settings: dict[str, str] = {}
        self.about: dict[str, Any] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Take a record; one without a number on each of AXES is left out."""
        numbers = {name: float(value) for name, value in record.items() if is_finite_number(value)}
        if not numbers.keys() >= set(AXES):
            return
        for name in LATEST:
            field = "mean_loss" if name == "loss" and "mean_loss" in record else name
            if field in numbers:
                self.figures[name] = numbers[field]
        if numbers.get("eval_loss", math.inf) < self.figures.get("best_eval_loss", math.inf):
            self.figures |= {"best_eval_loss": numbers["eval_loss"], "best_update": record["update"]}
        self.diverged = "loss" in record and "loss" not in numbers
        self.skipped += len(record.get("skipped", ()))
        self.warnings += [(record["update"], warning) for warning in record.get("warnings", ())]
        del self.warnings[WARNINGS:]
        self.add_samples(record["update"], record.get("samples", ()))
        self.records.append(numbers)

    def add_samples(self, update: int, samples: list[dict[str, Any]]) -> None:
        """Take what the model wrote at an update; a rollout replaces the one before."""
        if any("reward" in sample for sample in samples):
            self.rollout = {}
        for sample in samples[:PROMPTS]:
            kept = self.rollout if "reward" in sample else self.samples
            answers = kept.setdefault(text_of(sample["prompt"]), [])
            answer = text_of(sample["answer"])
            if not answers or answers[-1][1] != answer:
                answers.append((update, answer))
            del answers[1 : 1 - ANSWERS]

    def columns(self, points: int) -> dict[str, list[float | None]]:
        """Each field's values, of so many points at most: the mean of a point's records, of AXES and
        `seconds_left` the last value. None where there is no finite number."""
        stride, columns = max(1, math.ceil(len(self.records) / points)), {}
        for name in dict.fromkeys(chain.from_iterable(self.records)):
            values = [record.get(name, math.nan) for record in self.records]
            is_last = name in (*AXES, "seconds_left")
            filler = values[-1] if is_last else math.nan
            values += [filler] * (-len(values) % stride)
            groups = np.ma.masked_invalid(np.reshape(values, (-1, stride)))  # [points, stride]
            if is_last:
                columns[name] = groups[:, -1].tolist()
            else:
                means = groups.mean(axis=1).tolist()
                columns[name] = [None if mean is None else float(f"{mean:.6g}") for mean in means]
        return columns


def is_finite_number(value: Any) -> bool:
    """Whether a value of a file is a finite number."""
    return type(value) in (float, int) and math.isfinite(value)


def text_of(value: Any) -> str:
    """A value of a file as text of bounded length, as a command line has it."""
    if value is None:
        return "none"
    text = str(int(value)) if isinstance(value, bool) else str(value)
    return text if len(text) <= CHARACTERS else text[:CHARACTERS] + " …"


def read_run(path: Path) -> Run:
    """The run of a metrics file, read with pauses, in which other threads work. Raises OSError, with what to
    do."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give metrics files, such as out/full_sft_512{ENDING}"
        )
    run = Run(path)
    for number, line in enumerate(complete_lines(path), 1):
        run.add(log_record(line) or {})
        if number % BLOCK == 0:
            time.sleep(PAUSE)
    run.settings, run.about = read_settings(path)
    return run


def read_settings(metrics: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The settings of a run, with its stage, and what else their file beside the metrics holds; nothing
    without a readable file."""
    try:
        content = json.loads(settings_path(metrics).read_bytes())
        settings = {"stage": content.pop("stage", None)} | content.pop("settings")
    except (OSError, ValueError, LookupError):
        return {}, {}
    return {name: text_of(value) for name, value in settings.items()}, content


def differing(runs: list[dict[str, str]]) -> list[str]:
    """The settings that are not the same in all runs that have settings, other than PLACES."""
    known = [settings for settings in runs if settings]
    names = dict.fromkeys(name for settings in known for name in settings if name not in PLACES)
    return [name for name in names if len({settings.get(name) for settings in known}) > 1]


def shown(figures: dict[str, float], name: str) -> str:
    """A figure of a run as text, `-` if it has none."""
    if name not in figures:
        return "-"
    if name in ("update", "tokens", "best_update"):
        return f"{figures[name]:,.0f}"
    return f"{figures[name]:,.1f}" if name == "seconds" else f"{figures[name]:.4f}"
