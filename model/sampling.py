"""Drawing the next token from logits, for many answers at once.

A token is the argmax of logits / temperature + Gumbel noise (Maddison et al., arXiv:1411.0030), which samples exactly
from their softmax. The noise is a function of the answer's seed and of the number of the token in the answer alone, so
it does not matter which other answers are drawn in the same call.

Shape legend: R rows (answers), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

COLDEST = 1e-5  # a lower temperature takes the likeliest token: float32 has no room for logits divided by it
NUCLEUS = 64  # candidates that `top_p` looks at first; sorting the vocabulary takes longer than a step


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are drawn: from the `top_k` likeliest (0: all), of these from the smallest set with
    probability `top_p` (1: all). A temperature below COLDEST, such as 0, takes the likeliest, always."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


DEFAULTS = Sampling(temperature=0.7, top_k=50, top_p=0.9)  # of a chat, on the terminal, the page and the server


def default_sampling(model: Any) -> Sampling:
    """How answers of a model are drawn unless asked otherwise: as the generation config beside its weights says
    (`read_sampling` of trainer/components/model_import.py), else DEFAULTS."""
    return getattr(model, "sampling", DEFAULTS)


def uniform_noise(seed: int, number: int, size: int) -> Tensor:
    """Numbers in [0, 1), float32 [size]: a function of the seed (64 bits count) and of the token's number alone, the
    same on every device."""
    key = blake2b(b"%d %d" % (seed % 2**64, number), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    return torch.empty(size).uniform_(generator=generator)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise from uniform noise; finite, and finest at its large end, which decides."""
    return uniform.clamp(min=2.0**-25).neg_().log1p_().neg_().log_().neg_()  # in place: memory costs more than logs


def draw_tokens(logits: Tensor, samplings: Sequence[Sampling], numbers: Sequence[int]) -> Tensor:
    """One token [R] from each row of logits [R, V]; numbers: of the tokens in their answers."""
    sampled = [each.temperature >= COLDEST for each in samplings]
    chosen = logits.new_zeros(len(logits), dtype=torch.int64) if all(sampled) else logits.argmax(dim=-1)
    for plain in (True, False):
        rows = [
            i
            for i, s in enumerate(samplings)
            if sampled[i] and plain == (s.top_p >= 1 and not 0 < s.top_k < logits.shape[1])
        ]
        if not rows:
            continue
        picked = [samplings[i] for i in rows]
        noise = torch.stack([uniform_noise(samplings[i].seed, numbers[i], logits.shape[1]) for i in rows])
        at = torch.tensor(rows, device=logits.device)
        scores = logits[at] / _column(picked, "temperature", logits)
        noise = noise.to(logits.device, non_blocking=True)
        chosen[at] = scores.add_(gumbel(noise)).argmax(dim=-1) if plain else _draw_likely(scores, noise, picked)
    return chosen


def _draw_likely(scores: Tensor, noise: Tensor, samplings: list[Sampling]) -> Tensor:
    """A token [R] of those that top_k and top_p leave, from scores and uniform noise [R, V]."""
    vocabulary = scores.shape[1]
    top_k = _column(samplings, "top_k", scores)  # [R, 1]
    top_k = torch.where(top_k > 0, top_k, vocabulary)
    top_p = _column(samplings, "top_p", scores)
    width = min(vocabulary, max(NUCLEUS, *(s.top_k for s in samplings), 0))
    everything = scores.logsumexp(dim=-1, keepdim=True)
    while True:
        values, tokens = scores.topk(width, dim=-1)  # [R, width], sorted
        values = values.masked_fill(torch.arange(width, device=scores.device) >= top_k, -torch.inf)
        total = torch.where(top_k < vocabulary, values.logsumexp(dim=-1, keepdim=True), everything)
        probs = (values - total).exp()
        before = probs.cumsum(dim=-1) - probs
        if width == vocabulary or bool(((top_k <= width) | (before[:, -1:] >= top_p)).all()):  # sync point
            break
        width = min(vocabulary, 8 * width)
    kept = before < top_p
    kept[:, 0] = True
    values = values.masked_fill(~kept, -torch.inf) + gumbel(noise.gather(1, tokens))
    return tokens.gather(1, values.argmax(dim=-1, keepdim=True))[:, 0]


def token_logprobs(logits: Tensor, tokens: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Log-probabilities [R] of tokens [R] under softmax(logits / temperature), with temperature 1 for greedy ones;
    top_k and top_p do not count."""
    temperature = _column(samplings, "temperature", logits)
    scores = logits / torch.where(temperature >= COLDEST, temperature, 1.0)
    return scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(dim=-1)


class TokenLogprob(NamedTuple):
    """A token's log-probability under softmax(logits), and the likeliest tokens with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def top_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """What logits [R, V] say of tokens [R] and of the `top` likeliest; temperature, top_k and top_p do not count."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = (tensor.tolist() for tensor in logprobs.topk(min(top, logprobs.shape[1]), dim=-1))
    rows = zip(tokens, own, ids, values, strict=True)
    return [TokenLogprob(token, logprob, list(zip(*best, strict=True))) for token, logprob, *best in rows]


def _column(samplings: Sequence[Sampling], name: str, like: Tensor) -> Tensor:
    return torch.tensor([[float(getattr(s, name))] for s in samplings], device=like.device)  # [R, 1]
