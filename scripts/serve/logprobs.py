"""Log-probabilities of tokens in the forms of OpenAI's chats and of its completions."""

import codecs
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from model.sampling import TokenLogprob

LOWEST = -9999.0  # what OpenAI writes for minus infinity, which JSON does not have


class TokenTexts:
    """What the tokens of a tokenizer spell."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.characters = {
            character: byte for byte, character in bytes_to_unicode().items()
        }  # of a byte-level vocabulary
        self.added = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}

    def content(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """`logprobs.content` of a chat's choice."""
        return [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*other) for other in one.top]}
            for one in entries
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token as text, or as `bytes:\\xe4` if it is no whole character; special tokens spell their
        names."""
        raw = self._bytes(token)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(raw)}

    def _bytes(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode()
        entry = self.tokenizer.convert_ids_to_tokens(token) or ""
        if all(character in self.characters for character in entry):
            return bytes(self.characters[character] for character in entry)
        return self.tokenizer.decode([token]).encode()


class TextLogprobs:
    """`logprobs` of a choice of a completion, piece by piece."""

    def __init__(self, texts: TokenTexts):
        self.texts, self.decoder, self.characters = texts, codecs.getincrementaldecoder("utf-8")("replace"), 0

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """What the next tokens add."""
        new: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for entry in self.texts.content(entries):
            likely = {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            new["tokens"].append(entry["token"])
            new["token_logprobs"].append(entry["logprob"])
            new["top_logprobs"].append({entry["token"]: entry["logprob"]} | likely)
            new["text_offset"].append(self.characters)
            self.characters += len(self.decoder.decode(bytes(entry["bytes"])))
        return new
