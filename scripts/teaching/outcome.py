"""What a teaching has come to: which corrections are learned, and which old answers are lost."""

from collections.abc import Iterator
from typing import Any

from dataset.right_answer import is_right
from scripts.teaching.old_questions import last

SHOWN = 20  # answers of a kind, at most
NAMES = {"correction": "not learned", "wording": "not learned in other words", "old": "lost"}


def is_kept(asked: dict[str, Any]) -> bool:
    """Whether a question is answered as it should be: a corrected one as corrected, an old one as before or
    as in the data."""
    references = [asked["reference"]] + ([asked["before"]] if asked["kind"] == "old" else [])
    return any(is_right(last(asked), reference, asked["after"]) for reference in references)


def counts(report: list[dict[str, Any]], kind: str) -> tuple[int, int]:
    """How many questions of a kind are answered as they should be, and how many there are. Old questions
    that a correction means do not count."""
    asked = [each for each in report if each["kind"] == kind and not each.get("meant")]
    return sum(map(is_kept, asked)), len(asked)


def describe(report: list[dict[str, Any]]) -> Iterator[str]:
    """The lines that tell a person."""
    for kind, heading in NAMES.items():
        wrong = [
            each for each in report if each["kind"] == kind and not each.get("meant") and not is_kept(each)
        ]
        if wrong:
            yield f"{heading}:"
        for each in wrong[:SHOWN]:
            yield f"  {last(each)}"
            expected = each["before"] if kind == "old" else each["reference"]
            yield f"    {'before' if kind == 'old' else 'should be'}: {expected}"
            yield f"    now: {each['after']}"
        if len(wrong) > SHOWN:
            yield f"  ... and {len(wrong) - SHOWN} more"
    parts = []
    learned, all_corrections = counts(report, "correction")
    parts.append(f"{learned} of {all_corrections} learned")
    in_words, all_wordings = counts(report, "wording")
    if all_wordings:
        parts.append(f"{in_words} of {all_wordings} in other words")
    kept, old = counts(report, "old")
    parts.append(f"{kept} of {old} old answers kept" if old else "no old questions were asked")
    yield "; ".join(parts)
