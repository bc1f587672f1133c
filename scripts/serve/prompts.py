"""From a request to the tokens of its prompt.

In a conversation only the chat template writes special tokens (model/prompts.py). The prompt of a plain completion is
taken as it stands, special tokens included.
"""

from typing import Any

from tokenizers import Tokenizer

from common.errors import reason
from dataset.json_records import BadRecord
from dataset.messages import parse_message
from model.prompts import encode_pieces, prompt_pieces, special_texts


class BadPrompt(ValueError):
    """A prompt that cannot be answered, and why."""


class TooLong(BadPrompt):
    """A prompt that leaves no room for an answer."""


def characters(value: Any) -> int:
    """Characters of all texts in a JSON value, the names of fields included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(len, value)) + sum(map(characters, value.values()))
    return sum(map(characters, value)) if isinstance(value, list) else 0


class PromptWriter:
    """Writes prompts for a model whose context has `length` tokens."""

    def __init__(self, tokenizer: Any, length: int):
        self.tokenizer, self.length = tokenizer, length
        self.backend: Tokenizer = tokenizer.backend_tokenizer
        self.special = special_texts(tokenizer)
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.size, self.widest = max(vocabulary.values()) + 1, max(map(len, vocabulary))
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.start = [token for token in (bos, eos) if token is not None][:1]  # as documents begin in pretraining

    def chat(
        self, messages: list[Any], tools: list[dict], thinking: bool | None = None, opening: str = ""
    ) -> list[int]:
        """The tokens of a conversation, up to where the assistant's next turn begins. opening: how that turn begins.

        Raises:
            BadPrompt: a message is not well formed, or the template refuses the conversation.
        """
        if not self.tokenizer.chat_template:
            raise BadPrompt("this model has no chat template; use /v1/completions")
        options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        self._check_size(characters([messages, tools]))  # before the template is run
        try:
            turns = [parse_message(item, f"message {number}").message for number, item in enumerate(messages, 1)]
            pieces = prompt_pieces(self.tokenizer, turns, tools, opening, **options)
        except (BadRecord, ValueError, RecursionError) as error:
            raise BadPrompt(reason(error)) from error
        self._check_size(sum(len(piece.text) for piece in pieces))
        return self._checked(encode_pieces(self.tokenizer, pieces))

    def text(self, text: str) -> list[int]:
        """The tokens of a text, with the token in front that documents begin with, unless it begins with a special one.

        Raises:
            TooLong: it leaves no room for an answer.
        """
        self._check_size(len(text))
        return self._checked(self.start_of(text) + self.backend.encode(text, add_special_tokens=False).ids)

    def start_of(self, text: str) -> list[int]:
        """The token that is put in front of a text."""
        return [] if self.special.match(text) else self.start

    def tokens(self, tokens: list[int]) -> list[int]:
        """A prompt that is given as tokens.

        Raises:
            BadPrompt: one of them is none, or there are too many or none at all.
        """
        wrong = next((number for number, token in enumerate(tokens) if not 0 <= token < self.size), None)
        if wrong is not None:
            raise BadPrompt(f"number {wrong} is no token of this model, whose vocabulary has {self.size}")
        return self._checked(tokens)

    def _check_size(self, characters: int) -> None:
        """Refuse what cannot fit before any work is done for it."""
        if characters > self.length * self.widest:
            raise TooLong(f"The context of this model has {self.length} tokens; {characters} characters do not fit it.")

    def _checked(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise BadPrompt("the prompt is empty")
        if len(tokens) >= self.length:
            raise TooLong(
                f"The context of this model has {self.length} tokens; the prompt of {len(tokens)} leaves no room in it "
                f"for an answer."
            )
        return tokens
