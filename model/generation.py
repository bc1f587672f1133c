"""Batched decoding: many answers are generated at once, over one cache of keys and values. Answers join and
leave between two steps. It serves the chat, the server, evaluation and rollouts; this file has no threads, no
text and no network.

    decoder = Decoder(model, slots=64, length=2048, end_ids=[2])
    answers = decoder.add(prompt, [Sampling(seed=1), Sampling(seed=2)], max_new_tokens=100)
    while decoder.answers:
        decoder.step()  # a token of each: answer.tokens, answer.finish

The same prompt and seed give the same answer, whatever else is decoded beside it (see sampling.py). The only
exception are two tokens that tie up to the rounding of a matrix product, which may depend on the number of
rows.

Shape legend: R rows, T tokens, G key/value heads, D head size, V vocabulary.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from common.errors import UserError
from model.sampling import Sampling, draw, forbid, penalise

SLOTS = 128  # answers that `generate` writes at once
READ_AT_ONCE = 512  # tokens of a prompt on a CPU: the mask and the activations of more take much memory


class Form(NamedTuple):
    """How a kind of device decodes.

    read_at_once: how many tokens of a prompt are read in one piece. batch_tokens: limit of the tokens of
    prompts that are read together, padded to the longest one; 0: each prompt is read by itself. key_multiple:
    attention covers a multiple of this many keys, so that shapes repeat.
    """

    read_at_once: int
    batch_tokens: int
    key_multiple: int


# Longer pieces take much memory on a GPU as well: without FlashAttention, torch computes all scores at once.
CPU, GPU = Form(READ_AT_ONCE, 0, 1), Form(1024, 16_384, 128)


class NotFinite(UserError):
    """A model's outputs are not finite numbers. With such logits the first token of the vocabulary would be
    drawn again and again. It is a special token, so nothing would be shown."""

    def __init__(self) -> None:
        super().__init__(
            "the model's outputs are not finite numbers: its training diverged, or the file is damaged"
        )


@dataclass(eq=False)
class Answer:
    """One answer. finish: None while it is generated; "stop" after an end token (the last of its tokens);
    "length" if it has reached its maximum number of tokens."""

    sampling: Sampling
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    # log-probabilities of these tokens under softmax(logits / temperature), with penalties, among the allowed
    # tokens
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    cached: int = 0  # tokens whose keys and values are in the cache
    prompt: Sequence[int] = ()


class KeyValueCache:
    """Keys and values of `slots` rows of `length` tokens, allocated once. It takes the place of a
    transformers cache in the model's attention. Call `seek` before each forward pass to say where its tokens
    belong."""

    def __init__(self, model: Any, slots: int, length: int):
        config, weight = model.config, model.lm_head.weight
        shape = (config.num_hidden_layers, 2, slots, config.num_key_value_heads, length, config.head_dim)
        # zeros, not empty: a masked value that is NaN would still make the sum NaN
        self.tensor = torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def seek(self, rows: slice, positions: Tensor, end: int) -> None:
        """The next tokens are at `positions` [R or 1, T] of these rows; they see the keys before `end`."""
        self.rows = rows
        self.numbers = torch.arange(rows.start, rows.stop, device=positions.device)[:, None]
        self.positions, self.end = positions, end

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store k, v [R, G, T, D] of a layer; returns all keys and values of its rows, [R, G, end, D]."""
        keys, values = self.tensor[layer]
        keys[self.numbers, :, self.positions] = k.transpose(1, 2)
        values[self.numbers, :, self.positions] = v.transpose(1, 2)
        return keys[self.rows, :, : self.end], values[self.rows, :, : self.end]

    def copy(self, source: int, targets: slice, length: int) -> None:
        """Copy the first tokens of a row into other rows."""
        tokens = self.tensor[..., :length, :]
        tokens[:, :, targets] = tokens[:, :, source : source + 1]


class Decoder:
    """Generates up to `slots` answers at once. Each has up to `length` tokens, including its prompt.

    model: a `MiniMindForCausalLM`, in evaluation mode. It computes in the dtype of its head, which is also
    that of the cache, whatever autocast the caller is in: an objective may decode in its loss. end_ids:
    tokens that end an answer. A call that raises leaves the answers unchanged. Raises NotFinite if the
    model's outputs are not finite numbers."""

    def __init__(self, model: Any, slots: int, length: int, end_ids: Collection[int]):
        self.model, self.slots, self.length, self.end_ids = model, slots, length, frozenset(end_ids)
        self.device = model.lm_head.weight.device
        self.form = CPU if self.device.type == "cpu" else GPU
        with torch.inference_mode():
            self.cache = KeyValueCache(model, slots, self._in_multiples(length))
        self.answers: list[Answer] = []  # answer i has row i of the cache

    @property
    def free(self) -> int:
        """Answers that can be added now."""
        return self.slots - len(self.answers)

    def add(self, prompt: Sequence[int], samplings: Sequence[Sampling], max_new_tokens: int) -> list[Answer]:
        """Begin an answer for each sampling: the prompt is read once, and the first token of each answer is
        drawn. Raises ValueError if there is no room for so many answers, or if prompt and answer are longer
        than the cache."""
        return self.add_together([prompt], [samplings], [max_new_tokens])[0]

    @torch.inference_mode()
    def add_together(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[Sequence[Sampling]],
        max_new_tokens: Sequence[int],
    ) -> list[list[Answer]]:
        """`add` for several prompts, which are read together."""
        groups: list[list[Answer]] = []
        for prompt, of_prompt, new in zip(prompts, samplings, max_new_tokens, strict=True):
            if not prompt or new < 1 or len(prompt) + new > self.length:
                raise ValueError(f"{len(prompt)} + {new} tokens do not fit the cache of {self.length}")
            groups.append([Answer(each, new, cached=len(prompt), prompt=prompt) for each in of_prompt])
        answers = [answer for group in groups for answer in group]
        if not all(groups) or len(answers) > self.free:
            raise ValueError(f"{len(answers)} answers were asked for, and there is room for {self.free}")
        first = len(self.answers)
        with self._precision():
            logits = self.model.lm_head(self._read(first, prompts)).float()
        repeated = [row.expand(len(group), -1) for row, group in zip(logits, groups, strict=True)]
        drawn = self._draw(answers, torch.cat(repeated))
        end = first + len(answers)
        for i in reversed(range(len(groups))):  # the rows of a prompt begin at its own row or after it
            begin = end - len(groups[i])
            self.cache.copy(first + i, slice(max(begin, first + i + 1), end), len(prompts[i]))
            end = begin
        self.answers += answers
        self._append(answers, *drawn)
        return groups

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """Generate one token of every answer. Returns all these answers; those with a `finish` have left the
        decoder."""
        answers = list(self.answers)
        tokens = torch.tensor([[answer.tokens[-1]] for answer in answers])
        positions = torch.tensor([[answer.cached] for answer in answers])
        with self._precision():
            logits = self.model.lm_head(self._hidden(0, tokens, positions)[:, 0]).float()
        drawn = self._draw(answers, logits)
        for answer in answers:
            answer.cached += 1
        self._append(answers, *drawn)
        return answers

    @torch.inference_mode()
    def remove(self, answer: Answer) -> None:
        """Stop an answer; the last answer moves to its row. Does nothing if the answer has already left."""
        if answer not in self.answers:
            return
        row, last = self.answers.index(answer), self.answers[-1]
        if last is not answer:
            self.cache.copy(len(self.answers) - 1, slice(row, row + 1), last.cached)
            self.answers[row] = last
        self.answers.pop()

    def _precision(self) -> torch.autocast:
        """Matrix products in the dtype of the cache. Nothing else fits it, and in float32 autocast would keep
        casts of the weights that no gradient passes."""
        dtype = self.cache.tensor.dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def _in_multiples(self, keys: int) -> int:
        """The number of keys that attention covers if there are `keys` of them."""
        return -(-keys // self.form.key_multiple) * self.form.key_multiple

    def _read(self, row: int, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states [P, C] of the last tokens of P prompts, which are cached in the rows from `row`
        on."""
        longest = max(map(len, prompts))
        tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
        positions, width = torch.arange(longest)[None], self.form.read_at_once
        pieces = zip(tokens.split(width, 1), positions.split(width, 1), strict=True)
        hidden = torch.cat([self._hidden(row, *piece) for piece in pieces], dim=1)
        return torch.stack(
            [of_prompt[len(prompt) - 1] for of_prompt, prompt in zip(hidden, prompts, strict=True)]
        )

    def _hidden(self, row: int, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [R, T, C] of tokens [R, T] at positions [R or 1, T] in the rows from `row` on, which
        are cached."""
        from model.layout import padded_layout

        end, inner = int(positions.max()) + 1, self.model.model
        tokens = tokens.to(self.device, non_blocking=True)
        positions = positions.to(self.device, non_blocking=True)
        layout = None  # at the beginning of prompts
        if end > tokens.shape[1]:
            end = self._in_multiples(end)
            keys = torch.arange(end, device=self.device)
            layout = padded_layout(positions, keys[None])
            if self.device.type != "cpu":  # once, not in the attention of each layer
                added = torch.where(cast(Tensor, layout.causal_mask), 0.0, -torch.inf)
                layout = layout._replace(causal_mask=added.to(self.cache.tensor.dtype))
        self.cache.seek(slice(row, row + len(tokens)), positions, end)
        embeds = inner.embed_tokens(tokens).float()  # as in training, where the weights are float32
        return inner(embeds, positions, layout, self.cache)[0]

    def _draw(self, answers: list[Answer], logits: Tensor) -> tuple[list[int], list[float]]:
        """The next token of each answer from logits [R, V], and its log-probability. This is the only sync
        point."""
        for row, answer in enumerate(answers):
            if answer.sampling.has_penalty:
                penalise(logits[row], answer.prompt, answer.tokens, answer.sampling)
            if answer.sampling.allowed is not None:
                forbid(logits[row], answer.sampling.allowed(answer.tokens))
        numbers = [len(answer.tokens) for answer in answers]
        tokens, logprobs = draw(logits, [answer.sampling for answer in answers], numbers)
        # one read for both; float32 holds whole numbers up to 2**24
        drawn, of_drawn = torch.stack((tokens.float(), logprobs)).tolist()
        if not all(map(math.isfinite, of_drawn)):
            raise NotFinite
        return [int(token) for token in drawn], of_drawn

    def _append(self, answers: list[Answer], tokens: list[int], logprobs: list[float]) -> None:
        """Append the next token to each answer, and remove answers that end with it."""
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
    """Answers to all prompts (lists of token ids), with one answer per sampling for each prompt. It generates
    `slots` answers at a time, or more if a single prompt needs more. Raises ValueError if a prompt is empty.

    max_new_tokens: one number for all answers, or one for each prompt."""
    new = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    length = max((len(prompt) + count for prompt, count in zip(prompts, new, strict=True)), default=0)
    slots = min(max(slots, *map(len, samplings), 1), sum(map(len, samplings)))
    decoder = Decoder(model, slots, length, end_ids)
    groups: list[list[Answer]] = []
    while len(groups) < len(prompts) or decoder.answers:
        first = len(groups)
        last = end_of_next(decoder, prompts, samplings, first)
        if last > first:
            groups += decoder.add_together(prompts[first:last], samplings[first:last], new[first:last])
        else:
            decoder.step()
    return groups


def end_of_next(
    decoder: Decoder, prompts: Sequence[Sequence[int]], samplings: Sequence[Sequence[Sampling]], first: int
) -> int:
    """The end of the prompts to read now, beginning with `first`. Usually this is one prompt, if there is
    room for its answers. If the device reads prompts together, it is all prompts that fit, as soon as a
    quarter of the slots is free."""
    room, answers, longest = decoder.form.batch_tokens, 0, 0
    if room and decoder.answers and decoder.free < decoder.slots // 4:
        return first
    for number in range(first, len(prompts)):
        answers, longest = answers + len(samplings[number]), max(longest, len(prompts[number]))
        too_many_tokens = number > first and (number + 1 - first) * longest > room
        if answers > decoder.free or too_many_tokens:
            return number
    return len(prompts)
