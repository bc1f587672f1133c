"""Replies in OpenAI's form, whole or in chunks, from the pieces of text that the scheduler sends."""

import secrets
import time
from typing import Any

from model.sampling import TokenLogprob
from scripts.serve.answers import AnswerParser, merge
from scripts.serve.logprobs import TextLogprobs
from scripts.serve.protocol import ApiError, ChatRequest, CompletionRequest
from scripts.serve.scheduler import Piece
from scripts.serve.served import ServedModel


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
        if piece.finish == "memory":
            raise ApiError("The server has too little memory for this answer; try again later.", 503, "server_error")
        if piece.finish == "error":
            raise ApiError("The server failed to answer; try again.", status=500, kind="server_error")


class TextReply(BaseReply):
    """A reply of /v1/completions.

    prompts: the tokens of each prompt; an answer with `echo` begins with those behind `skipped[i]`, as text.
    """

    kind, streamed, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, served: ServedModel, asked: CompletionRequest, prompts: list[list[int]], skipped: list[int]):
        super().__init__(served.name, len(prompts) * asked.n, sum(map(len, prompts)))
        self.served, self.asked, self.prompts, self.skipped = served, asked, prompts, skipped
        self.choices = [_text_choice(index) for index in range(len(self.tokens))]
        self.details = [TextLogprobs(served.texts) for _ in self.tokens]
        self.begun = [False] * len(self.tokens)

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece makes."""
        self.count(piece)
        text, entries, finish = piece.text, [*piece.logprobs], piece.finish
        if self.asked.max_tokens == 0:  # one token was drawn all the same
            text, entries, self.tokens[piece.number] = "", [], 0
            finish = finish and "length"
        if self.asked.echo and not self.begun[piece.number]:
            prompt, prompt_logprobs = self._prompt(piece)
            text, entries = prompt + text, [*prompt_logprobs, *entries]
        self.begun[piece.number] = True
        logprobs = None if self.asked.top is None else self.details[piece.number].add(entries)
        choice = self.choices[piece.number]
        choice["text"] += text
        choice["finish_reason"] = finish
        if logprobs is not None:
            choice["logprobs"] = choice["logprobs"] or {name: [] for name in logprobs}
            for name, values in logprobs.items():
                choice["logprobs"][name] += values
        return [_text_choice(piece.number, text, finish) | {"logprobs": logprobs}]

    def _prompt(self, piece: Piece) -> tuple[str, list[TokenLogprob | int]]:
        """The text of the prompt, and what is known of its tokens; nothing of the first."""
        number = piece.number // self.asked.n
        tokens, skipped = self.prompts[number], self.skipped[number]
        given = self.asked.prompts[number]
        text = given if isinstance(given, str) else self.served.texts.whole(tokens)
        return text, [tokens[0], *piece.prompt][skipped:]


def _text_choice(index: int, text: str = "", finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


class ChatReply(BaseReply):
    """A reply of /v1/chat/completions. opening: what the server wrote as the beginning of each answer."""

    kind, streamed, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, served: ServedModel, asked: ChatRequest, prompt_tokens: int, thinks: bool, opening: str):
        super().__init__(served.name, asked.n, prompt_tokens)
        self.served, self.asked = served, asked
        self.details: list[list[TokenLogprob]] = [[] for _ in range(asked.n)]  # that wait for a delta
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
        if self.asked.top is not None:
            self._add_logprobs(piece, chunks)
        return chunks

    def _add_logprobs(self, piece: Piece, chunks: list[dict[str, Any]]) -> None:
        """Log-probabilities of all tokens but the end token; they go with the last delta of their piece, or wait."""
        waiting, choice = self.details[piece.number], self.choices[piece.number]
        waiting += [entry for entry in piece.logprobs if entry.token not in self.served.decoder.end_ids]
        if chunks:
            content = self.served.texts.chat(waiting)
            waiting.clear()
            chunks[-1]["logprobs"] = {"content": content, "refusal": None}
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += content


def _chat_choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
