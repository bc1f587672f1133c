"""Did it help? Compare variants of a stage in pairs of runs with equal seeds, data and held-out records.

    python scripts/compare.py --stage pretrain --data_path data/pretrain.jsonl --hours 0.5 \\
        "" "--weight_decay 0.3" "--optimizer adamw"
    python scripts/compare.py --stage pretrain --data_path data/pretrain.jsonl --pairs 6 --base HEAD

A variant is a string of flags; flags outside these strings apply to all runs. With --base the first variant
is the code of a git revision or of a folder, and the others are a copy of the files as they are now. The
number of pairs is fixed after the first pair. If the command is stopped at any moment, the same command
continues. Results are in <save_dir>/compare/NAME/, with a line in <save_dir>/compare/log.md. See
docs/training.md.
"""

import argparse
import hashlib
import json
import math
import shutil
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
from common.settings import ROOT, StageArgs
from scripts.verify_resume import STAGES
from tools.compare.code import code_files, copy_code, differing_files, resolve_base
from tools.compare.flags import (
    HELD_OUT,
    as_words,
    judged_by,
    refuse_single_words,
    settings_of,
    variant_settings,
)
from tools.compare.inputs import EditedInput, check_pair, check_unchanged
from tools.compare.paired import smallest_difference
from tools.compare.report import write_report
from tools.compare.runs import figure, stage_script, train
from tools.compare.variant import Variant, letter_of
from trainer.report.metrics import duration

SHARE = 0.02  # of the records, that is held out where no flag says what
SPREAD = 0.003  # of paired differences, as a share of the figure, before there is a comparison to learn from
TOKENS = 0.01  # by which variants may differ in tokens
OPTIONS = ("stage", "variants", "base", "name", "hours", "pairs", "same", "quiz")


def parse_args() -> tuple[argparse.Namespace, dict[str, Any]]:
    """The flags of this script, and the settings of all runs. The flags include `metric`, the figure that
    decides, and `mode`, whether `min` or `max` is better. Raises UserError."""
    first = Parser(add_help=False)
    first.add_argument("--stage", choices=STAGES, default="pretrain", help="stage to compare variants of")
    script = stage_script(first.parse_known_args()[0].stage)
    parser = stage_parser(script.Args, __doc__, parents=[first])
    flag = parser.add_argument_group("comparison").add_argument
    flag("variants", nargs="*", default=[], help='the flags of each variant, in quotes; "" for none')
    flag("--base", default=None, help="git revision or folder with the code of the first variant")
    flag("--name", default=None, help="folder of the results (default: the stage and a hash of the settings)")
    flag("--hours", type=float, default=1.0, help="time for all pairs; at least two pairs must fit")
    flag("--pairs", type=int, default=None, help="number of pairs, instead of --hours")
    text = "seconds: slower variants get fewer updates, measured in a pair that does not count"
    flag("--same", choices=("tokens", "seconds"), default="tokens", help=text)
    flag("--quiz", default=None, help="flags of scripts/evaluate.py; its first figure decides")
    refuse_single_words(parser, sys.argv[1:], OPTIONS)
    flags = read_flags(parser, None)
    own = argparse.Namespace(**{name: flags.pop(name) for name in OPTIONS})
    own.variants = own.variants or [""]
    if own.base is None and len(own.variants) < 2:
        raise UserError('give two variants or more, such as "" "--weight_decay 0.3", or --base HEAD')
    if (own.pairs is not None and own.pairs < 2) or not 0 < own.hours < math.inf:
        raise UserError("--pairs must be at least 2, and --hours above 0")
    settings = settings_of(script.Args, flags)
    if "eval_share" not in flags and not settings.get("eval_share") and not settings.get("eval_data_path"):
        settings |= {"eval_share": SHARE}
    args = script.Args().model_copy(update=settings)
    own.metric, own.mode = args.monitor, args.mode
    if own.stage == "dpo" and "monitor" not in flags and args.is_default("monitor"):
        own.metric, own.mode = "eval_accuracy", "max"
    if own.quiz:
        own.metric, own.mode = "quiz", "max"
    return own, settings


def open_comparison(own: argparse.Namespace, common: dict[str, Any]) -> tuple[Path, list[Variant]]:
    """Begin a comparison or continue one. Returns its folder, with the copied code, and the variants. common:
    settings of all runs. Raises UserError for wrong flags, for flags that a variant may not change, and if
    the folder was begun with other settings."""
    script = stage_script(own.stage)
    of_variants = [variant_settings(script.Args, text) for text in own.variants]
    settings: dict[str, Any] = {"flags": common, "base": own.base}
    if own.base is not None:
        settings["base"] = resolve_base(own.base)
    settings |= {name: getattr(own, name) for name in ("stage", "variants", "same", "quiz")}
    if any("--config" in text for text in own.variants):
        settings["variants"] = [" ".join(as_words(script.Args, each)) for each in of_variants]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    name = own.name or f"{own.stage}_{digest[:8]}"
    if Path(name).name != name or name.startswith("."):
        raise UserError(f"--name {name!r} must be a plain name; the folder is --save_dir")
    first = parse_stage_args(script.Args, None, as_words(script.Args, common))
    folder = Path(first.save_dir).resolve() / "compare" / name
    base, tree = folder / "code" / "base", folder / "code" / "tree"
    judges = judged_by(script.Objective, own.metric)
    variants = []
    if own.base is not None:
        variants = [Variant(f"base {own.base}", base, as_words(script.Args, common), first)]
    for text, changed in zip(own.variants, of_variants, strict=True):
        words = as_words(script.Args, common | changed)
        variant = Variant(text or "no other flags", tree, words, parse_stage_args(script.Args, None, words))
        check_variant(variant, first, judges)
        variants.append(variant)
    begin(folder, settings)
    copy_code(str(ROOT), tree)
    check_code(folder, tree)
    if own.base is not None:
        copy_code(settings["base"], base)
        file = Path("trainer") / Path(script.__file__).name
        if not (base / file).is_file():
            raise UserError(
                f"--base {own.base} has no {file}, which had another name then; give a newer revision"
            )
    write_json(folder / "settings.json", settings)
    return folder, variants


def check_variant(variant: Variant, first: StageArgs, judges: set[str]) -> None:
    """Raise UserError if a variant changes a setting on which the measurement depends. judges: the settings
    on which the deciding figure depends."""
    for setting in (*HELD_OUT, *sorted(judges)):
        if getattr(variant.args, setting, None) != getattr(first, setting, None):
            raise UserError(
                f'variant "{variant.name}": --{setting} changes how the runs are measured; give it '
                "outside the variants, for all runs"
            )
    if variant.args.eval_share and variant.args.data_path != first.data_path:
        raise UserError(
            f'variant "{variant.name}": other data need a separate held-out file, --eval_data_path'
        )


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Lock the folder of a comparison. Raises UserError if it was begun with other settings."""
    try:
        lock_output(f"compare_{folder.name}", save_dir=str(folder.parent))
    except UserError as error:
        raise UserError(str(error).replace("--save_weight", "--name")) from None
    path = folder / "settings.json"
    began = json.loads(path.read_text()) if path.exists() else settings
    for key, value in settings.items():
        if began[key] != value:
            raise UserError(f"{folder} was begun with {key} {began[key]!r}, not {value!r}; give a new --name")


def check_code(folder: Path, tree: Path) -> None:
    """Warn about files that were edited since they were copied; if the comparison is finished, raise
    UserError."""
    if edited := differing_files(ROOT, tree, code_files(ROOT)):
        text = f"{', '.join(edited[:3])} changed since {folder} began"
        if (folder / "result.json").exists():
            raise UserError(f"{text}; give a --name for a comparison of the files as they are now")
        warn(f"{text}; it continues with the old copy")


# --- pairs


class Comparison:
    """The runs of a comparison. metric: the figure that decides. judges: the settings on which it depends.
    steps: number of updates of each variant's runs; 0: as its flags say. pairs: the runs of each pair, in the
    order of the variants."""

    def __init__(self, own: argparse.Namespace, folder: Path, variants: list[Variant]):
        self.own, self.folder, self.variants = own, folder, variants
        self.metric = own.metric
        self.judges = (*HELD_OUT, *sorted(judged_by(stage_script(own.stage).Objective, own.metric)))
        self.steps = [0] * len(variants)
        self.pairs: list[list[Any]] = []

    def run(self) -> None:
        """All pairs, the result and its files."""
        plan = self.plan()
        for number in range(1, plan["pairs"]):
            self.pairs.append(self.run_pair(number, str(number + 1)))
        unit = "time" if self.own.same == "seconds" else "updates"
        about = {"metric": self.metric, "mode": self.own.mode, "unit": unit, "looks": plan["looks"]}
        write_report(self.folder, self.variants, self.pairs, about)

    def plan(self) -> dict[str, Any]:
        """Run the first pair and fix the number of pairs, once for each value of --hours or --pairs. If more
        is asked for later, the plan records that the result was already seen. Raises UserError if there is no
        time for a second pair."""
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
                f"a pair takes {duration(seconds)}, and at least two must fit: give --hours "
                f"{5 * seconds / 3600:.2g} for five pairs"
            )
        if plan["pairs"]:
            plan["looks"].append(plan["pairs"])
        plan |= {"pairs": max(pairs, plan["pairs"]), "asked": asked}
        write_json(path, plan)
        spread = known_spread(self.folder.parent, self.own.stage, self.metric)
        least = smallest_difference(spread, plan["pairs"], len(self.variants) - 1)
        say(
            f"a pair takes {duration(seconds)}; {plan['pairs']} pairs find a difference of {least:.2%} nine "
            f"times in ten, if the pairs vary by {spread:.2%}"
        )
        return plan

    def run_pair(self, number: int, name: str) -> list[Any]:
        """Train each variant with the seed of this pair, in an order that changes from pair to pair. If a run
        has read files that changed, it is deleted and does not count. Raises UserError."""
        runs: dict[int, Any] = {}
        order = list(range(len(self.variants)))
        for i in order if number % 2 == 0 else reversed(order):
            variant, at = self.variants[i], self.folder / "runs" / f"{name}_{letter_of(i)}"
            runs[i] = train(
                variant, self.own.stage, at, variant.args.seed + number, self.steps[i], self.own.quiz
            )
            try:
                if self.pairs:
                    check_unchanged(self.pairs[0][i]["inputs"], runs[i]["inputs"], at.name)
                if 0 in runs:
                    for other in runs:
                        self.check(runs[0], runs[other], self.variants[other])
            except EditedInput:
                shutil.rmtree(at)
                raise
            value = figure(runs[i], self.metric)
            say(f"pair {name}, {letter_of(i)} ({variant.name}): {self.metric} {value:.4f}")
        return [runs[i] for i in order]

    def check(self, first: dict[str, Any], other: dict[str, Any], variant: Variant) -> None:
        """Raise UserError if a variant's run cannot be compared with the first variant's. If tokenizers
        differ, bits per byte decide."""
        check_pair((self.variants[0], variant), (first["inputs"], other["inputs"]), self.judges)
        if first["inputs"].get("tokenizer") != other["inputs"].get("tokenizer"):
            if self.metric == "eval_loss":
                if not first["figures"].get("eval_bpb") or not other["figures"].get("eval_bpb"):
                    raise UserError(
                        f'variant "{variant.name}": another tokenizer needs eval_bpb, which is missing'
                    )
                self.metric = "eval_bpb"
            if self.metric == "eval_bpb":
                return
        more = other["figures"]["tokens"] / first["figures"]["tokens"] - 1
        if self.own.same == "tokens" and abs(more) > TOKENS and "eval_reward" not in first["figures"]:
            raise UserError(
                f'variant "{variant.name}" trains on {more:+.1%} tokens; set its --max_steps, or use --same '
                "seconds"
            )


def equal_seconds(runs: list[Any]) -> list[int]:
    """The number of updates with which each variant trains as long as the fastest one."""
    least = min(run["times"]["training_seconds"] for run in runs)
    return [max(1, int(run["figures"]["updates"] * least / run["times"]["training_seconds"])) for run in runs]


def known_spread(folder: Path, stage: str, metric: str) -> float:
    """The median spread of pairs in earlier comparisons of this stage and figure that found little
    difference; SPREAD if there are none."""
    spreads = []
    for path in folder.glob("*/result.json"):
        each = json.loads(path.read_text())
        if (each["settings"]["stage"], each["metric"]) == (stage, metric) and each["spread"]:
            spreads.append(each["spread"])
    return median(spreads) if spreads else SPREAD


def main() -> None:
    """Run the comparison."""
    own, common = parse_args()
    folder, variants = open_comparison(own, common)
    say(f"{own.stage} in {folder}; if it is stopped, the same command continues")
    Comparison(own, folder, variants).run()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # also ends the run
    with one_line_errors():
        main()
