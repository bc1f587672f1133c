"""The HTTP side of the server: OpenAI's routes over the scheduler. Beside it curves.py and web_page.py need
FastAPI."""

import asyncio
import gc
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import printable, warn
from scripts.serve.bodies import SMALL_BODY, Bodies
from scripts.serve.curves import curves_router
from scripts.serve.models import Models, ServedModel, Settings, in_own_thread
from scripts.serve.pending import PendingAnswers, check_size
from scripts.serve.prompt_writer import call_opening, check_prompt, turns_of
from scripts.serve.protocol import MAX_NAMED, ApiError, Body, ChatRequest, CompletionRequest, parse
from scripts.serve.replies import ChatReply, TextReply
from scripts.serve.scheduler import Progress
from scripts.serve.tools import tools_router
from scripts.serve.web_page import add_page

OffLoop = Callable[..., Awaitable[Any]]


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """A streamed reply, as server-sent events. An error in the middle is the last event."""

    def __init__(self, answers: PendingAnswers, reply: ChatReply | TextReply, with_usage: bool):
        self.answers, self.reply, self.with_usage = answers, reply, with_usage
        super().__init__(
            self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)  # it is cancelled when the client hangs up
        finally:
            self.answers.close()

    async def _events(self) -> AsyncIterator[bytes]:
        reply, extra = self.reply, {"usage": None} if self.with_usage else {}
        try:
            async for progress in self.answers:
                for choice in reply.take(progress):
                    yield event(reply.chunk([choice]) | extra)
        except ApiError as error:
            yield event(error.body())
            return
        if self.with_usage:
            yield event(reply.chunk([]) | {"usage": reply.usage()})
        yield b"data: [DONE]\n\n"


async def respond(
    request: Request,
    answers: PendingAnswers,
    reply: ChatReply | TextReply,
    asked: ChatRequest | CompletionRequest,
) -> Response:
    """The response to a request, whole or streamed; its places are free again as soon as the client hangs up.
    Raises ApiError if too many wait, or the step that was to write the answer failed."""
    answers.submit()
    if asked.stream:
        return EventStream(answers, reply, asked.stream_options.include_usage)

    async def whole() -> Response:
        news = [progress async for progress in answers]
        return await asyncio.to_thread(written, news)  # many log-probabilities take 50 ms

    def written(news: list[Progress]) -> Response:
        for progress in news:
            reply.take(progress)
        return JSONResponse(reply.whole())

    work, gone = asyncio.create_task(whole()), asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=499)  # nobody reads it
    finally:
        work.cancel()
        gone.cancel()
        answers.close()


async def _hung_up(request: Request) -> None:
    """Return when the client closes its connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class HeadAsGet:
    """A HEAD request is answered as a GET; uvicorn, which knows what it was, leaves the body out."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


# --- routes
# ----------------------------------------------------------------------------------------------------------


def create_app(model: Any, tokenizer: Any, settings: Settings) -> FastAPI:
    """The application that serves a model: the API, and the page at `/`. Its thread ends with the
    application."""
    models = Models(in_own_thread(ServedModel, model, tokenizer, settings), settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        # a collection over all that torch and transformers hold stops every thread for a fifth of a second
        gc.freeze()
        yield
        gc.unfreeze()
        await asyncio.to_thread(models.close)

    app = FastAPI(title="MiniMind", openapi_url=None, lifespan=lifespan)
    app.add_middleware(HeadAsGet)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=settings.hosts, www_redirect=False)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.state.models = models
    bodies = Bodies()
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, error_response)
    key = Depends(key_check(settings.api_key))
    app.include_router(openai_routes(models, bodies), dependencies=[key])
    app.include_router(curves_router(settings.save_dir), dependencies=[key])
    app.include_router(tools_router(bodies), dependencies=[key])
    add_page(app)

    @app.get("/health")
    async def health() -> Response:
        state = models.health()
        if state["alive"]:
            return JSONResponse({"status": "ok"} | state)
        return JSONResponse({"status": "failed"} | state, 503)

    return app


def key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency of routes that refuses requests without the key, if there is one."""

    async def check(request: Request) -> None:  # FastAPI would call a plain function in a thread
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_right = scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode(), str(api_key).encode()
        )
        if api_key is not None and not is_right:
            raise ApiError("The API key is missing or wrong.", status=401, code="invalid_api_key")

    return check


def openai_routes(offered: Models, bodies: Bodies) -> APIRouter:
    """The routes of OpenAI's API under /v1."""
    routes = APIRouter(prefix="/v1")
    named: set[str] = set()

    def name_once(fields: list[str]) -> None:
        """Say in the log which fields of requests are ignored."""
        new = [field for field in fields if field not in named][: MAX_NAMED - len(named)]
        named.update(new)
        for field in new:
            warn(f"the field '{printable(field[:100])}' of a request is unknown here and ignored")

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": await offered.cards()}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return await offered.card(name)

    @asynccontextmanager
    async def asked_for(kind: type[Body], request: Request) -> AsyncIterator[tuple[Body, OffLoop]]:
        """A request, and how to do work whose time grows with its size; its body counts as held meanwhile."""
        async with bodies.read(request) as body:

            async def off_loop(work: Callable[..., Any], *args: Any) -> Any:
                if len(body) <= SMALL_BODY:
                    return work(*args)
                async with bodies.large:
                    return await asyncio.to_thread(work, *args)

            asked, unknown_fields = await off_loop(parse, kind, body)
            name_once(unknown_fields)
            yield asked, off_loop

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        async with AsyncExitStack() as stack:
            async with asked_for(ChatRequest, request) as (asked, off_loop):
                turns = await off_loop(turns_of, asked.messages)
                check_size(asked, 1, offered.settings)
                opening = call_opening(asked)
                thinking = False if opening else asked.thinks
                tools = asked.tools if asked.tool_names else []
                # may take long: behind refusals
                served = await stack.enter_async_context(offered.use(asked.model))
                prompt = await off_loop(served.prompts.chat, turns, tools, thinking, opening)
            asked.messages = []
            reply = ChatReply(served, asked, len(prompt), bool(thinking), opening)
            return await respond(request, PendingAnswers(served, [prompt], asked), reply, asked)

    @routes.post("/completions")
    async def complete(request: Request) -> Response:
        async with AsyncExitStack() as stack:
            async with asked_for(CompletionRequest, request) as (asked, off_loop):
                check_size(asked, len(asked.prompts), offered.settings)
                for prompt in asked.prompts:
                    await off_loop(check_prompt, prompt, offered.settings.context)
                served = await stack.enter_async_context(offered.use(asked.model))
                prompts = [await off_loop(served.prompts.completion, prompt) for prompt in asked.prompts]
            reply = TextReply(served, asked, prompts)
            return await respond(request, PendingAnswers(served, prompts, asked), reply, asked)

    return routes


async def error_response(request: Request, error: Exception) -> Response:
    """What the client gets instead of an answer, in OpenAI's form of an error."""
    headers: Any = None
    if isinstance(error, HTTPException):  # an unknown path or method
        headers = error.headers
        message = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
        error = ApiError(message, status=error.status_code)
    elif not isinstance(error, ApiError):
        error = ApiError("The server failed; see its log.", status=500, kind="server_error")
    if error.status in (429, 503):
        headers = {"Retry-After": "1"}
    elif error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse(error.body(), error.status, headers)
