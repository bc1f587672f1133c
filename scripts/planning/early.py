"""Conversations that pretraining reads beside a text.

A model that has only read a text knows what it says, but a few hundred conversations in SFT hardly teach it
to find this by a question. A model that meets questions and answers while it learns the facts finds more of
them (Allen-Zhu and Li, arXiv:2309.14316). Measurements: docs/dev/LOG.md, "Texts that the rules had not seen".
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.files import atomic_write, json_lines

FILE = "early_conversations.jsonl"
RATIO = 1 / 3  # tokens of conversations for a token of the text
MOST_CHARACTERS = 1e7  # of the file


def write_early(records: Sequence[dict[str, Any]], path: Path, characters: float) -> bool:
    """Write these conversations into a JSON Lines file, as often as RATIO asks for beside a text of so many
    characters, but at least once. Returns whether there are any. The same records give the same file."""
    if not records:
        return False
    length = sum(len(json.dumps(record, ensure_ascii=False)) for record in records)
    copies = max(1, round(min(RATIO * characters, MOST_CHARACTERS) / length))
    rng = random.Random(0)
    shuffled = [record for _ in range(copies) for record in rng.sample(records, len(records))]
    atomic_write(path, lambda file: file.write(json_lines(shuffled)))
    return True
