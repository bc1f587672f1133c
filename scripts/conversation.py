"""A conversation with a model that drops its oldest turns when the context is full."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from model.prompts import prompt_tokens


def first_kept(messages: list[dict], fits: Callable[[list[dict]], bool]) -> int:
    """The index of the first message to keep. The oldest turns (a user's message with everything up to the
    next one) are dropped until `fits` accepts the rest. If not even the newest turn fits, its index is
    returned."""
    if fits(messages):
        return 0
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    starts = users[1:] or [0]
    if not fits(messages[starts[-1] :]):
        return starts[-1]
    # a shorter end fits where a longer one does: some ten trials find it among a thousand turns
    return starts[bisect_left(starts[:-1], True, key=lambda first: fits(messages[first:]))]


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

        The oldest turns are dropped until `answer` tokens (or half the context, if that is less) fit after
        the prompt. Raises UserError if the newest turn alone is too long, or the chat template refuses the
        messages; the conversation is then unchanged."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        room = self.limit - min(answer, self.limit // 2)
        history = [*self.messages, *messages]

        def tokens_of(kept: list[dict]) -> list[int]:
            try:
                return prompt_tokens(self.tokenizer, system + kept, self.tools, **self.variables)
            except ValueError as error:
                raise UserError(str(error)) from error

        first = first_kept(history, lambda kept: len(tokens_of(kept)) <= room)
        tokens = tokens_of(history[first:])
        if len(tokens) > room:
            raise UserError(
                f"the message is too long: it has {len(tokens)} tokens, and there is room for {room} of the "
                f"{self.limit}"
            )
        self.messages = history[first:]
        return tokens, first
