"""Batched decoding: many answers are written at once, over one cache of keys and values; they join and leave between
two steps. For serving, and for whoever needs many answers (`generate`); no threads, no text and no network here.

    decoder = Decoder(model, slots=64, length=2048, end_ids=[2])
    answers = decoder.add(prompt, [Sampling(seed=1), Sampling(seed=2)], max_new_tokens=100)   one prefill, two answers
    while decoder.rows:
        for answer in decoder.step():       # every answer that got a token: answer.tokens, answer.finish
            ...

The same prompt and seed give the same answer whatever else is decoded beside it (see sampling.py), except where two
tokens tie to within the rounding of a matrix product, which may depend on the number of rows.

Shape legend: R rows, P prompts, T tokens of a prompt's chunk, G key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.sampling import Sampling, TokenLogprob, draw_tokens, token_logprobs, top_logprobs


@dataclass(eq=False)
class Answer:
    """One answer that is being written. finish: None while it is; "stop" after an end token (which is the last of its
    tokens), "length" if it has all tokens that it may have."""

    sampling: Sampling
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of these tokens under softmax(logits / temperature)
    top: int | None = None  # how many of the likeliest tokens `details` names beside each; None: it stays empty
    details: list[TokenLogprob] = field(default_factory=list)  # of these tokens
    finish: str | None = None
    slot: int = -1  # row of the cache; -1: the prompt is not read yet, or the answer has left
    cached: int = 0  # tokens whose keys and values are in the cache


@dataclass(eq=False)
class PromptRow:
    """A prompt that is being read, for one or several answers."""

    tokens: list[int]
    answers: list[Answer]
    slot: int = -1
    cached: int = 0


class KeyValueCache:
    """Keys and values of `slots` rows of `length` tokens, allocated once. It takes the place of a transformers cache in
    the model's attention: before a forward `rows` and `positions` say where its tokens belong, `end` what they see."""

    def __init__(self, model: Any, slots: int, length: int):
        config, weight = model.config, model.lm_head.weight
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, length, config.head_dim)
        # zeros, not empty: a masked value that is not a number would still spoil the sum
        self.keys, self.values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.rows: slice | Tensor = slice(0)
        self.index: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))  # rows and positions to write, [R, T]
        self.end = 0

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store k, v [R, G, T, D] of a layer; returns the keys and values that its rows attend to, [R, G, end, D]."""
        rows, positions = self.index
        keys, values = self.keys[layer], self.values[layer]
        keys[rows, :, positions], values[rows, :, positions] = k.transpose(1, 2), v.transpose(1, 2)
        return keys[self.rows, :, : self.end], values[self.rows, :, : self.end]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of a row."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def swap(self, one: int, other: int, length: int) -> None:
        """Swap the first tokens of two rows."""
        for cache in (self.keys, self.values):
            cache[:, [one, other], :, :length] = cache[:, [other, one], :, :length]

    def clear(self) -> None:
        """Forget everything."""
        self.keys.zero_()
        self.values.zero_()


# Which row of the cache belongs to whom. `Decoder.rows[i]` has row i: first the answers that are being written, `ready`
# of them, then the prompts that are being read, without gaps, so that a step of all answers works on one slice.
#
#   A0 A1 A2 | P0 P1        ready 3
#   A0 A2 | P1 P0           A1 has ended: it swapped places with the last answer, then with the last row, and left
#   A0 A2 A3 | P0 A4        P1 is read: its first answer A3 takes its row, A4 one at the end with a copy of its cache
#   A0 A2 A3 A4 | P0        A4 swapped places with the first prompt: ready 4


class Decoder:
    """Decodes up to `slots` answers at once, each with its prompt of up to `length` tokens.

    model: a `MiniMindForCausalLM`. end_ids: tokens that end an answer. prefill_tokens: how many tokens of prompts a
    step reads at most, so that a long prompt does not hold up the answers that are being written. with_logprobs: keep
    the tokens' log-probabilities.
    """

    def __init__(
        self,
        model: Any,
        slots: int,
        length: int,
        end_ids: Collection[int],
        prefill_tokens: int = 256,
        with_logprobs: bool = False,
    ):
        self.model, self.slots, self.length, self.end_ids = model, slots, length, frozenset(end_ids)
        self.prefill_tokens, self.with_logprobs = prefill_tokens, with_logprobs
        self.device = model.lm_head.weight.device
        with torch.inference_mode():
            self.cache = KeyValueCache(model, slots, length)
        self.rows: list[PromptRow | Answer] = []  # by slot: first the answers that are being written, then prompts
        self.ready = 0  # how many answers are being written
        self.broken = False  # since moving a row failed, rows and cache do not agree: only `clear` helps

    @property
    def free(self) -> int:
        """Answers that can be added now."""
        waiting = sum(len(row.answers) - 1 for row in self.rows if isinstance(row, PromptRow))
        return self.slots - len(self.rows) - waiting

    def add(
        self, prompt: Sequence[int], samplings: Sequence[Sampling], max_new_tokens: int, top: int | None = None
    ) -> list[Answer]:
        """Begin one answer for each sampling; the prompt is read once.

        top: keep the log-probabilities of the tokens and of so many of the likeliest.

        Raises:
            ValueError: there is no room for so many answers, or prompt and answer are longer than the cache.
        """
        if not 1 <= len(samplings) <= self.free:
            raise ValueError(f"{len(samplings)} answers were asked for, and there is room for {self.free}")
        if not prompt or max_new_tokens < 1 or len(prompt) + max_new_tokens > self.length:
            raise ValueError(f"{len(prompt)} + {max_new_tokens} tokens do not fit the cache of {self.length}")
        answers = [Answer(one, max_new_tokens, top=top) for one in samplings]
        self.rows.append(PromptRow(list(prompt), list(answers), slot=len(self.rows)))
        return answers

    def remove(self, answer: Answer) -> None:
        """Stop writing an answer and free its place; nothing happens to one that has left already."""
        if answer.slot >= 0:
            self._free(answer)
            return
        for row in self.rows:
            if isinstance(row, PromptRow) and answer in row.answers:
                row.answers.remove(answer)
                if not row.answers:
                    self._free(row)
                return

    def clear(self) -> None:
        """Remove everything, as after a step that failed."""
        for row in self.rows:
            row.slot = -1
        self.rows, self.ready, self.broken = [], 0, False
        with torch.inference_mode():
            self.cache.clear()

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """Read a chunk of the prompts that wait, and write one token of every answer that is under way.

        Returns the answers that got a token; those with a `finish` have left. Sync point on a GPU: the tokens are read.
        """
        return [*self.decode(), *self.prefill()]

    # Each half of a step either succeeds or, if it raises, leaves everything as it was, so it can be tried again with
    # some of the rows; unless the decoder is `broken` then.

    @torch.inference_mode()
    def decode(self, only: Collection[Answer] | None = None) -> list[Answer]:
        """Write one token of every answer that is under way, or of some of them; one forward over their last tokens."""
        answers = [row for row in self.rows[: self.ready] if isinstance(row, Answer) and (only is None or row in only)]
        if not answers:
            return []
        at = [answer.cached for answer in answers]
        positions = torch.tensor(at, device=self.device)[:, None]  # [R, 1]
        tokens = torch.tensor([answer.tokens[-1:] for answer in answers], device=self.device)
        slots = torch.tensor([answer.slot for answer in answers], device=self.device)
        rows = slice(self.ready) if len(answers) == self.ready else slots
        hidden = self._hidden(tokens, positions, slots, rows, max(at) + 1)
        drawn = self._draw(answers, self.model.lm_head(hidden[:, 0]).float())
        for answer in answers:
            answer.cached += 1
        return self._write(answers, drawn)

    @torch.inference_mode()
    def prefill(self, only: Collection[Answer] | None = None) -> list[Answer]:
        """One forward over the next tokens of the first prompts, or of those of some answers; answers whose prompt is
        read get their first token."""
        chosen: list[PromptRow] = []
        width = 0  # of the padded batch
        for row in self.rows[self.ready :]:
            assert isinstance(row, PromptRow)
            if only is not None and not any(answer in only for answer in row.answers):
                continue
            wide = max(width, min(len(row.tokens) - row.cached, self.prefill_tokens))
            if chosen and wide * (len(chosen) + 1) > self.prefill_tokens:
                break
            chosen.append(row)
            width = wide
        if not chosen:
            return []
        chunks = [row.tokens[row.cached : row.cached + width] for row in chosen]
        tokens = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks], device=self.device)  # [P, T]
        slots = torch.tensor([row.slot for row in chosen], device=self.device)
        begin = torch.tensor([row.cached for row in chosen], device=self.device)
        # padding goes behind the chunk, where it is overwritten before it is seen, or to the last place
        positions = (begin[:, None] + torch.arange(width, device=self.device)).clamp(max=self.length - 1)
        end = min(self.length, max(row.cached for row in chosen) + width)
        hidden = self._hidden(tokens, positions, slots, slots, end)
        read = [i for i, row in enumerate(chosen) if row.cached + len(chunks[i]) == len(row.tokens)]
        answers = [answer for i in read for answer in chosen[i].answers]
        of_prompt = [i for i in read for _ in chosen[i].answers]
        last = torch.tensor([len(chunks[i]) - 1 for i in of_prompt], dtype=torch.int64, device=self.device)
        drawn = self._draw(answers, self.model.lm_head(hidden[of_prompt, last]).float()) if answers else []
        for row, chunk in zip(chosen, chunks, strict=True):
            row.cached += len(chunk)
        for i in read:
            self._begin(chosen[i])
        return self._write(answers, drawn)

    def _begin(self, prompt: PromptRow) -> None:
        """Let the answers of a prompt take its place, and further places with a copy of its keys and values."""
        first, source = prompt.answers[0], prompt.slot
        self.rows[source], first.slot, first.cached = first, source, prompt.cached
        for answer in prompt.answers[1:]:
            answer.slot, answer.cached = len(self.rows), prompt.cached
            self.rows.append(answer)
            self._move(self.cache.copy, source, answer.slot, prompt.cached)
        for answer in prompt.answers:
            self._swap(answer.slot, self.ready)
            self.ready += 1

    def _hidden(self, tokens: Tensor, positions: Tensor, slots: Tensor, rows: slice | Tensor, end: int) -> Tensor:
        """Hidden states [R, T, C] of tokens [R, T] in the rows of the cache."""
        cache = self.cache
        cache.rows, cache.index, cache.end = rows, (slots[:, None], positions), end
        inner = self.model.model
        return inner(inner.embed_tokens(tokens), positions, inner.visible(positions, end)[:, None], cache)[0]

    def _draw(self, answers: list[Answer], logits: Tensor) -> list[tuple[int, float, list[TokenLogprob]]]:
        """The next token of each answer from logits [R, V], its log-probability, and its `details`."""
        samplings = [answer.sampling for answer in answers]
        chosen = draw_tokens(logits, samplings, [len(answer.tokens) for answer in answers])
        tokens = chosen.tolist()
        with_logprobs = self.with_logprobs
        logprobs = token_logprobs(logits, chosen, samplings).tolist() if with_logprobs else [0.0] * len(tokens)
        details: list[list[TokenLogprob]] = [[] for _ in answers]
        asked = [i for i, answer in enumerate(answers) if answer.top is not None]
        if asked:
            entries = top_logprobs(logits[asked], [tokens[i] for i in asked], max(answers[i].top or 0 for i in asked))
            for i, one in zip(asked, entries, strict=True):
                details[i] = [one._replace(top=one.top[: answers[i].top])]
        return list(zip(tokens, logprobs, details, strict=True))

    def _write(self, answers: list[Answer], drawn: list[tuple[int, float, list[TokenLogprob]]]) -> list[Answer]:
        """Give each answer its next token, and let those leave that are finished."""
        for answer, (token, logprob, details) in zip(answers, drawn, strict=True):
            answer.tokens.append(token)
            answer.details += details
            if self.with_logprobs:
                answer.logprobs.append(logprob)
            if token in self.end_ids:
                answer.finish = "stop"
            elif len(answer.tokens) == answer.max_new_tokens:
                answer.finish = "length"
            if answer.finish:
                self.remove(answer)
        return answers

    def _swap(self, one: int, other: int) -> None:
        if one == other:
            return
        rows = self.rows
        self._move(self.cache.swap, one, other, max(rows[one].cached, rows[other].cached))
        rows[one], rows[other] = rows[other], rows[one]
        rows[one].slot, rows[other].slot = one, other

    def _move(self, move: Callable[..., None], *args: int) -> None:
        self.broken = True
        move(*args)
        self.broken = False

    @torch.inference_mode()
    def _free(self, row: PromptRow | Answer) -> None:
        """Take a row out; the last ones of each kind fill the gaps, so that the rows stay without any."""
        row.cached = 0  # nothing of it has to be moved
        if row.slot < self.ready:
            self._swap(row.slot, self.ready - 1)
            self.ready -= 1
        self._swap(row.slot, len(self.rows) - 1)
        self.rows.pop()
        row.slot = -1


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sequence[Sampling]],
    max_new_tokens: int | Sequence[int],
    end_ids: Collection[int],
    slots: int = 64,
    with_logprobs: bool = False,
) -> list[list[Answer]]:
    """Answers to all prompts (lists of token ids), for each prompt one per sampling; `slots` of them at a time.

    max_new_tokens: of every answer, or of those of each prompt.

    Raises:
        ValueError: a prompt is empty, or has more answers than there are slots.
    """
    new = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    length = max((len(prompt) + count for prompt, count in zip(prompts, new, strict=True)), default=0)
    decoder = Decoder(model, slots, length, end_ids, prefill_tokens=1024, with_logprobs=with_logprobs)
    groups: list[list[Answer]] = []
    while len(groups) < len(prompts) or decoder.rows:
        while len(groups) < len(prompts) and (not decoder.rows or len(samplings[len(groups)]) <= decoder.free):
            groups.append(decoder.add(prompts[len(groups)], samplings[len(groups)], new[len(groups)]))
        decoder.step()
    return groups
