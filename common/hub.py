"""Data and models on Hugging Face: turns a path on the hub into the path of its local copy.

    hf://datasets/OWNER/NAME/FILE  data; a pattern instead of FILE (PATTERN[:N]: its first N files), or no
                                   FILE: the whole dataset
    hf://OWNER/NAME                the folder of a model; OWNER/NAME/FILE: one file of it

OWNER/NAME@REVISION selects a branch, a tag or a commit. huggingface_hub downloads, so its variables work
(HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN ...). From here on a run only sees local paths, and its
fingerprint covers the contents.
"""

import glob
import re
import sys
from pathlib import Path
from typing import Any

from common.errors import UserError, reason, say
from common.files import files_in, is_file, is_there
from common.launcher import launch
from common.patterns import fits, has_pattern, split_first, take_first

PATH = re.compile(
    r"hf://(?P<kind>datasets/|models/)?(?!(datasets|models)/)"
    r"(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<file>.*))?"
)
WEIGHT = re.compile(r":[-+.\deE]+$")  # of a source in a mixture of data
# of a model's folder, or an adapter's
TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
MODEL = ["config.json", "generation_config.json", "adapter_config.json", "model.safetensors.index.json"]
WEIGHTS, PICKLED = ["*.safetensors"], ["pytorch_model.bin"]


def is_remote(path: Any) -> bool:
    """Whether a value is a path on a hub, or a list of data that contains one."""
    return isinstance(path, str) and any(
        part.strip().startswith(("hf://", "modelscope://")) for part in path.split(",")
    )


def make_local(args: Any) -> None:
    """Replace the attributes of `args` that are hub paths by local paths, and download what is missing.
    Raises UserError."""
    for name, value in list(vars(args).items()):
        if is_remote(value):
            setattr(args, name, local_path(value, tokenizer_only=name == "tokenizer_path"))


def local_path(path: str, tokenizer_only: bool = False) -> str:
    """The same path, or comma-separated list of data, with hub paths replaced by their local copies; mixture
    weights stay. tokenizer_only: for a model's folder, only download the tokenizer. Raises UserError, one
    line, if something does not exist, may not be read, or cannot be reached and was never downloaded."""
    if not is_remote(path):
        return path
    parts = []
    for part in path.split(","):
        part = part.strip()
        if is_remote(part):
            typed = WEIGHT.sub("", part)
            weight = part[len(typed) :]
            part = str(local_copy(typed, tokenizer_only)) + weight
        parts.append(part)
    return ",".join(parts)


def local_copy(typed: str, tokenizer_only: bool) -> Path:
    """The local copy of a path on the hub, downloaded if it is not there yet. Raises UserError."""
    if typed.startswith("modelscope://"):
        command = "modelscope download --dataset OWNER/NAME FILE, or --model OWNER/NAME"
        raise UserError(f"{typed}: download it ({command}, with --local_dir FOLDER), and give that folder")
    without_first, count = split_first(typed)
    path = PATH.fullmatch(without_first)
    if path is None:
        raise UserError(f"{typed}: write hf://datasets/OWNER/NAME/FILE for data, hf://OWNER/NAME for a model")
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()  # what goes wrong is the error below
    if launch().local_rank > 0 or not sys.stderr.isatty():
        disable_progress_bars()
    page = f"{constants.ENDPOINT}/{'datasets/' if path['kind'] == 'datasets/' else ''}{path['repo']}"
    login = "log in (hf auth login, or HF_TOKEN)"
    try:
        copy = download(path, count, tokenizer_only)
    except UserError:
        raise
    except errors.GatedRepoError:
        problem = f"it is gated: ask for access at {page}, then {login}"
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError):
        problem = f"{page} has no such file or revision, or is private; check the name, or {login}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        problem = (
            f"{constants.ENDPOINT} cannot be reached ({reason(error.__cause__ or error)}), and "
            f"{constants.HF_HUB_CACHE} does not hold it; HF_ENDPOINT names a mirror"
        )
    except Exception as error:  # of the network, in any of several libraries
        problem = f"the download failed ({reason(error)}); start again"
    else:
        if not is_there(copy) and not has_pattern(path["file"] or ""):
            raise UserError(f"{typed}: the repository has no such file or folder; check the name")
        if launch().rank == 0:
            say(f"{typed}: {copy}")
        return copy if count is None else Path(f"{copy}[:{count}]")
    raise UserError(f"{typed}: {problem}")


def download(path: re.Match, count: int | None, tokenizer_only: bool) -> Path:
    """Download what the parts of PATH name. For a pattern, download the first `count` files, or all. Raises
    UserError if there are fewer, and whatever huggingface_hub raises."""
    from huggingface_hub import hf_hub_download, snapshot_download

    kind = "dataset" if path["kind"] == "datasets/" else "model"
    options: dict[str, Any] = {"repo_id": path["repo"], "repo_type": kind, "revision": path["revision"]}
    file = (path["file"] or "").strip("/")
    if Path(file).suffix and not has_pattern(file):
        return Path(hf_hub_download(filename=file, **options))
    if kind == "dataset":
        patterns = [file, f"{file}/*"] if file else None
        if count is not None:
            if "**" in file:
                raise UserError(f"{path.string}[:{count}]: ** takes no [:N] on a hub; name the folder")
            names = [name for name in names_in(path["repo"], path["revision"]) if fits(name, file)]
            patterns = [glob.escape(name) for name in take_first(names, count, path.string)]
        return Path(snapshot_download(allow_patterns=patterns, **options)) / file
    names = TOKENIZER if tokenizer_only else TOKENIZER + MODEL + WEIGHTS
    prefix = f"{file}/" if file else ""
    folder = Path(snapshot_download(allow_patterns=[prefix + name for name in names], **options)) / file
    if not tokenizer_only and not files_in(folder, "*.safetensors"):
        snapshot_download(allow_patterns=[prefix + name for name in PICKLED], **options)
    return folder


def names_in(repo: str, revision: str | None) -> list[str]:
    """The names of all files of a dataset; without a network, those of its local copy. If there is no copy
    either, raises what huggingface_hub raises."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        return [file.rfilename for file in HfApi().dataset_info(repo, revision=revision).siblings or []]
    except Exception:  # of the network, in any of several libraries
        # downloads nothing: finds the copy, or says what is wrong
        copy = Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=[]))
        return [path.relative_to(copy).as_posix() for path in copy.rglob("*") if is_file(path)]


def shown_name(path: Path) -> str:
    """A short name of a model's file or folder; for a folder from the hub, the name of its repository."""
    if is_file(path):
        return path.stem
    if path.parent.name == "snapshots":  # huggingface_hub's models--OWNER--NAME/snapshots/COMMIT
        return path.parents[1].name.rpartition("--")[2]
    return path.name
