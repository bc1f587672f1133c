"""Answers in JSON by a schema: of a model with random weights, judged by json and pydantic."""

import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field

from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from scripts.serve.models import Models
from tests.scripts.serve.servers import load_tokenizer, serving, user, web

needs_llguidance = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None, reason="pip install -r requirements-serve.txt"
)
OBJECT = {"type": "json_object"}


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=6)
    kind: Literal["road", "river"]


class Town(BaseModel):
    """Its field `pattern` is no keyword of the schema; the names hold what JSON and the tokenizer escape."""

    model_config = ConfigDict(extra="forbid")
    pattern: bool
    people: int = Field(ge=-5, le=1200)
    parts: list[Part] = Field(max_length=2)
    said: Literal['"<|im_end|>"\\n', "水 🌊"] | None
    share: float | None = Field(default=None, ge=0, le=1)


class Leaf(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["leaf"]
    weight: int = Field(ge=0, le=9)


class Node(BaseModel):
    model_config = ConfigDict(extra="forbid")
    left: "Node | Leaf"


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    torch.manual_seed(0)
    config = MiniMindConfig(hidden_size=32, num_hidden_layers=1, tie_word_embeddings=False)
    model, tokenizer = MiniMindForCausalLM(config).eval(), load_tokenizer()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    with serving(Models("tiny", Path("tiny.pth"), lambda path: (model, tokenizer)), slots=16) as server:
        yield server


def ask(server: SimpleNamespace, response_format: Any, **fields: Any) -> list[tuple[str, str]]:
    """Texts of the answers, drawn from all tokens, and why they end."""
    fields = {"max_tokens": 200, "seed": 5, "extra_body": {"top_k": 0}} | fields
    reply = server.client.chat.completions.create(
        model="tiny", messages=user("hello"), response_format=response_format, **fields
    )
    return [(choice.message.content, choice.finish_reason) for choice in reply.choices]


@needs_llguidance
@pytest.mark.parametrize("kind", [Town, Node])
def test_every_answer_that_ends_is_valid_by_its_schema(server, kind):
    answers = [
        answer
        for temperature in (0, 1, 2)
        for answer in ask(server, form(kind.model_json_schema()), n=12, temperature=temperature)
    ]
    ended = [text for text, finish in answers if finish == "stop"]
    assert len(ended) >= 24 and len(set(ended)) >= 10
    for text in ended:
        kind.model_validate_json(text, strict=True)
        assert (
            text == json.dumps(json.loads(text), ensure_ascii=False) or "\\u" in text or "e" in text.lower()
        )
    assert {finish for _, finish in answers} <= {"stop", "length"}


@needs_llguidance
def test_a_json_object_and_a_cut_answer(server):
    for text, finish in ask(server, OBJECT, n=12, temperature=1.5):
        assert text.startswith("{") and finish in ("stop", "length")
        if finish == "stop":
            assert isinstance(json.loads(text), dict)
    ((text, finish),) = ask(server, form({"const": "a long sentence"}), max_tokens=3)
    assert '"a long sentence"'.startswith(text) and finish == "length"


@needs_llguidance
def test_the_same_answer_alone_and_among_others_whole_and_streamed(server):
    """Also of those that are bound to nothing."""
    requests = [form(Town.model_json_schema()), {"type": "text"}, form(Node.model_json_schema()), OBJECT]
    alone = [ask(server, each, n=3, max_tokens=60) for each in requests]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda each: ask(server, each, n=3, max_tokens=60), requests))
    assert together == alone
    streamed = ["", "", ""]
    for chunk in server.client.chat.completions.create(
        model="tiny",
        messages=user("hello"),
        response_format=requests[0],
        n=3,
        seed=5,
        max_tokens=60,
        stream=True,
        extra_body={"top_k": 0},
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == [text for text, _ in alone[0]]


@needs_llguidance
def test_texts_are_continued_in_json(server):
    extra = {"response_format": form({"enum": ["yes", "no"]})}
    reply = server.client.completions.create(model="tiny", prompt=["A: ", "B: "], n=2, extra_body=extra)
    assert {choice.text for choice in reply.choices} <= {'"yes"', '"no"'} and len(reply.choices) == 4


LONG, DEEP = {"enum": ["a" * 9000]}, {"type": "array"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}
INSIDE = {"default": {"pattern": "a"}, "$ref": "#/default"}


@needs_llguidance
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (LONG, "more than 8192 characters"),
        (DEEP, "more than 64 deep"),
        (INSIDE, "with 'pattern'"),
        ({"items": {"multipleOf": 99991}}, "with 'multipleOf'"),
        ({"patternProperties": {"a": {}}}, "with 'patternProperties'"),
        ({"x-guidance": {"lenient": True}}, "with 'x-guidance'"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "several entries of 'allOf'"),
        ({"type": "banana"}, "cannot be followed: Invalid type: banana"),
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"type": "string", "maxLength": 3, "minLength": 4}, "nsatisfiable"),
        ({"$ref": "#"}, "could not be followed to the end"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_alone(server, schema, message):
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(ask, server, {"type": "text"}, max_tokens=30)
        with pytest.raises(openai.BadRequestError) as error:
            ask(server, form(schema))
        assert other.result()[0][1] == "length"
    assert message in error.value.message and error.value.param == "response_format"


@needs_llguidance
def test_an_answer_that_is_given_up_ends_with_an_error_in_the_stream(server):
    """Its lexer needs more steps than it may have."""
    lengths = [{"type": "string", "minLength": i, "maxLength": 900 + i} for i in range(80)]
    schema = form({"type": "array", "minItems": 2, "items": {"anyOf": lengths}})
    body = {"messages": user("x"), "response_format": schema, "stream": True, "temperature": 2, "top_k": 0}
    lines = web.post(server.address + "v1/chat/completions", json=body, timeout=60).text.split("\n\n")
    assert "could not be followed to the end" in lines[-2] and '"content"' in lines[1]
    assert server.decoding.health()["alive"] and ask(server, form({"const": 1})) == [("1", "stop")]


@needs_llguidance
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "excludes tools"),
        ({"extra_body": {"enable_thinking": True}}, "excludes reasoning"),
    ],
)
def test_what_a_form_excludes(server, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(server, OBJECT, **fields)
    if "tools" in fields:
        assert ask(server, form({"const": 1}), tool_choice="none", **fields) == [("1", "stop")]


def test_without_llguidance_the_refusal_says_what_to_install(server, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, OBJECT)
    assert (
        "needs the package llguidance" in error.value.message
        and "requirements-serve.txt" in error.value.message
    )
    assert ask(server, {"type": "text"}, max_tokens=3)
