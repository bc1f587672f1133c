"""The runs of scripts/compare.py. A run is a variant that is trained with one seed."""

import importlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import write_json
from common.settings import FrozenModelArgs
from tools.compare.flags import split_flags
from tools.compare.inputs import QUIZ, read_inputs
from tools.compare.variant import Variant
from tools.verify.launch import Run, finish
from trainer.report.metrics import read_metrics
from trainer.weights.paths import METRICS_SUFFIX, start_path


def stage_script(stage: str) -> Any:
    """The module of a stage."""
    return importlib.import_module(f"trainer.train_{'full_sft' if stage == 'sft' else stage}")


def train(
    variant: Variant, stage: str, folder: Path, seed: int, steps: int, quiz: str | None
) -> dict[str, Any]:
    """Train a run to its end, or continue it, or read its result if it is finished.

    Args:
        variant, stage: what is trained.
        folder: folder of the run.
        seed: seed of the run.
        steps: number of updates; 0: as the flags say.
        quiz: flags of scripts/evaluate.py; its first figure becomes `quiz`.

    Returns:
        `figures`: held-out metrics, tokens, updates; they depend only on settings, data and code. `inputs`:
        what the run has read. `times`: seconds and memory, which differ from run to run.

    Raises:
        UserError: the run ends with an error.
    """
    path = folder / "figures.json"
    if not path.exists():
        words = [*variant.words, *own_flags(variant, folder, seed, steps)]
        script = variant.code / "trainer" / Path(stage_script(stage).__file__).name
        try:
            times = finish(Run(folder, variant.args, [sys.executable, str(script), *words]))
        except UserError as error:
            raise UserError(f'"{variant.name}", {error}') from None
        content = read_run(folder, variant.name)
        content["figures"]["seed"] = seed
        if quiz:
            content["figures"]["quiz"], files = take_quiz(variant.code, weights_of(folder), quiz)
            content["inputs"] |= files
        content["times"] |= times
        write_json(path, content)
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)  # the curves stay; weights would fill the disk
    for weights in folder.glob("save/*.pth"):
        weights.unlink()
    return json.loads(path.read_text())


def read_run(folder: Path, name: str) -> dict[str, Any]:
    """Figures, inputs and times of a finished run, from its files. name: of its variant. Raises UserError if
    older code wrote files without them."""
    try:
        metrics = metrics_of(folder)
        records = read_metrics(metrics)
        last = records[-1]
        figures = {key: value for each in records for key, value in each.items() if key.startswith("eval_")}
        figures |= {"updates": last["update"], "tokens": last["tokens"]}
        times = {"training_seconds": training_seconds(records), "memory_mb": last["memory_mb"]}
        return {"figures": figures, "inputs": read_inputs(metrics), "times": times}
    except (LookupError, FileNotFoundError) as error:
        raise UserError(
            f'"{name}": its run in {folder} wrote no {error}: this code is too old '
            "to be compared; give a newer --base"
        ) from error


def metrics_of(folder: Path) -> Path:
    """The metrics file of a run. Raises FileNotFoundError."""
    for path in folder.glob(f"save/*{METRICS_SUFFIX}"):
        return path
    raise FileNotFoundError("metrics file")


def own_flags(variant: Variant, folder: Path, seed: int, steps: int) -> list[str]:
    """The flags that turn a variant into a run: its folders and seed, and the paths of inputs that the code
    in another folder would not find. If the variant does not set them, also no samples, and a record every
    ten updates."""
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


def weights_of(folder: Path) -> Path:
    """The inference weights of a run."""
    metrics = metrics_of(folder)
    return metrics.with_name(metrics.name.removesuffix(METRICS_SUFFIX) + ".pth")


def take_quiz(code: Path, weights: Path, flags: str) -> tuple[float, dict[str, str]]:
    """The first figure of scripts/evaluate.py with these flags, and the hashes of the files that it read.
    Raises UserError with the script's error."""
    path = weights.with_name("quiz.json")
    command = [sys.executable, str(code / "scripts" / "evaluate.py"), *split_flags(flags)]
    command += ["--model", str(weights), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise UserError(f"--quiz {flags!r}: {why.removeprefix('error: ')}")
    report = json.loads(path.read_text())
    (model,) = report["models"].values()
    files = {f"{QUIZ}{name}": value for name, value in report.get("files", {}).items()}
    return next(iter(model["figures"].values()))["value"], files


def figure(run: dict[str, Any], metric: str) -> float:
    """The figure of a run that decides the comparison. Raises UserError if the run has no such figure."""
    value = run["figures"].get(metric)
    if value is None or not math.isfinite(value):
        found = ", ".join(name for name in run["figures"] if name.startswith("eval_")) or "none"
        raise UserError(f"--monitor {metric}: a run gives {value}; its held-out metrics: {found}")
    return value
