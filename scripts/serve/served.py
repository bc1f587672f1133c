"""A model that is served, and the answers to one request: where the event loop and the decoding thread meet."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.settings import ROOT
from model.generation import Decoder
from model.sampling import Sampling, default_sampling
from scripts.serve.logprobs import TokenTexts
from scripts.serve.prompts import PromptWriter
from scripts.serve.protocol import ApiError, ChatRequest, CompletionRequest
from scripts.serve.scheduler import Job, Piece, QueueFull, Scheduler

SAMPLED = ("temperature", "top_p", "top_k")  # fields of a request that have a default of the model
MAX_LOGPROBS = 1 << 15  # of one request, the likeliest tokens included


@dataclass(frozen=True)
class Settings:
    """How to serve. context: tokens of a prompt with its answer; slots: answers that are written at once."""

    name: str = "minimind"
    slots: int = 64
    context: int = 2048
    max_new_tokens: int = 1024  # the longest answer, and that of a chat that sets no limit
    max_queue: int = 256  # requests that may wait
    api_key: str | None = None
    local_only: bool = False  # answer only requests to this machine's own names
    origins: tuple[str, ...] = ()  # other web pages that may use the API; "*": all
    save_dir: str | Path = ROOT / "out"  # whose training curves are shown, and whose models can be asked for
    path: Path | None = None  # of the model that is loaded from the start
    load: Callable[[Path], tuple[Any, Any]] | None = None  # model and tokenizer of a weights file; None: no other model
    max_models: int = 4  # loaded at once


class ServedModel:
    """A model that answers requests under a name; by default that of the settings."""

    def __init__(self, model: Any, tokenizer: Any, settings: Settings, name: str | None = None):
        self.name, self.settings, self.created = name or settings.name, settings, int(time.time())
        self.sampling = default_sampling(model)
        self.users = 0  # requests not yet queued
        self.prompts, self.texts = PromptWriter(tokenizer, settings.context), TokenTexts(tokenizer)
        self.decoder = Decoder(model, settings.slots, settings.context, end_tokens(model, tokenizer))
        self.scheduler = Scheduler(self.decoder, tokenizer, settings.max_queue)

    def card(self) -> dict[str, Any]:
        """What /v1/models tells of it."""
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "minimind"}
        sampling = {name: getattr(self.sampling, name) for name in SAMPLED}
        return card | {"max_model_len": self.settings.context, "sampling": sampling}

    def health(self) -> dict[str, Any]:
        """How many answers are being written, and how many requests wait."""
        scheduler = self.scheduler
        counts = {"writing": len(scheduler.writing), "waiting": len(scheduler.waiting)}
        return {"alive": scheduler.thread.is_alive()} | counts

    @property
    def busy(self) -> bool:
        """Whether it may not be dropped."""
        return self.users > 0 or self.scheduler.busy


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer: those of the model's config and the tokenizer's own."""
    configured = model.config.eos_token_id
    found = set(configured) if isinstance(configured, list) else {configured}
    return {token for token in found | {tokenizer.eos_token_id} if token is not None}


def samplings_of(asked: ChatRequest | CompletionRequest, default: Sampling) -> list[Sampling]:
    """How each answer to a prompt is drawn; the first one has the seed itself, so it does not depend on `n`.
    default: of what the request leaves out."""
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    seeds = (seed + number * 0x9E3779B97F4A7C15 for number in range(asked.n))
    given = {name: getattr(asked, name) for name in SAMPLED if getattr(asked, name) is not None}
    given |= {"top_k": max(0, given.get("top_k", default.top_k))}
    return [replace(default, **given, seed=seed) for seed in seeds]


class Answers:
    """The answers to one HTTP request: one job for each of its prompts.

    Raises:
        ApiError: more answers to a prompt than fit.
    """

    def __init__(self, served: ServedModel, prompts: Sequence[list[int]], asked: ChatRequest | CompletionRequest):
        slots, most = served.settings.slots, served.settings.max_new_tokens
        if asked.n > slots:
            raise ApiError(f"n must be {slots} or less; this server writes so many answers at once", param="n")
        self.served, self.pieces = served, asyncio.Queue[Piece]()
        self.open = len(prompts) * asked.n
        longest = max(1, min(most if asked.limit is None else asked.limit, most))
        if asked.top is not None:
            tokens = longest * self.open + sum(map(len, prompts)) * asked.n * asked.echo
            if tokens * (1 + asked.top) > MAX_LOGPROBS:
                message = f"More than {MAX_LOGPROBS} log-probabilities in one request; ask for fewer tokens."
                raise ApiError(message, param="logprobs", code="invalid_value")
        self.jobs = [
            Job(
                prompt,
                samplings_of(asked, served.sampling),
                min(longest, served.settings.context - len(prompt)),
                self._notifier(asyncio.get_running_loop(), number * asked.n),
                asked.stop,
                asked.stream,
                asked.top,
                asked.echo,
            )
            for number, prompt in enumerate(prompts)
        ]

    def _notifier(self, loop: asyncio.AbstractEventLoop, first: int) -> Callable[[Piece], None]:
        def notify(piece: Piece) -> None:
            loop.call_soon_threadsafe(self.pieces.put_nowait, piece._replace(number=first + piece.number))

        return notify

    def submit(self) -> None:
        """Queue the jobs; whoever calls this calls `close` at the end, whatever happens.

        Raises:
            ApiError: too many wait.
        """
        try:
            self.served.scheduler.submit(*self.jobs)
        except QueueFull:
            if self.served.scheduler.closing:
                raise ApiError("The server can no longer answer; see its log.", 503, "server_error") from None
            message = "Too many requests are waiting; try again later."
            raise ApiError(message, 429, "rate_limit_error", code="queue_full") from None

    def close(self) -> None:
        """Free the places of what is not written yet."""
        if self.open:
            self.served.scheduler.cancel(*self.jobs)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while self.open:
            piece = await self.pieces.get()
            self.open -= piece.finish is not None
            yield piece
