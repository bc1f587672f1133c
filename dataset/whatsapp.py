"""Messages of WhatsApp's exports, as text files that telephones of any language write."""

import re
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple


class Message(NamedTuple):
    """What somebody wrote. seconds: its time since 1970."""

    seconds: float
    speaker: str
    text: str


Chat = list[Message]

# The beginning of a message in WhatsApp's exports: "[31.12.20, 21:15:03] Anna: " of an iPhone, else
# "12/31/20, 9:15 PM - Anna: ", with words of the language: "31/12/2020 à 21:15", "2020/12/31 下午9:15",
# "9:15 CH"
WHATSAPP = re.compile(
    r"\u200e?\[?\u200f?(\d{1,4}\u200f?[./-] ?\d{1,2}\u200f?[./-] ?\d{1,4})(\D{1,9})"
    r"(\d{1,2}(?:[:.]|\s?h\s?)\d\d(?:[:.]\d\d|\s?min\s?\d\d\s?s)?)(?:\s?([^\W\d_][^\d\[\]:,]{0,13}?))?"
    r"(?:\]|\s[-–]|[,:])\s(.*)"
)
# morning and afternoon, before or after the time
HALVES = {
    "AM": re.compile(r"上午|凌晨|清晨|早上|午前|오전|[aA]\.?\s?[mM]\b|π\.μ|ص|\bSA\b|\bÖÖ\b|\bPG\b|ق\.?\s?ظ"),
    "PM": re.compile(r"下午|中午|晚上|午後|오후|[pP]\.?\s?[mM]\b|μ\.μ|م|\bCH\b|\bÖS\b|\bPTG\b|ب\.?\s?ظ"),
}
DIGITS = {ord(zero) + i: str(i) for zero in "٠۰" for i in range(10)}  # Arabic and Persian ones
DATES = ("%d.%m.%y", "%m.%d.%y", "%y.%m.%d")
# in the place of a picture or a film: <Media omitted>, <Anhang: ...>, <attached: ...>, with a direction mark
NOT_TEXT = re.compile(r"\s*\u200e?<[^<>]*>\s*|\s*\u200e.*|\s*null\s*|\s*", re.DOTALL)
# What WhatsApp adds to a text. An Android telephone writes the name of a file, "IMG-20201231-WA0001.jpg (file
# attached)", into a line above the text that was sent with it, and an iPhone writes it behind this text. A
# document that was left out has its name and its pages before a direction mark
FILE_LINE = re.compile(r"(?:\u200e[^\n]*\.\w{2,5}|\u200e?[A-Z]{3}-\d{8}-WA\d+\.\w{2,5}) \([^()\n]*\)(?:\n|$)")
DOCUMENT = re.compile(r"[^\n]*\.\w{2,5}(?: • \u200e[^\u200e\n]*)? \u200e[^\u200e\n]*")
EDITED = (
    "edited|bearbeitet|editó|editad[oa]|modifié|modificato|bewerkt|изменено|düzenlendi|diedit|编辑|編輯|編集|"
    "수정|تعديل"
)
ADDED_AT_END = re.compile(rf"\s*(?:\u200e<[^<>\n]*>|<[^<>\n]*(?:{EDITED})[^<>\n]*>)\s*$")
MENTION_MARKS = re.compile("[\u2068\u2069]")  # around the name behind an @
# in the place of a message that was deleted; an iPhone puts the direction mark before it
DELETED = re.compile(
    "(?:This message was deleted|You deleted this message|"
    "Diese Nachricht wurde gelöscht|Du hast diese Nachricht gelöscht|"
    "Se eliminó este mensaje|Eliminaste este mensaje|"
    "Ce message a été supprimé|Vous avez supprimé ce message|"
    "Questo messaggio è stato eliminato|Hai eliminato questo messaggio|"
    "Ess?t?a mensagem foi apagada|Você apagou esta mensagem|"
    "Dit bericht is verwijderd|U hebt dit bericht verwijderd|"
    "Данное сообщение удалено|Вы удалили данное сообщение|Bu mesaj silindi|Bu mesajı sildiniz|"
    "此消息已删除|您已?删除了?此消息|此訊息已刪除|你已刪除此訊息|このメッセージは削除されました|"
    "삭제된 메시지입니다|Pesan ini (?:telah )?dihapus|تم حذف هذه الرسالة)[.。]?"
)
# A system message with a colon in a quoted name, "Anna changed the subject to “a: b”", has no speaker
OPEN_QUOTE = re.compile("[“„«「][^”“»」]*$")


def read_whatsapp(text: str) -> Chat:
    """The messages of WhatsApp's export; a message may have several lines. Pictures, and messages of the
    program itself, are left out."""
    found: list[tuple[str, list[str]]] = []  # time, lines
    for line in text.rstrip("\n").split("\n"):
        if match := WHATSAPP.fullmatch(line):
            date, before, time, after, rest = match.groups()
            halves = [half for half, words in HALVES.items() if words.search(before + (after or ""))]
            time = ":".join(re.findall(r"\d+", time))  # also of "21 h 15 min 03 s"
            found.append((" ".join([re.sub("[ \u200f]", "", date), time, *halves]), [rest]))
        elif found:
            found[-1][1].append(line)
    times = [moment for moment, _ in found]
    chat = []
    for seconds, (_, lines) in zip(parse_times(times), found, strict=True):
        speaker, colon, said = "\n".join(lines).partition(": ")
        text = written(said)
        if colon and "\n" not in speaker and not OPEN_QUOTE.search(speaker) and not NOT_TEXT.fullmatch(text):
            chat.append(Message(seconds, speaker.strip("\u200e\u202a\u202c\u202f ~"), text))
    return chat


def written(said: str) -> str:
    """What a person wrote of a message of WhatsApp: without the names of files, the mark of an edited message
    and the marks around a mentioned name; nothing for a deleted message."""
    text = FILE_LINE.sub("", said, count=1) if FILE_LINE.match(said) else said
    if DELETED.fullmatch(text) or DOCUMENT.fullmatch(text):
        return ""
    while ADDED_AT_END.search(text) and not NOT_TEXT.fullmatch(text):
        text = ADDED_AT_END.sub("", text)
    return MENTION_MARKS.sub("", text)


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
    date, time, *half = moment.translate(DIGITS).split(" ")
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
