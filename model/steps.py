"""The forwards of decoding, as the device computes them: prompts are read into a cache of keys and values,
and many answers get their next tokens together. generation.py decides which answers these are, and when.

Shape legend: R rows, P prompts, T tokens of a prompt's chunk, G key/value heads, D head size, C hidden size,
V vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.graphs import MAX_RECORDINGS, Graphs, length_class, rows_class
from model.sampling import Draws, Sampling, TokenLogprob

MAX_STEPS = 8  # at most between two looks of the host at what was drawn


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
        self.uniform = self.draws.numbers([0] * size, MAX_STEPS)  # [MAX_STEPS, R, 1]
        self.drawn = torch.zeros(MAX_STEPS, size, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(MAX_STEPS, size, device=device)

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


class Steps:
    """The forwards of a `MiniMindForCausalLM` over a cache of `slots` rows of `length` tokens.

    one_token and graphs are fast forms of a step, where there are any."""

    def __init__(self, model: Any, slots: int, length: int, with_logprobs: bool):
        from model.decoding import OneToken, can_record, can_step  # brings in the compiler

        self.model, self.slots, self.length, self.with_logprobs = model, slots, length, with_logprobs
        self.device = model.lm_head.weight.device
        self.one_token = OneToken(model.model, length) if can_step(model.model) else None
        self.graphs = Graphs() if can_record(model.model) else None
        self.batches: dict[Any, Batch] = {}  # of the steps that are recorded
        with torch.inference_mode():
            # a row more, which pads batches
            self.cache = KeyValueCache(model, slots + int(self.graphs is not None), length)
            # what is added to the scores of keys that are seen, and of those that are not
            self.mask_values = self.cache.tensor.new_zeros(()), self.cache.tensor.new_full((), -torch.inf)

    def read_prompts(self, rows: list[PromptRow], width: int) -> Tensor:
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
        return self.hidden(tokens, positions, slots[:, None], slots, end)

    def batch_of(self, answers: list[Answer]) -> Batch:
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

    def write_tokens(self, batch: Batch, end: int) -> Tensor:
        """One step of a batch, whose tokens see the keys before `end` at most; returns the logits [R, V]."""
        if self.graphs is None or not isinstance(batch.rows, slice):
            return self._step(batch, end)
        end = length_class(end, self.cache.length)
        return self.graphs.run((batch, end), lambda: self._step(batch, end))

    def _step(self, batch: Batch, end: int) -> Tensor:
        """`write_tokens` as a function of the batch's tensors and the cache."""
        hidden = self.hidden(batch.tokens, batch.positions, batch.slots, batch.rows, end)
        logits = self.logits(hidden[:, 0])
        batch.draw(logits, self.with_logprobs, self.length - 1)
        return logits

    def hidden(
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

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, V] of hidden states [R, C]."""
        from model.fused import head_logits  # brings in the compiler

        return head_logits(self.model.lm_head, hidden)
