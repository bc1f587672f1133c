"""Drawing the next token from logits, for many answers at once.

A token is drawn with one uniform random number, by the inverse of the cumulative softmax(logits /
temperature). The random number depends only on the answer's seed and on the number of the token in the
answer. So it does not matter which other answers are drawn in the same call.

Shape legend: R rows (answers), V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

COLDEST = 1e-5  # a lower temperature takes the likeliest token: logits divided by it would overflow float32


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are drawn: from the `top_k` likeliest tokens (0: all), and among these
    from the smallest set with probability `top_p` (1: all). A temperature below COLDEST, such as 0, always
    takes the likeliest token. Penalties change the logits first (`penalise`).

    allowed: returns the ids [N] of the tokens that may follow the tokens of the answer; None: all may
    follow."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed: Callable[[Sequence[int]], Tensor] | None = None

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def is_greedy(self) -> bool:
        """Whether it always takes the likeliest token."""
        return self.temperature < COLDEST


# for a chat, in the terminal, on the page and on the server
DEFAULTS = Sampling(temperature=0.7, top_k=50, top_p=0.9)


def default_sampling(model: Any) -> Sampling:
    """How answers of a model are drawn by default: as in the generation config beside its weights
    (`read_sampling` of trainer/weights/import_hf.py), otherwise DEFAULTS."""
    return getattr(model, "sampling", DEFAULTS)


def draw(logits: Tensor, samplings: Sequence[Sampling], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A token [R] from each row of float32 logits [R, V], and its log-probability [R] under softmax(logits /
    temperature), with temperature 1 for greedy answers. The log-probability ignores top_k and top_p.

    numbers: which token of its answer each is."""
    is_greedy = [sampling.is_greedy for sampling in samplings]
    temperatures = [1.0 if each.is_greedy else each.temperature for each in samplings]
    if set(temperatures) != {1.0}:
        logits = logits / column(temperatures, logits)
    probs = logits.softmax(dim=-1)
    if all(is_greedy):
        tokens = probs.argmax(dim=-1)
    else:
        uniform = uniform_numbers([sampling.seed for sampling in samplings], numbers)
        tokens = draw_index(likeliest(probs, samplings), uniform)
        if any(is_greedy):
            greedy = torch.tensor(is_greedy).to(tokens.device, non_blocking=True)
            tokens = torch.where(greedy, probs.argmax(dim=-1), tokens)
    return tokens, probs.gather(1, tokens[:, None])[:, 0].log()


def penalise(logits: Tensor, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> None:
    """Change the logits [V] of an answer's next token, in place, by the tokens before it.

    repetition_penalty divides the logits of all tokens in prompt and answer, or multiplies them if they are
    negative (Keskar et al. 2019, as in transformers). Then frequency_penalty is subtracted for each time that
    a token occurs in the answer, and presence_penalty once (OpenAI's definition)."""
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *answer}), dtype=torch.long).to(logits.device, non_blocking=True)
        values, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    if answer and (sampling.frequency_penalty != 0 or sampling.presence_penalty != 0):
        seen, counts = torch.tensor(answer).unique(return_counts=True)
        penalties = counts * sampling.frequency_penalty + sampling.presence_penalty
        seen, penalties = (each.to(logits.device, non_blocking=True) for each in (seen, penalties))
        logits[seen] -= penalties.to(logits.dtype)


def forbid(logits: Tensor, allowed: Tensor) -> None:
    """Make all tokens but the allowed ids [N] impossible in the logits [V], in place."""
    allowed = allowed.to(logits.device, non_blocking=True)
    kept = logits[allowed]
    logits.fill_(-torch.inf)
    logits[allowed] = kept


def likeliest(probs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The probabilities [R, V] with 0 for the tokens that top_k and top_p leave out. Tokens of equal
    probability stay together."""
    vocabulary = probs.shape[1]
    top_k = [sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary for sampling in samplings]
    top_p = [sampling.top_p for sampling in samplings]
    if min(top_k) == vocabulary and min(top_p) >= 1:
        return probs
    values = probs.topk(max(top_k)).values  # sorted
    counts = torch.tensor(top_k)[:, None].to(probs.device, non_blocking=True)  # [R, 1]
    values = values.masked_fill(torch.arange(max(top_k), device=probs.device) >= counts, 0)
    shares = column([share if share < 1 else torch.inf for share in top_p], probs)
    before = values.cumsum(dim=-1) - values
    kept = (before < shares * values.sum(dim=-1, keepdim=True)) & (values > 0)
    last = (kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    return probs.where(probs >= values.gather(1, last), 0)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """The values as a column [R, 1] with the device and dtype of a tensor. The host does not wait."""
    return torch.tensor(values, dtype=like.dtype)[:, None].to(like.device, non_blocking=True)


def draw_index(weights: Tensor, uniform: Tensor) -> Tensor:
    """From each row of weights [R, V], not all 0, the index [R] at which the cumulative sum exceeds the
    fraction `uniform` [R, 1] of the total; never an index of weight 0."""
    device = weights.device
    if device.type == "mps" or torch.are_deterministic_algorithms_enabled():
        # Metal has no float64, and CUDA no deterministic sum of this kind
        weights = weights.cpu()
    ends = weights.double().cumsum(dim=-1)
    target = uniform.to(ends.device, non_blocking=True) * ends[:, -1:] * (1 - torch.finfo(ends.dtype).eps)
    index = torch.searchsorted(ends, target, right=True)
    return index.clamp(max=weights.shape[1] - 1)[:, 0].to(device)  # beyond it: NaN


def uniform_numbers(seeds: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """For each answer a number in [0, 1), float64 [R, 1]. It is a function of the seed (its lowest 64 bits)
    and of the number of the token, by SplitMix64 (Steele et al., OOPSLA 2014)."""
    keys = mixed(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
    steps = np.array(numbers, dtype=np.uint64) + np.uint64(1)
    bits = mixed(keys + steps * np.uint64(0x9E3779B97F4A7C15))  # modulo 2**64
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)[:, None]


def mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's mixing of 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
