"""Sit the exam of the demo corpus: ask in chat about people whom SFT never mentioned, and score the answers.

    python scripts/demo_exam.py --save_dir out/demo --hidden_size 256 --num_hidden_layers 3 --show 6

An answer is right when it names the right value and no other value of that attribute: naming them all, or none, scores
nothing, and guessing one scores 1 in 12. With --control the score is written as that of the model without pretraining.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import torch

from dataset.errors import Parser, UserError, run_main
from trainer.arguments import model_config, trained_model_flags
from trainer.checkpoint import metrics_path, run_name
from trainer.files import atomic_write
from trainer.trainer_utils import ROOT, init_model, load_tokenizer, pick_device

FIELDS = {"question": str, "accepted": list, "rejected": list, "attribute": str, "language": str}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    trained_model_flags(parser)
    flag("--exam_path", default=str(ROOT / "dataset" / "demo" / "exam.jsonl"), help="the questions")
    flag("--report", help="JSON file into which the score is written, beside what it holds already")
    flag(
        "--control", action="store_true", help="the weights were fine-tuned without pretraining; says so in the report"
    )
    flag("--runs", nargs="+", default=[], help="runs in --save_dir whose time and memory the report sums up")
    flag("--show", type=int, default=0, help="questions and answers to print")
    flag("--batch_size", type=int, default=96, help="questions answered at a time")
    flag("--max_new_tokens", type=int, default=32, help="longest answer, in tokens")
    return parser.parse_args()


def read_exam(path: str | Path) -> list[dict]:
    """The questions of an exam file.

    Raises:
        UserError: the file is missing or empty, or a line is no question.
    """
    if not Path(path).is_file():
        raise UserError(f"--exam_path {path} does not exist; generate it with: python -m dataset.demo_corpus")
    questions = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        try:
            question = json.loads(line)
            sound = all(isinstance(question[field], kind) for field, kind in FIELDS.items())
        except (ValueError, KeyError, TypeError):
            sound = False
        if not sound:
            raise UserError(f"{path}:{number} is no exam question (needs {', '.join(FIELDS)}); generate the file again")
        questions.append(question)
    if not questions:
        raise UserError(f"--exam_path {path} is empty; generate it again with: python -m dataset.demo_corpus")
    return questions


def names_value(text: str, value: str) -> bool:
    """Whether a text names a value: as whole words in English, in either case; anywhere in Chinese."""
    if value.isascii():
        return re.search(rf"(?<![a-z]){re.escape(value.lower())}(?![a-z])", text.lower()) is not None
    return value in text


def is_right(answer: str, question: dict) -> bool:
    """Whether an answer names an accepted value and no rejected one."""
    accepted = any(names_value(answer, value) for value in question["accepted"])
    return accepted and not any(names_value(answer, value) for value in question["rejected"])


@torch.no_grad()
def ask(model, tokenizer, questions: list[str], batch_size: int, max_new_tokens: int) -> list[str]:
    """The model's answers to questions asked in chat, each on its own, always with the likeliest token."""
    tokenizer.padding_side = "left"  # so that every answer begins at the end of its row
    answers = []
    for start in range(0, len(questions), batch_size):
        chats = [[{"role": "user", "content": text}] for text in questions[start : start + batch_size]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        answers += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [answer.strip() for answer in answers]


def run_costs(save_dir: str | Path, runs: list[str]) -> dict[str, float]:
    """Seconds in all and most memory of the named runs, from the last line of each one's metrics file.

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
    """Write fields into a JSON report, keeping its others; the file is replaced as a whole.

    Raises:
        UserError: there is a file, but no JSON object in it, or it cannot be written.
    """
    path = Path(path)
    try:
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        data = json.dumps({**report, **fields}, indent=2, ensure_ascii=False) + "\n"
        atomic_write(path, lambda file: file.write(data.encode()))
    except (ValueError, TypeError) as error:
        raise UserError(f"--report {path} holds something else than a report; delete it or name another") from error
    except OSError as error:
        raise UserError(f"--report {path} cannot be written ({error.strerror}); name another file") from error


def print_results(questions: list[dict], answers: list[str], right: list[bool], show: int) -> None:
    """The score per kind of fact and language, and `show` questions spread over the exam with their answers."""
    total, good = Counter(), Counter()
    for question, ok in zip(questions, right, strict=True):
        total[question["attribute"], question["language"]] += 1
        good[question["attribute"], question["language"]] += ok
    print("  " + "   ".join(f"{' '.join(key)} {good[key]}/{count}" for key, count in total.items()))
    for place in range(min(show, len(questions))):
        # every 7th or so, so that both languages and all kinds of facts have their turn
        at = place * max(1, len(questions) // show - 1) % len(questions)
        verdict = "right" if right[at] else f"wrong: {questions[at]['accepted'][0]}"
        print(f"  Q: {questions[at]['question']}\n  A: {answers[at]}   [{verdict}]")


def main() -> None:
    """Ask, score, print, and write the report."""
    args = parse_args()
    if args.batch_size < 1 or args.max_new_tokens < 1 or args.show < 0:
        raise UserError("--batch_size and --max_new_tokens must be at least 1, --show must not be negative")
    questions = read_exam(args.exam_path)
    config = model_config(args, load_tokenizer(args.tokenizer_path))
    device = pick_device(args.device, 0)
    model, tokenizer = init_model(config, args.weight, args.tokenizer_path, args.save_dir, device)
    costs = run_costs(args.save_dir, [run_name(run, config) for run in args.runs])
    answers = ask(model.eval(), tokenizer, [q["question"] for q in questions], args.batch_size, args.max_new_tokens)
    right = [is_right(answer, question) for answer, question in zip(answers, questions, strict=True)]
    accuracy = sum(right) / len(right)
    print(f"exam of {args.weight}: {sum(right)} of {len(right)} right ({accuracy:.1%})")
    print_results(questions, answers, right, args.show)
    if args.report:
        score = "heldout_accuracy_without_pretrain" if args.control else "heldout_accuracy"
        parameters = {"parameters": sum(p.numel() for p in model.parameters())}
        merge_report(args.report, {score: round(accuracy, 4), **parameters, **costs})


if __name__ == "__main__":
    run_main(main)
