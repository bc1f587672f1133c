"""Replies in OpenAI's form, whole or in chunks, from what the scheduler reports."""

import secrets
import time
from typing import Any

from model.answer_stream import AnswerParser, merge
from model.sampling import TokenLogprob
from scripts.serve.logprobs import TextLogprobs
from scripts.serve.models import ServedModel
from scripts.serve.protocol import ChatRequest, CompletionRequest
from scripts.serve.scheduler import Progress


class BaseReply:
    """What replies have in common."""

    kind, streamed, prefix = "", "", ""

    def __init__(self, model: str, choices: int, prompt_tokens: int):
        self.tokens, self.prompt_tokens = [0] * choices, prompt_tokens
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self.choices: list[dict[str, Any]] = []

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
        super().__init__(served.name, len(prompts) * asked.n, sum(map(len, prompts)))
        self.choices = [_text_choice(index) for index in range(len(self.tokens))]
        self.logprobs: list[TextLogprobs] = []  # of each choice, if they were asked for
        if asked.top is not None:
            self.logprobs = [TextLogprobs(served.texts) for _ in self.choices]

    def take(self, progress: Progress) -> list[dict[str, Any]]:
        """Add news of an answer; returns the choices of the chunks that tell a client of it."""
        self.tokens[progress.number] = progress.tokens
        choice = self.choices[progress.number]
        chunk = _text_choice(progress.number, progress.text, progress.finish)
        choice["text"] += progress.text
        choice["finish_reason"] = progress.finish
        if self.logprobs:
            chunk["logprobs"] = self.logprobs[progress.number].take(progress.logprobs)
            choice["logprobs"] = self.logprobs[progress.number].whole
        return [chunk]


def _text_choice(index: int, text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


class ChatReply(BaseReply):
    """A reply of /v1/chat/completions. opening: what the server wrote as the beginning of each answer."""

    kind, streamed, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, served: ServedModel, asked: ChatRequest, prompt_tokens: int, thinks: bool, opening: str
    ):
        super().__init__(served.name, asked.n, prompt_tokens)
        self.served, self.asked = served, asked
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
        """Add news of an answer; returns the choices of the chunks that tell a client of it."""
        self.tokens[progress.number] = progress.tokens
        choice, parser = self.choices[progress.number], self.parsers[progress.number]
        deltas = parser.push(progress.text)
        if progress.finish:
            deltas += parser.end()
        for delta in deltas:
            merge(choice["message"], delta)
        if not self.begun[progress.number]:
            self.begun[progress.number] = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        chunks = [_chat_choice(progress.number, delta) for delta in deltas]
        if progress.finish:
            called = parser.calls > 0 and progress.finish == "stop"
            choice["finish_reason"] = "tool_calls" if called else progress.finish
            message = choice["message"]
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
