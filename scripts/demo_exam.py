"""Evaluate a model on the exam of the demo corpus: chat questions about people whom SFT never mentioned.

    python scripts/demo_exam.py --save_dir out/demo --show 6

scripts/evaluation/exam.py says when an answer is right. --report adds the score to the quickstart's report, with
--control as that of the model without pretraining.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.durable_files import atomic_write
from common.errors import UserError
from common.settings import ROOT
from scripts.evaluation.exam import ask, is_right, read_exam
from trainer.components.run_files import metrics_path, run_name
from trainer.components.trained_weights import WEIGHT, add_trained_model_flags, load_model


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    add_trained_model_flags(parser)
    flag("--exam_path", default=str(ROOT / "dataset" / "demo" / "exam.jsonl"), help="JSONL file with the questions")
    flag("--report", help="JSON file to add the score to; its other fields stay")
    flag("--control", action="store_true", help="report the score as that of a model without pretraining")
    flag("--runs", nargs="+", default=[], help="runs in --save_dir whose training time and memory to report")
    flag("--show", type=int, default=0, help="number of questions to print with their answers")
    flag("--max_new_tokens", type=int, default=32, help="longest answer, in tokens")
    flag("--open_thinking", type=int, choices=(0, 1), default=0, help="1: have the model reason before it answers")
    return parser.parse_args()


def run_costs(save_dir: str | Path, runs: list[str]) -> dict[str, float]:
    """Total seconds and peak memory of the named runs, from the last record of their metrics files.

    Raises:
        UserError: a run has no readable metrics.
    """
    seconds, memory = 0.0, 0.0
    for run in runs:
        path = metrics_path(save_dir, run)
        try:
            last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
            seconds, memory = seconds + last["seconds"], max(memory, last["memory_mb"])
        except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
            raise UserError(f"--runs: {path} holds no metrics of a run; train that stage first") from error
    return {"train_seconds": round(seconds, 1), "peak_memory_mb": round(memory, 1)} if runs else {}


def merge_report(path: str | Path, fields: dict) -> None:
    """Set fields of a JSON report and keep its others; the file is replaced atomically.

    Raises:
        UserError: the file is not a JSON object, or cannot be written.
    """
    path = Path(path)
    try:
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        data = json.dumps({**report, **fields}, indent=2, ensure_ascii=False) + "\n"
        atomic_write(path, lambda file: file.write(data.encode()))
    except (ValueError, TypeError) as error:
        raise UserError(f"--report {path} is not a report; delete it or give another file") from error
    except OSError as error:
        raise UserError(f"--report {path} cannot be read ({error.strerror}); give another file") from error


def print_results(questions: list[dict], answers: list[str], right: list[bool], show: int) -> None:
    """Print the score per kind of fact and language, and `show` questions from all over the exam with their answers."""
    total, good = Counter(), Counter()
    for question, ok in zip(questions, right, strict=True):
        total[question["attribute"], question["language"]] += 1
        good[question["attribute"], question["language"]] += ok
    print("  " + "   ".join(f"{' '.join(key)} {good[key]}/{count}" for key, count in total.items()))
    for place in range(min(show, len(questions))):
        # a step that gives both languages and all kinds of facts
        at = place * max(1, len(questions) // show - 1) % len(questions)
        verdict = "right" if right[at] else f"wrong: {questions[at]['accepted'][0]}"
        print(f"  Q: {questions[at]['question']}\n  A: {answers[at]}   [{verdict}]")


def main() -> None:
    """Ask the questions, score the answers, print and write the report."""
    args = parse_args()
    if args.max_new_tokens < 1 or args.show < 0:
        raise UserError("--max_new_tokens must be at least 1, --show must not be negative")
    questions = read_exam(args.exam_path)
    model, tokenizer = load_model(args)
    costs = run_costs(args.save_dir, [run_name(run, model.config) for run in args.runs])
    texts = [question["question"] for question in questions]
    answers = ask(model, tokenizer, texts, args.max_new_tokens, bool(args.open_thinking))
    right = [is_right(answer, question) for answer, question in zip(answers, questions, strict=True)]
    accuracy = sum(right) / len(right)
    print(f"exam of {args.model or args.weight or WEIGHT}: {sum(right)} of {len(right)} right ({accuracy:.1%})")
    print_results(questions, answers, right, args.show)
    if args.report:
        score = "heldout_accuracy_without_pretrain" if args.control else "heldout_accuracy"
        parameters = {"parameters": sum(p.numel() for p in model.parameters())}
        merge_report(args.report, {score: round(accuracy, 4), **parameters, **costs})


if __name__ == "__main__":
    with one_line_errors():
        main()
