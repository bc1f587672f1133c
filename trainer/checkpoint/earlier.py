"""Sets aside the files of an earlier run of the same name, which are never overwritten."""

import json
import os
import re
from pathlib import Path

from common.errors import UserError
from common.files import files_in, is_taken, is_there, read_errors, remove, sync, write_errors, write_json
from common.settings import FrozenModelArgs, StageArgs
from trainer.devices.process_group import Logger
from trainer.weights import paths


def run_files(folder: Path, run_name: str) -> list[Path]:
    """The files of a run of this name in a folder: weights, states, metrics, settings, adapters, curves."""
    endings = r"(_metrics|_run|_resume|_resume_previous|_best_resume|_update_\d+)?(\.\w+)*"
    return [path for path in files_in(folder) if re.fullmatch(re.escape(run_name) + endings, path.name)]


def earlier_run_files(args: StageArgs) -> list[Path]:
    """The files that a new run with these settings sets aside. The log is not one of them: the new run
    appends to it."""
    name = paths.run_name(args.save_weight, args)
    best = paths.run_name(f"{args.save_weight}_best", args)
    out, states = Path(args.save_dir), Path(args.checkpoint_dir)
    # States come first: the remaining files of a run without states cannot be mistaken for a run to resume.
    files = run_files(states, name) + run_files(out, name) + run_files(out, best)
    if args.tensorboard_dir:
        files += run_files(Path(args.tensorboard_dir), name)
    log = paths.log_path(args, name)
    kept = {path for path in files if path.suffix == ".log" or (log and path.absolute() == log.absolute())}
    return [path for path in dict.fromkeys(files) if path not in kept]  # both folders may be the same


def check_starts(args: StageArgs) -> None:
    """Raise UserError if a new run starts from, or later reads, a file that it would set aside and write
    anew."""
    starts = args.frozen_model_paths() if isinstance(args, FrozenModelArgs) else {}
    if args.from_weight != "none":
        starts["from_weight"] = [paths.start_path(args.save_dir, args.from_weight, args)]
    if args.resume_from is not None:
        starts["resume_from"] = [Path(args.resume_from)]
    files = earlier_run_files(args)
    for flag, start in ((flag, start) for flag, several in starts.items() for start in several):
        if any(is_there(start) and start.samefile(path) for path in files):
            raise UserError(
                f"--{flag} {start} is a file of the run --save_weight {args.save_weight}, which a new run of "
                "this name sets aside; give another --save_weight, or continue that run (--from_resume 1)"
            )


def set_earlier_run_aside(args: StageArgs) -> None:
    """Move the files of an earlier run of this name into folders `earlier_<n>` beside them, so that a
    forgotten --from_resume 1 loses nothing."""
    files = [path.absolute() for path in earlier_run_files(args)]
    if not files:
        return
    number = 1
    while any(is_taken(path.parent / f"earlier_{number}") for path in files):
        number += 1
    moves = {str(path): str(path.parent / f"earlier_{number}" / path.name) for path in files}
    write_json(moves_path(args), moves)
    complete_moves(args)
    places = " and ".join(sorted({str(Path(place).parent) for place in moves.values()}))
    name = paths.run_name(args.save_weight, args)
    text = f"there was an earlier run named {name}; its files are now in {places}"
    Logger(f"{text} (--from_resume 1 would have continued it)")


def moves_path(args: StageArgs) -> Path:
    """The file that lists the moves. It exists only while files are being moved. After a kill, the next start
    completes the moves before it looks for a state to resume from."""
    return Path(args.checkpoint_dir) / f".{paths.run_name(args.save_weight, args)}_moves.json"


def complete_moves(args: StageArgs) -> None:
    """Move all listed files that have not been moved yet; rank 0 only."""
    path = moves_path(args)
    if not is_there(path):
        return
    with read_errors(path):
        moves = json.loads(path.read_bytes())
    for source, kept in moves.items():
        with write_errors(Path(kept)):
            Path(kept).parent.mkdir(exist_ok=True)
            if is_taken(source):
                os.replace(source, kept)
    for folder in {Path(kept).parent for kept in moves.values()}:
        sync(folder)
    remove(path)
