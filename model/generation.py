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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.graphs import MAX_RECORDINGS, Graphs, length_class, rows_class
from model.sampling import Draws, Sampling, TokenLogprob, top_logprobs

SLOTS = 128  # answers written at once on a CPU
STEPS = 8  # at most between two looks of the host at what was drawn
# tokens of rollouts between two looks at which answers have ended; 8 where looking is waiting
BURST = {"cpu": 1}


@dataclass(eq=False)
class Answer:
    """One answer that is being written. finish: None while it is; "stop" after an end token (which is the
    last of its tokens), "length" if it has all tokens that it may have."""

    sampling: Sampling
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of these tokens under softmax(logits / temperature)
    # how many of the likeliest tokens `details` names beside each; None: it stays empty
    top: int | None = None
    details: list[TokenLogprob] = field(default_factory=list)  # of these tokens
    finish: str | None = None
    slot: int = -1  # row of the cache that has its keys and values; -1: none has
    cached: int = 0  # tokens whose keys and values are there


@dataclass(eq=False)
class PromptRow:
    """A prompt that is being read, for one or several answers."""

    tokens: list[int]
    answers: list[Answer]
    slot: int = -1
    cached: int = 0


class KeyValueCache:
    """Keys and values of `slots` rows of `length` tokens, allocated once. It takes the place of a
    transformers cache in the model's attention: before a forward `rows`, `slots` and `positions` say where
    its tokens belong, `end` what they see."""

    def __init__(self, model: Any, slots: int, length: int):
        config, weight = model.config, model.lm_head.weight
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        self.length = length + -length % 8  # kernels of GPUs want masks of such rows
        # zeros, not empty: a masked value that is not a number would still spoil the sum
        self.tensor = torch.zeros(
            layers, 2, slots, heads, self.length, config.head_dim, dtype=weight.dtype, device=weight.device
        )
        self.rows: slice | Tensor = slice(0)  # that attend
        self.slots = torch.empty(0)  # where tokens are written, [R, 1]
        self.positions = torch.empty(0)  # in these rows, [R, T]
        self.end = 0

    def update(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store k, v [R, G, T, D] of a layer; returns the keys and values that its rows attend to, [R, G,
        end, D]."""
        keys, values = self.tensor[layer]
        keys[self.slots, :, self.positions] = k.transpose(1, 2)
        values[self.slots, :, self.positions] = v.transpose(1, 2)
        return keys[self.rows, :, : self.end], values[self.rows, :, : self.end]

    def write(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        """`update` with keys and values [R, 2, G, D] of one token of each row, by one kernel."""
        both = self.tensor[layer]
        both[:, self.slots[:, 0], :, self.positions[:, 0]] = kv
        return both[0, self.rows, :, : self.end], both[1, self.rows, :, : self.end]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Put copies of the first tokens of some rows in the place of others."""
        device = self.tensor.device
        tokens = self.tensor[..., :length, :]
        tokens.index_copy_(2, on_device(targets, device), tokens.index_select(2, on_device(sources, device)))


def on_device(values: list[int], device: torch.device) -> Tensor:
    """Numbers as a tensor, without waiting for the device."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


class Batch:
    """Answers that get their next tokens together, as a step needs them on the device; and what the steps
    between two looks of the host draw. A step works on these tensors in place, and they stay where they are.

    size: R, with rows that pad it, which write to the row `spare` of the cache."""

    def __init__(self, answers: list[Answer], size: int, spare: int, vocabulary: int, device: torch.device):
        padding = size - len(answers)
        slots = [answer.slot for answer in answers]
        self.rows: slice | Tensor = slice(size)  # of the cache
        if slots != list(range(len(answers))):
            self.rows = on_device(slots, device)
        tokens = [answer.tokens[-1] for answer in answers]
        positions = [answer.cached for answer in answers]
        samplings = [answer.sampling for answer in answers]
        self.slots = on_device(slots + [spare] * padding, device)[:, None]  # [R, 1]
        self.tokens = on_device(tokens + [0] * padding, device)[:, None]  # [R, 1]
        self.positions = on_device(positions + [0] * padding, device)[:, None]  # of these tokens
        self.draws = Draws(samplings + samplings[:1] * padding, vocabulary, device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)  # of steps since the last look
        self.uniform = self.draws.numbers([0] * size, STEPS)  # [STEPS, R, 1]
        self.drawn = torch.zeros(STEPS, size, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(STEPS, size, device=device)

    def replace(self, other: "Batch") -> None:
        """Take the answers of another of the same size and layout."""
        self.slots.copy_(other.slots)
        self.tokens.copy_(other.tokens)
        self.positions.copy_(other.positions)
        self.draws.replace(other.draws)

    def begin(self, answers: list[Answer], count: int) -> None:
        """Get ready for so many steps."""
        padding = len(self.tokens) - len(answers)
        uniform = self.draws.numbers([len(answer.tokens) for answer in answers] + [0] * padding, count)
        self.uniform[:count].copy_(uniform, non_blocking=True)
        self.number.zero_()

    def draw(self, logits: Tensor, with_logprobs: bool, last_position: int) -> None:
        """Draw the tokens of a step from logits [R, V]; they are those of the next one."""
        uniform = self.uniform.index_select(0, self.number)[0]
        tokens, logprobs = self.draws.draw(logits, uniform, with_logprobs)
        self.tokens.copy_(tokens[:, None])
        self.drawn.index_copy_(0, self.number, tokens[None])
        if logprobs is not None:
            self.logprobs.index_copy_(0, self.number, logprobs[None])
        self.positions.add_(1).clamp_(max=last_position)  # an answer that has ended stays in its row
        self.number.add_(1)


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
        from model.decoding import OneToken, can_record, can_step  # brings in the compiler

        self.model, self.slots, self.length, self.end_ids = model, slots, length, frozenset(end_ids)
        self.prefill_tokens, self.with_logprobs = prefill_tokens, with_logprobs
        self.device = model.lm_head.weight.device
        # fast forms of a step, where there are any
        self.one_token = OneToken(model.model, length) if can_step(model.model) else None
        self.graphs = Graphs() if can_record(model.model) else None
        self.batches: dict[Any, Batch] = {}  # of the steps that are recorded
        with torch.inference_mode():
            # a row more, which pads batches
            self.cache = KeyValueCache(model, slots + int(self.graphs is not None), length)
            # what is added to the scores of keys that are seen, and of those that are not
            self.mask_values = self.cache.tensor.new_zeros(()), self.cache.tensor.new_full((), -torch.inf)
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
            self.cache.tensor.zero_()

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
        most STEPS), a forward for each, before it is looked which answers have ended."""
        self._settle()
        answers = [answer for answer in self.answers if only is None or answer in only]
        if not answers:
            return []
        batch = self.batch if only is None else None
        self.batch = None  # until this half has succeeded
        if batch is None:
            batch = self._batch(answers)
        left = max(answer.max_new_tokens - len(answer.tokens) for answer in answers)
        count = min(count, left, STEPS)
        end = max(answer.cached for answer in answers)
        batch.begin(answers, count)
        details = []
        for _ in range(count):
            end = min(end + 1, self.length)
            logits = self._write_tokens(batch, end)[: len(answers)]
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
        hidden = self._read_prompts(rows, width)  # [P, T, C]
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
            self.cache.move(
                [move.row.slot for move in copied],
                [move.slot for move in copied],
                max(move.row.cached for move in copied),
            )
            self.broken = False
        for move in moves:
            move.row.slot = move.slot
        self.answers.sort(key=lambda answer: answer.slot)
        self.batch = None

    def _read_prompts(self, rows: list[PromptRow], width: int) -> Tensor:
        """Hidden states [P, T, C] of the next T = `width` tokens of prompts."""
        padded: list[int] = []
        for row in rows:
            chunk = row.tokens[row.cached : row.cached + width]
            padded += chunk + [0] * (width - len(chunk))
        tokens = on_device(padded, self.device).view(-1, width)
        slots = on_device([row.slot for row in rows], self.device)
        begin = on_device([row.cached for row in rows], self.device)
        # padding goes behind the chunk, where it is overwritten before it is seen, or to the last place
        positions = (begin[:, None] + torch.arange(width, device=self.device)).clamp(max=self.length - 1)
        end = min(self.length, max(row.cached for row in rows) + width)
        return self._hidden(tokens, positions, slots[:, None], slots, end)

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
        logits = self._logits(hidden.flatten(0, 1).index_select(0, on_device(last, self.device)))
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

    def _batch(self, answers: list[Answer]) -> Batch:
        """What a step of these answers needs: of all in the tensors of earlier ones, where steps are
        recorded."""
        size = len(answers)
        if self.graphs is not None:
            size = rows_class(size, self.slots)
        batch = Batch(answers, size, self.slots, self.model.config.vocab_size, self.device)
        if self.graphs is None or not isinstance(batch.rows, slice):
            return batch
        if len(self.graphs.recorded) >= MAX_RECORDINGS:
            self.graphs.clear()
            self.batches.clear()
        first = self.batches.setdefault((size, batch.draws.layout), batch)
        if first is not batch:
            first.replace(batch)
        return first

    def _write_tokens(self, batch: Batch, end: int) -> Tensor:
        """One step of a batch, whose tokens see the keys before `end` at most; returns the logits [R, V]."""
        if self.graphs is None or not isinstance(batch.rows, slice):
            return self._step(batch, end)
        end = length_class(end, self.cache.length)
        return self.graphs.run((batch, end), lambda: self._step(batch, end))

    def _step(self, batch: Batch, end: int) -> Tensor:
        """`_write_tokens` as a function of the batch's tensors and the cache."""
        hidden = self._hidden(batch.tokens, batch.positions, batch.slots, batch.rows, end)
        logits = self._logits(hidden[:, 0])
        batch.draw(logits, self.with_logprobs, self.length - 1)
        return logits

    def _hidden(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, rows: slice | Tensor, end: int
    ) -> Tensor:
        """Hidden states [R, T, C] of tokens [R, T] in the rows of the cache; slots [R, 1]: their numbers."""
        cache, inner = self.cache, self.model.model
        end += -end % 8
        cache.rows, cache.slots, cache.positions, cache.end = rows, slots, positions, end
        seen = inner.visible(positions, end)[:, None]  # [R, 1, T, end]
        # once for all layers
        mask = torch.where(seen, *self.mask_values)
        embeds = inner.embed_tokens(tokens)
        if self.one_token is not None and tokens.shape[1] == 1:
            return self.one_token(embeds[:, 0], positions[:, 0], mask, cache)[:, None]
        # as in training: float32 between the products
        return inner(embeds.to(inner.norm.weight.dtype), positions, mask, cache)[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, V] of hidden states [R, C]."""
        from model.fused import head_logits  # brings in the compiler

        return head_logits(self.model.lm_head, hidden)

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
    burst = BURST.get(decoder.device.type, 8)
    groups: list[list[Answer]] = []
    while len(groups) < len(prompts) or decoder.rows:
        while len(groups) < len(prompts) and (
            not decoder.rows or len(samplings[len(groups)]) <= decoder.free
        ):
            groups.append(decoder.add(prompts[len(groups)], samplings[len(groups)], new[len(groups)]))
        decoder.step(burst)
    return groups
