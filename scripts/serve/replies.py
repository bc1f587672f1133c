"""Replies in OpenAI's form, whole or in chunks, from the pieces of text that the scheduler tells."""

import secrets
import time
from typing import Any, Protocol

from scripts.serve.answers import AnswerParser, merge
from scripts.serve.protocol import ApiError, ChatRequest
from scripts.serve.scheduler import Piece


class Reply(Protocol):
    """A reply to one request, with all its choices."""

    tokens: list[int]  # of each choice so far
    prompt_tokens: int
    streamed: str  # "object" of its chunks

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece makes."""
        ...

    def whole(self) -> dict[str, Any]:
        """The reply, when all pieces are taken."""
        ...

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk with these choices."""
        ...

    def usage(self) -> dict[str, int]:
        """Tokens of prompts and answers."""
        ...


class BaseReply:
    """What replies have in common."""

    kind, streamed, prefix = "", "", ""

    def __init__(self, model: str, choices: int, prompt_tokens: int):
        self.tokens, self.prompt_tokens = [0] * choices, prompt_tokens
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
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

    def count(self, piece: Piece) -> None:
        """Note the tokens of a piece.

        Raises:
            ApiError: the step that was to write it failed.
        """
        self.tokens[piece.number] = piece.tokens
        if piece.finish == "error":
            raise ApiError("The server failed to answer; try again.", status=500, kind="server_error")


class TextReply(BaseReply):
    """A reply of /v1/completions."""

    kind, streamed, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, model: str, choices: int, prompt_tokens: int):
        super().__init__(model, choices, prompt_tokens)
        self.choices = [_text_choice(index) for index in range(choices)]

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece makes."""
        self.count(piece)
        choice = self.choices[piece.number]
        choice["text"] += piece.text
        choice["finish_reason"] = piece.finish
        return [_text_choice(piece.number, piece.text, piece.finish)]


def _text_choice(index: int, text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


class ChatReply(BaseReply):
    """A reply of /v1/chat/completions. opening: what the server wrote as the beginning of each answer."""

    kind, streamed, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, asked: ChatRequest, prompt_tokens: int, thinks: bool, opening: str):
        super().__init__(model, asked.n, prompt_tokens)
        self.parsers = [AnswerParser(thinks, asked.tool_names) for _ in range(asked.n)]
        for parser in self.parsers:
            parser.push(opening)
        self.begun = [False] * asked.n
        self.choices = [
            {"index": index, "message": {"role": "assistant", "content": None, "refusal": None}, "logprobs": None}
            for index in range(asked.n)
        ]

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece makes."""
        self.count(piece)
        choice, parser = self.choices[piece.number], self.parsers[piece.number]
        deltas = parser.push(piece.text)
        if piece.finish:
            deltas += parser.end()
        for delta in deltas:
            merge(choice["message"], delta)
        if not self.begun[piece.number]:
            self.begun[piece.number] = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        chunks = [_chat_choice(piece.number, delta) for delta in deltas]
        if piece.finish:
            called = parser.calls > 0 and piece.finish == "stop"
            choice["finish_reason"] = "tool_calls" if called else piece.finish
            message = choice["message"]
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
            chunks.append(_chat_choice(piece.number, {}, choice["finish_reason"]))
        return chunks


def _chat_choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
