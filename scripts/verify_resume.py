"""Verify on your machine, with your settings, that a run that is killed and resumed gives bit-identical
results.

    python scripts/verify_resume.py
    python scripts/verify_resume.py --kills 100 --ranks 1,2 --use_moe 0,1
    python scripts/verify_resume.py --stage dpo --kills 12 --ranks 1,2
    python scripts/verify_resume.py --stage sft -- --data_path data/sft.jsonl --hidden_size 512

The first command uses built-in data, a tiny model and five kills; several combinations share the kills.
Arguments after `--` go to the stage script. The script compares a run without kills with one that is killed
at random moments and resumed: their weights, checkpoints, and metrics without times. After PASS it deletes
the folder of the runs.
"""

import argparse
import importlib
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
from typing import Any

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from common.arguments import parse_args as parse_stage_args
from common.errors import UserError
from dataset.token_cache import load_tokenizer
from scripts.demo.tour import make_tour
from scripts.demo.world import make_corpus
from tools.verify.compare import compare_runs
from tools.verify.launch import KILL_METHODS, Launch, Run
from trainer.trainer_utils import init_model
from trainer.weights.config import model_config
from trainer.weights.files import save_weights

# built-in data: least updates of a run, tokens of a record
UPDATES, UPDATES_PER_KILL, MEAN_LENGTH = 45, 3, 40
# a small run with several epochs, incomplete accumulation windows, saves and evaluations, and with dropout
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2}
SMALL = {"from_weight": "none", "dropout": 0.1, "max_seq_len": 128, "epochs": 3, "batch_size": 4}
SMALL |= {"accumulation_steps": 2, "learning_rate": 1e-3}
SMALL |= {"log_interval": 1, "save_interval": 5, "eval_interval": 9}
ROLLOUTS = {"reward": "length,repetition", "max_gen_len": 16}
GROUPS = ROLLOUTS | {"num_generations": 4}
AFTER_SFT: dict[str, dict[str, Any]] = {
    "dpo": {},
    "lora": {"lora_dropout": 0.1},
    "distillation": {},
    "grpo": GROUPS,
    "ppo": ROLLOUTS | {"num_iterations": 3, "early_stop_kl": 0.002},  # some passes are not made
    "agent": GROUPS | {"environment": "calculator", "max_seq_len": 512},
}
STAGES = ("pretrain", "sft", *AFTER_SFT)
RESERVED_FLAGS = {"--use_moe", "--from_resume", "--stop_after", "--checkpoint_dir", "--cache_dir"}
RESERVED_FLAGS.add("--save_dir")


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """The flags before `--`, and the arguments after it."""
    parser = Parser(
        description=__doc__.split("\n\n", 1)[0], epilog="Arguments after -- go to the stage script."
    )
    flag = parser.add_argument
    flag("--stage", choices=STAGES, default="sft", help="stage script to check")
    flag("--kills", type=int, default=5, help="kills in all combinations together")
    flag("--ranks", type=int_list, default="1", help="processes, e.g. 1,2")
    flag("--use_moe", type=int_list, default="0", help="0 dense, 1 MoE, 0,1 both")
    flag("--seed", type=int, default=random.randrange(10**6), help="seed of the kills")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, typed = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    reserved = flag_names(typed) & RESERVED_FLAGS
    if reserved:
        what = f"{', '.join(sorted(reserved))} after --"
        raise UserError(f"{what}: this script sets it; --use_moe goes before the --")
    if min(args.ranks) < 1 or args.kills < len(args.ranks) * len(args.use_moe):
        raise UserError("--ranks must be 1 or more, and --kills at least the number of combinations")
    return args, typed


def int_list(text: str) -> list[int]:
    """The numbers in a text such as 1,2."""
    return [int(number) for number in text.split(",")]


def flag_names(words: list[str]) -> set[str]:
    """The flags among the words of a command line."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


# --- the two runs


def make_run(stage: str, typed: list[str], ranks: int, use_moe: int, folder: Path, name: str) -> Run:
    """A run in `folder / name`. The user's flags and --config replace the built-in settings. Both runs read
    the data and start weights in `folder`. Raises UserError for wrong flags."""
    typed_flags = flag_names(typed)
    flags: dict[str, Any] = {}
    if "--config" not in typed_flags:
        flags = SMALL | {"data_path": folder / f"{stage}.jsonl"}
        if "--from_weight" not in typed_flags:
            flags |= SHAPE
        if not typed_flags & {"--eval_share", "--eval_data_path"}:
            flags["eval_share"] = 0.1
        if stage in AFTER_SFT:
            flags |= {"from_weight": folder / "start.pth"} | AFTER_SFT[stage]
        if stage == "distillation":
            flags["from_teacher_weight"] = folder / "teacher.pth"
    own = {f"{place}_dir": folder / name / place for place in ("save", "checkpoint", "cache")}
    own |= {"use_moe": use_moe, "from_resume": int(name == "killed")}
    words = [*command_line(flags), *typed, *command_line(own)]
    script = importlib.import_module(f"trainer.train_{'full_sft' if stage == 'sft' else stage}")
    args = parse_stage_args(script.Args, None, words)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(script.__file__), *words]
    return Run(folder / name, args, command)


def command_line(flags: dict[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def write_inputs(stage: str, args: Any, ranks: int, kills: int, folder: Path) -> None:
    """Write built-in data, enough for these kills, and start weights. args: settings of the stage."""
    updates = ceil(max(UPDATES, UPDATES_PER_KILL * kills) / args.epochs)
    count = updates * args.batch_size * args.accumulation_steps * ranks
    if args.packing:
        count *= max(1, args.max_seq_len // MEAN_LENGTH)
    source = {"pretrain": "pretrain", "dpo": "terse"}.get(stage, "sft")
    corpus = make_corpus(0) | make_tour(0)
    lines = [json.dumps(record) + "\n" for record in islice(cycle(corpus[f"{source}.jsonl"]), count)]
    (folder / f"{stage}.jsonl").write_text("".join(lines), encoding="utf-8")
    if stage in AFTER_SFT:
        small = args.model_copy(update={"hidden_size": 32, "num_hidden_layers": 1, "use_moe": False})
        for name, shape in (("start", args), ("teacher", small)):
            config = model_config(load_tokenizer(args.tokenizer_path), shape)
            save_weights(init_model(config, "none", args.tokenizer_path)[0], folder / f"{name}.pth")


# --- the kills


def run_to_end(run: Run) -> tuple[float, float]:
    """Run without a kill; returns the seconds until training began, and for training."""
    with closing(Launch(run)) as launch:
        launch.wait_for_training()
        start = launch.seconds()
        launch.ends_within(None)
        begin = launch.check_begin()
        print(f"  {run.folder.name}: ended after {launch.seconds():.1f} s, {begin}", flush=True)
        return start, launch.seconds() - start


def run_to_kill(run: Run, seconds: float, in_training: bool, method: str) -> tuple[bool, str]:
    """Start a run and kill it this many seconds after its start, or after training began. Returns whether it
    had made an update, and what happened. A run that ends earlier is not killed."""
    with closing(Launch(run)) as launch:
        if in_training:
            launch.wait_for_training()
        if launch.ends_within(seconds):
            return False, f"the run ended before it, {launch.check_begin()}"
        after, is_training = launch.seconds(), launch.is_training()
        launch.kill(method)
        begin = launch.check_begin()
    if is_training and run.saved_update() is not None:
        return True, f"in training, at update {run.last_update()}, after {after:.1f} s, {begin}; {method}"
    return False, f"before training, after {after:.1f} s, {begin}; {method}"


def check(reference: Run, killed: Run, rng: random.Random, kills: int, ranks: int) -> int:
    """Train without and with kills and compare. Returns the number of kills during training. FAIL ends the
    script."""
    start, training = run_to_end(reference)
    moments = sorted(rng.uniform(0, training) for _ in range(kills))
    in_training = 0
    for number, (last_moment, moment) in enumerate(zip([0.0, *moments], moments, strict=False), 1):
        while_it_starts = number % 4 == 0
        # a resumed run is about where the last kill was
        seconds = rng.uniform(0, start) if while_it_starts else moment - last_moment
        method = rng.choice(KILL_METHODS if ranks > 1 else KILL_METHODS[:2])
        was_training, what = run_to_kill(killed, seconds, not while_it_starts, method)
        print(f"  kill {number} of {kills}: {what}", flush=True)
        in_training += was_training
    run_to_end(killed)
    differing = compare_runs(reference.folder, killed.folder)
    if differing:
        sys.exit("FAIL: " + "\n      ".join(differing))
    if in_training == 0:
        sys.exit("FAIL: no kill fell within training; give more --kills, or make the run longer")
    return in_training


def main() -> None:
    """Distribute the kills over the combinations, check each, and print the result."""
    args, typed = parse_args()
    combinations = list(product(args.ranks, args.use_moe))
    work = Path(tempfile.mkdtemp(prefix="verify_resume_")).resolve()
    rng = random.Random(args.seed)
    in_training = 0
    for i, (ranks, use_moe) in enumerate(combinations):
        kills, folder = (args.kills + i) // len(combinations), work / f"ranks_{ranks}_moe_{use_moe}"
        reference = make_run(args.stage, typed, ranks, use_moe, folder, "reference")
        killed = make_run(args.stage, typed, ranks, use_moe, folder, "killed")
        if i == 0:
            print(f"{args.stage}, {args.kills} kills drawn with --seed {args.seed}, in {work}", flush=True)
        print(f"{'MoE' if use_moe else 'dense'}, ranks: {ranks}", flush=True)
        write_inputs(args.stage, reference.args, ranks, kills, folder)
        in_training += check(reference, killed, rng, kills, ranks)
    shutil.rmtree(work)
    print(f"PASS: {in_training} of {args.kills} kills in training, 0 differing bits")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also ends the runs
    with one_line_errors():
        main()
