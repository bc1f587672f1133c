"""Plan a run before it starts: from your data, this machine and your hours to every setting of pretraining
and SFT.

    python scripts/plan.py --pretrain_data data/pretrain.jsonl --sft_data data/sft.jsonl --hours 8
    python scripts/plan.py --pretrain_data data/book.txt --depth 8
    python scripts/plan.py --sft_data data/sft.jsonl --hours 1

It tokenises the data as the stages do, times updates of models of growing size on them (a minute in all), and
takes size, passes over the data, batch and learning rate from measured rules (scripts/planning/rules.py).
Where the time is short it takes a part of the data. It prints the plan, what limits it and what is unwise,
and writes a shell file that runs it. Without --pretrain_data the conversations are what is pretrained on,
too.
"""

import argparse
import math
import os
import shlex
import sys
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import add_flag
from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
import torch

from common.errors import UserError, say
from common.hub import make_local
from common.settings import ROOT, StageArgs
from dataset.files import expand_paths
from dataset.mixing import split_weights
from scripts.planning import files, machine, report, rules, stages
from scripts.planning.choice import choose
from trainer.devices.device import describe_device, mixed_precision, select_device


def main() -> None:
    """Measure, choose, write."""
    args = parse_args()
    device = select_device(args.device)
    memory = machine.free_memory(device)
    ranks = torch.cuda.device_count() if device.type == "cuda" and ":" not in args.device else 1
    text = describe_device(device, mixed_precision(args.dtype, device)[0])
    say(f"device: {text}; {memory / 1e9:.0f} GB of memory to use")

    opened = stages.open_stages(args, ranks)
    plan = choose(opened, [args.depth] if args.depth else rules.DEPTHS, memory, 3600 * args.hours)
    say("\n".join(report.describe(plan)))
    for text in report.unwise(plan):
        say(f"  unwise: {text}")

    path = files.write_plan(plan, args.save_dir)
    say(f"wrote {path}; next, in this order (the first ends with {args.save_dir}/report.html):")
    say(f"  bash {shlex.quote(str(path))}")
    say(f"  {files.chat_command(plan)}")


def parse_args() -> argparse.Namespace:
    """The command line; paths become local and absolute."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    text = "text to learn from, as --data_path of train_pretrain.py; without it the conversations"
    flag("--pretrain_data", help=text)
    text = "conversations, as --data_path of train_full_sft.py; without it pretraining alone"
    flag("--sft_data", help=text)
    text = "time for all stages; without it as long as the data are worth"
    flag("--hours", type=float, default=math.inf, help=text)
    flag("--depth", type=int, help=f"layers of the model, {rules.WIDTH} times as wide: the one dial")
    flag("--save_dir", default=str(ROOT / "out" / "plan"), help="folder for run.sh and what it writes")
    text = "folder of a tokenizer; without it the shipped one, or for few data a smaller one"
    flag("--tokenizer_path", help=text)
    text = "share of the records to hold out"
    add_flag(parser, StageArgs, "eval_share", default=0.02, help=text)
    for name in stages.SHARED:
        if name != "eval_share":
            add_flag(parser, StageArgs, name)
    args = parser.parse_args()
    for name in ("hours", "eval_share", "depth"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} {value} must be above 0")
    args.pretrain_data = args.pretrain_data or args.sft_data
    if not args.pretrain_data:
        raise UserError("give --pretrain_data, --sft_data or both")
    least = stages.START * (2 if args.sft_data else 1)
    if 3600 * args.hours <= least:
        raise UserError(
            f"--hours {args.hours:g}: starting the stages alone takes {least:.0f} s; give more time"
        )
    make_local(args)
    for path in filter(None, (args.pretrain_data, args.sft_data)):
        if split_weights(path)[1]:
            raise UserError(
                f"{path}: a plan is for data without weights; leave them out, and add them to run.sh"
            )
        expand_paths(path)  # missing data are named before anything takes time
    for name in ("save_dir", "cache_dir", "tokenizer_path"):  # run.sh runs in another folder
        if getattr(args, name):
            setattr(args, name, os.path.abspath(getattr(args, name)))
    return args


if __name__ == "__main__":
    with one_line_errors():
        main()
