"""Batched decoding: many answers are written at once, over one cache of keys and values; they join and leave
between two steps. For chat, the server, evaluation and rollouts; no threads, no text and no network here.

    decoder = Decoder(model, slots=64, length=2048, end_ids=[2])
    answers = decoder.add(prompt, [Sampling(seed=1), Sampling(seed=2)], max_new_tokens=100)
    while decoder.answers:
        decoder.step()  # a token of each: answer.tokens, answer.finish

The same prompt and seed give the same answer whatever else is decoded beside it (see sampling.py), except
where two tokens tie to within the rounding of a matrix product, which may depend on the number of rows.

Shape legend: R rows, T tokens, G key/value heads, D head size, V vocabulary.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from model.sampling import Sampling, draw

SLOTS = 128  # answers that `generate` writes at once
READ_AT_ONCE = 512  # tokens of a prompt: the mask and the activations of more take much memory


class NotFinite(UserError):
    """A model's outputs are not finite numbers. From such logits the first token of the vocabulary would be
    drawn again and again: a special one, which is shown as nothing."""

    def __init__(self) -> None:
        super().__init__(
            "the model's outputs are not finite numbers: its training diverged, or the file is damaged"
        )


@dataclass(eq=False)
class Answer:
    """One answer. finish: None while it is written; "stop" after an end token (which is the last of its
    tokens), "length" if it has all tokens that it may have."""

    sampling: Sampling
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of these tokens under softmax(logits / temperature)
    finish: str | None = None
    cached: int = 0  # tokens whose keys and values are in the cache


class KeyValueCache:
    """Keys and values of `slots` rows of `length` tokens, allocated once. It takes the place of a
    transformers cache in the model's attention: before a forward `seek` says where its tokens belong."""

    def __init__(self, model: Any, slots: int, length: int):
        config, weight = model.config, model.lm_head.weight
        shape = (config.num_hidden_layers, 2, slots, config.num_key_value_heads, length, config.head_dim)
        # zeros, not empty: a masked value that is not a number would still spoil the sum
        self.tensor = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def seek(self, first: int, positions: Tensor, end: int) -> None:
        """Next come tokens at `positions` [R, T] of the rows from `first` on, which see keys before `end`."""
        self.rows = slice(first, first + len(positions))
        self.numbers = torch.arange(first, self.rows.stop, device=positions.device)[:, None]  # of the rows
        self.positions, self.end = positions, end

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store k, v [R, G, T, D] of a layer; returns all keys and values of its rows, [R, G, end, D]."""
        keys, values = self.tensor[layer]
        keys[self.numbers, :, self.positions] = k.transpose(1, 2)
        values[self.numbers, :, self.positions] = v.transpose(1, 2)
        return keys[self.rows, :, : self.end], values[self.rows, :, : self.end]

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Put the first tokens of a row in the place of others."""
        tokens = self.tensor[..., :length, :]
        tokens[:, :, targets] = tokens[:, :, source : source + 1]


class Decoder:
    """Writes up to `slots` answers at once, each with its prompt of up to `length` tokens.

    model: a `MiniMindForCausalLM`. end_ids: tokens that end an answer. A call that raises leaves the answers
    as they were; raises NotFinite if the model's outputs are no numbers."""

    def __init__(self, model: Any, slots: int, length: int, end_ids: Collection[int]):
        self.model, self.slots, self.length, self.end_ids = model, slots, length, frozenset(end_ids)
        self.device = model.lm_head.weight.device
        with torch.inference_mode():
            self.cache = KeyValueCache(model, slots, length)
        self.answers: list[Answer] = []  # answer i has row i of the cache

    @property
    def free(self) -> int:
        """Answers that can be added now."""
        return self.slots - len(self.answers)

    @torch.inference_mode()
    def add(self, prompt: Sequence[int], samplings: Sequence[Sampling], max_new_tokens: int) -> list[Answer]:
        """Begin an answer for each sampling: the prompt is read once, and their first tokens are drawn.
        Raises ValueError if there is no room for so many answers, or prompt and answer are longer than the
        cache."""
        if not 1 <= len(samplings) <= self.free:
            raise ValueError(f"{len(samplings)} answers were asked for, and there is room for {self.free}")
        if not prompt or max_new_tokens < 1 or len(prompt) + max_new_tokens > self.length:
            raise ValueError(f"{len(prompt)} + {max_new_tokens} tokens do not fit the cache of {self.length}")
        row = len(self.answers)
        tokens, positions = torch.tensor([list(prompt)]), torch.arange(len(prompt))[None]
        chunks = zip(tokens.split(READ_AT_ONCE, 1), positions.split(READ_AT_ONCE, 1), strict=True)
        hidden = torch.empty(0)
        for chunk in chunks:
            hidden = self._hidden(row, *chunk)
        answers = [Answer(each, max_new_tokens, cached=len(prompt)) for each in samplings]
        logits = self.model.lm_head(hidden[:, -1]).float().expand(len(answers), -1)
        drawn = self._draw(answers, logits)
        self.cache.copy(row, slice(row + 1, row + len(answers)), len(prompt))
        self.answers += answers
        self._append(answers, *drawn)
        return answers

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """Write a token of every answer; returns them all. Those with a `finish` have left."""
        answers = list(self.answers)
        tokens = torch.tensor([[answer.tokens[-1]] for answer in answers])
        positions = torch.tensor([[answer.cached] for answer in answers])
        hidden = self._hidden(0, tokens, positions)
        logits = self.model.lm_head(hidden[:, 0]).float()
        drawn = self._draw(answers, logits)
        for answer in answers:
            answer.cached += 1
        self._append(answers, *drawn)
        return answers

    @torch.inference_mode()
    def remove(self, answer: Answer) -> None:
        """Stop writing an answer; the last one gets its row. Nothing happens to one that has left already."""
        if answer not in self.answers:
            return
        row, last = self.answers.index(answer), self.answers[-1]
        if last is not answer:
            self.cache.copy(len(self.answers) - 1, slice(row, row + 1), last.cached)
            self.answers[row] = last
        self.answers.pop()

    def _hidden(self, row: int, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [R, T, C] of tokens [R, T] in the rows from `row` on, which are cached."""
        from model.attention import visible_mask  # brings in the compiler

        end, inner = int(positions.max()) + 1, self.model.model
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        self.cache.seek(row, positions, end)
        keys = torch.arange(end, device=self.device)
        mask = visible_mask(positions[..., None], keys, self.model.config)[:, None]  # [R, 1, T, end]
        embeds = inner.embed_tokens(tokens)
        if torch.is_autocast_enabled(self.device.type):
            embeds = embeds.float()  # as in training, where the weights are float32
        return inner(embeds, positions, mask, self.cache)[0]

    def _draw(self, answers: list[Answer], logits: Tensor) -> tuple[list[int], list[float]]:
        """The next token of each answer from logits [R, V], and its log-probability. Sync point."""
        numbers = [len(answer.tokens) for answer in answers]
        tokens, logprobs = draw(logits, [answer.sampling for answer in answers], numbers)
        drawn = tokens.tolist(), logprobs.tolist()
        if not all(map(math.isfinite, drawn[1])):
            raise NotFinite
        return drawn

    def _append(self, answers: list[Answer], tokens: list[int], logprobs: list[float]) -> None:
        """Give each answer its next token, and let those leave that end with it."""
        for i, answer in enumerate(answers):
            answer.tokens.append(tokens[i])
            answer.logprobs.append(logprobs[i])
            if tokens[i] in self.end_ids:
                answer.finish = "stop"
            elif len(answer.tokens) == answer.max_new_tokens:
                answer.finish = "length"
            if answer.finish:
                self.remove(answer)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sequence[Sampling]],
    max_new_tokens: int | Sequence[int],
    end_ids: Collection[int],
    slots: int = SLOTS,
) -> list[list[Answer]]:
    """Answers to all prompts (lists of token ids), for each prompt one per sampling; `slots` of them at a
    time, but at least those of one prompt. Raises ValueError if a prompt is empty.

    max_new_tokens: of every answer, or of those of each prompt."""
    new = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    length = max((len(prompt) + count for prompt, count in zip(prompts, new, strict=True)), default=0)
    slots = min(max(slots, *map(len, samplings), 1), sum(map(len, samplings)))
    decoder = Decoder(model, slots, length, end_ids)
    groups: list[list[Answer]] = []
    for prompt, of_prompt, count in zip(prompts, samplings, new, strict=True):
        while decoder.answers and len(of_prompt) > decoder.free:
            decoder.step()
        groups.append(decoder.add(prompt, of_prompt, count))
    while decoder.answers:
        decoder.step()
    return groups
