"""Exported chats become conversations for SFT."""

import json

from scripts import convert_chats
from tests.dataset.test_chat_exports import IPHONE


def test_the_command_lists_speakers_shows_the_first_and_writes(call, tmp_path):
    path, output = tmp_path / "chat.txt", tmp_path / "data" / "ben.jsonl"
    path.write_text(IPHONE)
    done = call(convert_chats, "--export", path)
    assert (
        done.returncode == 2
        and "give --assistant, one of 'Anna' (2 messages), 'Ben' (2 messages)" in done.stderr
    )
    assert "nobody is called 'Cleo'" in call(convert_chats, "--export", path, "--assistant", "Cleo").stderr
    done = call(convert_chats, "--export", path, "--assistant", "Ben")
    assert done.returncode == 2 and "give --output" in done.stderr and "  user: Are you there?" in done.stdout
    assert call(convert_chats, "--export", path, "--assistant", "Ben", "--output", output).returncode == 0
    records = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert [record["messages"][1]["content"] for record in records] == ["Yes: I am.\nTwo lines.", "早上好"]


def test_halves_of_characters_are_written_and_the_export_is_kept(call, tmp_path):
    path, output = tmp_path / "result.json", tmp_path / "ben.jsonl"
    said = [("Anna", "hi \ud83d"), ("Ben", "yes")]  # half of an emoji
    messages = [{"type": "message", "from": who, "date_unixtime": "1", "text": text} for who, text in said]
    path.write_text(json.dumps({"messages": messages}))
    done = call(convert_chats, "--export", path, "--assistant", "Ben", "--output", path)
    assert done.returncode == 2 and "is the export itself" in done.stderr and json.loads(path.read_text())
    assert call(convert_chats, "--export", path, "--assistant", "Ben", "--output", output).returncode == 0
    assert json.loads(output.read_text())["messages"][0]["content"] == "hi ?"
