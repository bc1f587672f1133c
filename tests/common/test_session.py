"""How long a session may last, and when it began."""

import time

import pytest

from common import session
from common.arguments import parse_args
from common.errors import UserError
from common.session import seconds_in, session_seconds
from common.settings import StageArgs


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("11h", 39600), ("30m", 1800), ("90s", 90), ("1h30m", 5400), ("0.5h", 1800), ("2h0m1s", 7201)],
)
def test_a_time_is_hours_minutes_and_seconds(text, seconds):
    assert seconds_in(text) == seconds
    assert parse_args(StageArgs, None, ["--stop_after", text]).stop_after == text


@pytest.mark.parametrize(
    "text", ["90", "0s", "-1h", "1d", "1m1h", "1.2.3s", ".s", "h", "1 h", "٣h", "9" * 400 + "h"]
)
def test_another_text_is_one_line(text):
    with pytest.raises(UserError, match=r"--stop_after must be a time such as 11h, 30m, 90s or 1h30m, not "):
        parse_args(StageArgs, None, [f"--stop_after={text}"])


def test_it_is_read_again_from_what_print_config_writes(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse_args(StageArgs, None, ["--stop_after", "90s", "--print_config"])
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert parse_args(StageArgs, None, ["--config", str(tmp_path / "run.yaml")]).stop_after == "90s"
    assert parse_args(StageArgs, None, ["--stop_after", "none"]).stop_after is None


def test_a_session_begins_with_the_process_or_when_its_script_says(monkeypatch):
    monkeypatch.delenv(session.START, raising=False)
    monkeypatch.setattr(session, "imported_at", time.monotonic() - 7)
    assert 7 <= session_seconds() < 8
    monkeypatch.setenv(session.START, str(int(time.time()) - 100))
    assert 100 <= session_seconds() < 102
    monkeypatch.setenv(session.START, "yesterday")
    with pytest.raises(UserError, match=r"TRAINING_SESSION_START=yesterday must be seconds since 1970"):
        session_seconds()
