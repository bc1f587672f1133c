"""A hostile client against our server beside honest ones: nothing that it sends may end, change or delay
their answers.

python tests/scripts/serve/hostile.py --weight full_sft --seconds 600

Honest clients stream the same answers again and again, first alone and then beside a process that sends what
a server must refuse (`attacks`), hangs up, leaves requests unfinished and keeps hundreds of connections open.
Reported: answers that differ from those of the quiet server or end early, the time to the first token against
the quiet one, the memory of the server over time, and whether it ends on SIGTERM with those connections open.
Everything goes to 127.0.0.1.
"""

import argparse
import http.client
import itertools
import json
import multiprocessing
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
    """Body, path and headers of requests, all of which must be refused, or answered like any other."""
    kind = {"Content-Type": "application/json"}
    for path, body in bodies():
        yield body, path, kind
    most = json.dumps({"messages": USER, "n": 64, "max_tokens": 900, "stream": True}).encode()
    for headers in (
        {"Content-Type": "text/plain"},
        kind | {"Origin": "https://evil.example"},
        kind | {"Origin": "null"},
        kind | {"Host": "evil.example"},
        kind | {"Host": "["},
    ):
        yield most, CHAT, headers


def bodies() -> Iterator[tuple[str, bytes]]:
    """Paths and bodies: numbers out of range, very many or very deep parts, long texts, odd names, nonsense."""

    def with_field(name: str, value: bytes) -> tuple[str, bytes]:
        return CHAT, ASK + f', "{name}": '.encode() + value + b"}"

    for name in ("top_k", "max_tokens", "max_completion_tokens", "n", "seed", "temperature", "top_p"):
        yield with_field(name, b"9" * 400)
    for temperature in (b"1e-40", b"5e-324", b"1e400", b"NaN"):
        yield with_field("temperature", temperature)
    for item in (b"{}", b"[]", b"[1]", b"[{}]", b'"a"', b"1", b"null", b"1e9"):
        for size in (1 << 19, MOST):
            items = b"[" + b",".join([item] * (size // (len(item) + 1) - 40)) + b"]"
            yield TEXTS, b'{"prompt": ' + items + b"}"
            for name in ("stop", "tools", "messages", "metadata", "logit_bias"):
                yield with_field(name, items)
    yield CHAT, ASK + b"," + b",".join(b'"k%d":0' % i for i in range(100_000)) + b"}"
    for depth in (150, 190, 60_000, 900_000):
        yield CHAT, b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
        parameters = (b'{"a":' * depth + b"1" + b"}" * depth)[:MOST]
        yield with_field("tools", b'[{"function": {"name": "f", "parameters": ' + parameters + b"}}]")
    for text in ("<|im_start|>", "x", "\\ud83e\\udd8a", "ab ", "\\u0000"):
        for size in (2_000, 14_000, 30_000, MOST):
            long = b'"' + (text * (size // len(text))).encode() + b'"'
            yield CHAT, b'{"messages": [{"role": "user", "content": ' + long + b'}], "max_tokens": 2}'
            yield TEXTS, b'{"prompt": ' + long + b', "max_tokens": 2}'
            yield with_field("model", long)
    yield CHAT, json.dumps({"messages": USER * 60_000}).encode()
    many = {"logprobs": True, "top_logprobs": 20}
    for fields in (
        *({"model": name} for name in ("../../etc/passwd", "/etc/passwd", "..", "", "x.pth", "\0")),
        *({"max_tokens": 900, "n": n} | many for n in (1, 16)),
        {"max_tokens": 900, "n": 128},
        {"stop": ["x" * 256] * 16},
        {"tools": [{"function": {"name": "x" * 9000}}] * 128},
        {"min_p": 0.5},
        {"logit_bias": {"1": 1}},
    ):
        yield CHAT, json.dumps({"messages": USER} | fields).encode()
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'):
        yield CHAT, body


def post(port: int, body: bytes, path: str, headers: dict[str, str], method: str = "POST") -> None:
    """Send a request and read its answer, as far as it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with suppress(OSError, http.client.HTTPException):
        connection.request(method, path, body, headers)
        connection.getresponse().read()
    connection.close()


def begin(port: int, path: str, headers: str, body: bytes) -> socket.socket:
    """Begin a request."""
    one = socket.create_connection(("127.0.0.1", port), timeout=30)
    with suppress(OSError):
        one.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode() + body)
    return one


def flood(port: int, headers: str, part: bytes) -> None:
    """Send a body of FLOOD bytes, for as long as the server takes it."""
    one = begin(port, CHAT, f"Content-Type: application/json\r\n{headers}", b"")
    with suppress(OSError):
        for _ in range(FLOOD // 65536):
            one.sendall(part)
    one.close()


def hang_up(port: int, after: float) -> None:
    """Ask for a long answer and go away."""
    body = json.dumps({"messages": USER, "stream": True, "max_tokens": 900}).encode()
    one = begin(port, CHAT, f"Content-Type: application/json\r\nContent-Length: {len(body)}", body)
    time.sleep(after)
    one.close()


def attack(shared_port: Any, seconds: float, connections: int, counter: Any) -> None:
    """Attack the server, once its port is in `shared_port`, until the time is over; runs in a process of its
    own, which leaves its connections open until it is ended."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    while not (port := shared_port.value):
        time.sleep(0.05)
    end, held = time.monotonic() + seconds, []
    unfinished: list[socket.socket] = []
    spaces, parts = b" " * 65536, b"10000\r\n" + b" " * 65536 + b"\r\n"
    others: list[Callable[[], None]] = [
        lambda: hang_up(port, 0),
        lambda: hang_up(port, 0.05),
        lambda: post(port, b"", "/v1/models", {}, "HEAD"),
        lambda: post(port, b"", "/v1/models/..%2f..%2fetc", {}, "GET"),
        lambda: begin(port, CHAT, "Content-Type: application/json\r\nContent-Length: 9000", b'{"a"').close(),
        lambda: begin(port, "/\0\xff " * 300, "", b"\0" * 5000).close(),
        lambda: flood(port, f"Content-Length: {FLOOD}", spaces),
        lambda: flood(port, "Transfer-Encoding: chunked", parts),
    ]
    known, order = list(attacks()), random.Random(0)
    for number in itertools.count():
        if time.monotonic() > end:
            break
        with suppress(OSError):  # the server has ended
            post(port, *order.choice(known))
            others[number % len(others)]()
            counter.value += 2
            if len(held) < connections:
                held += [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(20)]
            length = 1 << (8 + number % 13)
            unfinished.append(
                begin(port, CHAT, f"Content-Type: application/json\r\nContent-Length: {length}", b'{"a')
            )
            unfinished[-1].sendall(b" " * (length // 2))
            if len(unfinished) > UNFINISHED:
                unfinished.pop(0).close()
        time.sleep(PAUSE)
    time.sleep(3600)


# --- the honest clients


@dataclass
class Seen:
    """What honest clients have seen."""

    texts: dict[int, str] = field(default_factory=dict)  # by number of the prompt, of the quiet server
    first: list[float] = field(default_factory=list)  # seconds to the first token
    answers: int = 0
    wrong: list[str] = field(default_factory=list)


def stream(port: int, number: int) -> tuple[str, float, str | None]:
    """Text, seconds to the first token and finish reason of a streamed answer."""
    words = SENTENCE.split()
    text = " ".join(words[(number + i) % len(words)] for i in range(5 + number % 12))
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "seed": number, "max_tokens": 64}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    start, first, text, finish = time.perf_counter(), 0.0, "", None
    try:
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:]).get("choices") or [{}]
                new = choice.get("delta", {}).get("content") or ""
                first = first or (time.perf_counter() - start if new else 0.0)
                text, finish = text + new, choice.get("finish_reason") or finish
    except (OSError, http.client.HTTPException) as error:
        return text, first, repr(error)
    finally:
        connection.close()
    return text, first or time.perf_counter() - start, finish


def honest(port: int, streams: int, seconds: float, quiet: Seen | None = None) -> Seen:
    """Stream answers for some time, so many at once; compare them with those of the quiet server, if
    given."""
    seen, end = Seen(), time.monotonic() + seconds

    def client(number: int) -> None:
        while True:  # once at least
            text, first, finish = stream(port, number)
            seen.answers += 1
            seen.first.append(first)
            seen.texts.setdefault(number, text)
            if finish not in ("stop", "length") or text != (quiet or seen).texts[number]:
                seen.wrong.append(f"stream {number} ended with {finish}: {text[-60:]!r}")
            if time.monotonic() > end:
                return

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(client, range(streams)))
    return seen


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the server, the honest clients and the hostile one; returns what was seen. Raises UserError if the
    server does not start."""
    spawn, memory = multiprocessing.get_context("spawn"), []
    shared_port, counter = spawn.Value("l", 0), spawn.Value("l", 0)
    hostile = spawn.Process(
        target=attack, args=(shared_port, args.seconds, CONNECTIONS, counter), daemon=True
    )
    hostile.start()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        with server(args, log) as (port, process), ThreadPoolExecutor(1) as pool:
            honest(port, STREAMS, 0)  # warm
            quiet = honest(port, STREAMS, args.seconds / 4)
            shared_port.value = port
            attacked = pool.submit(honest, port, STREAMS, args.seconds, quiet)
            while not attacked.done():
                memory.append(psutil.Process(process.pid).memory_info().rss / 2**20)
                time.sleep(0.2)
            seen = attacked.result()
            start = time.monotonic()
            process.terminate()
            status = process.wait(60)
            ending = time.monotonic() - start
        hostile.terminate()
        log.seek(0)
        written = log.read()
    third = max(1, len(memory) // 3)
    return {
        "answers": seen.answers,
        "attacks": counter.value,
        "wrong": quiet.wrong + seen.wrong,
        "first_token": [statistics.median(one.first) for one in (quiet, seen)],
        "worst_first_token": max(seen.first),
        "memory_mb": [max(memory[:third]), max(memory[-third:])],
        "exit_status": status,
        "seconds_to_end": ending,
        "log": written,
    }


def main() -> None:
    """Measure, print and judge."""
    args = parse_args()
    seen = measure(args)
    (quiet, attacked), (early, late) = seen["first_token"], seen["memory_mb"]
    worst = seen["worst_first_token"] * 1000
    counts = f"{seen['attacks']} hostile requests, {seen['answers']} honest answers"
    say(f"{counts}, {len(seen['wrong'])} of them wrong")
    times = f"{quiet * 1000:.0f} ms quiet, {attacked * 1000:.0f} ms attacked, at worst {worst:.0f} ms"
    say(f"first token: {times}")
    say(f"memory: at most {early:.0f} MB in the first third, {late:.0f} MB in the last")
    say(f"SIGTERM: exit status {seen['exit_status']} after {seen['seconds_to_end']:.1f} s")
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
