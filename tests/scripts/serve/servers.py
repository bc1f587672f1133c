"""Servers for the tests: a real uvicorn on a free port, over a tiny model or over answers that are written
down here."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import openai
import pytest
from transformers import AutoTokenizer

from model.generation import Answer, Decoder
from model.sampling import Sampling
from scripts.serve import decoding
from scripts.serve.api import Access, create_app
from scripts.serve.connections import make_server
from scripts.serve.decoding import DecodingThread
from scripts.serve.models import Models
from scripts.serve.sending import sending_routes
from tests.conftest import ROOT

# each call of httpx.get would load the certificates anew, which takes 20 ms
web = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0))
CONTEXT = 512
END = 2
QUESTION, END_OF_TURN = "<|im_start|>user\n", "<|im_end|>"


@contextmanager
def serving(
    models: Models,
    slots: int = 4,
    max_new_tokens: int = 400,
    max_models: int = 4,
    proxies: tuple[str, ...] = (),
    port: int = 0,
    **options: Any,
) -> Iterator[SimpleNamespace]:
    """A server: `client` of OpenAI, `port`, `address`, and its thread `decoding`. options: of `create_app`."""
    with closing(DecodingThread(models, slots, CONTEXT, max_new_tokens, max_models)) as thread:
        training = options.pop("more", [])
        more = [sending_routes(models), *training]
        save_dir = options.pop("save_dir", Path("nowhere"))
        app = create_app(thread, save_dir, more=more, trains=bool(training), **options)
        server = make_server(app, thread, proxies, port=port)
        running = threading.Thread(target=server.run, daemon=True)
        running.start()
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        address = f"http://127.0.0.1:{port}/"
        http = openai.DefaultHttpxClient(verify=False)  # to load certificates takes 20 ms
        with openai.OpenAI(
            base_url=f"{address}v1", api_key="key", max_retries=0, timeout=60, http_client=http
        ) as client:
            yield SimpleNamespace(
                client=client, port=port, address=address, decoding=thread, server=server, thread=running
            )
        server.should_exit = True
        running.join(20)
    assert not running.is_alive() and not thread.health()["alive"]


class Script:
    """What the scripted models say: `says` maps text that occurs behind the last question to the answer;
    others repeat the question. prompts: of all requests. pause: seconds of a step."""

    def __init__(self) -> None:
        self.says: dict[str, str] = {}
        self.prompts: list[str] = []
        self.pause = 0.0

    def answer(self, prompt: str) -> str:
        self.prompts.append(prompt)
        question = prompt.rpartition(QUESTION)[2]
        for part, said in reversed(self.says.items()):
            if part in question:
                return said
        return "You said: " + question.partition(END_OF_TURN)[0]


class ScriptedDecoder:
    """A decoder with the interface of the real one, over a Script."""

    def __init__(self, model: Any, slots: int, length: int, end_ids: list[int]):
        self.tokenizer, self.script = model.tokenizer, model.script
        self.slots, self.length = slots, length
        self.remaining: dict[Answer, list[int]] = {}  # tokens that are not written yet

    @property
    def free(self) -> int:
        return self.slots - len(self.remaining)

    def add(self, prompt: list[int], samplings: list[Sampling], max_new_tokens: int) -> list[Answer]:
        text = self.script.answer(self.tokenizer.decode(prompt))
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), END]
        answers = [Answer(sampling, max_new_tokens) for sampling in samplings]
        self.remaining |= {answer: list(tokens) for answer in answers}
        return self._write(answers)

    def step(self) -> list[Answer]:
        time.sleep(self.script.pause)
        return self._write(list(self.remaining))

    def remove(self, answer: Answer) -> None:
        self.remaining.pop(answer, None)

    def _write(self, answers: list[Answer]) -> list[Answer]:
        for answer in answers:
            answer.tokens.append(self.remaining[answer].pop(0))
            if answer.tokens[-1] == END:
                answer.finish = "stop"
            elif len(answer.tokens) == answer.max_new_tokens:
                answer.finish = "length"
            if answer.finish:
                self.remove(answer)
        return answers


def decoder_of(model: Any, *options: Any) -> Any:
    """The decoder of a scripted or a real model."""
    return (ScriptedDecoder if hasattr(model, "script") else Decoder)(model, *options)


def load_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "model")


@contextmanager
def scripted(
    script: Script, key: str | None = None, given: str | None = "tiny", **options: Any
) -> Iterator[SimpleNamespace]:
    """A server whose answers are those of a script. given: its model; None: only those of a folder."""
    tokenizer, save_dir = load_tokenizer(), options.get("save_dir")

    def load(path: Path) -> tuple[Any, Any]:
        sampling = Sampling(0.7 if path.stem == "tiny" else 0.2, 50, 0.9)
        model = SimpleNamespace(tokenizer=tokenizer, script=script, sampling=sampling)
        return model, tokenizer

    options.setdefault("access", Access(key))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "Decoder", decoder_of)
        path = None if given is None else Path(f"{given}.pth")
        with serving(Models(given, path, load, save_dir), **options) as server:
            yield server


def wait_for(condition: Any, seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.01)
    raise AssertionError("it does not happen")


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]
