"""What a run tells: the metrics file (the source of truth), and a line on a pipe or a live bar on a terminal."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from trainer.checkpoint import atomic_write


def warn(text: str) -> None:
    """One `warning: ...` line on stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, oldest first; a last line cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # a whole line ends in "\n"


class MetricsLog:
    """Writes one record per log point to the JSONL file and the console (made on rank 0 only).

    Args:
        path: the metrics file.
        total_updates: length of the whole run, for the bar and the time left.
        last_update: a resumed run keeps the records up to this update and writes the later ones again; None starts
            an empty file.
    """

    def __init__(self, path: Path, total_updates: int, last_update: int | None = None):
        kept = [] if last_update is None else [r for r in read_metrics(path) if r["update"] <= last_update]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        atomic_write(path, lambda file: file.write(text.encode()))
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open for the whole run)
        self.total_updates = total_updates
        self.bar = None
        if sys.stdout.isatty():
            form = "{percentage:3.0f}%|{bar:30}| update {n_fmt}/{total_fmt}, {elapsed}{postfix}"
            self.bar = tqdm(total=total_updates, initial=last_update or 0, bar_format=form, file=sys.stdout)

    def tick(self, update: int) -> None:
        """Move the bar, at every update."""
        if self.bar is not None:
            self.bar.update(update - self.bar.n)

    def write(self, record: dict[str, Any], head: str) -> None:
        """Record one update. `head` opens the console line, e.g. `Epoch:[1/2](100/1200)`."""
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        text = f"{head}, {describe(record)}, eta: {self.time_left(record)}"
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text, file=sys.stdout)
            self.bar.set_postfix_str(f"loss: {record['loss']:.4f}, eta: {self.time_left(record)}", refresh=False)

    def time_left(self, record: dict[str, Any]) -> str:
        """Seconds per update so far, times the updates to come."""
        seconds = record["seconds"] / record["update"] * (self.total_updates - record["update"])
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{seconds / 60:.1f} min"

    def close(self) -> None:
        """Flush to the disk and leave the terminal tidy."""
        os.fsync(self.file.fileno())
        self.file.close()
        if self.bar is not None:
            self.bar.close()


def describe(record: dict[str, Any]) -> str:
    """One record for a person."""
    parts = [f"loss: {record['loss']:.4f}", f"logits_loss: {record['logits_loss']:.4f}"]
    parts += [f"aux_loss: {record['aux_loss']:.4f}", f"lr: {record['learning_rate']:.2e}"]
    parts += [f"grad_norm: {record['grad_norm']:.3f}", f"{record['tokens_per_second']:,.0f} tokens/s"]
    parts += [f"mfu: {record['mfu']:.0%}", f"data wait: {record['data_wait']:.1%}", f"{record['memory_mb']:,.0f} MB"]
    if "eval_loss" in record:
        parts += [f"eval_loss: {record['eval_loss']:.4f}", f"eval_bpb: {record['eval_bpb']:.4f}"]
    return ", ".join(parts)
