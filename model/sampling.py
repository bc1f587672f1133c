"""Drawing the next token from logits, for many answers at once.

A token is drawn with one uniform number, by the inverse of the cumulated softmax(logits / temperature). The
number is a function of the answer's seed and of the number of the token in the answer alone, so it does not
matter which other answers are drawn in the same call, nor on which device.

Shape legend: R rows (answers), V vocabulary, B blocks of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

COLDEST = 1e-5  # a lower temperature takes the likeliest token: float32 has no room for logits divided by it
BLOCK = 128  # tokens whose probabilities are summed up first
NUCLEUS = 64  # candidates that `top_p` looks at first; sorting the vocabulary takes longer than a step


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are drawn: from the `top_k` likeliest (0: all), of these from the smallest
    set with probability `top_p` (1: all). A temperature below COLDEST, such as 0, takes the likeliest,
    always."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


# of a chat, on the terminal, the page and the server
DEFAULTS = Sampling(temperature=0.7, top_k=50, top_p=0.9)


def default_sampling(model: Any) -> Sampling:
    """How answers of a model are drawn unless asked otherwise: as the generation config beside its weights
    says (`read_sampling` of trainer/weights/import_hf.py), else DEFAULTS."""
    return getattr(model, "sampling", DEFAULTS)


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def cumulative_sum(x: Tensor) -> Tensor:
    """`x.cumsum(-1)`; on CUDA with --deterministic 1 by doubling, since torch has no deterministic kernel for
    floating-point numbers there."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(dim=-1)
    return sum_by_doubling(x)


def sum_by_doubling(x: Tensor) -> Tensor:
    """Cumulative sums of the last dimension in log2 passes (Hillis and Steele, CACM 1986)."""
    step = 1
    while step < x.shape[-1]:
        x = torch.cat((x[..., :step], x[..., step:] + x[..., :-step]), dim=-1)
        step *= 2
    return x


def draw_index(weights: Tensor, uniform: Tensor) -> Tensor:
    """From each row of weights [R, V], not all 0, the index [R] at which their sum exceeds the part `uniform`
    [R, 1] of the whole; never one of weight 0."""
    # float32 could not tell the tail's tokens apart in a sum over all
    if (
        is_on_gpu(weights)
        and uniform.dtype == torch.float64
        and not torch.are_deterministic_algorithms_enabled()
    ):
        return draw_index_of_all(weights, uniform)
    return draw_index_by_blocks(weights, uniform)


def is_on_gpu(x: Tensor) -> bool:
    """Whether each operator is a kernel that must be launched, and reading its result is waiting. Tests set
    it to take this branch on a CPU."""
    return x.device.type != "cpu"


def draw_index_of_all(weights: Tensor, uniform: Tensor) -> Tensor:
    """`draw_index` with few kernels: the weights are cumulated in float64."""
    ends = weights.to(uniform.dtype).cumsum(dim=-1)
    target = uniform * (1 - torch.finfo(uniform.dtype).eps) * ends[:, -1:]
    index = torch.searchsorted(ends, target, right=True)
    return index.clamp(max=weights.shape[1] - 1)[:, 0]  # beyond it: NaN


def draw_index_by_blocks(weights: Tensor, uniform: Tensor) -> Tensor:
    """`draw_index` with little arithmetic: sums of blocks are cumulated in `uniform`'s dtype, and then the
    weights of one block."""
    size = weights.shape[1]
    extra = -size % BLOCK
    blocks = (F.pad(weights, (0, extra)) if extra else weights).unflatten(1, (-1, BLOCK))  # [R, B, BLOCK]
    below = 1 - torch.finfo(uniform.dtype).eps
    sums = blocks.sum(dim=-1).to(uniform.dtype)
    ends = cumulative_sum(sums)
    target = uniform * below * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp(max=blocks.shape[1] - 1)  # beyond it: NaN
    rest = target - (ends - sums).gather(1, block)
    own = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]  # [R, BLOCK]
    ends = cumulative_sum(own.to(uniform.dtype))
    rest = rest.clamp(min=0).minimum(ends[:, -1:] * below)  # rounding may have carried it out of the block
    return (block * BLOCK + torch.searchsorted(ends, rest, right=True)).clamp(max=size - 1)[:, 0]


class Draws:
    """How the next tokens of some answers are drawn, on a device.

    Args:
        samplings: of the answers, R of them.
        vocabulary: V.
    """

    def __init__(self, samplings: Sequence[Sampling], vocabulary: int, device: torch.device):
        self.device = device
        self.seeds = _mixed(np.array([sampling.seed % 2**64 for sampling in samplings], dtype=np.uint64))
        temperatures = [s.temperature if s.temperature >= COLDEST else 1.0 for s in samplings]
        self.temperature = None if set(temperatures) == {1.0} else _column(temperatures, device)
        kinds = [_kind(sampling, vocabulary) for sampling in samplings]
        groups = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in set(kinds)}
        self.rows: dict[str, Tensor | slice] = {
            kind: slice(None) if len(groups) == 1 else torch.tensor(rows).to(device, non_blocking=True)
            for kind, rows in groups.items()
        }
        likely = [sampling for sampling, kind in zip(samplings, kinds, strict=True) if kind == "likely"]
        self.widest = max((s.top_k for s in likely), default=0)
        self.has_top_k = all(s.top_k > 0 for s in likely)
        self.top_k = _column([s.top_k if s.top_k > 0 else vocabulary for s in likely], device)
        self.top_p = _column([s.top_p for s in likely], device)
        # what the operators of `draw` depend on besides its tensors
        of_rows = tuple(kinds if len(groups) > 1 else groups)
        self.layout = (of_rows, self.temperature is None, self.widest, self.has_top_k)

    def replace(self, other: "Draws") -> None:
        """Take what another of the same layout draws, in the same tensors."""
        self.seeds = other.seeds
        self.top_k.copy_(other.top_k)
        self.top_p.copy_(other.top_p)
        if self.temperature is not None and other.temperature is not None:
            self.temperature.copy_(other.temperature)

    def numbers(self, begin: Sequence[int], count: int) -> Tensor:
        """The numbers in [0, 1) by which tokens `begin[r]`, `begin[r] + 1` ... of answer r are drawn [count,
        R, 1]: float64 where the device has it, functions of the seed (64 bits count) and the token's number
        alone, by SplitMix64 (Steele et al., OOPSLA 2014)."""
        numbers = np.array(begin, dtype=np.uint64) + np.arange(1, count + 1, dtype=np.uint64)[:, None]
        bits = _mixed(self.seeds + numbers * np.uint64(0x9E3779B97F4A7C15))  # modulo 2**64
        uniform = torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)[..., None]
        return uniform.to(
            self.device, torch.float32 if self.device.type == "mps" else None, non_blocking=True
        )

    def draw(
        self, logits: Tensor, uniform: Tensor, with_logprobs: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """A token [R] from each row of logits [R, V] by uniform numbers [R, 1], and, if asked for, its
        log-probability [R] under softmax(logits / temperature), with temperature 1 for greedy ones; top_k and
        top_p do not count."""
        scores = logits if self.temperature is None else logits / self.temperature
        probs = scores.softmax(dim=-1) if with_logprobs or self.rows.keys() != {"greedy"} else scores
        if len(self.rows) == 1:
            (kind,) = self.rows
            tokens = self._draw_kind(kind, scores, probs, uniform)
        else:
            tokens = logits.new_empty(len(logits), dtype=torch.int64)
            for kind, rows in self.rows.items():
                tokens[rows] = self._draw_kind(kind, scores[rows], probs[rows], uniform[rows])
        return tokens, probs.gather(1, tokens[:, None])[:, 0].log() if with_logprobs else None

    def _draw_kind(self, kind: str, scores: Tensor, probs: Tensor, uniform: Tensor) -> Tensor:
        """A token [R] of each row by its scores and probabilities [R, V]; all rows are of this kind."""
        if kind == "greedy":
            return scores.argmax(dim=-1)
        if kind == "plain":
            return draw_index(probs, uniform)
        return self._draw_likely(probs, uniform)

    def _draw_likely(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """A token [R] of those that top_k and top_p leave of probabilities [R, V]."""
        vocabulary = probs.shape[1]
        width = min(vocabulary, max(NUCLEUS, self.widest))
        if not self.has_top_k and is_on_gpu(probs):
            width = vocabulary  # sorting all takes less than looking whether these are enough
        while True:
            values, tokens = probs.topk(width, dim=-1)  # [R, width], sorted
            values = values.masked_fill(torch.arange(width, device=probs.device) >= self.top_k, 0)
            total = values.sum(dim=-1, keepdim=True).masked_fill(self.top_k >= vocabulary, 1)
            before = (cumulative_sum(values) - values) / total
            if width == vocabulary or self.has_top_k:
                break
            is_wide_enough = (self.top_k <= width) | (before[:, -1:] >= self.top_p)
            if bool(is_wide_enough.all()):  # sync point
                break
            width = min(vocabulary, 8 * width)
        kept = before < self.top_p
        kept[:, 0].fill_(True)
        return tokens.gather(1, draw_index(values * kept, uniform)[:, None])[:, 0]


def _kind(sampling: Sampling, vocabulary: int) -> str:
    if sampling.temperature < COLDEST:
        return "greedy"
    return "plain" if sampling.top_p >= 1 and not 0 < sampling.top_k < vocabulary else "likely"


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor([[float(value)] for value in values]).to(device, non_blocking=True)  # [R, 1]


class TokenLogprob(NamedTuple):
    """A token's log-probability under softmax(logits), and the likeliest tokens with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def top_logprobs(logits: Tensor, tokens: Tensor, top: int) -> list[TokenLogprob]:
    """What logits [R, V] say of tokens [R] and of the `top` likeliest; temperature, top_k and top_p do not
    count."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    values, ids = (tensor.tolist() for tensor in logprobs.topk(min(top, logprobs.shape[1]), dim=-1))
    rows = zip(tokens.tolist(), own, ids, values, strict=True)
    return [TokenLogprob(token, logprob, list(zip(*best, strict=True))) for token, logprob, *best in rows]
