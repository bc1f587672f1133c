"""The server as a command: its flags, and how it ends."""

import http.client
import importlib.util
import json
import signal
import socket
import time

import pytest

from scripts import serve_openai_api
from scripts.serve import api
from tests.stage_process import Faults, StageProcess


def wait_for_line(process: StageProcess, begin: str) -> str:
    """Wait until the server has printed a line that begins so; returns the line."""
    while not (lines := [line for line in process.out.split("\n")[:-1] if line.startswith(begin)]):
        assert process.process.is_alive(), process.err
        time.sleep(0.02)
    return lines[0]


def port_of(process: StageProcess) -> int:
    return int(
        wait_for_line(process, "serving full_sft_32 at http://127.0.0.1:").split(";")[0].rsplit(":", 1)[1]
    )


def test_a_signal_lets_answers_be_finished_and_a_second_one_does_not(weights):
    script = "scripts.serve_openai_api"
    argv = [*weights, "--port", "0", "--slots", "4", "--context", "32000", "--max_new_tokens"]
    short = Faults(script="from scripts import serve_openai_api; serve_openai_api.GRACE = 0.5")
    gentle, hasty = processes = [StageProcess(script, [*argv, length], short) for length in ("120", "30000")]
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "n": 4, "seed": 1}
    streams = []
    for process in processes:
        connection = http.client.HTTPConnection("127.0.0.1", port_of(process), timeout=60)
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), kind)
        response = connection.getresponse()
        assert response.status == 200 and response.readline().startswith(b"data: ")
        streams.append((connection, response))
    unfinished = socket.create_connection(("127.0.0.1", streams[0][0].port))  # must not hold up the end
    unfinished.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
    unfinished.sendall(b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{")
    for process in processes:
        process.send(signal.SIGTERM)
    wait_for_line(hasty, "finishing ")
    start = time.monotonic()
    hasty.send(signal.SIGTERM)
    assert hasty.wait(30) == 128 + signal.SIGTERM and time.monotonic() - start < 10
    events = streams[0][1].read().decode().split("\n\n")
    assert events[-2] == "data: [DONE]" and sum('"finish_reason":"' in event for event in events) == 4
    assert gentle.wait(30) == 0 and gentle.err == ""
    said = gentle.out.partition("serving ")[2].splitlines()[1:]
    assert said == ["finishing what is being answered; once more to end at once"]
    for connection in (unfinished, *(connection for connection, _ in streams)):
        connection.close()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--slots", "0"], "--slots must be at least 1"),
        (["--context", "100", "--max_new_tokens", "100"], "--max_new_tokens 100 must be below --context 100"),
        (["--host", "256.1.1.1"], "--host 256.1.1.1"),
        (["--context", "40000"], "--context 40000 is more than this model's 32768 positions"),
        (["--allow_origin", "localhost:3000"], "--allow_origin localhost:3000: write an origin such as"),
    ],
)
def test_mistakes(weights, error_line, flags, told):
    assert told in error_line(serve_openai_api, *weights, *flags)


@pytest.mark.parametrize(
    ("value", "flags", "key"),
    [("secret", [], "secret"), ("secret", ["--api_key", "other"], "other"), ("", [], None)],
)
def test_the_key_may_stand_in_the_environment(weights, call, monkeypatch, value, flags, key):
    """The command line is there for every user of the machine to see."""
    served = []
    monkeypatch.setattr(api, "create_app", lambda model, tokenizer, settings: served.append(settings))
    monkeypatch.setattr(serve_openai_api, "run", lambda app, listener: listener.close())
    monkeypatch.setenv("MINIMIND_API_KEY", value)
    assert call(serve_openai_api, *weights, "--port", "0", *flags).returncode == 0
    assert served[0].api_key == key and ("*" not in served[0].hosts) == (key is None)


def test_a_port_that_is_taken(weights, error_line):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = error_line(serve_openai_api, *weights, "--port", taken.getsockname()[1])
    assert "Address already in use" in line


def test_missing_packages_are_told_in_one_line(weights, error_line, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    line = error_line(serve_openai_api, *weights)
    assert line == "error: uvicorn missing: pip install -r requirements-serve.txt\n"


@pytest.mark.parametrize(("flags", "warns"), [([], False), (["--host", "0.0.0.0"], True)])
def test_it_warns_when_everyone_may_use_it(weights, call, monkeypatch, flags, warns):
    served = []
    monkeypatch.setattr(serve_openai_api, "run", lambda app, listener: served.append(app) or listener.close())
    done = call(serve_openai_api, *weights, "--port", "0", "--model_name", "mine", *flags)
    assert done.returncode == 0 and ("warning: everyone who reaches 0.0.0.0" in done.stderr) == warns
    assert "serving mine at http://" in done.stdout
    served[0].state.models.close()
    assert not call(serve_openai_api, *weights, "--port", "0", "--api_key", "k", *flags).stderr
    served[1].state.models.close()
