"""Verify on your machine, with your settings, that a run that is killed and resumed gives bit-identical
results.

    python scripts/verify_resume.py
    python scripts/verify_resume.py --kills 100 --ranks 1,2 --use_moe 0,1
    python scripts/verify_resume.py --stage dpo --kills 12 --ranks 1,2
    python scripts/verify_resume.py --stage sft -- --data_path data/sft.jsonl --hidden_size 512

The first uses built-in data, a tiny model and five kills; several combinations share the kills.
Arguments after `--` go to the stage script. Per combination, a run without kills is compared with one that is
killed and resumed: weights, optimizer, counters, metrics. Moments of a kill: `start`, `cache` (tokens are
being cached), `update`, `save` (a file is being written), `evaluation`. Ways: SIGKILL to all processes,
to torchrun alone, or to one rank, after which torchrun starts all of them anew; SIGTERM. No process may
be left.
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
from contextlib import closing
from itertools import cycle, islice, product, zip_longest
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import UserError, reason
from dataset.token_cache import load_tokenizer
from scripts.demo.tour import make_tour
from scripts.demo.world import make_corpus
from tools.verify.launch import AFTER_SFT, STAGES, Launch, Run, stamp
from trainer.objectives.next_token import model_config
from trainer.report.metrics import read_metrics
from trainer.run.checkpoint import UNREADABLE, read_file
from trainer.trainer_utils import init_model
from trainer.weights.files import save_weights

TIMED = re.compile(r"second|_wait$|^mfu|_mb$")  # fields of a record that differ from run to run
STATE = ("model", "optimizer", "scaler", "epoch", "step", "update", "tokens", "samples_done", "best_eval")
# built-in data: least updates, records, tokens
UPDATES, UPDATES_PER_KILL, HELD_OUT, MEAN_LENGTH = 45, 3, 96, 40
OWN_FLAGS = {"--use_moe", "--from_resume", "--checkpoint_dir", "--cache_dir"}
MAX_DELAY = 0.02  # seconds from an event to its kill


def differences(right: Any, other: Any, name: str) -> list[str]:
    """Every tensor or number in nested dicts and lists that is not bit-identical, and by how much."""
    if isinstance(right, (list, tuple)) and isinstance(other, (list, tuple)):
        right, other = dict(enumerate(right)), dict(enumerate(other))
    if isinstance(right, dict) and isinstance(other, dict):
        texts = []
        for key in right | other:
            texts += differences(right.get(key, "missing"), other.get(key, "missing"), f"{name}.{key}")
        return texts
    if described(right) != described(other):
        return [f"{name}: {described(other)}, not {described(right)}"]
    if not isinstance(right, Tensor) or right.numel() == 0:
        return []
    differs = (value_bytes(right) != value_bytes(other)).any(dim=1)
    if not differs.any():
        return []
    largest = (right.double() - other.double()).abs().nan_to_num(nan=inf).max().item()
    return [f"{name}: {differs.sum()} of {len(differs)} values differ, by at most {largest:.3g}"]


def described(value: Any) -> str:
    """A value as text, in which NaN equals NaN and 0.0 differs from -0.0; of a tensor its type and shape."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def value_bytes(tensor: Tensor) -> Tensor:
    """The bytes of each value [N, size of a value]."""
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8)


def compare_metrics(right: list[dict], other: list[dict]) -> list[str]:
    """Differences of the records, one by one: other values, or records missing, duplicated or out of
    order."""
    texts = []
    for a, b in zip_longest(right, other, fillvalue={}):
        update = (a or b)["update"]
        texts += differences(without_times(a), without_times(b), f"update {update}")
    return texts


def without_times(record: dict) -> dict:
    """A record without the fields that differ from run to run."""
    return {key: value for key, value in record.items() if not TIMED.search(key)}


def compare_runs(right: Run, other: Run) -> list[str]:
    """Differences between two finished runs: the first update that differs, and the first tensor in each
    file."""
    by_file = [compare_metrics(read_metrics(right.metrics), read_metrics(other.metrics))]
    for name in ("weights", "best_weights", "checkpoint"):
        try:
            by_file.append(differences(contents(getattr(right, name)), contents(getattr(other, name)), name))
        except (SafetensorError, *UNREADABLE) as error:
            by_file.append([f"{name}: cannot be read ({reason(error)})"])
    return [f"{texts[0]} ({len(texts)} in all)" for texts in by_file if texts]


def contents(path: Path) -> dict:
    """What must be the same in a file of a run: of a checkpoint, the fields STATE."""
    if path.suffix == ".safetensors":  # an adapter
        return load_file(path)
    state = read_file(path)
    if "optimizer" not in state:
        return state
    return {key: state.get(key) for key in STATE}


class Kill(NamedTuple):
    """When and how a run is killed."""

    kind: str
    target: int  # the first update at which it may happen
    delay: float  # from the event on, as a share, 0 to 1
    weights: bool = False  # while the weights are written, not the checkpoint
    way: str = "all"  # see Launch


def draw_kills(rng: random.Random, count: int, records: list[dict], ranks: int = 1) -> list[Kill]:
    """Kills spread evenly over a run with these records, all kinds equally often; `cache` first, where one is
    built. Half of them, at random, send SIGKILL to all processes; the others end it in the other ways."""
    kinds: list[str] = []
    if count >= 3 or rng.random() < 0.5:
        kinds.append("cache")
    while len(kinds) < count:
        kinds += rng.sample(("start", "update", "save", "evaluation"), 4)
    other_ways = ["signal", "launcher", "rank"] if ranks > 1 else ["signal"]
    numbers = [0, *(record["update"] for record in records)]
    # the records before an evaluation
    before_evaluations = [numbers[i] for i, record in enumerate(records) if "eval_loss" in record]
    kills, low, last = [], 0, numbers[-1]
    for i, kind in enumerate(kinds[:count]):
        low = max(low, last * i // count)
        high = max(low + 1, last * (i + 1) // count)
        target = rng.randrange(low, high)
        if kind == "evaluation":
            target = next((number for number in before_evaluations if number >= target), target)
        way = rng.choice(["all", rng.choice(other_ways)])
        kills.append(Kill(kind, min(target, last - 1), rng.random(), rng.random() < 0.5, way))
        low = target
        if kind not in ("start", "cache"):
            low += 1
    return kills


def wait_for(kill: Kill, launch: Launch, start: float, update: float) -> str:
    """Wait for the moment of a kill (`start`, `update`: usual seconds); returns its kind, "" if the run ended
    before."""
    run, kind, delay = launch.run, kill.kind, kill.delay * MAX_DELAY
    if kind == "cache":
        launch.wait(lambda: run.unfinished_caches() - launch.caches or launch.training())
        if not launch.training():
            return kind if launch.wait(seconds=delay) else ""
        kind = "update"  # too late: the caches are complete
    if kind == "start":
        return kind if launch.wait(launch.training, kill.delay * start) else ""
    if not launch.wait(lambda: launch.training() and run.last_update() >= kill.target):
        return ""
    launch.find_processes()
    if kind == "update":
        delay = kill.delay * update
    elif kind == "save":
        path = run.weights if kill.weights else run.checkpoint
        wait_for_write(launch, path.with_name(f".{path.name}.tmp"), inf)
    else:  # the evaluation follows the next update
        launch.wait(seconds=update)
    return kind if launch.wait(seconds=delay) else ""


def wait_for_write(launch: Launch, path: Path, limit: float) -> None:
    """Wait until a file is written, or for `limit` seconds."""
    before = stamp(path)  # from the last save or an earlier kill
    launch.wait(lambda: stamp(path) not in (None, before), limit)


def write_data(stage: str, folder: Path, args: Any, ranks: int, kills: int) -> None:
    """Write the built-in data, with enough records for these kills."""
    per_update = args.batch_size * args.accumulation_steps * ranks
    updates = ceil(max(UPDATES, UPDATES_PER_KILL * kills) / args.epochs)
    count = updates * per_update - per_update // 3  # the last window of an epoch is incomplete
    if args.packing:
        count *= max(1, args.max_seq_len // MEAN_LENGTH)
    corpus = make_corpus(0) | make_tour(0)
    source = {"pretrain": "pretrain", "dpo": "terse"}.get(stage, "sft")
    folder.mkdir(parents=True)
    for ending, records in ((".jsonl", count), ("_eval.jsonl", HELD_OUT)):
        lines = [json.dumps(record) + "\n" for record in islice(cycle(corpus[source + ending]), records)]
        (folder / f"{stage}{ending}").write_text("".join(lines), encoding="utf-8")


def write_weights(run: Run) -> None:
    """Write what a stage after SFT starts from, and a teacher, for all runs."""
    tokenizer, args = load_tokenizer(run.args.tokenizer_path), run.args
    smaller = {"hidden_size": 32, "num_hidden_layers": 1, "use_moe": False}
    teacher = args.model_copy(update=smaller)
    for seed, (path, shape) in enumerate([(run.start, args), (run.teacher, teacher)]):
        torch.manual_seed(seed)
        model, _ = init_model(model_config(tokenizer, shape), "none", args.tokenizer_path)
        save_weights(model, path)


def train(run: Run, kills: list[Kill], start: float = 0.0, update: float = 0.0) -> tuple[Counter, float]:
    """Train to the end with these kills; returns how many there were of each (kind, way), and the seconds of
    the last launch. start, update: the usual seconds until training begins, and of an update."""
    Path(run.args.save_dir).mkdir(parents=True)
    done, name = Counter(), run.folder.name
    for kill in kills:
        with closing(Launch(run, kill.way)) as launch:
            kind = wait_for(kill, launch, start, update)
            if kind:
                launch.end()
        if not kind or launch.process.returncode == 0:
            print(f"  {name}: ended {launch.result(killed=False)}, before its kill", flush=True)
            return done, launch.seconds
        done[kind, launch.way] += 1
        count = f"kill {done.total()} of {len(kills)}, {kind}, {launch.way}"
        print(f"  {name}: {count}: {launch.result(killed=True)}", flush=True)
    with closing(Launch(run)) as launch:
        launch.wait()
    print(f"  {name}: ended {launch.result(killed=False)}", flush=True)
    return done, launch.seconds


def check(reference: Run, killed: Run, rng: random.Random, kills: int) -> Counter:
    """Train without and with kills and compare; returns the kills of each (kind, way). FAIL ends the
    script."""
    _, seconds = train(reference, [])
    records = read_metrics(reference.metrics)
    trained = records[-1]["seconds"]
    drawn = draw_kills(rng, kills, records, killed.ranks)
    done, _ = train(killed, drawn, start=seconds - trained, update=trained / records[-1]["update"])
    texts = compare_runs(reference, killed)
    if texts:
        sys.exit("FAIL: " + "\n      ".join(texts))
    if not done:
        sys.exit("FAIL: nothing was checked, since each launch ended before its kill; make the run longer")
    print(f"  0 differing bits in weights and checkpoint, and in {len(records)} records", flush=True)
    return done


def int_list(text: str) -> list[int]:
    """The numbers in a text such as 1,2."""
    return [int(number) for number in text.split(",")]


def parse_args() -> tuple[Any, list[str]]:
    """The flags before `--`, and the arguments after it."""
    parser = Parser(
        description=__doc__.split("\n", 1)[0], epilog="Arguments after -- go to the stage script."
    )
    flag = parser.add_argument
    flag("--stage", choices=STAGES, default="sft", help="stage script to check")
    flag("--kills", type=int, default=5, help="kills in all combinations together")
    flag("--ranks", type=int_list, default="1", help="processes, e.g. 1,2")
    flag("--use_moe", type=int_list, default="0", help="0 dense, 1 MoE, 0,1 both")
    flag("--seed", type=int, help="seed of the kills; drawn and printed if not given")
    flag("--work_dir", help="new folder for the runs; a temporary one if not given, deleted after PASS")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, typed = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    taken = {part.split("=")[0] for part in typed} & OWN_FLAGS
    if taken:
        raise UserError(
            f"{', '.join(sorted(taken))} after --: this script sets it; --use_moe goes before the --"
        )
    if min(args.ranks) < 1 or args.kills < len(args.ranks) * len(args.use_moe):
        raise UserError("--ranks must be 1 or more, and --kills at least the number of combinations")
    return args, typed


def new_folder(path: str | None) -> Path:
    """The folder for the runs, which is created; a temporary one if no path is given. Raises UserError."""
    if path is None:
        return Path(tempfile.mkdtemp(prefix="verify_resume_")).resolve()
    folder = Path(path).resolve()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"--work_dir {folder} cannot be created ({error.strerror}); give a new folder"
        ) from error
    return folder


def main() -> None:
    """Distribute the kills over the combinations, check each, and print the result."""
    args, typed = parse_args()
    combinations = sorted({*product(args.ranks, args.use_moe)})
    for ranks, use_moe in combinations:  # finds wrong flags before any work
        Run(args.stage, ranks, use_moe, Path(), "reference", typed)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    work = new_folder(args.work_dir)
    print(f"{args.stage}, {args.kills} kills drawn with --seed {seed}, in {work}", flush=True)
    rng, begin, done = random.Random(seed), time.monotonic(), Counter()
    for i, (ranks, use_moe) in enumerate(combinations):
        kills = (args.kills + i) // len(combinations)
        print(f"ranks: {ranks}, {'MoE' if use_moe else 'dense'}: {kills} kills", flush=True)
        folder = work / f"ranks_{ranks}_moe_{use_moe}"
        reference = Run(args.stage, ranks, use_moe, folder, "reference", typed)
        killed = Run(args.stage, ranks, use_moe, folder, "killed", typed)
        write_data(args.stage, folder, reference.args, ranks, kills)
        if args.stage in AFTER_SFT:
            write_weights(reference)
        done += check(reference, killed, rng, kills)
    if not args.work_dir:
        shutil.rmtree(work)
    how = ", ".join(f"{count} {kind} by {way}" for (kind, way), count in sorted(done.items()))
    seconds = time.monotonic() - begin
    total = f"{done.total()} of {args.kills} kills"
    print(f"PASS: {total}, 0 differing bits ({how}; --seed {seed}, {seconds:.0f} s)")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also ends the runs
    with one_line_errors():
        main()
