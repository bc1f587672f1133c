"""Exports of chat programs, in the forms in which they write them."""

import json
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from dataset.chat_exports import form_of, read_export, to_conversations
from dataset.whatsapp import read_whatsapp

IPHONE = """\ufeff[31.12.20, 21:15:03] Anna: \u200eMessages and calls are end-to-end encrypted.
[31.12.20, 21:15:04] Anna: Are you there?
[31.12.20, 21:15:30] ~\u202fBen: Yes: I am.
Two lines.
\u200e[31.12.20, 21:16:00] Ben: \u200eimage omitted
[01.01.21, 09:00:00] Anna: Good morning
[01.01.21, 09:00:09] ~\u202fBen: 早上好
"""
ANDROID = """12/31/20, 9:15 PM - Anna changed the group description
12/31/20, 9:15 PM - Anna: Are you there?
12/31/20, 9:16 PM - Ben: Yes: I am.
Two lines.
12/31/20, 9:17 PM - Ben: <Media omitted>
1/1/21, 9:00\u202fAM - Anna: Good morning
1/1/21, 9:00\u202fAM - Ben: 早上好
"""
SAID = [
    ("Anna", "Are you there?"),
    ("Ben", "Yes: I am.\nTwo lines."),
    ("Anna", "Good morning"),
    ("Ben", "早上好"),
]


@pytest.mark.parametrize("text", [IPHONE, ANDROID, ANDROID.replace("/", "."), ANDROID.replace("PM", "p.m.")])
def test_whatsapp(text):
    chat = read_whatsapp(text.removeprefix("\ufeff"))
    assert [(message.speaker, message.text) for message in chat] == SAID
    hours = [round((message.seconds - chat[0].seconds) / 3600) for message in chat]
    assert hours == [0, 0, 12, 12]


@pytest.mark.parametrize(
    "line",
    [
        "31/12/2020 à 21:15 - Anna: hi",
        "31.12.2020 klo 21.15 - Anna: hi",
        "2020. 12. 31. 21:15 - Anna: hi",
        "[2020/12/31 下午9:15:00] Anna: hi",
        "2020. 12. 31. 오후 9:15, Anna : hi",
        "31/12/20, 9:15\u00a0p.\u00a0m. - Anna: hi",
        "31/12/20, 9:15 μ.μ. - Anna: hi",
        "31.12.2020 г., 21:15 ч. - Anna: hi",
        "\u200f31\u200f/12\u200f/2020, 9:15 م - Anna: hi",
        "[٣١\u200f/١٢\u200f/٢٠٢٠، ٩:١٥:٠٠ م] Anna: hi",
        "31/12/20, 9:15 CH - Anna: hi",
        "[31.12.20, 9:15:00 ÖS] Anna: hi",
        "31/12/20, 9:15 PTG - Anna: hi",
        "2020-12-31, 9:15 ب.ظ. - Anna: hi",
        "31.12.2020, 21:15\u00a0Uhr - Anna: hi",
        "2020-12-31 21 h 15 - Anna: hi",
        "[2020-12-31, 21 h 15 min 00 s] Anna: hi",
        "[31.12.20, 9:15:00\u202fPM] Anna: hi",
        "31/12/20 9:15:00 PM: Anna: hi",
    ],
)
def test_whatsapp_of_other_languages(line):
    (message,) = read_whatsapp(f"{line}\n")
    assert message[1:] == ("Anna", "hi")
    assert datetime.fromtimestamp(message.seconds) == datetime(2020, 12, 31, 21, 15)


EDITED_IPHONE = """[31.12.23, 23:59:01] Anna: \u200eNachrichten und Anrufe sind Ende-zu-Ende-verschlüsselt.
[31.12.23, 23:59:02] Anna: Hallo @\u2068Ben M.\u2069, kommst du? \u200e<Diese Nachricht wurde bearbeitet.>
\u200e[31.12.23, 23:59:03] Ben: Schau mal \u200e<Anhang: 00000012-PHOTO-2023-12-31-23-59-59.jpg>
[31.12.23, 23:59:04] Ben: \u200eDu hast diese Nachricht gelöscht.
[31.12.23, 23:59:05] Ben: \u200eUMFRAGE:
Wann?
\u200eOPTION: heute (1 Stimme)
[31.12.23, 23:59:06] Anna: plan.pdf • \u200e3 Seiten \u200eDokument weggelassen
[31.12.23, 23:59:07] Anna: \u200e<Anhang: 00000013-AUDIO-2023-12-31-23-59-59.opus>
[31.12.23, 23:59:08] Anna: <b> macht fett
"""
EDITED_ANDROID = """31.12.23, 23:58 - Anna hat den Betreff von „Ski: Januar“ zu „Ski: Februar“ geändert.
31.12.23, 23:59 - Anna: Hallo @\u2068Ben M.\u2069, kommst du? <Diese Nachricht wurde bearbeitet.>
31.12.23, 23:59 - Ben: \u200eIMG-20231231-WA0001.jpg (Datei angehängt)
Schau mal
31.12.23, 23:59 - Ben: Diese Nachricht wurde gelöscht.
31.12.23, 23:59 - Ben: PTT-20231231-WA0002.opus (Datei angehängt)
31.12.23, 23:59 - Anna: \u200eplan.pdf (Datei angehängt)
31.12.23, 23:59 - Anna: Du hast diese Nachricht gelöscht.
31.12.23, 23:59 - Anna: <b> macht fett
"""


@pytest.mark.parametrize("text", [EDITED_IPHONE, EDITED_ANDROID])
def test_whatsapp_without_what_nobody_wrote(text):
    """Marks of edited and deleted messages, names of files, polls, system messages with a colon."""
    said = [message[1:] for message in read_whatsapp(text)]
    assert said == [("Anna", "Hallo @Ben M., kommst du?"), ("Ben", "Schau mal"), ("Anna", "<b> macht fett")]


def test_noon_of_telephones_that_count_from_zero():
    chat = read_whatsapp("2020/12/31 午前0:08 - Anna: hi\n2020/12/31 午後0:08 - Anna: hi\n")
    assert [datetime.fromtimestamp(message.seconds).hour for message in chat] == [0, 12]


def test_the_order_of_day_and_month_is_that_in_which_time_goes_on():
    days = ["02/03/21", "05/03/21", "01/04/21"]  # in the order of month and day it goes back
    chat = read_whatsapp("".join(f"{day}, 10:00 - Anna: hi\n" for day in days))
    assert [datetime.fromtimestamp(message.seconds).month for message in chat] == [3, 3, 4]


def test_one_message_out_of_order_leaves_the_times_as_they_are():
    days = ["12/9/20, 10:00", "12/9/20, 12:00", "12/9/20, 11:00", "13/9/20, 9:00"]
    chat = read_whatsapp("".join(f"{day} - Anna: hi\n" for day in days))
    hours = [datetime.fromtimestamp(message.seconds).strftime("%d.%m. %H") for message in chat]
    assert hours == ["12.09. 10", "12.09. 12", "12.09. 11", "13.09. 09"]


@given(
    st.lists(
        st.sampled_from(["12/31/20, 9:15 PM - A: b", "99/99/99, 99:99 - A: b", "x", "", "[1.1.21, 1:1] : "])
    )
)
def test_any_lines_are_read(lines):
    read_whatsapp("\n".join(lines))


TELEGRAM = {
    "name": "Ben", "type": "personal_chat", "messages": [
        {"type": "service", "action": "phone_call", "actor": "Ben", "date_unixtime": "1", "text": ""},
        {"type": "message", "from": "Anna", "date_unixtime": "10", "text": ["see ", {"type": "link", "text": "a.org"}]},
        {"type": "message", "from": "Ben", "date_unixtime": "20", "text": "Yes."},
        {"type": "message", "from": "Ben", "date_unixtime": "30", "text": "", "photo": "x.jpg"},
        {"type": "message", "from": None, "date_unixtime": "31", "text": "deleted account"},
    ],
}  # fmt: skip
DISCORD = {
    "guild": {}, "channel": {}, "messages": [
        {"type": "ChannelPinnedMessage", "timestamp": "2021-01-01T10:00:00+00:00", "content": "Pinned.", "author": {"name": "a"}},
        {"type": "Default", "timestamp": "2021-01-01T10:00:00+00:00", "content": "see a.org", "author": {"name": "anna1", "nickname": "Anna"}},
        {"type": "Reply", "timestamp": "2021-01-01T10:00:10.123+00:00", "content": "Yes.", "author": {"name": "Ben"}},
    ],
}  # fmt: skip

INSTAGRAM = {"participants": [{"name": "Ben"}], "messages": [  # the newest is the first
    {"sender_name": "Ben", "timestamp_ms": 40000, "content": "Ben sent an attachment.", "share": {"link": "a.org"}},
    {"sender_name": "Anna", "timestamp_ms": 31000, "content": "Reacted \u00e2\u009d\u00a4 to your message "},
    {"sender_name": "Anna", "timestamp_ms": 30000, "photos": [{"uri": "x.jpg"}]},
    {"sender_name": "Ben", "timestamp_ms": 25000, "content": "Wrong.", "is_unsent": True},
    {"sender_name": "Ben", "timestamp_ms": 20000, "content": "Yes."},
    {"sender_name": "Anna", "timestamp_ms": 10000, "content": "see a.org"},
]}  # fmt: skip
MESSENGER = {"participants": ["Anna", "Ben"], "threadName": "Ben_1", "messages": [
    {"isUnsent": False, "media": [], "reactions": [], "senderName": "Anna", "text": "see a.org", "timestamp": 10000, "type": "text"},
    {"isUnsent": False, "media": [{"uri": "x"}], "reactions": [], "senderName": "Anna", "text": "", "timestamp": 15000, "type": "media"},
    {"isUnsent": False, "media": [], "reactions": [], "senderName": "Ben", "text": "Yes.", "timestamp": 20000, "type": "text"},
    {"isUnsent": True, "media": [], "reactions": [], "senderName": "Ben", "text": "", "timestamp": 25000, "type": "placeholder"},
]}  # fmt: skip


def node(parent: str | None, role: str | None, *parts: object) -> dict:
    message = role and {"author": {"role": role}, "content": {"content_type": "text", "parts": list(parts)}}
    return {"parent": parent, "message": message}


CHATGPT = [{"title": "x", "create_time": 5.0, "current_node": "d", "mapping": {
    "root": node(None, None), "s": node("root", "system", ""), "a": node("s", "user", "see a.org", {"asset": 1}),
    "b": node("a", "assistant", "The first answer."), "q": node("a", "assistant", '{"query": "a.org"}'),
    "c": node("q", "tool", "searched"), "d": node("c", "assistant", "Yes."),
}}]  # fmt: skip


CHATGPT[0]["mapping"]["q"]["message"]["recipient"] = "browser"
OLD_TELEGRAM = json.loads(json.dumps(TELEGRAM))
for each in OLD_TELEGRAM["messages"]:
    each["date"] = datetime.fromtimestamp(int(each.pop("date_unixtime"))).isoformat()


@pytest.mark.parametrize(
    ("content", "assistant"),
    [
        (TELEGRAM, "Ben"),
        (OLD_TELEGRAM, "Ben"),
        ({"chats": {"list": [TELEGRAM]}}, "Ben"),
        (DISCORD, "Ben"),
        (INSTAGRAM, "Ben"),
        (MESSENGER, "Ben"),
        (CHATGPT, None),
    ],
)
def test_json_exports_become_conversations(tmp_path, content, assistant):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    export = read_export(str(path))
    assert form_of(path.read_text()) == export.form
    conversations = list(to_conversations(export.chats, assistant or export.assistant or ""))
    assert conversations == [
        [{"role": "user", "content": "see a.org"}, {"role": "assistant", "content": "Yes."}]
    ]


def test_names_and_texts_have_no_half_characters(tmp_path):
    telegram = json.loads(
        json.dumps(TELEGRAM).replace('"Ben"', '"Ben \\ud83d"').replace("Yes.", "Yes \\ud83d\\ude00\\ude00")
    )
    (tmp_path / "result.json").write_text(json.dumps(telegram))
    export = read_export(str(tmp_path / "result.json"))
    assert export.speakers() == [("Anna", 1), ("Ben ?", 1)] and export.chats[0][1].text == "Yes 😀?"


def test_texts_of_instagram_are_utf8_as_characters(tmp_path):
    """Its older form; a text that is already right, as of the newer one, stays."""
    as_characters = "Grüße 早 😀".encode().decode("latin-1")
    for name, text in (("Jos\u00c3\u00a9", as_characters), ("José", "Grüße 早 😀")):
        record = {"sender_name": name, "timestamp_ms": 1000, "content": text}
        (tmp_path / "message_1.json").write_text(json.dumps({"messages": [record]}))
        (chat,) = read_export(str(tmp_path / "message_1.json")).chats
        assert [message[1:] for message in chat] == [("José", "Grüße 早 😀")]


def test_chatgpt_without_marks_of_sources_and_thoughts(tmp_path):
    chat = json.loads(json.dumps(CHATGPT))
    mapping = chat[0]["mapping"]
    mapping["d"]["message"]["content"]["parts"] = ["Yes \ue200cite\ue202turn0search0\ue201.【3†a.org】"]
    mapping["t"] = node("c", "assistant") | {"message": {"author": {"role": "assistant"}}}
    mapping["t"]["message"]["content"] = {"content_type": "thoughts", "thoughts": [{"content": "Hm."}]}
    mapping["r"] = node("t", "assistant") | {"message": {"author": {"role": "assistant"}}}
    mapping["r"]["message"]["content"] = {"content_type": "reasoning_recap", "content": "Thought for 5s"}
    mapping["d"]["parent"] = "r"
    (tmp_path / "conversations.json").write_text(json.dumps(chat))
    (said,) = read_export(str(tmp_path / "conversations.json")).chats
    assert [message.text for message in said] == ["see a.org", "Yes."]


def test_chatgpt_without_the_last_node_with_speech_and_with_hidden_messages(tmp_path):
    (chat,) = json.loads(json.dumps(CHATGPT))
    del chat["current_node"]
    chat["mapping"]["a"]["message"]["content"]["parts"] = [
        {"content_type": "audio_transcription", "text": "see a.org"}
    ]
    chat["mapping"]["s"] = node("root", "user", "Facts about me.")
    chat["mapping"]["s"]["message"]["metadata"] = {"is_visually_hidden_from_conversation": True}
    (tmp_path / "conversations.json").write_text(json.dumps([chat]))
    export = read_export(str(tmp_path / "conversations.json"))
    assert [message[1:] for message in export.chats[0]] == [("user", "see a.org"), ("assistant", "Yes.")]


def test_pauses_several_speakers_and_unanswered_ends():
    text = "".join(f"1/{day}/21, {hour}:00 - {who}: {said}\n" for day, hour, who, said in [
        (1, "08", "Ben", "not asked"), (1, "09", "Anna", "hi"), (1, "09", "Cleo", "hey"), (1, "10", "Ben", "yes"),
        (1, "10", "Ben", "both?"), (1, "11", "Anna", "unanswered"), (14, "10", "Anna", "again"), (14, "11", "Ben", "ok"),
    ])  # fmt: skip
    first, second = to_conversations([read_whatsapp(text)], "Ben")
    assert first == [
        {"role": "user", "content": "Anna: hi\nCleo: hey"},
        {"role": "assistant", "content": "yes\nboth?"},
    ]
    assert [message["content"] for message in second] == ["Anna: again", "ok"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no chat at all\n", "no messages of WhatsApp"),
        (b"", "no messages"),
        (b"{}", "not an export"),
        (b"[1]", "not an export"),
        (b"[", "not an export"),
        (b"\xff\xfe", "not UTF-8"),
        (
            b'{"messages": [{"type": "message", "from": "A", "text": "x", "date_unixtime": "?"}]}',
            "not an export",
        ),
    ],
)
def test_what_is_no_export_is_one_line(tmp_path, content, why):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match=why) as error:
        read_export(str(tmp_path / "x"))
    assert "\n" not in str(error.value)
