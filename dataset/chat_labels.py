"""Which tokens of a conversation are targets: every assistant turn, with its end-of-turn token, unless the
data say that it must not be trained.

The chat template decides where these are. If it has `{% generation %}` marks, transformers reports the
characters inside them while rendering; no token patterns are searched for, so a user who writes
`<|im_start|>assistant` is not mistaken for the assistant. Without marks, the conversation is rendered up to
each answer's generation prompt and up to its end, and the difference is the answer. Where the prompt closes
empty thoughts that the answer fills (MiniMind's and Qwen3's templates), the answer begins where the two part,
within the thoughts. Each rendering must be a prefix of the next, so a template that rewrites earlier turns is
refused.
"""

import os
import re
from dataclasses import dataclass
from typing import Any, cast

from common.errors import UserError
from dataset.json_values import BadRecord
from dataset.records import Chat

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
THOUGHTS = re.compile(r"<think>\s*$")  # opened at the end of a text
ADD_MARKS = "put {% generation %} ... {% endgeneration %} around the assistant's text in the chat template"


# text, and the [start, end) characters of each assistant turn in it
Rendered = tuple[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations and finds the assistant's characters in the result."""

    template: str  # Jinja text
    special_tokens: dict  # its variables

    def render(self, chat: Chat) -> Rendered:
        """Render the conversation; the spans are of the assistant's turns that may be trained.

        Raises BadRecord if the template refuses the conversation, UserError if the turns cannot be located.
        """
        if GENERATION_MARK.search(self.template):
            text, spans = self._rendered(chat.messages, chat.tools, return_assistant_tokens_mask=True)
        else:
            text, spans = self._render_by_prefixes(chat)
        if chat.masked:
            spans = _without_masked(chat, spans)
        return text, spans

    def around_question(self) -> tuple[str, str] | None:
        """What the template writes before and after each message of the user, to find one in a text that it
        rendered; None if that is not clear."""
        question = {"role": "user", "content": "\ue000"}  # a character for private use: the template has none
        try:
            text, _ = self._rendered([question, {"role": "assistant", "content": "yes"}, question], None)
            first, between, last = text.split("\ue000")
        except (BadRecord, ValueError):
            return None
        before = os.path.commonprefix([first[::-1], between[::-1]])[::-1]  # noqa: RUF071 (of characters)
        after = os.path.commonprefix([between, last])  # noqa: RUF071
        return (before, after) if before.strip() and after.strip() else None

    def _rendered(self, messages: list[dict], tools: list[dict] | None, **options: Any) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        options |= {"tools": tools, "chat_template": self.template, **self.special_tokens}
        try:
            texts, spans = render_jinja_template([messages], **options)
            texts[0].encode("utf-8")
        except Exception as error:  # a template is untrusted code that can raise anything
            reason = " ".join(str(error).split())[:200]
            raise BadRecord(
                f"the chat template refuses this conversation ({type(error).__name__}: {reason})"
            ) from None
        # typed as text by transformers
        return texts[0], cast(list[tuple[int, int]], list(spans[0]) if spans else [])

    def _render_by_prefixes(self, chat: Chat) -> Rendered:
        if "add_generation_prompt" not in self.template:
            raise UserError(
                "the chat template has neither generation marks nor a generation prompt, so where an answer "
                f"starts is ambiguous; {ADD_MARKS}"
            )
        full, _ = self._rendered(chat.messages, chat.tools)
        spans = []
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before = chat.messages[:index]
            prompt, _ = self._rendered(before, chat.tools, add_generation_prompt=True)
            turn, _ = self._rendered(chat.messages[: index + 1], chat.tools)
            spoken = turn.rstrip()  # whitespace after the end-of-turn token belongs to the next turn
            begin = len(os.path.commonprefix([prompt, turn]))  # noqa: RUF071 (of characters)
            opened = begin == len(prompt) or THOUGHTS.search(prompt[:begin])
            if not (opened and full.startswith(spoken)):
                raise UserError(
                    f"the chat template has no generation marks and writes turn {index + 1} differently when "
                    "more turns follow or a prompt goes before, so what to train on is ambiguous; "
                    f"{ADD_MARKS}"
                )
            spans.append((begin, max(begin, len(spoken))))
        return full, spans


def _without_masked(chat: Chat, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans of the assistant's turns without those of turns that must not be trained."""
    spoken = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if len(spans) != len(spoken):
        raise UserError(
            f"the chat template has {len(spans)} stretches between generation marks for {len(spoken)} turns "
            f"of the assistant, so which to leave out of training is ambiguous; "
            f"{ADD_MARKS}, once for each turn"
        )
    return [span for index, span in zip(spoken, spans, strict=True) if index not in chat.masked]
