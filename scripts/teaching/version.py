"""A version of a model: the folder of one teaching, and how it is prepared, trained and compared.

A version appears in one step, with all that its training reads. So a teaching that is killed continues from
there, and ends bitwise identical to one that was not.
"""

import hashlib
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import Interrupted, UserError, say
from common.files import (
    atomic_write,
    files_in,
    is_file,
    is_folder,
    is_running,
    is_there,
    json_lines,
    new_path,
    read_object,
    remove,
    write_json,
)
from common.settings import LONGEST, ROOT
from dataset.token_cache import file_hash
from scripts.planning.signature import is_signed, sign
from scripts.teaching import recipe
from scripts.teaching.asking import ask, ask_all
from scripts.teaching.corrections import Correction
from scripts.teaching.material import Material, runs_before
from scripts.teaching.old_questions import choose_questions, last
from tools.carry.collect import progress
from tools.carry.session import run, stop_signals
from trainer.train_full_sft import Args
from trainer.weights.for_tools import WEIGHT, load_path
from trainer.weights.paths import NAMED_SHAPE, is_hugging_face, model_files, run_name, weight_path

ABOUT, REPORT, RECORDS, CORRECTIONS = "teach.json", "report.json", "teach.jsonl", "corrections.jsonl"
QUESTIONS = "old_questions.json"  # beside the versions: the same for all of them
SAMPLING = "generation_config.json"  # beside the weights
CHECKPOINTS, CACHE = "checkpoints", "cache"
ROUND = 64  # tokens
WAIT = 1.0  # seconds


class Model(NamedTuple):
    """The model before it is taught. sha256: of its files."""

    path: Path
    sha256: str


class Version(NamedTuple):
    """The folder of a teaching and the content of its description."""

    folder: Path
    about: dict[str, Any]

    @property
    def args(self) -> Args:
        """The settings of its training."""
        folders = {
            "data_path": str(self.folder / RECORDS),
            "save_dir": str(self.folder),
            "checkpoint_dir": str(self.folder / CHECKPOINTS),
            "cache_dir": str(self.folder / CACHE),
        }
        shape = {name: value for name, value in self.about["shape"].items() if value is not None}
        return Args(**self.about["settings"], **folders, **shape, from_resume=True)

    @property
    def weights(self) -> Path:
        """The file of the weights that it taught."""
        return weight_path(self.folder, WEIGHT, self.args)


def read_original(path: Path) -> Model:
    """The model in a file or folder; for a version the model that it was taught from. Raises UserError."""
    about = read_object((path if is_folder(path) else path.parent) / ABOUT)
    if about:
        path = Path(about["model"])
        if not is_there(path):
            raise UserError(f"{path}: the model that was taught is gone; put it back, or teach another one")
    files = model_files(path) if is_hugging_face(path) else [path]
    digests = "".join(file_hash(file) for file in files)
    return Model(path, hashlib.sha256(digests.encode()).hexdigest())


def numbers(folder: Path) -> list[int]:
    """The numbers of the versions in a folder."""
    return [int(path.name) for path in files_in(folder) if path.name.isdecimal()]


def newest_version(folder: Path) -> Path | None:
    """The folder of the newest version; None if there is none."""
    return folder / str(newest) if (newest := max(numbers(folder), default=0)) else None


def signed_content(about: dict[str, Any]) -> bytes:
    """What the signature of a version is about: the settings with which it is trained."""
    return json.dumps([about.get("settings"), about.get("shape")]).encode()


def is_trained_here(version: Path) -> bool:
    """Whether the unfinished training of a version may be continued by somebody who has not read its
    settings: it was prepared on this machine, in this folder."""
    about = read_object(version / ABOUT, links=False)
    return is_signed(signed_content(about), version.parent, about.get("signature"))


def find_version(folder: Path, identity: str) -> Version | None:
    """The newest version in a folder, if it is of this identity."""
    newest = newest_version(folder)
    about = read_object(newest / ABOUT) if newest else {}
    return Version(newest, about) if newest and about.get("id") == identity else None


# --- before


def remove_unfinished(folder: Path) -> None:
    """Remove the newest version if its teaching was stopped and is not continued. Raises UserError if it is
    still being trained."""
    newest = newest_version(folder)
    if newest is None or is_file(newest / REPORT):
        return
    version = Version(newest, read_object(newest / ABOUT))
    if version.about and is_running(run_name(WEIGHT, version.args), newest):
        raise UserError(f"{newest} is still being trained, with other corrections; wait for its end")
    remove(newest)


def prepare(
    folder: Path, identity: str, model: Model, corrections: list[Correction], material: Material, seed: int
) -> Version:
    """Ask the model, choose what to train on, and write a new version."""
    began = time.process_time()
    remove_unfinished(folder)
    loaded, tokenizer = load_path(model.path)
    questions = old_questions(folder, model, material, loaded, tokenizer)
    asked = [item(each, each.messages, "correction") for each in corrections]
    asked += [item(each, each.in_words(text), "wording") for each in corrections for text in each.wordings]
    for each, answer in zip(asked, ask_all(loaded, tokenizer, asked), strict=True):
        each["before"] = answer
    before = [each["before"] for each in asked[: len(corrections)]]
    held_back = {last(question) for question in questions}
    chosen = recipe.choose(
        corrections, before, material, held_back, lambda chats: ask(loaded, tokenizer, chats), seed
    )
    for question in questions:
        question["meant"] = chosen.is_meant(last(question), question["before"])
    about: dict[str, Any] = {
        "id": identity,
        "model": str(model.path.absolute()),
        "model_sha256": model.sha256,
        "counts": chosen.counts,
        "settings": settings(model, corrections, tokenizer, loaded.config.hidden_size, seed),
        "shape": {name: getattr(loaded.config, name) for name in NAMED_SHAPE},
        "asked": asked + questions,
    }
    about["signature"] = sign(signed_content(about), folder.absolute())
    place = folder / str(1 + max(numbers(folder), default=0))
    with new_path(place) as new:
        new.mkdir()
        atomic_write(new / RECORDS, lambda file: file.write(json_lines(chosen.records)))
        lines = json_lines(each.record() for each in corrections)
        atomic_write(new / CORRECTIONS, lambda file: file.write(lines))
        source = model.path if is_folder(model.path) else model.path.parent
        if is_file(source / SAMPLING):
            shutil.copyfile(source / SAMPLING, new / SAMPLING)
        write_json(new / ABOUT, about)
    counts = ", ".join(f"{count:,} {name}" for name, count in chosen.counts.items() if count)
    say(f"{place / RECORDS}: {counts} ({time.process_time() - began:.0f} CPU seconds)")
    return Version(place, read_object(place / ABOUT))


def item(correction: Correction, messages: list[dict], kind: str) -> dict[str, Any]:
    """A question that is asked before and after."""
    return {"kind": kind, "messages": messages, "tools": correction.tools, "reference": correction.written}


def old_questions(
    folder: Path, model: Model, material: Material, loaded: Any, tokenizer: Any
) -> list[dict[str, Any]]:
    """The old questions of a model with its answers, the same for all versions: chosen at the first one."""
    path = folder / QUESTIONS
    known = read_object(path)
    asked: list[dict[str, Any]] = known.get("asked", [])
    if known.get("model_sha256") != model.sha256:
        asked = [{"kind": "old"} | each for each in choose_questions(material)]
        for each, answer in zip(asked, ask_all(loaded, tokenizer, asked), strict=True):
            each["before"] = answer
        if asked:
            write_json(path, {"model_sha256": model.sha256, "asked": asked})
    return asked


def settings(
    model: Model, corrections: list[Correction], tokenizer: Any, width: int, seed: int
) -> dict[str, Any]:
    """The settings of the training that are not the defaults of SFT, without folders and shape. width: of the
    model."""
    own = next(runs_before(model.path), None)
    texts = [str(each.record()["messages"]) for each in corrections]
    longest = max(
        len(tokenizer.encode(text)) for text in texts
    )  # the names of fields are more than a template
    longest = max(longest, own[1].max_seq_len if own else recipe.MAX_SEQ_LEN)
    return recipe.TRAINING | {
        "from_weight": str(model.path.absolute()),
        "learning_rate": recipe.learning_rate(width),
        "save_weight": WEIGHT,
        "max_seq_len": min(-(-longest // ROUND) * ROUND, LONGEST),
        "sample_prompts": "none",
        "seed": 42 + seed,
    }


# --- training and after


def train(version: Version, device: str) -> None:
    """Train a version to its end, from wherever it is. Raises UserError if the stage fails, and Interrupted
    after a signal."""
    args = version.args
    name = run_name(WEIGHT, args)
    if is_running(name, version.folder):  # the teaching was killed, but not its training
        say(f"{name} is being trained in {version.folder}; waiting for its end")
        while is_running(name, version.folder):
            time.sleep(WAIT)
    given = {
        key: value for key, value in args if not args.is_default(key) and key not in version.about["shape"]
    }
    words = [f"--{key}={int(value) if isinstance(value, bool) else value}" for key, value in given.items()]
    with stop_signals() as signals:
        command = [sys.executable, str(ROOT / "trainer/train_full_sft.py"), *words, f"--device={device}"]
        status = run(command, {}, signals)
    if signals:
        text = f"by {signal.Signals(signals[0]).name}; the same command continues"
        raise Interrupted(signals[0], text)
    if status and is_running(name, version.folder):  # that of a killed teaching started at the same moment
        train(version, device)
    elif status or not progress(args)["finished"]:
        raise UserError(f"the training ended with status {status}; its own line above says why")


def compare(version: Version) -> dict[str, Any]:
    """Ask the taught model, and write and return the report: what was asked, with both answers."""
    loaded, tokenizer = load_path(version.weights)
    asked = version.about["asked"]
    answers = ask_all(loaded, tokenizer, asked)
    report = {"asked": [each | {"after": after} for each, after in zip(asked, answers, strict=True)]}
    write_json(version.folder / REPORT, report)
    for name in (CHECKPOINTS, CACHE):  # the training is over
        remove(version.folder / name)
    return report
