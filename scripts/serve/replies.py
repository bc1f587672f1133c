"""The reply to one request: its answers, as the decoding thread reports them, in OpenAI's form, whole or in
chunks."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from model.answers import AnswerParser, merge
from model.sampling import Sampling, TokenLogprob
from scripts.serve.logprobs import TextLogprobs
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


class BaseReply:
    """The answers to a request whose size was checked, one job for each of its prompts. Whoever calls
    `submit` calls `close` at the end, whatever happens."""

    kind, streamed, prefix = "", "", ""

    def __init__(
        self, served: ServedModel, asked: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]
    ):
        self.served, self.asked = served, asked
        self.tokens = [0] * (len(prompts) * asked.n)  # of each answer so far
        self.open = len(self.tokens)  # answers that are not finished
        self.prompt_tokens = sum(map(len, prompts))
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
        }
        self.choices: list[dict[str, Any]] = []
        self.queue, self.loop = asyncio.Queue[Progress](), asyncio.get_running_loop()
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

    def _notify(self, progress: Progress) -> None:
        self.loop.call_soon_threadsafe(self.queue.put_nowait, progress)

    def submit(self) -> None:
        """Queue the jobs. Raises ApiError if too many wait."""
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

    async def news(self) -> AsyncIterator[Progress]:
        """News of the answers until all are finished. Raises ApiError if a step that was to write one
        failed."""
        while self.open:
            progress = await self.queue.get()
            if progress.finish in FAILURES:
                status, message = FAILURES[progress.finish]
                raise ApiError(message, status, "server_error")
            self.open -= progress.finish is not None
            yield progress

    def take(self, progress: Progress) -> list[dict[str, Any]]:
        """Add news of an answer; returns the choices of the chunks that tell a client of it."""
        raise NotImplementedError

    def usage(self) -> dict[str, int]:
        """Tokens of prompts and answers."""
        written = sum(self.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
        }

    def whole(self) -> dict[str, Any]:
        """The reply, when all pieces are taken."""
        return self.head | {"object": self.kind, "choices": self.choices, "usage": self.usage()}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk with these choices."""
        return self.head | {"object": self.streamed, "choices": choices}


class TextReply(BaseReply):
    """A reply of /v1/completions."""

    kind, streamed, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, served: ServedModel, asked: CompletionRequest, prompts: list[list[int]]):
        super().__init__(served, asked, prompts)
        self.choices = [_text_choice(index) for index in range(len(self.tokens))]
        self.logprobs: list[TextLogprobs] = []  # of each choice, if they were asked for
        if asked.top is not None:
            self.logprobs = [TextLogprobs(served.texts) for _ in self.choices]

    def take(self, progress: Progress) -> list[dict[str, Any]]:
        self.tokens[progress.number] = progress.tokens
        choice = self.choices[progress.number]
        chunk = _text_choice(progress.number, progress.text, progress.finish)
        choice["text"] += progress.text
        choice["finish_reason"] = progress.finish
        if self.logprobs:
            new = self.logprobs[progress.number].take(progress.logprobs)
            chunk["logprobs"] = new
            choice["logprobs"] = choice["logprobs"] or {name: [] for name in new}
            for name, values in new.items():
                choice["logprobs"][name] += values
        return [chunk]


def _text_choice(index: int, text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


class ChatReply(BaseReply):
    """A reply of /v1/chat/completions. opening: what the server wrote as the beginning of each answer."""

    kind, streamed, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, served: ServedModel, asked: ChatRequest, prompt: list[int], thinks: bool, opening: str
    ):
        super().__init__(served, asked, [prompt])
        self.details: list[list[TokenLogprob]] = [[] for _ in range(asked.n)]  # that wait for a delta
        self.parsers = [AnswerParser(thinks, asked.tool_names) for _ in range(asked.n)]
        for parser in self.parsers:
            parser.push(opening)
        self.begun = [False] * asked.n
        self.choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": None, "refusal": None},
                "logprobs": None,
            }
            for index in range(asked.n)
        ]

    def take(self, progress: Progress) -> list[dict[str, Any]]:
        self.tokens[progress.number] = progress.tokens
        choice, parser = self.choices[progress.number], self.parsers[progress.number]
        message = choice["message"]
        parts = parser.push(progress.text, is_last=progress.finish is not None)
        deltas = [_add_part(message, part) for part in parts]
        if not self.begun[progress.number]:
            self.begun[progress.number] = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        chunks = [_chat_choice(progress.number, delta) for delta in deltas]
        if progress.finish:
            called = "tool_calls" in message and progress.finish == "stop"
            choice["finish_reason"] = "tool_calls" if called else progress.finish
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            chunks.append(_chat_choice(progress.number, {}, choice["finish_reason"]))
        if self.asked.top is not None:
            self._add_logprobs(progress, chunks)
        return chunks

    def _add_logprobs(self, progress: Progress, chunks: list[dict[str, Any]]) -> None:
        """Log-probabilities go with the last delta of their progress, or wait."""
        waiting, choice = self.details[progress.number], self.choices[progress.number]
        waiting += progress.logprobs
        if chunks:
            content = self.served.texts.content(waiting)
            waiting.clear()
            chunks[-1]["logprobs"] = {"content": content, "refusal": None}
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += content


def _chat_choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _add_part(message: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Add a part of an answer to the reply's message; returns the delta of a chunk with it."""
    if "tool_calls" not in part:
        merge(message, part)
        return part
    (call,) = part["tool_calls"]
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    openai_call = {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    index = len(message.get("tool_calls", ()))
    merge(message, {"tool_calls": [openai_call]})
    return {"tool_calls": [{"index": index} | openai_call]}
