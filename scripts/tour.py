"""What comes after SFT, chapter by chapter: the stage runs, and the model is examined before and after.

    python scripts/tour.py --model out/demo/full_sft_256.pth --data_dir dataset/demo --save_dir out/tour

`bash scripts/tour.sh` makes the data and starts this. A chapter that is done stands in report.json and is not repeated;
one that was stopped goes on at its checkpoint. Another chapter is another function in CHAPTERS.
"""

import argparse
import functools
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.errors import UserError, reason
from common.settings import ROOT
from scripts.demo_exam import ask, is_right, merge_report, read_exam, run_costs
from trainer.components.lora import merge_adapter
from trainer.components.metrics import read_metrics
from trainer.components.run_files import metrics_path
from trainer.components.trained_weights import load_path

EXAM = "exam: questions about people whom SFT never mentioned, right"
BETA = 0.1  # of DPO
MUON = {"optimizer": "muon", "learning_rate": 5e-4}  # of the SFT before the rewards


class Row(NamedTuple):
    """A line of the table; None: there is no such figure."""

    measure: str
    before: float | None
    after: float | None


class Exam(NamedTuple):
    """How a model answers questions."""

    right: float  # share
    length: float  # mean length of an answer, in characters


@functools.cache
def exam(model: Path, questions: Path, lora: Path | None = None) -> Exam:
    """Ask a model, with an adapter if there is one, the questions of a file."""
    trained, tokenizer = load_path(model)
    trained = merge_adapter(trained, lora) if lora else trained
    asked = read_exam(questions)
    answers = ask(trained, tokenizer, [each["question"] for each in asked], batch_size=96, max_new_tokens=64)
    right = [is_right(answer, question) for answer, question in zip(answers, asked, strict=True)]
    return Exam(sum(right) / len(right), sum(map(len, answers)) / len(answers))


@functools.cache
def sums_right(model: Path, questions: Path) -> float:
    """The share of sums to which a model answers with the number that the file has, and with nothing else."""
    trained, tokenizer = load_path(model)
    asked = [json.loads(line)["conversations"] for line in questions.read_text(encoding="utf-8").splitlines()]
    answers = ask(trained, tokenizer, [turns[0]["content"] for turns in asked], batch_size=96, max_new_tokens=8)
    right = [answer == turns[-1]["content"] for answer, turns in zip(answers, asked, strict=True)]
    return sum(right) / len(right)


@dataclass
class Tour:
    """Where things are, and the runs of the chapter at hand. model: the weights that all chapters start from."""

    model: Path
    data: Path
    save_dir: Path
    checkpoint_dir: Path
    runs: list[str] = field(default_factory=list)

    def train(self, stage: str, run: str, data: str, **settings: Any) -> None:
        """Run a stage on a file of the data, or let it go on. run: name of its files, as `terse_256`.

        Raises:
            SystemExit: it failed or was stopped; it has said why.
        """
        files = {"data_path": self.data / data, "save_dir": self.save_dir, "checkpoint_dir": self.checkpoint_dir}
        usual = {"from_weight": self.model, "max_seq_len": 128, "accumulation_steps": 1, "log_interval": 50}
        usual |= {"save_weight": run.rpartition("_")[0], "save_interval": 100, "from_resume": 1}
        words = [word for name, value in (files | usual | settings).items() for word in (f"--{name}", str(value))]
        command = [f"trainer/train_{stage}.py", *words]
        print("$ python " + shlex.join(command), flush=True)
        done = subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        self.runs.append(run)

    def records(self, run: str) -> list[dict[str, Any]]:
        """The records of a run's metrics."""
        return read_metrics(metrics_path(self.save_dir, run))


# --- the chapters ----------------------------------------------------------------------------------------------------


def persona(tour: Tour) -> list[Row]:
    """LoRA: another name for the assistant; the model stays as it is."""
    tour.train("lora", "persona_256", "persona.jsonl", epochs=5, batch_size=8)
    adapter, rows = tour.save_dir / "persona_256", []
    for name, measure in {
        "persona_exam.jsonl": "who are you, in wordings not trained on, right",
        "exam.jsonl": EXAM,
    }.items():
        before, after = exam(tour.model, tour.data / name), exam(tour.model, tour.data / name, adapter)
        rows.append(Row(measure, before.right, after.right))
    return rows


def terse(tour: Tour) -> list[Row]:
    """DPO: answers that do not repeat the name of whom was asked for."""
    held_out = tour.data / "terse_eval.jsonl"
    settings = {"eval_data_path": held_out, "epochs": 2, "batch_size": 8, "learning_rate": 3e-5, "beta": BETA}
    settings["rpo_alpha"] = 5.0  # without it DPO costs some models a tenth of the exam
    tour.train("dpo", "terse_256", "terse.jsonl", **settings)
    found, asked = tour.records("terse_256")[-1], tour.data / "exam.jsonl"
    before, after = exam(tour.model, asked), exam(tour.save_dir / "terse_256.pth", asked)
    chosen = found["eval_log_prob_chosen"]
    return [
        Row("held-out pairs whose chosen answer has the higher reward", None, found["eval_accuracy"]),
        Row("their reward margin", 0.0, found["eval_reward_margin"]),
        Row("log-probability of the chosen answers", chosen - found["eval_reward_chosen"] / BETA, chosen),
        Row("mean length of an answer in the exam, in characters", before.length, after.length),
        Row(EXAM, before.right, after.right),
    ]


def distillation(tour: Tour) -> list[Row]:
    """Distillation: a third of the size, from answers with mistakes; before: as much training without the teacher."""
    held_out = tour.data / "distillation_eval.jsonl"
    student = {"from_weight": "none", "hidden_size": 128, "num_hidden_layers": 3, "eval_data_path": held_out}
    student |= {"from_teacher_weight": tour.model, "learning_rate": 2e-3, "batch_size": 16, "epochs": 4}
    runs = {"alone_128": 1.0, "student_128": 0.1}  # share of the cross entropy in the loss
    for run, alpha in runs.items():
        tour.train("distillation", run, "distillation.jsonl", alpha=alpha, **student)
    alone, taught = (tour.records(run)[-1] for run in runs)
    exams = (exam(tour.save_dir / f"{run}.pth", tour.data / "exam.jsonl") for run in runs)
    return [
        Row(
            "held-out divergence from the teacher, nats per token", alone["eval_divergence"], taught["eval_divergence"]
        ),
        Row("held-out loss", alone["eval_loss"], taught["eval_loss"]),
        Row(EXAM, *(each.right for each in exams)),
    ]


def sums(tour: Tour) -> list[Row]:
    """GRPO: sums of one and two digits, from half known to known, by rewards for right answers."""
    shape = {"from_weight": "none", "hidden_size": 256, "num_hidden_layers": 3, "max_seq_len": 64}
    tour.train("full_sft", "sums_256", "sums/sft.jsonl", epochs=2, batch_size=96, warmup_updates=20, **MUON, **shape)
    start, test = tour.save_dir / "sums_256.pth", tour.data / "sums" / "test.jsonl"
    settings = {"from_weight": start, "max_seq_len": 64, "max_gen_len": 6, "eval_data_path": test, "eval_interval": 40}
    settings |= {"learning_rate": 1e-4, "epochs": 2, "warmup_updates": 5, "log_interval": 20}
    tour.train("grpo", "sums_grpo_256", "sums/rl.jsonl", **settings)
    measure = "sums in neither training set, right"
    return [Row(measure, sums_right(start, test), sums_right(tour.save_dir / "sums_grpo_256.pth", test))]


def calculator(tour: Tour) -> list[Row]:
    """An agent: sums of three digits with a calculator; before: the model of the last chapter, alone."""
    shown = {"from_weight": tour.save_dir / "sums_256.pth", "max_seq_len": 256, "epochs": 1, "warmup_updates": 5}
    tour.train("full_sft", "calls_256", "sums/agent_sft.jsonl", **shown, **MUON)
    test = tour.data / "sums" / "agent_test.jsonl"
    settings = {"from_weight": tour.save_dir / "calls_256.pth", "max_seq_len": 256, "max_gen_len": 40}
    settings |= {"environment": "calculator", "reward": "numeric_answer,tool_used=0.2", "learning_rate": 1e-4}
    settings |= {"warmup_updates": 5, "eval_data_path": test, "log_interval": 1, "eval_interval": 10}
    tour.train("agent", "calculator_256", "sums/agent_rl.jsonl", **settings)
    alone, found = sums_right(tour.save_dir / "sums_grpo_256.pth", test), tour.records("calculator_256")
    sampled = [record["reward_numeric_answer"] for record in found]
    return [
        Row("sums of three digits in no training set, right", alone, found[-1]["eval_reward_numeric_answer"]),
        Row("sampled answers that are right, first and last five updates", fmean(sampled[:5]), fmean(sampled[-5:])),
    ]


CHAPTERS: dict[str, Callable[[Tour], list[Row]]] = {
    each.__name__: each for each in (persona, terse, distillation, sums, calculator)
}


# --- the report ------------------------------------------------------------------------------------------------------


def read_report(path: Path, start: str) -> dict[str, Any]:
    """The report of an earlier tour with these start weights (their hash), or an empty one.

    Raises:
        UserError: it is of other weights, or no report.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"start_weights": start}
        same = report["start_weights"] == start
        report.setdefault("chapters", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no report of a tour ({reason(error)}); start over: bash scripts/tour.sh --fresh"
        ) from error
    if not same:
        raise UserError(f"{path} is of another model than --model; start over: bash scripts/tour.sh --fresh")
    return report


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = []
    for name, chapter in report["chapters"].items():
        lines += [
            "",
            f"{name:64}{'before':>10}{'after':>10}",
            f"  {chapter['title']} ({chapter['train_seconds']:.0f} s)",
        ]
        for measure, *values in chapter["rows"]:
            lines.append(
                f"  {measure:62}" + "".join(f"{'-' if each is None else f'{each:.3f}':>10}" for each in values)
            )
    return "\n".join(lines)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_args() -> argparse.Namespace:
    """The command line.

    Raises:
        UserError: there is no such model.
    """
    parser = Parser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--model", type=Path, required=True, help="weights of the quickstart, which all chapters start from"
    )
    parser.add_argument(
        "--data_dir", type=Path, default=ROOT / "dataset" / "demo", help="folder of dataset.demo_tour's files"
    )
    parser.add_argument(
        "--save_dir", type=Path, default=ROOT / "out" / "tour", help="folder for weights and the report"
    )
    parser.add_argument(
        "--checkpoint_dir", type=Path, default=ROOT / "checkpoints" / "tour", help="folder for checkpoints"
    )
    parser.add_argument(
        "--chapters", nargs="+", choices=list(CHAPTERS), default=list(CHAPTERS), help="chapters to go through"
    )
    args = parser.parse_args()
    if not args.model.is_file():
        raise UserError(f"--model {args.model}: no such file; make it with: bash scripts/quickstart.sh")
    return args


def main() -> None:
    """Go through the chapters that are not done, write the report after each, print the table."""
    args = parse_args()
    model, data, save_dir, checkpoint_dir = (
        path.absolute() for path in (args.model, args.data_dir, args.save_dir, args.checkpoint_dir)
    )
    path, start = save_dir / "report.json", digest(model)
    report = read_report(path, start)
    for number, name in enumerate(args.chapters, 1):
        if name in report["chapters"]:
            continue
        title = (CHAPTERS[name].__doc__ or "").strip()
        print(f"== {number}/{len(args.chapters)} {name}. {title}", flush=True)
        tour = Tour(model, data, save_dir, checkpoint_dir)
        rows = CHAPTERS[name](tour)
        report["chapters"][name] = {"title": title, **run_costs(save_dir, tour.runs), "rows": rows}
        merge_report(path, report)
    if digest(model) != start:
        raise UserError(f"{model} has changed since the tour began; start over: bash scripts/tour.sh --fresh")
    print(table(report))
    print(f"\nall figures: {path}")


if __name__ == "__main__":
    with one_line_errors():
        main()
