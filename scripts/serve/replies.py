"""Turns the progress of a job into OpenAI's chunks, and these into a whole reply."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from model.answers import AnswerParser, merge
from scripts.serve.decoding import Job, Progress
from scripts.serve.prompts import call_opening
from scripts.serve.protocol import ApiError, ChatRequest

# headers: the request's fields that are unknown here; how many of its oldest messages were dropped
IGNORED, DROPPED = "X-Ignored-Fields", "X-Dropped-Messages"


class TextReply:
    """A reply of /v1/completions. The subclass ChatReply is one of /v1/chat/completions.

    choices: the choices of the whole reply, one for each answer.
    """

    prefix, kind, streamed_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, job: Job, model_name: str, answers: int):
        self.job = job
        reply_id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.head = {"id": reply_id, "created": int(time.time()), "model": model_name}
        self.tokens = [0] * answers  # number of tokens of each answer so far
        self.choices: list[dict[str, Any]] = [
            {"index": number, "logprobs": None} | self.empty() for number in range(answers)
        ]

    def empty(self) -> dict[str, Any]:
        """The fields of a choice before the first piece of text."""
        return {"text": ""}

    def take(self, progress: Progress) -> list[dict[str, Any]]:
        """Add progress to its choice. Returns the choices of the chunks that send this progress to a
        client."""
        self.choices[progress.number]["text"] += progress.text
        return [{"text": progress.text, "finish_reason": progress.finish}]

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The choices of all chunks. Raises ApiError."""
        unfinished = len(self.choices)
        while unfinished:
            progress = await self.job.next()
            self.tokens[progress.number] = progress.tokens
            for choice in self.take(progress):
                self.choices[progress.number]["finish_reason"] = choice["finish_reason"]
                yield {"index": progress.number, "logprobs": None} | choice
            unfinished -= progress.finish is not None

    def usage(self) -> dict[str, int]:
        """Numbers of tokens of the prompts and answers."""
        written, prompt = sum(self.tokens), self.job.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    async def whole(self) -> dict[str, Any]:
        """The reply after all answers are complete. Raises ApiError."""
        async for _ in self.chunks():
            pass
        return self.head | {"object": self.kind, "choices": self.choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The chunks as server-sent events. If an error occurs, it is the last event."""
        with_usage = self.job.params.stream_options.include_usage
        head = self.head | {"object": self.streamed_kind} | ({"usage": None} if with_usage else {})
        try:
            async for choice in self.chunks():
                yield event(head | {"choices": [choice]})
        except ApiError as error:
            yield event(error.body())
            return
        if with_usage:
            yield event(head | {"choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class ChatReply(TextReply):
    """A reply whose texts are divided into reasoning, content and tool calls."""

    prefix, kind, streamed_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, model_name: str, params: ChatRequest):
        super().__init__(job, model_name, params.n)
        opening = call_opening(params.forced_tools)  # is part of the prompt
        thinks = bool(params.thinks) and not opening
        self.parsers = [AnswerParser(thinks, params.tool_names) for _ in range(params.n)]
        for parser in self.parsers:
            parser.push(opening)
        self.begun: set[int] = set()  # numbers of the answers that have had a chunk

    def empty(self) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": None, "refusal": None}}

    def take(self, progress: Progress) -> list[dict[str, Any]]:
        parser, message = self.parsers[progress.number], self.choices[progress.number]["message"]
        parts = parser.push(progress.text, is_last=progress.finish is not None)
        deltas = [add_part(message, part) for part in parts]
        if progress.number not in self.begun:
            self.begun.add(progress.number)
            deltas.insert(0, {"role": "assistant", "content": ""})
        choices: list[dict[str, Any]] = [{"delta": delta, "finish_reason": None} for delta in deltas]
        if progress.finish:
            called = "tool_calls" in message
            if message["content"] is None and not called:
                message["content"] = ""
            finish = "tool_calls" if called and progress.finish == "stop" else progress.finish
            choices.append({"delta": {}, "finish_reason": finish})
        return choices


def add_part(message: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Add a part of an answer to the reply's message. Returns the delta of a chunk with this part."""
    if "tool_calls" not in part:
        merge(message, part)
        return part
    function = part["tool_calls"][0]["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    function = {"name": function["name"], "arguments": arguments}
    call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
    index = len(message.get("tool_calls", ()))
    merge(message, {"tool_calls": [call]})
    return {"tool_calls": [{"index": index} | call]}


async def respond(request: Request, reply: TextReply, finish: Callable[[Job], None]) -> Response:
    """The response to a queued request, whole or streamed. If the client hangs up, the answers end. finish:
    called when the response is complete. Raises ApiError."""
    job = reply.job

    async def watch() -> None:
        try:
            while (await request.receive())["type"] != "http.disconnect":
                pass
        finally:
            finish(job)
        job.progress.put_nowait(ApiError("The client hung up.", 499))

    request.state.watching = asyncio.create_task(watch())  # the event loop keeps no reference to a task
    await job.next()  # the prompts are accepted
    headers = {"Cache-Control": "no-cache"}
    if job.params.ignored_fields:
        headers[IGNORED] = ", ".join(job.params.ignored_fields)
    if job.dropped_messages:
        headers[DROPPED] = str(job.dropped_messages)
    if job.params.stream:
        return StreamingResponse(reply.events(), media_type="text/event-stream", headers=headers)
    return JSONResponse(await reply.whole(), headers=headers)
