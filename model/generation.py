"""Batched decoding: many answers are written at once, over one cache of keys and values; they join and leave
between two steps. For serving, and for whoever needs many answers (`generate`); no threads, no text and no
network here.

    decoder = Decoder(model, slots=64, length=2048, end_ids=[2])
    # one prefill, two answers
    answers = decoder.add(prompt, [Sampling(seed=1), Sampling(seed=2)], max_new_tokens=100)
    while decoder.rows:
        for answer in decoder.step():       # every answer that got a token: answer.tokens, answer.finish
            ...

The same prompt and seed give the same answer whatever else is decoded beside it (see sampling.py), except
where two tokens tie to within the rounding of a matrix product, which may depend on the number of rows.

On a GPU the host waits for the device once in `decode`, however many tokens that writes, and once in
`prefill`.

Shape legend: R rows, P prompts, T tokens of a prompt's chunk, G key/value heads, D head size, V vocabulary.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.sampling import Draws, Sampling, TokenLogprob, top_logprobs
from model.steps import MAX_STEPS, Answer, Batch, PromptRow, Steps, on_device

SLOTS = 128  # answers written at once on a CPU
# tokens that `generate` writes between two looks at which answers have ended; on a GPU MAX_STEPS
BURST = {"cpu": 1}


@dataclass
class Move:
    """A row of the cache that is to have another place."""

    row: PromptRow | Answer
    slot: int


def moves_to(rows: Sequence[PromptRow | Answer], first: int) -> list[Move]:
    """Which of the rows have to move so that they have the slots from `first` on, each its own."""
    free = list(range(first, first + len(rows)))
    moving = []
    for row in rows:
        if row.slot in free:
            free.remove(row.slot)
        else:
            moving.append(row)
    return [Move(row, slot) for row, slot in zip(moving, free, strict=True)]


# Which row of the cache belongs to whom: first the answers that are being written, then the prompts that are
# being read, without gaps, so that a step of all answers works on one slice. `_settle` puts them there before
# a forward.
#
#   A0 A1 A2 | P0 P1        three answers, two prompts
#   A0 A2 | P0 P1           A1 has ended: A2 and P1 moved to the gaps
#   A0 A2 A3 A4 | P1        P0 is read: its first answer A3 has its row, A4 a copy of it in the next, P1 moved


class Decoder:
    """Decodes up to `slots` answers at once, each with its prompt of up to `length` tokens.

    model: a `MiniMindForCausalLM`. end_ids: tokens that end an answer. prefill_tokens: how many tokens of
    prompts a step reads at most, so that a long prompt does not hold up the answers that are being written.
    with_logprobs: keep the tokens' log-probabilities.
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
        self.slots, self.length, self.end_ids = slots, length, frozenset(end_ids)
        self.prefill_tokens, self.with_logprobs = prefill_tokens, with_logprobs
        self.steps = Steps(model, slots, length, with_logprobs)
        self.device = self.steps.device
        self.answers: list[Answer] = []  # that are being written
        self.prompts: list[PromptRow] = []  # that are being read, the first ones first
        # of all answers; None: since it was made, some joined, left or failed
        self.batch: Batch | None = None
        self.broken = False  # since moving rows failed, rows and cache do not agree: only `clear` helps

    @property
    def rows(self) -> list[PromptRow | Answer]:
        """What has a row of the cache, or will get one."""
        return [*self.answers, *self.prompts]

    @property
    def free(self) -> int:
        """Answers that can be added now."""
        return self.slots - len(self.answers) - sum(len(row.answers) for row in self.prompts)

    def add(
        self,
        prompt: Sequence[int],
        samplings: Sequence[Sampling],
        max_new_tokens: int,
        top: int | None = None,
    ) -> list[Answer]:
        """Begin one answer for each sampling; the prompt is read once. Raises ValueError if there is no room
        for so many answers, or prompt and answer are longer than the cache.

        top: keep the log-probabilities of the tokens and of so many of the likeliest."""
        if not 1 <= len(samplings) <= self.free:
            raise ValueError(f"{len(samplings)} answers were asked for, and there is room for {self.free}")
        if not prompt or max_new_tokens < 1 or len(prompt) + max_new_tokens > self.length:
            raise ValueError(f"{len(prompt)} + {max_new_tokens} tokens do not fit the cache of {self.length}")
        answers = [Answer(one, max_new_tokens, top=top) for one in samplings]
        self.prompts.append(PromptRow(list(prompt), list(answers)))
        return answers

    def remove(self, answer: Answer) -> None:
        """Stop writing an answer and free its place; nothing happens to one that has left already."""
        if answer in self.answers:
            self.answers.remove(answer)
            self.batch = None
            return
        for row in self.prompts:
            if answer in row.answers:
                row.answers.remove(answer)
        self.prompts = [row for row in self.prompts if row.answers]

    def clear(self) -> None:
        """Remove everything, as after a step that failed."""
        self.answers, self.prompts, self.batch, self.broken = [], [], None, False
        with torch.inference_mode():
            self.steps.cache.tensor.zero_()

    @torch.inference_mode()
    def step(self, count: int = 1) -> list[Answer]:
        """Read a chunk of the prompts that wait, and write a token, or `count`, of every answer that is under
        way.

        Returns the answers that got tokens; those with a `finish` have left.
        """
        return [*self.decode(count=count), *self.prefill()]

    # Each half of a step either succeeds or, if it raises, leaves everything as it was, so it can be tried
    # again with some of the rows; unless the decoder is `broken` then.

    @torch.inference_mode()
    def decode(self, only: Collection[Answer] | None = None, count: int = 1) -> list[Answer]:
        """Write a token of every answer that is under way, or of some of them; or up to `count` tokens (at
        most MAX_STEPS), a forward for each, before it is looked which answers have ended."""
        self._settle()
        answers = [answer for answer in self.answers if only is None or answer in only]
        if not answers:
            return []
        batch = self.batch if only is None else None
        self.batch = None  # until this half has succeeded
        if batch is None:
            batch = self.steps.batch_of(answers)
        left = max(answer.max_new_tokens - len(answer.tokens) for answer in answers)
        count = min(count, left, MAX_STEPS)
        end = max(answer.cached for answer in answers)
        batch.begin(answers, count)
        details = []
        for _ in range(count):
            end = min(end + 1, self.length)
            logits = self.steps.write_tokens(batch, end)[: len(answers)]
            details.append(self._details(answers, logits, batch.tokens[: len(answers), 0]))
        rows = len(answers)  # without padding
        tokens, logprobs = self._read(batch.drawn[:count, :rows], batch.logprobs[:count, :rows])
        if only is None:
            self.batch = batch
        for answer in answers:
            answer.cached += count
        for step in range(count):
            self._append(answers, tokens[step], logprobs[step], details[step])
        return answers

    @torch.inference_mode()
    def prefill(self, only: Collection[Answer] | None = None) -> list[Answer]:
        """One forward over the next tokens of the first prompts, or of those of some answers; answers whose
        prompt is read get their first token."""
        rows: list[PromptRow] = []
        width = 0  # of the padded batch
        for row in self.prompts:
            if only is not None and not any(answer in only for answer in row.answers):
                continue
            wide = max(width, min(len(row.tokens) - row.cached, self.prefill_tokens))
            if rows and wide * (len(rows) + 1) > self.prefill_tokens:
                break
            rows.append(row)
            width = wide
        if not rows:
            return []
        self._settle()
        hidden = self.steps.read_prompts(rows, width)  # [P, T, C]
        done = [row for row in rows if row.cached + width >= len(row.tokens)]
        answers = [answer for row in done for answer in row.answers]
        tokens, logprobs, details = self._first_tokens(hidden, rows, done)
        for row in rows:
            row.cached = min(row.cached + width, len(row.tokens))
        for row in done:
            self.prompts.remove(row)
            self.answers += row.answers
            for answer in row.answers:  # they share its row until `_settle` copies it
                answer.slot, answer.cached = row.slot, row.cached
            self.batch = None
        self._append(answers, tokens, logprobs, details)
        return answers

    def _settle(self) -> None:
        """Give every answer and prompt a row of its own, answers first, and move there what is cached of
        it."""
        moves = moves_to(self.answers, 0) + moves_to(self.prompts, len(self.answers))
        if not moves:
            return
        copied = [move for move in moves if move.row.cached]
        if copied:
            self.broken = True
            self.steps.cache.move(
                [move.row.slot for move in copied],
                [move.slot for move in copied],
                max(move.row.cached for move in copied),
            )
            self.broken = False
        for move in moves:
            move.row.slot = move.slot
        self.answers.sort(key=lambda answer: answer.slot)
        self.batch = None

    def _first_tokens(
        self, hidden: Tensor, rows: list[PromptRow], done: list[PromptRow]
    ) -> tuple[list[int], list[float], list[TokenLogprob | None]]:
        """What the answers to the prompts that have been read begin with; hidden [P, T, C] of all rows."""
        if not done:
            return [], [], []
        last, prompt_of = [], []  # tokens of the batch; of each answer, which of these is its prompt's
        for row in done:
            prompt_of += [len(last)] * len(row.answers)
            last.append(rows.index(row) * hidden.shape[1] + len(row.tokens) - row.cached - 1)
        logits = self.steps.logits(hidden.flatten(0, 1).index_select(0, on_device(last, self.device)))
        logits = logits.index_select(0, on_device(prompt_of, self.device))  # [R, V]
        answers = [answer for row in done for answer in row.answers]
        draws = Draws([answer.sampling for answer in answers], logits.shape[1], self.device)
        (uniform,) = draws.numbers([0] * len(answers), 1)
        drawn, drawn_logprobs = draws.draw(logits, uniform, self.with_logprobs)
        details = self._details(answers, logits, drawn)
        if drawn_logprobs is None:
            drawn_logprobs = torch.zeros_like(drawn)
        (tokens,), (logprobs,) = self._read(drawn[None], drawn_logprobs[None])
        return tokens, logprobs, details

    def _details(self, answers: list[Answer], logits: Tensor, tokens: Tensor) -> list[TokenLogprob | None]:
        """What to keep of the likeliest tokens besides those that were drawn from logits [R, V]. Sync point
        if anything is."""
        details: list[TokenLogprob | None] = [None] * len(answers)
        wanted = [answer.top for answer in answers if answer.top is not None]
        if wanted:
            likeliest = top_logprobs(logits, tokens, max(wanted))
            for i, answer in enumerate(answers):
                if answer.top is not None:
                    details[i] = likeliest[i]._replace(top=likeliest[i].top[: answer.top])
        return details

    def _read(self, tokens: Tensor, logprobs: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens [steps, R] on the host, and their log-probabilities, of which nothing is known if they are
        not kept. Sync point."""
        if not self.with_logprobs:
            return tokens.tolist(), [[math.nan] * tokens.shape[1]] * len(tokens)
        return tokens.tolist(), logprobs.tolist()

    def _append(
        self,
        answers: list[Answer],
        tokens: list[int],
        logprobs: list[float],
        details: list[TokenLogprob | None],
    ) -> None:
        """Give each answer that has not ended its next token, and let those leave that end with it."""
        for i, answer in enumerate(answers):
            if answer.finish:
                continue
            answer.tokens.append(tokens[i])
            detail = details[i]
            if detail is not None:
                answer.details.append(detail)
            if self.with_logprobs:
                answer.logprobs.append(logprobs[i])
            if tokens[i] in self.end_ids:
                answer.finish = "stop"
            elif len(answer.tokens) == answer.max_new_tokens:
                answer.finish = "length"
            if answer.finish:
                self.remove(answer)


def fitting_slots(model: Any, length: int) -> int:
    """How many answers of `length` tokens fit in half of the free memory of a GPU; SLOTS on a CPU."""
    weight, config = model.lm_head.weight, model.config
    if weight.device.type != "cuda":
        return SLOTS
    of_token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * weight.element_size()
    )
    of_logits = 16 * config.vocab_size  # logits, scaled logits, probabilities and one more, in float32
    idle = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
    free = torch.cuda.mem_get_info(weight.device)[0] + idle
    return max(1, free // 2 // (of_token * length + of_logits))


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sequence[Sampling]],
    max_new_tokens: int | Sequence[int],
    end_ids: Collection[int],
    slots: int = 0,
    with_logprobs: bool = False,
) -> list[list[Answer]]:
    """Answers to all prompts (lists of token ids), for each prompt one per sampling; `slots` of them at a
    time (0: as many as half of a GPU's free memory holds, and SLOTS on a CPU, but at least those of one
    prompt). Raises ValueError if a prompt is empty, or has more answers than there are slots.

    max_new_tokens: of every answer, or of those of each prompt."""
    new = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    length = max((len(prompt) + count for prompt, count in zip(prompts, new, strict=True)), default=0)
    slots = min(slots or max(fitting_slots(model, length), *map(len, samplings), 1), sum(map(len, samplings)))
    decoder = Decoder(model, slots, length, end_ids, prefill_tokens=1024, with_logprobs=with_logprobs)
    burst = BURST.get(decoder.device.type, MAX_STEPS)
    groups: list[list[Answer]] = []
    while len(groups) < len(prompts) or decoder.rows:
        for number in range(len(groups), len(prompts)):
            if decoder.rows and len(samplings[number]) > decoder.free:
                break
            groups.append(decoder.add(prompts[number], samplings[number], new[number]))
        decoder.step(burst)
    return groups
