"""Files of questions: JSON lines that are checked one by one."""

import json
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError


def read_questions(path: str | Path, flag: str, check: Callable[[dict], object], what: str, remedy: str) -> list[dict]:
    """The questions of a file, each with its place FILE:LINE as `key`.

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
