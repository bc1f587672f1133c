"""The terminal of a chat: answers shown while they are made, Ctrl-C, line editing."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common.errors import UserError, printable
from model.answers import THINK, AnswerParser

DIM, NORMAL = "\033[2m", "\033[0m"


def utf8_text(text: str, where: str) -> str:
    """A text of the command line or the keyboard. Bytes that the locale's encoding does not know arrive as
    surrogates; they are read as UTF-8. Raises UserError if they are none."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise UserError(
            f"{where} is not UTF-8; convert it, or set a UTF-8 locale, such as LC_ALL=C.UTF-8"
        ) from None


class Screen:
    """Writes an answer while it is made. On a terminal the reasoning is dimmed and tool calls stand on lines
    of their own; elsewhere the text is written as the model writes it."""

    def __init__(self, is_terminal: bool):
        self.is_terminal = is_terminal
        self.has_colors = is_terminal and "NO_COLOR" not in os.environ

    def begin(self, thinks: bool) -> None:
        """An answer begins. thinks: inside its reasoning."""
        self.parser, self.kind = AnswerParser(thinks), ""
        if thinks and not self.is_terminal:
            sys.stdout.write(THINK)

    def write(self, text: str, is_last: bool = False) -> None:
        """The next piece of the answer."""
        if not self.is_terminal:
            sys.stdout.write(text)
        else:
            for part in self.parser.push(text, is_last):
                self._show(part)
        if is_last:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _show(self, part: dict[str, Any]) -> None:
        ((kind, value),) = part.items()
        if self.kind and (kind != self.kind or kind == "tool_calls"):
            sys.stdout.write("\n")
        self.kind = kind
        if kind == "tool_calls":
            call = value[0]["function"]
            value = f"[call] {call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}"
        dim = self.has_colors and kind == "reasoning_content"
        sys.stdout.write(f"{DIM}{printable(value)}{NORMAL}" if dim else printable(value))

    def note(self, text: str) -> None:
        """A remark that is no part of the conversation."""
        text = printable(text)
        if self.is_terminal:
            print(f"{DIM}({text}){NORMAL}" if self.has_colors else f"({text})", flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


class Stop:
    """Whether Ctrl-C was pressed while an answer was made."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, the first Ctrl-C asks to stop; the second one raises KeyboardInterrupt, as everywhere
        else."""
        before = signal.getsignal(signal.SIGINT)

        def ask(*_) -> None:
            self.asked = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def line_editing() -> None:
    """Editing and history for `input`, as far as this Python has them."""
    try:
        import readline
    except ImportError:
        return
    # Python turns it off; pasted lines are one message
    readline.parse_and_bind("set enable-bracketed-paste on")
