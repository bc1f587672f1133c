"""Evaluate trained models: loss on held-out data, rewards of answers, or multiple choice.

    python scripts/evaluate.py --task loss --data_path data/sft_eval.jsonl
    python scripts/evaluate.py --task answers --data_path data/quiz.jsonl --reward contains_answer
    python scripts/evaluate.py --task choice --data_path data/arc.jsonl

`answers` takes any SFT file: the model answers the last question of each conversation, and the reward
compares its answer with the last assistant turn (or with the field `answer`). `choice` takes records
{"question": ..., "choices": [...], "answer": 0}; see scripts/choice.py. Shares come with Wilson's 95 %
confidence interval. `--against` evaluates further models on the same data, `--json` writes every answer.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import log, sqrt
from pathlib import Path
from typing import Any

# run the code beside this file
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors

# isort: split
import numpy as np
import torch

from common.errors import UserError
from common.files import atomic_write, is_there
from common.hub import local_path, shown_name
from common.settings import ROOT
from dataset.batch import collate_flat
from dataset.files import find_files
from dataset.lm_dataset import PretrainDataset, SFTDataset
from dataset.rollout_prompts import PromptDataset
from dataset.token_cache import file_hash
from model.generation import generate
from model.sampling import default_sampling
from scripts.choice import evaluate_questions, read_questions
from scripts.penalties import add_penalty_flags, check_penalties, with_penalties
from scripts.text_table import text_table
from trainer.checkpoint.same_run import source_files
from trainer.devices.device import prepare_device, select_device
from trainer.objectives.next_token import next_token_loss
from trainer.rollouts.rewards import check_record, compute, load_rewards
from trainer.weights.for_tools import add_trained_model_flags, given_shape, load_path, model_path
from trainer.weights.lora import merge_adapter

BATCH_TOKENS = 4096  # of a forward pass
REWARD_TIMEOUT = 10.0  # seconds that one call of a reward may take
DATASETS = {"pretrain": PretrainDataset, "sft": SFTDataset}
Z = 1.959964  # standard normal quantile of 97.5 %


def parse_args() -> argparse.Namespace:
    """The command line. Raises UserError if a value is out of range."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    flag("--task", choices=("loss", "answers", "choice"), required=True, help="what to measure")
    flag("--data_path", required=True, help="data that the model was not trained on: file, folder or glob")
    flag(
        "--against", nargs="+", default=[], metavar="PATH", help="further models to evaluate on the same data"
    )
    flag("--json", type=Path, metavar="FILE", help="file to write the results to, with every answer")
    add_trained_model_flags(parser)
    flag(
        "--max_seq_len",
        type=int,
        help="maximum length of a sample (loss), a prompt (answers), or a question with a choice, in tokens",
    )

    loss = parser.add_argument_group("--task loss")
    loss.add_argument("--kind", choices=list(DATASETS), default="sft", help="documents or conversations")
    loss.add_argument("--text_separator", help="line that separates the documents of plain text files")

    answers = parser.add_argument_group("--task answers")
    answers.add_argument("--reward", default="exact_answer", help="rewards, as --reward of train_grpo.py")
    answers.add_argument(
        "--max_new_tokens", type=int, default=256, help="maximum length of an answer, in tokens"
    )
    add_penalty_flags(answers)
    text = "number of answers to print, of each model; also of --task choice"
    answers.add_argument("--show", type=int, default=0, help=text)
    text = "1: reason before the answer"
    answers.add_argument("--open_thinking", type=int, choices=(0, 1), default=0, help=text)

    choice = parser.add_argument_group("--task choice")
    text = "questions that stand with their answers before each one (few-shot)"
    choice.add_argument("--shots_path", metavar="FILE", help=text)
    args = parser.parse_args()
    if args.shots_path and args.task != "choice":
        raise UserError("--shots_path is for --task choice; leave it out")
    if args.max_new_tokens < 1 or args.show < 0:
        raise UserError("--max_new_tokens must be at least 1, and --show not negative")
    check_penalties(args)
    return args


def evaluate_loss(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The loss in nats per target and in bits per byte, like the trainer's `eval_loss` and `eval_bpb`."""
    dataset_class = DATASETS[args.kind]
    options = {"text_separator": args.text_separator, "max_lost_text": 1.0}  # as training allowed
    dataset = dataset_class(args.data_path, tokenizer, args.max_seq_len, **options)
    nats, targets, target_bytes = 0.0, 0.0, 0.0
    for items in batches(dataset.item_tokens.tolist()):
        batch = collate_flat([dataset[item] for item in items])
        targets += batch.weight_sum
        batch = batch.to(model.device)
        with torch.no_grad():
            loss, _, _ = next_token_loss(model, batch)
        nats += float(loss)
        target_bytes += batch.target_bytes
    figures = {"loss": {"value": nats / targets}}
    if target_bytes:  # else the tokenizer loses text
        figures["bits per byte"] = {"value": nats / log(2) / target_bytes}
    return {"items": dataset.records, "figures": figures}


def batches(lengths: list[int]) -> Iterator[list[int]]:
    """Indices of items with these lengths, in order, in batches of at most BATCH_TOKENS (or one item)."""
    batch: list[int] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if batch and tokens + length > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += length
    yield batch


def evaluate_answers(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The mean of each reward over the model's greedy answers, and their mean length in characters."""
    rewards = load_rewards(args.reward)
    longest = args.max_seq_len or model.config.max_position_embeddings - args.max_new_tokens
    thinking, check = float(args.open_thinking), partial(check_record, rewards)
    prompts = PromptDataset(args.data_path, tokenizer, longest, thinking_ratio=thinking, check=check).prompts
    greedy = with_penalties(replace(default_sampling(model), temperature=0.0), args)
    input_ids = [prompt.input_ids for prompt in prompts]
    samplings = [[greedy]] * len(prompts)
    generated = generate(model, input_ids, samplings, args.max_new_tokens, [tokenizer.eos_token_id])
    answers: list[dict[str, Any]] = []
    for prompt, (answer,) in zip(prompts, generated, strict=True):
        text = tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
        scores = compute(rewards, prompt.messages, text, prompt.record, prompt.source, REWARD_TIMEOUT)
        about = {"source": prompt.source, "question": prompt.messages[-1]["content"]}
        reference = prompt.record.get("answer")
        answers.append(about | {"reference": reference, "answer": text, "scores": scores})
    figures = {reward.name: mean([answer["scores"][reward.name] for answer in answers]) for reward in rewards}
    figures["characters"] = {"value": float(np.mean([len(answer["answer"]) for answer in answers]))}
    show(answers, args.show)
    return {"items": len(answers), "figures": figures, "answers": answers}


def evaluate_choice(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The share of questions whose most likely choice is the right one: by log-likelihood (acc), and by
    log-likelihood per character (acc_norm)."""
    shots = read_questions(args.shots_path) if args.shots_path else []
    longest = args.max_seq_len or model.config.max_position_embeddings
    answers = evaluate_questions(model, tokenizer, read_questions(args.data_path), shots, longest, batches)
    figures = {name: mean([answer["scores"][name] for answer in answers]) for name in ("acc", "acc_norm")}
    show(answers, args.show)
    return {"items": len(answers), "figures": figures, "answers": answers}


TASKS = {"loss": evaluate_loss, "answers": evaluate_answers, "choice": evaluate_choice}


def show(answers: list[dict[str, Any]], count: int) -> None:
    """Print some answers, evenly chosen."""
    for i in np.linspace(0, len(answers) - 1, min(count, len(answers))).astype(int):
        answer = answers[i]
        notes = [f"{name} {value:g}" for name, value in answer["scores"].items()]
        if answer["reference"] is not None:
            notes.append(f"reference: {answer['reference']}")
        print(f"  Q: {answer['question']}\n  A: {answer['answer']}   [{', '.join(notes)}]")


def mean(values: list[float]) -> dict[str, float]:
    """The mean. If all values are 0 or 1, it is a share, and comes with Wilson's 95 % score interval (Wilson
    1927), which is valid near 0 and 1 and for few items."""
    count, share = len(values), float(np.mean(values))
    if not set(values) <= {0.0, 1.0}:
        return {"value": share}
    center = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return {"value": share, "low": max(0.0, center - half), "high": min(1.0, center + half)}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The figures of all models as text, a column for each model."""
    first = next(iter(results.values()))
    rows = [["metric", "items", *results]]
    for metric in first["figures"]:
        cells = [format_figure(result["figures"][metric]) for result in results.values()]
        rows.append([metric, str(first["items"]), *cells])
    return text_table(rows)


def format_figure(figure: dict[str, float]) -> str:
    """A value, with its interval if it has one."""
    if "low" in figure:
        return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"
    return f"{figure['value']:.3f}"


def main() -> None:
    """Evaluate each model, print the table, write the report."""
    args = parse_args()
    load_rewards(args.reward)  # a wrong one is named before a model is loaded
    args.data_path = local_path(args.data_path)
    paths = [model_path(args), *(Path(local_path(path)) for path in args.against)]
    for path in paths:
        if not is_there(path):
            raise UserError(f"--against {path}: no such file or folder")
    names = [shown_name(path) for path in (Path(args.lora or paths[0]), *paths[1:])]
    if len(set(names)) < len(names):
        names = [str(path) for path in (args.lora or paths[0], *paths[1:])]
    device = select_device(args.device)
    prepare_device(device)
    evaluate_model = TASKS[args.task]
    scaling, results = bool(args.inference_rope_scaling), {}
    for i, (name, path) in enumerate(zip(names, paths, strict=True)):
        model, tokenizer = load_path(path, args.tokenizer_path, device, scaling, **given_shape(args))
        if args.lora and i == 0:
            model = merge_adapter(model, Path(args.lora))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        results[name] = {"path": str(path), "parameters": parameters} | evaluate_model(args, model, tokenizer)
    print(table(results))
    if args.json:
        read = [path for given in (args.data_path, args.shots_path) if given for path in find_files(given)[0]]
        rewards = [path for path in source_files().values() if not path.is_relative_to(ROOT)]
        files = {str(path): file_hash(path) for path in (*read, *rewards)}
        report = {"settings": vars(args), "files": files, "models": results}
        text = json.dumps(report, indent=1, ensure_ascii=False, default=str) + "\n"
        atomic_write(args.json, lambda file: file.write(text.encode()))


if __name__ == "__main__":
    with one_line_errors():
        main()
