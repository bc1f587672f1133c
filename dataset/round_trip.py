"""What a tokenizer loses of the text: a sample of it is encoded and decoded again. Upper case, spaces, line
ends or characters without a token are lost to the model, which can neither read nor write them."""

import re
import unicodedata
from collections import Counter
from typing import Any

from tokenizers import Tokenizer

from common.errors import UserError, warn
from common.launcher import launch

FIRST_TEXTS, SAMPLE_EVERY = 64, 256  # the texts that are checked: the first ones, then one of so many
CHUNK_CHARACTERS, MAX_CHUNKS = 1000, 8  # characters of a text that are encoded at a time, and how often
MAX_LISTED_CHARACTERS = 8  # characters


class RoundTrip:
    """Counts the characters of a sample of the texts, and those that a tokenizer loses or alters.

    Texts that are the same to Unicode (NFC) count as the same. What comes back in addition, such as a blank
    between any two tokens, counts like what is lost. left_out: what is not part of the texts.
    """

    def __init__(self, backend: Tokenizer, excluded: re.Pattern[str]):
        self.backend, self.excluded = backend, excluded
        self.texts = self.characters = 0
        self.lost: Counter[str] = Counter()

    def check(self, text: str) -> None:
        """Take a text into account, if it is one of the sample."""
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
    """Say what the tokenizer loses, if that is final. Raises UserError if it is a larger share than may be.
    report: of `RoundTrip.report`."""
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
        warn(f"{text}; eval_bpb, which compares tokenizers, is left out")
