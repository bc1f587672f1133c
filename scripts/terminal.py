"""Shows the answers of a chat while they are made."""

import json
import sys
from typing import Any

from common.errors import printable
from model.answers import THINK, AnswerParser

DIM, NORMAL = "\033[2m", "\033[0m"


class Screen:
    """Prints an answer as it is generated. On a terminal, reasoning is dimmed and each tool call is on its
    own line; elsewhere the text is printed unchanged."""

    def __init__(self, is_terminal: bool):
        self.is_terminal = is_terminal

    def begin(self, thinks: bool) -> None:
        """An answer begins. thinks: inside its reasoning."""
        self.parser = AnswerParser(thinks)
        self.kind = ""
        if thinks and not self.is_terminal:
            sys.stdout.write(THINK)

    def write(self, text: str, is_last: bool = False) -> None:
        """The next piece of the answer."""
        if self.is_terminal:
            for part in self.parser.push(text, is_last):
                self._show(part)
        else:
            sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """The answer ends."""
        self.write("", is_last=True)
        print(flush=True)

    def _show(self, part: dict[str, Any]) -> None:
        ((kind, value),) = part.items()
        if self.kind and (kind != self.kind or kind == "tool_calls"):
            sys.stdout.write("\n")
        self.kind = kind
        if kind == "tool_calls":
            call = value[0]["function"]
            value = f"[call] {call['name']} {json.dumps(call['arguments'], ensure_ascii=False)}"
        text = printable(value)
        sys.stdout.write(f"{DIM}{text}{NORMAL}" if kind == "reasoning_content" else text)

    def note(self, text: str) -> None:
        """Print a remark that is not part of the conversation."""
        print(f"({printable(text)})", file=sys.stderr, flush=True)
