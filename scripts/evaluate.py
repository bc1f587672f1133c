"""Judge trained models: held-out loss, the demo exam, multiple choice by likelihood.

    python scripts/evaluate.py --task loss --model out/full_sft_512.pth --data_path data/sft_eval.jsonl
    python scripts/evaluate.py --task exam choices --model out/full_sft_512.pth --choices_path questions.jsonl
    python scripts/evaluate.py --task exam --model out/full_sft_512.pth --against out/full_sft_768.pth --json e.json

Every value comes with its 95 % confidence interval. Of several models, each is compared with the first on the
same items; a star marks a difference whose interval leaves out zero, of at least 30 items.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError, reason
from common.settings import ROOT, StageArgs, add_flags, settings_of
from dataset.lm_dataset import PretrainDataset, SFTDataset
from scripts.evaluation.exam import ask, is_right, read_exam
from scripts.evaluation.likelihood import held_out, multiple_choice, read_choices
from scripts.evaluation.scores import Item, summarize, table
from trainer.devices.device import prepare_device, select_device
from trainer.objectives.lora import merge_adapter
from trainer.weights.for_tools import add_trained_model_flags, given_shape, load_path, model_path

DATASETS = {"pretrain": PretrainDataset, "sft": SFTDataset}


def parse_args() -> argparse.Namespace:
    """The command line. Raises UserError if a value is out of range, or a task lacks its file."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    flag(
        "--task", nargs="+", choices=list(TASKS), required=True, help="what to measure; several are possible"
    )
    add_trained_model_flags(parser)
    flag(
        "--against",
        nargs="+",
        metavar="PATH",
        help="further models, each compared with the first on the same items",
    )
    flag(
        "--json", metavar="FILE", help="file to write the results to, with the score and answer of each item"
    )
    flag("--batch_tokens", type=int, default=4096, help="tokens of a forward pass (loss, choices)")
    rows = settings_of(StageArgs)
    held_out_data = replace(
        rows["data_path"], default=None, help="data that the model was not trained on (loss)"
    )
    add_flags(parser, [held_out_data, rows["text_separator"], replace(rows["max_seq_len"], default=None)])
    flag(
        "--kind", choices=list(DATASETS), default="sft", help="data of documents, or of conversations (loss)"
    )
    flag(
        "--exam_path", default=str(ROOT / "dataset/demo/exam.jsonl"), help="JSONL file with questions (exam)"
    )
    flag("--choices_path", metavar="FILE", help="JSONL file with question, choices and answer (choices)")
    flag("--show", type=int, default=0, help="number of questions to print with each model's answers (exam)")
    thinking_help = "1: have the model reason before it answers (exam)"
    flag("--open_thinking", type=int, choices=(0, 1), default=0, help=thinking_help)
    flag("--max_new_tokens", type=int, default=256, help="longest answer, in tokens (exam)")
    args = parser.parse_args()
    if min(args.batch_tokens, args.max_new_tokens) < 1 or args.show < 0:
        raise UserError("--batch_tokens and --max_new_tokens must be at least 1, and --show not negative")
    if "loss" in args.task and not args.data_path:
        raise UserError("--task loss needs --data_path, a file that the model was not trained on")
    if "choices" in args.task and not args.choices_path:
        raise UserError("--task choices needs --choices_path")
    return args


# --- the tasks: each gives a function of (model, tokenizer) that returns the items, after it has read its
# file --------

Judge = Callable[[Any, Any], list[Item]]


def judge_loss(args: argparse.Namespace) -> Judge:
    """Loss and bits per byte on held-out data, as the trainer's `eval_loss` and `eval_bpb`."""

    def judge(model: Any, tokenizer: Any) -> list[Item]:
        options = {"text_separator": args.text_separator}
        dataset = DATASETS[args.kind](args.data_path, tokenizer, args.max_seq_len, **options)
        return held_out(model, dataset, args.batch_tokens)

    return judge


def judge_exam(args: argparse.Namespace) -> Judge:
    """The demo's exam, in chat: questions about people whom SFT never mentioned."""
    questions = read_exam(args.exam_path)
    step = max(1, len(questions) // args.show - 1) if args.show else 1  # odd: both languages are shown

    def judge(model: Any, tokenizer: Any) -> list[Item]:
        texts = [each["question"] for each in questions]
        answers = ask(model, tokenizer, texts, args.max_new_tokens, bool(args.open_thinking))
        pairs = list(zip(questions, answers, strict=True))
        for each, answer in pairs[::step][: args.show]:
            verdict = "right" if is_right(answer, each) else f"wrong: {each['accepted'][0]}"
            print(f"  Q: {each['question']}\n  A: {answer}   [{verdict}]")
        scores = [
            {"right": (float(is_right(a, q)), 1.0), "characters": (float(len(a)), 1.0)} for q, a in pairs
        ]
        return [Item(q["key"], score, q["language"], a) for (q, a), score in zip(pairs, scores, strict=True)]

    return judge


def judge_choices(args: argparse.Namespace) -> Judge:
    """Multiple choice by likelihood."""
    questions = read_choices(args.choices_path)
    return lambda model, tokenizer: multiple_choice(model, tokenizer, questions, args.batch_tokens)


TASKS = {"loss": judge_loss, "exam": judge_exam, "choices": judge_choices}


# --- the results
# -----------------------------------------------------------------------------------------------------


def names_of(paths: list[Path]) -> list[str]:
    """A short name for each model: the name of its file, or its path where that is not clear. Raises
    UserError if a model is given twice."""
    if len(set(paths)) < len(paths):
        raise UserError("--against names a model twice; leave one of them out")
    names = [path.stem if path.is_file() else path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def main() -> None:
    """Judge each model by each task, print the table, write the report."""
    args = parse_args()
    judges = {task: TASKS[task](args) for task in dict.fromkeys(args.task)}
    paths = [model_path(args), *map(Path, args.against or ())]
    if missing := [str(path) for path in paths if not path.exists()]:
        raise UserError(f"--against {missing[0]}: no such file or folder")
    adapter = Path(args.lora) if args.lora else None
    names = names_of([adapter or paths[0], *paths[1:]])
    device = select_device(args.device)
    prepare_device(device)
    results: dict[str, dict[str, list[Item]]] = {task: {} for task in judges}
    models = {}
    for number, (name, path) in enumerate(zip(names, paths, strict=True)):
        model, tokenizer = load_path(path, args.tokenizer_path, device, **given_shape(args))
        if adapter and number == 0:
            model = merge_adapter(model, adapter)
        models[name] = {"path": str(path), "parameters": sum(p.numel() for p in model.parameters())}
        for task, judge in judges.items():
            results[task][name] = judge(model, tokenizer)
    rows = [row for task, items in results.items() for row in summarize(task, items)]
    print(table(rows))
    if args.json:
        items = {
            task: {name: [vars(item) for item in judged] for name, judged in by_model.items()}
            for task, by_model in results.items()
        }
        report = {"models": models, "settings": vars(args), "results": rows, "items": items}
        try:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            Path(args.json).write_text(
                json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise UserError(
                f"--json {args.json} cannot be written ({reason(error)}); give another file"
            ) from error


if __name__ == "__main__":
    with one_line_errors():
        main()
