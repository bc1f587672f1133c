"""Plan a run: choose every setting of pretraining and SFT from your data, this machine and your hours.

    python scripts/plan.py --pretrain_data data/pretrain.jsonl --sft_data data/sft.jsonl --hours 8
    python scripts/plan.py --pretrain_data data/book.txt --depth 8
    python scripts/plan.py --sft_data data/sft.jsonl --hours 1
    python scripts/plan.py --pretrain_data data/second.txt --from_weight out/plan/pretrain_256.pth

It tokenises the data as the stages do and times updates of models of growing size on them (a minute in all).
It takes size, passes over the data, batch size and learning rate from measured rules
(scripts/planning/rules.py). If the time is short, it uses a part of the data. It prints the plan, what limits
it and what is unwise, and writes a shell file that runs it. Without --pretrain_data, the model is pretrained
on the conversations, too. With --from_weight, a trained model learns more: its size, tokenizer and vocabulary
stay, and without --pretrain_data it learns from the conversations alone.
"""

import argparse
import math
import os
import shlex
import sys
from pathlib import Path
from shutil import disk_usage
from typing import Any

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import add_flag
from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from common.errors import UserError, say
from common.files import files_in, is_file, lock_output
from common.hub import make_local
from common.settings import ROOT, ModelConfig, StageArgs
from dataset.files import expand_paths
from dataset.mixing import split_weights
from dataset.show_samples import describe_leaks, first_questions
from dataset.token_cache import load_tokenizer
from scripts.planning import files, machine, rules, stages
from scripts.planning.choice import Plan, choose, total_seconds
from scripts.runs.words import LANGUAGES, user_language
from scripts.text_table import text_table
from trainer.devices.device import describe_device, mixed_precision, select_device
from trainer.report.metrics import duration
from trainer.stage import read_start_weights
from trainer.weights.config import SHAPE, check_tokenizer
from trainer.weights.paths import ADAPTER_CONFIG, METRICS_SUFFIX

MIN_BYTES_PER_TOKEN = 2.5
UNWISE = {
    "more time": "{stage}: {updates} updates teach little; more time helps",
    "more data": "{stage}: {updates} updates teach little; more data help",
    "few tokens": "{tokens:,} different tokens: expect words and phrases of the text, but hardly a sentence "
    "that makes sense, unless the texts are much alike. More text helps, or weights that have read more "
    "(docs/training.md#from-other-weights)",
    "short tokens": "{bytes:.1f} bytes per token: the vocabulary was made for other text "
    "(docs/data.md#tokenizer)",
    "few conversations": "{conversations:,} conversations teach how to answer, but no knowledge. They help "
    "more on weights that have read more, MiniMind's or a Qwen3 (PATH is a file, a folder or "
    "hf://OWNER/NAME):\n    {command}",
    "leaks": "{text}",
    "disk": "the runs write {need:.1f} GB, but only {free:.1f} GB are free; free some space, or give "
    "another --save_dir",
}


def main() -> None:
    """Measure, choose, write."""
    args = parse_args()
    device = select_device(args.device)
    if device.type == "cuda":  # a model that is too large must end in OutOfMemoryError: segments may not grow
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    memory = machine.free_memory(device)
    text = describe_device(device, mixed_precision(args.dtype, device)[0])
    say(f"device: {text}; {memory / 1e9:.0f} GB of memory available")

    opened = stages.open_stages(args)
    depth = args.shape.get("num_hidden_layers", args.depth)
    plan = choose(opened, [depth] if depth else rules.DEPTHS, memory, 3600 * args.hours)
    if device.type == "cuda":
        machine.free_what_was_measured()
        plan = plan._replace(stages=[stage.with_largest_micro_batch(memory) for stage in plan.stages])
    free = disk_usage(args.save_dir).free
    say("\n".join(describe(plan, 3600 * args.hours)))
    say(f"  disk: {free / 1e9:.1f} GB are free in {args.save_dir}")
    warnings = unwise(plan, free)
    if args.sft_data:
        paths, _ = split_weights(args.sft_data)
        questions = first_questions(expand_paths(",".join(paths)))
        if leaks := describe_leaks(questions, plan.stages[-1].args.eval_share):
            warnings.append(("leaks", {"text": leaks}))
    for key, values in warnings:
        say(f"  unwise: {UNWISE[key].format(**values)}")

    path = files.write_plan(plan, args.save_dir, args.lang, files.facts(plan, warnings, memory, free))
    say(f"wrote {path}; run these next, in this order (the first writes {args.save_dir}/report.html):")
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
    flag("--hours", type=float, default=8, help="time for all stages (default: 8)")
    flag(
        "--depth",
        type=int,
        help=f"layers of the model, which is {rules.WIDTH} times as wide; without it the plan chooses",
    )
    flag("--save_dir", default=str(ROOT / "out" / "plan"), help="folder for run.sh and what it writes")
    text = "trained model to continue from: a weights file, a checkpoint or a Hugging Face folder"
    flag("--from_weight", help=text)
    text = "folder of a tokenizer; without it the shipped one, or for few data a smaller one"
    flag("--tokenizer_path", help=text)
    text = "language of run.sh and the report (default: that of the system)"
    flag("--lang", choices=LANGUAGES, default=user_language(), help=text)
    text = f"share of the records to hold out (default: {rules.EVAL_SHARE}; of few conversations up to 0.1)"
    add_flag(parser, StageArgs, "eval_share", default=None, help=text)
    for name in stages.SHARED_FLAGS:
        add_flag(parser, StageArgs, name)
    args = parser.parse_args()
    for name in ("hours", "eval_share", "depth"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} {value} must be above 0")
    if not args.pretrain_data and not args.sft_data:
        raise UserError("give --pretrain_data, --sft_data or both")
    make_local(args)
    for path in filter(None, (args.pretrain_data, args.sft_data)):
        if split_weights(path)[1]:
            raise UserError(
                f"{path}: a plan takes data without weights; leave them out here and add them to run.sh"
            )
        expand_paths(path)  # missing data are named before anything takes time
    for name in ("save_dir", "cache_dir", "tokenizer_path", "from_weight"):  # run.sh runs in another folder
        if getattr(args, name):
            setattr(args, name, os.path.abspath(getattr(args, name)))
    args.shape = {}  # settings of the given model
    if args.from_weight:
        read_start(args)
    else:
        args.pretrain_data = args.pretrain_data or args.sft_data
    if files_in(args.save_dir, f"*{METRICS_SUFFIX}"):  # run.sh is needed to continue them
        raise UserError(
            f"--save_dir {args.save_dir} already holds runs; give this plan another folder, or remove that "
            "one"
        )
    lock_output("plan", save_dir=args.save_dir)  # a folder that cannot be written is named now
    return args


def read_start(args: argparse.Namespace) -> None:
    """Take shape and tokenizer from the model in --from_weight. Raises UserError if there is none, or if
    other flags contradict it."""
    path = Path(args.from_weight)
    if is_file(path / ADAPTER_CONFIG):
        raise UserError(
            f"--from_weight {path} is an adapter (LoRA), not a model; merge it first: "
            f"python scripts/convert_model.py --lora {path}"
        )
    if path.parent == Path(args.save_dir):
        raise UserError(f"--from_weight {path} is in --save_dir, where the runs write; give another folder")
    given = {"tokenizer_path": args.tokenizer_path} if args.tokenizer_path else {}
    start, config = read_start_weights(StageArgs(from_weight=args.from_weight, **given))
    if args.depth and (args.depth, rules.WIDTH * args.depth) != (start.num_hidden_layers, start.hidden_size):
        size = f"{start.hidden_size} x {start.num_hidden_layers}"
        raise UserError(f"--depth {args.depth}: --from_weight {path} is of {size}; leave the flag out")
    check_tokenizer(load_tokenizer(start.tokenizer_path), start.tokenizer_path, config)
    args.tokenizer_path = start.tokenizer_path
    args.shape = {name: getattr(start, name) for name in SHAPE}


def describe(plan: Plan, seconds: float) -> list[str]:
    """The plan as a table with a column for each stage, followed by remarks. seconds: the time that was asked
    for."""
    columns = [
        ["", "tokens of the data", "tokens held out", "passes over the data", "tokens to train", "updates",
         "tokens of an update", "learning rate", "time", "memory, at least", "disk"]
    ]  # fmt: skip
    for stage in plan.stages:
        column = [
            stage.args.save_weight,
            f"{stage.own_data.num_tokens:,}",
            f"{stage.held_out.num_tokens:,}",
            f"{stage.passes:.3g}",
            f"{stage.tokens:,}",
            f"{stage.updates:,}",
            f"{stage.tokens / stage.updates:,.0f}",
            f"{stage.args.learning_rate:g}",
            duration(stage.seconds),
            f"{stage.memory / 1e9:.1f} GB",
            f"{stage.disk / 1e9:.2f} GB",
        ]
        columns.append(column)
    first = plan.stages[0].args
    size = f"{first.hidden_size} x {first.num_hidden_layers}, "
    size += f"{plan.stages[0].cost.parameters / 1e6:.2f} M parameters"
    all_time = duration(total_seconds(plan.stages))
    lines = [f"plan: {size}; {all_time} in all; limited by the {plan.limit}"]
    table = text_table([list(row) for row in zip(*columns, strict=True)])
    lines += [f"  {line}" for line in table.split("\n")]
    lines.append(
        f"  time: updates and evaluations, plus about {stages.START_SECONDS:.0f} s to start each stage. "
        "The data are already tokenised, and saving runs in the background"
    )
    if plan.stages[0].goes_on:
        lines.append(f"  begins with the weights {first.from_weight}")
    else:
        vocabulary = len(load_tokenizer(first.tokenizer_path))
        lines.append(
            f"  loss: begins near {math.log(vocabulary):.2f} nats per token, which is guessing among "
            f"{vocabulary:,} tokens"
        )
    if plan.stages[0].repeats_itself:
        lines.append(
            f"  the text repeats itself, so it is read up to {plan.stages[0].most_passes} times "
            f"instead of {rules.PASSES}"
        )
    lines += [
        f"  {stage.args.save_weight}: {stage.added:,} tokens of a pass were added by the plan"
        for stage in plan.stages
        if stage.added
    ]
    if plan.limit == "data":
        left = duration(seconds - total_seconds(plan.stages))
        lines.append(f"  more time would not help: {left} are left, but a larger model needs more text")
    if len(plan.stages) > 1 and first.data_path == plan.stages[1].args.data_path:
        lines.append("  both stages read the same data: first as text, then as conversations")
    return lines


def unwise(plan: Plan, free: float) -> list[tuple[str, dict[str, Any]]]:
    """What the user should reconsider, as keys of UNWISE with their values. free: free bytes of the disk."""
    first = plan.stages[0]
    found: list[tuple[str, dict[str, Any]]] = []
    for stage in plan.stages:
        if stage.updates < rules.MIN_USEFUL_UPDATES:
            key = "more time" if stage.passes < stage.most_passes else "more data"
            found.append((key, {"stage": stage.args.save_weight, "updates": stage.updates}))
    if first.repeats_itself:  # then little text can be learned as it is
        return found + disk_warning(plan, free)
    different = min(1, first.passes) * first.own_data.num_tokens
    if different < rules.MIN_TOKENS_FOR_SENTENCES and not first.goes_on:
        found.append(("few tokens", {"tokens": round(different)}))
    token_bytes = stages.bytes_per_token(first)
    if token_bytes < MIN_BYTES_PER_TOKEN and first.args.tokenizer_path == ModelConfig().tokenizer_path:
        found.append(("short tokens", {"bytes": token_bytes}))
    for stage in plan.stages[1:]:
        if stage.own_data.records < rules.MIN_CONVERSATIONS:
            command = ["python", "trainer/train_lora.py", "--data_path", str(stage.args.data_path)]
            command += ["--from_weight", "PATH", "--eval_share", "0.1", "--patience", "2"]
            values = {"conversations": stage.own_data.records, "command": shlex.join(command)}
            found.append(("few conversations", values))
    return found + disk_warning(plan, free)


def disk_warning(plan: Plan, free: float) -> list[tuple[str, dict[str, Any]]]:
    """A key of UNWISE with its values, if the runs write more than is free."""
    return [("disk", {"need": plan.disk / 1e9, "free": free / 1e9})] if plan.disk > free else []


if __name__ == "__main__":
    with one_line_errors():
        main()
