"""The metrics file is the source of truth: whole lines only, each update once, also after a resume."""

import json

import pytest
from tqdm.utils import disp_len

from common.errors import UserError
from trainer.report.metrics import MetricsLog, describe, read_metrics, readable_records
from trainer.rollouts.batches import Rollouts


def record(update: int) -> dict:
    fields = ["loss", "mean_loss", "logits_loss", "aux_loss", "learning_rate", "grad_norm"]
    fields += ["tokens_per_second", "mfu", "data_wait"]
    return {
        "update": update,
        "seconds": 2.0 * update,
        "memory_mb": 10.0,
        "seconds_left": 90.0,
    } | dict.fromkeys(fields, 0.5)


def test_a_resumed_run_keeps_what_it_stands_on_and_writes_the_rest_again(tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    log = MetricsLog(path, 9)
    for update in (1, 2, 3, 4):
        log.write(record(update), "Epoch:[1/1](4/10)")
    log.close()
    with open(path, "a") as file:
        file.write('{"update": 5, "lo')  # cut off by a kill
    assert [r["update"] for r in read_metrics(path)] == [1, 2, 3, 4]
    log = MetricsLog(path, 9, 2)
    log.write(record(3), "head")
    log.close()
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1, 2, 3]
    log = MetricsLog(path, 9)  # a new run starts an empty file
    log.close()
    assert path.read_text() == ""
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 * 5 and out[0].startswith("Epoch:[1/1](4/10), loss: 0.5000")
    assert out[1].endswith("eta: 1.5 min")


@pytest.mark.parametrize("line", [b"", b'{"update": "3"}', b"\xff\xfe"])
def test_a_line_that_is_no_record(tmp_path, line):
    """Tools refuse it by its number; a resumed run goes on without it."""
    path = tmp_path / "m.jsonl"
    good = [json.dumps(record(update)).encode() for update in (1, 2, 3)]
    path.write_bytes(b"\n".join([good[0], line, good[2], b""]))
    with pytest.raises(UserError, match=r"m.jsonl:2 is not a log record"):
        read_metrics(path)
    assert [r["update"] for r in readable_records(path)] == [1, 3]
    path.unlink()
    assert readable_records(path) == []


@pytest.mark.parametrize("large", [123456.0, None])
def test_no_line_is_longer_than_a_terminal_is_wide(large):
    """Of PPO of a mixture of experts, which shows most; nothing is left out."""
    metric_names = (*Rollouts.console_metrics, "value_loss")
    fields = record(1) | dict.fromkeys(metric_names, large) | {"tokens_per_second": 1e7, "memory_mb": 1e5}
    fields |= {"loss": large, "aux_loss": 0.01, "expert_max_min": 100.0, "dead_experts": 10}
    fields |= {f"eval_{name}": large for name in ("loss", "bpb", *metric_names)}
    fields["samples"] = [
        {"prompt": "\x1b" * 70, "answer": "好" * 200, "reward": 1.0},
        {"prompt": "a", "answer": "b"},
    ]
    *lines, first, second = describe(fields, "Epoch:[10/10](12345/123456) 100%", metric_names)
    assert max(map(disp_len, (*lines, first, second))) <= 100  # a Chinese character takes two columns
    text = " ".join(line.strip() for line in lines)
    assert text.startswith("Epoch:[10/10](12345/123456) 100%, loss: ") and text.endswith(", eta: 1.5 min")
    wanted = [f"eval_{name}: " for name in ("loss", "bpb", *metric_names)]
    for part in (*wanted, "aux_loss: 0.0100", "experts: 100.0 to 1", "dead experts: 10", "mfu: 50%"):
        assert part in text
    assert first.startswith("  reward 1.000: '\\x1b") and second == "  'a' -> 'b'"
    assert "mfu" not in describe(record(1) | {"mfu": None}, "head")[0]
