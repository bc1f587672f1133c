"""What a stranger may send to a server, with what it costs the others. Not collected by pytest, since it times; the
parts that need no clock are tests in test_limits.py.

    python -m tests.scripts.serve.attacks SCRIPT_OF_THE_SERVER SAVE_DIR [ATTACK ...]

starts the server for each attack, asks it short questions meanwhile as an honest client, and prints a line: the
longest wait of that client, by the clock and in seconds of the server's processor, the peak of the server's
memory above what it had before, and the lines of its log.
"""

import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PORT = 8765
TIMEOUT = 100
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"


def post(body: Any, path: str = CHAT, timeout: float = TIMEOUT, source: str = "127.0.0.1") -> int:
    """The status of a request, 0 if there is none. source: the address of the client."""
    try:
        address = (source, 0)
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=timeout, source_address=address)
        written = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":"))
        connection.request("POST", path, written)
        response = connection.getresponse()
        response.read()
        connection.close()
    except (OSError, http.client.HTTPException):
        return 0
    return response.status


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def connect() -> socket.socket:
    return socket.create_connection(("127.0.0.1", PORT), timeout=TIMEOUT)


# --- attacks: each returns what it met


def chunked() -> Any:
    """400 MB of a body beside a small Content-Length."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    sent, piece = 0, b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with connect() as connection:
        connection.settimeout(10)
        connection.sendall(head.encode())
        try:
            while sent < 400:
                connection.sendall(piece)
                sent += 1
            return f"{sent} MB sent", connection.recv(20)
        except OSError as error:
            return f"{sent} MB sent", type(error).__name__


def long_prompt() -> Any:
    return [post({"prompt": "the river runs " * 130_000, "max_tokens": 1}, TEXTS) for _ in range(3)]


def empty_messages() -> Any:
    return post({"messages": user("") * 50_000, "max_tokens": 1})


def long_stop() -> Any:
    return post({"messages": user("hello"), "max_tokens": 4, "stop": ["a" * 60_000]})


def many_tools() -> Any:
    return post(b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b"0," * 999_000 + b"0]}")


def nested() -> Any:
    return post(b'{"messages": ' + b"[" * 900_000 + b"]" * 900_000 + b"}")


def at_once(body: Any, count: int, path: str = CHAT) -> Any:
    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(lambda _: post(body, path), range(count)))


def tool(parameters: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "parameters": parameters}}


def early_work() -> Any:
    """Twelve bodies of 240 KB, much of which cannot fit."""
    return at_once({"messages": user("") * 1500, "truncation": "auto", "tools": [tool([[]] * 65_000)]}, 12)


def border_work() -> Any:
    """24 bodies of the most costly kinds that are not refused by their size."""
    turn = {
        "role": "assistant",
        "tool_calls": [tool(1) | {"function": {"name": "f", "arguments": {"a": [[]] * 60}}}],
    }
    thoughts = {"role": "assistant", "reasoning_content": "<|im_end|>" * 60, "content": "x"}
    bodies = [[*user("x"), turn] * 250, [*user("x"), thoughts] * 380]
    bodies = [{"messages": messages, "truncation": "auto", "max_tokens": 1} for messages in bodies]
    bodies.append({"messages": user("") * 1500, "truncation": "auto", "tools": [tool([[]] * 32_000)]})
    with ThreadPoolExecutor(24) as pool:
        return Counter(pool.map(post, bodies * 8))


def short_answers() -> Any:
    """200 requests with long prompts for a token each: their answers never hold a place."""
    return at_once({"prompt": "the river runs " * 400, "max_tokens": 1}, 200, TEXTS)


def answers() -> Any:
    """8,192 answers in one request."""
    return post({"prompt": ["the river"] * 128, "n": 64, "max_tokens": 1000}, TEXTS)


def many_answers() -> Any:
    """8,192 answers in 64 requests, for a minute."""
    ask = lambda _: post({"prompt": ["the river"] * 128, "max_tokens": 1000}, TEXTS, 60)  # noqa: E731
    with ThreadPoolExecutor(64) as pool:
        return Counter(pool.map(ask, range(64)))


def requests() -> Any:
    """2,000 requests, 500 at a time."""
    ask = lambda _: post({"messages": user("hello"), "max_tokens": 8})  # noqa: E731
    with ThreadPoolExecutor(500) as pool:
        return Counter(pool.map(ask, range(2000)))


def models() -> Any:
    """Two models that are always busy; when does a third one answer? (started with --max_models 2)"""
    end, waits = time.monotonic() + 60, []

    def ask(model: str) -> None:
        while time.monotonic() < end:
            post({"model": model, "messages": user("hello"), "max_tokens": 100})

    with ThreadPoolExecutor(8) as pool:
        for model in ["full_sft_256", "dpo_256"] * 4:
            pool.submit(ask, model)
        time.sleep(2)
        start = time.monotonic()
        status = post({"model": "grpo_256", "messages": user("hello"), "max_tokens": 4}, timeout=75)
        waits.append(round(time.monotonic() - start, 1))
    return status, waits


def connections() -> Any:
    """300 bad connections of five kinds, held for 70 s; how many of them still live?"""
    kinds = [
        b"",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nG",
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{{".encode(),
        b"GET /page/style.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 400,
    ]
    held = []
    for number in range(300):
        try:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(2)
            connection.connect(("127.0.0.1", PORT))
            connection.sendall(kinds[number % 5])
        except OSError:
            pass
        held.append(connection)
    time.sleep(100)
    alive = Counter()
    for number, connection in enumerate(held):
        connection.settimeout(0.5)
        try:
            connection.sendall(b"x")
            time.sleep(0.002)
            connection.sendall(b"x")
            while connection.recv(1 << 20):
                pass
            alive["closed"] += 1
        except TimeoutError:
            alive[f"alive, kind {number % 5}"] += 1
        except OSError:
            alive["closed"] += 1
    return dict(alive)


def runs() -> Any:
    """Four readers of a metrics file with 200,000 records."""

    def read(_: int) -> float:
        start = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=TIMEOUT)
        connection.request("GET", "/api/runs/long_64")
        response = connection.getresponse()
        response.read()
        return round(time.monotonic() - start, 1)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(read, range(4)))


ATTACKS: dict[str, Callable[[], Any]] = {
    attack.__name__: attack
    for attack in (
        chunked,
        long_prompt,
        empty_messages,
        long_stop,
        many_tools,
        nested,
        early_work,
        border_work,
        short_answers,
        answers,
        many_answers,
        requests,
        models,
        connections,
        runs,
    )
}


# --- the server, and the honest client


def memory(process: int) -> float:
    """Resident memory of a process, in MB."""
    text = Path(f"/proc/{process}/statm").read_text()
    return int(text.split()[1]) * resource.getpagesize() / 2**20


def processor(process: int) -> float:
    """Seconds that a process has had of the processor."""
    user_ticks, system_ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user_ticks) + int(system_ticks)) / os.sysconf("SC_CLK_TCK")


def attack(script: str, save_dir: str, name: str) -> None:
    argv = [sys.executable, script, "--weight", "full_sft", "--save_dir", save_dir, "--port", str(PORT)]
    if name == "models":
        argv += ["--max_models", "2"]
    if name == "connections":
        argv = ["bash", "-c", 'ulimit -n 128; exec "$@"', "server", *argv]
    log = Path(save_dir) / "server.log"
    with open(log, "w") as file:
        server = subprocess.Popen(argv, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not post({"messages": user("hello"), "max_tokens": 4}):
        time.sleep(0.2)
    before, peak, waits, over = memory(server.pid), [0.0], [], threading.Event()

    def honest() -> None:
        while not over.is_set():
            start, used = time.monotonic(), processor(server.pid)
            status = post({"messages": user("hello"), "max_tokens": 4}, source="127.0.0.2")
            used = processor(server.pid) - used
            waits.append((round(time.monotonic() - start, 2), round(used, 2), status))
            time.sleep(0.2)

    def watch() -> None:
        while not over.is_set():
            peak[0] = max(peak[0], memory(server.pid))
            time.sleep(0.02)

    threads = [threading.Thread(target=watch), threading.Thread(target=honest, daemon=True)]
    for thread in threads[: 1 if name == "models" else 2]:
        thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    result = ATTACKS[name]()
    seconds = time.monotonic() - start
    over.set()
    threads[0].join()
    if name != "models":
        threads[1].join(TIMEOUT)
    statuses = Counter(status for *_, status in waits)
    longest, most_used = (max((wait[column] for wait in waits), default=0) for column in (0, 1))
    server.kill()
    server.wait()
    lines = len(log.read_text().splitlines())
    print(
        f"{name}: {seconds:.1f} s, {result}; honest: longest wait {longest} s, {most_used} s of the"
        f" processor, {dict(statuses)};"
        f" memory +{peak[0] - before:.0f} MB; log {lines} lines",
        flush=True,
    )


if __name__ == "__main__":
    for chosen in sys.argv[3:] or ATTACKS:
        attack(sys.argv[1], sys.argv[2], chosen)
