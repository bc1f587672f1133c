"""Runs of a stage, or of the engine, as real processes, forked from a server that has torch loaded: they can
be signalled, killed and limited like any other, and start in a fraction of a second instead of several. What
the modules under test load only when they need it, the server has too (tests/preloaded.py).
"""

import atexit
import importlib
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import common
import common.command_line
import trainer.stage
from trainer.devices import process_group
from trainer.weights.tensor_file import Writer

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"tests"}
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.stage_process", "tests.preloaded"])
# in speed.py: to measure it takes as long as a small run
QUICK_RATE = "matrix_rate = lambda device, dtype: 1e11\n"


@dataclass
class Faults:
    """What goes wrong, at which of the micro-batches that this process trains on (from 1)."""

    nan: tuple[int, ...] = ()  # the loss becomes NaN
    infinite_gradient: tuple[int, ...] = ()  # the loss is finite, its gradient is not
    # micro-batch -> signal that the process sends itself
    signals: dict[int, int] = field(default_factory=dict)
    eval_signal: int = 0  # signal at the first held-out micro-batch
    hog: int = 0  # the micro-batch at which it wants more memory than there is
    sleep: float = 0.0  # seconds in each micro-batch
    record: str = ""  # file for the sample ids of each micro-batch
    file_limit: int = 0  # bytes that a file may have
    script: str = ""  # Python that is run first


FORKED = """
import pickle
import torch.multiprocessing as mp
start = mp.start_processes

def fork(*args, **options):
    pickle.loads(pickle.dumps(args))  # as spawned ones would get them
    return start(*args, **options | {"start_method": "fork"})

mp.start_processes = fork
"""  # the processes that the engine starts have torch loaded, too


class ForkedRank(subprocess.Popen):
    """A rank of a torchrun that is forked itself (`torchrun`): it runs its file in a fork of torchrun, which has
    torch loaded, and is a process like any other."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *_):
        self.pid, self._child_created = os.fork(), True
        if self.pid:
            return
        status = 1
        try:
            os.setsid()
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # torchrun's connections, which close with torchrun
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            os.environ.update(env)
            importlib.reload(common)  # the first import ties a rank to torchrun
            script = next(i for i, word in enumerate(args) if word.endswith(".py"))
            sys.argv = list(args[script:])
            _run_file(Path(args[script]))
            status = 0
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


FORKED_RANKS = """
from tests.stage_process import ForkedRank
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
subprocess_handler.Popen = ForkedRank
"""


def called_from(function: str) -> bool:
    """Whether a function of this name is among the callers."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


writers: set[Writer] = set()  # those that have something to write
submit = Writer.submit


def noted_submit(writer: Writer, job: Callable[[], None]) -> None:
    writers.add(writer)
    submit(writer, job)


class FaultyLoss:
    """A loss function with faults."""

    def __init__(self, faults: Faults, loss_fn):
        self.faults, self.loss_fn, self.count = faults, loss_fn, 0

    def __call__(self, model, *others):
        # others: a frozen model, if there is one, the batch, the settings
        faults, batch = self.faults, others[-2]
        loss, aux_loss, *shown = self.loss_fn(model, *others)
        if called_from("first_pass") or not torch.is_grad_enabled():
            return loss, aux_loss, *shown
        self.count += 1
        if faults.record:
            with open(faults.record, "a") as file:
                print(*batch["sample_ids"].tolist(), file=file)
        if self.count in faults.nan:
            loss = loss * float("nan")
        if self.count in faults.infinite_gradient:
            tiny = loss * 0.0
            loss = loss + torch.sqrt(tiny)  # finite, with an infinite derivative
        if self.count == faults.hog:
            resource.setrlimit(resource.RLIMIT_AS, (1 << 33, resource.RLIM_INFINITY))
            loss = loss + torch.ones(1 << 31, dtype=torch.float64).sum()
        if self.count in faults.signals:
            # On a slow disk, a checkpoint begun just before a kill would be there or not by chance. Kills in the
            # middle of a write: weights/test_checkpoint.py.
            for writer in writers:
                writer.wait()
            os.kill(os.getpid(), faults.signals[self.count])
        time.sleep(faults.sleep)
        return loss, aux_loss, *shown


def _child(stage: str, argv: list[str], faults: Faults, env: dict[str, str], folder: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    # tests kill processes, never the machine; that files are flushed: trainer/test_power_cut.py
    os.fsync = lambda descriptor: None
    torch.set_num_threads(1)
    common.command_line.FAILED_RANK_PAUSE = 0.2  # no torchrun waits for these ranks
    process_group.MEETING_INTERVAL = 0.005
    multiprocessing.set_start_method("fork", force=True)  # of the data loader, as in a run started by hand
    if faults.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (faults.file_limit, resource.RLIM_INFINITY))
    sys.argv = [f"train_{stage}.py", *argv]
    if faults.eval_signal:
        _signal_in_evaluation(faults.eval_signal)
    exec(QUICK_RATE, vars(trainer.stage))
    Writer.submit = noted_submit
    exec(faults.script, {"os": os, "sys": sys})
    if stage.endswith(".py"):
        _run_file(Path(stage).resolve())
    elif "." in stage:
        importlib.import_module(stage).main()
    elif stage == "engine":
        _run_engine(faults)
    else:
        _run_stage(stage, faults)


def _run_file(path: Path) -> None:
    """As `python path` does. A file of another copy of the repository gets the modules of that copy."""
    if not path.is_relative_to(ROOT):
        for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT]
    sys.argv[0] = str(path)
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _signal_in_evaluation(number: int) -> None:
    """Send this process a signal at the first batch that it evaluates."""
    from trainer import loop

    to_device = loop.to_device

    def noted(batch, device):
        if not torch.is_grad_enabled():
            loop.to_device = to_device
            os.kill(os.getpid(), number)
        return to_device(batch, device)

    loop.to_device = noted


def _run_stage(stage: str, faults: Faults) -> None:
    from trainer.devices.errors import training_errors

    script = importlib.import_module(f"trainer.train_{'full_sft' if stage == 'sft' else stage}")
    _make_faulty(script.Objective, faults)
    with training_errors():
        script.main()


def _run_engine(faults: Faults) -> None:
    from llm.training.core.objective import TaskObjective
    from llm.training.train import main
    from trainer import train_full_sft, train_pretrain
    from trainer.devices.errors import training_errors

    for objective in (TaskObjective, train_full_sft.Objective, train_pretrain.Objective):
        _make_faulty(objective, faults)
    with training_errors():
        main()


def _make_faulty(objective: type, faults: Faults) -> None:
    faulty = FaultyLoss(faults, objective.loss)
    objective.loss = lambda *args: faulty(*args)


class StageProcess:
    """One rank of a stage."""

    def __init__(self, stage: str, argv: list, faults: Faults | None = None, **env: str):
        self.folder = Path(tempfile.mkdtemp(prefix="stage-"))
        args = (stage, [str(part) for part in argv], faults or Faults(), env, str(self.folder))
        for name in ("out", "err"):
            (self.folder / name).touch()
        self.process = context.Process(target=_child, args=args)
        self.process.start()
        atexit.register(self.process.kill)

    def wait(self, timeout: float = 120) -> int:
        """Exit status (negative: the signal that killed it); fails if it does not end in time."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still running after {timeout} s: {self.out[-2000:]}{self.err[-2000:]}")
        return self.process.exitcode

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)

    @property
    def out(self) -> str:
        """What it printed."""
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        """What it printed on stderr."""
        return (self.folder / "err").read_text()

    @property
    def error_lines(self) -> list[str]:
        """Lines of stderr, without the warning of few updates: runs of tests have few."""
        return [
            line
            for line in self.err.splitlines()
            if line.strip() and "updates in this run; more --epochs" not in line
        ]


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def finish(processes: list, seconds: float) -> None:
    """Start processes of `context`; all must end without an error, each within so many seconds of the one
    before."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def rank_variables(rank: int, ranks: int, port: int | str) -> dict[str, str]:
    """What torchrun sets for a rank on this machine."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}


def torchrun(script: Path, argv: list) -> StageProcess:
    """A torchrun that starts two ranks of this script."""
    words = ["--standalone", "--nproc_per_node", 2, script, *argv]
    return StageProcess("torch.distributed.run", words, Faults(script=FORKED_RANKS))


def start_ranks(
    count: int, stage: str, argv: list, faults: dict[int, Faults] | None = None, **env: str
) -> list[StageProcess]:
    """Several ranks as torchrun would start them, with a store like torchrun's: a rank that asked for one of rank 0
    before it listens would sleep for half a second. `faults` by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True"} | env
    processes = [
        StageProcess(stage, argv, (faults or {}).get(rank), **rank_variables(rank, count, store.port) | env)
        for rank in range(count)
    ]
    for process in processes:
        process.store = store  # it is there as long as they are
    return processes


def run(
    stage: str,
    argv: list,
    faults: Faults | None = None,
    ranks: int = 1,
    status: int = 0,
    timeout: float = 120,
    **env: str,
) -> StageProcess:
    """Run to the end, which must be this exit status; returns the process (rank 0). stage: its name,
    `engine`, the module of another script, or the file of one, which is run as `python FILE` does."""
    if ranks > 1:
        processes = start_ranks(
            ranks, stage, argv, dict.fromkeys(range(ranks), faults) if faults else None, **env
        )
    else:
        processes = [StageProcess(stage, argv, faults, **env)]
    ends = [process.wait(timeout) for process in processes]
    assert ends == [status] * len(processes), f"exit {ends}: " + "".join(
        p.out[-1500:] + p.err[-3000:] for p in processes
    )
    return processes[0]
