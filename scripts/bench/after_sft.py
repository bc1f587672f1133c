"""Speed of LoRA, DPO and distillation against MiniMind's own scripts, on the same records and weights.

    python scripts/bench/after_sft.py --stage dpo --data_path data/dpo.jsonl --peer_path ../minimind

Both scripts train one epoch on the first --records records, in turn, --repeat times; all records are the same, so the
ratio of the records per second is that of real tokens per second. Counted is the time from the first update to the
last, and for our DPO also that of the reference's log-probabilities, which are computed before the first update. The
weights are random; the learning rate is nearly zero, so that the mean losses of the epoch can be compared. MiniMind's
script runs unmodified, with its defaults, apart from our tokenizer and no random system prompts.
"""

import argparse
import json
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.errors import UserError, say
from common.settings import ROOT, StageArgs
from dataset.data_files import expand_paths, iter_blocks, parse_block
from dataset.formats import to_pair
from scripts.bench.pairs import TOLERANCE, minimind_chat, peer_environment
from trainer.components.model_files import save_weights
from trainer.components.run_files import weight_path
from trainer.trainer_utils import init_model, load_tokenizer, model_config, setup_seed

LENGTHS = {"lora": 340, "dpo": 1024, "distillation": 340}  # MiniMind's defaults
UPDATE = re.compile(r"Epoch:\[1/1\]\s*\((\d+)/(\d+)\), loss: ([\d.]+)")
REFERENCE = "computing the reference"
WITHOUT_SYSTEM_PROMPTS = """
import runpy, sys
from dataset import lm_dataset
lm_dataset.pre_processing_chat = lambda conversations: conversations
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Epoch(NamedTuple):
    """What one run printed."""

    seconds: float  # of all updates
    loss: float  # mean over the updates


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    flag("--stage", choices=sorted(LENGTHS), required=True, help="stage to compare")
    flag("--data_path", required=True, help="conversations, or pairs for DPO")
    flag("--peer_path", required=True, help="folder of a checkout of jingyaogong/minimind")
    flag("--peer_python", default=sys.executable, help="Python with its packages; this one if not given")
    flag("--hidden_size", type=int, default=512, help="width of all models")
    flag("--num_hidden_layers", type=int, default=8, help="their depth")
    flag("--batch_size", type=int, default=8, help="records in an update")
    flag("--max_seq_len", type=int, help="longest sample, in tokens; MiniMind's default if not given")
    flag("--records", type=int, default=64, help="records of the epoch")
    flag("--repeat", type=int, default=3, help="pairs of runs")
    flag("--folder", default=str(ROOT / "out" / "bench_after_sft"), help="folder for the files of all runs")
    flag("--json", help="also write the result to this file")
    args = parser.parse_args()
    args.max_seq_len = args.max_seq_len or LENGTHS[args.stage]
    if not Path(args.peer_path, "trainer", f"train_{args.stage}.py").is_file():
        raise UserError(f"--peer_path {args.peer_path} is not a checkout of minimind: it has no such stage")
    if args.repeat < 1 or args.batch_size < 1 or args.records < 2 * args.batch_size:
        raise UserError("--repeat and --batch_size must be at least 1, and --records at least two updates")
    return args


def write_inputs(args: argparse.Namespace, folder: Path) -> None:
    """The records in MiniMind's format, and random weights for each model."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "trainer").mkdir(parents=True)
    shape = {"hidden_size": args.hidden_size, "num_hidden_layers": args.num_hidden_layers}
    settings = StageArgs(save_dir=str(folder / "out"), **shape)
    (folder / "model").symlink_to(Path(settings.tokenizer_path).resolve())
    blocks = iter_blocks(expand_paths(args.data_path, plain_text=False))
    parsed = (record for block in blocks for _, record in parse_block(block) if isinstance(record, dict))
    found = list(islice(parsed, args.records))
    if len(found) < args.records:
        raise UserError(f"--data_path holds {len(found)} records; give --records {len(found)}")
    records = [minimind_pair(record) if args.stage == "dpo" else minimind_chat(record) for record in found]
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    config = model_config(load_tokenizer(settings.tokenizer_path), settings)
    for seed, name in enumerate(("full_sft", "teacher")):
        setup_seed(seed)
        model, _ = init_model(config, "none", settings.tokenizer_path, settings.save_dir)
        save_weights(model, weight_path(settings.save_dir, name, config))


def minimind_pair(record: dict) -> dict:
    """A preference record in MiniMind's format."""
    return {name: chat.messages for name, chat in zip(("chosen", "rejected"), to_pair(record), strict=True)}


def command_of(args: argparse.Namespace, who: str, folder: Path) -> list[str]:
    """The command of one run."""
    flags = {"data_path": "../data.jsonl", "save_dir": "../out", "epochs": 1, "log_interval": 1, "num_workers": 0}
    flags |= {"batch_size": args.batch_size, "max_seq_len": args.max_seq_len, "learning_rate": 1e-12}
    shape = {"hidden_size": args.hidden_size, "num_hidden_layers": args.num_hidden_layers}
    if args.stage == "distillation":
        student = {"student_hidden_size": args.hidden_size, "student_num_layers": args.num_hidden_layers}
        teacher = {"teacher_hidden_size": args.hidden_size, "teacher_num_layers": args.num_hidden_layers}
        shape = student | teacher | {"teacher_use_moe": 0, "from_teacher_weight": "teacher"}
    own = (
        {"lora_targets": "q_proj,o_proj"} if args.stage == "lora" and who == "ours" else {}
    )  # those that MiniMind adapts
    script = f"trainer/train_{args.stage}.py"
    words = [str(word) for key, value in (flags | shape | own).items() for word in (f"--{key}", value)]
    if who == "peer":
        return [
            args.peer_python,
            "-u",
            "-c",
            WITHOUT_SYSTEM_PROMPTS,
            str(Path(args.peer_path).resolve() / script),
            *words,
        ]
    places = ["--cache_dir", str(folder / "cache"), "--checkpoint_dir", str(folder / "checkpoints")]
    return [sys.executable, "-u", str(ROOT / script), *words, *places]


def run(args: argparse.Namespace, who: str, folder: Path) -> Epoch:
    """Run one script to its end.

    Raises:
        UserError: it fails.
    """
    env = peer_environment(folder, args.peer_path if who == "peer" else None)
    shutil.rmtree(folder / "cache", ignore_errors=True)  # the reference's log-probabilities are part of our time
    options = {"cwd": folder / "trainer", "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = command_of(args, who, folder)
    process = subprocess.Popen(command, text=True, errors="replace", **options)
    assert process.stdout is not None
    epoch, lines = epoch_of(process.stdout)
    if process.wait():
        raise UserError(f"the script of {'the peer' if who == 'peer' else 'ours'} failed: {' '.join(lines[-2:])}")
    return epoch


def epoch_of(output: Iterable[str]) -> tuple[Epoch, list[str]]:
    """The time and the loss of a run whose lines arrive now, and the lines."""
    lines, losses, first, last, reference = [], [], 0.0, 0.0, 0.0
    for line in output:
        now = time.perf_counter()
        lines.append(line.strip())
        if len(lines) > 1 and REFERENCE in lines[-2]:
            reference = now - last
        if REFERENCE in line:
            last = now
        if found := UPDATE.search(line):
            first, last = first if losses else now, now
            losses.append(float(found[3]))
    updates = max(len(losses) - 1, 1)
    return Epoch((last - first) * len(losses) / updates + reference, statistics.fmean(losses or [0.0])), lines


def main() -> None:
    """Measure and print."""
    args = parse_args()
    folder = Path(args.folder).resolve()
    write_inputs(args, folder)
    pairs = []
    for pair in range(args.repeat):
        done = {who: run(args, who, folder) for who in (("ours", "peer") if pair % 2 else ("peer", "ours"))}
        ours, peer = done["ours"], done["peer"]
        pairs.append({"ours": args.records / ours.seconds, "peer": args.records / peer.seconds})
        pairs[-1] |= {"ratio": peer.seconds / ours.seconds, "loss": ours.loss, "peer_loss": peer.loss}
        rates = f"{pairs[-1]['ours']:.2f} and {pairs[-1]['peer']:.2f} records/s, ratio {pairs[-1]['ratio']:.2f}"
        say(f"pair {pair + 1}: {rates}; mean losses {ours.loss:.4f} and {peer.loss:.4f}")
    ratio = statistics.median(pair["ratio"] for pair in pairs)
    agree = all(abs(pair["loss"] / pair["peer_loss"] - 1) < TOLERANCE for pair in pairs)
    say(f"{args.stage}: {ratio:.2f} times MiniMind's records per second; losses {'agree' if agree else 'DISAGREE'}")
    if args.json:
        found = {"ratio": ratio, "pairs": pairs, "agree": agree, "command": shlex.join(sys.argv)}
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    with one_line_errors():
        main()
