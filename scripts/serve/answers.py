"""What an answer consists of: reasoning, content and tool calls, found in its text while it is being written.

The marks are those of model/chat_template.jinja: `<think>` ... `</think>` at the beginning, and
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere behind it. A call that is not well formed, or of a
tool that was not offered, stays text. Nothing that is found is executed.
"""

import json
import secrets
from collections.abc import Collection
from typing import Any

from model.answers import CALL, END_CALL, END_THINK, THINK, parse_call
from scripts.serve.text import held_back


class AnswerParser:
    """Turns the pieces of an answer's text into deltas of OpenAI's chat messages: {"content"}, {"reasoning_content"}
    or {"tool_calls"}.

    thinks: the answer begins inside its reasoning. tools: names that calls may have; none: no calls are looked for.
    """

    def __init__(self, thinks: bool = False, tools: Collection[str] = ()):
        self.tools = frozenset(tools)
        self.state = self._thinking if thinks else self._beginning
        self.text = ""  # not told yet
        self.blank = True  # nothing was told in this state: its first line breaks are the template's
        self.calls = 0
        self.ended = False

    def push(self, text: str) -> list[dict[str, Any]]:
        """The deltas that a piece of text completes."""
        self.text += text
        deltas: list[dict[str, Any]] = []
        while (delta := self.state()) is not None:
            deltas += [delta] if delta else []
        return deltas

    def end(self) -> list[dict[str, Any]]:
        """The deltas of what is still held back."""
        self.ended = True
        return self.push("")

    # Each state takes what it can from self.text. It returns a delta, {} for one more look, or None to wait for text.

    def _beginning(self) -> dict[str, Any] | None:
        text = self.text.lstrip()
        if not self.ended and len(text) < len(THINK) and THINK.startswith(text):
            return None
        if text.startswith(THINK):
            self.text, self.state = text[len(THINK) :], self._thinking
        else:
            self.blank, self.state = False, self._content
        return {}

    def _thinking(self) -> dict[str, Any] | None:
        text, found, rest = self.text.partition(END_THINK)
        if not found:
            keep = 0 if self.ended else held_back(text, [END_THINK])
            text, rest = text[: len(text) - keep], text[len(text) - keep :]
        text = text.lstrip("\n") if self.blank else text
        said = text.rstrip("\n")  # the last line breaks are the template's, if the reasoning ends there
        self.text = rest if found else text[len(said) :] + rest
        self.blank = self.blank and not said
        if found:
            self.blank, self.state = True, self._content
        elif self.ended:
            self.text = ""
        return {"reasoning_content": said} if said else {} if found else None

    def _content(self) -> dict[str, Any] | None:
        if self.blank:
            self.text = self.text.lstrip("\n")
        before, found, rest = self.text.partition(CALL) if self.tools else (self.text, "", "")
        if found:
            words = before.rstrip("\n")  # the line break before a call is the template's
            self.text, self.state, before = before[len(words) :] + found + rest, self._call, words
        else:
            keep = self._kept_of_content()
            before, self.text = self.text[: len(self.text) - keep], self.text[len(self.text) - keep :]
        self.blank = self.blank and not before
        return {"content": before} if before else {} if found else None

    def _kept_of_content(self) -> int:
        """Characters to hold back: a mark that may begin, and line breaks that belong to it."""
        if not self.tools or self.ended:
            return 0
        mark = held_back(self.text, [CALL])
        words = self.text[: len(self.text) - mark]
        return mark + len(words) - len(words.rstrip("\n"))

    def _call(self) -> dict[str, Any] | None:
        gap, _, text = self.text.partition(CALL)
        body, found, rest = text.partition(END_CALL)
        if not found and not self.ended:
            return None
        self.state = self._content
        call = openai_call(body, self.tools) if found else None
        if call is None:  # it stays text, up to where another call may begin
            self.text, self.blank = rest, False
            return {"content": gap + CALL + body + found}
        self.text, self.blank = rest, True
        self.calls += 1
        return {"tool_calls": [{"index": self.calls - 1, "id": f"call_{secrets.token_hex(12)}", **call}]}


def openai_call(body: str, tools: Collection[str]) -> dict[str, Any] | None:
    """A call in OpenAI's form, its arguments as JSON text; None if it is not well formed or of no such tool."""
    call = parse_call(body)
    if call is None or call["name"] not in tools:
        return None
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {"type": "function", "function": {"name": call["name"], "arguments": arguments}}


def merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message."""
    for field, value in delta.items():
        if field == "tool_calls":
            calls = [{name: part for name, part in call.items() if name != "index"} for call in value]
            message.setdefault(field, []).extend(calls)
        else:
            message[field] = (message.get(field) or "") + value
