"""The metrics file is the source of truth: whole lines only, each update once, also after a resume."""

import io
import json
import sys

import pytest

from common.errors import UserError
from trainer.components.metrics import MetricsLog, describe, duration, read_metrics


def record(update: int) -> dict:
    fields = ("loss", "mean_loss", "logits_loss", "aux_loss", "learning_rate", "grad_norm", "tokens_per_second")
    fields += ("mfu", "data_wait")
    return {"update": update, "seconds": 2.0 * update, "memory_mb": 10.0, "seconds_left": 90.0} | dict.fromkeys(
        fields, 0.5
    )


def test_a_resumed_run_keeps_what_it_stands_on_and_writes_the_rest_again(tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    log = MetricsLog(path, 9)
    for update in (1, 2, 3, 4):
        log.write(record(update), "Epoch:[1/1](4/10)")
    log.close()
    with open(path, "a") as file:
        file.write('{"update": 5, "lo')  # cut off by a kill
    assert [r["update"] for r in read_metrics(path)] == [1, 2, 3, 4]
    log = MetricsLog(path, 9, last_update=2)
    log.write(record(3), "head")
    log.close()
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1, 2, 3]
    log = MetricsLog(path, 9)  # a new run starts an empty file
    log.close()
    assert path.read_text() == ""
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 5 and out[0].startswith("Epoch:[1/1](4/10), loss: 0.5000")
    assert out[0].endswith("eta: 1.5 min")


FOREIGN = [b"", b"{", b"[]", b"5", b"null", b'{"loss": 1}', b'{"update": "3"}', b"\xff\xfe", b"\0" * 9, b"[" * 99999]


@pytest.mark.parametrize("line", FOREIGN)
def test_a_line_that_is_no_record(tmp_path, line):
    """Tools refuse it by its number; a resumed run goes on without it."""
    path = tmp_path / "m.jsonl"
    good = [json.dumps(record(update)).encode() for update in (1, 2, 3)]
    path.write_bytes(b"\n".join([good[0], line, good[2], b""]))
    with pytest.raises(UserError, match=r"m.jsonl:2 is not a log record"):
        read_metrics(path)
    MetricsLog(path, 9, last_update=3).close()
    assert [r["update"] for r in read_metrics(path)] == [1, 3]
    path.write_bytes(b"\n".join([*good, line, b""]))  # behind the checkpoint: written again anyway
    MetricsLog(path, 9, last_update=3).close()
    assert len(read_metrics(path)) == 3
    path.unlink()
    MetricsLog(path, 9, last_update=3).close()
    assert read_metrics(path) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 min"), (60, "1.0 min"), (3570, "1 h 00 min"), (7200, "2 h 00 min")]
)
def test_a_duration(seconds, text):
    assert duration(seconds) == text


def test_a_line_tells_of_experts_where_there_are_some():
    assert "experts" not in describe(record(1))
    dense = describe(record(1) | {"aux_loss": 0.0, "data_wait": 0.0})
    assert not any(name in dense for name in ("aux_loss", "logits_loss", "data wait")) and "grad_norm: 0.500" in dense
    assert "logits_loss: 0.5000, aux_loss: 0.5000" in describe(record(1))
    figures = {"expert_load": [0.2, 0.8], "expert_max_min": 4.0, "dead_experts": 0}
    assert "experts max/min: 4.0, dead: 0" in describe(record(1) | figures)
    assert "experts max/min: -, dead: 3" in describe(record(1) | figures | {"expert_max_min": None, "dead_experts": 3})


def test_a_line_names_the_held_out_loss_where_there_is_one():
    assert "eval_loss" not in describe(record(1))
    assert "eval_loss: 1.2500, eval_bpb: 0.7500" in describe(record(1) | {"eval_loss": 1.25, "eval_bpb": 0.75})


def test_a_terminal_gets_a_live_bar_and_the_same_lines(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    log = MetricsLog(tmp_path / "m.jsonl", total_updates=4)
    for update in range(1, 5):
        log.tick(update)
        if update % 2 == 0:
            log.write(record(update), "head")
    log.close()
    text = screen.getvalue()
    assert text.count("head, loss: 0.5000") == 2 and "100%|" in text and "update 4/4" in text
