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

    def render(self, chat: Chat, find_turns: bool = True, **options: Any) -> Rendered:
        """Render the conversation. `find_turns`: with the spans of the assistant's turns that may be trained.
        options: of the template.

        Raises BadRecord if the template refuses the conversation, UserError if the turns cannot be located.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        has_marks = GENERATION_MARK.search(self.template) is not None
        options |= {"tools": chat.tools, "chat_template": self.template, **self.special_tokens}
        options["return_assistant_tokens_mask"] = has_marks
        try:
            texts, marked = render_jinja_template([chat.messages], **options)
            text = texts[0]
            text.encode("utf-8")
        except Exception as error:  # a template is untrusted code that can raise anything
            reason = " ".join(str(error).split())[:200]
            raise BadRecord(
                f"the chat template refuses this conversation ({type(error).__name__}: {reason})"
            ) from None
        if not find_turns:
            return text, []
        # typed as text by transformers
        spans = cast(list[tuple[int, int]], marked[0]) if has_marks else self._turns_by_prefixes(chat, text)
        if chat.masked:
            spans = _without_masked(chat, spans)
        return text, spans

    def around_question(self) -> tuple[str, str] | None:
        """What the template writes before and after each message of the user, to find one in a text that it
        rendered; None if that is not clear."""
        question = {"role": "user", "content": "\ue000"}  # a character for private use: the template has none
        try:
            messages = [question, {"role": "assistant", "content": "yes"}, question]
            text, _ = self.render(Chat(messages, None), find_turns=False)
            first, between, last = text.split("\ue000")
        except (BadRecord, ValueError):
            return None
        before = os.path.commonprefix([first[::-1], between[::-1]])[::-1]  # noqa: RUF071 (of characters)
        after = os.path.commonprefix([between, last])  # noqa: RUF071
        return (before, after) if before.strip() and after.strip() else None

    def _turns_by_prefixes(self, chat: Chat, text: str) -> list[tuple[int, int]]:
        """The spans of the assistant's turns in the rendered text, for a template without marks."""
        if "add_generation_prompt" not in self.template:
            raise UserError(
                "the chat template has neither generation marks nor a generation prompt, so where an answer "
                f"starts is ambiguous; {ADD_MARKS}"
            )
        spans = []
        for index, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before = chat._replace(messages=chat.messages[:index])
            prompt, _ = self.render(before, find_turns=False, add_generation_prompt=True)
            until = chat._replace(messages=chat.messages[: index + 1])
            turn, _ = self.render(until, find_turns=False)
            spoken = turn.rstrip()  # whitespace after the end-of-turn token belongs to the next turn
            begin = len(os.path.commonprefix([prompt, turn]))  # noqa: RUF071 (of characters)
            opened = begin == len(prompt) or THOUGHTS.search(prompt[:begin])
            if not (opened and text.startswith(spoken)):
                raise UserError(
                    f"the chat template has no generation marks and writes turn {index + 1} differently when "
                    "more turns follow or a prompt goes before, so what to train on is ambiguous; "
                    f"{ADD_MARKS}"
                )
            spans.append((begin, max(begin, len(spoken))))
        return spans


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
