"""What the web page's routes do to teach a model by the user's corrections (scripts/teach.py).

A teaching is a job (jobs.py) in a folder of --save_dir, NAME-taught, where scripts/teach.py keeps the
corrections and the versions. The page sends corrections and the name of a model, which is looked up among the
models of the server.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage
from typing import Any

from common.errors import UserError, printable, reason
from common.files import atomic_write, is_file, json_lines, read_object, write_json
from common.settings import ROOT
from dataset.messages import BadRecord
from dataset.report import describe_error
from scripts.serve.folders import files_in
from scripts.serve.jobs import LIVING, SCRIPT, UNFINISHED, Jobs, error_of
from scripts.serve.models import Models
from scripts.serve.protocol import ApiError
from scripts.serve.taught import (
    ABOUT,
    KIND,
    READY,
    TAUGHT,
    about_teaching,
    is_compared,
    newest,
    records_of,
    result_of,
)
from scripts.serve.uploads import no_room
from scripts.teaching import version
from scripts.teaching.corrections import Correction, corrections_in, merged, read_corrections
from trainer.weights.for_tools import WEIGHT
from trainer.weights.paths import (
    METRICS_SUFFIX,
    is_pretrained_only,
    metrics_path,
    settings_path,
    weight_files,
)

TEACH = ROOT / "scripts" / "teach.py"
FEWEST = 3  # corrections of a first teaching
ROOM, SIZES = 1 << 30, 16  # bytes of disk that stay free; how often the weights are written at most


class Teachings:
    """The teachings of a server.

    make_room: drops unused models from memory; it is called before a start.
    """

    def __init__(self, jobs: Jobs, models: Models, make_room: Callable[[], Any]):
        self.jobs, self.models, self.make_room = jobs, models, make_room
        # folder of a version -> the time of its report, and what it says
        self.results: dict[Path, tuple[float, dict[str, Any]]] = {}

    # --- start

    def teach(
        self, model: str, given: list[dict[str, Any]], removed: list[dict[str, Any]], without_old_data: bool
    ) -> str:
        """Teach a model, and return the name of the job. given: corrections as records of SFT, which are
        added to those of before. removed: corrections that the user has taken back. Raises ApiError."""
        self.models.look_again()  # it may have been renamed or deleted
        _, path = self.models.find(model)
        original = self.original(model, path)
        folder = self.folder(path, original)
        new, taken_back = read_given(given), {each.key for each in read_given(removed, may_differ=True)}
        if len(new) < FEWEST:
            text = f"{len(new)} corrections are too few; correct {FEWEST} answers."
            raise ApiError(text, 409, "corrections", "few_corrections", n=FEWEST)
        about = {"kind": KIND, "without_old_data": without_old_data} | self.names(original)

        def prepare(folder: Path) -> None:
            check_folder(folder)
            kept = [each for each in corrections_of(folder) if each.key not in taken_back]
            corrections, _ = merged(kept, new)
            lines = json_lines(each.record() for each in corrections)
            atomic_write(folder / version.CORRECTIONS, lambda file: file.write(lines))
            before = {name: value for name, value in about_teaching(folder).items() if name == "kept"}
            write_json(folder / ABOUT, before | about | {"corrections": len(corrections)})

        self.start(original, folder, without_old_data, prepare)
        return printable(folder.name)

    def go_on(self, folder: Path, without_old_data: bool) -> None:
        """Continue a teaching that was stopped, killed or refused. without_old_data: even if it began
        otherwise. Raises ApiError."""
        about = about_teaching(folder)
        model = str(about.get("model"))
        original = self.original(model, self.known(str(self.jobs.save_dir / f"{model}.pth"), model))
        without = without_old_data or about.get("without_old_data") is True

        def prepare(folder: Path) -> None:
            check_folder(folder)
            write_json(folder / ABOUT, about_teaching(folder) | {"without_old_data": without})

        self.start(original, folder, without, prepare)

    def start(
        self, original: Path, folder: Path, without_old_data: bool, prepare: Callable[[Path], Any]
    ) -> None:
        """Start scripts/teach.py in the folder of a teaching. Raises ApiError."""
        if folder.exists() and self.jobs.state(folder).name in LIVING:
            raise ApiError(f"{folder.name} is being taught.", 409, None, "busy", name=printable(folder.name))
        need, free = ROOM + SIZES * original.stat().st_size, disk_usage(self.jobs.save_dir).free
        if need > free:
            raise no_room(need, free)
        argv = [sys.executable, str(TEACH), "--model", str(original.absolute()), "--save_dir", str(folder)]
        self.make_room()
        self.jobs.start(folder.name, argv + (["--without_old_data"] if without_old_data else []), prepare)

    # --- which model, and where

    def original(self, name: str, path: Path) -> Path:
        """The weights that are taught: those of a model, or for a version those that it was taught from.
        Raises ApiError if they cannot be taught."""
        if path == self.models.path and self.models.parts:
            raise ApiError(f"{name} has an adapter (LoRA).", 409, "model", "adapter", name=name)
        about = read_object(path.parent / version.ABOUT)
        if about:
            path = self.known(str(about.get("model")), name)
        if path.suffix != ".pth" or self.names(path)["model"] is None:
            text = f"{name} is not a .pth of this server's folder."
            raise ApiError(text, 409, "model", "elsewhere", name=name)
        if is_pretrained_only(path):
            text = f"{name} continues texts and does not answer."
            raise ApiError(text, 409, "model", "continues", name=name)
        stems = path.stem, path.stem.replace("_best_", "_", 1)
        if not any(is_file(settings_path(metrics_path(path.parent, stem))) for stem in stems):
            text = f"No description of its training lies beside {name}."
            raise ApiError(text, 409, "model", "no_description", name=name)
        return path

    def known(self, original: str, name: str) -> Path:
        """The path of this model if the server offers it. Raises ApiError."""
        for path in self.models.paths().values():
            if os.path.realpath(path) == os.path.realpath(original):
                return path
        raise gone(name)

    def names(self, path: Path) -> dict[str, str | None]:
        """`model`: the name of weights in --save_dir, without a model that was given. `start`: the job that
        made them. Both are None for weights elsewhere."""
        try:
            below = Path(os.path.realpath(path)).relative_to(os.path.realpath(self.jobs.save_dir))
        except ValueError:
            return {"model": None, "start": None}
        if len(below.parts) > 2:
            return {"model": None, "start": None}
        start = printable(below.parts[0]) if len(below.parts) > 1 else None
        return {"model": printable(below.as_posix()).removesuffix(".pth"), "start": start}

    def folder(self, path: Path, original: Path) -> Path:
        """The folder of the teaching of a model. path: its weights, or those of a version that was kept."""
        for folder in self.jobs.folders().values():
            if path != original and path.parent.parent.absolute() == folder:
                return folder
        parent, save_dir = original.parent.absolute(), self.jobs.save_dir
        if parent == save_dir:
            return save_dir / f"{original.stem}-taught"
        is_only = list(weight_files(parent, WEIGHT)) == [parent / original.name]
        return save_dir / f"{parent.name if is_only else f'{parent.name} {original.stem}'}-taught"

    # --- the end

    def keep(self, name: str) -> None:
        """Offer the newest version of a teaching as a model. Raises ApiError."""
        with self.jobs.folders_locked(name):
            folder, kept = self.undecided(name)
            write_json(folder / ABOUT, about_teaching(folder) | {"kept": int(kept.name)})
        self.models.look_again()

    def discard(self, name: str) -> None:
        """Move the newest version of a teaching to the deleted trainings. Raises ApiError."""
        with self.jobs.folders_locked(name):
            folder, dropped = self.undecided(name)
            os.rename(dropped, self.jobs.place_among_deleted(f"{folder.name} {dropped.name}"))

    def undecided(self, name: str) -> tuple[Path, Path]:
        """The folders of a teaching and of its newest version. Raises ApiError unless it waits for a
        decision."""
        folder = self.jobs.folder(name)
        made = newest(folder)
        if made is None or self.jobs.state(folder).name != TAUGHT:
            raise ApiError(f"{name} waits for no decision.", 409, None, "decided")
        return folder, made

    # --- what the page shows

    def describe(self, folder: Path, name: str, progress: Any) -> dict[str, Any]:
        """A teaching: its state, how far it is, and its result. progress: the Progress of the server."""
        state, lines, is_own = self.jobs.state(folder)
        about, made = about_teaching(folder), newest(folder)
        files = [*files_in(folder).values(), *(files_in(made).values() if made else ())]
        age = time.time() - max([file.mtime for file in files], default=0.0)
        shown = {"name": name, "kind": KIND, "state": state, "is_own": is_own, "plan": None, "asked": {}}
        shown |= {field: about.get(field) for field in ("model", "start", "corrections")}
        shown |= {"stage": 0, "stages": 1, "age": round(max(0.0, age), 1)}
        shown["error"] = error_of(lines) if state == "failed" else None
        # what it is trained on is chosen; until then the model is asked
        shown["is_prepared"] = made is not None and not is_compared(made)
        if state in UNFINISHED and made and shown["is_prepared"] and (records := records_of(made)):
            run = records.name.removesuffix(METRICS_SUFFIX)
            stage = {"run": run, "is_pretraining": False, "updates": 1, "seconds": 0.0}
            shown |= progress.of(records, 0, [stage], False)
        if state in (TAUGHT, READY) and made:
            seen = (made / version.REPORT).stat().st_mtime
            if self.results.get(made, (None,))[0] != seen:
                self.results[made] = seen, result_of(made)
            shown["result"] = self.results[made][1]
        return shown


def gone(name: str) -> ApiError:
    """The error for a version whose original is not there any more."""
    text = f"The model that {name} was taught from is gone."
    return ApiError(text, 409, "model", "original_gone", name=name)


def read_given(records: list[dict[str, Any]], may_differ: bool = False) -> list[Correction]:
    """The corrections of a request, each once. may_differ: whether those of one question may differ. Raises
    ApiError."""
    found: dict[str, Correction] = {}
    for number, record in enumerate(records):
        try:
            read = corrections_in(record, f"correction {number}")
        except BadRecord as error:
            text = f"Correction {number} cannot be read: {describe_error(error)}"
            raise ApiError(text, 400, "corrections", "field") from error
        for each in read:
            if found.setdefault(each.key, each).answer != each.answer and not may_differ:
                text = f"Two corrections of {each.question[:60]!r} differ."
                raise ApiError(text, 409, "corrections", "contradiction", question=each.question[:200])
    return list(found.values())


def check_folder(folder: Path) -> None:
    """Make the folder of a teaching. No training runs meanwhile. Raises ApiError if the folder is something
    else's, or if its unfinished version comes from elsewhere."""
    if os.path.islink(folder) or SCRIPT in files_in(folder):
        raise ApiError(f"{folder.name} exists already.", 409, "name", "exists")
    folder.mkdir(exist_ok=True)
    unfinished = newest(folder)
    if unfinished and not is_compared(unfinished) and not version.is_trained_here(unfinished):
        text = f"{unfinished} was not prepared here; continue it in a terminal."
        raise ApiError(text, 409, None, "not_taught_here", name=printable(folder.name))


def corrections_of(folder: Path) -> list[Correction]:
    """The corrections that the folder of a teaching has. Raises ApiError."""
    path = folder / version.CORRECTIONS
    if os.path.islink(path) or not is_file(path):
        return []
    try:
        return read_corrections(str(path))
    except UserError as error:
        text, name = f"{path} cannot be read: {reason(error)}", printable(f"{folder.name}/{path.name}")
        raise ApiError(text, 409, None, "bad_corrections", file=name) from error
