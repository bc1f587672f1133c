"""The models that a server offers by name: the one it was started with, and the weights of --save_dir."""

import json
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
        self.paths_by_name = (
            self.paths()
        )  # looked up again when a name is missing: files take long beside decoding

    def paths(self) -> dict[str, Path]:
        """Name -> file: the first model, then the weights of the folder, the newest first."""
        ages: dict[Path, float] = {}
        files = [] if self.save_dir is None else list(self.save_dir.glob("*.pth"))
        for path in files:
            with suppress(OSError):  # removed this moment
                if shape_in_name(path) and path.is_file() and path.resolve() != self.path.resolve():
                    ages[path] = path.stat().st_mtime
        newest_first = sorted(ages, key=lambda path: (-ages[path], path.name))
        names = {printable(path.stem): path for path in newest_first}  # a name need not be UTF-8
        others = {name: path for name, path in names.items() if name != self.name}
        return {self.name: self.path} | others

    def find(self, name: str | None) -> tuple[str, Path]:
        """Name and file of the model that a request names. Raises ApiError if there is none."""
        if name is None:
            return self.name, self.path
        if name not in self.paths_by_name:
            self.paths_by_name = self.paths()  # a training may have made more
        if name in self.paths_by_name:
            return name, self.paths_by_name[name]
        if ANY_MODEL.fullmatch(name):
            return self.name, self.path
        raise not_found(name)

    def cards(self, samplings: dict[Path, Sampling], context: int) -> list[dict[str, Any]]:
        """What /v1/models says of each. samplings: of the loaded models, how they draw by default.
        continues_text: it was pretrained only."""
        self.paths_by_name, cards = self.paths(), []
        for name, path in self.paths_by_name.items():
            if path not in samplings and not path.exists():
                continue  # the first model, which was dropped from memory and deleted
            card: dict[str, Any] = {"id": name, "object": "model", "owned_by": "minimind"}
            card["continues_text"] = is_pretrained_only(path)
            card |= {"created": int(time.time()), "max_model_len": context, "loaded": path in samplings}
            if path in samplings:
                fields = ("temperature", "top_p", "top_k", "repetition_penalty")
                card["sampling"] = {field: getattr(samplings[path], field) for field in fields}
            cards.append(card)
        return cards


def is_pretrained_only(path: Path) -> bool:
    """Whether weights have learnt to continue texts, not to answer: as the file beside them says, else their
    name."""
    try:
        stage = json.loads(path.with_suffix(".json").read_bytes())["stage"]
    except (OSError, ValueError, LookupError, TypeError):
        stage = path.name
    return "pretrain" in str(stage)  # the stage is the name of its script


def not_found(name: str) -> ApiError:
    """The error of a request for a model that is not there."""
    message = f"The model '{printable(name[:100])}' does not exist; GET /v1/models lists those that do."
    return ApiError(message, 404, "model", "model_not_found")
