"""The trainings that the web page starts: one at a time, each in a folder of --save_dir.

Three commands are run: scripts/plan.py, the run.sh that it writes, and scripts/teach.py, which trains a model
on corrections (taught.py). Each runs in a session of its own, so it continues when the server ends, and a
person can continue it in a terminal. The server keeps no other files than those that training writes anyway.
It asks the kernel whether a training is running: all processes of a training inherit a descriptor of
`.train.lock`, and this file stays locked (flock) until the last of them ends. Until then their process group
exists, so no other processes can get its number. (A training that scripts/teach.py runs holds a lock of its
own instead.)
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from common.errors import WriteError, printable, reason
from common.files import free_path, is_running, open_regular, read_object, write_json
from common.settings import ROOT
from scripts.planning.files import FACTS
from scripts.serve.folders import files_in, scan
from scripts.serve.protocol import ApiError
from scripts.serve.taught import ABOUT, READY, about_teaching, ended_state, is_taught_elsewhere
from trainer.weights.paths import METRICS_SUFFIX

LOCK = ".train.lock"
FOLDERS_LOCK = ".folders.lock"  # held for a moment while a training starts, or a folder is moved
DELETED = ".deleted"  # folder of the trainings that the user deleted
SCRIPT, LOG, REPORT = "run.sh", "job.log", "report.html"
STARTED, STOPPED = "== started ", "== asked to stop "  # lines that this file writes into the log
TAIL = 1 << 16  # bytes at the end of a log that are read
LINE = 1000  # characters that are shown of a line of the log
PLANNING, TRAINING, SAVING = "planning", "training", "saving"  # states of a running training
LIVING = (PLANNING, TRAINING, SAVING)
UNFINISHED = (*LIVING, "stopped", "cut")
SECONDS_FOR_LOCK = 1.0  # others lock it for a moment to read it; its owner writes its process group into it
# What a started process does first. It appends its number, which is also that of its group, to what the
# server wrote. So the training can be stopped even if the server is killed right after the start. If
# memory runs out, Linux ends the training and not the server.
NOTE_GROUP = 'echo $$ >&"$0"; echo 500 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # exit statuses: of a program, of a shell that ran it
OUT_OF_MEMORY = "error: out of memory: the system ended it "
# variables of the server that the programs it starts do not get
SECRETS = ("MINIMIND_API_KEY",)
# a line that says why a program ended: of this project, of Python (below a traceback), of C++ and Rust
LAST_WORDS = re.compile(
    r"error: (?P<said>.*)|(\w+\.)*\w*(Error|Exception)\b.*|terminate called .*|memory allocation of .* failed"
)
SEE_ABOVE = "its own line above says why"  # of a program that runs another one
# the code of such a line <- what it contains
ERRORS = {
    "memory": r"out of memory|allocate memory|MemoryError|bad_alloc|memory allocation of|"
    r"could not create a primitive|failed to map segment|(malloc|realloc) of size \d+ failed",
    "disk": r"No space left|Disk quota",
    "not_utf8": "not UTF-8",
    "no_old_data": r"--without_old_data",
    "original_gone": r"the model that was taught is gone",
    "hours": r"--hours .*teach little",
    "too_little": r"--eval_share .* hold|holds out none|no record is held out",
    "bad_record": r"(^|/)(?P<file>[^/]+?)(:(?P<line>\d+)|\[(?P<index>\d+)\]): "
    r"(?P<why>.*?)((; or skip| \(with --).*)?$",
}


class Jobs:
    """The trainings below a folder. environment: environment variables of their commands."""

    def __init__(self, save_dir: Path, environment: dict[str, str] | None = None):
        self.save_dir = save_dir.absolute()
        given = os.environ if environment is None else environment
        self.environment = {name: value for name, value in given.items() if name not in SECRETS}
        self.save_dir.mkdir(parents=True, exist_ok=True)

    # --- the list of them

    def folders(self) -> dict[str, Path]:
        """Name -> folder of each training that is planned or whose plan failed. Links are left out because
        they lead elsewhere."""
        found = {}
        for folder, files in scan(self.save_dir).items():
            own = {name for name, file in files.items() if not file.is_link}
            if folder != self.save_dir and own & {SCRIPT, ABOUT} and not os.path.islink(folder):
                found[printable(folder.name)] = folder  # a name need not be UTF-8
        return found

    def folder(self, name: str) -> Path:
        """The folder of a training. The name is looked up, never joined to a path. Raises ApiError."""
        folder = self.folders().get(name)
        if folder is None:
            raise ApiError(f"There is no training {name[:60]!r}.", 404, code="no_job")
        return folder

    # --- the one that is running

    def living(self) -> dict[str, Any] | None:
        """The running training: its folder's name, its process group, and whether it is still planning. None
        if none is running."""
        nobody = {"folder": None, "group": None, "plans": False}
        with suppress(OSError), open_regular(self.save_dir / LOCK) as lock:
            if not try_lock(lock, fcntl.LOCK_SH):
                about, _, group = lock.read().partition(b"\n")
                with suppress(ValueError, TypeError):  # the file is being written
                    return nobody | json.loads(about) | {"group": int(group) if group.strip() else None}
                return nobody
        return None

    def group(self, name: str) -> int:
        """The process group of a training. Raises ApiError if it is not running, or was not started here."""
        end = time.monotonic() + SECONDS_FOR_LOCK
        while (living := self.living()) is not None and living["folder"] == name:
            if living["group"] is not None:
                return living["group"]
            if time.monotonic() > end:
                break
            time.sleep(0.02)
        text = f"The training {name[:60]!r} was not started here, or has ended."
        raise ApiError(text, 409, None, "not_running")

    def start(
        self, name: str, argv: list[str], prepare: Callable[[Path], Any] = lambda folder: None, plans=False
    ) -> None:
        """Start a command in the folder of this name. prepare: called with the folder, which it may create.
        plans: whether the command makes a plan. Raises ApiError if another training is running."""
        try:
            folders_lock = open_regular(self.save_dir / FOLDERS_LOCK, "a+b")
            with folders_lock, open_regular(self.save_dir / LOCK, "a+b") as lock:
                self.wait_for_lock(lock)
                self.wait_for_lock(folders_lock)
                rewrite(lock, {"folder": name, "plans": plans})
                prepare(self.save_dir / name)
                process = self.launch(self.save_dir / name, argv, lock)
        except (OSError, WriteError) as error:  # a full disk, a link in the place of the log
            text = f"{name} cannot be started: {reason(error)}."
            raise ApiError(text, 409, None, "not_started") from error
        # otherwise the process would stay as a zombie
        threading.Thread(target=self.wait, args=(process, self.save_dir / name), daemon=True).start()

    def wait(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        """Wait for a process. If the system ends it for lack of memory, it cannot write a message itself, so
        this function adds one to the log."""
        kills = memory_kills()
        if process.wait() in KILLED and memory_kills() > kills:
            with suppress(OSError):
                note(folder, OUT_OF_MEMORY)

    def wait_for_lock(self, lock: BinaryIO) -> None:
        """Lock the file. Raises ApiError if a training holds the lock, or somebody holds it for long."""
        end = time.monotonic() + SECONDS_FOR_LOCK
        while not try_lock(lock, fcntl.LOCK_EX):
            if time.monotonic() > end:
                other = (self.living() or {}).get("folder")
                raise ApiError(f"{other} is being trained.", 409, None, "busy", name=other)
            time.sleep(0.05)

    def launch(self, folder: Path, argv: list[str], lock: BinaryIO) -> "subprocess.Popen[bytes]":
        """Start a command that holds the lock. Raises OSError."""
        note(folder, f"{STARTED}{Path(argv[1]).name} ")
        # the log is a file: a pipe that nobody reads would stop it
        with open_own(folder, LOG, "ab") as log:
            return subprocess.Popen(
                ["bash", "-c", NOTE_GROUP, str(lock.fileno()), *argv], cwd=ROOT, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=[lock.fileno()],
            )  # fmt: skip

    def stop(self, name: str, at_once: bool = False) -> None:
        """Make a training save and end, or end it at once. Raises ApiError if it is not running."""
        group = self.group(name)
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(group, signal.SIGKILL if at_once else signal.SIGTERM)
        with suppress(OSError):  # a full disk
            note(self.save_dir / name, STOPPED)

    # --- the state of each

    def state(self, folder: Path) -> "State":
        """The state of a training. If one starts or ends while the files are read, they are read again."""
        living = self.living()
        while True:
            state, before = state_of(folder, living), living
            living = self.living()
            if living == before:
                return state

    def move(self, name: str, new_name: str | None, states: tuple[str, ...] = ()) -> None:
        """Rename the folder of a training, or without a new name move it to `.deleted`. states: those in
        which this is allowed; without any, all in which nothing runs. No training starts meanwhile. Raises
        ApiError."""
        with self.folders_locked(name):
            self.move_locked(name, new_name, states)

    @contextmanager
    def folders_locked(self, name: str) -> Iterator[None]:
        """Let no training start while a folder is moved. name: of the training. Raises ApiError, also if the
        block raises OSError or WriteError."""
        try:
            with open_regular(self.save_dir / FOLDERS_LOCK, "a+b") as lock:
                self.wait_for_lock(lock)
                yield
        except (OSError, WriteError) as error:
            raise ApiError(f"{name} cannot be moved: {reason(error)}.", 500, code="not_moved") from error

    def move_locked(self, name: str, new_name: str | None, states: tuple[str, ...]) -> None:
        """Do what `move` does. Raises ApiError and OSError."""
        folder = self.folder(name)
        state = self.state(folder).name
        if state in LIVING:
            raise ApiError(f"{name} is being trained.", 409, "name", "busy", name=name)
        if states and state not in states:
            raise ApiError(f"{name} is {state}.", 409, "name", "not_ready")
        for user, about in self.unfinished().items():
            if about.get("start") == name and user != name:
                raise ApiError(f"{user} continues from {name}.", 409, "name", "used_model", name=user)
        target = self.save_dir / new_name if new_name else self.place_among_deleted(folder.name)
        if os.path.lexists(target):
            raise ApiError(f"{target.name} exists already.", 409, "name", "exists")
        os.rename(folder, target)

    def place_among_deleted(self, name: str) -> Path:
        """A free path in `.deleted`. Raises OSError."""
        target = free_path(self.save_dir / DELETED / name)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        if target.parent.is_symlink():
            raise OSError(f"{DELETED} is a link, which leads elsewhere")
        return target

    def uses(self, file: Path) -> bool:
        """Whether an unfinished training reads an uploaded file."""
        read = [about.get("files") for about in self.unfinished().values()]
        return any(isinstance(names, list) and file.name in names for names in read)

    def unfinished(self) -> dict[str, dict[str, Any]]:
        """Name -> what the user asked for, of each training that is planned or runs."""
        living, found = self.living(), {}
        for name, folder in self.folders().items():
            files = files_in(folder, links=False)
            is_unfinished = SCRIPT in files and REPORT not in files
            if about_teaching(folder):
                is_unfinished = state_of(folder, living).name in UNFINISHED
            if is_unfinished or (living is not None and living["folder"] == folder.name):
                found[name] = read_object(folder / ABOUT, links=False)
        return found


class State(NamedTuple):
    """The state of a training."""

    name: str
    lines: list[str]  # of its log, since its last start
    is_own: bool  # whether it runs, started by a page


def state_of(folder: Path, living: dict[str, Any] | None) -> State:
    """The state of a training. living: the result of `Jobs.living`."""
    command, lines = last_start(folder)
    is_own = living is not None and living["folder"] == folder.name
    own = living if is_own else None
    if about := about_teaching(folder):
        return State(teaching_state(folder, about, lines, own), lines, is_own)
    return State(state_name(folder, command, lines, own), lines, is_own)


def teaching_state(
    folder: Path, about: dict[str, Any], lines: list[str], living: dict[str, Any] | None
) -> str:
    """The name of the state of a teaching, with the arguments of `state_name`. about: its description."""
    if living is not None:
        return SAVING if was_stopped(lines) else TRAINING
    if is_taught_elsewhere(folder):
        return TRAINING
    if any(map(LAST_WORDS.match, lines)):
        return "failed"
    return ended_state(folder, about, lines) or ("stopped" if was_stopped(lines) else "cut")


def was_stopped(lines: list[str]) -> bool:
    """Whether a training was asked to stop. lines: of its log."""
    return any(line.startswith((STOPPED, "stopped: ")) or "finishing this update" in line for line in lines)


def state_name(folder: Path, command: str, lines: list[str], living: dict[str, Any] | None) -> str:
    """The name of the state. command, lines: the result of `last_start`. living: that of `Jobs.living`, None
    unless it is this training."""
    files = files_in(folder, links=False)
    runs = [name.removesuffix(METRICS_SUFFIX) for name in files if name.endswith(METRICS_SUFFIX)]
    if living is not None:
        if was_stopped(lines):
            return SAVING
        return PLANNING if living["plans"] else TRAINING
    if any(is_running(run, folder) for run in runs):
        return TRAINING  # a terminal started it
    if REPORT in files:
        return READY
    if any(map(LAST_WORDS.match, lines)):
        return "failed"
    if SCRIPT not in files:
        return "new"
    if not runs and command != SCRIPT:
        return "planned"
    return "stopped" if was_stopped(lines) else "cut"


def forget_plan(folder: Path, about: dict[str, Any]) -> None:
    """Make a folder ready for a first or a new plan. about: what the user asked for."""
    folder.mkdir(exist_ok=True)
    for name in (SCRIPT, FACTS):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / ABOUT, about)


def forget_report(folder: Path) -> None:
    """Remove the report before a training continues, because a report means that it is completed."""
    (folder / REPORT).unlink(missing_ok=True)


# --- files


def try_lock(file: BinaryIO, kind: int) -> bool:
    """Lock a file (flock); False if another process holds the lock."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def rewrite(file: BinaryIO, content: dict[str, Any]) -> None:
    """Replace the content of an open, locked file by one line of JSON."""
    file.truncate(0)
    file.write(json.dumps(content).encode() + b"\n")
    file.flush()


def memory_kills() -> int:
    """How many processes Linux has ended for lack of memory since the system started; 0 on other systems."""
    with suppress(OSError), open("/proc/vmstat", encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    return 0


def open_own(folder: Path, name: str, mode: str = "rb") -> BinaryIO:
    """Open a file of a training. A link is not followed: the folder may come from a stranger, and the link
    may lead anywhere. Raises OSError."""
    return open_regular(folder / name, mode, links=False)


def note(folder: Path, what: str) -> None:
    """Add a line with the time to a log. Raises OSError."""
    with open_own(folder, LOG, "ab") as log:
        log.write(f"{what}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())


def log_tail(folder: Path) -> str:
    """The end of a log."""
    with suppress(OSError), open_own(folder, LOG) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        return file.read().decode(errors="replace")
    return ""


def last_start(folder: Path) -> tuple[str, list[str]]:
    """The name of the program that was started last, and the lines of the log since then."""
    first, *lines = log_tail(folder).rpartition(STARTED)[2].splitlines() or [""]
    return first.partition(" ")[0], [line[:LINE] for line in lines]


def error_of(lines: list[str]) -> dict[str, Any]:
    """The reason for a failure, from the last line of the log that gives one: its code and the line; for a
    bad record also the file, the line's number and what is wrong with the record."""
    found = [match for match in map(LAST_WORDS.match, lines) if match]
    own = [match for match in found if not match[0].endswith(SEE_ABOVE)]
    last = (own or found)[-1]
    line = last["said"] or last[0]
    for code, pattern in ERRORS.items():
        if match := re.search(pattern, line):
            return {"code": code, "text": line} | {k: v for k, v in match.groupdict().items() if v}
    return {"code": "other", "text": line}
