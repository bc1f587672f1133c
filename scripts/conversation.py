"""A conversation with a model, which forgets its oldest turns when the context is full."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from model.prompts import prompt_tokens


@dataclass
class Conversation:
    """The messages of a chat, which forgets its oldest turns when the context is full.

    Attributes:
        limit: tokens of the context, the answer included.
        variables: of the chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    limit: int
    system: str = ""
    tools: list[dict] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict] = field(default_factory=list)  # without the system message

    def all_messages(self) -> list[dict]:
        """The messages, the system message first."""
        if not self.system:
            return self.messages
        return [{"role": "system", "content": self.system}, *self.messages]

    def prompt(self, answer: int) -> tuple[list[int], int]:
        """The prompt's token ids and how many messages were dropped for it.

        The oldest turns are dropped, a user's message with all that follows up to the next one's, until
        `answer` tokens fit behind the prompt (or half the context, if that is less). Raises UserError if the
        newest turn alone is too long, nothing is dropped then, or the chat template refuses the messages."""
        room = self.limit - min(answer, self.limit // 2)
        begins = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        kept = self.messages
        for first in [0, *begins[1:]]:
            self.messages = kept[first:]
            try:
                tokens = prompt_tokens(self.tokenizer, self.all_messages(), self.tools, **self.variables)
            except ValueError as error:
                raise UserError(str(error)) from error
            if len(tokens) <= room:
                return tokens, first
        self.messages = kept
        raise UserError(
            f"the message is too long: {len(tokens)} tokens, and {room} of the {self.limit} are for it"
        )

    def record(self) -> dict[str, Any]:
        """The conversation as a record that SFT can train on."""
        return {"messages": self.all_messages()} | ({"tools": self.tools} if self.tools else {})
