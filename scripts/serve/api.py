"""The HTTP side of the server: OpenAI's routes, who may use them, and the form of errors."""

import asyncio
import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from scripts.serve.decoding import DecodingThread, Job
from scripts.serve.page import add_page, runs_router
from scripts.serve.prompts import chat_prompt, text_prompts
from scripts.serve.protocol import ApiError, ChatRequest, CompletionRequest, parse
from scripts.serve.replies import ChatReply, TextReply, respond

MAX_BODY = 2 << 20  # bytes of a request; a full context of text is some 10 KB
BODY_SECONDS = 30  # until a body must have arrived


@dataclass(frozen=True)
class Access:
    """Who may use the server. hosts: names by which it may be called; origins: other web pages, * for all."""

    api_key: str | None = None
    hosts: tuple[str, ...] = ("*",)
    origins: tuple[str, ...] = ()

    async def check(self, request: Request) -> None:
        """Refuse web pages of other sites and requests without the key. Raises ApiError."""
        origin = request.headers.get("origin")
        is_own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
        if not is_own and origin not in self.origins and "*" not in self.origins:
            raise ApiError(f"Pages of {origin} may not use this server; see --allow_origin.", 403)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key is not None and not hmac.compare_digest(given.encode(), self.api_key.encode()):
            raise ApiError("The API key is missing or wrong.", 401, code="invalid_api_key")


def create_app(decoding: DecodingThread, save_dir: Path, access: Access = Access()) -> FastAPI:
    """The application: the API, and the page at `/` with the runs of save_dir. Whoever made the decoding
    thread closes it."""
    app = FastAPI(title="MiniMind", openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=access.hosts, www_redirect=False)
    if access.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=access.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, error_response)
    is_allowed = Depends(access.check)
    for routes in (model_routes(decoding), answer_routes(decoding), runs_router(save_dir)):
        app.include_router(routes, dependencies=[is_allowed])
    add_page(app)

    @app.get("/health")
    async def health() -> Response:
        state = decoding.health()
        if state["alive"]:
            return JSONResponse({"status": "ok"} | state)
        return JSONResponse({"status": "failed"} | state, 503)

    return app


async def error_response(request: Request, error: Exception) -> Response:
    """What the client gets instead of an answer, in OpenAI's form of an error."""
    if isinstance(error, HTTPException):  # an unknown path or method
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        error = ApiError(message, error.status_code)
    elif not isinstance(error, ApiError):
        error = ApiError("The server failed; see its log.", 500)
    return JSONResponse(error.body(), error.status)


async def read_body(request: Request) -> bytes:
    """The body of a request. Raises ApiError if it is too large, or does not arrive."""
    length = request.headers.get("content-length")  # h11 sees that it is a number, and true
    if length is None:
        raise ApiError("The request needs a Content-Length.", 411)
    if int(length) > MAX_BODY:
        raise ApiError(f"The request is larger than {MAX_BODY >> 10} KB.", 413)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.body()
    except (TimeoutError, ClientDisconnect) as error:
        raise ApiError(f"The body did not arrive within {BODY_SECONDS} s.", 408) from error


def model_routes(decoding: DecodingThread) -> APIRouter:
    """The models."""
    routes = APIRouter(prefix="/v1")

    def cards() -> list[dict[str, Any]]:
        samplings = {path: model.sampling for path, model in list(decoding.loaded.items())}
        return decoding.models.cards(samplings, decoding.context)

    # plain functions: FastAPI calls them in threads

    @routes.get("/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": cards()}

    @routes.get("/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        found_name, _ = decoding.models.find(name)
        return next(card for card in cards() if card["id"] == found_name)

    return routes


def answer_routes(decoding: DecodingThread) -> APIRouter:
    """The two routes that generate."""
    routes = APIRouter(prefix="/v1")

    def submit(job: Job) -> None:
        """Queue a job. Raises ApiError if it asks for too many answers."""
        if job.asked.n > decoding.slots:
            message = f"n must be {decoding.slots} or less; this server writes so many answers at once"
            raise ApiError(message, param="n")
        decoding.inbox.put(job)

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        asked = parse(ChatRequest, await read_body(request))
        name, path = decoding.models.find(asked.model)
        job = Job(asked, path, lambda tokenizer: [chat_prompt(asked, decoding.context, tokenizer)])
        submit(job)
        return await respond(request, ChatReply(job, name, asked))

    @routes.post("/completions")
    async def complete(request: Request) -> Response:
        asked = parse(CompletionRequest, await read_body(request))
        name, path = decoding.models.find(asked.model)
        job = Job(asked, path, lambda tokenizer: text_prompts(asked, decoding.context, tokenizer))
        submit(job)
        return await respond(request, TextReply(job, name, len(asked.prompt) * asked.n))

    return routes
