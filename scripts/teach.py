"""Teach a model by correcting its answers: it learns the corrections, and what it has forgotten is shown.

    python scripts/teach.py --model out/demo --corrections corrections.jsonl     minutes, on a CPU
    python scripts/teach.py --model out/demo --corrections more.jsonl            the next ones, with the first

Corrections are conversations in any form of SFT (docs/data.md), such as the file that the web page saves:
each answer that SFT would train is what the model should have said. The field "wordings" of a record may list
other wordings of its question, which are only asked. Each teaching begins with the original weights and all
corrections, and writes a new folder: out/demo-taught/1, 2, ... The original is not changed. So that it
forgets little, the model is also trained on a part of its old data, which are found through the description
of its run. Killed at any time, the same command continues. See docs/after_sft.md#teach-by-correcting.
"""

import argparse
import hashlib
import sys
from pathlib import Path

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command_line import Parser, one_line_errors  # first: without requirements it says so

# isort: split
from common.arguments import add_flag
from common.errors import UserError, say, warn
from common.files import atomic_write, is_file, is_folder, json_lines, lock_output, read_object
from common.settings import StageArgs
from scripts.teaching import outcome, version
from scripts.teaching.corrections import Correction, merged, read_corrections
from scripts.teaching.material import Material, find_material
from trainer.weights.files import find_weights
from trainer.weights.for_tools import WEIGHT, holds_weights
from trainer.weights.paths import ADAPTER_CONFIG, is_pretrained_only


def main() -> None:
    """Collect the corrections, prepare a version, train it, and say what it has learned and lost."""
    args = parse_args()
    model = version.read_original(model_path(Path(args.model)))
    folder = Path(args.save_dir or default_folder(model.path))
    lock_output("teach", save_dir=str(folder))
    corrections = collect(folder, args.corrections)
    found = version.find_version(folder, identity(model, corrections, args))
    if found is None:
        material = Material([], [], [], []) if args.without_old_data else old_data(model)
        place = identity(model, corrections, args)
        found = version.prepare(folder, place, model, corrections, material, args.seed)
    report = read_object(found.folder / version.REPORT)
    if not report:
        version.train(found, args.device)
        report = version.compare(found)
    for line in outcome.describe(report["asked"]):
        say(line)
    say(f"{outcome.CHAT}python scripts/chat.py --save_dir {found.folder}")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__.split("\n", 1)[0])
    text = f"the model: a weights file, a Hugging Face folder, or a folder that holds {WEIGHT}"
    parser.add_argument("--model", required=True, metavar="PATH", help=text)
    text = (
        "corrections to add: conversations, as --data_path of train_full_sft.py; without it those of before"
    )
    parser.add_argument("--corrections", metavar="FILE", help=text)
    parser.add_argument("--save_dir", help="folder of the versions (default: that of the model with -taught)")
    text = "teach from the corrections alone, although the model then forgets much"
    parser.add_argument("--without_old_data", action="store_true", help=text)
    parser.add_argument(
        "--seed", type=int, default=0, help="number that selects the old data and their order"
    )
    add_flag(parser, StageArgs, "device")
    return parser.parse_args()


def model_path(path: Path) -> Path:
    """The file or folder of the model. Raises UserError if it is not one that can be taught."""
    if is_file(path / ADAPTER_CONFIG):
        raise UserError(
            f"--model {path} is an adapter (LoRA); merge it first: "
            f"python scripts/convert_model.py --lora {path}"
        )
    if holds_weights(path):
        path = find_weights(path, WEIGHT)
    if not is_file(path) and not is_folder(path):
        raise UserError(f"--model {path}: no such file or folder")
    if is_file(path) and is_pretrained_only(path):
        raise UserError(f"--model {path} continues texts and does not answer yet; teach it after SFT")
    return path


def default_folder(path: Path) -> Path:
    """The folder of the versions of a model: beside the folder of its weights."""
    folder = path if is_folder(path) else path.parent
    folder = folder if folder.name else folder.absolute()
    return folder.with_name(f"{folder.name}-taught")


def collect(folder: Path, given: str | None) -> list[Correction]:
    """All corrections of a folder: those of before and those given now, which are added to its file. Raises
    UserError."""
    path = folder / version.CORRECTIONS
    kept = read_corrections(str(path)) if is_file(path) else []
    if given is None:
        if not kept:
            raise UserError(f"{path} does not exist yet; give a file with --corrections")
        return kept
    corrections, replaced = merged(kept, read_corrections(given))
    records = json_lines(correction.record() for correction in corrections)
    if not kept or records != path.read_bytes():
        atomic_write(path, lambda file: file.write(records))
    new = len(corrections) - len(kept)
    say(
        f"{path}: {len(corrections)} corrections, {new} of them new"
        + (f", {replaced} changed" if replaced else "")
    )
    return corrections


def old_data(model: version.Model) -> Material:
    """What the model has learned. Raises UserError if nothing of it is found."""
    material = find_material(model.path)
    if not material.conversations and not material.texts:
        raise UserError(
            f"{model.path}: the data of its run are not found, so nothing would keep it from forgetting; put "
            "them back, or accept that with --without_old_data"
        )
    for name, part in (("conversations", material.conversations), ("texts", material.texts)):
        if not part:
            warn(f"no {name} of the model's training are found; more of what it knows from them is lost")
    say(
        f"old data: {len(material.conversations):,} conversations, {len(material.texts):,} texts, "
        f"{len(material.held_out):,} held-out conversations"
    )
    return material


def identity(model: version.Model, corrections: list[Correction], args: argparse.Namespace) -> str:
    """Equal for teachings of the same model with the same corrections."""
    content = [model.sha256, args.seed, args.without_old_data]
    text = repr(content).encode() + json_lines(correction.record() for correction in corrections)
    return hashlib.sha256(text).hexdigest()


if __name__ == "__main__":
    with one_line_errors():
        main()
