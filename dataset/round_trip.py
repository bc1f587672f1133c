"""Measures text that a tokenizer loses: a sample of the data is encoded and decoded again. The model can
neither read nor write case, spaces, line ends or characters that do not survive this."""

import re
import unicodedata
from collections import Counter
from typing import Any

from tokenizers import Tokenizer

from common.errors import UserError, warn
from common.launcher import launch

FIRST_TEXTS, SAMPLE_EVERY = 64, 256  # texts that are checked: the first ones, then one of SAMPLE_EVERY
CHUNK_CHARACTERS, MAX_CHUNKS = (
    1000,
    8,
)  # characters that are compared at a time; of a longer text, so many such chunks
MAX_LISTED_CHARACTERS = 8  # characters


class RoundTrip:
    """Counts the characters of a sample of the texts, and those that a tokenizer loses or alters.

    Texts with the same NFC normalisation count as equal. Added characters, such as a space between any two
    tokens, count like lost ones. excluded: pattern of text that is removed before comparing.
    """

    def __init__(self, backend: Tokenizer, excluded: re.Pattern[str]):
        self.backend, self.excluded = backend, excluded
        self.texts = self.characters = 0
        self.lost: Counter[str] = Counter()

    def check(self, text: str) -> None:
        """Compare a text, if it is in the sample."""
        self.texts += 1
        if self.texts > FIRST_TEXTS and self.texts % SAMPLE_EVERY:
            return
        text = self.excluded.sub("", text)
        for start in range(0, len(text), max(CHUNK_CHARACTERS, len(text) // MAX_CHUNKS)):
            before = text[start : start + CHUNK_CHARACTERS]
            ids = self.backend.encode(before, add_special_tokens=False).ids
            after = self.backend.decode(ids, skip_special_tokens=False)
            self.characters += len(before)
            if after != before:
                self.lost += difference(before, after)

    def report(self) -> dict[str, Any]:
        """Characters that were compared and lost, and how often the most frequent ones of these were."""
        most_frequent = dict(
            sorted(self.lost.items(), key=lambda item: (-item[1], item[0]))[:MAX_LISTED_CHARACTERS]
        )
        return {"compared": self.characters, "lost": self.lost.total(), "lost_characters": most_frequent}


def difference(before: str, after: str) -> Counter[str]:
    """The characters that are only in one of two texts: in the first one, unless more were added."""
    first, second = (Counter(unicodedata.normalize("NFC", text)) for text in (before, after))
    lost, added = first - second, second - first
    return lost if lost.total() >= added.total() else added


def check_lost_text(report: dict, max_lost_text: float, is_final: bool = True) -> None:
    """Warn about lost text (is_final: the whole sample has been compared). Raises UserError above
    `max_lost_text`. report: of `RoundTrip.report`."""
    if not report["lost"]:
        return
    share = report["lost"] / report["compared"]
    listed = ", ".join(f"{char!r} {count:,}" for char, count in report["lost_characters"].items())
    text = (
        f"the tokenizer loses or alters {report['lost']:,} of {report['compared']:,} characters of a sample "
        f"of the data ({share:.2%}): {listed}"
    )
    if share > max_lost_text:
        raise UserError(
            f"--tokenizer_path: {text}; take one that keeps all text, such as scripts/train_tokenizer.py "
            f"makes, or accept the loss with --max_lost_text {share * 1.5:.1g}"
        )
    if is_final and launch().local_rank == 0:
        warn(f"{text}; eval_bpb is left out, because it could not be compared with other tokenizers")
