"""Files of questions and prompts: JSON lines that are checked one by one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError


def read_questions(path: str | Path, flag: str, check: Callable[[dict], Any], what: str, remedy: str) -> list[dict]:
    """The objects of a JSONL file, each with its place FILE:LINE as `key`.

    Args:
        path: given to `flag`.
        check: raises ValueError, LookupError or TypeError for what is not such a question.
        what: the name of such a question, with its article. remedy: what to do about a file or a line that is wrong.

    Raises:
        UserError: the file is missing or empty, or a line is not a question.
    """
    if not Path(path).is_file():
        raise UserError(f"{flag} {path} does not exist; {remedy}")
    questions = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
            check(question)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f"{path}:{number} is not {what}; {remedy}") from error
        questions.append(question | {"key": f"{path}:{number}"})
    if not questions:
        raise UserError(f"{flag} {path} is empty; {remedy}")
    return questions


def check_types(question: dict, fields: dict[str, type]) -> None:
    """Raise TypeError or LookupError unless a question has these fields with values of these types."""
    if not all(isinstance(question[field], kind) for field, kind in fields.items()):
        raise TypeError("a field of another type")
