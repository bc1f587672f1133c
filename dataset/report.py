"""The report of a token cache (outcomes of records, lengths of samples), and the policy for bad records."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from common.errors import UserError, reason, say
from common.launcher import launch
from dataset.files import Source, format_source
from dataset.held_out import Split
from dataset.messages import BadRecord

OUTCOMES = {  # of a record -> text in the report
    "split": "split into several samples",
    "empty": "empty",
    "cut": "cut",
    "dropped": "dropped for lack of a target",
    "too_long": "left out as too long",
    "bad": "bad",
}
TOTALS = ("records", "tokens", "targets", "target_bytes", "weighted")
MAX_LISTED_FIELDS = 12
MAX_LISTED_FILES = 20
PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 100)


def make_report(
    options: Any, counts: Counter, unused: Counter, bad: list[str], lengths: np.ndarray, lost: dict[str, Any]
) -> dict[str, Any]:
    """Counts of outcomes and percentiles of sample lengths; a function of the data alone. unused: records per
    ignored field. bad: `BadRecords.lines`. lost: `RoundTrip.report`."""
    report: dict[str, Any] = {name: counts[name] for name in (*TOTALS, *OUTCOMES)} | lost
    report |= {"kind": options.kind, "max_length": options.max_length, "samples": len(lengths)}
    report |= {"held_out": bool(options.split and options.split.held_out)}
    report |= {"bad": len(bad), "first_bad": bad[0] if bad else ""}
    if len(lengths):
        percentiles = map(int, np.percentile(lengths, PERCENTILES))
        report["percentiles"] = dict(zip(map(str, PERCENTILES), percentiles, strict=True))
    report["unused_fields"] = most_used(unused)
    return report


def describe_files(paths: list[str], skipped: list[str], is_held_out: bool) -> str:
    """Which files were read, whether for held-out data, and which were skipped."""
    notes = ["held out"] if is_held_out else []
    if skipped:
        notes.append(f"not read: {list_paths(skipped)}")
    note = f" ({'; '.join(notes)})" if notes else ""
    return list_paths(paths) + note


def list_paths(paths: list[str]) -> str:
    """The first MAX_LISTED_FILES paths, and how many more there are."""
    more = f" and {len(paths) - MAX_LISTED_FILES:,} more" if len(paths) > MAX_LISTED_FILES else ""
    return ", ".join(paths[:MAX_LISTED_FILES]) + more


def describe_records(report: dict) -> str:
    """The outcomes of the records, in a line."""
    text = ", ".join(counted(report[name], name) for name in ("records", "samples"))
    for name, words in OUTCOMES.items():
        if report.get(name):
            text += f", {words} {report[name]:,} ({report[name] / report['records']:.1%})"
    if report.get("weighted"):
        text += f", with a weight {report['weighted']:,} ({report['weighted'] / report['records']:.1%})"
    if report.get("unused_fields"):
        text += f"; unused fields: {describe_unused(report['unused_fields'])}"
    return text


def counted(number: int, plural: str) -> str:
    """A number of things, whose plural ends with an s."""
    return f"{number:,} {plural.removesuffix('s') if number == 1 else plural}"


def describe_unused(fields: dict[str, int]) -> str:
    """The ignored fields in most records, and in how many."""
    return ", ".join(f"{repr(name)[1:-1][:60]} {count:,}" for name, count in most_used(fields).items())


def most_used(fields: dict[str, int]) -> dict[str, int]:
    """The MAX_LISTED_FIELDS fields in most records."""
    ordered = sorted(fields.items(), key=lambda item: (-item[1], item[0]))
    return dict(ordered[:MAX_LISTED_FIELDS])


def format_report(report: dict, paths: list[str]) -> str:
    """The report as text; paths: the files that were read."""
    kind = f"{report['kind']}, held out" if report["held_out"] else report["kind"]
    tokens, targets, longest = report["tokens"], report["targets"], report["max_length"]
    mean = tokens / report["samples"]
    lengths = ", ".join(f"{percent} % {length:,}" for percent, length in report["percentiles"].items())
    return f"""data: {list_paths(paths)}
{kind}, at most {longest} tokens a sample: {describe_records(report)}
  tokens {tokens:,}, of which targets {targets:,} ({targets / tokens:.1%})
  length of a sample: mean {mean:.1f}; percentiles {lengths}
  a batch padded to {longest} would be {mean / longest:.1%} real tokens"""


class BadRecords:
    """The policy for bad records, --on_bad_data: the first one ends the run, or all are skipped and listed.

    paths: the files that are read. lines: FILE:LINE and reason of each bad record.
    """

    def __init__(self, paths: list[str], on_bad_data: str):
        self.paths, self.on_bad_data = paths, on_bad_data
        self.lines: list[str] = []

    def attempt(self, source: Source, record: dict | BadRecord, function: Callable[[dict], Any]) -> Any:
        """function(record), or None for a bad record that is skipped. Raises UserError."""
        try:
            if isinstance(record, BadRecord):
                raise record
            return function(record)
        except UserError:  # of the tokenizer
            raise
        except Exception as error:  # data and templates may raise anything
            line = f"{format_source(self.paths[source.file], source.line)}: {describe_error(error)}"
        if self.on_bad_data == "stop":
            raise stop_error(line)
        self.lines.append(line)
        return None


def describe_error(error: Exception) -> str:
    """The message for a record whose processing raised this error."""
    if isinstance(error, BadRecord):
        return str(error)
    if isinstance(error, UnicodeEncodeError):
        surrogate = ascii(error.object[error.start])[1:-1]
        return f"half a character ({surrogate}); write the whole one or remove it"
    return f"not usable ({type(error).__name__}: {reason(error)}); correct it or leave it out"


def stop_error(line: str) -> UserError:
    """The error for a bad record."""
    return UserError(f"{line} (with --on_bad_data skip bad records are skipped and listed)")


def report_gaps(report: dict, paths: list[str]) -> None:
    """Print which documents have pages without text."""
    if launch().local_rank == 0 and not report["held_out"]:
        for number, without_text, pages in report["pages_without_text"]:
            what = f"pages without text (pictures, scans): {without_text} of {pages:,}"
            say(f"{paths[number]}: {what}; only the others are read")


def check_bad_records(report: dict, options: Any, listed: str) -> None:
    """Print how many bad records are skipped. Raises UserError if that is not allowed, or too many.

    report: of `make_report`. listed: says where all of them are listed.
    """
    count, records = report["bad"], report["records"]
    if not count:
        return
    if options.on_bad_data == "stop":  # they were skipped when the cache was built
        raise stop_error(report["first_bad"])
    share = f"{count:,} of {records:,} records ({count / records:.1%})"
    if count > options.max_bad_share * records:
        raise UserError(
            f"{report['first_bad']}; {share} are bad, more than --max_bad_share {options.max_bad_share:g} "
            f"allows; {listed}; correct them or raise --max_bad_share"
        )
    if launch().local_rank == 0:
        say(f"bad records are skipped: {share}; {listed}")


class EmptySplit(UserError):
    """A share holds out none of the records that can be read, or all of them."""


def no_samples_error(report: dict, split: Split | None, paths: list[str]) -> UserError:
    """The error for data without a single sample or prompt."""
    if split and not report["records"]:
        amount, other = ("none", "larger") if split.held_out else ("all", "smaller")
        return EmptySplit(
            f"--eval_share {split.share:g} holds out {amount} of the records of {list_paths(paths)}; give a "
            f"{other} share, more data, or separate files of held-out data (--eval_data_path of a "
            "stage). Records with the same first question or text are held out together"
        )
    first = f"; the first bad one: {report['first_bad']}" if report["bad"] else ""
    return UserError(
        f"{list_paths(paths)}: none of the {report['records']} records can be used "
        f"({describe_records(report)}{first}); raise --max_seq_len or look at the data"
    )
