"""A run as read from its metrics file and its settings file, for the table, the curves and the report of
`plot_metrics.py` and for the web page."""

import math
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.files import open_regular, read_object
from trainer.report.metrics import log_record
from trainer.weights.paths import METRICS_SUFFIX, settings_path

PLAN_FILE = "plan.json"  # written by scripts/plan.py into the folder of the runs
AXES = ("update", "tokens", "seconds")  # x axes of the curves; every record has them
LATEST_FIELDS = (*AXES, "loss", "eval_loss", "reward", "eval_reward")  # latest finite values
RESULTS = ("loss", "eval_loss", "best_eval_loss", "best_update", "reward", "eval_reward")
# settings that change the files and the intervals of a run, but not what it computes
LOCATION_SETTINGS = {
    "save_weight",
    "save_dir",
    "checkpoint_dir",
    "cache_dir",
    "tensorboard_dir",
    "log_file",
    "log_dir",
}
LOCATION_SETTINGS |= {"from_resume", "resume_from", "log_interval", "eval_interval", "save_interval"}
MAX_PROMPTS, MAX_ANSWERS, MAX_WARNINGS, MAX_CHARACTERS = (
    8,
    5,
    20,
    400,
)  # that are kept of a run; characters of a text
# records that are read without a pause (about two milliseconds of work); seconds of a pause
RECORDS_PER_PAUSE, PAUSE = 100, 0.001
# raised for a record that no run would write
WRONG_TYPES = (TypeError, AttributeError, ValueError, LookupError, ArithmeticError, RecursionError)


class Run:
    """The content of a run's records. `add` takes them one by one, the oldest first.

    path: of the metrics file. values: the numbers of the records by name, NaN where a record has no finite
    number. count: number of records. figures: latest values of RESULTS and AXES, if there are any. warnings:
    (update, text). samples: prompt -> (update, answer); the first and the last answers, without unchanged
    ones. rollout: the same for the last rollout. sampled: prompt -> the last answer at the chat's
    temperature. wrong_answers: {question, answer, right} of the last evaluation. skipped: number of skipped
    updates. diverged: whether the last loss is not finite. settings, about: content of the settings file.
    """

    def __init__(self, path: Path = Path()) -> None:
        self.path = path
        self.offset = 0  # bytes of the file that were read, up to the end of `last_line`
        self.last_line = b""
        self.count = 0
        self.values: dict[str, array[float]] = {}
        self.figures: dict[str, float] = {}
        self.warnings: list[tuple[int, str]] = []
        self.samples: dict[str, list[tuple[int, str]]] = {}
        self.rollout: dict[str, list[tuple[int, str]]] = {}
        self.answered_at: dict[str, int] = {}  # prompt -> the update of its last answer
        self.sampled: dict[str, str] = {}
        self.wrong_answers: list[dict[str, str]] = []
        self.skipped, self.diverged = 0, False
        self.settings: dict[str, str] = {}
        self.about: dict[str, Any] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Add a record; one that lacks a number for any of AXES is ignored."""
        numbers = {name: float(value) for name, value in record.items() if is_finite_number(value)}
        if not numbers.keys() >= set(AXES):
            return
        for name in LATEST_FIELDS:
            field = "mean_loss" if name == "loss" and "mean_loss" in record else name
            if field in numbers:
                self.figures[name] = numbers[field]
        if numbers.get("eval_loss", math.inf) < self.figures.get("best_eval_loss", math.inf):
            self.figures |= {"best_eval_loss": numbers["eval_loss"], "best_update": record["update"]}
        self.diverged = "loss" in record and "loss" not in numbers
        self.skipped += len(record.get("skipped", ()))
        self.warnings += [(record["update"], warning) for warning in record.get("warnings", ())]
        del self.warnings[MAX_WARNINGS:]
        self.add_samples(record["update"], record.get("samples", ()))
        if "eval_answers" in record:
            self.wrong_answers = [
                {name: short_text(each[name]) for name in ("question", "answer", "right")}
                for each in record.get("wrong_answers", ())[:MAX_ANSWERS]
            ]
        for name, value in numbers.items():
            if name not in self.values:
                self.values[name] = array("d", [math.nan] * self.count)
            self.values[name].append(value)
        self.count += 1
        for values in self.values.values():
            if len(values) < self.count:
                values.append(math.nan)

    @property
    def records(self) -> list[dict[str, float]]:
        """The finite numbers of each record by name."""
        rows = zip(*self.values.values(), strict=True)
        return [
            {name: value for name, value in zip(self.values, row, strict=True) if not math.isnan(value)}
            for row in rows
        ]

    def read_on(self) -> bool:
        """Read what was added to the file, with pauses for other threads; malformed records are skipped.
        Returns False if the file was replaced or shortened since the last call. Raises OSError."""
        with open_regular(self.path) as file:
            file.seek(self.offset - len(self.last_line))
            if file.read(len(self.last_line)) != self.last_line:
                return False
            lines = file.read().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # the line is being written
            self.offset += len(line)
            self.last_line = line
            with suppress(*WRONG_TYPES):
                self.add(log_record(line) or {})
            if number % RECORDS_PER_PAUSE == 0:
                time.sleep(PAUSE)
        self.settings, self.about = read_settings(self.path)
        return True

    def add_samples(self, update: int, samples: list[dict[str, Any]]) -> None:
        """Add the samples of an update; samples of a rollout replace those of the previous rollout."""
        if any("reward" in sample for sample in samples):
            self.rollout = {}
        for sample in samples[:MAX_PROMPTS]:
            answers_by_prompt = self.rollout if "reward" in sample else self.samples
            answers = answers_by_prompt.setdefault(short_text(sample["prompt"]), [])
            answer = short_text(sample["answer"])
            self.answered_at[short_text(sample["prompt"])] = update
            if not answers or answers[-1][1] != answer:
                answers.append((update, answer))
            del answers[1 : 1 - MAX_ANSWERS]
            if "sampled" in sample:
                self.sampled[short_text(sample["prompt"])] = short_text(sample["sampled"])

    def columns(self, points: int) -> dict[str, list[float | None]]:
        """The values of each field, with at most `points` points. A point is the mean over its records; for
        AXES and `seconds_left` it is the last value. None: no finite number."""
        stride, columns = max(1, math.ceil(self.count / points)), {}
        for name, recorded in self.values.items():
            is_last = name in (*AXES, "seconds_left")
            filler = recorded[-1] if is_last else math.nan
            values = np.append(recorded, [filler] * (-self.count % stride))
            groups = np.ma.masked_invalid(values.reshape(-1, stride))  # [points, stride]
            if is_last:
                columns[name] = groups[:, -1].tolist()
            else:
                with np.errstate(over="ignore"):
                    means = np.ma.masked_invalid(groups.mean(axis=1)).tolist()
                columns[name] = [None if mean is None else float(f"{mean:.6g}") for mean in means]
        return columns


def is_finite_number(value: Any) -> bool:
    """Whether a value of a file is a finite number."""
    return type(value) in (float, int) and math.isfinite(value)


def short_text(value: Any) -> str:
    """A value as text, as in a command line, of at most MAX_CHARACTERS."""
    if value is None:
        return "none"
    text = str(int(value)) if isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"


def read_run(path: Path) -> Run:
    """Read a run from its metrics file. Raises OSError with a message that says what to do."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give metrics files, such as out/full_sft_512{METRICS_SUFFIX}"
        )
    run = Run(path)
    run.read_on()
    return run


def read_settings(metrics: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The settings of a run including its stage, and the other content of the settings file beside the
    metrics; empty if that file cannot be read."""
    content = read_object(settings_path(metrics))
    try:
        settings = {"stage": content.pop("stage", None)} | content.pop("settings")
        return {name: short_text(value) for name, value in settings.items()}, content
    except WRONG_TYPES:
        return {}, {}


def differing_settings(runs: list[dict[str, str]]) -> list[str]:
    """The settings that differ between the runs that have settings, without LOCATION_SETTINGS."""
    known = [settings for settings in runs if settings]
    names = dict.fromkeys(name for settings in known for name in settings if name not in LOCATION_SETTINGS)
    return [name for name in names if len({settings.get(name) for settings in known}) > 1]


def format_figure(figures: dict[str, float], name: str) -> str:
    """A figure of a run as text, `-` if it has none."""
    if name not in figures:
        return "-"
    if name in ("update", "tokens", "best_update"):
        return f"{figures[name]:,.0f}"
    return f"{figures[name]:,.1f}" if name == "seconds" else f"{figures[name]:.4f}"
