"""The folder of a model that the web page teaches (scripts/teach.py): its state, its result, and the version
that the user has kept."""

import os
from pathlib import Path
from typing import Any

from common.files import is_running, read_object
from scripts.serve.folders import files_in
from scripts.teaching.old_questions import last
from scripts.teaching.outcome import CHAT, SHOWN, counts, not_kept, was_right
from scripts.teaching.version import REPORT, newest_version
from trainer.weights.for_tools import WEIGHT
from trainer.weights.paths import METRICS_SUFFIX, WEIGHT_NAME

ABOUT = "job.json"
KIND = "teaching"  # of a job, in its job.json; a job without a kind trains
LOCK = "teach"  # the name that scripts/teach.py locks in its folder
READY, TAUGHT, NEW = "ready", "taught", "new"  # states of a teaching that has ended, see `ended_state`


def about_teaching(folder: Path) -> dict[str, Any]:
    """The description of a teaching that the page started: `model`, `corrections`, `kept` ... Empty for any
    other folder."""
    about = read_object(folder / ABOUT, links=False)
    return about if about.get("kind") == KIND else {}


def newest(folder: Path) -> Path | None:
    """The folder of the newest version; None if there is none. A link leads elsewhere and does not count."""
    version = newest_version(folder)
    return None if version is None or os.path.islink(version) else version


def is_compared(version: Path) -> bool:
    """Whether a version is complete: trained, and compared with the model before."""
    return REPORT in files_in(version, links=False)


def ended_state(folder: Path, about: dict[str, Any], lines: list[str]) -> str | None:
    """The state of a teaching that has come to its end, otherwise None: `taught` if nobody has decided yet
    whether to keep its version, `ready` if it is kept, `new` if no version is left. lines: of its log, since
    its last start."""
    if not any(line.startswith(CHAT) for line in lines):
        return None
    version = newest(folder)
    if version is None:
        return NEW
    if not is_compared(version):
        return None
    return READY if about.get("kept") == int(version.name) else TAUGHT


def records_of(version: Path | None) -> Path | None:
    """The file of the log records of a version's training; None before the first record."""
    files = files_in(version, links=False) if version else {}
    names = [name for name, file in files.items() if name.endswith(METRICS_SUFFIX) and file.size]
    return version / names[0] if version and names else None


def is_taught_elsewhere(folder: Path) -> bool:
    """Whether something runs in a folder that the page did not start: teach.py in a terminal, or the training
    that a killed teach.py has left behind."""
    records = records_of(newest(folder))
    is_training = records and is_running(records.name.removesuffix(METRICS_SUFFIX), records.parent)
    return bool(is_training or is_running(LOCK, folder))


def kept_weights(folder: Path) -> tuple[Path, str] | None:
    """The weights of the version that the user has kept, and the name of the model that was taught. None if
    no version is kept."""
    about = about_teaching(folder)
    kept, model = about.get("kept"), about.get("model")
    if not isinstance(kept, int) or not isinstance(model, str):
        return None
    version = folder / str(kept)
    matches = [WEIGHT_NAME.fullmatch(name) for name in files_in(version)]
    names = [match[0] for match in matches if match and match["weight"] == WEIGHT]
    return (version / names[0], model) if names else None


def result_of(version: Path) -> dict[str, Any]:
    """What a version has learned and lost: counts as [right, asked], and the answers that are not as they
    should be, at most SHOWN of a kind."""
    asked = read_object(version / REPORT, links=False)["asked"]

    def shown(kind: str) -> list[dict[str, Any]]:
        names = {"now": "after", "before": "before", "should": "reference"}
        return [
            {"question": last(each), "was_right": was_right(each)}
            | {name: each[field] for name, field in names.items()}
            for each in not_kept(asked, kind)[:SHOWN]
        ]

    return {
        "learned": counts(asked, "correction"),
        "old": counts(asked, "old"),
        "missed": shown("correction"),
        "lost": shown("old"),
    }
