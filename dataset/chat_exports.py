"""Conversations from the exports of chat programs: WhatsApp (text), Telegram and DiscordChatExporter (JSON),
and ChatGPT (conversations.json)."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, reason
from common.files import atomic_write, json_lines


class Message(NamedTuple):
    """What somebody wrote. seconds: its time since 1970."""

    seconds: float
    speaker: str
    text: str


Chat = list[Message]


class Export(NamedTuple):
    """An export. form: whatsapp, telegram, discord or chatgpt. assistant: the speaker who is the assistant,
    if the export says it (ChatGPT)."""

    form: str
    chats: list[Chat]
    assistant: str | None

    def speakers(self) -> list[tuple[str, int]]:
        """The speakers with the number of their messages, those with the most first."""
        return Counter(message.speaker for chat in self.chats for message in chat).most_common()


PAUSE_HOURS = 6.0  # without a message, after which another conversation begins
# The beginning of a message in WhatsApp's exports: "[31.12.20, 21:15:03] Anna: " of an iPhone, else
# "12/31/20, 9:15 PM - Anna: ", with words of the language: "31/12/2020 à 21:15", "2020/12/31 下午9:15"
WHATSAPP = re.compile(
    r"\u200e?\[?\u200f?(\d{1,4}\u200f?[./-] ?\d{1,2}\u200f?[./-] ?\d{1,4})(\D{1,9})"
    r"(\d{1,2}[:.]\d\d(?:[:.]\d\d)?)\s?([AaPp]\.?\s?[Mm]\.?|[πμ]\.μ\.|[صم]|ч\.)?\]?(?: -|,)? (.*)"
)
# morning and afternoon, before or after the time
HALVES = {
    "AM": re.compile(r"上午|凌晨|清晨|早上|午前|오전|[aA]\.?\s?[mM]|π\.μ|ص"),
    "PM": re.compile(r"下午|中午|晚上|午後|오후|[pP]\.?\s?[mM]|μ\.μ|م"),
}
DATES = ("%d.%m.%y", "%m.%d.%y", "%y.%m.%d")
# in the place of a picture or a film: <Media omitted>, <Anhang: ...>, <attached: ...>, with a direction mark
NOT_TEXT = re.compile(r"\s*\u200e?<[^<>]*>\s*|\s*\u200e.*|\s*null\s*", re.DOTALL)
ROLES = {"user": "user", "assistant": "assistant"}
# what the beginning of an export in JSON contains
JSON_FORMS = {
    "discord": re.compile(r'\{.{0,4096}"guild"\s*:\s*\{.{0,4096}"channel"\s*:\s*\{', re.DOTALL),
    "telegram": re.compile(
        r'\{.*"type"\s*:\s*"(personal_chat|bot_chat|saved_messages|private_\w+|public_\w+)"', re.DOTALL
    ),
    "chatgpt": re.compile(r'\[.*"mapping"\s*:\s*\{.*"author"\s*:\s*\{', re.DOTALL),
}
HEAD_LINES, LEAST_MESSAGES = 200, 2  # of WhatsApp's export: lines that are looked at; messages in them


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
            raise UserError(f"{path}: not an export of Telegram, DiscordChatExporter or ChatGPT") from error
    else:
        form, chats = "whatsapp", [read_whatsapp(text)]
    chats = [chat for chat in chats if chat]
    if not chats:
        raise UserError(f"{path}: no messages of WhatsApp, Telegram, DiscordChatExporter or ChatGPT in it")
    return Export(form, chats, ROLES["assistant"] if form == "chatgpt" else None)


def read_json(content: Any) -> tuple[str, list[Chat]]:
    """The form and the chats of Telegram (one, or all of an account), of DiscordChatExporter, or of
    ChatGPT."""
    if isinstance(content, list):
        return "chatgpt", [list(chatgpt_messages(each)) for each in content]
    if "guild" in content:
        said = [message for each in content["messages"] for message in discord_message(each)]
        return "discord", [said]
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
        text = "\n".join(part for part in spoken if isinstance(part, str))
        hidden = (message.get("metadata") or {}).get("is_visually_hidden_from_conversation")
        is_shown = message.get("recipient", "all") == "all" and not hidden  # else it calls a tool
        if role and is_shown and text.strip():
            yield Message(float(conversation.get("create_time") or 0.0), role, whole(text))


def whole(text: str) -> str:
    """A text with "?" for half characters, which programs leave if they cut a name in an emoji."""
    return text.encode(errors="replace").decode()


def read_whatsapp(text: str) -> Chat:
    """The messages of WhatsApp's export; a message may have several lines. Pictures, and messages of the
    program itself, are left out."""
    found: list[tuple[str, list[str]]] = []  # time, lines
    for line in text.rstrip("\n").split("\n"):
        if match := WHATSAPP.fullmatch(line):
            date, before, time, after, rest = match.groups()
            halves = [half for half, words in HALVES.items() if words.search(before + (after or ""))]
            found.append((" ".join([re.sub("[ \u200f]", "", date), time, *halves]), [rest]))
        elif found:
            found[-1][1].append(line)
    times = [moment for moment, _ in found]
    chat = []
    for seconds, (_, lines) in zip(parse_times(times), found, strict=True):
        speaker, colon, said = "\n".join(lines).partition(": ")
        if colon and "\n" not in speaker and said.strip() and not NOT_TEXT.fullmatch(said):
            chat.append(Message(seconds, speaker.strip("\u200e\u202a\u202c\u202f ~"), said))
    return chat


def parse_times(times: list[str]) -> list[float]:
    """Seconds of WhatsApp's times, which have the order of day and month of the telephone: the one in which
    most messages follow one another in time. If none fits, the messages are a second apart."""
    found: list[list[float]] = []
    for form in DATES:
        known = [value for value in (one_time(each, form) for each in times) if value is not None]
        if len(known) == len(times):
            found.append(known)
    rising = [sum(a <= b for a, b in pairwise(known)) for known in found]
    return found[rising.index(max(rising))] if found else [float(i) for i in range(len(times))]


def one_time(moment: str, form: str) -> float | None:
    """Seconds of a time; None if its date does not have this form."""
    date, time, *half = moment.split(" ")
    numbers = re.split("[./-]", date)
    if "%y" in form:
        form = form.replace("%y", "%Y" if any(len(number) == 4 for number in numbers) else "%y")
    hour, *rest = re.split("[:.]", time)
    if half and int(hour) == 0:  # so Japanese telephones count, and others that do not have 12
        hour = "12"
    clock = ".".join(["%I" if half else "%H", "%M", "%S"][: 1 + len(rest)])
    text = " ".join([".".join(numbers), ".".join([hour, *rest]), *half])
    try:
        return datetime.strptime(text, " ".join([form, clock, *(["%p"] if half else [])])).timestamp()
    except ValueError:
        return None


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
