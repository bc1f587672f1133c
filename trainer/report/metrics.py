"""The log of a run: the metrics file (the source of truth), lines on the console, and a progress bar if the
console is a terminal."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.utils import disp_len, disp_trim

from common.errors import UserError, WriteError, say
from common.files import atomic_write, is_there, read_errors

WIDTH = 100  # columns of a line on the console
KEPT_RECORDS = 500  # the last records, which warnings look at beside the first and the best


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
    return path.read_bytes().split(b"\n")[:-1] if is_there(path) else []  # a complete line ends in "\n"


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


def first_best_and_last(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first record, the one with the lowest eval_loss, and the last KEPT_RECORDS, in their order."""
    if len(records) <= KEPT_RECORDS:
        return records
    evaluated = [i for i, record in enumerate(records) if record.get("eval_loss") is not None]
    best = min(evaluated, key=lambda i: records[i]["eval_loss"], default=0)
    chosen = {0, best, *range(len(records) - KEPT_RECORDS, len(records))}
    return [records[i] for i in sorted(chosen)]


class MetricsLog:
    """Writes one record per log point to the JSONL file and the console (made on rank 0 only).

    Args:
        path: the metrics file.
        total_updates: length of the whole run, for the bar.
        resumed_update: the last update before a resume; the records up to it are kept. None in a new run.
        console_metrics: names of the metrics that are shown on the console's line, beside the loss.
    """

    def __init__(
        self,
        path: Path,
        total_updates: int,
        resumed_update: int | None = None,
        console_metrics: tuple[str, ...] = (),
    ):
        kept = []
        if resumed_update is not None:
            with read_errors(path):
                kept = [record for record in readable_records(path) if record["update"] <= resumed_update]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        atomic_write(path, lambda file: file.write(text.encode()))
        self.path, self.console_metrics = path, console_metrics
        self.records = first_best_and_last(kept)  # for warnings
        self.warned = {text.partition(":")[0] for record in kept for text in record.get("warnings", ())}
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        form = "{percentage:3.0f}%|{bar:30}| update {n_fmt}/{total_fmt}, {elapsed}<{remaining}"
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        options = {"bar_format": form, "file": sys.stdout, "disable": not is_terminal}
        self.bar = tqdm(total=total_updates, initial=resumed_update or 0, **options)

    def sync(self) -> None:
        """Flush to the disk. Called before the checkpoint that these records belong to. Does nothing if the
        file is closed."""
        if self.file.closed:
            return
        with suppress(OSError):  # a full disk was reported by write
            self.file.flush()
            os.fsync(self.file.fileno())

    def write(self, record: dict[str, Any], head: str) -> None:
        """Record one update. `head` opens the console line, e.g. `Epoch:[1/2](100/1200) 4%`."""
        self.records = first_best_and_last([*self.records, record])
        self.bar.update(record["update"] - self.bar.n)
        try:
            self.file.write(json.dumps(record, allow_nan=False) + "\n")
            self.file.flush()
        except OSError as error:
            raise WriteError(f"{self.path} cannot be written ({error.strerror}); make room") from error
        for line in describe(record, head, self.console_metrics):
            say(line)

    def close(self) -> None:
        """Flush to the disk."""
        self.sync()
        with suppress(OSError):
            self.file.close()
        self.bar.close()


def duration(seconds: float, units: tuple[str, str, str] = ("s", "min", "h")) -> str:
    """Seconds as text for people."""
    second, minute, hour = units
    if seconds < 59.5:
        return f"{seconds:.0f} {second}"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} {hour} {minutes:02d} {minute}" if hours else f"{seconds / 60:.1f} {minute}"


def describe(record: dict[str, Any], head: str, console_metrics: tuple[str, ...] = ()) -> list[str]:
    """The part of a record that people look at, as lines of at most WIDTH columns. The metrics file holds the
    rest.

    head: opens the first line, e.g. `Epoch:[1/2](100/1200) 4%`.
    console_metrics: names of the values of the stage.
    """
    parts = [head, value_text("loss", record["loss"], ".4f")]
    names = [name for name in console_metrics if name in record]
    parts += [value_text(name, record[name], ".3f") for name in names]
    if not names:
        parts.append(value_text("mean", record["mean_loss"], ".4f"))
    held_out = [name for name in record if name.startswith("eval_")]
    parts += [value_text(name, record[name], ".4f") for name in held_out]
    if record["aux_loss"]:
        parts.append(value_text("aux_loss", record["aux_loss"], ".4f"))
    if record.get("expert_max_min"):
        parts.append(f"experts: {record['expert_max_min']:.1f} to 1")
    if record.get("dead_experts"):
        parts.append(f"dead experts: {record['dead_experts']}")
    parts.append(value_text("lr", record["learning_rate"], ".2e"))
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if record["mfu"] is not None:
        parts.append(f"mfu: {record['mfu']:.0%}")
    if record["data_wait"] > 0.05:
        parts.append(f"data wait: {record['data_wait']:.0%}")
    if "skipped" in record:
        parts.append(f"updates skipped: {len(record['skipped'])}")
    if "overflows" in record:
        parts.append(f"overflows: {record['overflows']}")
    parts.append(f"eta: {duration(record['seconds_left'])}")
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 > WIDTH:
            lines[-1] += ","
            lines.append(f"  {part}")
        else:
            lines[-1] += f", {part}"
    return [*lines, *(sample_line(sample) for sample in record.get("samples", ()))]


def value_text(name: str, value: float | None, form: str) -> str:
    """`name: value`, or `name: -` for None: an update that was skipped or had no target has no value."""
    return f"{name}: {'-' if value is None else format(value, form)}"


def sample_line(sample: dict[str, Any]) -> str:
    """A generated text as one line of at most WIDTH columns; a Chinese character takes two."""
    reward = f"reward {sample['reward']:.3f}: " if "reward" in sample else ""
    prompt = shortened(repr(str(sample.get("prompt", ""))), WIDTH // 2)
    answer = repr(str(sample.get("answer", "")))
    return shortened(f"  {reward}{prompt} -> {answer}", WIDTH)


def shortened(text: str, columns: int) -> str:
    """The text, or as much of it as fits into so many columns, with an ellipsis."""
    return text if disp_len(text) <= columns else disp_trim(text, columns - 4) + " ..."
