"""The models that a server offers by name: the one it was started with, if any, the weights in --save_dir and
in the folders in it, and the versions of taught models that the user has kept."""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import printable
from model.sampling import Sampling
from scripts.serve.folders import files_in, scan
from scripts.serve.protocol import ApiError
from scripts.serve.taught import ABOUT, kept_weights
from trainer.weights.paths import is_pretrained_only, shape_in_name

# names that MiniMind's clients use: they get any model, unless a file has this name
ANY_MODEL = re.compile(r"(.*/)?minimind[\w.-]*(:latest)?|model-identifier", re.IGNORECASE)


class Weights(NamedTuple):
    """A model as it was on the disk at some time. version: None if it was missing."""

    path: Path
    version: tuple[tuple[int, ...], ...] | None


class Models:
    """Names and files of the models.

    name, path: the given model, which answers requests without a name; None: there is none, and the newest
    model answers them. load: returns model and tokenizer of a path. save_dir: folder whose other weights are
    offered, too; None: only the given model. parts: further files of the given model, such as an adapter.
    flags: flags that make another command load a path as `load` does.
    """

    def __init__(
        self,
        name: str | None,
        path: Path | None,
        load: Callable[[Path], tuple[Any, Any]],
        save_dir: Path | None = None,
        parts: Sequence[Path] = (),
        flags: Sequence[str] = (),
    ):
        self.name, self.path, self.load, self.save_dir = name, path, load, save_dir
        self.parts, self.flags = parts, flags
        self.originals: dict[str, str] = {}  # name of a version -> name of the model that was taught
        # looked up again if a name is missing: beside decoding, reading folders takes long
        self.paths_by_name = self.paths()

    def paths(self) -> dict[str, Path]:
        """Name -> file: the given model, then the weights of the folder, the newest first. A version of a
        taught model has the name of its folder."""
        given = {} if self.name is None or self.path is None else {self.name: self.path}
        if self.save_dir is None:
            return given
        ages: dict[Path, float] = {}
        scanned = scan(self.save_dir)
        found = [(folder / name, file) for folder, files in scanned.items() for name, file in files.items()]
        for path, file in found:
            is_weights = shape_in_name(path) and path.parent.name != "checkpoints"  # a plan's
            if is_weights and (self.path is None or os.path.realpath(path) != os.path.realpath(self.path)):
                ages[path] = file.mtime
        taught: dict[Path, Path] = {}  # weights of a version -> those that were taught
        for folder, files in scanned.items():
            if ABOUT in files and folder != self.save_dir and (kept := kept_weights(folder)):
                weights, model = kept
                taught[weights] = self.save_dir / f"{model}.pth"
                ages[weights] = files_in(weights.parent)[weights.name].mtime
        newest_first = sorted(ages, key=lambda path: (-ages[path], path))
        names = dict(given)
        for path in newest_first:
            place = path.parent.parent if path in taught else path
            name = printable(place.relative_to(self.save_dir).as_posix())  # it need not be UTF-8
            names.setdefault(name.removesuffix(".pth"), path)
        by_path = {os.path.realpath(path): name for name, path in names.items()}
        self.originals = {
            name: by_path[os.path.realpath(taught[path])]
            for name, path in names.items()
            if path in taught and os.path.realpath(taught[path]) in by_path
        }
        return names

    def look_again(self) -> None:
        """Look the models up again after a name has come to mean another file."""
        self.paths_by_name = self.paths()

    def version(self, path: Path) -> tuple[tuple[int, ...], ...] | None:
        """A value that changes when a model is replaced: time, size and inode of its files, or of the files
        in its folder. None if they cannot be read."""
        try:
            tops = [path, *(self.parts if path == self.path else ())]
            inside = [file for top in tops if top.is_dir() for file in sorted(top.iterdir())]
            stats = [file.stat() for file in (*tops, *inside)]
        except OSError:
            return None
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    def find(self, name: str | None) -> tuple[str, Path]:
        """Name and file of the model that a request names. Raises ApiError if there is none."""
        if name not in self.paths_by_name:
            self.look_again()  # training may have added models
        if name in self.paths_by_name:
            return name, self.paths_by_name[name]
        if name is not None and not ANY_MODEL.fullmatch(name):
            raise not_found(name)
        if not self.paths_by_name:
            raise ApiError("There is no model yet; train one.", 404, "model", "model_not_found")
        return next(iter(self.paths_by_name.items()))

    def cards(self, samplings: dict[Path, Sampling], context: int) -> list[dict[str, Any]]:
        """The list for /v1/models. samplings: default sampling of each loaded model. `continues_text` in a
        card says that the model was only pretrained; `taught_from` is the model whose corrected version it
        is."""
        self.look_again()
        cards = []
        for name, path in self.paths_by_name.items():
            if path not in samplings and not path.exists():
                continue  # the given model was dropped from memory and its file was deleted
            card: dict[str, Any] = {"id": name, "object": "model", "owned_by": "minimind"}
            card["continues_text"] = is_pretrained_only(path)
            card |= {"created": int(time.time()), "max_model_len": context, "loaded": path in samplings}
            if name in self.originals:
                card["taught_from"] = self.originals[name]
            if path in samplings:
                fields = ("temperature", "top_p", "top_k", "repetition_penalty")
                card["sampling"] = {field: getattr(samplings[path], field) for field in fields}
            cards.append(card)
        return cards


def not_found(name: str) -> ApiError:
    """The error for a request that names a model that does not exist."""
    message = f"The model '{printable(name[:100])}' does not exist; GET /v1/models lists those that do."
    return ApiError(message, 404, "model", "model_not_found")
