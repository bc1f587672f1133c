"""Serve trained models with OpenAI's API (chat, completions, tools, streaming), many requests at once.

python scripts/serve_openai_api.py                                   all weights in out/ and in its folders
python scripts/serve_openai_api.py --save_dir out/demo               those of the quickstart
python scripts/serve_openai_api.py --model out/full_sft_512.pth --port 8080 --api_key secret

Then point any OpenAI client at http://127.0.0.1:8000/v1, or a browser at http://127.0.0.1:8000.
"""

import argparse
import gc
import importlib.util
import ipaddress
import os
import re
import secrets
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors
from common.errors import UserError, log, printable, reason, say
from common.hub import make_local, shown_name
from scripts.serve.decoding import DecodingThread
from scripts.serve.jobs import Jobs
from scripts.serve.models import Models
from trainer.devices.device import prepare_device, select_device
from trainer.weights.for_tools import (
    WEIGHT,
    add_trained_model_flags,
    given_shape,
    load_model,
    load_path,
    model_path,
)
from trainer.weights.paths import weight_files

# environment variable: the command line is there for every user of the machine to see
KEY = "MINIMIND_API_KEY"
OWN_NAMES = ("localhost", "*.localhost", "127.0.0.1", "[::1]")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    flag = parser.add_argument
    add_trained_model_flags(parser)
    flag("--model_name", help="name of the model for clients; by default that of its file or folder")
    text = "address to listen at; 0.0.0.0: all of this machine, with a key only"
    flag("--host", default="127.0.0.1", help=text)
    flag("--port", type=int, default=8000, help="port to listen at; 0: any free one")
    text = f"answer only clients that send this key; by default that in the environment as {KEY}"
    flag("--api_key", help=text)
    text = "origins of other web pages that may use the API, such as http://localhost:3000"
    flag("--allow_origin", nargs="+", default=[], help=text)
    text = "host names by which it may be called without a key, such as host.docker.internal"
    flag("--allow_host", nargs="+", default=[], help=text)
    text = "addresses of a reverse proxy, such as 127.0.0.1, whose X-Forwarded-For says who a client is"
    flag("--proxy", nargs="+", default=[], help=text)
    flag("--slots", type=int, default=64, help="answers that are generated at once")
    text = "longest prompt together with its answer, in tokens"
    flag("--context", "--max_seq_len", type=int, default=2048, help=text)
    text = "longest answer, in tokens (default: 1024, at most half of --context)"
    flag("--max_new_tokens", type=int, help=text)
    text = "models of --save_dir that are loaded at once, on demand; 1: only the given one, if any"
    flag("--max_models", type=int, default=4, help=text)
    text = "1: the web page may train, on files that are given to it; for 127.0.0.1 only, with a key"
    flag("--train", type=int, choices=(0, 1), default=0, help=text)
    args = parser.parse_args()
    args.api_key = args.api_key or os.environ.get(KEY) or None
    if args.max_new_tokens is None:
        args.max_new_tokens = min(1024, max(1, args.context // 2))
    for name in ("slots", "context", "max_new_tokens", "max_models"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port must be between 0 and 65535, not {args.port}")
    check_access(args)
    if args.max_new_tokens >= args.context:
        raise UserError(f"--max_new_tokens {args.max_new_tokens} must be below --context {args.context}")
    return args


def check_access(args: argparse.Namespace) -> None:
    """Raise UserError if no client could send the key, or no browser could send the origin."""
    key = args.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UserError(
            "--api_key must be printable ASCII without a space at either end, to fit into a header"
        )
    for origin in args.allow_origin:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@*\s]+", origin):
            message = "must be * or scheme://host[:port] in lower case, without a path or a star inside"
            raise UserError(f"--allow_origin {origin} {message}")
    for proxy in args.proxy:
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError as error:
            message = "must be an address or a network, such as 127.0.0.1 or 10.0.0.0/8"
            raise UserError(f"--proxy {proxy} {message}") from error
    for host in args.allow_host:
        if not re.fullmatch(r"\*|(\*\.)?[\w.-]+|\[[0-9a-f:.]+\]", host):
            raise UserError(f"--allow_host {host} must be only a host name or an address, without a port")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address. It is opened first, so a second server for the same address fails
    before it loads a model. Raises UserError if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        message = f"--host {host} --port {port}: {reason(error)}; give another address or port"
        raise UserError(message) from error
    return listener


def offered_models(args: argparse.Namespace, jobs: Jobs | None = None) -> Models:
    """The models that the server offers. jobs: trainings; while one runs, models are loaded on the CPU.
    Raises UserError if a given model does not exist."""
    make_local(args)
    given, device = given_model(args), select_device(args.device)

    def load(path: Path) -> tuple[Any, Any]:
        """Model and tokenizer; called in the decoding thread."""
        prepare_device(device)  # makes it this thread's current one; by itself a thread has cuda:0
        place = device if jobs is None or jobs.living() is None else select_device("cpu")
        if path == given:
            model, tokenizer = load_model(args, place)
        else:
            scaling = bool(args.inference_rope_scaling)
            model, tokenizer = load_path(path, args.tokenizer_path, place, scaling)
        longest = model.config.max_position_embeddings
        if args.context > longest:
            raise UserError(f"--context {args.context} is more than the {longest} positions of this model")
        return model, tokenizer

    others = Path(args.save_dir) if args.max_models > 1 or given is None else None
    name = None if given is None else args.model_name or shown_name(given)
    flags = ["--tokenizer_path", args.tokenizer_path] if args.tokenizer_path else []
    flags += ["--inference_rope_scaling", str(args.inference_rope_scaling)]
    return Models(name, given, load, others, [Path(args.lora)] if args.lora else [], flags)


def given_model(args: argparse.Namespace) -> Path | None:
    """The model that the command line names, or the default weights in --save_dir. None if no model is named
    and there is not exactly one default. Raises UserError if the named model does not exist."""
    is_named = args.model or args.weight or args.lora or args.model_name or given_shape(args)
    if is_named or len(weight_files(args.save_dir, WEIGHT)) == 1:
        return model_path(args)
    return None


def main() -> None:
    """Load the model and serve it."""
    args = parse_args()
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{' and '.join(missing)} missing: pip install -r requirements-serve.txt")
    from scripts.serve.api import Access, create_app
    from scripts.serve.connections import run
    from scripts.serve.sending import sending_routes
    from scripts.serve.training import training_routes
    from scripts.serve.uploads import Uploads

    # 1. the address
    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    is_local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    if not is_local and (args.train or not args.api_key):
        listener.close()
        if args.train:
            raise UserError(
                f"--train 1 is for 127.0.0.1 only; from elsewhere: ssh -L {port}:127.0.0.1:{port} HOST, then "
                f"open http://127.0.0.1:{port}"
            )
        raise UserError(f"everyone who reaches {host} could use this server; give it an --api_key")

    # 2. who may use it; a page whose name is made to point here would be taken for the own one
    shown_host = f"[{host}]" if ":" in host else host
    is_any_name = args.api_key and not args.train
    hosts = ("*",) if is_any_name else (*OWN_NAMES, shown_host, *map(str.lower, args.allow_host))
    codes = set[str]()
    if args.train:
        codes.add(code := secrets.token_urlsafe(16))
        say(f"train and chat at http://{shown_host}:{port}/#code={code}, a link that opens once")
    if args.train and not args.api_key:
        args.api_key = secrets.token_urlsafe(16)
        say(f"the key, for another browser and for other programs: {args.api_key}")
    access = Access(args.api_key, hosts, tuple(args.allow_origin), codes)

    # 3. the models, and the thread that decodes
    save_dir = Path(args.save_dir)
    jobs = Jobs(save_dir) if args.train else None
    models = offered_models(args, jobs)
    limits = args.slots, args.context, args.max_new_tokens, args.max_models
    with closing(DecodingThread(models, *limits)) as decoding:
        # 4. the routes
        more = [sending_routes(models)]
        if jobs is not None:
            more.append(training_routes(jobs, Uploads(save_dir), models, decoding.drop_idle_models))
        app = create_app(decoding, save_dir, access, more, trains=jobs is not None)
        gc.freeze()  # a collection over all that torch holds stops every thread for a fifth of a second

        # 5. serve
        what = models.name or f"the weights in {args.save_dir} and in its folders"
        say(f"serving {what} at http://{shown_host}:{port}; Ctrl-C ends it")
        run(app, listener, decoding, args.proxy)
    if failure := decoding.failure():
        log.error(printable(f"error: the decoding thread has ended ({failure}); start the server again"))
        sys.exit(1)


if __name__ == "__main__":
    with one_line_errors():
        main()
