"""The runs of scripts/compare.py: a variant trained with one seed, and what came of it."""

import importlib
import json
import math
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import write_json
from common.settings import FrozenModelArgs, StageArgs
from tools.verify.launch import Run, finish
from trainer.report.metrics import read_metrics
from trainer.weights.paths import METRICS_SUFFIX, settings_path, start_path


class Variant(NamedTuple):
    """A variant: its name, the folder of its code, the flags of its runs as typed and as settings."""

    name: str
    code: Path
    words: list[str]
    args: StageArgs


def split_flags(text: str) -> list[str]:
    """The words of flags that were given in quotes. Raises UserError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text!r} are no flags: {error}") from None


def stage_script(stage: str) -> Any:
    """The module of a stage."""
    return importlib.import_module(f"trainer.train_{'full_sft' if stage == 'sft' else stage}")


def train(
    variant: Variant, stage: str, folder: Path, seed: int, steps: int, quiz: str | None
) -> dict[str, Any]:
    """Train a run to its end, or go on with it, or read what it came to.

    Args:
        variant, stage: what is trained.
        folder: of the run.
        seed: of the run.
        steps: updates; 0: those of the flags.
        quiz: flags of scripts/evaluate.py, whose first figure is `quiz`.

    Returns:
        `figures`: held-out metrics, tokens, updates, what the held-out data are: a function of settings and
        code. `times`: seconds and memory, which differ from run to run.

    Raises:
        UserError: the run ends with an error.
    """
    path = folder / "figures.json"
    if not path.exists():
        words = [*variant.words, *own_flags(variant, folder, seed, steps)]
        script = variant.code / "trainer" / Path(stage_script(stage).__file__).name
        times = finish(Run(folder, variant.args, [sys.executable, str(script), *words]))
        (metrics,) = folder.glob(f"save/*{METRICS_SUFFIX}")
        records = read_metrics(metrics)
        figures = {key: value for each in records for key, value in each.items() if key.startswith("eval_")}
        figures |= {"seed": seed, "updates": records[-1]["update"], "tokens": records[-1]["tokens"]}
        about = json.loads(settings_path(metrics).read_text())["fingerprint"]
        figures |= {key: about.get(key) for key in ("held_out_data", "tokenizer")}
        if quiz:
            figures["quiz"] = take_quiz(variant.code, weights_of(metrics), quiz)
        times |= {"training_seconds": training_seconds(records), "memory_mb": records[-1]["memory_mb"]}
        write_json(path, {"figures": figures, "times": times})
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)  # the curves stay, weights would fill the disk
    for weights in folder.glob("save/*.pth"):
        weights.unlink()
    return json.loads(path.read_text())


def own_flags(variant: Variant, folder: Path, seed: int, steps: int) -> list[str]:
    """The flags that make a run of a variant: its folders and seed; what the code in another folder would
    look for there; and, where the variant does not say, no samples and a record every ten updates."""
    args = variant.args
    flags: dict[str, Any] = {f"{place}_dir": folder / place for place in ("save", "checkpoint")}
    flags |= {"cache_dir": Path(args.cache_dir).resolve(), "from_resume": 1, "seed": seed}
    flags["data_path"] = args.data_path
    if args.sample_prompts == "auto":
        flags["sample_prompts"] = "none"
    if args.is_default("log_interval"):
        flags["log_interval"] = 10 * args.accumulation_steps
    if args.from_weight != "none":  # a name in --save_dir
        flags["from_weight"] = start_path(args.save_dir, args.from_weight, args)
    if isinstance(args, FrozenModelArgs):
        flags |= {flag: ",".join(map(str, each)) for flag, each in args.frozen_model_paths().items()}
    if steps:
        flags["max_steps"] = steps
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def training_seconds(records: list[dict[str, Any]]) -> float:
    """Seconds of the updates, without evaluations and saving."""
    seconds, before = 0.0, 0
    for record in records:
        seconds += (record["tokens"] - before) / record["tokens_per_second"]
        before = record["tokens"]
    return seconds


def weights_of(metrics: Path) -> Path:
    """The inference weights beside a metrics file."""
    return metrics.with_name(metrics.name.removesuffix(METRICS_SUFFIX) + ".pth")


def take_quiz(code: Path, weights: Path, flags: str) -> float:
    """The first figure of scripts/evaluate.py with these flags. Raises UserError with its error."""
    report = weights.with_name("quiz.json")
    command = [sys.executable, str(code / "scripts" / "evaluate.py"), *split_flags(flags)]
    command += ["--model", str(weights), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise UserError(f"--quiz {flags!r}: {why.removeprefix('error: ')}")
    (model,) = json.loads(report.read_text())["models"].values()
    return next(iter(model["figures"].values()))["value"]


def figure(run: dict[str, Any], metric: str) -> float:
    """The figure of a run that decides. Raises UserError if it has none."""
    value = run["figures"].get(metric)
    if value is None or not math.isfinite(value):
        found = ", ".join(name for name in run["figures"] if name.startswith("eval_")) or "none"
        raise UserError(f"--monitor {metric}: a run gives {value}; its held-out metrics: {found}")
    return value
