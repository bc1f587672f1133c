"""Plan a run before it starts: from your data, this machine and your hours to every setting of pretraining
and SFT.

    python scripts/plan.py --pretrain_data data/pretrain.jsonl --sft_data data/sft.jsonl --hours 8
    python scripts/plan.py --pretrain_data data/book.txt --depth 8
    python scripts/plan.py --sft_data data/sft.jsonl --hours 1
    python scripts/plan.py --pretrain_data data/pretrain.jsonl --sft_data data/sft.jsonl --gpu rtx4090

It tokenises the data as the stages do, times a few updates of models of growing size on them (a minute in
all), and takes size, passes over the data, batch and learning rate from measured rules
(trainer/optim/rules.py). Where the time is short it takes a part of the data. It prints the plan, the
held-out loss to expect if such runs were measured, what limits it and what is unwise, and writes a shell file
that runs it. Without --pretrain_data the conversations are what is pretrained on, too.
"""

import argparse
import math
import os
import shlex
import sys
import time
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import add_flag
from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from common.errors import UserError, say
from common.hub import make_local
from common.settings import ROOT, ModelConfig, StageArgs
from dataset.files import expand_paths
from dataset.mixing import split_weights
from dataset.token_cache import load_tokenizer
from scripts.planning import files, machine, report, stages
from scripts.planning.choice import PASSES, Planner, choose
from scripts.planning.machine import Machine
from scripts.planning.trigrams import trigram_loss
from trainer.optim import rules
from trainer.report.speed import GPUS

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
MEASURED_TOKENS = 8192  # of an update, at most


def main() -> None:
    """Measure, choose, write."""
    args = parse_args()
    here = Machine.find(args.device, args.dtype, args.gpu)
    say(here.describe())

    # 1. Refuse what cannot be done before all data are tokenised; then tokenise them.
    tokenizer = load_tokenizer(args.tokenizer_path or ModelConfig().tokenizer_path)
    depths = [args.depth] if args.depth else DEPTHS
    stages.check_first(args, here, stages.shape_of(depths[0], tokenizer))
    opened = stages.open_stages(args, here.ranks)
    data, held_out = opened[0].data, opened[0].held_out
    tokenizer = load_tokenizer(opened[0].args.tokenizer_path)

    # 2. Measure how predictable the text is, and what an update of each model costs on it.
    trigram = trigram_loss(data, held_out, len(tokenizer))
    tokens = min(rules.update_tokens(data.num_tokens * PASSES), MEASURED_TOKENS)
    count = max(1, round(tokens / (8 if args.gpu else 1) / data.mean_tokens))
    batch = data.collate([data[i * len(data) // count] for i in range(count)])
    begin, before = time.monotonic(), machine.cpu_seconds_of_others()
    costs = machine.measure(here, lambda depth: stages.shape_of(depth, tokenizer), depths, batch)
    used = (machine.cpu_seconds_of_others() - before) / (time.monotonic() - begin)
    say("\n".join(report.describe_costs(costs) + report.describe_other_programs(here, used)))

    # 3. Choose the model and the share of the data.
    plan, limit = choose(Planner(opened, here.memory, 3600 * args.hours, trigram), costs)
    say("\n".join(report.describe(plan, limit)))
    for text in report.unwise(plan, size_is_given=bool(args.depth)):
        say(f"  unwise: {text}")

    # 4. Write what runs it.
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
    text = f"layers of the model, {stages.WIDTH} times as wide: the one dial"
    flag("--depth", type=int, help=text)
    flag("--gpu", choices=sorted(GPUS), help="plan for this GPU by its data sheet; nothing is measured")
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
    for path in (args.pretrain_data, args.sft_data):
        if path is None:
            continue
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
