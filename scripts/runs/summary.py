"""What a run came to: figures, warnings and samples of its metrics file, and the settings in the file beside it. The
table and the HTML page of `plot_metrics.py` and the web page show these."""

import json
import math
from pathlib import Path
from typing import Any

from trainer.components.run_files import settings_path

ENDING = "_metrics.jsonl"
LAST = ("update", "tokens", "seconds", "loss", "eval_loss", "reward", "eval_reward")  # the last finite value counts
FIGURES = (*LAST[:5], "best_eval_loss", "best_update", *LAST[5:])
PLACES = {"save_weight", "save_dir", "checkpoint_dir", "cache_dir", "from_resume", "resume_from", "log_file", "log_dir"}
PLACES |= {"tensorboard_dir"}  # settings that say where a run lies, not what it does
PROMPTS, ANSWERS, WARNINGS, CHARACTERS = 8, 5, 20, 400  # that are kept of a run; characters of a text


def finite_number(value: Any) -> float:
    """A finite number of sensible size, else NaN."""
    return float(value) if type(value) in (float, int) and -1e300 <= value <= 1e300 else math.nan


class Summary:
    """What the records of a run come to; `add` takes them one by one, the oldest first.

    figures: values of FIGURES, as far as there are any. warnings: (update, text). samples: prompt -> (update, answer),
    the first and the last ones; an answer that did not change is not repeated. rollout: the same of the last rollout.
    """

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.warnings: list[tuple[int, str]] = []
        self.samples: dict[str, list[tuple[int, str]]] = {}
        self.rollout: dict[str, list[tuple[int, str]]] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Take a record; one whose update is no sensible number is left out."""
        update = record["update"]
        if math.isnan(finite_number(update)):
            return
        numbers = {name: finite_number(record.get(name)) for name in LAST}
        numbers["loss"] = finite_number(record.get("mean_loss", record.get("loss")))
        self.figures |= {name: value for name, value in numbers.items() if not math.isnan(value)}
        if numbers["eval_loss"] < self.figures.get("best_eval_loss", math.inf):
            self.figures |= {"best_eval_loss": numbers["eval_loss"], "best_update": update}
        warnings, samples = (each if isinstance(each := record.get(n), list) else [] for n in ("warnings", "samples"))
        self.warnings = [*self.warnings, *((update, _text(each)) for each in warnings)][:WARNINGS]
        found = [sample for sample in samples[:PROMPTS] if isinstance(sample, dict) and "prompt" in sample]
        if any("reward" in sample for sample in found):  # of a rollout, each of which has other prompts
            self.rollout = {}
        for sample in found:
            kept = self.rollout if "reward" in sample else self.samples
            answers = kept.setdefault(_text(sample["prompt"]), [])
            answer = _text(sample.get("answer", sample.get("completion")))
            answers += [(update, answer)] if not answers or answers[-1][1] != answer else []
            del answers[1 : 1 - ANSWERS]
        for prompt in [*self.samples][:-PROMPTS]:
            del self.samples[prompt]


def _text(value: Any) -> str:
    """A value of a file as text of bounded length, as a command line has it."""
    text = str(int(value)) if isinstance(value, bool) else "none" if value is None else str(value)
    return text if len(text) <= CHARACTERS else text[:CHARACTERS] + " …"


def read_settings(metrics: Path) -> tuple[dict[str, str], dict[str, Any]] | None:
    """The settings of a run, with its stage, and what else their file holds: both empty without a file, None if it is
    damaged."""
    try:
        content = json.loads(settings_path(metrics).read_bytes())
        settings = {"stage": content.pop("stage", None)} | content.pop("settings")
        return {name: _text(value) for name, value in settings.items()}, content
    except FileNotFoundError:
        return {}, {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def differing(runs: list[dict[str, str]]) -> list[str]:
    """The settings that are not the same in all runs that have settings, other than PLACES."""
    known = [settings for settings in runs if settings]
    names = dict.fromkeys(name for settings in known for name in settings if name not in PLACES)
    return [name for name in names if len({settings.get(name) for settings in known}) > 1]


def shown(figures: dict[str, float], name: str) -> str:
    """A figure of a run as text, `-` if it has none."""
    form = {"seconds": ",.1f"}.get(name, ",.0f" if name in ("update", "tokens", "best_update") else ".4f")
    return format(figures[name], form) if name in figures else "-"
