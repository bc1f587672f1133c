"""Replies in OpenAI's form, whole or in chunks, from what the scheduler reports."""

import secrets
import time
from typing import Any

from model.sampling import TokenLogprob
from scripts.serve.answer_stream import AnswerParser, merge
from scripts.serve.logprobs import TextLogprobs
from scripts.serve.models import ServedModel
from scripts.serve.protocol import ChatRequest, CompletionRequest
from scripts.serve.scheduler import Progress


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


class TextReply(BaseReply):
    """A reply of /v1/completions.

    prompts: the tokens of each prompt; an answer with `echo` begins with their text.
    """

    kind, streamed, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, served: ServedModel, asked: CompletionRequest, prompts: list[list[int]]):
        super().__init__(served.name, len(prompts) * asked.n, sum(map(len, prompts)))
        self.served, self.asked, self.prompts = served, asked, prompts
        self.choices = [_text_choice(index) for index in range(len(self.tokens))]
        self.details = [TextLogprobs(served.texts) for _ in self.tokens]
        self.begun = [False] * len(self.tokens)

    def take(self, progress: Progress) -> list[dict[str, Any]]:
        """Add news of an answer; returns the choices of the chunks that tell a client of it."""
        self.tokens[progress.number] = progress.tokens
        text, entries, finish = progress.text, [*progress.logprobs], progress.finish
        if self.asked.max_tokens == 0:  # one token was drawn all the same
            text, entries, self.tokens[progress.number] = "", [], 0
            finish = finish and "length"
        if self.asked.echo and not self.begun[progress.number]:
            prompt, prompt_logprobs = self._prompt(progress)
            text, entries = prompt + text, [*prompt_logprobs, *entries]
        self.begun[progress.number] = True
        logprobs = None if self.asked.top is None else self.details[progress.number].add(entries)
        choice = self.choices[progress.number]
        choice["text"] += text
        choice["finish_reason"] = finish
        if logprobs is not None:
            choice["logprobs"] = choice["logprobs"] or {name: [] for name in logprobs}
            for name, values in logprobs.items():
                choice["logprobs"][name] += values
        return [_text_choice(progress.number, text, finish) | {"logprobs": logprobs}]

    def _prompt(self, progress: Progress) -> tuple[str, list[TokenLogprob | int]]:
        """The text of the prompt, and what is known of its tokens; nothing of the first."""
        number = progress.number // self.asked.n
        tokens, given = self.prompts[number], self.asked.prompts[number]
        entries = [tokens[0], *progress.prompt]
        if isinstance(given, str):
            return given, entries[len(self.served.prompts.start_of(given)) :]  # without the token put in front
        return self.served.texts.whole(tokens), entries


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
        """Log-probabilities of all tokens but the end token; they go with the last delta of their progress, or wait."""
        waiting, choice = self.details[progress.number], self.choices[progress.number]
        waiting += [entry for entry in progress.logprobs if entry.token not in self.served.decoder.end_ids]
        if chunks:
            content = self.served.texts.chat(waiting)
            waiting.clear()
            chunks[-1]["logprobs"] = {"content": content, "refusal": None}
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += content


def _chat_choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
