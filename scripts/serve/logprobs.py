"""Log-probabilities of tokens in OpenAI's two forms, that of chats and that of completions."""

import codecs
from collections.abc import Sequence
from typing import Any

from model.sampling import TokenLogprob

LOWEST = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have


def byte_characters() -> dict[str, int]:
    """The characters by which a byte-level vocabulary writes bytes: printable ones as they are, the others in order
    from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenTexts:
    """What the tokens of a tokenizer spell."""

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.characters = tokenizer, byte_characters()
        self.added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
        self.known: dict[int, tuple[str, bytes]] = {}

    def text_and_bytes(self, token: int) -> tuple[str, bytes]:
        """A token as text, or as `bytes:\\xe4` if it is no whole character, and its bytes; special tokens spell their
        names."""
        if token not in self.known:
            raw = self._bytes(token)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self.known[token] = text, raw
        return self.known[token]

    def _bytes(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode()
        entry = self.tokenizer.convert_ids_to_tokens(token) or ""
        if all(character in self.characters for character in entry):
            return bytes(self.characters[character] for character in entry)
        return self.tokenizer.decode([token]).encode()

    def whole(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return b"".join(self.text_and_bytes(token)[1] for token in tokens).decode("utf-8", "replace")

    def chat(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """`logprobs.content` of a chat's choice."""
        return [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*other) for other in one.top]}
            for one in entries
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self.text_and_bytes(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


class TextLogprobs:
    """`logprobs` of a choice of /v1/completions, as its tokens come."""

    def __init__(self, texts: TokenTexts):
        self.texts, self.offset = texts, 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, entries: Sequence[TokenLogprob | int]) -> dict[str, list]:
        """The object for these tokens. One without anything before it has no probability: it comes as its number."""
        lists: dict[str, list] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        for entry in entries:
            token, logprob, top = (entry, None, None) if isinstance(entry, int) else entry
            text, raw = self.texts.text_and_bytes(token)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(None if logprob is None else finite(logprob))
            lists["top_logprobs"].append(None if logprob is None else self._top(token, logprob, top or []))
            lists["text_offset"].append(self.offset)
            self.offset += len(self.decoder.decode(raw))
        return lists

    def _top(self, token: int, logprob: float, top: list[tuple[int, float]]) -> dict[str, float]:
        """The likeliest tokens, and the one that was taken; of several with the same text the likeliest."""
        best: dict[str, float] = {}
        for other, value in [*top, (token, logprob)]:
            best.setdefault(self.texts.text_and_bytes(other)[0], finite(value))
        return best


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if logprob > LOWEST else LOWEST
