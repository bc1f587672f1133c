"""The inputs of the runs of a comparison. Within a pair they may differ only in what the variants' flags
name. From pair to pair they must stay the same."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.settings import FrozenModelArgs
from tools.compare.variant import Variant
from trainer.weights.paths import settings_path, start_path

Inputs = dict[str, Any]
OF_A_RUN = {"seed", "save_dir", "checkpoint_dir"}  # these settings differ in every run
HELD_OUT_DATA = "held_out_data"
FILES = {  # hash in the fingerprint of a run -> the flag that names the files
    "data": "data_path",
    HELD_OUT_DATA: "eval_data_path",
    "tokenizer": "tokenizer_path",
    "from_weight_sha256": "from_weight",
    "teacher_sha256": "from_teacher_weight",
    "reward_model_sha256": "reward_model",
}
QUIZ = "--quiz "  # prefix of the files that a quiz has read
REPAIR = "restore the old files and repeat the command, or start again under a new --name"


class EditedInput(UserError):
    """A run has read other files than it should. Its result does not count."""


def read_inputs(metrics: Path) -> Inputs:
    """What a run says of itself beside its metrics file: its settings, where the program chose one that one,
    and hashes of its data, weights and code."""
    about = json.loads(settings_path(metrics).read_text())
    chosen = {name: about["environment"][name] for name in ("device", "dtype")}
    inputs = about["settings"] | about["fingerprint"] | chosen | about.get("sources", {})
    return {name: value for name, value in inputs.items() if name not in OF_A_RUN}


def check_unchanged(before: Inputs, now: Inputs, where: str) -> None:
    """Raise EditedInput if a run has read something else than the first run of its variant."""
    differing = [name for name in before | now if before.get(name) != now.get(name)]
    if differing:
        # consequences of other files, such as the number of samples, are not named
        files = [name for name in differing if is_file(name)]
        raise EditedInput(
            f"{where}: {described(files or differing, before, now)} changed since the first run of this "
            f"variant; {REPAIR}"
        )


def check_pair(
    variants: tuple[Variant, Variant], inputs: tuple[Inputs, Inputs], judges: Iterable[str]
) -> None:
    """Compare the second variant with the first. Raises UserError if it is measured in another way, and
    EditedInput if it has read other files although its flags do not name any. judges: settings that decide
    how runs are measured."""
    (one, other), (first, second) = variants, inputs
    if first.get(HELD_OUT_DATA) != second.get(HELD_OUT_DATA):
        raise EditedInput(
            f'variant "{other.name}": its held-out records differ from those of the first; {REPAIR}'
        )
    named, named_by_other = files_of(one), files_of(other)
    # a path with a folder belongs to the code, whose copies may differ
    of_user = {name for name in first.keys() & second.keys() if is_file(name) and "/" not in name}
    of_quiz = {name for name in first.keys() & second.keys() if name.startswith(QUIZ)}
    for name in sorted(of_user | of_quiz | named.keys()):
        if first.get(name) != second.get(name) and named.get(name) == named_by_other.get(name):
            what = described([name], first, second)
            raise EditedInput(
                f'variant "{other.name}": {what} changed since the run of the first variant; {REPAIR}'
            )
    hashes = {flag: name for name, flag in FILES.items()}
    for setting in judges:
        name = hashes.get(setting, setting)
        if name in first and name in second and first[name] != second[name]:
            raise UserError(
                f'variant "{other.name}": --{setting} changes how the runs are measured, and is not that '
                "of the first; give it outside the variants, for all of them"
            )


def files_of(variant: Variant) -> dict[str, Any]:
    """The paths from which a variant reads its files, by the names of their hashes."""
    args = variant.args
    start = None
    if args.from_weight != "none":
        start = start_path(args.save_dir, args.from_weight, args)
    frozen = args.frozen_model_paths() if isinstance(args, FrozenModelArgs) else {}
    return {
        "data": args.data_path,
        "tokenizer": (args.tokenizer_path, start, variant.code),
        "from_weight_sha256": start,
        "teacher_sha256": frozen.get("from_teacher_weight"),
        "reward_model_sha256": getattr(args, "reward_model", None),
    }


def is_file(name: str) -> bool:
    """Whether an input is the hash of files and not a setting."""
    return name in FILES or name.endswith(".py") or name.startswith(QUIZ)


def described(names: Iterable[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A description of inputs: the flag of files, and the two values of settings."""
    words = []
    for name in names:
        if flag := FILES.get(name):
            value = now.get(flag)
            words.append(f"--{flag} {value}" if value else "the held-out data")
        elif is_file(name):
            words.append(name)
        else:
            words.append(f"{name} ({before.get(name)} -> {now.get(name)})")
    return ", ".join(words)
