"""Log-probabilities of tokens in the form of OpenAI's chats."""

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
        """A token as text, or as `bytes:\\xe4` if it is no whole character; special tokens spell their names."""
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
