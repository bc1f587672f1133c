"""From tokens to text while an answer is being written: what is shown is never taken back."""

from collections.abc import Collection
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for an incomplete character
CHARACTER = 4  # bytes of the longest character in UTF-8; a token holds at least one


def held_back(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of a text may be the beginning of one of the marks."""
    longest = max(map(len, marks), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class IncrementalDecoder:
    """The text of tokens, as they come. Bytes of a character that is not complete yet are held back."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []  # the last ones told, for what depends on a neighbour, and those held back
        self.told = 0

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self.tokens.append(token)
        return self._take(waits=len(self.tokens) - self.told < CHARACTER)

    def end(self) -> str:
        """What is still held back."""
        return self._take(waits=False)

    def _take(self, waits: bool) -> str:
        text = self._decode(self.tokens)
        if waits and text.endswith(INCOMPLETE):
            return ""
        new = text[len(self._decode(self.tokens[: self.told])) :]
        self.tokens = self.tokens[self.told :]
        self.told = len(self.tokens)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """The text of an answer up to the first stop string, which is left out. What may become one is held back."""

    def __init__(self, tokenizer: Any, stops: Collection[str] = ()):
        self.decoder, self.stops = IncrementalDecoder(tokenizer), tuple(stops)
        self.held, self.stopped = "", False
        self.decoded = self.shown = 0  # characters of the tokens so far, and those of them that were let out

    def push(self, token: int) -> str:
        """The text that this token lets out."""
        return self._let_out(self.decoder.push(token))

    def end(self) -> str:
        """The rest."""
        text = self._let_out(self.decoder.end())
        rest, self.held = self.held, ""
        self.shown += len(rest)
        return text + rest

    def _let_out(self, text: str) -> str:
        if self.stopped:
            return ""
        self.decoded += len(text)
        text = self.held + text
        places = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if places:
            self.stopped, keep = True, len(text) - min(places)
        else:
            keep = held_back(text, self.stops)
        self.held = "" if self.stopped else text[len(text) - keep :]
        self.shown += len(text) - keep
        return text[: len(text) - keep]
