"""Verify on your machine, with your settings, that a run that is killed and resumed gives bit-identical
results.

    python scripts/verify_resume.py
    python scripts/verify_resume.py --kills 100 --ranks 1,2 --use_moe 0,1
    python scripts/verify_resume.py --stage dpo --kills 12 --ranks 1,2
    python scripts/verify_resume.py --stage sft -- --data_path data/sft.jsonl --hidden_size 512

The first uses built-in data, a tiny model and five kills; several combinations share the kills.
Arguments after `--` go to the stage script. Per combination, a run without kills is compared with one that is
killed and resumed: weights, best weights, checkpoint, metrics without times. The moments of the kills are
random: about a quarter falls into the seconds before training, the others are spread over training. Ways:
SIGKILL to all processes, to torchrun alone, or to one rank, after which torchrun starts all of them anew;
SIGTERM. No process may be left. The folder of the runs is deleted after PASS.
"""

import json
import random
import shutil
import signal
import sys
import tempfile
from contextlib import closing
from itertools import cycle, islice, product
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
import torch

from common.errors import UserError
from dataset.token_cache import load_tokenizer
from scripts.demo.tour import make_tour
from scripts.demo.world import make_corpus
from scripts.text_table import text_table
from tools.verify.compare import compare_runs
from tools.verify.launch import AFTER_SFT, STAGES, WAYS, Launch, Run
from trainer.objectives.next_token import model_config
from trainer.report.metrics import read_metrics
from trainer.trainer_utils import init_model
from trainer.weights.files import save_weights

# built-in data: least updates of a run, held-out records, tokens of a record
UPDATES, UPDATES_PER_KILL, HELD_OUT, MEAN_LENGTH = 45, 3, 96, 40
SHARE_BEFORE_TRAINING = 0.25  # of the kills
OWN_FLAGS = {"--use_moe", "--from_resume", "--checkpoint_dir", "--cache_dir", "--save_dir"}


class Kill(NamedTuple):
    """When and how a run is killed."""

    in_training: bool
    seconds: float  # after training has begun, else after the start of the processes
    way: str


def draw_kills(rng: random.Random, count: int, ranks: int, start: float, training: float) -> list[Kill]:
    """Kills at random moments, at least one of them in training. start, training: the seconds that the
    uninterrupted run took until training began, and those of training."""
    before = [rng.random() < SHARE_BEFORE_TRAINING for _ in range(count)]
    before[rng.randrange(count)] = False
    moments = sorted(rng.uniform(0, training) for is_before in before if not is_before)
    ways = ["all", "term"] if ranks == 1 else list(WAYS)
    kills, last = [], 0.0
    for is_before in before:
        if is_before:
            seconds = rng.uniform(0, start)
        else:  # a resumed run is about where the last kill was
            moment = moments.pop(0)
            seconds, last = moment - last, moment
        kills.append(Kill(not is_before, seconds, rng.choice(ways)))
    return kills


def run_to_kill(run: Run, kill: Kill, number: str) -> bool | None:
    """Start a run and kill it; returns whether it was training, None if it ended before. Prints one line."""
    with closing(Launch(run)) as launch:
        if kill.in_training:
            launch.wait(launch.is_training)
        is_running = launch.wait(seconds=kill.seconds)
        seconds, is_training = launch.seconds(), launch.is_training()
        if is_running:
            launch.end(kill.way)
        elif launch.process.returncode != 0:
            launch.fail(f"a launch ended by itself with status {launch.process.returncode}")
        begin = launch.check_begin()
    saved = run.saved_update()
    if not is_running or launch.process.returncode == 0:
        print(f"  {number}: the run ended before it, {begin}", flush=True)
        return None
    is_training = is_training and saved is not None  # its first update is made
    where = f"in training, at update {run.last_update()}" if is_training else "before training"
    print(f"  {number}: {where}, after {seconds:.1f} s, {begin}; {WAYS[kill.way]}", flush=True)
    return is_training


def run_to_end(run: Run) -> tuple[float, float]:
    """Run without a kill; returns the seconds until training began, and those of training."""
    with closing(Launch(run)) as launch:
        launch.wait(launch.is_training)
        start = launch.seconds()
        launch.wait()
        if launch.process.returncode != 0:
            launch.fail(f"a launch ended by itself with status {launch.process.returncode}")
        begin = launch.check_begin()
        print(f"  {run.folder.name}: ended after {launch.seconds():.1f} s, {begin}", flush=True)
    return start, read_metrics(run.metrics)[-1]["seconds"]


def check(reference: Run, killed: Run, rng: random.Random, count: int) -> tuple[int, int]:
    """Train without and with kills and compare; returns the kills made, and those in training. FAIL ends the
    script."""
    for run in (reference, killed):
        Path(run.args.save_dir).mkdir(parents=True)
    kills = draw_kills(rng, count, killed.ranks, *run_to_end(reference))
    were_training = []
    for i, kill in enumerate(kills, 1):
        is_training = run_to_kill(killed, kill, f"kill {i} of {count}")
        if is_training is None:
            break
        were_training.append(is_training)
    run_to_end(killed)
    texts = compare_runs(reference, killed)
    if texts:
        sys.exit("FAIL: " + "\n      ".join(texts))
    return len(were_training), sum(were_training)


def write_data(run: Run, folder: Path, kills: int) -> None:
    """Write the built-in data, with enough records for these kills."""
    args = run.args
    per_update = args.batch_size * args.accumulation_steps * run.ranks
    updates = ceil(max(UPDATES, UPDATES_PER_KILL * kills) / args.epochs)
    count = updates * per_update - per_update // 3  # the last window of an epoch is incomplete
    if args.packing:
        count *= max(1, args.max_seq_len // MEAN_LENGTH)
    corpus = make_corpus(0) | make_tour(0)
    source = {"pretrain": "pretrain", "dpo": "terse"}.get(run.stage, "sft")
    folder.mkdir(parents=True)
    for ending, records in ((".jsonl", count), ("_eval.jsonl", HELD_OUT)):
        lines = [json.dumps(record) + "\n" for record in islice(cycle(corpus[source + ending]), records)]
        (folder / f"{run.stage}{ending}").write_text("".join(lines), encoding="utf-8")


def write_weights(run: Run) -> None:
    """Write what a stage after SFT starts from, and a teacher, for all runs."""
    tokenizer, args = load_tokenizer(run.args.tokenizer_path), run.args
    teacher = args.model_copy(update={"hidden_size": 32, "num_hidden_layers": 1, "use_moe": False})
    for seed, (path, shape) in enumerate([(run.start, args), (run.teacher, teacher)]):
        torch.manual_seed(seed)
        model, _ = init_model(model_config(tokenizer, shape), "none", args.tokenizer_path)
        save_weights(model, path)


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


def main() -> None:
    """Distribute the kills over the combinations, check each, and print the result."""
    args, typed = parse_args()
    combinations = sorted({*product(args.ranks, args.use_moe)})
    for ranks, use_moe in combinations:  # finds wrong flags before any work
        Run(args.stage, ranks, use_moe, Path(), "reference", typed)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    work = Path(tempfile.mkdtemp(prefix="verify_resume_")).resolve()
    print(f"{args.stage}, {args.kills} kills drawn with --seed {seed}, in {work}", flush=True)
    rng = random.Random(seed)
    rows = [["model", "ranks", "kills", "in training", "differing bits"]]
    counts = []  # of kills, and of those in training, for each combination
    for i, (ranks, use_moe) in enumerate(combinations):
        model, kills = "MoE" if use_moe else "dense", (args.kills + i) // len(combinations)
        print(f"{model}, ranks: {ranks}", flush=True)
        folder = work / f"ranks_{ranks}_moe_{use_moe}"
        reference = Run(args.stage, ranks, use_moe, folder, "reference", typed)
        killed = Run(args.stage, ranks, use_moe, folder, "killed", typed)
        write_data(reference, folder, kills)
        if args.stage in AFTER_SFT:
            write_weights(reference)
        done, in_training = check(reference, killed, rng, kills)
        counts.append((done, in_training))
        rows.append([model, str(ranks), f"{done} of {kills}", str(in_training), "0"])
    print(text_table(rows))
    if any(in_training == 0 for _, in_training in counts):
        sys.exit("FAIL: no kill fell within training; give more --kills, or make the run longer")
    shutil.rmtree(work)
    total, in_training = (sum(column) for column in zip(*counts, strict=True))
    print(f"PASS: {total} of {args.kills} kills, {in_training} of them in training, 0 differing bits")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also ends the runs
    with one_line_errors():
        main()
