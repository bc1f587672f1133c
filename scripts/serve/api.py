"""The HTTP side of the server: OpenAI's routes, access, and the form of errors."""

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import warn
from scripts.serve import limits
from scripts.serve.decoding import DecodingThread, Job
from scripts.serve.json_answers import check_schema
from scripts.serve.page import add_page, runs_router
from scripts.serve.prompts import chat_prompt, text_prompts
from scripts.serve.protocol import ApiError, Body, ChatRequest, CompletionRequest, parse
from scripts.serve.replies import DROPPED, IGNORED, ChatReply, TextReply, respond
from scripts.serve.shares import Turns

READ_METHODS = ["GET", "HEAD"]


@dataclass(frozen=True)
class Access:
    """Who may use the server.

    hosts: host names that the server answers to. origins: other web pages that may use it, `*` for all.
    codes: one-time codes, each of which the server's own page exchanges for the API key.
    """

    api_key: str | None = None
    hosts: tuple[str, ...] = ("*",)
    origins: tuple[str, ...] = ()
    codes: set[str] = field(default_factory=set)

    async def check(self, request: Request) -> None:
        """Refuse web pages of other sites and requests without the API key. Raises ApiError."""
        origin = request.headers.get("origin", "")
        if not is_own_page(request) and origin not in self.origins and "*" not in self.origins:
            raise ApiError(f"Pages of {origin[:200]} may not use this server; see --allow_origin.", 403)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = ""
        if self.api_key is not None and not hmac.compare_digest(given.encode(), self.api_key.encode()):
            raise ApiError("The API key is missing or wrong.", 401, code="invalid_api_key")


def is_own_page(request: Request) -> bool:
    """Whether a request comes from the server's own page, or from no web page at all."""
    origin = request.headers.get("origin")
    return origin is None or host_of(origin) == request.headers.get("host")


def host_of(origin: str) -> str | None:
    """The host and port of an origin; None if it is not a URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


class KnownHosts:
    """Refuses requests to unknown host names. Otherwise a web page could let its own host name point to this
    machine, and would pass for the server's page (DNS rebinding).

    hosts: `*` for any name, `*.localhost` for the names below localhost.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]):
        self.app, self.hosts = app, hosts
        self.logged = WarnOnce()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if scope["type"] != "http" or self.knows(host):
            await self.app(scope, receive, send)
            return
        name = re.sub(r":\d*$", "", host)[:100]
        text = f"This server does not answer to the host name '{name}'. Start it with --allow_host {name}."
        text += " With an --api_key it answers to every name."
        self.logged.warn(f"refused the host name '{name}'; start with --allow_host {name}, or an --api_key")
        error = ApiError(text, code="unknown_host")
        await JSONResponse(error.body(), error.status)(scope, receive, send)

    def knows(self, host: str) -> bool:
        """Whether the server answers to this name. A port does not matter."""
        name = re.sub(r":\d*$", "", host).lower()
        below = [known[1:] for known in self.hosts if known.startswith("*.")]
        return "*" in self.hosts or name in self.hosts or any(name.endswith(each) for each in below)


class WarnOnce:
    """Logs each warning once, and at most `most` warnings in all, because clients could cause any number."""

    def __init__(self, most: int = 50):
        self.most, self.known = most, set[str]()

    def warn(self, text: str) -> None:
        """Log a line unless it has been logged."""
        if text not in self.known and len(self.known) < self.most:
            self.known.add(text)
            warn(text)


def client_of(request: Request) -> str:
    """The key of a client: its IPv4 address, or its IPv6 network (/64), because one client may own all of
    it."""
    address = request.client.host if request.client else ""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else address


def create_app(
    decoding: DecodingThread,
    save_dir: Path,
    access: Access = Access(),
    more: Sequence[APIRouter] = (),
    trains: bool = False,
) -> FastAPI:
    """The application: the API, and the web page at `/` with the runs of save_dir.

    more: further routes, for everybody who may use the API. trains: whether the training routes are among
    them. The caller closes the decoding thread.
    """
    app = FastAPI(title="MiniMind", openapi_url=None)
    app.add_middleware(KnownHosts, hosts=access.hosts)
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[IGNORED, DROPPED],
        )
    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, error_response)
    is_allowed = Depends(access.check)
    for routes in (model_routes(decoding), answer_routes(decoding), runs_router(save_dir, trains), *more):
        app.include_router(routes, dependencies=[is_allowed])
    app.include_router(key_route(access))
    add_page(app)

    @app.api_route("/health", methods=READ_METHODS)
    async def health() -> Response:
        state = decoding.health()
        if state["alive"]:
            return JSONResponse({"status": "ok"} | state)
        return JSONResponse({"status": "failed"} | state, 503)

    return app


def key_route(access: Access) -> APIRouter:
    """POST /api/key exchanges a one-time code for the API key. The page's address stays in the browser's
    history, so it contains such a code and not the key."""
    routes = APIRouter(prefix="/api")

    @routes.post("/key")
    async def key(request: Request) -> Response:
        code = (await read_body(request, limits.LEAST_BODY)).decode("ascii", "replace")
        if not is_own_page(request) or code not in access.codes:
            message = "This link has been used already, or the server was restarted."
            raise ApiError(message, 403, code="used_code")
        access.codes.remove(code)
        return JSONResponse({"key": access.api_key}, headers={"Cache-Control": "no-store"})

    return routes


async def error_response(request: Request, error: Exception) -> Response:
    """The response for an error, in OpenAI's format."""
    if isinstance(error, HTTPException):  # an unknown path or method
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        error = ApiError(message, error.status_code)
    elif not isinstance(error, ApiError):
        error = ApiError("The server failed; see its log.", 500)
    return JSONResponse(error.body(), error.status, error.headers)


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request. Its bytes are counted as they arrive, because a chunked body may have any
    length. Raises ApiError if there are more than `most` bytes, or if the body does not arrive in time."""
    too_large = ApiError(f"The request is larger than {most >> 10} KB, the limit of this server.", 413)
    if int(request.headers.get("content-length", "0")) > most:  # h11 has checked that it is a number
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise too_large
    except (TimeoutError, ClientDisconnect) as error:
        raise ApiError(f"The body did not arrive within {limits.BODY_SECONDS} s.", 408) from error
    return bytes(body)


def model_routes(decoding: DecodingThread) -> APIRouter:
    """The routes that list the models."""
    routes = APIRouter(prefix="/v1")

    def cards() -> list[dict[str, Any]]:
        samplings = {weights.path: model.sampling for weights, model in list(decoding.loaded.items())}
        return decoding.models.cards(samplings, decoding.context)

    # plain functions: FastAPI calls them in threads

    @routes.api_route("/models", methods=READ_METHODS)
    def models() -> dict[str, Any]:
        return {"object": "list", "data": cards()}

    @routes.api_route("/models/{name:path}", methods=READ_METHODS)
    def model(name: str) -> dict[str, Any]:
        found_name, _ = decoding.models.find(name)
        return next(card for card in cards() if card["id"] == found_name)

    return routes


def answer_routes(decoding: DecodingThread) -> APIRouter:
    """The two routes that generate answers."""
    routes = APIRouter(prefix="/v1")

    context, ignored, turns = decoding.context, WarnOnce(), Turns()

    async def read(request: Request, kind: type[Body]) -> tuple[Body, str, Path]:
        """Read and check a request; returns it with the name and file of its model. Raises ApiError."""
        body = await read_body(request, limits.max_body(context))

        def judge() -> tuple[Body, str, Path]:
            params = parse(kind, body)
            params.check_size(context, decoding.slots)
            if params.schema_of_answer is not None:
                check_schema(params.schema_of_answer)
            for name in params.ignored_fields:
                ignored.warn(f"the field '{name}' of a request is unknown here and ignored")
            return params, *decoding.models.find(params.model)

        return await turns.do(client_of(request), judge)

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        params, name, path = await read(request, ChatRequest)

        def prompts(tokenizer: Any) -> Iterator[list[int]]:
            tokens, job.dropped_messages = chat_prompt(params, context, decoding.max_new_tokens, tokenizer)
            yield tokens

        job = Job(params, path, prompts, client_of(request))
        decoding.submit(job)
        return await respond(request, ChatReply(job, name, params), decoding.finish)

    @routes.post("/completions")
    async def complete(request: Request) -> Response:
        params, name, path = await read(request, CompletionRequest)
        job = Job(
            params, path, lambda tokenizer: text_prompts(params, context, tokenizer), client_of(request)
        )
        decoding.submit(job)
        return await respond(request, TextReply(job, name, len(params.prompt) * params.n), decoding.finish)

    return routes
