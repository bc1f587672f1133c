"""The HTTP side of the server: OpenAI's routes over the scheduler."""

import asyncio
import gc
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import printable, warn
from scripts.serve.bodies import read_body, work_on
from scripts.serve.curves import curves_router
from scripts.serve.models import Models, ServedModel, Settings, in_own_thread
from scripts.serve.prompt_writer import call_opening, check_length, turns_of
from scripts.serve.protocol import MAX_NAMED, ApiError, ChatRequest, CompletionRequest, parse
from scripts.serve.replies import BaseReply, ChatReply, TextReply, check_size
from scripts.serve.tools import tools_router
from scripts.serve.web_page import add_page

ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}


class EventStream(StreamingResponse):
    """A streamed reply, as server-sent events. An error in the middle is the last event."""

    def __init__(self, reply: BaseReply):
        self.reply = reply
        super().__init__(
            self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)  # it is cancelled when the client hangs up
        finally:
            self.reply.close()

    async def _events(self) -> AsyncIterator[bytes]:
        def event(data: dict[str, Any]) -> bytes:
            text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
            return f"data: {text}\n\n".encode()

        reply = self.reply
        with_usage = reply.asked.stream_options.include_usage
        extra = {"usage": None} if with_usage else {}
        try:
            async for progress in reply.news():
                for choice in reply.take(progress):
                    yield event(reply.chunk([choice]) | extra)
        except ApiError as error:
            yield event(error.body())
            return
        if with_usage:
            yield event(reply.chunk([]) | {"usage": reply.usage()})
        yield b"data: [DONE]\n\n"


async def whole_reply(reply: BaseReply) -> Response:
    """The response when all answers are written. Raises ApiError if the step that was to write one failed."""
    news = [progress async for progress in reply.news()]

    def render() -> Response:
        for progress in news:
            reply.take(progress)
        return JSONResponse(reply.whole())

    return await asyncio.to_thread(render)  # many log-probabilities take 50 ms


async def hung_up(request: Request) -> None:
    """Return when the client closes its connection; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def respond(request: Request, reply: BaseReply) -> Response:
    """The response to a request whose answers are queued, whole or streamed; their places are free again as
    soon as the client hangs up."""
    if reply.asked.stream:
        return EventStream(reply)
    work, gone = asyncio.create_task(whole_reply(reply)), asyncio.create_task(hung_up(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else Response(status_code=499)  # nobody reads it
    finally:
        work.cancel()
        gone.cancel()
        reply.close()


# --- routes


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
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, error_response)
    key = Depends(key_check(settings.api_key))
    app.include_router(openai_routes(models), dependencies=[key])
    app.include_router(curves_router(settings.save_dir), dependencies=[key])
    app.include_router(tools_router(), dependencies=[key])
    add_page(app)

    @app.get("/health")
    async def health() -> Response:
        state = models.health()
        if state["alive"]:
            return JSONResponse({"status": "ok"} | state)
        return JSONResponse({"status": "failed"} | state, 503)

    return app


def key_check(api_key: str | None) -> Callable[..., Awaitable[None]]:
    """A dependency of routes that refuses requests without the key, if there is one."""
    bearer = Depends(HTTPBearer(auto_error=False))

    async def check(given: Annotated[HTTPAuthorizationCredentials | None, bearer]) -> None:
        key = given.credentials if given else ""
        if api_key is not None and not hmac.compare_digest(key.encode(), api_key.encode()):
            raise ApiError("The API key is missing or wrong.", status=401, code="invalid_api_key")

    return check


class HeadAsGet:
    """A HEAD request is answered as a GET; uvicorn, which knows what it was, leaves the body out."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


def openai_routes(offered: Models) -> APIRouter:
    """The routes of OpenAI's API under /v1."""
    routes = APIRouter(prefix="/v1")
    named: set[str] = set()

    def warn_once(fields: list[str]) -> None:
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

    # What can be refused without a model is refused before one is loaded, which may take long. Work whose
    # time grows with the size of a body goes through `work_on`.

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        body = await read_body(request)
        asked, unknown_fields = await work_on(body, parse, ChatRequest, body)
        warn_once(unknown_fields)
        turns = await work_on(body, turns_of, asked.messages)
        check_size(asked, 1, offered.settings)
        opening = call_opening(asked.forced_tools)
        thinks = False if opening else asked.thinks
        tools = asked.tools if asked.tool_names else []
        async with offered.use(asked.model) as served:
            prompt = await work_on(body, served.prompts.chat, turns, tools, thinks, opening)
            reply = ChatReply(served, asked, prompt, bool(thinks), opening)
            reply.submit()
        return await respond(request, reply)

    @routes.post("/completions")
    async def complete(request: Request) -> Response:
        body = await read_body(request)
        asked, unknown_fields = await work_on(body, parse, CompletionRequest, body)
        warn_once(unknown_fields)
        check_size(asked, len(asked.prompt), offered.settings)
        for prompt in asked.prompt:
            if isinstance(prompt, list):
                check_length(prompt, offered.settings.context, "prompt")
        async with offered.use(asked.model) as served:
            prompts = [await work_on(body, served.prompts.completion, prompt) for prompt in asked.prompt]
            reply = TextReply(served, asked, prompts)
            reply.submit()
        return await respond(request, reply)

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
    headers = ERROR_HEADERS.get(error.status, headers)
    return JSONResponse(error.body(), error.status, headers)
