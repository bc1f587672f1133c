"""A session of a run that moves: unpack, train the stages, pack again."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from common.command_line import STOP_SIGNALS
from common.errors import Interrupted, UserError, say, warn
from common.files import free_path, is_file, is_taken, is_there, lock_output, read_object, remove
from common.session import START, STOPPED
from common.settings import ROOT, StageArgs
from dataset.token_cache import file_hash
from tools.carry.collect import code_edits, collect, describe_runs, progress
from tools.carry.manifest import FOR_READING, MANIFEST, Manifest, stage_args, stage_words
from tools.carry.pack_file import open_pack, unpack, write_pack
from trainer.checkpoint.same_run import code_version
from trainer.weights.paths import run_name


class Stage(NamedTuple):
    """A stage that is carried: its script, its command line and its settings."""

    script: Path
    words: list[str]
    args: StageArgs


def pack(folder: Path, path: Path, with_data: bool) -> None:
    """Pack a folder of runs into a file, and print what is in it. Raises UserError."""
    write(path, folder, *collect(folder, with_data))


def write(path: Path, folder: Path, manifest: Manifest, sources: dict[str, Path]) -> None:
    """Write the pack of a folder of runs from what `collect` found, and print what is in it. Raises
    UserError."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temp:
        edits = Path(temp) / "edits.diff"
        code_edits(edits)
        if is_file(edits):
            sources[FOR_READING[1]] = edits
        write_pack(path, manifest, sources)
    for line in describe_runs(folder):
        say(f"  {line}")
    size = sum(file.bytes for file in manifest.packed().values())
    packed = [file.packed for file in manifest.data.values()]
    data = "no data"
    if any(packed):
        data = "with the data" if all(packed) else f"with {sum(packed)} of {len(packed)} files of data"
    say(f"packed {path}: {size / 1e6:,.1f} MB, {data}, in {time.monotonic() - begin:.1f} s")


def go(path: Path, to: Path | None, data: Path | None, stop_after: str | None) -> None:
    """Unpack a run, continue it and pack it again.

    Args:
        path: the pack, which is replaced at the end.
        to: folder to unpack into; None: out/NAME. If the pack is there already, the run continues with what
            is newer.
        data: folder that is searched for data that are not in the pack.
        stop_after: time of the session, as --stop_after of a stage.

    Raises:
        UserError: the pack cannot be used, or a stage ended with an error. Interrupted: a signal came.
    """
    began = time.time()
    if not os.access(path.absolute().parent, os.W_OK):  # known before hours of training
        raise UserError(f"{path}: its folder cannot be written; copy the pack into another one")
    with open_pack(path) as (archive, manifest):
        folder = Path(os.path.abspath(to or ROOT / "out" / manifest.name))
        stages = read_stages(manifest, folder)  # validated before anything is written
        here = updates_here(manifest, folder, stages)
        if here is None:
            unpack(archive, manifest, folder)
            say(f"unpacked {path} into {folder}; it was packed {manifest.written}")
        else:
            say(
                f"{folder} has {here} updates, the pack has {sum(manifest.updates.values())}: continued there"
            )
    lock_output("carry", to=str(folder))
    place_data(manifest, folder, data)
    if manifest.code != code_version():
        warn(f"the pack was written by code {manifest.code}, this is {code_version()}")
    with stop_signals() as signals:
        status, said = train(stages, folder, began, stop_after, signals)
        if status == 0 and not said:
            run([sys.executable, str(ROOT / "scripts/plot_metrics.py"), str(folder), "--html",
                 str(folder / "report.html")], {}, signals)  # fmt: skip
        newest, sources = collect(folder, with_data=False)
        if newest.updates != manifest.updates:
            write(path, folder, newest, sources)
    again = ["python", "scripts/carry.py", "go", str(path)]
    for flag, value in (("--to", to), ("--stop_after", stop_after)):
        if value:
            again += [flag, str(value)]
    if signals:
        text = f"by {signal.Signals(signals[0]).name}; {shlex.join(again)} continues"
        raise Interrupted(signals[0], text)
    if status:
        raise UserError(f"{said} ended with status {status}; its own line above says why")
    if said:
        say(f"not finished; to continue, here or elsewhere: {shlex.join(again)}")
    else:
        say(f"finished; the models are in {folder}")


def read_stages(manifest: Manifest, folder: Path) -> list[Stage]:
    """The stages of a pack with their settings in this folder. Raises UserError if one may not be run."""
    stages = []
    for each in manifest.stages:
        words = stage_words(each, manifest, folder)
        stages.append(Stage(ROOT / "trainer" / f"{each.script}.py", words, stage_args(each, words)))
    return stages


def updates_here(manifest: Manifest, folder: Path, stages: list[Stage]) -> int | None:
    """The updates that an unpacked folder of this pack has made; None if it must be unpacked. A folder that
    is behind the pack is set aside. Raises UserError if the folder is another's."""
    if not is_taken(folder):
        return None
    if read_object(folder / MANIFEST).get("id") != manifest.id:
        raise UserError(f"{folder} exists, and is not this pack's; give another folder with --to")
    updates = sum(progress(stage.args)["update"] for stage in stages)
    if updates >= sum(manifest.updates.values()):
        return updates
    aside = free_path(folder)
    os.rename(folder, aside)
    say(f"{folder} was behind the pack, with {updates} updates; it is now {aside}")
    return None


def place_data(manifest: Manifest, folder: Path, given: Path | None) -> None:
    """Check the data by their hashes; those that are not in the pack are searched in a folder and linked.
    Raises UserError."""
    for name, file in manifest.data.items():
        place = folder / name
        if not is_there(place):
            if given is None:
                raise UserError(f"the pack does not hold {name}; give the folder of the data with --data")
            remove(place)  # a link that leads nowhere any more
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(find_file(given, name, file.bytes, file.sha256))
        if place.stat().st_size != file.bytes or file_hash(place) != file.sha256:
            raise UserError(f"{place.resolve()} is not the file that the runs began with ({name})")


def find_file(folder: Path, name: str, size: int, sha256: str) -> Path:
    """The file in a folder, or in the folders in it, that has this content, whatever its name. Raises
    UserError if there is none."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size == size and file_hash(path) == sha256:
            return path.resolve()
    raise UserError(f"--data {folder} holds no file with the content of {name} ({size:,} bytes)")


# --- processes


def train(
    stages: list[Stage], folder: Path, began: float, stop_after: str | None, signals: list[int]
) -> tuple[int, str]:
    """Run the stages that are not finished, one after the other. Returns the status of the last one, and its
    name if it has not come to its end. began: seconds since 1970, for --stop_after."""
    environment = {START: f"{began:.3f}", STOPPED: str(folder / ".stopped")}
    remove(folder / ".stopped")
    for stage in stages:
        name = run_name(stage.args.save_weight, stage.args)
        if progress(stage.args)["finished"]:
            say(f"{name} is finished")
            continue
        say(f"== {name}")
        limit = [f"--stop_after={stop_after}"] if stop_after else []
        status = run([sys.executable, str(stage.script), *stage.words, *limit], environment, signals)
        if status or signals or is_there(folder / ".stopped"):
            return status, name
        if not progress(stage.args)["finished"]:
            raise UserError(f"{name} ended before its last update")
    return 0, ""


def run(command: list[str], environment: dict[str, str], signals: list[int]) -> int:
    """Run a command to its end and pass signals on to it. Returns its status, 128 + number after a signal."""
    if signals:
        return 128 + signals[0]
    process = subprocess.Popen(command, env=os.environ | environment)
    passed = 0
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        for number in signals[passed:]:
            process.send_signal(number)
        passed = len(signals)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Note signals instead of ending at once, so that the pack is written."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)

    handlers = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
