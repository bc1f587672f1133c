"""The log of a run: the metrics file (the source of truth), a line on the console, and on a terminal a live
bar."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.errors import UserError, WriteError
from common.files import atomic_write

WIDTH = 120  # characters of a line on the console


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first; a last line cut off by a kill is dropped. Raises UserError
    if a line is not a log record."""
    records = []
    for number, line in enumerate(complete_lines(path), 1):
        record = log_record(line)
        if record is None:
            raise UserError(f"{path}:{number} is not a log record; remove the line")
        records.append(record)
    return records


def complete_lines(path: Path) -> list[bytes]:
    """The lines of a file that are written to their end."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # a complete line ends in "\n"


def readable_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first, without damaged lines; none if there is no file."""
    records = (log_record(line) for line in complete_lines(path))
    return [record for record in records if record is not None]


def log_record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is damaged or something else."""
    try:
        record = json.loads(line)
        return record if isinstance(record["update"], int) else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


class MetricsLog:
    """Writes one record per log point to the JSONL file and the console (made on rank 0 only).

    Args:
        path: the metrics file.
        total_updates: length of the whole run, for the bar.
        last_update: the last one that was reported before a resume.
        kept: the records that the file begins with.
        shown: names of the metrics that stand on the console's line, beside the loss.
    """

    def __init__(
        self,
        path: Path,
        total_updates: int,
        last_update: int | None = None,
        kept: Sequence[dict[str, Any]] = (),
        shown: tuple[str, ...] = (),
    ):
        text = "".join(json.dumps(record) + "\n" for record in kept)
        self.path, self.shown = path, shown
        atomic_write(path, lambda file: file.write(text.encode()))
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        form = "{percentage:3.0f}%|{bar:30}| update {n_fmt}/{total_fmt}, {elapsed}<{remaining}"
        options = {"bar_format": form, "file": sys.stdout, "disable": not sys.stdout.isatty()}
        self.bar = tqdm(total=total_updates, initial=last_update or 0, **options)

    def sync(self) -> None:
        """Flush to the disk, before the checkpoint that counts these records; nothing to do when it is
        closed."""
        if self.file.closed:
            return
        with suppress(OSError):  # a full disk was reported by write
            self.file.flush()
            os.fsync(self.file.fileno())

    def tick(self, update: int) -> None:
        """Move the bar, at every update."""
        self.bar.update(update - self.bar.n)

    def write(self, record: dict[str, Any], head: str) -> None:
        """Record one update. `head` opens the console line, e.g. `Epoch:[1/2](100/1200)`."""
        try:
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            raise WriteError(f"{self.path} cannot be written ({error.strerror}); make room") from error
        for line in describe(record, head, self.shown):
            self.bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def close(self) -> None:
        """Flush to the disk."""
        self.sync()
        with suppress(OSError):
            self.file.close()
        self.bar.close()


def duration(seconds: float) -> str:
    """Seconds as text for people."""
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{seconds / 60:.1f} min"


def number(name: str, value: float | None, form: str) -> str:
    """`name: value`; an update that was skipped, or had no target, has none."""
    return f"{name}: {'-' if value is None else format(value, form)}"


def describe(record: dict[str, Any], head: str, shown: tuple[str, ...] = ()) -> list[str]:
    """One record as lines of at most WIDTH characters, each of an update or of an evaluation beginning with
    `head`; what does not fit stands in the metrics file. `shown`: names of the values of its stage."""
    of_stage = [
        (min(i, 3), number(name, record[name], ".3f")) for i, name in enumerate(shown) if name in record
    ]
    parts = [(0, head), (0, number("loss", record["loss"], ".4f"))]  # a larger number is left out first
    parts += [(0 if not of_stage else 5, number("mean loss", record["mean_loss"], ".4f")), *of_stage]
    if record["aux_loss"]:  # not of a dense model
        parts += [(7, number("logits_loss", record["logits_loss"], ".4f"))]
        parts += [(3, number("aux_loss", record["aux_loss"], ".4f"))]
    parts += [
        (4, number("lr", record["learning_rate"], ".2e")),
        (6, number("grad_norm", record["grad_norm"], ".3f")),
    ]
    parts += [(4, f"{record['tokens_per_second']:,.0f} tokens/s"), (8, f"mfu: {record['mfu']:.0%}")]
    parts += [(3, f"data wait: {record['data_wait']:.1%}")] if record["data_wait"] > 0.01 else []
    reserved = f" of {record['reserved_mb']:,.0f}" if "reserved_mb" in record else ""
    parts += [(9, f"{record['memory_mb']:,.0f}{reserved} MB")]
    if record.get("dead_experts") is not None:
        ratio = record["expert_max_min"]
        parts += [(3, f"experts max/min: {'-' if ratio is None else format(ratio, '.1f')}")]
        parts += [(3, f"dead: {record['dead_experts']}")]
    parts += [(0, f"updates skipped: {len(record['skipped'])}")] if "skipped" in record else []
    parts += [(0, f"overflows: {record['overflows']}")] if "overflows" in record else []
    lines = [fitted([*parts, (0, f"eta: {duration(record['seconds_left'])}")])]
    held_out = [number(key, value, ".4f") for key, value in record.items() if key.startswith("eval_")]
    lines += [fitted([(0, head), *enumerate(held_out)])] if held_out else []
    return lines + [sample_line(sample) for sample in record.get("samples", ())]


def fitted(parts: list[tuple[int, str]]) -> str:
    """The texts (rank, text) as one line; while it is longer than WIDTH, the last text of the highest rank is
    left out, but none of rank 0."""
    line = ", ".join(text for _, text in parts)
    while len(line) > WIDTH:
        worst = max(rank for rank, _ in parts)
        if worst == 0:
            break
        last = max(i for i, (rank, _) in enumerate(parts) if rank == worst)
        del parts[last]
        line = ", ".join(text for _, text in parts)
    return line


def sample_line(sample: dict[str, Any]) -> str:
    """What the model wrote, as one line of at most WIDTH characters."""
    reward = f"reward {sample['reward']:.3f}: " if "reward" in sample else ""
    prompt, answer = (repr(str(sample.get(key, ""))) for key in ("prompt", "answer"))
    line = (
        f"  {reward}{prompt if len(prompt) <= WIDTH // 2 else prompt[: WIDTH // 2 - 4] + ' ...'} -> {answer}"
    )
    return line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."
