"""Writes the files of a plan: the shell file that runs it, the planned times (which the report compares with
the actual ones), and the facts that the web page shows."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from common.files import atomic_write, write_json
from common.session import START, STOPPED
from common.settings import ROOT
from scripts.planning.choice import Plan, total_seconds
from scripts.planning.signature import sign
from scripts.planning.stages import N_EVALS, Stage
from scripts.runs.run import PLAN_FILE
from scripts.runs.words import UNITS
from trainer import train_pretrain
from trainer.report.metrics import duration
from trainer.weights.paths import run_name

FACTS = "plan_facts.json"
LOG_POINTS, LOG_SECONDS = 20, 30  # log records of a stage, at least; seconds between two, at most
WORDS = {
    "en": {
        "again": "not finished; to continue: {command}",
        "stage": "== {name}: planned {time}",
        "next": "next: {command}",
    },
    "zh": {
        "again": "尚未完成；继续请运行：{command}",
        "stage": "== {name}：计划用时 {time}",
        "next": "下一步：{command}",
    },
}


def write_plan(plan: Plan, folder: str, lang: str, plan_facts: dict[str, Any]) -> Path:
    """Write all files into the folder of the runs, the shell file last. Returns the path of the shell
    file."""
    path = Path(folder, "run.sh")
    script = os.fsencode(shell_file(plan, path, lang))  # file names need not be UTF-8
    seconds = {run_name(stage.args.save_weight, stage.args): stage.seconds for stage in plan.stages}
    write_json(Path(folder, PLAN_FILE), seconds)
    write_json(Path(folder, FACTS), plan_facts | {"signature": sign(script, path.parent)})
    atomic_write(path, lambda file: file.write(script))
    return path


def facts(plan: Plan, unwise: list[tuple[str, dict[str, Any]]], memory: float, free: float) -> dict[str, Any]:
    """The content of the plan as numbers and keys, for the web page. unwise: keys of plan.UNWISE with their
    values. memory, free: available bytes of memory and disk."""
    first = plan.stages[0]
    stages = [
        {
            "run": run_name(stage.args.save_weight, stage.args),
            "is_pretraining": stage.script is train_pretrain,
            "passes": stage.passes,
            "updates": stage.updates,
            "seconds": stage.seconds,
        }
        for stage in plan.stages
    ]
    return {
        "parameters": first.cost.parameters,
        "width": first.args.hidden_size,
        "depth": first.args.num_hidden_layers,
        "stages": stages,
        "seconds": total_seconds(plan.stages),
        "limit": plan.limit,
        "memory": max(stage.memory for stage in plan.stages),
        "memory_free": memory,
        "disk": plan.disk,
        "disk_free": free,
        "unwise": [{"key": key} | values for key, values in unwise],
    }


def shell_file(plan: Plan, path: Path, lang: str) -> str:
    """A shell file that runs the plan. If it is run again, it continues where it stopped. It hands its flags
    to each stage; if --stop_after ends a stage, the next one is not started."""
    words, folder = WORDS[lang], plan.stages[0].args.save_dir
    again = echo(words["again"].format(command=shlex.join(["bash", str(path)]))) + ' "$@"'
    lines = [
        "#!/usr/bin/env bash",
        "# Written by scripts/plan.py. After an interruption, run it again to continue.",
        f"# Flags go to each stage: bash {path.name} --stop_after 11h saves and ends after this time.",
        "set -e",
        "# the plan's Python: another one may lack the requirements",
        f"python={shlex.quote(sys.executable)}",
        f"trap {shlex.quote(again)} EXIT",  # also if Ctrl-C ends a stage that is still starting
        f"cd {shlex.quote(str(ROOT))}",
        f'export {START}="$(date +%s)" {STOPPED}={shlex.quote(f"{folder}/.stopped")}',
        f'rm -f "${STOPPED}"',
    ]
    for stage in plan.stages:
        title = words["stage"].format(name=stage.args.save_weight, time=duration(stage.seconds, UNITS[lang]))
        lines += [echo(title), python_command(training_command(stage)) + ' "$@"']
        lines.append(f'[ ! -e "${STOPPED}" ] || exit 0')
    report = ["scripts/plot_metrics.py", folder, "--html", f"{folder}/report.html", "--lang", lang]
    lines += [python_command(report), "trap - EXIT"]
    lines.append(echo(words["next"].format(command=chat_command(plan))))
    return "\n".join(lines) + "\n"


def python_command(arguments: list[str]) -> str:
    """The command of the shell that runs a script with the plan's Python."""
    return f'"$python" {shlex.join(arguments)}'


def echo(text: str) -> str:
    """The command of the shell that prints a text."""
    return shlex.join(["echo", text])


def training_command(stage: Stage) -> list[str]:
    """The command that trains a stage, for run.sh. It sets every setting that differs from its default, and
    spreads log lines and evaluations evenly."""
    steps = stage.updates * stage.args.accumulation_steps
    steps_in_time = int(LOG_SECONDS * steps / max(stage.seconds, 1.0))
    log_interval = max(1, min(steps // LOG_POINTS, steps_in_time))
    eval_interval = log_interval * max(1, round(steps / N_EVALS / log_interval))
    intervals = {"log_interval": log_interval, "eval_interval": eval_interval}
    args = stage.args.model_copy(update={"from_resume": True} | intervals)
    command = [f"trainer/{Path(stage.script.__file__).name}"]
    for name, value in args:
        if args.is_default(name):
            continue
        if isinstance(value, bool):
            value = int(value)
        command += [f"--{name}", str(value)]
    return command


def chat_command(plan: Plan) -> str:
    """The command that opens a chat with the weights of the last stage; after pretraining alone they continue
    a text."""
    last = plan.stages[-1]
    command = ["python", "scripts/chat.py", "--save_dir", last.args.save_dir]
    if last.script is train_pretrain:
        command += ["--weight", last.args.save_weight]
    return shlex.join(command)
