"""Tools that the web page may have executed when its user switches them on: the shipped environments, which
only compute. GET /api/tools lists them, POST /api/tools runs calls."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, Field, ValidationError

from model.answers import parse_call
from scripts.serve.bodies import read_body
from trainer.rollouts.environments import SHIPPED, Toolbox

MAX_BYTES = 1 << 16  # of a request


class FunctionCall(BaseModel):
    """A call as it stands in an answer: the arguments are JSON text."""

    name: str
    arguments: str


class Calls(BaseModel):
    """The calls of one answer."""

    calls: Annotated[list[FunctionCall], Field(max_length=32)]


def tools_router() -> APIRouter:
    """The two routes."""
    router, toolbox = APIRouter(prefix="/api"), Toolbox([*SHIPPED])

    @router.get("/tools")
    async def tools() -> dict[str, Any]:
        return {
            "toolboxes": [{"name": name, "tools": environment.tools} for name, environment in SHIPPED.items()]
        }

    @router.post("/tools")
    async def run(request: Request) -> dict[str, Any]:
        try:
            asked = Calls.model_validate_json(await read_body(request, MAX_BYTES))
        except ValidationError:
            raise HTTPException(
                400, "these are no calls: {'calls': [{'name': ..., 'arguments': JSON text}]}"
            ) from None
        calls = []
        for function_call in asked.calls:
            call = parse_call(function_call.model_dump_json())
            if call is None:
                raise HTTPException(400, "the arguments of a call are no JSON object")
            calls.append(call)
        replies = await asyncio.to_thread(toolbox.reply, calls)
        return {"results": [reply["content"] for reply in replies]}

    return router
