"""Files of questions and prompts, in any kind of file that training reads: records that are checked one by
one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError
from dataset.files import iter_blocks, parse_block, place
from dataset.records import BadRecord


def read_questions(
    path: str | Path, flag: str, check: Callable[[dict], Any], what: str, remedy: str
) -> list[dict]:
    """The records of a file, each with its `place` as `key`.

    Args:
        path: given to `flag`.
        check: raises ValueError, LookupError or TypeError for what is not such a question.
        what: the name of such a question, with its article. remedy: what to do about a file or a record that
            is wrong.

    Raises:
        UserError: the file is missing or empty, or a record is not a question.
    """
    if not Path(path).is_file():
        raise UserError(f"{flag} {path} does not exist; {remedy}")
    if not Path(path).stat().st_size:
        raise UserError(f"{flag} {path} is empty; {remedy}")
    questions = []
    for block in iter_blocks([str(path)]):
        for line, question in parse_block(block):
            where = place(block.path, line)
            try:
                if isinstance(question, BadRecord):
                    raise question
                check(question)
            except (BadRecord, ValueError, LookupError, TypeError) as error:
                raise UserError(f"{where} is not {what}; {remedy}") from error
            questions.append(question | {"key": where})
    return questions


def check_types(question: dict, fields: dict[str, type]) -> None:
    """Raise TypeError or LookupError unless a question has these fields with values of these types."""
    if not all(isinstance(question[field], kind) for field, kind in fields.items()):
        raise TypeError("a field of another type")
