"""Patterns of files: `*`, `?` and `[...]` as in a shell, and `PATTERN[:N]`, the first N matching files in the
order of their names."""

import re
from fnmatch import fnmatchcase

from common.errors import UserError

FIRST = re.compile(r"\[:(\d+)\]$")


def has_pattern(path: str) -> bool:
    """Whether a path contains a pattern."""
    return any(character in path for character in "*?[")


def fits(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern by the rules of `glob`: * matches no / and no leading dot of a hidden
    file."""
    parts, wanted = name.split("/"), pattern.split("/")
    hidden = [part for part, want in zip(parts, wanted, strict=False) if part[:1] == "." != want[:1]]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)) and not hidden


def split_first(path: str) -> tuple[str, int | None]:
    """Split `PATTERN[:N]` into (PATTERN, N); another path becomes (path, None). Raises UserError if [:N] does
    not follow a pattern, or N is 0."""
    found = FIRST.search(path)
    if found is None:
        return path, None
    pattern, count = path[: found.start()], int(found[1])
    if count == 0 or not has_pattern(pattern):
        raise UserError(
            f"{path}: [:N] must follow a pattern, and N must be at least 1, as in 'data/*.parquet[:5]'"
        )
    return pattern, count


def take_first(files: list[str], count: int, pattern: str) -> list[str]:
    """The first `count` files that match a pattern, by name. Raises UserError if there are fewer, so that a
    missing file is noticed."""
    if len(files) < count:
        fitting = f"the pattern fits {len(files)}"
        raise UserError(f"{pattern}[:{count}]: {fitting}; check the path, or lower the number")
    return sorted(files)[:count]
