"""The report of a token cache: what became of the records, lengths of the samples, fields that nothing reads;
whether bad records are skipped or end the run."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from common.errors import UserError, say
from common.launcher import launch
from dataset.files import place

COUNTS = {  # what becomes of the records of each kind of training, as the report calls it
    "documents": "documents",
    "documents_split": "split into several samples",
    "empty_documents": "empty",
    "pairs": "pairs",
    "pairs_cut": "cut",
    "dropped_alike": "dropped as alike",
    "conversations": "conversations",
    "cut_at_turn": "cut after a turn",
    "cut_inside_turn": "cut inside the first turn",
    "masked_turns": "turns not to be trained",
    "special_texts": "with special tokens as text",
    "dropped_without_label": "dropped for lack of a label",
    "skipped_bad_records": "bad",
}
TOTALS = ("records", "samples", "tokens", "targets", "target_bytes")
PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 100)
MOST_FIELDS = 12  # of the fields that nothing reads, the most frequent ones stand in the report


def make_report(counts: Counter, unused: Counter, lengths: np.ndarray, max_length: int) -> dict:
    """All counts under fixed names, and the lengths of the samples [S]. The same data give the same
    report."""
    percentiles = np.percentile(lengths, PERCENTILES) if len(lengths) else []
    most_used = sorted(unused.items(), key=lambda item: (-item[1], item[0]))
    return {
        **{name: int(counts[name]) for name in (*TOTALS, *COUNTS)},
        "length_mean": round(float(lengths.mean()), 1) if len(lengths) else 0.0,
        "length_percentiles": dict(zip(map(str, PERCENTILES), map(int, percentiles), strict=False)),
        "padding_efficiency": round(counts["tokens"] / (max(1, len(lengths)) * max_length), 4),
        "unused_fields": dict(most_used[:MOST_FIELDS]),
    }


def describe_records(report: dict) -> str:
    """What became of the records, in a line."""
    parts = []
    for name, text in COUNTS.items():
        if report[name]:
            share = ""
            if report[name] < report["records"]:
                share = f" ({report[name] / report['records']:.1%})"
            parts.append(f"{text} {report[name]:,}{share}")
    return ", ".join(parts)


def describe_unused_fields(report: dict) -> str:
    """The fields that nothing reads."""
    fields = [f"{repr(name)[1:-1][:40]} {count:,}" for name, count in report["unused_fields"].items()]
    return f"unused fields: {', '.join(fields)}"


def format_report(report: dict, paths: Sequence[str]) -> str:
    """The report as text; paths: the files that were read."""
    r = report
    kind = r["kind"]
    if r["held_out"]:
        kind += ", held out"
    records = f"{r['records']:,} records in {len(paths)} files"
    targets = f"{r['targets']:,} ({r['targets'] / r['tokens']:.1%})"
    lengths = ", ".join(f"{percent} % {length:,}" for percent, length in r["length_percentiles"].items())
    names = ", ".join(paths[:5])
    if len(paths) > 5:
        names += f" and {len(paths) - 5:,} more"
    lines = [
        f"data: {names}",
        f"{kind}, at most {r['max_length']} tokens a sample: {records}",
        f"  {describe_records(r)}",
        f"  samples {r['samples']:,}, tokens {r['tokens']:,}, of which targets {targets}",
        f"  length of a sample: mean {r['length_mean']}; percentiles {lengths}",
        f"  a batch padded to {r['max_length']} would be {r['padding_efficiency']:.1%} real tokens",
    ]
    if r["unused_fields"]:
        lines.append(f"  {describe_unused_fields(r)}")
    return "\n".join(lines)


def first_bad_record(report: dict, paths: list[str]) -> str:
    """Place and reason of the first bad record that a report counts."""
    file, line, reason = report["first_bad_record"]
    return f"{place(paths[file], line)}: {reason}"


def stop_at_bad_record(line: str, on_bad_data: str) -> None:
    """Raise UserError, unless bad records are to be skipped. `line`: FILE:LINE: reason."""
    if on_bad_data == "stop":
        raise UserError(f"{line} (with --on_bad_data skip bad records are skipped and listed)")


def judge_bad_records(first: str, count: int, records: int, listed: str, max_share: float) -> None:
    """Report how many bad records are skipped. Raises UserError if they are more than `max_share` of all.

    first: FILE:LINE: reason of the first one. count: how many there are. records: how many records there are.
    listed: where all of them stand.
    """
    share = f"{count:,} of {records:,} records ({count / records:.1%})"
    if count > max_share * records:
        raise UserError(
            f"{first}; {share} are bad, more than --max_bad_share {max_share:g} allows; {listed}; "
            f"fix them or raise --max_bad_share"
        )
    if launch().local_rank == 0:
        say(f"bad records are skipped: {share}; {listed}")
