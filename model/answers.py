"""The text of an answer: from tokens to text, and from text to reasoning, content and tool calls.

The tags are those of chat_template.jinja: `<think>` ... `</think>` at the beginning, and anywhere after it
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Text that was emitted is never taken back, and
nothing is executed."""

import json
from collections.abc import Collection
from typing import Any

from tokenizers.decoders import DecodeStream

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


def held_back(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of a text may be one of the marks, or the beginning of one."""
    longest = max(map(len, marks), default=0)
    for start in range(max(0, len(text) - longest), len(text)):
        end = text[start:]
        if any(mark.startswith(end) for mark in marks):
            return len(end)
    return 0


class TextStream:
    """The text of an answer, token by token. It ends before the first of `stops`, or after the first of
    `last_words`. Bytes of an incomplete character are held back, and so is text that may become a stop or a
    last word."""

    def __init__(self, tokenizer: Any, stops: Collection[str] = (), last_words: Collection[str] = ()):
        self.tokenizer = tokenizer
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.pending: list[int] = []  # tokens without text so far
        # words that end the text -> how many of their characters stay
        self.kept = {words: len(words) for words in last_words} | dict.fromkeys(stops, 0)
        self.stopped = False
        self.held = ""  # text that may become one of these words

    def take(self, answer: Any) -> str:
        """The text that the last token of a `generation.Answer` completes. At the end of the answer, it also
        returns the rest."""
        text = ""
        if answer.finish != "stop":  # then the last token is an end token, which has no text
            text = self.push(answer.tokens[-1])
        if answer.finish:
            text += self.end()
        return text

    def push(self, token: int) -> str:
        """The text that a token completes."""
        self.pending.append(token)
        text = self.decoder.step(self.tokenizer.backend_tokenizer, token)
        if text:
            self.pending.clear()
        return self._emit(text or "")

    def end(self) -> str:
        """The text that is still held back."""
        text = self.tokenizer.decode(self.pending, skip_special_tokens=True)
        self.pending.clear()
        return self._emit(text, is_last=True)

    def _emit(self, text: str, is_last: bool = False) -> str:
        if self.stopped:
            return ""
        text = self.held + text
        end = len(text) if is_last else len(text) - held_back(text, self.kept)
        # after `end`, a match that starts earlier than this one may have begun
        found = min(((text.find(mark), self.kept[mark]) for mark in self.kept if mark in text), default=None)
        if found is not None and found[0] <= end:
            self.stopped = True
            end = sum(found)
        self.held = text[end:]
        return text[:end]


class AnswerParser:
    """Turns the pieces of an answer's text into parts of its message: {"content"}, {"reasoning_content"} or
    {"tool_calls"}; `merge` puts them together. Line breaks beside a tag come from the template and are left
    out. A malformed call stays text.

    thinks: the answer begins inside its reasoning. tools: names that calls may have; calls of others stay
    text. None: any name.
    """

    def __init__(self, thinks: bool = False, tools: Collection[str] | None = None):
        self.tools = tools
        self.call_tag = CALL if tools is None or tools else None
        self.state = "reasoning" if thinks else "beginning"
        self.text = ""  # that is in no part yet
        self.after_tag = True
        self.is_last = False
        self.parts: list[dict[str, Any]] = []

    def push(self, text: str, is_last: bool = False) -> list[dict[str, Any]]:
        """The parts that a piece of text completes. is_last: no other piece follows."""
        self.text += text
        self.is_last = is_last
        self.parts = []
        if self.state == "beginning":
            self._read_beginning()
        if self.state == "reasoning" and self._read_words("reasoning_content", END_THINK):
            self.state = "content"
            self.after_tag = True
            self.text = self.text.partition(END_THINK)[2]
        while self.state == "content" and self._read_words("content", self.call_tag):
            if not self._read_call():
                break
        return self.parts

    def _read_beginning(self) -> None:
        text = self.text.lstrip()
        if text.startswith(THINK):
            self.state = "reasoning"
            self.text = text.removeprefix(THINK)
        elif self.is_last or not THINK.startswith(text):
            self.state = "content"
            self.after_tag = False

    def _read_words(self, field: str, tag: str | None) -> bool:
        """Take the text before a tag, as far as it is certain. Returns whether the tag was found."""
        if self.after_tag:
            self.text = self.text.lstrip("\n")
        words, found = self.text, ""
        if tag is not None:
            words, found, _ = self.text.partition(tag)
            if not found and not self.is_last:
                words = words[: len(words) - held_back(words, [tag])]
            if found or not self.is_last or tag == END_THINK:
                words = words.rstrip("\n")
        self.text = self.text[len(words) :]
        if words:
            self.after_tag = False
            self.parts.append({field: words})
        return found != ""

    def _read_call(self) -> bool:
        """Take the call at the beginning of the text. Returns False if the end of the call is still
        missing."""
        breaks, _, text = self.text.partition(CALL)
        body, end, rest = text.partition(END_CALL)
        if not end and not self.is_last:
            return False
        self.text = rest
        call = parse_call(body) if end else None
        if call is None or (self.tools is not None and call["name"] not in self.tools):
            self.after_tag = False
            self.parts.append({"content": breaks + CALL + body + end})
        else:
            self.after_tag = True
            self.parts.append({"tool_calls": [{"type": "function", "function": call}]})
        return True


def merge(message: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part to a message."""
    for field, value in part.items():
        before = message.get(field)
        message[field] = before + value if before else value


def answer_message(text: str) -> dict[str, Any]:
    """The message of a whole answer: `content`, and `reasoning_content` and `tool_calls` if it has any."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in AnswerParser().push(text, is_last=True):
        merge(message, part)
    return message


def parse_call(body: str) -> dict[str, Any] | None:
    """The call {"name", "arguments"} between the tags of a call; None if it is not well formed. Arguments
    may also be the text of a JSON object."""
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        # fails for NaN, 1e999 and half a character, \ud83d
        json.dumps([call, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": arguments}
