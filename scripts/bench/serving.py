"""Speed of serving: requests at once against one after another, and the first token of one more while others run.

python scripts/bench/serving.py --weight full_sft --requests 16 64
python scripts/bench/serving.py --weight full_sft --peer_url http://127.0.0.1:8001 --peer_model out/full_sft_512_hf

The server runs in a process of its own, and all requests go over HTTP. The ways alternate, round by round, and each
ratio is the median of those of the rounds, so that other work on the machine weighs on all of them alike. The peer is
any other server with OpenAI's API that runs already, such as `transformers serve`.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run the code beside this file, installed or not

from common.command_line import Parser, one_line_errors
from common.errors import UserError, say
from common.settings import ROOT
from trainer.components.trained_weights import add_trained_model_flags

TEXT = "the harbour lies at the mouth of a slow brown river and boats leave it before the sun is up"


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    add_trained_model_flags(parser)
    flag("--requests", type=int, nargs="+", default=[16, 64], help="how many requests at once")
    flag("--tokens", type=int, default=64, help="tokens of each answer")
    flag("--words", type=int, default=20, help="words of each prompt, more or less")
    flag("--repeat", type=int, default=3, help="rounds")
    flag("--peer_url", help="address of another server, measured with the same requests")
    flag("--peer_model", default="", help="name of its model")
    flag("--report", help="JSON file to write")
    return parser.parse_args()


class Client:
    """Asks one server."""

    def __init__(self, url: str, model: str | None, tokens: int, words: int):
        self.address, self.model, self.tokens, self.words = urlsplit(url).netloc, model, tokens, words

    def ask(self, number: int, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request; its prompt depends on its number."""
        count = self.words // 2 + number * 7 % (self.words + 1)
        words = TEXT.split()
        text = " ".join(words[(number + i) % len(words)] for i in range(count))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": self.tokens, "temperature": 0}
        body |= ({"model": self.model} if self.model else {}) | fields
        connection = http.client.HTTPConnection(self.address, timeout=600)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise UserError(f"{self.address} answers {response.status}: {response.read(300).decode()}")
        return connection, response

    def whole(self, number: int) -> int:
        """Tokens of one answer."""
        connection, response = self.ask(number)
        answer = json.loads(response.read())
        connection.close()
        return answer["usage"]["completion_tokens"]

    def first_token(self, number: int) -> float:
        """Seconds to the first text of a streamed answer, whose rest is not waited for."""
        start = time.perf_counter()
        connection, response = self.ask(number, stream=True)
        while '"content":"' not in (line := response.readline().decode().replace(": ", ":")) or '"content":""' in line:
            if not line:
                raise UserError(f"{self.address} streams no text")
        seconds = time.perf_counter() - start
        connection.close()
        return seconds

    def rate(self, requests: int, at_once: int) -> float:
        """Tokens per second of so many requests."""
        start = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            tokens = sum(pool.map(self.whole, range(requests)))
        return tokens / (time.perf_counter() - start)

    def first_among(self, others: int) -> float:
        """Seconds to the first token of a request that comes while others are answered."""
        with ThreadPoolExecutor(others + 1) as pool:
            running = [pool.submit(self.whole, number) for number in range(others)]
            time.sleep(0.3)
            seconds = self.first_token(others)
            for one in running:
                one.result()
        return seconds


@contextmanager
def server(args: argparse.Namespace, stderr: IO[str] | None = None) -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of our server and its process, which is ended by SIGTERM. stderr: where it writes; None: as here.

    Raises:
        UserError: it does not start.
    """
    flags = [f"--{name}" for name in ("model", "weight", "save_dir", "tokenizer_path", "device") if getattr(args, name)]
    given = [word for flag in flags for word in (flag, str(getattr(args, flag[2:])))]
    command = [sys.executable, str(ROOT / "scripts/serve_openai_api.py"), "--port", "0", *given]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None
    try:
        url = next((line.split()[3].rstrip(";") for line in process.stdout if line.startswith("serving ")), None)
        if url is None:
            raise UserError("the server does not start; see above")
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def measure(ways: dict[str, Callable[[], float]], repeat: int) -> dict[str, list[float]]:
    """What each way gives in each round; the ways take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            found[name].append(way())
    return found


def main() -> None:
    """Measure and print."""
    args = parse_args()
    if min(*args.requests, args.tokens, args.words, args.repeat) < 1:
        raise UserError("--requests, --tokens, --words and --repeat must be at least 1")
    most = max(args.requests)
    with server(args) as (url, _):
        ours = Client(url, None, args.tokens, args.words)
        ways: dict[str, Callable[[], float]] = {"1": lambda: ours.rate(16, 1)}
        ways |= {str(n): lambda n=n: ours.rate(max(n, 16), n) for n in args.requests}
        ways |= {"first token, idle": lambda: ours.first_token(0)}
        ways |= {f"first token, {args.requests[0]} run": lambda: ours.first_among(args.requests[0])}
        if args.peer_url:
            peer = Client(args.peer_url, args.peer_model, args.tokens, args.words)
            ways |= {"peer, 1": lambda: peer.rate(4, 1)}
            ways |= {f"peer, {n}": lambda n=n: peer.rate(n, n) for n in args.requests}
            peer.rate(1, 1)
        ours.rate(most, most)  # warm
        found = measure(ways, args.repeat)
    for name, values in found.items():
        if name.startswith("first"):
            say(f"{name}: {statistics.median(values) * 1000:.0f} ms")
            continue
        ratio = statistics.median(value / one for value, one in zip(values, found["1"], strict=True))
        say(f"{name} at once: {statistics.median(values):.0f} tokens/s, {ratio:.2f} times one after another")
    if args.report:
        Path(args.report).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with one_line_errors():
        main()
