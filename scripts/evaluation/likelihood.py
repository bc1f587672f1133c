"""How likely texts are to a model: held-out loss, and multiple choice by likelihood; on flat batches, no
padding."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from dataset.files import place
from dataset.lm_dataset import StageDataset, collate_flat
from scripts.evaluation.questions import check_types, read_questions
from scripts.evaluation.scores import Item
from trainer.loop import to_device
from trainer.objectives.next_token import target_logits

FIELDS = "question (text), choices (two or more texts) and answer (the number of the right choice, from 0)"


@torch.no_grad()
def log_likelihoods(model: Any, samples: list[dict]) -> np.ndarray:
    """float64 [samples]: the sum of the log-probabilities of each sample's targets, in nats."""
    batch = to_device(collate_flat([samples]), model.device)
    logits, _ = target_logits(model, batch)
    # float32 copies that fit a CPU's cache
    pairs = zip(logits.split(512), batch["targets"].split(512), strict=True)
    log_probs = [-F.cross_entropy(rows.float(), targets, reduction="none") for rows, targets in pairs]
    sample = torch.bucketize(
        batch["target_index"], batch["cu_seqlens"][1:].to(batch["target_index"]), right=True
    )
    sums = np.zeros(len(samples))
    np.add.at(sums, sample.cpu().numpy(), torch.cat(log_probs).double().cpu().numpy() if log_probs else [])
    return sums


def batches(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> Iterator[np.ndarray]:
    """Indices of samples, the longest first, in batches of at most `max_tokens` tokens (or one sample)."""
    batch: list[int] = []
    tokens = 0
    for index in np.argsort(-np.asarray(lengths), kind="stable"):
        if batch and tokens + lengths[index] > max_tokens:
            yield np.array(batch)
            batch, tokens = [], 0
        batch.append(int(index))
        tokens += int(lengths[index])
    if batch:
        yield np.array(batch)


def held_out(model: Any, dataset: StageDataset, max_tokens: int) -> list[Item]:
    """Loss in nats per target and bits per byte, one item for each record of the file."""
    cache, nats = dataset.cache, np.zeros(len(dataset))
    for picked in batches(np.diff(dataset.cache.offsets), max_tokens):
        nats[picked] = -log_likelihoods(model, [sample for i in picked for sample in dataset[int(i)]])
        cache.release()
    # a record may be several samples
    records, record = np.unique(np.array(cache.sources), axis=0, return_inverse=True)
    sums = [
        np.bincount(record, weights)
        for weights in (nats, np.array(cache.num_targets), np.array(cache.target_bytes))
    ]
    return [
        Item(
            place(cache.files[file], line),
            {"loss": (loss, targets), "bits per byte": (loss / math.log(2), size)},
        )
        for (file, line), loss, targets, size in zip(records, *sums, strict=True)
    ]


def read_choices(path: str | Path) -> list[dict]:
    """The questions of a multiple-choice file, each with its place `key`. Raises UserError if the file is
    missing or empty, or a line is not a question."""
    questions = read_questions(
        path, "--choices_path", _check_choices, "a question", f"write lines with {FIELDS}"
    )
    for question in questions:
        group = question.get("language") if isinstance(question.get("language"), str) else ""
        question |= {"group": group, "right": int(question["answer"])}
    return questions


def _check_choices(line: dict) -> None:
    check_types(line, {"question": str, "choices": list, "answer": int})
    choices, answer = line["choices"], line["answer"]
    if not line["question"].strip() or len(choices) < 2:
        raise ValueError("an empty question, or no choice")
    if not all(isinstance(choice, str) and choice for choice in choices) or isinstance(answer, bool):
        raise TypeError("a choice that is not text")
    if answer not in range(len(choices)):
        raise ValueError("no such choice")


def multiple_choice(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: list[dict], max_tokens: int
) -> list[Item]:
    """Which choice is the likeliest after its question, as EleutherAI's lm-eval counts it: by the
    log-likelihood of the choice (`acc`), by that per character (`acc_norm`) and per UTF-8 byte (`acc_bytes`).
    Raises UserError if a question with its choice is longer than the model's context."""
    samples: list[dict[str, Any]] = []
    for question in questions:
        for choice in question["choices"]:
            tokens, first = choice_tokens(tokenizer, question["question"], choice)
            if len(tokens) > model.config.max_position_embeddings:
                limit = model.config.max_position_embeddings
                raise UserError(
                    f"{question['key']} is longer than the model's context of {limit} tokens; shorten it"
                )
            mask = np.arange(len(tokens)) >= first
            samples.append(
                {"input_ids": np.array(tokens), "loss_mask": mask, "sample_id": 0, "target_bytes": 0}
            )
    likelihood = np.zeros(len(samples))
    for picked in batches([len(sample["input_ids"]) for sample in samples], max_tokens):
        likelihood[picked] = log_likelihoods(model, [samples[i] for i in picked])
    items, begin = [], 0
    for question in questions:
        choices, right = question["choices"], question["right"]
        sums = likelihood[begin : begin + len(choices)]
        begin += len(choices)
        sizes = {
            "acc": 1,
            "acc_norm": [len(c) for c in choices],
            "acc_bytes": [len(c.encode()) for c in choices],
        }
        best = {name: int(np.argmax(sums / np.array(size))) for name, size in sizes.items()}
        scores = {name: (float(choice == right), 1.0) for name, choice in best.items()}
        items.append(Item(question["key"], scores, question["group"], choices[best["acc"]]))
    return items


def choice_tokens(tokenizer: PreTrainedTokenizerBase, question: str, choice: str) -> tuple[list[int], int]:
    """The tokens of a question with a choice, and the index of the first one that belongs to the choice.

    Both are tokenised together, and blanks at the question's end belong to the choice, as in lm-eval.
    """
    context = tokenizer(question.rstrip(), add_special_tokens=False)["input_ids"]
    return tokenizer(f"{question} {choice}", add_special_tokens=False)["input_ids"], len(context)
