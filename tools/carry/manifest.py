"""What a pack says about itself. It may come from a stranger, so every part of it is checked: the names of
its files, their sizes and hashes, and the settings of its stages, which may name neither places nor code."""

import importlib
import os
import re
import unicodedata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.arguments import parse_args
from common.errors import UserError
from common.files import is_file
from common.settings import ROOT, StageArgs
from tools.compare.flags import as_text
from trainer.rollouts import environments, rewards

MANIFEST = "carry.json"  # in a pack, and in the folder that it was unpacked into
MOST_FILES = 10_000
# of files besides the data; none of them is ever executed
SUFFIXES = {".pth", ".json", ".jsonl", ".log", ".safetensors", ".jinja", ".txt", ".model", ".bin"}
FOR_READING = ("origin/run.sh", "origin/edits.diff")  # the commands and the edits of the machine it began on
PLACES = ("save_dir", "checkpoint_dir", "cache_dir")  # settings that are the same in every unpacked pack
# settings of one session or one machine, which a pack leaves out
LEFT_OUT = ("from_resume", "resume_from", "stop_after", "log_file", "log_dir", "tensorboard_dir")
LEFT_OUT += ("use_wandb", "tracker", "wandb_project", "swanlab_mode")
DATA = ("data_path", "eval_data_path", "replay_data_path", "sample_prompts")
DATA_NAME = re.compile(r"data/\d{1,4}/[\w.+-]+")
# the value of a setting of DATA: files, or folders with weights
SOURCE = re.compile(r"(data/\d{1,4}(?:/[\w.+-]+)?)((?::[\d.eE-]+)?)")
TOKENIZER, START = re.compile(r"tokenizer/\d{1,4}"), re.compile(r"(start/\d{1,4}/)?[\w.+ -]+")
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


class Part(BaseModel):
    """A part of a manifest; another field, or a value of another type, is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class File(Part):
    """A file: its size and the hash of its content."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class DataFile(File):
    """A file of the data; packed: whether it is in the pack."""

    packed: bool


class Stage(Part):
    """A stage: the name of its script in trainer/, and its settings as text."""

    script: str = Field(pattern=r"^train_[a-z_]+$")
    settings: dict[str, str]


class Manifest(Part):
    """The content of a pack. id: of the runs, the same in all later packs. updates: of each run, as far as it
    has come. files, data: by name; `data/...` is where the settings look for them."""

    format: Literal[1] = 1
    id: str = Field(pattern=r"^[0-9a-f]{32}$")
    name: str
    written: str
    code: str
    versions: dict[str, str]
    stages: list[Stage] = Field(min_length=1, max_length=100)
    updates: dict[str, int]
    files: dict[str, File] = Field(max_length=MOST_FILES)
    data: dict[str, DataFile] = Field(max_length=MOST_FILES)

    def packed(self) -> dict[str, File]:
        """All files in the pack."""
        return self.files | {name: file for name, file in self.data.items() if file.packed}


def read_manifest(text: bytes) -> Manifest:
    """The manifest in a JSON text. Raises UserError if anything in it is not as it must be."""
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        mistake = error.errors()[0]
        where = ".".join(map(str, mistake["loc"]))[:200]
        raise UserError(f"{MANIFEST}: {where}: {mistake['msg']}".rstrip(": ")) from None
    check_part(manifest.name)
    for name in manifest.files:
        check_name(name)
    for name in manifest.data:
        if not DATA_NAME.fullmatch(name):
            raise UserError(f"{name!a} is not the name of a file of the data")
        check_name(name)
    names = [*manifest.files, *manifest.data]
    # on macOS names that differ in case or composition are one
    if len({unicodedata.normalize("NFC", name).casefold() for name in names}) < len(names):
        raise UserError("two of its files have one name")
    return manifest


def check_name(name: str) -> None:
    """Raise UserError unless this is the relative path of a file that a pack may hold."""
    parts = name.split("/")
    for part in parts:
        check_part(part)
    is_allowed = parts[0] == "data" or name in FOR_READING or Path(name).suffix in SUFFIXES
    if len(parts) > 4 or not is_allowed or name == MANIFEST:
        raise UserError(f"{name!a} is not a file that a pack may hold")


def check_part(part: str) -> None:
    """Raise UserError unless this is the plain name of a file or folder, and not a hidden one."""
    is_plain = part.isprintable() and not set(part) & set('\\:*?"<>|,')
    if not part or part.startswith(".") or not is_plain or len(os.fsencode(part)) > 200:
        raise UserError(f"{part!a} is not a plain name of a file")


# --- settings


def script_of(name: str) -> Any:
    """The module of a stage. Raises UserError if this project has no such stage."""
    if not is_file(ROOT / "trainer" / f"{name}.py"):
        raise UserError(f"this code has no stage {name}")
    return importlib.import_module(f"trainer.{name}")


def refuse_code(args: StageArgs) -> None:
    """Raise UserError if a setting names code: a reward or an environment that is not this project's."""
    parts = rewards.reward_parts(getattr(args, "reward", ""))
    named = [part for part in parts if part.partition("=")[0] not in rewards.SHIPPED]
    environment = getattr(args, "environment", "calculator")
    if environment not in (*environments.SHIPPED, *environments.IN_OTHER_FILES):
        named.append(environment)
    if named:
        raise UserError(f"{named[0]!a} names code, which is not carried: a pack holds no code")


def settings_as_text(args: StageArgs) -> dict[str, str]:
    """The settings of a stage that differ from its defaults and are the same on every machine. Raises
    UserError for one that names a place."""
    refuse_code(args)
    texts = {}
    for name, value in args:
        if args.is_default(name) or name in (*PLACES, *LEFT_OUT, *DATA, "tokenizer_path", "from_weight"):
            continue
        texts[name] = as_text(type(args), name, value)
        check_text(name, texts[name])
    return texts


def check_text(name: str, text: str) -> None:
    """Raise UserError for the value of a setting that names a place or code."""
    if name == "text_separator" or (name == "device" and DEVICE.fullmatch(text)):
        return
    if set(text) & set("/\\:") or text.endswith(".py"):
        raise UserError(f"--{name} {text!a} names a place or code, which is not carried")


def stage_words(stage: Stage, manifest: Manifest, folder: Path) -> list[str]:
    """The command line of a stage, whose pack is unpacked in this folder, without the name of its script.
    Raises UserError for settings that a pack may not have."""
    words = {"save_dir": folder, "checkpoint_dir": folder / "checkpoints", "cache_dir": folder / "cache"}
    values = {name: str(place) for name, place in words.items()} | {"from_resume": "1"}
    for name, text in stage.settings.items():
        if name in (*PLACES, *LEFT_OUT) or not re.fullmatch(r"[a-z]\w*", name, re.ASCII):
            raise UserError(f"{stage.script}: a pack may not set --{name}")
        if name in DATA and text not in ("auto", "none"):
            values[name] = ",".join(local_source(part, manifest, folder) for part in text.split(","))
        elif name == "tokenizer_path" and TOKENIZER.fullmatch(text):
            values[name] = str(folder / text)
        elif name == "from_weight" and START.fullmatch(text) and not text.startswith("."):
            is_place = "/" in text or text.endswith(".pth")
            values[name] = str(folder / text) if is_place else text
        else:
            check_text(name, text)
            values[name] = text
    return [f"--{name}={value}" for name, value in values.items()]


def local_source(text: str, manifest: Manifest, folder: Path) -> str:
    """A source of the data in the unpacked folder, with its weight. Raises UserError if it is not in the
    manifest, or the folder's name would be taken for several sources."""
    match = SOURCE.fullmatch(text)
    names = manifest.data if match else ()
    if match is None or not any(name == match[1] or name.startswith(f"{match[1]}/") for name in names):
        raise UserError(f"{text!a} is not among the data of the pack")
    if set(str(folder)) & set(",*?["):
        raise UserError(
            f"{folder}: data cannot lie in a folder with , * ? or [ in its name; give another --to"
        )
    return f"{folder / match[1]}{match[2]}"


def stage_args(stage: Stage, words: list[str]) -> StageArgs:
    """The settings of a stage, validated by its own class. Raises UserError."""
    args = parse_args(script_of(stage.script).Args, None, words)
    refuse_code(args)
    return args
