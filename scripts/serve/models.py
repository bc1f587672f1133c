"""The models that a server offers by name: the one it was started with, and the weights of --save_dir."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import printable
from model.sampling import Sampling
from scripts.serve.protocol import ApiError
from trainer.weights.paths import shape_in_name

# what MiniMind's clients call the model: whatever the server has, unless a file has this name
ANY_MODEL = re.compile(r"(.*/)?minimind[\w.-]*(:latest)?|model-identifier", re.IGNORECASE)


class Models:
    """Names and files of the models.

    name, path: of the first model, which requests without a name get. load: gives model and tokenizer of a
    path. save_dir: whose other weights are offered, too; None: only the first model.
    """

    def __init__(
        self, name: str, path: Path, load: Callable[[Path], tuple[Any, Any]], save_dir: Path | None = None
    ):
        self.name, self.path, self.load, self.save_dir = name, path, load, save_dir
        self.known = self.paths()  # looked up again when a name is missing: files take long beside decoding

    def paths(self) -> dict[str, Path]:
        """Name -> file: the first model, then the weights of the folder, the newest first."""
        ages: dict[Path, float] = {}
        files = [] if self.save_dir is None else list(self.save_dir.glob("*.pth"))
        for path in files:
            with suppress(OSError):  # removed this moment
                if shape_in_name(path) and path.resolve() != self.path.resolve():
                    ages[path] = path.stat().st_mtime
        newest_first = sorted(ages, key=lambda path: (-ages[path], path.name))
        others = {path.stem: path for path in newest_first if path.stem != self.name}
        return {self.name: self.path} | others

    def find(self, name: str | None) -> tuple[str, Path]:
        """Name and file of the model that a request names. Raises ApiError if there is none."""
        if name is None:
            return self.name, self.path
        if name not in self.known:
            self.known = self.paths()  # a training may have made more
        if name in self.known:
            return name, self.known[name]
        if ANY_MODEL.fullmatch(name):
            return self.name, self.path
        message = f"The model '{printable(name[:100])}' does not exist; GET /v1/models lists those that do."
        raise ApiError(message, 404, "model", "model_not_found")

    def cards(self, samplings: dict[Path, Sampling], context: int) -> list[dict[str, Any]]:
        """What /v1/models says of each. samplings: of the loaded models, how they draw by default."""
        self.known, cards = self.paths(), []
        for name, path in self.known.items():
            card: dict[str, Any] = {"id": name, "object": "model", "owned_by": "minimind"}
            card |= {"created": int(time.time()), "max_model_len": context, "loaded": path in samplings}
            if path in samplings:
                fields = ("temperature", "top_p", "top_k")
                card["sampling"] = {field: getattr(samplings[path], field) for field in fields}
            cards.append(card)
        return cards
