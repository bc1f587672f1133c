"""The models that a server offers: one that is loaded from the start, and the weights of a folder, loaded on
demand."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.errors import printable, reason, warn
from common.settings import ROOT
from model.generation import Decoder
from model.sampling import default_sampling
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
        self.name, self.settings, self.created = name or settings.name, settings, int(time.time())
        self.sampling = default_sampling(model)
        self.users = 0  # requests not yet queued
        self.prompts, self.texts = PromptWriter(tokenizer, settings.context), TokenTexts(tokenizer)
        self.decoder = Decoder(model, settings.slots, settings.context, [tokenizer.eos_token_id])
        self.scheduler = Scheduler(self.decoder, tokenizer, settings.max_queue)

    @property
    def busy(self) -> bool:
        """Whether it may not be dropped."""
        return self.users > 0 or self.scheduler.busy


def in_own_thread(work: Callable[..., T], *args: Any) -> T:
    """The result of work in a thread that ends with it. The threads among which torch divides an operator
    belong to the thread that called it; while those of another thread live, libgomp counts more threads than
    cores and lets all of them sleep between two operators: decoding took twice the time."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *args).result()


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

    def files(self) -> dict[str, Path]:
        """Name -> weights file of what --save_dir offers besides the first model, newest first; never outside
        the folder, whatever a link says."""
        if self.settings.load is None or self.settings.max_models < 2:
            return {}
        root = Path(self.settings.save_dir).resolve()
        ages = {}
        for path in root.glob("*.pth"):
            is_name = shape_in_name(path) and path.stem.isprintable() and path.stem != self.first.name
            with suppress(OSError, RuntimeError):  # removed this moment; a link that leads to itself
                if is_name and path.resolve().parent == root and path.is_file():
                    ages[path] = path.stat().st_mtime
        if self.settings.path is not None:
            ages.pop(self.settings.path.resolve(), None)
        paths = sorted(ages, key=lambda path: (-ages[path], path.name))
        return {path.stem: path for path in paths}

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
        if path is None:
            if ANY_MODEL.fullmatch(name):
                return self.first
            raise unknown(name)
        async with self.loading:  # one at a time
            if name not in self.loaded:
                await self._read(name, path)
            return self.loaded[name]

    async def _read(self, name: str, path: Path) -> None:
        """Load a model, and drop another one if there is no room. Raises ApiError."""
        assert self.settings.load is not None
        self._models_to_drop()  # refuse before the time is spent
        try:
            model, tokenizer = await asyncio.to_thread(in_own_thread, self.settings.load, path)
            for dropped in self._models_to_drop():
                del self.loaded[dropped.name]
                await asyncio.to_thread(dropped.scheduler.close)
            served = await asyncio.to_thread(
                in_own_thread, ServedModel, model, tokenizer, self.settings, name
            )
        except ApiError:
            raise
        except Exception as error:
            warn(f"the model {name} cannot be loaded: {reason(error)}")
            message = f"The model '{name}' cannot be loaded; the server's log says why."
            raise ApiError(message, 500, "server_error", "model", "model_not_loadable") from error
        self.loaded[name] = served

    def _models_to_drop(self) -> list[ServedModel]:
        """The loaded models that make room for a new one. Raises ApiError if all are busy."""
        count = max(0, len(self.loaded) + 1 - self.settings.max_models)
        idle = [served for served in self.loaded.values() if served is not self.first and not served.busy]
        if len(idle) < count:
            message = (
                f"{self.settings.max_models} models are loaded and all of them are busy; try again later."
            )
            raise ApiError(message, 503, "server_error", "model", "models_busy")
        return idle[:count]

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
