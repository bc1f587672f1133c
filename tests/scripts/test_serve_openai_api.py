"""The server as a command: its flags, and how it ends."""

import http.client
import importlib.util
import json
import shutil
import signal
import sys
import threading
import time
from contextlib import closing

import pytest

from scripts import serve_openai_api
from scripts.serve import api, connections
from scripts.serve.decoding import DecodingThread
from tests.stage_process import StageProcess


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
    argv = [*weights, "--port", "0", "--slots", "4", "--context", "32000", "--max_new_tokens"]
    gentle, hasty = (StageProcess("scripts.serve_openai_api", [*argv, length]) for length in ("120", "30000"))
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True, "n": 4, "seed": 1})
    streams = []
    for process in (gentle, hasty):
        connection = http.client.HTTPConnection("127.0.0.1", port_of(process), timeout=60)
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        assert response.status == 200 and response.readline().startswith(b"data: ")
        streams.append((connection, response))
        process.send(signal.SIGTERM)
        wait_for_line(process, "finishing ")
    start = time.monotonic()
    hasty.send(signal.SIGINT)
    assert hasty.wait(30) == 0 and time.monotonic() - start < 10 and hasty.err == ""
    last = streams[1][1].read().decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "The server has ended."
    events = streams[0][1].read().decode().split("\n\n")
    assert events[-2] == "data: [DONE]" and sum('"finish_reason":"' in event for event in events) == 4
    assert gentle.wait(30) == 0 and gentle.err == ""
    for connection, _ in streams:
        connection.close()


def test_without_weights_it_starts_and_offers_what_comes(weights, tmp_path):
    """Also with a context that is shorter than the usual answer."""
    argv = ["--save_dir", str(tmp_path / "out"), "--port", "0", "--context", "256"]
    process = StageProcess("scripts.serve_openai_api", argv)
    line = wait_for_line(process, "serving the weights in ")
    connection = http.client.HTTPConnection(
        "127.0.0.1", int(line.split(";")[0].rsplit(":", 1)[1]), timeout=60
    )

    def names() -> list[str]:
        connection.request("GET", "/v1/models")
        return [model["id"] for model in json.loads(connection.getresponse().read())["data"]]

    assert names() == []
    (tmp_path / "out/mine").mkdir(parents=True)
    shutil.copyfile(tmp_path / "full_sft_32.pth", tmp_path / "out/mine/full_sft_32.pth")
    assert names() == ["mine/full_sft_32"]
    connection.request("POST", "/v1/chat/completions", '{"messages": [{"role": "user", "content": "hello"}]}')
    answer = json.loads(connection.getresponse().read())
    assert answer["model"] == "mine/full_sft_32" and answer["usage"]["completion_tokens"] <= 128
    process.send(signal.SIGTERM)
    assert process.wait(30) == 0


def test_the_thread_that_decodes_makes_the_device_its_own(weights, monkeypatch):
    """A thread begins on the first GPU, whichever the thread that started it is on."""
    prepared = []
    noted = lambda device: prepared.append((threading.current_thread().name, str(device)))  # noqa: E731
    monkeypatch.setattr(serve_openai_api, "prepare_device", noted)
    monkeypatch.setattr(sys, "argv", ["serve_openai_api.py", *weights, "--device", "cpu"])
    models = serve_openai_api.offered_models(serve_openai_api.parse_args())
    with closing(DecodingThread(models, slots=2, context=64, max_new_tokens=32, max_models=1)):
        assert prepared == [("decoding_0", "cpu")]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--slots", "0"], "--slots must be at least 1"),
        (["--context", "100", "--max_new_tokens", "100"], "--max_new_tokens 100 must be below --context 100"),
        (["--host", "256.1.1.1"], "--host 256.1.1.1"),
        (["--host", "0.0.0.0", "--port", "0"], "everyone who reaches 0.0.0.0 could use this server"),
        (["--context", "40000"], "--context 40000 is more than the 32768 positions of this model"),
        (["--port", "70000"], "--port must be between 0 and 65535, not 70000"),
        (["--api_key", "schlüssel"], "--api_key must be printable ASCII"),
        (["--api_key", "key\n"], "--api_key must be printable ASCII"),
        (["--allow_origin", "http://good.example/path"], "--allow_origin http://good.example/path must be"),
        (["--allow_origin", "*", "https://*.example"], "--allow_origin https://*.example must be"),
        (["--allow_host", "good.example:80"], "--allow_host good.example:80 must be only a host name"),
    ],
)
def test_mistakes(weights, error_line, flags, told):
    assert told in error_line(serve_openai_api, *weights, *flags)


@pytest.mark.parametrize(
    ("value", "flags", "key"), [("secret", [], "secret"), ("secret", ["--api_key", "other"], "other")]
)
def test_the_key_may_stand_in_the_environment(weights, call, monkeypatch, value, flags, key):
    """The command line is there for every user of the machine to see."""
    served = []
    monkeypatch.setattr(api, "create_app", lambda *given, **more: served.append(given[2]))
    monkeypatch.setattr(connections, "run", lambda app, listener, *rest: listener.close())
    monkeypatch.setenv("MINIMIND_API_KEY", value)
    done = call(serve_openai_api, *weights, "--port", "0", "--model_name", "mine", *flags)
    assert done.returncode == 0 and "serving mine at http://127.0.0.1" in done.stdout
    assert served[0].api_key == key and served[0].hosts == ("*",)


def test_a_port_that_is_taken_is_a_line_before_the_model_is_loaded(weights, error_line, monkeypatch):
    """Also by a server that is still loading its own."""
    monkeypatch.setattr(serve_openai_api, "offered_models", lambda args: pytest.fail("it was loaded"))
    with serve_openai_api.listen("127.0.0.1", 0) as taken:
        line = error_line(serve_openai_api, *weights, "--port", taken.getsockname()[1])
    assert "Address already in use" in line


def test_a_dead_decoding_thread_ends_the_program_with_a_line_and_a_status(weights, call, monkeypatch):
    def broken(thread: DecodingThread) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(DecodingThread, "run", broken)
    monkeypatch.setattr(connections.signal, "signal", lambda *_: None)
    done = call(serve_openai_api, *weights, "--port", "0")
    assert done.returncode == 1
    assert done.stderr == "error: the decoding thread has ended (no more memory); start the server again\n"


def test_other_host_names_may_be_allowed(weights, call, monkeypatch):
    served = []
    monkeypatch.setattr(api, "create_app", lambda *given, **more: served.append(given[2]))
    monkeypatch.setattr(connections, "run", lambda app, listener, *rest: listener.close())
    call(serve_openai_api, *weights, "--port", "0", "--allow_host", "host.docker.internal", "Box")
    assert {"localhost", "127.0.0.1", "host.docker.internal", "box"} < {*served[0].hosts}


def test_missing_packages_are_told_in_one_line(weights, error_line, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    line = error_line(serve_openai_api, *weights)
    assert line == "error: uvicorn missing: pip install -r requirements-serve.txt\n"
