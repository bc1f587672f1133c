"""Did it help? Compare variants of a stage by pairs of runs with equal seeds, data and held-out records.

    python scripts/compare.py --stage pretrain --data_path data/pretrain.jsonl --hours 0.5 \\
        "" "--weight_decay 0.3" "--optimizer adamw"
    python scripts/compare.py --stage pretrain --data_path data/pretrain.jsonl --pairs 6 --base HEAD

A variant is a string of flags; flags outside these strings are those of all runs. With --base the first
variant is the code of a git revision or of a folder, the others the files as they are now, copied. The number
of pairs is fixed after the first. Stopped at any moment, the same command goes on. Results:
<save_dir>/compare/NAME/, and a line in <save_dir>/compare/log.md. docs/training.md has the rest.
"""

import argparse
import hashlib
import json
import math
import signal
import sys
from pathlib import Path
from statistics import median
from typing import Any

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from common.arguments import parse_args as parse_stage_args
from common.arguments import read_flags, stage_parser
from common.errors import UserError, say, warn
from common.files import lock_output, write_json
from common.settings import ROOT
from scripts.verify_resume import STAGES, flag_names
from tools.compare.code import copy_code, differing_files, resolve_base
from tools.compare.paired import smallest_difference
from tools.compare.report import write_report
from tools.compare.runs import Variant, figure, split_flags, stage_script, train
from trainer.report.metrics import duration

OWN_FLAGS = {"--save_weight", "--checkpoint_dir", "--from_resume", "--resume_from", "--print_config"}
# what a variant may not change: the pairs, what is held out, how it is cut and counted
HELD_OUT = ("seed", "eval_share", "eval_data_path", "text_separator", "max_seq_len", "on_bad_data")
HELD_OUT += ("max_bad_share", "max_lost_text", "monitor", "mode", "save_dir", "cache_dir", "reward")
SPREAD = 0.003  # of paired differences, as a share of the figure, before there is a comparison to learn from
TOKENS = 0.01  # by which variants may differ in tokens
OPTIONS = ("stage", "variants", "base", "name", "hours", "pairs", "same", "quiz")


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """The flags of this script, and those of all runs as words of a command line. Raises UserError."""
    first = Parser(add_help=False)
    first.add_argument("--stage", choices=STAGES, default="pretrain", help="stage to compare variants of")
    script = stage_script(first.parse_known_args()[0].stage)
    parser = stage_parser(script.Args, __doc__, parents=[first])
    flag = parser.add_argument_group("comparison").add_argument
    flag("variants", nargs="*", default=[], help='the flags of each variant, in quotes; "" for none')
    flag("--base", default=None, help="git revision or folder with the code of the first variant")
    flag("--name", default=None, help="folder of the results (default: the stage and a hash of the settings)")
    flag("--hours", type=float, default=1.0, help="time for all pairs")
    flag("--pairs", type=int, default=None, help="number of pairs, instead of --hours")
    text = "seconds: the slower ones get fewer updates, measured in a pair that does not count"
    flag("--same", choices=("tokens", "seconds"), default="tokens", help=text)
    flag("--quiz", default=None, help="flags of scripts/evaluate.py, whose first figure is to decide")
    flags = read_flags(parser, None)
    own = argparse.Namespace(**{name: flags.pop(name) for name in OPTIONS})
    own.variants = own.variants or [""]
    if own.base is None and len(own.variants) < 2:
        raise UserError('give two variants or more, such as "" "--weight_decay 0.3", or --base HEAD')
    if (own.pairs is not None and own.pairs < 2) or not 0 < own.hours < math.inf:
        raise UserError("--pairs must be at least 2, and --hours above 0")
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value or ""))]
    if not flags.keys() & {"eval_share", "eval_data_path", "config"}:
        words += ["--eval_share", "0.02"]
    return own, words


def open_comparison(own: argparse.Namespace, words: list[str]) -> tuple[Path, list[Variant]]:
    """The folder of the comparison with the code, begun or gone on with, and the variants. Raises UserError
    for flags that are wrong or that a variant may not change, and for a folder begun with others."""
    settings: dict[str, Any] = {"flags": words, "base": own.base and resolve_base(own.base)}
    settings |= {name: getattr(own, name) for name in ("stage", "variants", "same", "quiz")}
    name = own.name or f"{own.stage}_{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]}"
    if Path(name).name != name or name.startswith("."):
        raise UserError(f"--name {name!r} must be a plain name; the folder is --save_dir")
    parse = stage_script(own.stage).Args
    common = parse_stage_args(parse, None, words)
    folder = Path(common.save_dir).resolve() / "compare" / name
    base, tree = folder / "code" / "base", folder / "code" / "tree"
    variants = [Variant(f"base {own.base}", base, words, common)] if own.base else []
    for text in own.variants:
        flags = [*words, *split_flags(text)]
        if taken := flag_names(flags) & OWN_FLAGS:
            raise UserError(f"{', '.join(sorted(taken))}: this script sets it; leave it out")
        args = parse_stage_args(parse, None, flags)
        for setting in HELD_OUT:
            if getattr(args, setting, None) != getattr(common, setting, None):
                raise UserError(
                    f'variant "{text}": --{setting} decides what the runs are measured by; give it outside '
                    "the variants, for all of them"
                )
        if args.eval_share and args.data_path != common.data_path:
            raise UserError(
                f'variant "{text}": other data need a held-out file of their own, --eval_data_path'
            )
        variants.append(Variant(text or "no other flags", tree, flags, args))
    try:
        lock_output(f"compare_{name}", save_dir=str(folder.parent))
    except UserError as error:
        raise UserError(str(error).replace("--save_weight", "--name")) from None
    path = folder / "settings.json"
    began = json.loads(path.read_text()) if path.exists() else settings
    for key, value in settings.items():
        if began[key] != value:
            raise UserError(f"{folder} was begun with {key} {began[key]!r}, not {value!r}; give a new --name")
    copy_code(str(ROOT), tree)
    check_code(folder, tree)
    if own.base:
        copy_code(settings["base"], base)
    write_json(path, settings)
    return folder, variants


def check_code(folder: Path, tree: Path) -> None:
    """Say which files were edited since they were copied; where the comparison is over, raise UserError."""
    if edited := differing_files(ROOT, tree):
        text = f"{', '.join(edited[:3])} changed since {folder} began"
        if (folder / "result.json").exists():
            raise UserError(f"{text}; give a --name for a comparison of the files as they are now")
        warn(f"{text}: it goes on with the copy of then")


# --- pairs


class Comparison:
    """The runs of a comparison. metric, mode: the figure that decides, and whether `min` or `max` is better.
    steps: of each variant's runs, 0 for those of its flags. pairs: the runs of each pair, in the order of the
    variants."""

    def __init__(self, own: argparse.Namespace, folder: Path, variants: list[Variant]):
        self.own, self.folder, self.variants = own, folder, variants
        args = variants[0].args
        self.metric, self.mode = args.monitor, args.mode
        if own.stage == "dpo" and args.is_default("monitor"):
            self.metric, self.mode = "eval_accuracy", "max"
        if own.quiz:
            self.metric, self.mode = "quiz", "max"
        self.steps = [0] * len(variants)
        self.pairs: list[list[Any]] = []

    def run(self) -> None:
        """All pairs, the result and its files."""
        plan = self.plan()
        for number in range(1, plan["pairs"]):
            self.pairs.append(self.run_pair(number, str(number + 1)))
        about = {"metric": self.metric, "mode": self.mode, "looks": plan["looks"]}
        write_report(self.folder, self.variants, self.pairs, about)

    def plan(self) -> dict[str, Any]:
        """Run the first pair and fix the number of pairs, once for each --hours or --pairs; one that asks for
        more later has looked at the result. Raises UserError if the time allows no second pair."""
        path = self.folder / "plan.json"
        plan: dict[str, Any] = {"pairs": 0, "looks": [], "steps": self.steps}
        plan |= json.loads(path.read_text()) if path.exists() else {}
        if self.own.same == "seconds" and not any(plan["steps"]):
            plan["steps"] = equal_seconds(self.run_pair(0, "0"))
            write_json(path, plan)
        self.steps = plan["steps"]
        self.pairs = [self.run_pair(0, "1")]
        asked = f"{self.own.pairs} pairs" if self.own.pairs else f"{self.own.hours:g} hours"
        if plan.get("asked") == asked:
            return plan
        seconds = sum(run["times"]["wall_seconds"] for run in self.pairs[0])
        pairs = self.own.pairs or int(3600 * self.own.hours / seconds)
        if pairs < 2:
            raise UserError(
                f"a pair takes {duration(seconds)}: give --hours {5 * seconds / 3600:.2g} for five"
            )
        if plan["pairs"]:
            plan["looks"].append(plan["pairs"])
        plan |= {"pairs": max(pairs, plan["pairs"]), "asked": asked}
        write_json(path, plan)
        spread = known_spread(self.folder.parent, self.own.stage)
        least = smallest_difference(spread, plan["pairs"], len(self.variants) - 1)
        say(
            f"a pair takes {duration(seconds)}; {plan['pairs']} pairs find a difference of {least:.2%} nine "
            f"times in ten, if pairs spread by {spread:.2%}"
        )
        return plan

    def run_pair(self, number: int, name: str) -> list[Any]:
        """Train each variant with the seed of this pair, in an order that turns from pair to pair. Raises
        UserError."""
        runs: dict[int, Any] = {}
        order = list(range(len(self.variants)))
        for i in order if number % 2 == 0 else reversed(order):
            variant, letter = self.variants[i], chr(65 + i)
            at, seed = self.folder / "runs" / f"{name}_{letter}", variant.args.seed + number
            runs[i] = train(variant, self.own.stage, at, seed, self.steps[i], self.own.quiz)
            if number == 0:
                self.check(runs[0]["figures"], runs[i]["figures"], variant.name)
            value = figure(runs[i], self.metric)
            say(f"pair {name}, {letter} ({variant.name}): {self.metric} {value:.4f}")
        return [runs[i] for i in order]

    def check(self, first: dict[str, Any], other: dict[str, Any], name: str) -> None:
        """Raise UserError if a variant cannot be compared with the first. Where tokenizers differ, bits per
        byte decide."""
        if first["held_out_data"] != other["held_out_data"]:
            raise UserError(f'variant "{name}": its held-out records are others than those of the first')
        if first["tokenizer"] != other["tokenizer"] and self.metric == "eval_loss":
            if not first.get("eval_bpb") or not other.get("eval_bpb"):
                raise UserError(
                    f'variant "{name}": another tokenizer, and no bits per byte to compare them by'
                )
            self.metric = "eval_bpb"
            return
        more = other["tokens"] / first["tokens"] - 1
        if self.own.same == "tokens" and abs(more) > TOKENS and "eval_reward" not in first:
            raise UserError(
                f'variant "{name}" trains on {more:+.1%} tokens; set its --max_steps, or use --same seconds'
            )


def equal_seconds(runs: list[Any]) -> list[int]:
    """Updates with which each variant trains as long as the fastest."""
    least = min(run["times"]["training_seconds"] for run in runs)
    return [max(1, int(run["figures"]["updates"] * least / run["times"]["training_seconds"])) for run in runs]


def known_spread(folder: Path, stage: str) -> float:
    """The median spread of pairs in earlier comparisons of a stage that found little, SPREAD without any."""
    results = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    spreads = [each["spread"] for each in results if each["settings"]["stage"] == stage and each["spread"]]
    return median(spreads) if spreads else SPREAD


def main() -> None:
    """Run the comparison."""
    own, words = parse_args()
    folder, variants = open_comparison(own, words)
    say(f"{own.stage} in {folder}; stopped at any moment, the same command goes on")
    Comparison(own, folder, variants).run()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also ends the run
    with one_line_errors():
        main()
