"""Patterns of files: `*`, `?` and `[...]` as in a shell, and `PATTERN[:N]`, the first N of the files that a
pattern fits, in the order of their names."""

import re
from fnmatch import fnmatchcase

from common.errors import UserError

FIRST = re.compile(r"\[:(\d+)\]$")


def has_pattern(path: str) -> bool:
    """Whether it stands for the files that a pattern fits."""
    return any(character in path for character in "*?[")


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern fits a name, as `glob` has it: * is no /, nor the dot of a hidden file."""
    parts, wanted = name.split("/"), pattern.split("/")
    hidden = [part for part, want in zip(parts, wanted, strict=False) if part[:1] == "." != want[:1]]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)) and not hidden


def split_first(path: str) -> tuple[str, int | None]:
    """`PATTERN[:N]` as (PATTERN, N); another path as (path, None). Raises UserError where [:N] stands behind
    no pattern, or N is 0."""
    found = FIRST.search(path)
    if found is None:
        return path, None
    pattern, count = path[: found.start()], int(found[1])
    if count == 0 or not has_pattern(pattern):
        raise UserError(f"{path}: [:N], with N of at least 1, stands behind a pattern: 'data/*.parquet[:5]'")
    return pattern, count


def take_first(files: list[str], count: int, pattern: str) -> list[str]:
    """The first `count` of the files that a pattern fits, by name. Raises UserError where there are fewer: a
    file that is missing must not go unnoticed."""
    if len(files) < count:
        fitting = f"the pattern fits {len(files)}"
        raise UserError(f"{pattern}[:{count}]: {fitting}; check the path, or lower the number")
    return sorted(files)[:count]
