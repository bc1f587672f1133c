"""Conversations from the exports of chat programs: WhatsApp (text), Telegram, DiscordChatExporter, Instagram
and Messenger (JSON), and ChatGPT (conversations.json)."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, reason
from common.files import atomic_write, json_lines
from dataset.whatsapp import WHATSAPP, Chat, Message, read_whatsapp


class Export(NamedTuple):
    """An export. form: whatsapp, telegram, discord, meta (Instagram, Messenger) or chatgpt. assistant: the
    speaker who is the assistant, if the export says it (ChatGPT)."""

    form: str
    chats: list[Chat]
    assistant: str | None

    def speakers(self) -> list[tuple[str, int]]:
        """The speakers with the number of their messages, those with the most first."""
        return Counter(message.speaker for chat in self.chats for message in chat).most_common()


PAUSE_HOURS = 6.0  # without a message, after which another conversation begins
ROLES = {"user": "user", "assistant": "assistant"}
# what the beginning of an export in JSON contains
JSON_FORMS = {
    "discord": re.compile(r'\{.{0,4096}"guild"\s*:\s*\{.{0,4096}"channel"\s*:\s*\{', re.DOTALL),
    "telegram": re.compile(
        r'\{.*"type"\s*:\s*"(personal_chat|bot_chat|saved_messages|private_\w+|public_\w+)"', re.DOTALL
    ),
    "meta": re.compile(r'\{.*"(sender_name|senderName)"\s*:\s*"', re.DOTALL),
    "chatgpt": re.compile(r'\[.*"mapping"\s*:\s*\{.*"author"\s*:\s*\{', re.DOTALL),
}
# what Instagram and Messenger write for reactions and for what was sent without a text
META_NOT_TEXT = re.compile(r"Reacted .{1,12} to your message ?|Liked a message|.* sent an attachment\.")
# of ChatGPT's answers: marks of sources, which its page shows as links
CITATION = re.compile(r" ?\ue200[^\ue201]*\ue201|【\d+†[^】]*】")
HEAD_LINES, LEAST_MESSAGES = 200, 2  # of WhatsApp's export: lines that are looked at; messages in them
JSON_PROGRAMS = "Telegram, DiscordChatExporter, Instagram, Messenger or ChatGPT"


def form_of(head: str) -> str | None:
    """The form of the export that begins with this text; None if it looks like none. A text that only looks
    like WhatsApp's, such as a log, has its form, too."""
    text = head.lstrip("\ufeff \r\n\t")
    lines = text.split("\n", HEAD_LINES)[:HEAD_LINES]
    if WHATSAPP.fullmatch(lines[0].rstrip("\r")):
        said = read_whatsapp("\n".join(line.rstrip("\r") for line in lines))
        return "whatsapp" if len(said) >= LEAST_MESSAGES else None
    return next((form for form, pattern in JSON_FORMS.items() if pattern.match(text)), None)


def read_export(path: str) -> Export:
    """Read an export. Raises UserError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8; unpack it if it is a .zip, and do not convert it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({reason(error)})") from error
    if text.lstrip()[:1] in ("{", "[") and not WHATSAPP.match(text.lstrip()):
        try:
            form, chats = read_json(json.loads(text))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: not an export of {JSON_PROGRAMS}") from error
    else:
        form, chats = "whatsapp", [read_whatsapp(text)]
    chats = [chat for chat in chats if chat]
    if not chats:
        raise UserError(f"{path}: no messages of WhatsApp, {JSON_PROGRAMS} in it")
    return Export(form, chats, ROLES["assistant"] if form == "chatgpt" else None)


def read_json(content: Any) -> tuple[str, list[Chat]]:
    """The form and the chats of Telegram (one, or all of an account), of DiscordChatExporter, of Instagram or
    Messenger, or of ChatGPT."""
    if isinstance(content, list):
        return "chatgpt", [list(chatgpt_messages(each)) for each in content]
    if "guild" in content:
        said = [message for each in content["messages"] for message in discord_message(each)]
        return "discord", [said]
    first = next(iter(content.get("messages") or []), {})
    if {"sender_name", "senderName"} & first.keys():
        said = [message for each in content["messages"] for message in meta_message(each)]
        return "meta", [sorted(said, key=lambda message: message.seconds)]  # the newest is the first
    chats = content["chats"]["list"] if "chats" in content else [content]
    return "telegram", [
        [message for each in chat["messages"] for message in telegram_message(each)] for chat in chats
    ]


def telegram_message(message: dict[str, Any]) -> Iterator[Message]:
    """The message, if the entry is one and not, for example, a call. Its text may be a list of pieces; links
    are objects."""
    pieces = message.get("text") or ""
    pieces = [pieces] if isinstance(pieces, str) else pieces
    text = "".join(piece if isinstance(piece, str) else piece["text"] for piece in pieces)
    if message["type"] == "message" and message.get("from") and text.strip():
        seconds = message.get("date_unixtime")  # older exports have the local time alone
        when = float(seconds) if seconds else datetime.fromisoformat(message["date"]).timestamp()
        yield Message(when, whole(message["from"]), whole(text))


def discord_message(message: dict[str, Any]) -> Iterator[Message]:
    """A message; nothing for pins, calls and pictures."""
    if message.get("type", "Default") in ("Default", "Reply") and message["content"].strip():
        speaker = whole(message["author"].get("nickname") or message["author"]["name"])
        when = datetime.fromisoformat(message["timestamp"]).timestamp()
        yield Message(when, speaker, whole(message["content"]))


def meta_message(message: dict[str, Any]) -> Iterator[Message]:
    """A message of Instagram or Messenger; nothing for reactions, pictures, calls and unsent messages. In the
    older of the two forms, characters are the bytes of UTF-8."""
    text = message.get("content") or message.get("text") or ""
    is_unsent = message.get("is_unsent") or message.get("isUnsent")
    is_call = "call_duration" in message or message.get("type") == "placeholder"
    if "senderName" in message:
        speaker, milliseconds = message["senderName"], message["timestamp"]
    else:
        speaker, milliseconds = as_utf8(message["sender_name"]), message["timestamp_ms"]
        text = as_utf8(text)
    if text.strip() and not is_unsent and not is_call and not META_NOT_TEXT.fullmatch(text):
        yield Message(milliseconds / 1000, whole(speaker), whole(text))


def as_utf8(text: str) -> str:
    """A text whose characters are the bytes of UTF-8; other texts as they are."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return text


def chatgpt_messages(conversation: dict[str, Any]) -> Iterator[Message]:
    """The messages on the way to the last one: regenerated answers are other branches of the tree."""
    nodes, path = conversation["mapping"], []
    name = conversation.get("current_node") or next(reversed(nodes), None)  # old exports do not name it
    while name is not None and len(path) <= len(nodes):
        path.append(nodes[name])
        name = nodes[name].get("parent")
    for node in reversed(path):
        message = node.get("message") or {}
        role = ROLES.get(message.get("author", {}).get("role"))
        parts = (message.get("content") or {}).get("parts") or []
        spoken = (part.get("text") if isinstance(part, dict) else part for part in parts)  # aloud, or written
        text = CITATION.sub("", "\n".join(part for part in spoken if isinstance(part, str)))
        hidden = (message.get("metadata") or {}).get("is_visually_hidden_from_conversation")
        is_shown = message.get("recipient", "all") == "all" and not hidden  # else it calls a tool
        if role and is_shown and text.strip():
            yield Message(float(conversation.get("create_time") or 0.0), role, whole(text))


def whole(text: str) -> str:
    """A text with "?" for half characters, which programs leave if they cut a name in an emoji."""
    return text.encode(errors="replace").decode()


def to_conversations(
    chats: list[Chat], assistant: str, pause_hours: float = PAUSE_HOURS
) -> Iterator[list[dict[str, str]]]:
    """Conversations in which this speaker is the assistant and all others are the user; if there are several,
    their names stand before what they say. A pause begins another conversation. Each begins with the user and
    ends with the assistant; others are left out."""
    for chat in chats:
        has_several = len({message.speaker for message in chat} - {assistant}) > 1
        messages: list[dict[str, str]] = []
        before = 0.0
        for message in chat:
            if message.seconds - before > 3600 * pause_hours:
                yield from finished(messages)
                messages = []
            before = message.seconds
            role = "assistant" if message.speaker == assistant else "user"
            text = f"{message.speaker}: {message.text}" if has_several and role == "user" else message.text
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += f"\n{text}"
            elif messages or role == "user":
                messages.append({"role": role, "content": text})
        yield from finished(messages)


def finished(messages: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """A conversation up to the last answer, if there is one."""
    complete = messages[: len(messages) // 2 * 2]  # user and assistant in turn
    if complete:
        yield complete


def write_conversations(path: Path, conversations: Iterable[list[dict[str, str]]]) -> None:
    """Write conversations as JSON Lines, one in each line. Raises WriteError."""
    data = json_lines({"messages": each} for each in conversations)
    atomic_write(path, lambda file: file.write(data))
