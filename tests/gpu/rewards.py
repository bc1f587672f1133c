"""A reward for runs of models that know nothing: `--reward tests.gpu.rewards:even_characters`."""

from typing import Any


def even_characters(prompt: list[dict[str, Any]], completion: str, record: dict[str, Any]) -> float:
    """The share of characters with an even code: of random answers nearly always another one."""
    return sum(ord(character) % 2 == 0 for character in completion) / max(1, len(completion))
