"""Multiple choice by log-likelihood, as lm-evaluation-harness computes `acc` and `acc_norm`: the model's
choice is the one that it finds most likely after the question."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from common.errors import UserError
from dataset.batch import collate_flat
from dataset.files import find_files, format_source, read_records
from dataset.messages import BadRecord
from trainer.objectives.next_token import target_log_probs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LETTERS = "ABCDEFGHIJ"
FORM = '{"question": "...", "choices": ["...", "..."], "answer": 0}'


Batches = Callable[[list[int]], Iterator[list[int]]]  # lengths of samples -> the indices of each batch


class Question(NamedTuple):
    """A question with its choices. answer: the number of the right one. source: FILE:LINE."""

    text: str
    choices: list[str]
    answer: int
    source: str


def read_questions(data_path: str) -> list[Question]:
    """The questions in these files. Raises UserError for a record that is not a question."""
    paths, _ = find_files(data_path)
    questions = []
    for source, record in read_records(paths):
        where = format_source(paths[source.file], source.line)
        if isinstance(record, BadRecord):
            raise UserError(f"{where}: {record}")
        text: Any = record.get("question")
        choices: Any = record.get("choices")
        answer: Any = record.get("answer")
        texts = [text, *choices] if isinstance(choices, list) and len(choices) > 1 else []
        if not texts or not all(isinstance(each, str) and each.strip() for each in texts):
            raise UserError(f"{where}: not a question with two or more choices; the form is {FORM}")
        number = choices.index(answer) if answer in choices else answer
        if isinstance(number, str) and len(number) == 1 and number in LETTERS:
            number = LETTERS.index(number)
        if type(number) is not int or not 0 <= number < len(choices):
            raise UserError(
                f"{where}: answer {answer!r} is not a choice; give its number (from 0), letter (from A) or "
                "text"
            )
        questions.append(Question(text, choices, number, where))
    if not questions:
        raise UserError(f"{data_path} holds no questions; the form is {FORM}")
    return questions


def examples(questions: list[Question]) -> str:
    """Questions with their answers, as text to put before the question that is asked (few-shot)."""
    return "".join(f"{each.text} {each.choices[each.answer]}\n\n" for each in questions)


def choice_sample(
    tokenizer: "PreTrainedTokenizerBase", context: str, choice: str, longest: int, source: str
) -> dict[str, Any]:
    """A sample whose targets are the tokens of a choice after its context. Spaces at the end of the context
    move to the choice, so that a token may begin with them. If the context is too long, its beginning is cut
    away. Raises UserError if the choice has no token of its own, or more than `longest`."""
    begin = context.rstrip()
    text = f"{context} {choice}"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    targets = len(tokens) - len(tokenizer.encode(begin, add_special_tokens=False))
    if not 0 < targets <= longest:
        raise UserError(f"{source}: choice {choice!r} has {targets} tokens; it must have 1 to {longest}")
    tokens = tokens[-(longest + 1) :]
    loss_weight = np.zeros(len(tokens), dtype=np.float32)
    loss_weight[-targets:] = 1.0
    return {"input_ids": np.array(tokens), "loss_weight": loss_weight, "target_bytes": 0}


@torch.no_grad()
def log_likelihoods(model: Any, samples: list[dict[str, Any]], batches: Batches) -> np.ndarray:
    """The sum of the log-probabilities of each sample's targets [samples]."""
    sums = torch.zeros(len(samples), dtype=torch.float64)
    for items in batches([len(sample["input_ids"]) for sample in samples]):
        batch = collate_flat([[samples[item] | {"sample_id": item}] for item in items])
        batch = batch.to(model.device)
        log_probs, _ = target_log_probs(model, batch)
        sums.index_add_(0, batch.target_samples(), log_probs.cpu().double())
    return sums.numpy()


def evaluate_questions(
    model: Any,
    tokenizer: Any,
    questions: list[Question],
    shots: list[Question],
    longest: int,
    batches: Batches,
) -> list[dict[str, Any]]:
    """For each question, whether the most likely choice is right (`acc`), whether the choice with the largest
    log-likelihood per character is right (`acc_norm`), and the choices' log-likelihoods."""
    before = examples(shots)
    samples = [
        choice_sample(tokenizer, before + question.text, choice, longest, question.source)
        for question in questions
        for choice in question.choices
    ]
    values = log_likelihoods(model, samples, batches)
    answers = []
    for question in questions:
        own, values = values[: len(question.choices)], values[len(question.choices) :]
        likeliest = int(own.argmax())
        per_character = own / [len(choice) for choice in question.choices]
        scores = {
            "acc": likeliest == question.answer,
            "acc_norm": int(per_character.argmax()) == question.answer,
        }
        answers.append(
            {
                "source": question.source,
                "question": question.text,
                "reference": question.choices[question.answer],
                "answer": question.choices[likeliest],
                "scores": {name: float(is_right) for name, is_right in scores.items()},
                "log_likelihoods": own.tolist(),
            }
        )
    return answers
