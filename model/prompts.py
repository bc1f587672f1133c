"""The tokens of a conversation that the model is to continue.

Only the chat template writes special tokens. The text of one inside a message or a tool (`<|im_end|>`) becomes ordinary
tokens that spell it, so nobody can end a turn or begin another from within a message.
"""

import re
import secrets
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer

from common.errors import reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Piece(NamedTuple):
    """A part of a prompt's text; `is_plain`: the text of a special token, which must not become that token."""

    text: str
    is_plain: bool


def prompt_pieces(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict],
    tools: list[dict] | None = None,
    opening: str = "",
    **variables: Any,
) -> list[Piece]:
    """A conversation as its chat template writes it, up to where the assistant's next turn begins.

    opening: how that turn begins, such as the call of a chosen tool. variables: of the template, such as
    `enable_thinking`.

    Raises:
        ValueError: the tokenizer has no chat template, or it refuses the conversation.
    """
    special, mark, hidden = special_texts(tokenizer), secrets.token_hex(8), []

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            return special.sub(lambda found: hide_one(found[0]), value)
        if isinstance(value, list):
            return [hide(entry) for entry in value]
        return {hide(key): hide(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    def hide_one(text: str) -> str:
        hidden.append(text)
        return f"{mark}{len(hidden) - 1}x"

    options = {"tools": hide(tools) or None, "tokenize": False, "add_generation_prompt": True}
    try:
        text = tokenizer.apply_chat_template(hide(messages), **options, **variables)
    except Exception as error:  # a template is a program: it may raise anything
        raise ValueError(f"the chat template refuses this conversation: {reason(error)}") from error
    parts = re.split(f"{mark}([0-9]+)x", str(text) + hide(opening))  # text, number of a hidden one, text, ...
    return [Piece(hidden[int(part)], True) if i % 2 else Piece(part, False) for i, part in enumerate(parts)]


def encode_pieces(tokenizer: "PreTrainedTokenizerBase", pieces: list[Piece]) -> list[int]:
    """The token ids of a prompt."""
    usual, plain = _backends(tokenizer)
    encoded = ((plain if is_plain else usual).encode(text, add_special_tokens=False) for text, is_plain in pieces)
    return [token for encoding in encoded for token in encoding.ids]


def prompt_tokens(
    tokenizer: "PreTrainedTokenizerBase", messages: list[dict], tools: list[dict] | None = None, **variables: Any
) -> list[int]:
    """The token ids of a conversation up to where the assistant's next answer begins. Raises ValueError."""
    return encode_pieces(tokenizer, prompt_pieces(tokenizer, messages, tools, **variables))


@lru_cache(maxsize=8)
def special_texts(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    """What finds the text of any special token."""
    added = _backends(tokenizer)[0].get_added_tokens_decoder().values()
    special = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, special)) or "(?!)")


@lru_cache(maxsize=8)
def _backends(tokenizer: "PreTrainedTokenizerBase") -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer's own backend, and one to which the text of a special token is text."""
    usual: Tokenizer = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    plain = Tokenizer.from_str(usual.to_str())
    plain.encode_special_tokens = True
    return usual, plain
