"""What a model was trained on, found through the descriptions of its run and of the runs before it."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError, warn
from common.files import is_file, is_there
from common.settings import ROOT, StageArgs
from dataset.files import expand_paths, read_records
from dataset.held_out import Split
from dataset.messages import BadRecord
from dataset.mixing import split_weights
from dataset.records import Chat, parse
from tools.carry.collect import stage_of_run
from trainer.weights.paths import metrics_path, run_name, settings_path

CONVERSATIONS = ("train_full_sft", "train_lora", "train_distillation")  # stages that read conversations
MOST_CONVERSATIONS, MOST_TEXTS = 20_000, 20_000  # that are read, from the beginning of the data
MOST_RUNS = 10  # that are followed back


class Material(NamedTuple):
    """Conversations and texts that a model has learned, and held-out conversations."""

    conversations: list[Chat]
    texts: list[str]
    held_out: list[Chat]
    files: list[str]  # that they were read from


def find_material(weights: Path) -> Material:
    """What the model in a weights file was trained on. Everything is empty if no description of its run lies
    beside it, or if the data are gone."""
    found = Material([], [], [], [])
    for stage, args in runs_before(weights):
        own: list[tuple[str, str]] = []  # kind of the records, data path
        if stage == "train_pretrain":
            own.append(("pretrain", args.data_path or ""))
        elif stage in CONVERSATIONS and getattr(args, "kind", "sft") == "sft":
            own.append(("sft", args.data_path or ""))
            own.append(("pretrain", getattr(args, "replay_data_path", None) or ""))
        for kind, value in own:
            split = Split(args.eval_share) if args.eval_share else None
            records = read(value, kind, args, split, found.files)
            if kind == "pretrain":
                found.texts.extend(text for text in records if isinstance(text, str))
                continue
            found.conversations.extend(chat for chat in records if isinstance(chat, Chat))
            held_out = split._replace(held_out=True) if split else None
            source = value if split else args.eval_data_path or ""
            found.held_out.extend(
                each for each in read(source, kind, args, held_out, []) if isinstance(each, Chat)
            )
    del found.conversations[MOST_CONVERSATIONS:], found.texts[MOST_TEXTS:]
    return found


def runs_before(weights: Path) -> Iterator[tuple[str, StageArgs]]:
    """The stage and the settings of the run that wrote a weights file, and of the runs that it began with,
    the newest first."""
    folder, stem = weights.parent, re.sub(r"_resume(_previous)?$", "", weights.stem)
    for _ in range(MOST_RUNS):
        path = settings_path(metrics_path(folder, stem))
        if not is_file(path) and "_best_" in stem:
            path = settings_path(metrics_path(folder, stem.replace("_best_", "_", 1)))
        if not is_file(path):
            return
        try:
            _, stage, args = stage_of_run(path)
        except UserError as error:  # a run of the engine, or of a stage of one's own
            warn(f"{path}: {error}; what this run was trained on is not used")
            return
        yield stage, args
        if args.from_weight == "none":
            return
        given = Path(args.from_weight)
        if given.name == args.from_weight and given.suffix != ".pth":
            stem = run_name(args.from_weight, args)
        else:
            folder, stem = given.parent, given.stem


def read(
    value: str, kind: str, args: StageArgs, split: Split | None, files: list[str]
) -> Iterator[Chat | str]:
    """The records of a data path, as a stage with these settings reads them: conversations and, of kind
    pretrain, texts. Bad ones are left out; there are none if the files are gone. files: a list that receives
    their paths."""
    paths = files_of(value)
    files += paths
    records = read_records(paths, args.text_separator or "")
    if split:
        records = split.choose(records, paths, is_document=kind == "pretrain")
    for _, record in islice(records, MOST_TEXTS if kind == "pretrain" else MOST_CONVERSATIONS):
        try:
            if isinstance(record, BadRecord):
                continue
            parsed = parse(record, kind)
        except BadRecord:
            continue
        yield from [parsed.document] if parsed.document else parsed.chats


def files_of(value: str) -> list[str]:
    """The files of a run's data path; none if they are gone."""
    sources, _ = split_weights(value) if value else ([], [])
    try:
        return expand_paths(",".join(here(source) for source in sources)) if sources else []
    except UserError:  # they have been moved
        return []


def here(source: str) -> str:
    """A source of data; one that is not in the current folder is searched in the repository, where scripts
    such as the quickstart run."""
    below = ROOT / source
    return str(below) if not is_there(source) and is_there(below) else source
