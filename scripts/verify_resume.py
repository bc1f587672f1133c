"""Verify on your machine, with your settings, that a run killed with SIGKILL and resumed gives bit-identical results.

    python scripts/verify_resume.py                                          built-in data, a tiny model, 5 kills
    python scripts/verify_resume.py --kills 100 --ranks 1,2 --use_moe 0,1    distributed over the four combinations
    python scripts/verify_resume.py --stage sft --kills 5 -- --data_path data/sft.jsonl --hidden_size 512 --batch_size 8

Arguments after `--` go to the stage script. Per combination, a run without kills is compared with one that is killed
and resumed: weights, optimizer, counters, metrics. Kill kinds: `start`, `cache` (tokens are being cached), `update`,
`save` (a file is being written), `evaluation`.
"""

import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import cycle, islice, product
from math import ceil, inf
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from common.settings import parse_args as parse_stage_args
from dataset.demo_corpus import make_corpus
from scripts.verify.differences import compare_runs
from trainer import train_full_sft, train_pretrain
from trainer.components.checkpoint import read_state
from trainer.components.metrics import read_metrics
from trainer.components.run_files import metrics_path, resume_path, run_name, weight_path
from trainer.components.state_files import UNREADABLE, newest_first, state_paths

STAGES = {"pretrain": train_pretrain, "sft": train_full_sft}
# A small run with many epochs, incomplete accumulation windows, saves and evaluations, and with dropout.
SMALL = {"from_weight": "none", "hidden_size": 64, "num_hidden_layers": 2, "dropout": 0.1, "max_seq_len": 128}
SMALL |= {"epochs": 3, "batch_size": 4, "accumulation_steps": 2, "learning_rate": 1e-3}
SMALL |= {"log_interval": 1, "save_interval": 5, "eval_interval": 9}
UPDATES, UPDATES_PER_KILL, HELD_OUT, MEAN_LENGTH = 45, 3, 96, 40  # built-in data: least updates, records, tokens
POLL, MAX_DELAY, TIMEOUT = 0.001, 0.02, 600.0  # seconds: between polls, from an event to its kill, without output
Kill = tuple[str, int, float, bool]  # kind, first update, delay (0 to 1), while writing weights (not a checkpoint)


class Run:
    """A run in its own folder: its command and the files that it writes."""

    def __init__(self, stage: str, ranks: int, use_moe: int, folder: Path, name: str, typed: list[str]):
        script = STAGES[stage]
        self.folder, self.launches = folder / name, 0
        data = {"data_path": folder / f"{stage}.jsonl", "eval_data_path": folder / f"{stage}_eval.jsonl"}
        own = {f"{place}_dir": self.folder / place for place in ("save", "checkpoint", "cache")}
        own |= {"use_moe": use_moe, "from_resume": int(name == "killed")}
        flags, own = ([part for k, v in f.items() for part in (f"--{k}", str(v))] for f in (data | SMALL, own))
        self.args = args = parse_stage_args(script.Args, script.__doc__, [*flags, *typed, *own])
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
        self.command = [sys.executable, *torchrun, str(script.__file__), *flags, *typed, *own]
        self.weights = weight_path(args.save_dir, args.save_weight, args)
        self.best_weights = weight_path(args.save_dir, f"{args.save_weight}_best", args)
        self.metrics = metrics_path(args.save_dir, run_name(args.save_weight, args))
        self.states = resume_path(args.checkpoint_dir, args.save_weight, args)
        self.checkpoint = state_paths(self.states)[args.parallel == "fsdp" and ranks > 1]
        typed_args = parse_stage_args(script.Args, script.__doc__, [*flags, *typed])
        self.first_weights = weight_path(typed_args.save_dir, args.from_weight, args)

    def saved_update(self) -> int | None:
        """The update at which a resumed run must continue; None if there is no checkpoint."""
        for path in newest_first(self.states):
            with suppress(*UNREADABLE):
                return read_state(path)["update"]
        return None

    def last_update(self) -> int:
        with suppress(OSError, IndexError), open(self.metrics, "rb") as file:
            file.seek(max(0, self.metrics.stat().st_size - 4096))
            return json.loads(file.read().split(b"\n")[-2])["update"]
        return 0

    def unfinished_caches(self) -> set[str]:
        return {path.name for path in Path(self.args.cache_dir).glob("*.tmp-*")}


def stamp(path: Path) -> tuple | None:
    """A value that changes whenever the file is written or replaced; None if there is no file."""
    with suppress(OSError):
        return (status := path.stat()).st_ino, status.st_mtime_ns, status.st_size
    return None


class Launch:
    """One start of a run, in its own session, observed from outside."""

    def __init__(self, run: Run):
        run.launches += 1
        self.run, self.log = run, run.folder / f"launch_{run.launches}.log"
        self.saved, self.metrics, self.caches = run.saved_update(), stamp(run.metrics), run.unfinished_caches()
        self.begin = time.monotonic()
        with open(self.log, "wb") as out:
            self.process = psutil.Popen(run.command, stdin=DEVNULL, stdout=out, stderr=STDOUT, start_new_session=True)
        self.processes: list[psutil.Process] = [self.process]

    def training(self) -> bool:
        """Whether it has opened its metrics file, the last thing before the first update."""
        return stamp(self.run.metrics) != self.metrics

    def wait(self, condition: Callable[[], object] = lambda: False, seconds: float = inf) -> bool:
        """Poll until the condition holds or the time is over; False if the process ends first."""
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            written = (path.stat().st_mtime for path in (self.log, self.run.metrics) if path.exists())
            if time.time() - max(written) > TIMEOUT:
                sys.exit(f"FAIL: no output for {TIMEOUT:.0f} s; {self.tail()}")
            time.sleep(POLL)
        return True

    def find_processes(self) -> None:
        """List its processes; done before a kill, this makes the kill faster."""
        with suppress(psutil.NoSuchProcess):
            self.processes = [self.process, *self.process.children(recursive=True)]

    def close(self) -> None:
        """Send SIGKILL to all its processes and wait until they have ended. torchrun's ranks have their own sessions,
        and a process may be starting another one: so all are suspended first, until there are no new ones."""
        suspended: list[psutil.Process] = []
        while found := [process for process in self.processes if process not in suspended]:
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            suspended += found
            self.find_processes()
        for process in suspended:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                while process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
                    time.sleep(POLL)
        self.process.wait()
        self.seconds = time.monotonic() - self.begin

    def tail(self) -> str:
        """The last lines that it printed, without torchrun's report on a failed rank."""
        lines = re.split(r".*torch/distributed/elastic", self.log.read_text("utf-8", "replace"))[0].splitlines()[-15:]
        return f"the last lines of {self.log}:\n" + "\n".join(f"    {line}" for line in lines)

    def result(self, killed: bool) -> str:
        """A description of this launch. FAIL if it ended in another way, or did not resume from the checkpoint."""
        resumed = re.findall(r"^resuming .*\bupdate (\d+)", self.log.read_text("utf-8", "replace"), re.M)
        if self.process.returncode != (-signal.SIGKILL if killed else 0):
            sys.exit(f"FAIL: a launch ended by itself with status {self.process.returncode}; {self.tail()}")
        if self.training() and resumed != ([] if self.saved is None else [str(self.saved)]):
            sys.exit(f"FAIL: checkpoint of update {self.saved}, but the run resumed from {resumed}; {self.tail()}")
        where = f"at update {self.run.last_update()}" if self.training() else "before training"
        origin = "from the start" if self.saved is None else f"resumed from update {self.saved}"
        return f"{where} after {self.seconds:.1f} s, {origin}"


def draw_kills(rng: random.Random, count: int, records: list[dict]) -> list[Kill]:
    """Kills spread evenly over a run with these records, all kinds equally often; `cache` first, where one is built."""
    kinds = ["cache"] * (rng.randint(0, 1) if count < 3 else 1 + (count >= 10 and rng.randint(0, 1)))
    while len(kinds) < count:
        kinds += rng.sample(("start", "update", "save", "evaluation"), 4)
    numbers = [0, *(record["update"] for record in records)]
    evaluated = [before for before, record in zip(numbers, records, strict=False) if "eval_loss" in record]
    kills, low, last = [], 0, numbers[-1]
    for i, kind in enumerate(kinds[:count]):
        low = max(low, last * i // count)
        target = rng.choice(range(low, max(low + 1, last * (i + 1) // count)))
        if kind == "evaluation":  # the record before an evaluation
            target = next((number for number in evaluated if number >= target), target)
        kills.append((kind, min(target, last - 1), rng.random(), rng.random() < 0.5))
        low = target + (kind not in ("start", "cache"))
    return kills


def wait_for(kill: Kill, launch: Launch, start: float, update: float) -> str:
    """Wait for the moment of a kill (`start`, `update`: usual seconds); returns its final kind, "" if the run ended."""
    (kind, target, fraction, weights), run = kill, launch.run
    if kind == "start":
        return kind if launch.wait(launch.training, fraction * start) else ""
    if kind == "cache":
        if launch.wait(lambda: run.unfinished_caches() - launch.caches or launch.training()) and not launch.training():
            return kind if launch.wait(seconds=fraction * MAX_DELAY) else ""
        kind = "update"  # too late: the caches are complete
    if not launch.wait(lambda: launch.training() and run.last_update() >= target):
        return ""
    launch.find_processes()
    if kind == "update":
        return kind if launch.wait(seconds=fraction * update) else ""
    path = run.weights if weights and kind == "save" else run.checkpoint
    path = path.with_name(f".{path.name}.tmp") if kind == "save" else path
    old = stamp(path)  # from the last save or an earlier kill
    seen = launch.wait(lambda: stamp(path) not in (None, old), update if kind == "evaluation" else inf)
    return kind if seen and launch.wait(seconds=fraction * MAX_DELAY) else ""


def write_data(stage: str, folder: Path, args: Any, ranks: int, kills: int) -> None:
    """Write the built-in data, with enough records for these kills."""
    per_update = args.batch_size * args.accumulation_steps * ranks
    per_epoch = ceil(max(UPDATES, UPDATES_PER_KILL * kills) / args.epochs) * per_update - per_update // 3
    per_row = max(1, args.max_seq_len // MEAN_LENGTH) if args.packing else 1
    corpus = make_corpus(0)
    folder.mkdir(parents=True)
    for name, count in ((f"{stage}.jsonl", per_epoch * per_row), (f"{stage}_eval.jsonl", HELD_OUT)):
        lines = [json.dumps(record) + "\n" for record in islice(cycle(corpus[name]), count)]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def train(run: Run, kills: list[Kill], start: float = 0.0, update: float = 0.0) -> tuple[Counter, float]:
    """Train to the end with these kills; returns how many of each kind hit, and the seconds of the last launch."""
    run.weights.parent.mkdir(parents=True)
    if run.first_weights.is_file():
        shutil.copy(run.first_weights, run.weights.parent)
    done: Counter = Counter()
    for kill in [*kills, None]:
        with closing(Launch(run)) as launch:
            kind = wait_for(kill, launch, start, update) if kill else launch.wait() and ""
        ended = not kind or launch.process.returncode == 0
        text = launch.result(killed=not ended)
        if ended:
            break
        done[kind] += 1
        print(f"  {run.folder.name}: kill {done.total()} of {len(kills)}, {kind}: {text}", flush=True)
    print(f"  {run.folder.name}: ended {text}" + ", before its kill" * (kill is not None), flush=True)
    return done, launch.seconds


def check(reference: Run, killed: Run, control: Run, rng: random.Random, kills: int) -> Counter:
    """Train without and with kills and compare; returns the number of each kind. FAIL ends the script."""
    _, seconds = train(reference, [])
    records = read_metrics(reference.metrics)
    start, update = seconds - records[-1]["seconds"], records[-1]["seconds"] / records[-1]["update"]
    done, _ = train(killed, draw_kills(rng, kills, records), start, update)
    if differing := compare_runs(reference, killed):
        train(control, [])
        if other := compare_runs(reference, control):
            differing.append(f"inconclusive: two runs without kills differ as well: {other[0]}")
        sys.exit("FAIL: " + "\n      ".join(differing))
    if not done:
        sys.exit("FAIL: nothing was checked, since each launch ended before its kill; make the run longer")
    print(f"  0 differing bits in weights and checkpoint, and in {len(records)} records", flush=True)
    return done


def parse_args() -> tuple[Any, list[str]]:
    """The flags before `--`, and the arguments after it."""
    parser = Parser(description=__doc__.split("\n", 1)[0], epilog="Arguments after -- go to the stage script.")
    flag = parser.add_argument
    flag("--stage", choices=sorted(STAGES), default="sft", help="stage script to check")
    flag("--kills", type=int, default=5, help="kills in all combinations together")
    flag("--ranks", type=lambda text: [int(n) for n in text.split(",")], default="1", help="processes, e.g. 1,2")
    flag("--use_moe", type=lambda text: [int(n) for n in text.split(",")], default="0", help="0 dense, 1 MoE, 0,1 both")
    flag("--seed", type=int, help="seed of the kills; drawn and printed if not given")
    flag("--work_dir", help="new folder for the runs; a temporary one if not given, deleted after PASS")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, typed = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    taken = {part.split("=")[0] for part in typed} & {"--use_moe", "--from_resume", "--checkpoint_dir", "--cache_dir"}
    if taken:
        raise UserError(f"{', '.join(sorted(taken))} after --: this script sets it; --use_moe goes before the --")
    if min(args.ranks) < 1 or args.kills < len(args.ranks) * len(args.use_moe):
        raise UserError("--ranks must be 1 or more, and --kills at least the number of combinations")
    return args, typed


def main() -> None:
    """Distribute the kills over the combinations, check each, and print the result."""
    args, typed = parse_args()
    combinations = sorted({*product(args.ranks, args.use_moe)})
    for ranks, use_moe in combinations:  # finds wrong flags before any work
        Run(args.stage, ranks, use_moe, Path(), "reference", typed)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    work = Path(args.work_dir or tempfile.mkdtemp(prefix="verify_resume_")).resolve()
    try:
        work.mkdir(parents=True, exist_ok=not args.work_dir)
    except OSError as error:
        raise UserError(f"--work_dir {work} cannot be created ({error.strerror}); give a new folder") from error
    print(f"{args.stage}, {args.kills} kills drawn with --seed {seed}, in {work}", flush=True)
    rng, begin, done = random.Random(seed), time.monotonic(), Counter()
    for i, (ranks, use_moe) in enumerate(combinations):
        kills = (args.kills + i) // len(combinations)
        print(f"{ranks} rank{'s' * (ranks > 1)}, {'MoE' if use_moe else 'dense'}: {kills} kills", flush=True)
        folder = work / f"ranks_{ranks}_moe_{use_moe}"
        runs = [Run(args.stage, ranks, use_moe, folder, name, typed) for name in ("reference", "killed", "control")]
        write_data(args.stage, folder, runs[0].args, ranks, kills)
        done += check(runs[0], runs[1], runs[2], rng, kills)
    if not args.work_dir:
        shutil.rmtree(work)
    how = ", ".join(f"{count} {kind}" for kind, count in done.items()) + f"; --seed {seed}"
    print(f"PASS: {done.total()} of {args.kills} kills, 0 differing bits ({how}, {time.monotonic() - begin:.0f} s)")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also ends the runs
    with one_line_errors():
        main()
