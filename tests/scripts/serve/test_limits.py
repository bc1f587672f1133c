"""What one request, one client and one connection may cost: the cheap parts of attacks.py, without a clock."""

import asyncio
import json
import queue
import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import openai
import pytest

from scripts.serve import connections, decoding, json_answers, limits, prompts
from scripts.serve.connections import Connection, LoopErrors, most_connections
from scripts.serve.decoding import DecodingThread, Job, LoadedModel
from scripts.serve.models import Models
from scripts.serve.protocol import ApiError, ChatRequest, CompletionRequest, parse
from scripts.serve.shares import Shares, Turns
from tests.scripts.serve.servers import CONTEXT, Script, scripted, user, wait_for, web

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
    return web.post(server.address + path, content=json.dumps(body).encode(), timeout=60)


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


@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked\r\n", b""])
def test_a_body_may_have_64_kb_and_not_a_byte_more(server, framing):
    for size, status in ((65_536, b" 200 "), (65_537, b" 413 ")):
        body = json.dumps({"messages": user("hi")}).encode().ljust(size)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        if framing:
            sent = head + framing + b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (size, body)
        else:
            sent = head + b"Content-Length: %d\r\n\r\n" % size + body
        with connect(server, sent) as connection:
            assert status in connection.recv(100)
    assert [limits.max_body(context) for context in (512, 513, 2048)] == [65_536, 65_664, 262_144]


def test_what_still_comes_of_a_refused_body_is_read_for_a_megabyte(server):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 70000000\r\n\r\n"
    with connect(server, head) as connection:
        assert b" 413 " in connection.recv(1000)
        connection.sendall(b" " * (1 << 20))
        (ours,) = [each for each in server.server.server_state.connections if each.cycle]
        wait_for(lambda: ours.drained == 1 << 20)
        assert not ours.transport.is_closing()
        connection.sendall(b" ")
        assert is_closed(connection)


def size_error(kind: Any, fields: dict[str, Any], slots: int = 1024) -> ApiError | None:
    """Why a request is refused by its size at this context."""
    try:
        parse(kind, json.dumps(fields).encode()).check_size(CONTEXT, slots)
    except ApiError as error:
        return error
    return None


def tool(parameters: Any) -> dict[str, Any]:
    return {"function": {"name": "", "parameters": parameters}}


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


CHAT_BODY, TEXT_BODY = {"messages": user("x")}, {"prompt": "x"}


@pytest.mark.parametrize(
    ("kind", "most", "fields", "param"),
    [  # fields: of a size of `most` that is allowed, and one larger
        (ChatRequest, 512, lambda size: {"messages": [{}] * size}, "messages"),
        # the list, the message, its role and its content
        (ChatRequest, 4096 - 4, lambda size: {"messages": user([[]] * size)}, "messages"),
        # the list, the tool, its function, their name and parameters
        (ChatRequest, 4096 - 5, lambda size: CHAT_BODY | {"tools": [tool([[]] * size)]}, "tools"),
        (ChatRequest, 8192 - 9, lambda size: CHAT_BODY | {"tools": [tool("x" * size)]}, "tools"),
        (ChatRequest, 128, lambda size: CHAT_BODY | {"tools": [tool(1)] * size}, "tools"),
        (ChatRequest, 128, lambda size: CHAT_BODY | {"n": size}, "n"),
        (ChatRequest, 16, lambda size: CHAT_BODY | {"stop": ["a"] * size}, "stop"),
        (ChatRequest, 128, lambda size: CHAT_BODY | {"stop": ["a" * size]}, "stop.0"),
        (CompletionRequest, 8192, lambda size: {"prompt": ["a", "x" * size]}, "prompt"),
        (CompletionRequest, 128, lambda size: {"prompt": ["a"] * size}, "prompt"),
        (CompletionRequest, 64, lambda size: {"prompt": ["a", "b"], "n": size}, "n"),
        (CompletionRequest, 16, lambda size: TEXT_BODY | {"stop": ["a"] * size}, "stop"),
    ],
)
def test_a_request_may_be_as_large_as_a_limit_and_not_larger_by_one(kind, most, fields, param):
    assert size_error(kind, fields(most)) is None
    refused = size_error(kind, fields(most + 1))
    assert refused is not None and refused.param == param


def test_all_answers_to_a_prompt_leave_an_eighth_of_the_slots():
    for slots, most in ((64, 56), (8, 7), (4, 4), (1, 1)):
        assert size_error(ChatRequest, CHAT_BODY | {"n": most}, slots) is None
        assert size_error(ChatRequest, CHAT_BODY | {"n": most + 1}, slots) is not None


def test_a_schema_may_have_8192_characters_and_be_64_deep(monkeypatch):
    monkeypatch.setattr(json_answers.importlib.util, "find_spec", lambda name: True)

    def deep(levels: int) -> dict[str, Any]:
        return {"items": deep(levels - 1)} if levels > 1 else {"type": "null"}

    overhead = len(json.dumps({"const": ""}))
    json_answers.check_schema({"const": "a" * (8192 - overhead)})
    json_answers.check_schema(deep(64))
    for schema in ({"const": "a" * (8193 - overhead)}, deep(65)):
        with pytest.raises(ApiError, match="more than"):
            json_answers.check_schema(schema)


def test_a_rendered_conversation_is_tokenised_up_to_16_characters_a_token(server, monkeypatch):
    tokenised: list[int] = []

    def count(tokenizer: Any, pieces: Any) -> list[int]:
        tokenised.append(sum(len(piece.text) for piece in pieces))
        return [5]

    monkeypatch.setattr(prompts, "encode_pieces", count)
    assert post(server, {"messages": user("")}).status_code == 200
    content = "x" * (8192 - tokenised.pop())
    assert post(server, {"messages": user(content)}).status_code == 200 and tokenised == [8192]
    answer = post(server, {"messages": user(content + "x")})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert tokenised == [8192]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool([[]] * 10_000)]},
        {"tools": [tool([[]] * 10_000)], "tool_choice": "required"},
        {"tools": [tool({"type": "object", "description": "x" * 20_000})]},
        {"messages": [*user("x"), call({"a": [[]] * 10_000}), *user("x")]},
        {"messages": user([""] * 9_000)},
        {"messages": [{"role": "system", "content": "x" * 10_000}, *user("x")]},
    ],
)
@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_what_cannot_fit_is_not_rendered(server, monkeypatch, fields, truncation):
    rendered: list[Any] = []
    monkeypatch.setattr(prompts, "prompt_pieces", lambda *given, **more: rendered.append(given))
    answer = post(server, {"messages": user("x") * 30, "truncation": truncation} | fields)
    assert answer.json()["error"]["code"] == "context_length_exceeded" and not rendered


def test_arguments_of_calls_as_json_text_are_counted_before_they_are_rendered(server, monkeypatch):
    """With `truncation` only what is kept is rendered."""
    messages = [*user("x"), *[call(json.dumps({"a": [[]] * 1_000}))] * 9, *user("x")]
    rendered, render = [], prompts.prompt_pieces

    def seen(tokenizer: Any, messages: list, *more: Any, **options: Any) -> Any:
        rendered.append(len(messages))
        return render(tokenizer, messages, *more, **options)

    monkeypatch.setattr(prompts, "prompt_pieces", seen)
    answer = post(server, {"messages": messages})
    assert answer.json()["error"]["code"] == "context_length_exceeded" and not rendered
    assert post(server, {"messages": messages, "truncation": "auto"}).status_code == 200 and rendered == [1]


def test_a_prompt_is_rendered_no_more_often_than_it_must_be(server, monkeypatch):
    """Once if it fits; and if not even the newest turn fits, no shorter beginning is looked for."""
    counts, render = Counter[int](), prompts.prompt_pieces

    def counted(tokenizer: Any, messages: list, *more: Any, **options: Any) -> Any:
        counts[len(messages)] += 1
        return render(tokenizer, messages, *more, **options)

    monkeypatch.setattr(prompts, "prompt_pieces", counted)
    auto = {"truncation": "auto"}
    assert post(server, auto | {"messages": user("x") * 8}).status_code == 200 and counts == {8: 1}
    counts.clear()
    assert post(server, auto | {"messages": user("word " * 40) * 100}).status_code == 200
    assert len(counts) < 10 and set(counts.values()) == {1}
    counts.clear()
    answer = post(server, auto | {"messages": user("x") * 100, "tools": [tool([[]] * 2_000)]})
    assert answer.status_code == 400 and set(counts) == {100, 1}


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


def read_all(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs in the order in which their prompts are read, where every answer ends with its first token."""
    read: list[Job] = []
    add = lambda prompt, samplings, longest: read.append(prompt[0]) or []  # noqa: E731
    monkeypatch.setattr(model.decoder, "add", add, raising=False)
    for job in model.waiting:
        job.params.max_tokens = 1
        job.samplings = lambda default: []  # type: ignore[method-assign]
        job.prompts = deque([(0, [job] * 300)])
    while model.waiting:
        model.begin_answers()
    return read


def test_prompts_are_read_by_clients_in_turn_also_if_their_answers_hold_no_place(monkeypatch):
    model = fake_model(monkeypatch, 4)
    many, few = [wait_in(model, "a") for _ in range(20)], [wait_in(model, "b") for _ in range(2)]
    assert read_all(model, monkeypatch)[:5] == [many[0], few[0], many[1], few[1], many[2]]


def tokenise_all(model: LoadedModel, jobs: list[Job], clock: list[float]) -> list[Job]:
    """The jobs in the order in which their prompts are tokenised; each takes a hundredth of a second."""
    order: list[Job] = []

    def prompts_of(job: Job) -> Iterator[list[int]]:
        for _ in range(job.params.n):
            clock[0] += 0.01
            order.append(job)
            yield [1]

    for job in jobs:
        job.params.schema_of_answer = None
        job.make_prompts = lambda tokenizer, job=job: prompts_of(job)
        job.send = lambda progress: None  # type: ignore[method-assign]
        model.tokenising.append(job)
    model.tokenise()
    return order


def test_prompts_are_tokenised_by_clients_in_turn_for_a_twentieth_of_a_second(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(decoding.time, "monotonic", lambda: clock[0])
    model = fake_model(monkeypatch, 4)
    jobs = [wait_in(model, client) for client in [*"a" * 20, "b"]]
    model.waiting.clear()
    for job in jobs:
        job.prompts.clear()
    order = tokenise_all(model, jobs, clock)
    assert order[:2] == [jobs[0], jobs[-1]] and len(order) == 5  # 0.05 s
    assert len(model.tokenising) == 20 and model.waiting == [jobs[-1]]


def test_what_took_longer_than_its_time_is_made_up_for_while_answers_are_written(monkeypatch):
    clock, taken = [100.0], []
    monkeypatch.setattr(decoding.time, "monotonic", lambda: clock[0])

    def endless() -> Iterator[list[int]]:
        for seconds in [0.26, *[0.03] * 100]:
            clock[0] += seconds
            taken.append(seconds)
            yield [1]

    for is_writing, wanted in ((True, [1, 1, 1, 1, 1, 3]), (False, [1, 3, 5, 7, 9, 11])):
        model = fake_model(monkeypatch, 4)
        job = wait_in(model, "a")
        job.unread = endless()
        model.tokenising.append(job)
        if is_writing:
            model.writing[object()] = SimpleNamespace(job=job)  # type: ignore[index]
        counts = []
        for _ in wanted:
            model.tokenise()
            counts.append(len(taken))
        assert counts == wanted
        taken.clear()


def test_requests_are_judged_by_clients_in_turn_and_the_loop_goes_on_between_them():
    async def judge() -> list[str]:
        turns, order, loop = Turns(), [], asyncio.get_running_loop()

        def work(name: str) -> str:
            order.append(name)
            if name == "a0":  # another client's request comes while the first one is judged
                loop.call_soon(lambda: others.append(loop.create_task(turns.do("b", lambda: work("b")))))
            if name == "a2":
                raise ApiError("bad")
            return name

        others: list[Any] = []
        done = [turns.do("a", lambda name=f"a{number}": work(name)) for number in range(5)]
        results = await asyncio.gather(*done, return_exceptions=True)
        assert [str(result) for result in results] == ["a0", "a1", "bad", "a3", "a4"]
        assert await others[0] == "b" and turns.waiting == []
        return order

    assert asyncio.run(judge()).index("b") in (1, 2)


def test_models_are_loaded_for_clients_in_turn(monkeypatch):
    """One client asks for five models, and then another one for a sixth."""
    clock, loaded = [0.0], []

    def load(path: Path) -> tuple[Any, Any]:
        clock[0] += 1
        loaded.append(path.stem)
        return None, SimpleNamespace(eos_token_id=2)

    thread = DecodingThread(Models(None, None, load), 4, CONTEXT, 10, 9)
    thread.close()  # it is the test that calls its methods
    monkeypatch.setattr(decoding.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(decoding, "Decoder", lambda *_: FakeDecoder(4))
    monkeypatch.setattr(decoding, "default_sampling", lambda model: None)
    for number, client in enumerate("aaaaab"):
        params: Any = SimpleNamespace(n=1)
        thread.postponed.append(
            Job(params, Path(f"{number}.pth"), iter, client, loop=None, progress=None)  # type: ignore[arg-type]
        )
    while thread.postponed:
        thread.give_jobs_to_models()
        thread.load_what_is_missing()
    assert loaded == ["0", "5", "1", "2", "3", "4"]


def test_shares_go_to_who_had_least_and_nobody_saves_them_up():
    shares = Shares()
    for _ in range(10):
        shares.charge("busy", 1.0)
    assert shares.of("new") == 9.0 < shares.of("busy") == 10.0
    shares.charge("new", 0.5)
    assert min(("busy", "new"), key=shares.of) == "new"
    shares.charge("new", 5.0)
    assert min(("busy", "new"), key=shares.of) == "busy"
    for number in range(1000):
        shares.charge(f"client {number}", 0.1)
        shares.charge("busy", 100.0)
    assert len(shares.had) < 10


def test_waiting_requests_are_bounded_in_all_and_of_a_client():
    thread: Any = DecodingThread.__new__(DecodingThread)
    thread.is_ending, thread.slots, thread.unfinished = False, 4, {}
    thread.running, thread.inbox = SimpleNamespace(done=lambda: False), queue.SimpleQueue()

    def submitted(client: str) -> int:
        """How many requests of a client are taken."""
        for count in range(600):
            job = Job(None, Path("x"), iter, client, loop=None, progress=None)  # type: ignore[arg-type]
            try:
                thread.submit(job)
            except ApiError as error:
                assert (error.status, error.headers) == (429, {"Retry-After": "5"})
                return count
        return 600

    assert [submitted(client) for client in "abc"] == [4 + 256, 256, 0]  # 4 slots, and 512 that wait


def test_too_many_waiting_requests_get_a_429(server, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_WAITING", 2)
    server.script.says["long"], server.script.pause = "word " * 20, 0.02
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
    server.script.says["long"], server.script.pause = "word " * 60, 0.01
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(post, server, {"messages": user("long")})
        assert is_closed(connect(server, sent))
        assert long.result().json()["choices"][0]["message"]["content"] == "word " * 60


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        (b"", 30),
        (b"GET /health HTTP/1.1\r\nHost: x", 30),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", 31),
    ],
)
def test_the_deadlines_are_30_seconds(server, sent, seconds):
    """A second more where the application answers first."""
    wait_for(lambda: not server.server.server_state.connections)
    with connect(server, sent):
        (ours,) = wait_for(lambda: server.server.server_state.connections)
        loop = server.server.loop
        wait_for(lambda: ours.deadline is not None and (ours.cycle or b"POST" not in sent))
        left = ours.deadline.when() - loop.time()
        assert seconds - 5 < left <= seconds


def test_who_must_read_has_30_seconds_and_so_have_answers_at_the_end(monkeypatch):
    seconds: list[float | None] = []
    connection: Any = Connection.__new__(Connection)
    connection.flow = SimpleNamespace(pause_writing=lambda: None)
    connection.expect = seconds.append
    connection.pause_writing()
    server: Any = connections.Server.__new__(connections.Server)
    server.decoding = SimpleNamespace(failure=lambda: None)
    server.loop = SimpleNamespace(call_later=lambda delay, _: seconds.append(delay))

    async def ended(*_: Any) -> None:
        pass

    monkeypatch.setattr(connections.uvicorn.Server, "shutdown", ended)
    asyncio.run(server.shutdown())
    assert seconds == [30, 30]


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
        assert web.get(f"{server.address}health").status_code == 200
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
            web.get(f"{server.address}health")


def test_nothing_is_accepted_by_a_dead_thread(server, monkeypatch):
    done: Any = SimpleNamespace(done=lambda: True, exception=lambda: None)
    monkeypatch.setattr(server.decoding, "running", done)
    assert post(server, {"messages": user("x")}).status_code == 503
    assert web.get(f"{server.address}health").status_code == 503


def test_the_official_client_meets_a_busy_server(server, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_WAITING", -8)
    before = threading.active_count()
    with pytest.raises(openai.RateLimitError):
        server.client.chat.completions.create(model="tiny", messages=user("x"))
    assert threading.active_count() < before + 40
