"""The answers to one request while they are written: from the decoding thread to the event loop."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from model.sampling import Sampling
from scripts.serve.models import ServedModel, Settings
from scripts.serve.protocol import MAX_ANSWERS, ApiError, ChatRequest, CompletionRequest
from scripts.serve.scheduler import Job, Progress, QueueFull

MAX_LOGPROBS = 1 << 15  # of one request, the likeliest tokens included
FAILURES = {  # how an answer ended -> status and message
    "memory": (503, "The server has too little memory for this answer; try again later."),
    "not_finite": (
        500,
        "The model's outputs are not finite numbers: its training diverged, or the file is damaged.",
    ),
    "error": (500, "The server failed to answer; try again."),
}


def samplings_of(asked: ChatRequest | CompletionRequest, default: Sampling) -> list[Sampling]:
    """How each answer to a prompt is drawn; the first one has the seed itself, so it does not depend on `n`.
    default: of what the request leaves out."""
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    seeds = (seed + number * 0x9E3779B97F4A7C15 for number in range(asked.n))
    given: dict[str, Any] = asked.model_dump(include={"temperature", "top_p", "top_k"}, exclude_none=True)
    if asked.top_k == -1:  # vLLM's name for all tokens
        given["top_k"] = 0
    return [replace(default, **given, seed=seed) for seed in seeds]


def longest_answer(asked: ChatRequest | CompletionRequest, settings: Settings) -> int:
    """Tokens that an answer may have, apart from what the context leaves."""
    return min(asked.max_tokens or settings.max_new_tokens, settings.max_new_tokens)


def check_size(asked: ChatRequest | CompletionRequest, prompts: int, settings: Settings) -> None:
    """Raise ApiError for more answers, or more log-probabilities, than one may ask for."""
    answers, slots = prompts * asked.n, settings.slots
    if answers > MAX_ANSWERS:
        raise ApiError(
            f"More than {MAX_ANSWERS} answers in one request.", param="prompt", code="invalid_value"
        )
    if asked.n > slots:
        raise ApiError(f"n must be {slots} or less; this server writes so many answers at once", param="n")
    if asked.top is not None and longest_answer(asked, settings) * answers * (1 + asked.top) > MAX_LOGPROBS:
        message = f"More than {MAX_LOGPROBS} log-probabilities in one request; ask for fewer tokens."
        raise ApiError(message, param="logprobs", code="invalid_value")


class PendingAnswers:
    """The answers to one HTTP request, whose size was checked: one job for each of its prompts. The jobs are
    queued at once, so whoever makes this calls `close` at the end. Raises ApiError if too many wait."""

    def __init__(
        self, served: ServedModel, prompts: Sequence[list[int]], asked: ChatRequest | CompletionRequest
    ):
        self.scheduler, self.queue = served.scheduler, asyncio.Queue[Progress]()
        self.open = len(prompts) * asked.n
        longest = longest_answer(asked, served.settings)
        self.jobs = [
            Job(
                prompt,
                samplings_of(asked, served.sampling),
                max_new_tokens=min(longest, served.settings.context - len(prompt)),
                notify=self._notify,
                first=number * asked.n,
                stops=asked.stop,
                streams=asked.stream,
                top=asked.top,
            )
            for number, prompt in enumerate(prompts)
        ]
        self.loop = asyncio.get_running_loop()
        try:
            self.scheduler.submit(*self.jobs)
        except QueueFull:
            if self.scheduler.closing:
                raise ApiError("The server can no longer answer; see its log.", 503, "server_error") from None
            message = "Too many requests are waiting; try again later."
            raise ApiError(message, 429, "rate_limit_error", code="queue_full") from None

    def _notify(self, progress: Progress) -> None:
        self.loop.call_soon_threadsafe(self.queue.put_nowait, progress)

    def close(self) -> None:
        """Free the places of what is not written yet."""
        if self.open:
            self.scheduler.cancel(*self.jobs)

    async def __aiter__(self) -> AsyncIterator[Progress]:
        """News of the answers until all are finished. Raises ApiError if a step that was to write one
        failed."""
        while self.open:
            progress = await self.queue.get()
            if progress.finish in FAILURES:
                status, message = FAILURES[progress.finish]
                raise ApiError(message, status, "server_error")
            self.open -= progress.finish is not None
            yield progress
