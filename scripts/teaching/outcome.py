"""What a teaching has come to: which corrections are learned, and which old answers are lost."""

from collections.abc import Iterator
from typing import Any

from dataset.right_answer import is_right
from model.answers import answer_message
from scripts.teaching.old_questions import last

SHOWN = 20  # answers of a kind, at most
CHAT = "chat with it: "  # begins the last line of a teaching that has come to its end
NAMES = {"correction": "not learned", "wording": "not learned in other words", "old": "lost"}


def is_kept(asked: dict[str, Any]) -> bool:
    """Whether a question is answered as it should be: a corrected one as corrected, an old one as before or
    as in the data."""
    references = [asked["reference"]] + ([asked["before"]] if asked["kind"] == "old" else [])
    return any(agrees(last(asked), reference, asked["after"]) for reference in references)


def agrees(question: str, reference: str, answer: str) -> bool:
    """Whether an answer is right by the rule of held-out questions; its calls of tools must be those of the
    reference."""
    expected, given = answer_message(reference), answer_message(answer)
    is_same_call = expected.get("tool_calls") == given.get("tool_calls")
    return is_same_call and is_right(question, expected["content"], given["content"])


def counts(report: list[dict[str, Any]], kind: str) -> tuple[int, int]:
    """How many questions of a kind are answered as they should be, and how many there are. Old questions
    that a correction means do not count."""
    asked = [each for each in report if each["kind"] == kind and not each.get("meant")]
    return sum(map(is_kept, asked)), len(asked)


def was_right(asked: dict[str, Any]) -> bool:
    """Whether the answer before was that of the data."""
    return agrees(last(asked), asked["reference"], asked["before"])


def not_kept(report: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The questions of a kind that are not answered as they should be, first those that were. Old questions
    that a correction means are left out."""
    wrong = [each for each in report if each["kind"] == kind and not each.get("meant") and not is_kept(each)]
    return sorted(wrong, key=was_right, reverse=True)  # what was right is a loss


def describe(report: list[dict[str, Any]]) -> Iterator[str]:
    """The lines that tell a person."""
    wrong: list[dict[str, Any]] = []
    for kind, heading in NAMES.items():
        wrong = not_kept(report, kind)
        if wrong:
            yield f"{heading}:"
        for each in wrong[:SHOWN]:
            yield f"  {last(each)}"
            if kind == "old":
                yield f"    before{'' if was_right(each) else ', wrong already'}: {each['before']}"
            else:
                yield f"    should be: {each['reference']}"
            yield f"    now: {each['after']}"
        if len(wrong) > SHOWN:
            yield f"  ... and {len(wrong) - SHOWN} more"
    learned, corrections = counts(report, "correction")
    parts = [f"{learned} of {corrections} learned"]
    in_words, wordings = counts(report, "wording")
    if wordings:
        parts.append(f"{in_words} of {wordings} in other words")
    kept, old = counts(report, "old")
    parts.append(f"{kept} of {old} old answers kept" if old else "no old questions were asked")
    if kept < old:
        right = sum(was_right(each) for each in wrong)  # old ones are the last kind
        parts[-1] += f" (right before: {right} of the {old - kept} lost)"
    yield "; ".join(parts)
