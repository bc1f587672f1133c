"""The terminal of a chat: answers shown while they are made, Ctrl-C, line editing with a history."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from dataset.token_text import printable
from model.answers import parse_call

DIM, NORMAL = "\033[2m", "\033[0m"
TAGS = re.compile("(</?think>|</?tool_call>)")


class Screen(TextStreamer):
    """Writes an answer while it is made. On a terminal the reasoning is dimmed and tool calls stand on lines of their
    own; elsewhere the text is written as the model writes it."""

    def __init__(self, tokenizer: Any, is_terminal: bool):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.is_terminal = is_terminal
        self.has_colors = is_terminal and "NO_COLOR" not in os.environ
        self.call: str | None = None  # the call that is being written

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """transformers gives the text in pieces that end between words; a tag is never divided."""
        if not self.is_terminal:
            sys.stdout.write(text)
        for part in TAGS.split(text) if self.is_terminal else ():
            self.show(part)
        if stream_end:
            self.show_call()
            sys.stdout.write((NORMAL if self.has_colors else "") + "\n")
        sys.stdout.flush()

    def show(self, part: str) -> None:
        """A tag, or the text between two."""
        if part in ("<think>", "</think>") and self.has_colors:
            sys.stdout.write(DIM if part == "<think>" else NORMAL)
        elif part == "<tool_call>":
            self.call = ""
        elif part == "</tool_call>":
            self.show_call()
        elif self.call is not None:
            self.call += part
        else:
            sys.stdout.write(printable(part))

    def show_call(self) -> None:
        """The call that was being written, or its text if it is none."""
        text, self.call = self.call, None
        call = parse_call(text) if text else None
        if call:
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            sys.stdout.write(printable(f"[call] {call['name']} {arguments}"))
        elif text is not None:
            sys.stdout.write(printable(f"<tool_call>{text}"))

    def note(self, text: str) -> None:
        """A remark that is no part of the conversation."""
        if self.is_terminal:
            print(f"{DIM}({text}){NORMAL}" if self.has_colors else f"({text})", flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


class Stop:
    """Whether Ctrl-C was pressed while an answer was made; a criterion for `generate` to end."""

    def __init__(self):
        self.asked = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs) -> torch.Tensor:
        return torch.full((len(input_ids),), self.asked, device=input_ids.device)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, the first Ctrl-C asks to stop; the second one raises KeyboardInterrupt, as everywhere else."""
        before = signal.getsignal(signal.SIGINT)

        def ask(*_) -> None:
            self.asked = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def line_editing() -> Iterator[None]:
    """Editing and history for `input`, as far as this Python has them; the history is kept in the user's state folder.

    Whatever fails here is left out: a chat needs none of it.
    """
    try:
        import readline

        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(state, "minimind-trainer", "chat_history")
    except (ImportError, RuntimeError):  # RuntimeError: there is no home
        yield
        return
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off; pasted lines are one message
    readline.set_history_length(1000)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
