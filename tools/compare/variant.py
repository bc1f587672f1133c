"""A variant of a comparison."""

from pathlib import Path
from typing import NamedTuple

from common.settings import StageArgs


class Variant(NamedTuple):
    """A variant of a comparison: its name, the folder of its code, and the flags of its runs as words and as
    settings."""

    name: str
    code: Path
    words: list[str]
    args: StageArgs


def letter_of(number: int) -> str:
    """The letters of a variant, counted from 0: A to Z, then AA, AB and so on, like the columns of a
    spreadsheet."""
    letters = ""
    while number >= 0:
        letters = chr(65 + number % 26) + letters
        number = number // 26 - 1
    return letters
