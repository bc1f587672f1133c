"""What one request, one client and one connection may cost: the cheap parts of attacks.py, without a clock."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import openai
import pytest

from scripts.serve import connections, decoding, limits, prompts
from scripts.serve.connections import Connection, LoopErrors, most_connections
from scripts.serve.decoding import Job, LoadedModel
from scripts.serve.protocol import ApiError, ChatRequest, CompletionRequest, parse
from tests.scripts.serve.servers import CONTEXT, Script, scripted, user, wait_for

CHAT, TEXTS = "v1/chat/completions", "v1/completions"


@pytest.fixture(scope="module")
def running() -> Iterator[SimpleNamespace]:
    script = Script()
    with scripted(script) as server:
        server.script = script
        yield server


@pytest.fixture
def server(running) -> SimpleNamespace:
    wait_for(lambda: not running.decoding.unfinished)
    running.script.__init__()
    return running


def post(server: SimpleNamespace, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    return httpx.post(server.address + path, content=json.dumps(body).encode(), timeout=60)


def connect(server: SimpleNamespace, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Waits until the server has closed a connection."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


# --- a request


@pytest.mark.parametrize("length", [b"Content-Length: 10\r\n", b""])
def test_a_body_is_counted_while_it_comes(server, length):
    """A chunked body may be of any length, whatever Content-Length says."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + length + b"\r\n"
    )
    body = json.dumps({"messages": user("hi")}).encode()
    small = connect(server, head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
    assert b" 200 " in small.recv(100)
    large, piece = connect(server, head), b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    for _ in range(limits.max_body(CONTEXT) // 0x8000 + 1):
        large.sendall(piece)
    assert b" 413 " in large.recv(100)


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatRequest, {"messages": [{}] * (CONTEXT + 1)}, "messages"),
        (CompletionRequest, {"prompt": ["a", "x" * (16 * CONTEXT + 1)]}, "prompt"),
    ],
)
def test_what_cannot_fit_is_refused_by_its_size(kind, fields, param):
    params = parse(kind, json.dumps(fields).encode())
    with pytest.raises(ApiError) as error:
        params.check_size(CONTEXT, 64)
    assert (error.value.param, error.value.code) == (param, "context_length_exceeded")


def test_a_conversation_that_cannot_fit_is_not_tokenised(server, monkeypatch):
    monkeypatch.setattr(prompts, "encode_pieces", lambda *_: pytest.fail("it was tokenised"))
    answer = post(server, {"messages": user("x" * 16 * CONTEXT)})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ["a" * 129]}, "stop.0"),
        ({"tools": [0] * 20_000}, "tools.0"),
        ({"tools": [{"function": {"name": "f"}}] * 129}, "tools"),
        ({"n": 129}, "n"),
    ],
)
def test_the_numbers_of_stop_strings_tools_and_answers_are_bounded(server, fields, param):
    answer = post(server, {"messages": user("x")} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_prompts_times_n_are_bounded():
    for count, n in ((128, 1), (64, 2), (1, 56)):
        parse(CompletionRequest, json.dumps({"prompt": ["a"] * count, "n": n}).encode()).check_size(
            CONTEXT, 64
        )
    for count, n in ((65, 2), (1, 57)):  # 64 slots write 56 answers together
        params = parse(CompletionRequest, json.dumps({"prompt": ["a"] * count, "n": n}).encode())
        with pytest.raises(ApiError):
            params.check_size(CONTEXT, 64)


# --- fairness


class FakeDecoder:
    """Places alone."""

    def __init__(self, slots: int):
        self.slots, self.free, self.length = slots, slots, CONTEXT


def fake_model(monkeypatch: pytest.MonkeyPatch, slots: int) -> LoadedModel:
    monkeypatch.setattr(decoding, "Decoder", lambda *_: FakeDecoder(slots))
    monkeypatch.setattr(decoding, "default_sampling", lambda model: None)
    return LoadedModel(None, SimpleNamespace(eos_token_id=2), slots, CONTEXT, 10)


def wait_in(model: LoadedModel, client: str, prompt_count: int = 1, n: int = 1) -> Job:
    params: Any = SimpleNamespace(n=n)
    job = Job(params, Path("x"), lambda _: iter(()), client, loop=None, progress=None)  # type: ignore[arg-type]
    job.prompts.extend((n * number, [1]) for number in range(prompt_count))
    model.waiting.append(job)
    return job


def begin_all(model: LoadedModel) -> list[Job]:
    """Begin what may begin, as `begin_answers` does."""
    begun = []
    while job := model.next_job():
        job.prompts.popleft()
        if not job.prompts:
            model.waiting.remove(job)
        for number in range(job.params.n):
            model.writing[object()] = SimpleNamespace(job=job, number=number)  # type: ignore[index]
        model.decoder.free -= job.params.n
        begun.append(job)
    return begun


def test_a_request_and_a_client_leave_places_to_others(monkeypatch):
    model = fake_model(monkeypatch, 64)
    many = wait_in(model, "a", 128)
    assert begin_all(model) == [many] * 48 and model.decoder.free == 16
    same_client = [wait_in(model, "a") for _ in range(10)]
    assert begin_all(model) == same_client[:8] and model.decoder.free == 8
    other = wait_in(model, "b")
    assert begin_all(model) == [other]


def test_places_go_to_who_has_the_fewest_and_then_in_order(monkeypatch):
    model = fake_model(monkeypatch, 4)
    first, second, other = wait_in(model, "a", 3), wait_in(model, "a", 3), wait_in(model, "b", 3)
    assert begin_all(model) == [first, other, second, other]
    whole = fake_model(monkeypatch, 4)
    wait_in(whole, "a")
    begin_all(whole)
    large, small = wait_in(whole, "b", n=4), wait_in(whole, "c")
    assert begin_all(whole) == []  # places become free for the large one, which came first
    whole.writing.clear()
    whole.decoder.free = 4
    assert begin_all(whole) == [large] and whole.waiting == [small]


def test_too_many_waiting_requests_get_a_429(server, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_WAITING", 2)
    server.script.says["long"], server.script.pause = "word " * 60, 0.02
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(post, server, {"messages": user("long")}) for _ in range(5)]
        wait_for(lambda: len(server.decoding.unfinished) == 5)
        refused = post(server, {"messages": user("long")})
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "5"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert [answer.result().status_code for answer in answers] == [200] * 5
    wait_for(lambda: not server.decoding.unfinished)
    assert post(server, {"messages": user("x")}).status_code == 200


# --- connections


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: x",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nG",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n",
    ],
)
def test_every_head_and_every_body_has_a_deadline(server, monkeypatch, sent):
    for name in ("IDLE_SECONDS", "BODY_SECONDS"):
        monkeypatch.setattr(limits, name, 0.3)
    monkeypatch.setattr(connections, "END_SECONDS", 0.1)
    monkeypatch.setattr(server.server.config, "timeout_keep_alive", 0.3)
    server.script.says["long"], server.script.pause = "word " * 100, 0.01
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(post, server, {"messages": user("long")})
        assert is_closed(connect(server, sent))
        assert long.result().json()["choices"][0]["message"]["content"] == "word " * 100


def test_who_does_not_read_is_closed(server, monkeypatch):
    monkeypatch.setattr(limits, "READ_SECONDS", 0.3)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(b"GET /page/vendor/marked.js HTTP/1.1\r\nHost: x\r\n\r\n" * 300)
        wait_for(lambda: any(each.flow.write_paused for each in server.server.server_state.connections))
        wait_for(lambda: not server.server.server_state.connections)


def test_when_there_are_too_many_the_one_that_owes_a_request_for_longest_is_closed(server, monkeypatch):
    wait_for(lambda: not server.server.server_state.connections)
    monkeypatch.setattr(Connection, "most", 4)
    server.script.says["long"], server.script.pause = "word " * 60, 0.02
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(post, server, {"messages": user("long")})
        wait_for(lambda: server.decoding.health()["writing"] == 1)
        silent = [connect(server) for _ in range(10)]
        assert httpx.get(f"{server.address}health").status_code == 200
        assert all(map(is_closed, silent[:6])) and len(server.server.server_state.connections) <= 4
        assert long.result().status_code == 200
    for connection in silent:
        connection.close()


def test_there_are_fewer_connections_than_descriptors(monkeypatch):
    for soft, most in ((128, 32), (1024, 480), (20_000, 1024), (-1, 1024), (10, 1)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections() == most


def test_what_the_loop_reports_is_a_line_a_minute(capfd):
    now, log = [0.0], LoopErrors()
    loop: Any = SimpleNamespace(time=lambda: now[0])
    for now[0] in (1.0, 2.0, 3.0, 60.9, 61.1):
        log(loop, {"message": "accept failed", "exception": OSError(24, "Too many open files")})
    assert capfd.readouterr().err.count("accept failed") == 2


# --- the end


def test_at_the_end_of_the_grace_period_answers_end_with_an_error(monkeypatch):
    monkeypatch.setattr(limits, "GRACE", 0.3)
    script = Script()
    script.says["long"], script.pause = "word " * 300, 0.02
    with scripted(script) as server, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(post, server, {"messages": user("long")})
        stream = pool.submit(post, server, {"messages": user("long"), "stream": True})
        wait_for(lambda: server.decoding.health()["writing"] == 2)
        server.server.should_exit = True
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["message"] == "The server has ended."
        *pieces, last = stream.result().text.strip().split("\n\n")
        assert "word" in "".join(pieces) and json.loads(last[6:])["error"]["type"] == "server_error"


def test_when_the_decoding_thread_dies_requests_get_a_503_and_the_server_ends(monkeypatch):
    script = Script()
    script.says["long"], script.pause = "word " * 300, 0.02
    with scripted(script) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server, {"messages": user("long")})
        wait_for(lambda: server.decoding.health()["writing"] == 1)

        def broken() -> None:
            raise RuntimeError("no more memory")

        monkeypatch.setattr(server.decoding, "give_jobs_to_models", broken)
        assert waiting.result().status_code == 503
        wait_for(lambda: not server.thread.is_alive())
        assert server.decoding.failure() == "no more memory"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.address}health")


def test_nothing_is_accepted_by_a_dead_thread(server, monkeypatch):
    done: Any = SimpleNamespace(done=lambda: True, exception=lambda: None)
    monkeypatch.setattr(server.decoding, "running", done)
    assert post(server, {"messages": user("x")}).status_code == 503
    assert httpx.get(f"{server.address}health").status_code == 503


def test_the_official_client_meets_a_busy_server(server, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_WAITING", -8)
    before = threading.active_count()
    with pytest.raises(openai.RateLimitError):
        server.client.chat.completions.create(model="tiny", messages=user("x"))
    assert threading.active_count() < before + 40
