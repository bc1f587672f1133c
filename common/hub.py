"""Data and models on Hugging Face and ModelScope: a path on a hub goes in, that of its local copy comes out.

    hf://datasets/OWNER/NAME/FILE  data; a pattern instead of FILE, or no FILE: the whole dataset
    hf://OWNER/NAME                the folder of a model; OWNER/NAME/FILE: one file of it
    modelscope://...               the same forms, without patterns and whole datasets

OWNER/NAME@REVISION is a branch, a tag or a commit. Hugging Face is read by huggingface_hub, so its variables
hold (HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN ...); ModelScope by its plain addresses
(MODELSCOPE_DOMAIN, MODELSCOPE_CACHE). From here on a run sees local paths, and its fingerprint the contents.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from common.errors import UserError, reason, say
from common.files import locked
from common.launcher import launch

PATH = re.compile(
    r"(?P<hub>hf|modelscope)://(?P<kind>datasets/|models/)?(?!(datasets|models)/)"
    r"(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<file>.*))?"
)
WEIGHT = re.compile(r":[-+.\deE]+$")  # of a source in a mixture of data
# of a model's folder, or an adapter's
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
COMPANION_FILES = ("config.json", "generation_config.json", "adapter_config.json", *TOKENIZER)
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
INDEX, PICKLED = "model.safetensors.index.json", "pytorch_model.bin"
TIMEOUT = 30  # seconds without a byte
PROGRESS = {"delay": 2, "mininterval": 2, "leave": False, "unit": "B", "unit_scale": True}


class HubPath(NamedTuple):
    """A path on a hub."""

    typed: str
    hub: str  # hf or modelscope
    is_dataset: bool
    repo: str  # OWNER/NAME
    revision: str | None
    file: str  # a file, a folder or a pattern; empty: the whole repository


def is_remote(path: Any) -> bool:
    """Whether a value is, or as a list of data has, a path on a hub."""
    return isinstance(path, str) and any(
        part.strip().startswith(("hf://", "modelscope://")) for part in path.split(",")
    )


def make_local(args: Any) -> None:
    """Replace the attributes of `args` that are paths on a hub by local ones; what is not there yet is
    downloaded. Raises UserError."""
    for name, value in vars(args).items():
        if is_remote(value):
            setattr(args, name, local_path(value, tokenizer_only=name == "tokenizer_path"))


def local_path(path: str, tokenizer_only: bool = False) -> str:
    """A path, or a list of data separated by commas, with the local copies of what is on a hub; weights of a
    mixture stay. tokenizer_only: of a model's folder its tokenizer is enough. Raises UserError, one line, if
    something is not there, may not be read, or cannot be reached and was never downloaded."""
    if not is_remote(path):
        return path
    parts = []
    for part in path.split(","):
        part = part.strip()
        if is_remote(part):
            typed = WEIGHT.sub("", part)
            weight = part[len(typed) :]
            part = _fetched(parse(typed), tokenizer_only) + weight
        parts.append(part)
    return ",".join(parts)


def parse(typed: str) -> HubPath:
    """The parts of a path on a hub. Raises UserError if it is none."""
    match = PATH.fullmatch(typed)
    if match is None or ".." in typed.split("/"):
        raise UserError(f"{typed}: write hf://datasets/OWNER/NAME/FILE for data, hf://OWNER/NAME for a model")
    file = (match["file"] or "").strip("/")
    return HubPath(typed, match["hub"], match["kind"] == "datasets/", match["repo"], match["revision"], file)


def names_a_file(path: HubPath) -> bool:
    """Whether it is one file, and no folder or pattern."""
    return bool(Path(path.file).suffix) and not has_pattern(path)


def has_pattern(path: HubPath) -> bool:
    """Whether it stands for the files that a pattern fits."""
    return any(character in path.file for character in "*?[")


def _fetched(path: HubPath, tokenizer_only: bool) -> str:
    """The local copy, downloaded by one process while others wait."""
    if path.hub == "hf":
        from huggingface_hub import constants

        cache, download = Path(constants.HF_HUB_CACHE), _from_hugging_face
    else:
        default = "~/.cache/modelscope/hub"
        cache, download = Path(os.environ.get("MODELSCOPE_CACHE") or default).expanduser(), _from_modelscope
    with suppress(OSError):  # a cache that can only be read may have the files
        cache.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{path.hub} {path.repo}".encode()).hexdigest()[:16]
    with locked(cache / f".minimind-{name}.lock", f"waiting for another process that downloads {path.typed}"):
        copy = download(path, cache, tokenizer_only)
    if not copy.exists() and not has_pattern(path):
        raise UserError(f"{path.typed}: the repository holds no such file or folder; check the name")
    if launch().rank == 0:
        say(f"{path.typed}: {copy}")
    return str(copy)


def shown_name(path: Path) -> str:
    """A short name of a model's file or folder; that of its repository for a folder from a hub."""
    if path.is_file():
        return path.stem
    if path.parent.name == "snapshots":  # huggingface_hub's models--OWNER--NAME/snapshots/COMMIT
        return path.parents[1].name.rpartition("--")[2]
    return path.name.partition("@")[0]


# --- Hugging Face


def _from_hugging_face(path: HubPath, cache: Path, tokenizer_only: bool) -> Path:
    """Raises UserError."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # what goes wrong is the error below
    if launch().local_rank > 0 or not sys.stderr.isatty():
        disable_progress_bars()
    page = f"{constants.ENDPOINT}/{'datasets/' if path.is_dataset else ''}{path.repo}"
    login = "log in (hf auth login, or HF_TOKEN)"
    try:
        return _download_by_library(path, tokenizer_only)
    except errors.GatedRepoError:
        what = f"it is gated: ask for access at {page}, then {login}"
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError):
        what = f"{page} has no such file or revision, or is private; check the name, or {login}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = f"cannot be reached ({reason(error.__cause__ or error)})"
        if constants.HF_HUB_OFFLINE:
            why = "is not asked, since HF_HUB_OFFLINE is set"
        what = f"{constants.ENDPOINT} {why}, and {cache} does not hold it; HF_ENDPOINT names a mirror"
    except Exception as error:  # of the network, in any of several libraries
        what = f"the download failed ({reason(error)}); start again"
    raise UserError(f"{path.typed}: {what}")


def _download_by_library(path: HubPath, tokenizer_only: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    kind = "dataset" if path.is_dataset else "model"
    where: dict[str, Any] = {"repo_id": path.repo, "repo_type": kind, "revision": path.revision}
    if names_a_file(path):
        return Path(hf_hub_download(filename=path.file, **where))
    if path.is_dataset:
        patterns = [path.file, f"{path.file}/*"] if path.file else None
        return Path(snapshot_download(allow_patterns=patterns, **where)) / path.file
    prefix = f"{path.file}/" if path.file else ""
    names = TOKENIZER if tokenizer_only else (*COMPANION_FILES, INDEX, "*.safetensors")
    folder = Path(snapshot_download(allow_patterns=[prefix + name for name in names], **where)) / path.file
    if not tokenizer_only and not list(folder.glob("*.safetensors")):
        snapshot_download(allow_patterns=[prefix + PICKLED], **where)
    return folder


# --- ModelScope


def _from_modelscope(path: HubPath, cache: Path, tokenizer_only: bool) -> Path:
    """What is in the cache is not asked for again. A model's folder is read by the names that its files
    have. Raises UserError."""
    kind, revision = "datasets" if path.is_dataset else "models", path.revision or "master"
    folder = cache / kind / f"{path.repo}@{revision}"
    if names_a_file(path):
        _fetch(path, folder, path.file)
    elif path.is_dataset:
        raise UserError(f"{path.typed}: name one file of a dataset on ModelScope: {kind}/{path.repo}/FILE")
    else:
        _fetch_model(path, folder, tokenizer_only)
    return folder / path.file


def _fetch_model(path: HubPath, folder: Path, tokenizer_only: bool) -> None:
    prefix = f"{path.file}/" if path.file else ""
    marker = folder / prefix / (".tokenizer_is_here" if tokenizer_only else ".model_is_here")
    if marker.exists():
        return
    for name in COMPANION_FILES:
        _fetch(path, folder, prefix + name, is_needed=tokenizer_only and name == TOKENIZER[0])
    if not tokenizer_only:
        fetched = [_fetch(path, folder, prefix + name, is_needed=False) for name in WEIGHTS]
        if not any(fetched) and _fetch(path, folder, prefix + INDEX, is_needed=False):
            content = json.loads((folder / prefix / INDEX).read_text(encoding="utf-8"))
            for name in sorted(set(content["weight_map"].values())):
                _fetch(path, folder, prefix + name)
        elif not any(fetched):
            _fetch(path, folder, prefix + PICKLED)
    marker.touch()


def _fetch(path: HubPath, folder: Path, name: str, is_needed: bool = True) -> bool:
    """Download one file of a repository into `folder`, if it is not there; returns whether it is there now.
    Raises UserError if it is needed and not on the hub, or cannot be read."""
    if (folder / name).exists():
        return True
    domain = os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
    host = domain.rstrip("/") if "://" in domain else f"https://{domain}"
    page = f"{host}/{'datasets' if path.is_dataset else 'models'}/{path.repo}"
    address = f"{page}/resolve/{path.revision or 'master'}/{urllib.parse.quote(name)}"
    try:
        _download(address, folder / name)
        return True
    except urllib.error.HTTPError as error:
        if error.code == 404 and not is_needed:
            return False
        what = f"{host} answers {error}; try again later"
        if error.code == 404:
            what = f"there is no {address}; check the name"
        if error.code in (401, 403):
            what = f"{page} needs a login; download it with ModelScope's own program"
    except urllib.error.URLError as error:
        what = f"{host} cannot be reached ({error.reason}), and {folder} does not hold {name}"
    except OSError as error:
        what = f"the download of {name} failed ({error}); start again, and it goes on where it ended"
    raise UserError(f"{path.typed}: {what}")


def _download(address: str, path: Path) -> None:
    """Download a file beside its place and rename it; what an interrupted download left is gone on with, if
    the server still has the same file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part, mark = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.etag")
    headers = {}
    if part.exists() and mark.exists():
        headers = {"Range": f"bytes={part.stat().st_size}-", "If-Range": mark.read_text(encoding="utf-8")}
    try:
        response = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # all of it is there already, or the file has become shorter
            raise
        part.unlink()
        response = urllib.request.urlopen(address, timeout=TIMEOUT)
    with response:
        goes_on = response.status == 206
        begin = part.stat().st_size if goes_on else 0
        size = begin + int(response.headers["Content-Length"])
        mark.unlink(missing_ok=True)
        with open(part, "ab" if goes_on else "wb") as file:
            if response.headers["ETag"]:
                mark.write_text(response.headers["ETag"], encoding="utf-8")
            with tqdm.wrapattr(file, "write", total=size, initial=begin, desc=path.name, **PROGRESS) as shown:
                shutil.copyfileobj(response, shown)
            file.flush()
            os.fsync(file.fileno())
    if part.stat().st_size != size:
        raise OSError(f"the connection ended after {part.stat().st_size:,} of {size:,} bytes")
    os.replace(part, path)
    mark.unlink(missing_ok=True)
