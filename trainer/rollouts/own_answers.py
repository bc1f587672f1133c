"""On-policy distillation (GKD, arXiv:2306.13649). The student writes the last answer of a conversation. The
teachers judge it. So the student learns what to do after its own mistakes.

Tokens are sampled at temperature 1. An answer is a function of (weights, seed, update, conversation). So a
checkpoint holds no answers: a resumed run writes the same ones again."""

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from common.seeds import draw
from dataset.batch import Batch, FlatBatch
from model.generation import Answer, generate
from model.sampling import Sampling
from trainer.callbacks.right_answers import answers
from trainer.callbacks.train_state import TrainState
from trainer.devices.compiling import uncompiled
from trainer.devices.wrapping import unwrap
from trainer.objectives.base import Metrics
from trainer.rollouts.writer import policy_for_decoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sample = dict[str, Any]  # of `FlatBatch.samples`


class Prompt(NamedTuple):
    """A conversation up to its last answer."""

    tokens: list[int]
    sample_id: int
    weight: float  # of the answer's tokens


class OwnAnswers:
    """Replaces the last answer in a share of the samples by the student's own.

    args: with `on_policy`, the share; `max_gen_len` and `seed`. tokenizer: its end token ends an answer."""

    def __init__(self, args: Any, tokenizer: "PreTrainedTokenizerBase"):
        self.args, self.end_ids = args, [cast(int, tokenizer.eos_token_id)]
        self.decoding_copy: nn.Module | None = None  # of the student; it generates

    def write(self, state: TrainState, micro_batches: list[Batch]) -> list[Batch]:
        """The micro-batches of `own_batch`; all answers are generated together."""
        kept: list[list[Sample]] = []
        prompts: list[list[Prompt]] = []
        for batch in micro_batches:
            kept.append([])
            prompts.append([])
            for sample in batch.samples():
                place = draw(self.args.seed, state.progress.update, sample["sample_id"], 0)
                if place < self.args.on_policy * 2**64:
                    prompts[-1].append(prompt_of(sample))
                else:
                    kept[-1].append(sample)
        written = iter(self._generate(state, list(chain(*prompts))))
        pairs = [[(prompt, next(written)) for prompt in of_batch] for of_batch in prompts]
        return [own_batch(*parts) for parts in zip(kept, pairs, strict=True)]

    def _generate(self, state: TrainState, prompts: list[Prompt]) -> list[Answer]:
        """The student's answer to each prompt."""
        if not prompts:
            return []
        seeds = [draw(self.args.seed, state.progress.update, prompt.sample_id, 1) for prompt in prompts]
        student = unwrap(state.model)
        student.eval()
        with state.autocast:
            self.decoding_copy = policy_for_decoding(student, self.decoding_copy)
        tokens, samplings = [prompt.tokens for prompt in prompts], [[Sampling(seed=seed)] for seed in seeds]
        with uncompiled(student):
            written = generate(self.decoding_copy, tokens, samplings, self.args.max_gen_len, self.end_ids)
        student.train()
        return [answer for (answer,) in written]


def prompt_of(sample: Sample) -> Prompt:
    """The prompt of a sample's last answer."""
    *_, (begin, _) = answers(sample)
    weight = float(sample["loss_weight"][begin])
    return Prompt(sample["input_ids"][:begin].tolist(), sample["sample_id"], weight)


def own_batch(kept: list[Sample], written: list[tuple[Prompt, Answer]]) -> FlatBatch:
    """The flat batch of the kept samples, followed by the student's answers. Of a written sample the answer
    alone is a target. Two fields are added: `own_from`, the index of the first target that the student wrote,
    and `own_counts` [5] for `own_metrics`."""
    own = []
    for prompt, answer in written:
        tokens = np.array([*prompt.tokens, *answer.tokens], dtype=np.int64)
        loss_weight = np.zeros(len(tokens), dtype=np.float32)
        loss_weight[len(prompt.tokens) :] = prompt.weight
        sample = {"input_ids": tokens, "loss_weight": loss_weight}
        own.append(sample | {"sample_id": prompt.sample_id, "target_bytes": 0})
    batch = FlatBatch.from_samples([*kept, *own])
    own_from = sum(batch.target_counts[: len(kept)])
    weights = torch.ones(len(batch.targets)) if batch.loss_weight is None else batch.loss_weight
    cut = sum(answer.finish == "length" for _, answer in written)
    counts = [len(own), len(batch.targets) - own_from, cut]
    sums = torch.stack((weights[:own_from].sum(), weights[own_from:].sum()))
    return batch | {"own_from": own_from, "own_counts": torch.cat((sums, torch.tensor(counts).float()))}


def own_metrics(
    batch: Batch, cross_entropy: Tensor, divergence: Tensor, reverse_divergence: Tensor
) -> Metrics:
    """The metrics of a batch of `own_batch`, as (sum, count). cross_entropy and divergence: sums [] over its
    targets of the data; reverse_divergence: over those that the student wrote."""
    of_data, of_own, number, tokens, cut = batch["own_counts"]  # on the device, like the sums
    return {
        "cross_entropy": (cross_entropy, of_data),
        "divergence": (divergence, of_data),
        "reverse_divergence": (reverse_divergence, of_own),
        "completion_length": (tokens, number),
        "cut_share": (cut, number),
    }
