"""From a request to the tokens of its prompt.

In a conversation only the chat template writes special tokens (model/prompts.py). The prompt of a plain
completion is taken as it stands, special tokens included.
"""

import json
from typing import Any

from common.errors import reason
from dataset.records import message_of
from model.answers import CALL
from model.prompts import document_tokens, encode_pieces, prompt_pieces
from scripts.serve.protocol import ApiError


def turns_of(messages: list[Any]) -> list[dict]:
    """The messages of a request as chat templates take them. Raises ApiError."""
    try:
        return [message_of(item, f"message {number}") for number, item in enumerate(messages, 1)]
    except Exception as error:  # a request may hold anything
        raise ApiError(reason(error), param="messages", code="invalid_value") from error


def call_opening(names: list[str]) -> str:
    """How an answer that has to call one of these tools begins, as the chat templates write calls; with only
    one tool up to its arguments. Empty if there are none."""
    if not names:
        return ""
    if len(names) > 1:
        return f'{CALL}\n{{"name": "'
    name = json.dumps(names[0], ensure_ascii=False)
    return f'{CALL}\n{{"name": {name}, "arguments": {{'


def too_long(length: int, why: str, param: str) -> ApiError:
    """A prompt does not fit a context of so many tokens."""
    message = f"The context of this model has {length} tokens; {why}."
    return ApiError(message, param=param, code="context_length_exceeded")


def check_length(tokens: list[int], length: int, param: str) -> None:
    """Raise ApiError if a prompt is empty, or leaves no room for an answer."""
    if not tokens:
        raise ApiError("the prompt is empty", param=param, code="invalid_value")
    if len(tokens) >= length:
        raise too_long(length, f"the prompt of {len(tokens)} leaves no room in it for an answer", param)


class PromptWriter:
    """Writes prompts for a model whose context has `length` tokens. What cannot be answered is an
    ApiError."""

    def __init__(self, tokenizer: Any, length: int):
        self.tokenizer, self.length = tokenizer, length
        vocabulary = tokenizer.get_vocab()
        self.size, self.widest = max(vocabulary.values()) + 1, max(map(len, vocabulary))

    def chat(
        self, turns: list[dict], tools: list[dict], thinking: bool | None = None, opening: str = ""
    ) -> list[int]:
        """The tokens of a conversation (`turns_of`), up to where the assistant's next turn begins. opening:
        how that turn begins (`call_opening`)."""
        options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        try:
            # before the template is run
            self._check_size(len(json.dumps([turns, tools], ensure_ascii=False)), "messages")
            if opening and CALL not in self.tokenizer.get_chat_template(tools=tools):
                message = f"the chat template of this model has no calls of tools in {CALL}; use 'auto'"
                raise ApiError(message, param="tool_choice", code="unsupported_value")
            pieces = prompt_pieces(self.tokenizer, turns, tools, opening, **options)
        except (ValueError, RecursionError) as error:
            raise ApiError(reason(error), param="messages", code="invalid_value") from error
        self._check_size(sum(len(piece.text) for piece in pieces), "messages")
        tokens = encode_pieces(self.tokenizer, pieces)
        check_length(tokens, self.length, "messages")
        return tokens

    def completion(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a prompt of /v1/completions: of a text, unless it begins with a special token, behind
        the token that documents begin with."""
        if isinstance(prompt, str):
            self._check_size(len(prompt), "prompt")
            prompt = document_tokens(self.tokenizer, prompt)
        if max(prompt, default=0) >= self.size:
            message = f"{max(prompt)} is no token of this model, whose vocabulary has {self.size}"
            raise ApiError(message, param="prompt", code="invalid_value")
        check_length(prompt, self.length, "prompt")
        return prompt

    def _check_size(self, characters: int, param: str) -> None:
        """Refuse what cannot fit before any work is done for it."""
        if characters > self.length * self.widest:
            raise too_long(self.length, f"{characters} characters do not fit it", param)
