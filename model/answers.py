"""What an answer's text consists of: reasoning, content and tool calls, by the marks of
chat_template.jinja."""

import json
import re
from typing import Any

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
REASONING = re.compile(rf"\s*{THINK}(.*?)(?:{END_THINK}\s*|\Z)", re.DOTALL)


def parse_call(body: str) -> dict[str, Any] | None:
    """The call {"name", "arguments"} that the text between the marks of a call spells; None if it is not well
    formed. Arguments may also be the text of a JSON object. Nothing is executed."""
    try:
        call = json.loads(body, parse_constant=_refuse)
        name, arguments = call["name"], call.get("arguments") or {}
        arguments = json.loads(arguments, parse_constant=_refuse) if isinstance(arguments, str) else arguments
        # 1e999, half a character: \ud83d
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": arguments}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def answer_message(text: str) -> dict[str, Any]:
    """The assistant's message that an answer spells: `content`, and `reasoning_content` and `tool_calls` if
    it has any.

    A call that is not well formed is left in the text.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reasoning = REASONING.match(text)
    if reasoning:
        message["reasoning_content"], text = reasoning[1].strip("\n"), text[reasoning.end() :]
    content, calls, at = [], [], 0
    while True:
        begin = text.find(CALL, at)
        end = text.find(END_CALL, begin)
        if begin < 0 or end < 0:
            break
        call = parse_call(text[begin + len(CALL) : end])
        after = end + len(END_CALL)
        if call is None:
            content.append(text[at:after])
        else:
            content.append(text[at:begin].rstrip())
            calls.append({"type": "function", "function": call})
        at = after
    message["content"] = "".join([*content, text[at:]]).strip()
    if calls:
        message["tool_calls"] = calls
    return message
