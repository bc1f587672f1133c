"""The tools that the page may have run: which there are, what they answer, and what is refused."""

import json

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from common.errors import UserError
from scripts.serve.api import error_response
from scripts.serve.protocol import ApiError
from scripts.serve.tools import MAX_BYTES, tools_router
from trainer.rollouts import environments
from trainer.rollouts.environments import Toolbox


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.add_exception_handler(ApiError, error_response)
    app.include_router(tools_router())
    return TestClient(app)


def call(tool: str, /, **arguments: object) -> dict:
    return {"name": tool, "arguments": json.dumps(arguments)}


def test_the_shipped_environments_are_listed_and_run(client):
    listed = client.get("/api/tools").json()["toolboxes"]
    named = {box["name"]: [tool["function"]["name"] for tool in box["tools"]] for box in listed}
    assert named == {"calculator": ["calculate"], "calculate_math": ["calculate_math"]}
    calls = [call("calculate", expression="12 * 34"), call("calculate_math", expression="71**2")]
    calls += [call("launch"), call("calculate"), call("calculate", expression="__import__('os').getpid()")]
    first, second, unknown, *wrong = client.post("/api/tools", json={"calls": calls}).json()["results"]
    assert (first, second, unknown) == ("408", "5041", "error: no tool named launch")
    assert len(wrong) == 2 and all(text.startswith("error: ") for text in wrong)


def calls_body(*calls: object) -> bytes:
    return json.dumps({"calls": calls}).encode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b'{"calls": 5}', 400),
        (calls_body({}), 400),
        (calls_body({"name": "calculate", "arguments": "[1]"}), 400),
        (calls_body(*[call("calculate", expression="1")] * 33), 400),
        (b" " * (MAX_BYTES + 1), 413),
    ],
)
def test_what_is_no_call_is_refused(client, body, status):
    answer = client.post("/api/tools", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status


def test_an_environment_of_ones_own_that_fails_answers_with_its_error(monkeypatch):
    class Broken:
        tools = [environments.tool_schema("fail", "Fails.")]  # noqa: RUF012

        def __init__(self, record: dict):
            if record.get("never"):
                raise KeyError

        def reply(self, calls: list) -> list:
            raise RuntimeError("out of order")

    monkeypatch.setitem(environments.SHIPPED, "broken", Broken)
    assert (
        Toolbox(["broken"]).reply([{"name": "fail", "arguments": {}}])[0]["content"] == "error: out of order"
    )
    monkeypatch.setattr(Broken, "__init__", lambda self, record: record["answer"])
    with pytest.raises(UserError, match="--tools broken: it cannot be made without a record"):
        Toolbox(["broken"])
