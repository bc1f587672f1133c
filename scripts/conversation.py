"""A conversation with a model, which forgets its oldest turns when the context is full."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from model.prompts import prompt_tokens


@dataclass
class Conversation:
    """The messages of a chat.

    Attributes:
        limit: tokens of the context, the answer included.
        variables: of the chat template.
        messages: without the system message.
    """

    tokenizer: PreTrainedTokenizerBase
    limit: int
    system: str = ""
    tools: list[dict] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict] = field(default_factory=list)

    def extend(self, messages: list[dict], answer: int) -> tuple[list[int], int]:
        """Add messages; returns the prompt's token ids and how many old messages were dropped for it.

        The oldest turns are dropped, a user's message with all that follows up to the next one's, until
        `answer` tokens fit behind the prompt (or half the context, if that is less). Raises UserError if the
        newest turn alone is too long, or the chat template refuses the messages; nothing changes then."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        room = self.limit - min(answer, self.limit // 2)
        history = [*self.messages, *messages]
        turns = [i for i, message in enumerate(history) if message["role"] == "user"]
        for first in [0, *turns[1:]]:
            kept = history[first:]
            try:
                tokens = prompt_tokens(self.tokenizer, system + kept, self.tools, **self.variables)
            except ValueError as error:
                raise UserError(str(error)) from error
            if len(tokens) <= room:
                self.messages = kept
                return tokens, first
        raise UserError(
            f"the message is too long: {len(tokens)} tokens, and {room} of the {self.limit} are for it"
        )
