"""Conversations that pretraining reads beside a text.

A model that has only read a text has learned its facts. A few hundred conversations in SFT hardly teach it to
answer questions about them. It answers more questions if pretraining contains conversations, too (Allen-Zhu
and Li, arXiv:2309.14316). Measurements: docs/dev/LOG.md, "Texts that the rules had not seen".
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
    """Write these conversations into a JSON Lines file. They are repeated until they have RATIO times the
    characters of the text, and written at least once. The same records give the same file. Returns whether
    there are any.

    characters: those of the text.
    """
    if not records:
        return False
    length = sum(len(json.dumps(record, ensure_ascii=False)) for record in records)
    copies = max(1, round(min(RATIO * characters, MOST_CHARACTERS) / length))
    rng = random.Random(0)
    shuffled = [record for _ in range(copies) for record in rng.sample(records, len(records))]
    atomic_write(path, lambda file: file.write(json_lines(shuffled)))
    return True
