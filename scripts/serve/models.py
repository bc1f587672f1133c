"""The models that a server offers: one that is loaded from the start, and the weights of a folder, loaded on
demand."""

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.errors import printable, reason, warn
from common.settings import ROOT
from model.sampling import default_sampling
from scripts.serve.finite import FiniteDecoder
from scripts.serve.logprobs import TokenTexts
from scripts.serve.prompt_writer import PromptWriter
from scripts.serve.protocol import ApiError
from scripts.serve.scheduler import Scheduler
from trainer.run.paths import shape_in_name

T = TypeVar("T")

# What MiniMind's clients and its README call the model: whatever the server has, unless a file has this name.
ANY_MODEL = re.compile(r"(.*/)?minimind[\w.-]*(:latest)?|model-identifier", re.IGNORECASE)


@dataclass(frozen=True)
class Settings:
    """How to serve. context: tokens of a prompt with its answer; slots: answers that are written at once."""

    name: str = "minimind"
    slots: int = 64
    context: int = 2048
    max_new_tokens: int = 1024  # the longest answer, and that of a chat that sets no limit
    max_queue: int = 256  # requests that may wait
    api_key: str | None = None
    hosts: tuple[str, ...] = ("*",)  # names by which requests may call the server; "*": any
    origins: tuple[str, ...] = ()  # other web pages that may use the API; "*": all
    save_dir: str | Path = ROOT / "out"  # whose training curves are shown, and whose models can be asked for
    path: Path | None = None  # of the model that is loaded from the start
    # model and tokenizer of a weights file; None: no other model
    load: Callable[[Path], tuple[Any, Any]] | None = None
    max_models: int = 4  # loaded at once


class ServedModel:
    """A model that answers requests under a name; by default that of the settings."""

    def __init__(self, model: Any, tokenizer: Any, settings: Settings, name: str | None = None):
        from model.decoding import join_layers  # brings in the compiler

        self.name, self.settings, self.created = name or settings.name, settings, int(time.time())
        self.sampling = default_sampling(model)
        self.users = 0  # requests not yet queued
        self.prompts, self.texts = PromptWriter(tokenizer, settings.context), TokenTexts(tokenizer)
        join_layers(model)
        self.decoder = FiniteDecoder(model, settings.slots, settings.context, end_tokens(model, tokenizer))
        self.scheduler = Scheduler(self.decoder, tokenizer, settings.max_queue)

    @property
    def busy(self) -> bool:
        """Whether it may not be dropped."""
        return self.users > 0 or self.scheduler.busy


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer: those of the model's config and the tokenizer's own."""
    configured = model.config.eos_token_id
    tokens = configured if isinstance(configured, list) else [configured]
    return {token for token in [*tokens, tokenizer.eos_token_id] if token is not None}


def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """The result of work in a thread that ends with it. The threads among which torch divides an operator
    belong to the thread that called it; while those of another thread live, libgomp counts more threads than
    cores and lets all of
    them sleep between two operators: decoding took twice the time."""
    found: Future[T] = Future()

    def call() -> None:
        try:
            found.set_result(work(*args))
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=call, daemon=True)  # Ctrl-C does not wait for it
    thread.start()
    thread.join()
    return found.result()


def unknown(name: str) -> ApiError:
    """There is no model of this name."""
    message = f"The model '{printable(name[:100])}' does not exist; GET /v1/models lists those that do."
    return ApiError(message, status=404, param="model", code="model_not_found")


class Models:
    """The models by name. At most `settings.max_models` are loaded: the first one always, and of the others
    the least recently used idle one makes room."""

    def __init__(self, first: ServedModel, settings: Settings):
        self.first, self.settings = first, settings
        self.loaded = {first.name: first}  # least recently used first
        self.loading = asyncio.Lock()
        self.coming: Counter[str] = Counter()  # requests that wait for a model to be loaded

    def files(self) -> dict[str, Path]:
        """Name -> weights file of what --save_dir offers besides the first model, newest first; never outside
        the folder, whatever a link says."""
        if self.settings.load is None or self.settings.max_models < 2:
            return {}
        root, first = (
            Path(self.settings.save_dir).resolve(),
            self.settings.path and self.settings.path.resolve(),
        )
        ages = {}
        for path in root.glob("*.pth"):
            try:
                if (
                    shape_in_name(path)
                    and path.stem.isprintable()
                    and path.resolve().parent == root
                    and path.is_file()
                ):
                    ages[path] = path.stat().st_mtime
            except (OSError, RuntimeError):  # removed this moment; a link that leads to itself
                continue
        paths = sorted(ages, key=lambda path: (-ages[path], path.name))
        return {path.stem: path for path in paths if path != first and path.stem != self.first.name}

    async def cards(self) -> list[dict[str, Any]]:
        """What /v1/models says of each; the first one is what requests without a name get."""
        files = await asyncio.to_thread(self.files)
        return [self._card(name) for name in dict.fromkeys([self.first.name, *files, *self.loaded])]

    async def card(self, name: str) -> dict[str, Any]:
        """What /v1/models/NAME says. Raises ApiError if there is no such model."""
        for card in await self.cards():
            if card["id"] == name:
                return card
        raise unknown(name)

    def _card(self, name: str) -> dict[str, Any]:
        served = self.loaded.get(name)
        card = {"id": name, "object": "model", "created": self.first.created, "owned_by": "minimind"}
        card |= {"max_model_len": self.settings.context, "loaded": served is not None}
        if served is not None:
            sampling = {name: getattr(served.sampling, name) for name in ("temperature", "top_p", "top_k")}
            card |= {"created": served.created, "sampling": sampling}
        return card

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """The model of this name (None or ANY_MODEL: the first), loaded if need be; it stays loaded
        meanwhile, and as long as answers of it are written. Raises ApiError if there is no such model, it
        cannot be loaded, or all others are busy."""
        name = self.first.name if name is None else name
        served = self.loaded.get(name) or await self._load(name)
        self.loaded[served.name] = self.loaded.pop(served.name)  # the last one used stands last
        served.users += 1
        try:
            yield served
        finally:
            served.users -= 1

    async def _load(self, name: str) -> ServedModel:
        path = (await asyncio.to_thread(self.files)).get(name)
        if path is None and ANY_MODEL.fullmatch(name):
            return self.first
        if path is None:
            raise unknown(name)
        before = {other for other in self.coming if other != name}
        self._replaced(len(before))  # one that will find no room does not wait for those
        self.coming[name] += 1
        try:
            async with self.loading:  # one at a time
                if name not in self.loaded:
                    await self._read(name, path)
                return self.loaded[name]
        finally:
            self.coming[name] -= 1
            self.coming = +self.coming  # without those that nobody waits for

    async def _read(self, name: str, path: Path) -> None:
        """Load a model in the place of another one, if need be. Raises ApiError."""
        self._replaced()  # one that cannot be loaded now is not read
        try:
            assert self.settings.load is not None
            parts = await asyncio.to_thread(in_own_thread, self.settings.load, path)
            if replaced := self._replaced():
                del self.loaded[replaced.name]
                await asyncio.to_thread(replaced.scheduler.close)
            self.loaded[name] = await asyncio.to_thread(
                in_own_thread, ServedModel, *parts, self.settings, name
            )
        except ApiError:
            raise
        except Exception as error:
            warn(f"the model {name} cannot be loaded: {reason(error)}")
            message = f"The model '{name}' cannot be loaded; the server's log says why."
            raise ApiError(message, 500, "server_error", "model", "model_not_loadable") from error

    def _replaced(self, before: int = 0) -> ServedModel | None:
        """The model that makes room for another one when so many were loaded before it, None if there is
        room. Raises ApiError if all are busy."""
        needed = len(self.loaded) + before + 1 - self.settings.max_models
        if needed <= 0:
            return None
        idle = [served for served in self.loaded.values() if served is not self.first and not served.busy]
        if len(idle) < needed:
            message = (
                f"{self.settings.max_models} models are loaded and all of them are busy; try again later."
            )
            raise ApiError(message, 503, "server_error", "model", "models_busy")
        return idle[0]

    def health(self) -> dict[str, Any]:
        """Whether they answer, and how many answers are being written and how many requests wait."""
        schedulers = [served.scheduler for served in self.loaded.values()]
        return {
            "alive": all(scheduler.alive for scheduler in schedulers),
            "writing": sum(len(scheduler.writing) for scheduler in schedulers),
            "waiting": sum(len(scheduler.waiting) for scheduler in schedulers),
            "slots": self.settings.slots,
        }

    @property
    def busy(self) -> bool:
        """Whether any request is being answered or waits, also for its model."""
        return self.loading.locked() or any(served.busy for served in self.loaded.values())

    def close(self) -> None:
        """End all decoding threads."""
        for served in self.loaded.values():
            served.scheduler.close()
