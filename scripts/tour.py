"""What comes after SFT, chapter by chapter: the stage runs, and the model is examined before and after.

    python scripts/tour.py

`bash scripts/tour.sh` makes the data and starts this. A chapter that is done stands in out/tour/report.json and is not
repeated; one that was stopped goes on at its checkpoint. Another chapter is another function in CHAPTERS.
"""

import functools
import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.errors import UserError
from common.settings import ROOT
from scripts.demo_exam import merge_report, run_costs
from scripts.evaluation.exam import ask, is_right, read_exam
from trainer.components.adapters import merge_adapter
from trainer.components.metrics import read_metrics
from trainer.components.run_files import metrics_path
from trainer.components.trained_weights import load_path

MODEL = ROOT / "out" / "demo" / "full_sft_256.pth"  # the quickstart's, which all chapters start from
DATA = ROOT / "dataset" / "demo"
SAVE_DIR, CHECKPOINT_DIR = ROOT / "out" / "tour", ROOT / "checkpoints" / "tour"
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
    answers = ask(trained, tokenizer, [each["question"] for each in asked], max_new_tokens=64)
    right = [is_right(answer, question) for answer, question in zip(answers, asked, strict=True)]
    return Exam(sum(right) / len(right), sum(map(len, answers)) / len(answers))


@functools.cache
def sums_right(model: Path, questions: Path) -> float:
    """The share of sums to which a model answers with the number that the file has, and with nothing else."""
    trained, tokenizer = load_path(model)
    asked = [json.loads(line)["conversations"] for line in questions.read_text(encoding="utf-8").splitlines()]
    answers = ask(trained, tokenizer, [turns[0]["content"] for turns in asked], max_new_tokens=8)
    right = [answer == turns[-1]["content"] for answer, turns in zip(answers, asked, strict=True)]
    return sum(right) / len(right)


def train(stage: str, run: str, data: str, **settings: Any) -> None:
    """Run a stage on a file of the data, or let it go on. run: name of its files, as `terse_256`.

    Raises:
        SystemExit: it failed or was stopped; it has said why.
    """
    files = {"data_path": DATA / data, "save_dir": SAVE_DIR, "checkpoint_dir": CHECKPOINT_DIR}
    usual = {"from_weight": MODEL, "max_seq_len": 128, "accumulation_steps": 1, "log_interval": 50}
    usual |= {"save_weight": run.rpartition("_")[0], "save_interval": 100, "from_resume": 1}
    words = [word for name, value in (files | usual | settings).items() for word in (f"--{name}", str(value))]
    command = [f"trainer/train_{stage}.py", *words]
    print("$ python " + shlex.join(command), flush=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def records(run: str) -> list[dict[str, Any]]:
    """The records of a run's metrics."""
    return read_metrics(metrics_path(SAVE_DIR, run))


# --- the chapters ----------------------------------------------------------------------------------------------------


def persona() -> list[Row]:
    """LoRA: another name for the assistant; the model stays as it is."""
    train("lora", "persona_256", "persona.jsonl", epochs=5, batch_size=8)
    adapter, rows = SAVE_DIR / "persona_256", []
    for name, measure in {
        "persona_exam.jsonl": "who are you, in wordings not trained on, right",
        "exam.jsonl": EXAM,
    }.items():
        before, after = exam(MODEL, DATA / name), exam(MODEL, DATA / name, adapter)
        rows.append(Row(measure, before.right, after.right))
    return rows


def terse() -> list[Row]:
    """DPO: answers that do not repeat the name of whom was asked for."""
    held_out = DATA / "terse_eval.jsonl"
    settings = {"eval_data_path": held_out, "epochs": 2, "batch_size": 8, "learning_rate": 3e-5, "beta": BETA}
    settings["rpo_alpha"] = 5.0  # without it DPO costs some models a tenth of the exam
    train("dpo", "terse_256", "terse.jsonl", **settings)
    last, asked = records("terse_256")[-1], DATA / "exam.jsonl"
    before, after = exam(MODEL, asked), exam(SAVE_DIR / "terse_256.pth", asked)
    chosen = last["eval_log_prob_chosen"]
    return [
        Row("held-out pairs whose chosen answer has the higher reward", None, last["eval_accuracy"]),
        Row("their reward margin", 0.0, last["eval_reward_margin"]),
        Row("log-probability of the chosen answers", chosen - last["eval_reward_chosen"] / BETA, chosen),
        Row("mean length of an answer in the exam, in characters", before.length, after.length),
        Row(EXAM, before.right, after.right),
    ]


def distillation() -> list[Row]:
    """Distillation: a third of the size, from answers with mistakes; before: as much training without the teacher."""
    held_out = DATA / "distillation_eval.jsonl"
    student = {"from_weight": "none", "hidden_size": 128, "num_hidden_layers": 3, "eval_data_path": held_out}
    student |= {"from_teacher_weight": MODEL, "learning_rate": 2e-3, "batch_size": 16, "epochs": 4}
    runs = {"alone_128": 1.0, "student_128": 0.1}  # share of the cross entropy in the loss
    for run, alpha in runs.items():
        train("distillation", run, "distillation.jsonl", alpha=alpha, **student)
    alone, taught = (records(run)[-1] for run in runs)
    exams = (exam(SAVE_DIR / f"{run}.pth", DATA / "exam.jsonl") for run in runs)
    return [
        Row(
            "held-out divergence from the teacher, nats per token", alone["eval_divergence"], taught["eval_divergence"]
        ),
        Row("held-out loss", alone["eval_loss"], taught["eval_loss"]),
        Row(EXAM, *(each.right for each in exams)),
    ]


def sums() -> list[Row]:
    """GRPO: sums of one and two digits, from half known to known, by rewards for right answers."""
    shape = {"from_weight": "none", "hidden_size": 256, "num_hidden_layers": 3, "max_seq_len": 64}
    train("full_sft", "sums_256", "sums/sft.jsonl", epochs=2, batch_size=96, warmup_updates=20, **MUON, **shape)
    start, test = SAVE_DIR / "sums_256.pth", DATA / "sums" / "test.jsonl"
    settings = {"from_weight": start, "max_seq_len": 64, "max_gen_len": 6, "eval_data_path": test, "eval_interval": 40}
    settings |= {"learning_rate": 1e-4, "epochs": 2, "warmup_updates": 5, "log_interval": 20}
    train("grpo", "sums_grpo_256", "sums/rl.jsonl", **settings)
    measure = "sums in neither training set, right"
    return [Row(measure, sums_right(start, test), sums_right(SAVE_DIR / "sums_grpo_256.pth", test))]


def calculator() -> list[Row]:
    """An agent: sums of three digits with a calculator; before: the model of the last chapter, alone."""
    shown = {"from_weight": SAVE_DIR / "sums_256.pth", "max_seq_len": 256, "epochs": 1, "warmup_updates": 5}
    train("full_sft", "calls_256", "sums/agent_sft.jsonl", **shown, **MUON)
    test = DATA / "sums" / "agent_test.jsonl"
    settings = {"from_weight": SAVE_DIR / "calls_256.pth", "max_seq_len": 256, "max_gen_len": 40}
    settings |= {"environment": "calculator", "reward": "numeric_answer,tool_used=0.2", "learning_rate": 1e-4}
    settings |= {"warmup_updates": 5, "eval_data_path": test, "log_interval": 1, "eval_interval": 10}
    train("agent", "calculator_256", "sums/agent_rl.jsonl", **settings)
    alone, log = sums_right(SAVE_DIR / "sums_grpo_256.pth", test), records("calculator_256")
    sampled = [record["reward_numeric_answer"] for record in log]
    return [
        Row("sums of three digits in no training set, right", alone, log[-1]["eval_reward_numeric_answer"]),
        Row("sampled answers that are right, first and last five updates", fmean(sampled[:5]), fmean(sampled[-5:])),
    ]


CHAPTERS = {  # chapter: the runs that it makes
    persona: ["persona_256"],
    terse: ["terse_256"],
    distillation: ["alone_128", "student_128"],
    sums: ["sums_256", "sums_grpo_256"],
    calculator: ["calls_256", "calculator_256"],
}


# --- the report ------------------------------------------------------------------------------------------------------


def table(chapters: dict[str, Any]) -> str:
    """The chapters of the report as text."""
    lines = []
    for name, chapter in chapters.items():
        lines += ["", f"{name:64}{'before':>10}{'after':>10}"]
        lines += [f"  {chapter['title']} ({chapter['train_seconds']:.0f} s)"]
        for measure, *values in chapter["rows"]:
            cells = ("-" if value is None else f"{value:.3f}" for value in values)
            lines.append(f"  {measure:62}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Go through the chapters that are not done, write the report after each, print the table."""
    Parser(description=(__doc__ or "").split("\n", 1)[0]).parse_args()
    if not MODEL.is_file():
        raise UserError(f"{MODEL}, the quickstart's model, is missing; make it with: bash scripts/quickstart.sh")
    path, start = SAVE_DIR / "report.json", hashlib.sha256(MODEL.read_bytes()).hexdigest()
    report = {"start_weights": start, "chapters": {}}
    if path.is_file():
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["start_weights"] != start:
            raise UserError(f"{path} is of another model than {MODEL}; start over: bash scripts/tour.sh --fresh")
    for number, (chapter, runs) in enumerate(CHAPTERS.items(), 1):
        if chapter.__name__ not in report["chapters"]:
            title = (chapter.__doc__ or "").strip()
            print(f"== {number}/{len(CHAPTERS)} {chapter.__name__}. {title}", flush=True)
            rows = chapter()
            report["chapters"][chapter.__name__] = {"title": title, **run_costs(SAVE_DIR, runs), "rows": rows}
            merge_report(path, report)
    print(table(report["chapters"]))
    print(f"\nall figures: {path}")


if __name__ == "__main__":
    with one_line_errors():
        main()
