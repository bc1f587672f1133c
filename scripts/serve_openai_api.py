"""Serve a trained model with OpenAI's API: chat, completions, tools, streaming; requests are decoded
together.

python scripts/serve_openai_api.py --weight full_sft
python scripts/serve_openai_api.py --model out/full_sft_512.pth --port 8080 --api_key secret

Then point any OpenAI client at http://127.0.0.1:8000/v1, or a browser at http://127.0.0.1:8000.
"""

import argparse
import asyncio
import importlib.util
import ipaddress
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError, reason, say, warn
from common.hub import shown_name
from trainer.weights.for_tools import add_trained_model_flags, load_model, load_path, model_path

if TYPE_CHECKING:
    from fastapi import FastAPI

# environment variable: the command line is there for every user of the machine to see
KEY = "MINIMIND_API_KEY"
CLIENT_TIMEOUT = 60  # seconds that an answer may wait for its client to read on
IDLE = 60  # seconds that a connection lasts without a further request
OWN_NAMES = ("localhost", "*.localhost", "127.0.0.1", "[::1]")
GRACE = 3.0  # seconds that a connection has for the rest of its request or answer when the server ends


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    add_trained_model_flags(parser)
    flag("--model_name", help="name of the model for clients; by default that of its file or folder")
    flag("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all addresses of this machine")
    flag("--port", type=int, default=8000, help="port to listen at; 0: any that is free")
    text = f"answer only clients that send this key; by default that in the environment as {KEY}"
    flag("--api_key", help=text)
    text = "origins of other web pages that may use the API, such as http://localhost:3000"
    flag("--allow_origin", nargs="+", default=[], help=text)
    flag("--slots", type=int, default=64, help="answers that are written at once")
    text = "longest prompt together with its answer, in tokens"
    flag("--context", "--max_seq_len", type=int, default=2048, help=text)
    flag("--max_new_tokens", type=int, default=1024, help="longest answer, in tokens")
    flag("--max_queue", type=int, default=256, help="requests that may wait for a place; others are refused")
    text = "models of --save_dir that are loaded at once, on demand; 1: only the one given"
    flag("--max_models", type=int, default=4, help=text)
    args = parser.parse_args()
    args.api_key = args.api_key or os.environ.get(KEY) or None
    for origin in args.allow_origin:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
            raise UserError(f"--allow_origin {origin}: write an origin such as http://localhost:3000, or *")
    for name in ("slots", "context", "max_new_tokens", "max_queue", "max_models"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port must be between 0 and 65535, not {args.port}")
    if args.max_new_tokens >= args.context:
        raise UserError(f"--max_new_tokens {args.max_new_tokens} must be below --context {args.context}")
    return args


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UserError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # cut off clients that do not read; connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CLIENT_TIMEOUT * 1000)
        listener.bind(address)
    except OSError as error:
        raise UserError(
            f"--host {host} --port {port}: {reason(error)}; give another address or port"
        ) from error
    return listener


def is_local(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def run(app: "FastAPI", listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C, and then until every request is answered. A second signal ends it at
    once."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            if self.should_exit:
                os._exit(128 + sig)
            self.should_exit = True  # first: the next signal may come while the line is written
            say("finishing what is being answered; once more to end at once")

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            cutting = asyncio.create_task(self.cut_off())
            await super().shutdown(sockets)
            cutting.cancel()

        async def cut_off(self) -> None:
            """Cut the connections of clients that do not send the rest of their request, or do not read their
            answer, once nothing is being answered any more."""
            useful = time.monotonic()
            while time.monotonic() - useful < GRACE:
                if app.state.models.busy:
                    useful = time.monotonic()
                await asyncio.sleep(0.1)
            for connection in list(self.server_state.connections):
                connection.transport.abort()

    config = uvicorn.Config(app, http="h11", log_level="error", access_log=False, timeout_keep_alive=IDLE)
    server = Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    asyncio.run(server.serve(sockets=[listener]))


def main() -> None:
    """Load the model and serve it."""
    args = parse_args()
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing: pip install -r requirements-serve.txt")
    from scripts.serve.api import create_app
    from scripts.serve.models import Settings, in_own_thread

    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    if not is_local(host) and not args.api_key:
        warn(f"everyone who reaches {host} may use this server; give it an --api_key")
    path = model_path(args)
    model, tokenizer = in_own_thread(load_model, args)
    if args.context > model.config.max_position_embeddings:
        longest = model.config.max_position_embeddings
        raise UserError(
            f"--context {args.context} is more than this model's {longest} positions; give a smaller one"
        )
    hosts = ("*",)
    if is_local(host) and not args.api_key:
        # a page whose name is made to point here would be taken for the own one
        hosts = (*OWN_NAMES, host)

    def load(other: Path) -> tuple[Any, Any]:
        return load_path(other, args.tokenizer_path, model.device, bool(args.inference_rope_scaling))

    settings = Settings(
        name=args.model_name or shown_name(path),
        slots=args.slots,
        context=args.context,
        max_new_tokens=args.max_new_tokens,
        max_queue=args.max_queue,
        api_key=args.api_key,
        hosts=hosts,
        origins=tuple(args.allow_origin),
        save_dir=args.save_dir,
        path=path,
        load=load,
        max_models=args.max_models,
    )
    app = create_app(model, tokenizer, settings)
    listener.listen()  # a client that comes at once waits
    if ":" in host:
        host = f"[{host}]"
    say(f"serving {settings.name} at http://{host}:{port}; Ctrl-C ends it")
    run(app, listener)


if __name__ == "__main__":
    with one_line_errors():
        main()
