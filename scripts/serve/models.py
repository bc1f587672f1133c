"""The models that a server offers: one that is loaded from the start, and the weights of a folder, loaded on demand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from common.errors import reason, warn
from scripts.serve.protocol import ApiError
from scripts.serve.served import ServedModel, Settings
from trainer.components.run_files import shape_in_name

NAMED = 20  # names that an error message lists


def weights_in(folder: str | Path) -> dict[str, Path]:
    """Name -> weights file of the models in a folder, newest first; never outside it, whatever a link says."""
    root, ages = Path(folder).resolve(), {}
    for path in root.glob("*.pth"):
        try:
            if shape_in_name(path) and path.stem.isprintable() and path.resolve().parent == root and path.is_file():
                ages[path] = path.stat().st_mtime
        except OSError:  # removed this moment
            continue
    return {path.stem: path for path in sorted(ages, key=lambda path: (-ages[path], path.name))}


class Models:
    """The models by name. At most `settings.max_models` are loaded: the first one always, and of the others the least
    recently used idle one makes room."""

    def __init__(self, first: ServedModel, settings: Settings):
        self.first, self.settings = first, settings
        self.loaded = {first.name: first}  # least recently used first
        self.loading = asyncio.Lock()

    def files(self) -> dict[str, Path]:
        """Name -> file of what can be loaded besides the first model."""
        if self.settings.load is None or self.settings.max_models < 2:
            return {}
        first = self.settings.path and Path(self.settings.path).resolve()
        files = weights_in(self.settings.save_dir)
        return {name: path for name, path in files.items() if path != first and name != self.first.name}

    async def cards(self) -> list[dict[str, Any]]:
        """What /v1/models says of each; the first one is what requests without a name get."""
        files = await asyncio.to_thread(self.files)
        names = [self.first.name, *files, *(name for name in self.loaded if name not in files)]
        return [self._card(name) for name in dict.fromkeys(names)]

    async def card(self, name: str) -> dict[str, Any]:
        """What /v1/models/NAME says.

        Raises:
            ApiError: there is no such model.
        """
        if name not in self.loaded and name not in await asyncio.to_thread(self.files):
            raise await self._unknown(name)
        return self._card(name)

    def _card(self, name: str) -> dict[str, Any]:
        if served := self.loaded.get(name):
            return served.card() | {"loaded": True}
        card = {key: value for key, value in self.first.card().items() if key != "sampling"}  # not known yet
        return card | {"id": name, "loaded": False}

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """The model of this name (None: the first), loaded if need be; it stays loaded meanwhile, and as long as
        answers of it are written.

        Raises:
            ApiError: there is no such model, it cannot be loaded, or all others are busy.
        """
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
            raise await self._unknown(name)
        async with self.loading:  # one at a time
            if name in self.loaded:
                return self.loaded[name]
            self._replaced()  # one that cannot be loaded now is not read
            try:
                assert self.settings.load is not None
                parts = await asyncio.to_thread(self.settings.load, path)
                if replaced := self._replaced():
                    del self.loaded[replaced.name]
                    await asyncio.to_thread(replaced.scheduler.close)
                self.loaded[name] = await asyncio.to_thread(ServedModel, *parts, self.settings, name)
            except ApiError:
                raise
            except Exception as error:
                warn(f"the model {name} cannot be loaded: {reason(error)}")
                message = f"The model '{name}' cannot be loaded; the server's log says why."
                raise ApiError(message, 500, "server_error", "model", "model_not_loadable") from error
            return self.loaded[name]

    def _replaced(self) -> ServedModel | None:
        """The model that makes room for another one, None if there is room.

        Raises:
            ApiError: all are busy.
        """
        if len(self.loaded) < self.settings.max_models:
            return None
        idle = (served for served in self.loaded.values() if served is not self.first and not served.busy)
        oldest = next(idle, None)
        if oldest is None:
            message = f"{len(self.loaded)} models are loaded and all of them are busy; try again later."
            raise ApiError(message, 503, "server_error", "model", "models_busy")
        return oldest

    async def _unknown(self, name: str) -> ApiError:
        names = [self.first.name, *await asyncio.to_thread(self.files)]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        message = f"The model '{name[:100]}' does not exist; there are: {', '.join(names[:NAMED])}{more}."
        return ApiError(message, status=404, param="model", code="model_not_found")

    def health(self) -> dict[str, Any]:
        """How busy they are."""
        counts = [served.health() for served in self.loaded.values()]
        total = {name: sum(count[name] for count in counts) for name in ("writing", "waiting")}
        return {"alive": all(count["alive"] for count in counts), **total, "slots": self.settings.slots}

    @property
    def busy(self) -> bool:
        """Whether any request is being answered or waits, also for its model."""
        return self.loading.locked() or any(served.busy for served in self.loaded.values())

    def close(self) -> None:
        """End all decoding threads."""
        for served in self.loaded.values():
            served.scheduler.close()
