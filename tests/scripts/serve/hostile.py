"""A hostile client against our server beside honest ones: nothing that it sends may end, change or delay
their answers.

python tests/scripts/serve/hostile.py --weight full_sft --seconds 600

Honest clients stream the same answers again and again, first alone and then beside a process that sends what
a server must refuse, hangs up, leaves requests unfinished and keeps hundreds of connections open.
"""

import argparse
import http.client
import itertools
import json
import multiprocessing
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil

from common.command_line import Parser, one_line_errors
from common.errors import UserError, say
from common.settings import ROOT

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
ASK = json.dumps({"messages": USER})[:-1].encode()
SENTENCE = "the harbour lies at the mouth of a slow brown river and boats leave it before the sun is up"
STREAMS = 16  # honest answers that are streamed at once
CONNECTIONS = 500  # that are held open
MAX_RATIO = 3  # how much later than on the quiet server the median first token may come
UNFINISHED = 40  # requests that are left without the rest of their body, at once
FLOOD = 100 << 20  # bytes of the largest bodies
MOST = (2 << 20) - 200  # bytes of a value that just fits
CACHE = 100  # megabytes that the slots of the key-value cache may still take when they are first used
PAUSE = 0.02  # seconds between two attacks


def parse_args() -> argparse.Namespace:
    """The command line."""
    from trainer.weights.for_tools import add_trained_model_flags  # not in the attacker's process: seconds

    parser = Parser(description=__doc__.split("\n", 1)[0])
    add_trained_model_flags(parser)
    help_text = "how long the attack lasts; a quarter of it is measured before, on the quiet server"
    parser.add_argument("--seconds", type=float, default=60, help=help_text)
    args = parser.parse_args()
    if args.seconds <= 0:
        raise UserError("--seconds must be above 0")
    return args


@contextmanager
def server(args: argparse.Namespace, stderr: IO[str]) -> Iterator[tuple[int, subprocess.Popen]]:
    """The port of our server and its process, which SIGTERM ends at the exit. Raises UserError if it does not
    start."""
    command = [sys.executable, "-u", str(ROOT / "scripts/serve_openai_api.py"), "--port", "0"]
    for name in ("model", "weight", "save_dir", "tokenizer_path", "device"):
        if getattr(args, name):
            command += [f"--{name}", str(getattr(args, name))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if line.startswith("serving ")), None)
        if line is None:
            stderr.seek(0)
            raise UserError(f"the server does not start: {stderr.read().strip()}")
        yield urlsplit(line.split()[3].rstrip(";")).port or 80, process
    finally:
        process.terminate()
        process.wait(60)


# --- the attack


def attacks() -> Iterator[tuple[bytes, str, dict[str, str]]]:
    """Body, path and headers of requests, all of which must be refused, or answered like any other: numbers
    out of range, very many or very deep parts, long texts, odd names, nonsense, other sites."""

    def field(name: str, value: bytes) -> tuple[bytes, str, dict[str, str]]:
        return ASK + f', "{name}": '.encode() + value + b"}", CHAT, {}

    for name in ("top_k", "max_tokens", "n", "seed", "temperature", "top_p"):
        yield field(name, b"9" * 400)
    for number in (b"1e-40", b"1e400", b"NaN"):
        yield field("temperature", number)
    for item in (b"{}", b"[[]]", b'"a"', b"1e9"):
        items = b"[" + b",".join([item] * (MOST // (len(item) + 1) - 40)) + b"]"
        yield b'{"prompt": ' + items + b"}", TEXTS, {}
        for name in ("stop", "tools", "messages", "metadata"):
            yield field(name, items)
    yield ASK + b"," + b",".join(b'"k%d":0' % i for i in range(100_000)) + b"}", CHAT, {}
    for depth in (150, 60_000, 900_000):
        yield b'{"messages": ' + b"[" * depth + b"]" * depth + b"}", CHAT, {}
        yield field("tools", (b'[{"function": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}]")[:MOST])
    for text in ("<|im_start|>", "x", "\\ud83e\\udd8a", "\\u0000"):
        for size in (14_000, MOST):
            long = b'"' + (text * (size // len(text))).encode() + b'"'
            yield b'{"messages": [{"role": "user", "content": ' + long + b'}], "max_tokens": 2}', CHAT, {}
            yield b'{"prompt": ' + long + b', "max_tokens": 2}', TEXTS, {}
            yield field("model", long)
            yield field("stop", long)
    for name in ("../../etc/passwd", "..", "", "x.pth", "\0"):
        yield field("model", json.dumps(name).encode())
    for n in (b"0", b"65", b"128"):  # the slots themselves may be filled by whoever may use them
        yield field("n", n)
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'):
        yield body, CHAT, {}
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Host": "["}):
        yield ASK + b"}", CHAT, headers


def post(port: int, body: bytes, path: str, headers: dict[str, str]) -> None:
    """Send a request and read its answer, as far as it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with suppress(OSError, http.client.HTTPException):
        connection.request("POST", path, body, headers)
        connection.getresponse().read()
    connection.close()


def begin(port: int, headers: str, body: bytes) -> socket.socket:
    """Begin a request."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    with suppress(OSError):
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode() + body)
    return connection


def flood(port: int, headers: str, part: bytes) -> None:
    """Send a body of FLOOD bytes, for as long as the server takes it."""
    connection = begin(port, headers, b"")
    with suppress(OSError):
        for _ in range(FLOOD // 65536):
            connection.sendall(part)
    connection.close()


def hang_up(port: int, after: float) -> None:
    """Ask for a long answer and go away."""
    body = json.dumps({"messages": USER, "stream": True, "max_tokens": 900}).encode()
    connection = begin(port, f"Content-Length: {len(body)}", body)
    time.sleep(after)
    connection.close()


def attack(shared_port: Any, seconds: float, connections: int, counter: Any) -> None:
    """Attack the server, once its port is in `shared_port`, until the time is over; runs in a process of its
    own, which leaves its connections open until it is ended."""
    while not (port := shared_port.value):
        time.sleep(0.05)
    end, silent = time.monotonic() + seconds, []
    unfinished: list[socket.socket] = []
    spaces, chunks = b" " * 65536, b"10000\r\n" + b" " * 65536 + b"\r\n"
    others: list[Callable[[], None]] = [
        lambda: hang_up(port, 0),
        lambda: hang_up(port, 0.05),
        lambda: begin(port, "Content-Length: 9000", b'{"a"').close(),
        lambda: begin(port, "\0" * 300, b"\0" * 5000).close(),
        lambda: flood(port, f"Content-Length: {FLOOD}", spaces),
        lambda: flood(port, "Transfer-Encoding: chunked", chunks),
    ]
    known, order = list(attacks()), random.Random(0)
    for number in itertools.count():
        if time.monotonic() > end:
            break
        with suppress(OSError):  # the server has ended, or closed it
            post(port, *order.choice(known))
            others[number % len(others)]()
            counter.value += 2
            if len(silent) < connections:
                silent += [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(20)]
            unfinished.append(begin(port, f"Content-Length: {1 << (8 + number % 13)}", b'{"a'))
            if len(unfinished) > UNFINISHED:
                unfinished.pop(0).close()
        time.sleep(PAUSE)
    time.sleep(3600)


# --- the honest clients


def stream(port: int, number: int) -> tuple[str, float]:
    """Text with the finish reason of a streamed answer, and seconds to its first token."""
    words = SENTENCE.split()
    question = " ".join(words[(number + i) % len(words)] for i in range(5 + number % 12))
    body = {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "seed": number,
        "max_tokens": 64,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    start, first, text = time.perf_counter(), 0.0, ""
    try:
        connection.request("POST", CHAT, json.dumps(body))
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or choice["finish_reason"] or ""
                first = first or (time.perf_counter() - start if text else 0.0)
    except (OSError, http.client.HTTPException) as error:
        text += repr(error)
    finally:
        connection.close()
    return text, first


def honest(port: int, seconds: float) -> tuple[dict[int, list[str]], float]:
    """Stream answers for some time, once at least; their texts by the number of the question, and the median
    time to the first token."""
    end, texts, times = time.monotonic() + seconds, defaultdict(list), []

    def client(number: int) -> None:
        while not texts[number] or time.monotonic() < end:
            text, first = stream(port, number)
            texts[number].append(text)
            times.append(first)

    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(client, range(STREAMS)))
    return texts, statistics.median(times)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the server, the honest clients and the hostile one; returns what was seen. Raises UserError if the
    server does not start."""
    spawn, memory = multiprocessing.get_context("spawn"), []
    shared_port, counter = spawn.Value("l", 0), spawn.Value("l", 0)
    shared = shared_port, args.seconds, CONNECTIONS, counter
    hostile = spawn.Process(target=attack, args=shared, daemon=True)
    hostile.start()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        with server(args, log) as (port, process), ThreadPoolExecutor(1) as pool:
            honest(port, 0)  # warm
            quiet, quiet_first = honest(port, args.seconds / 4)
            shared_port.value = port
            attacked = pool.submit(honest, port, args.seconds)
            while not attacked.done():
                memory.append(psutil.Process(process.pid).memory_info().rss / 2**20)
                time.sleep(0.2)
            answers, first = attacked.result()
            process.terminate()
            status = process.wait(60)
        hostile.terminate()
        log.seek(0)
        written = log.read()
    third = max(1, len(memory) // 3)
    all_texts = [(number, text) for texts in (quiet, answers) for number in texts for text in texts[number]]
    return {
        "answers": sum(map(len, answers.values())),
        "attacks": counter.value,
        "wrong": [text[-60:] for number, text in all_texts if text != quiet[number][0]],
        "first_token": [quiet_first, first],
        "memory_mb": [max(memory[:third]), max(memory[-third:])],
        "exit_status": status,
        "log": written,
    }


def main() -> None:
    """Measure, print and judge."""
    seen = measure(parse_args())
    (quiet, attacked), (early, late) = seen["first_token"], seen["memory_mb"]
    counts = f"{seen['attacks']} hostile requests, {seen['answers']} honest answers"
    say(f"{counts}, {len(seen['wrong'])} of them wrong")
    say(f"first token: {quiet * 1000:.0f} ms quiet, {attacked * 1000:.0f} ms attacked")
    say(f"memory: at most {early:.0f} MB in the first third, {late:.0f} MB in the last")
    say(f"SIGTERM: exit status {seen['exit_status']}")
    checks = {
        f"honest answers ended early or differ: {seen['wrong'][:3]}": not seen["wrong"],
        f"the first token came {attacked / quiet:.1f} times as late": attacked <= MAX_RATIO * quiet,
        "memory grew": late <= 1.05 * early + CACHE,
        "the server did not end as it should": seen["exit_status"] == 0,
        f"the server's log has tracebacks: {seen['log'][-500:]}": "Traceback" not in seen["log"],
    }
    if failed := [text for text, is_met in checks.items() if not is_met]:
        raise UserError("; ".join(failed))


if __name__ == "__main__":
    with one_line_errors():
        main()
