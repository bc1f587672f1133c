"""An answer while it is being written: from tokens to text, and from text to reasoning, content and tool
calls.

Text that was shown is never taken back. The marks are those of model/chat_template.jinja: `<think>` ...
`</think>` at the beginning, and `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` anywhere behind
it. A malformed call, or one of a tool that was not offered, stays text. Nothing is executed.
"""

import json
import secrets
from bisect import bisect_left
from collections.abc import Collection
from typing import Any

from model.answers import CALL, END_CALL, END_THINK, THINK, parse_call
from model.generation import Answer

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for an incomplete character
CHARACTER = 4  # bytes of the longest character in UTF-8; a token holds at least one


def held_back(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of a text may be the beginning of one of the marks."""
    longest = max(map(len, marks), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class IncrementalDecoder:
    """The text of tokens, as they come. Bytes of a character that is not complete yet are held back."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        # the last ones shown, for what depends on a neighbour, and those held back
        self.tokens: list[int] = []
        self.shown = 0  # how many of them are shown

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self.tokens.append(token)
        return self._take(waits=len(self.tokens) - self.shown < CHARACTER)

    def end(self) -> str:
        """What is still held back."""
        return self._take(waits=False)

    def _take(self, waits: bool) -> str:
        text = self._decode(self.tokens)
        if waits and text.endswith(INCOMPLETE):
            return ""
        new = text[len(self._decode(self.tokens[: self.shown])) :]
        self.tokens = self.tokens[self.shown :]
        self.shown = len(self.tokens)
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """The text of an answer up to the first stop string, which is left out. What may become one is held
    back."""

    def __init__(self, tokenizer: Any, stops: Collection[str] = ()):
        self.decoder, self.stops = IncrementalDecoder(tokenizer), tuple(stops)
        self.held, self.stopped = "", False
        self.starts: list[int] = []  # where the text of each token begins
        self.decoded = self.shown = 0  # characters of the tokens so far, and those of them that were emitted

    def take(self, answer: Answer) -> str:
        """The text that the last token of an answer completes, with the rest if the answer is finished."""
        text = ""
        if answer.finish != "stop":  # then the last token is an end token, which has no text
            text = self.push(answer.tokens[-1])
        if answer.finish:
            text += self.end()
        return text

    @property
    def shown_tokens(self) -> int:
        """Tokens whose text has begun to be emitted."""
        return bisect_left(self.starts, self.shown)

    def push(self, token: int) -> str:
        """The text that this token completes and that is no part of a stop string."""
        self.starts.append(self.decoded)
        return self._emit(self.decoder.push(token))

    def end(self) -> str:
        """The rest."""
        text = self._emit(self.decoder.end())
        rest, self.held = self.held, ""
        self.shown += len(rest)
        return text + rest

    def _emit(self, text: str) -> str:
        if self.stopped:
            return ""
        self.decoded += len(text)
        text = self.held + text
        places = [text.find(stop) for stop in self.stops if stop in text]
        if places:
            self.stopped = True
            end = min(places)
            self.held = ""
        else:
            end = len(text) - held_back(text, self.stops)
            self.held = text[end:]
        self.shown += end
        return text[:end]


class AnswerParser:
    """Turns the pieces of an answer's text into deltas of OpenAI's chat messages: {"content"},
    {"reasoning_content"} or {"tool_calls"}.

    thinks: the answer begins inside its reasoning. tools: names that calls may have; none: no calls are
    looked for.
    """

    def __init__(self, thinks: bool = False, tools: Collection[str] = ()):
        self.tools = frozenset(tools)
        self.state = self._thinking if thinks else self._beginning
        self.text = ""  # of which no delta was made yet
        self.blank = True  # no delta was made in this state: its first line breaks are the template's
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

    # Each state takes what it can from self.text. It returns a delta, {} for one more look, or None to wait
    # for text.

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
        words, is_over = self._before(END_THINK)
        if is_over:
            self.text = self.text.partition(END_THINK)[2]
            self.blank, self.state = True, self._content
        elif self.ended:
            words = words.rstrip("\n")
        if words:
            return {"reasoning_content": words}
        return {} if is_over else None

    def _content(self) -> dict[str, Any] | None:
        words, calls = self._before(CALL if self.tools else None)
        if calls:
            self.state = self._call
        if words:
            return {"content": words}
        return {} if calls else None

    def _before(self, mark: str | None) -> tuple[str, bool]:
        """Take the text in front of a mark, without the line breaks beside the mark, which are the
        template's; returns it and whether the mark is there. What may become the mark is held back."""
        if self.blank:
            self.text = self.text.lstrip("\n")
        words, found = self.text, False
        if mark is not None:
            words, separator, _ = self.text.partition(mark)
            found = separator != ""
            if not found and not self.ended:
                words = words[: len(words) - held_back(words, [mark])]
            if found or not self.ended:
                words = words.rstrip("\n")
        self.text = self.text[len(words) :]
        self.blank = self.blank and not words
        return words, found

    def _call(self) -> dict[str, Any] | None:
        gap, _, text = self.text.partition(CALL)
        body, end, rest = text.partition(END_CALL)
        if not end and not self.ended:
            return None
        self.state = self._content
        self.text = rest
        call = parse_call(body) if end else None
        if call is None or call["name"] not in self.tools:
            self.blank = False  # it stays text, up to where another call may begin
            return {"content": gap + CALL + body + end}
        self.blank = True
        self.calls += 1
        function = call | {"arguments": json.dumps(call["arguments"], ensure_ascii=False)}
        head = {"index": self.calls - 1, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return {"tool_calls": [head | {"function": function}]}


def merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message."""
    for field, value in delta.items():
        if field == "tool_calls":
            calls = [{name: part for name, part in call.items() if name != "index"} for call in value]
            message.setdefault(field, []).extend(calls)
        else:
            message[field] = (message.get(field) or "") + value
