"""The comparison of LoRA, DPO and distillation with MiniMind's scripts: its inputs, its clock and its mistakes."""

import json
import sys
import time

import pytest
import torch

from common.errors import UserError
from scripts.bench import after_sft

LINES = [
    "model: 4.15 M parameters",
    "computing the reference's log-probabilities of 8 pairs",
    "  a line of progress",
    "Epoch:[1/1](1/3), loss: 0.7000, mean loss: 0.7000",
    "Epoch:[1/1](2/3), loss: 0.6000, mean loss: 0.6500",
    "Epoch:[1/1](3/3), loss: 0.5000, mean loss: 0.6000",
]


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by 2 s with each look."""
    ticks = iter(range(0, 1000, 2))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))


def test_the_time_of_an_epoch_is_that_of_its_updates_and_of_the_reference(clock):
    found, lines = after_sft.epoch_of(LINES)
    assert lines == [line.strip() for line in LINES]
    assert found == (4 * 3 / 2 + 2, pytest.approx(0.6))  # two of three updates took 4 s


def test_without_a_reference_only_updates_count(clock):
    assert after_sft.epoch_of(LINES[3:])[0].seconds == 4 * 3 / 2


@pytest.fixture
def call(monkeypatch, tmp_path):
    """The settings for these flags, with a checkout that has the scripts."""
    for name in after_sft.LENGTHS:
        script = tmp_path / f"peer/trainer/train_{name}.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.touch()

    def parse(stage, records, *more):
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        given = ["--stage", stage, "--data_path", data, "--peer_path", tmp_path / "peer", *more]
        given += ["--hidden_size", 32, "--num_hidden_layers", 1, "--batch_size", 2]
        monkeypatch.setattr(sys, "argv", ["after_sft.py", *map(str, given)])
        return after_sft.parse_args()

    return parse


PAIR = {"prompt": "q?", "chosen": "yes", "rejected": "no"}
QUESTION = {"role": "user", "content": "q?"}


def test_both_sides_get_the_same_records_and_different_weights_for_the_teacher(call, tmp_path):
    args = call("dpo", [PAIR] * 9, "--records", 4)
    after_sft.write_inputs(args, tmp_path / "work")
    lines = (tmp_path / "work/data.jsonl").read_text().splitlines()
    answers = {name: {"role": "assistant", "content": text} for name, text in (("chosen", "yes"), ("rejected", "no"))}
    assert [json.loads(line) for line in lines] == [{name: [QUESTION, answers[name]] for name in answers}] * 4
    student, teacher = (torch.load(tmp_path / f"work/out/{name}_32.pth") for name in ("full_sft", "teacher"))
    assert student.keys() == teacher.keys()
    assert not torch.equal(student["lm_head.weight"], teacher["lm_head.weight"])


def test_a_failing_script_is_quoted(call, tmp_path):
    args = call("lora", [{"conversations": [QUESTION, {"role": "assistant", "content": "yes"}]}] * 4, "--records", 4)
    after_sft.write_inputs(args, tmp_path / "work")
    with pytest.raises(UserError, match=r"of the peer failed: .*No module named 'dataset'"):
        after_sft.run(args, "peer", tmp_path / "work")


def test_mistakes_are_one_line(call, tmp_path):
    with pytest.raises(UserError, match="--records at least two updates"):
        call("dpo", [PAIR], "--records", 3)
    with pytest.raises(UserError, match="holds 3 records; give --records 3"):
        after_sft.write_inputs(call("dpo", [PAIR] * 3, "--records", 4), tmp_path / "work")
    (tmp_path / "peer/trainer/train_dpo.py").unlink()
    with pytest.raises(UserError, match="not a checkout of minimind"):
        call("dpo", [PAIR], "--records", 4)
