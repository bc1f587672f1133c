"""The tokens of a conversation or a text that the model should continue, and the text of special tokens
inside it.

Only the chat template writes special tokens. The text of one inside a message or a tool (`<|im_end|>`)
becomes ordinary tokens that spell it, so nobody can end a turn or begin another from within a message.
"""

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import Tokenizer

from common.errors import reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PRIVATE_USE = 0x100000  # the first character of the last plane, which has no meaning


class Piece(NamedTuple):
    """A part of a prompt's text; `is_plain`: the text of a special token, which must not become that
    token."""

    text: str
    is_plain: bool


def prompt_pieces(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict],
    tools: list[dict] | None = None,
    opening: str = "",
    **variables: Any,
) -> list[Piece]:
    """A conversation as the chat template writes it, up to the beginning of the assistant's next turn.

    opening: how that turn begins, such as the call of a chosen tool. variables: of the template, such as
    `enable_thinking` (Qwen3's name, and ours), which MiniMind's template gets as `open_thinking`. Raises
    ValueError if the tokenizer has no chat template, or if the template refuses the conversation."""
    special = _backends(tokenizer)[2]
    options = {"tools": special.hide(tools) or None, "tokenize": False, "add_generation_prompt": True}
    if "enable_thinking" in variables:
        variables["open_thinking"] = variables["enable_thinking"]
    try:
        text = tokenizer.apply_chat_template(special.hide(messages), **options, **variables)
    except Exception as error:  # a template is a program: it may raise anything
        raise ValueError(f"the chat template refuses this conversation: {reason(error)}") from error
    return special.pieces(str(text) + special.hide(opening))


class SpecialTexts:
    """The text of a tokenizer's special tokens. While a template is rendered, private-use characters replace
    this text, one for each of its characters, so that no position changes.

    Args:
        backend: backend of the tokenizer.
    """

    def __init__(self, backend: Tokenizer):
        contents = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        ordered = sorted(contents, key=lambda content: (-len(content), content))
        self.stand_ins = {content: chr(PRIVATE_USE + i) * len(content) for i, content in enumerate(ordered)}
        self.contents = {stand_in: content for content, stand_in in self.stand_ins.items()}
        nothing = "(?!)"  # matches nowhere
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or nothing)
        self.hidden = re.compile("|".join(self.contents) or nothing)

    def hide(self, value: Any) -> Any:
        """The value with stand-ins for the text of special tokens, also in the keys of its objects."""
        if isinstance(value, str):
            return self.pattern.sub(lambda match: self.stand_ins[match[0]], value)
        if isinstance(value, list):
            return [self.hide(entry) for entry in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide(entry) for key, entry in value.items()}
        return value

    def pieces(self, text: str) -> list[Piece]:
        """A rendered text with the hidden text put back, as plain pieces. The first piece is not plain, but
        may be empty."""
        pieces, at = [], 0
        for hidden in self.hidden.finditer(text):
            pieces += [Piece(text[at : hidden.start()], False), Piece(self.contents[hidden[0]], True)]
            at = hidden.end()
        return [*pieces, Piece(text[at:], False)]


def encode_pieces(tokenizer: "PreTrainedTokenizerBase", pieces: list[Piece]) -> list[int]:
    """The token ids of a prompt."""
    usual, plain, _ = _backends(tokenizer)
    tokens: list[int] = []
    for text, is_plain in pieces:
        backend = plain if is_plain else usual
        tokens += backend.encode(text, add_special_tokens=False).ids
    return tokens


def prompt_tokens(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[dict],
    tools: list[dict] | None = None,
    **variables: Any,
) -> list[int]:
    """The token ids of a conversation up to where the assistant's next answer begins. Raises ValueError."""
    return encode_pieces(tokenizer, prompt_pieces(tokenizer, messages, tools, **variables))


def document_tokens(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """The token ids of a text that the model should continue. They begin like a document in pretraining,
    unless the text itself begins with a special token."""
    usual, _, special = _backends(tokenizer)
    tokens = usual.encode(text, add_special_tokens=False).ids
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None or special.pattern.match(text):
        return tokens
    return [start, *tokens]


def plain_backend(backend: Tokenizer) -> Tokenizer:
    """A copy of a tokenizer's backend that treats the text of a special token as ordinary text."""
    plain = Tokenizer.from_str(backend.to_str())
    plain.encode_special_tokens = True
    return plain


@lru_cache(maxsize=8)
def _backends(tokenizer: "PreTrainedTokenizerBase") -> tuple[Tokenizer, Tokenizer, SpecialTexts]:
    """A copy of the tokenizer's backend, its `plain_backend`, and the texts of its special tokens."""
    usual = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
    usual.no_truncation()  # both are of whoever saved the tokenizer, or called it last
    usual.no_padding()
    return usual, plain_backend(usual), SpecialTexts(usual)
