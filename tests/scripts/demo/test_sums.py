"""The sums: the same bytes for a seed, right answers, and no pair of numbers in two of the files."""

from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from scripts.demo.sums import CALCULATE, TEST, make_sums
from trainer.rollouts.environments import Calculator

FILES = ("sft", "rl", "test", "agent_sft", "agent_rl", "agent_test")


@pytest.fixture(scope="module")
def sums() -> dict[str, list[dict]]:
    return {Path(name).stem: records for name, records in make_sums(0).items()}


def pair(record: dict) -> tuple[int, int]:
    return tuple(map(int, record["conversations"][0]["content"].removesuffix("=?").split("+")))


def answer(record: dict) -> int:
    return int(record["conversations"][-1]["content"])


def test_the_answers_are_right_and_no_pair_is_in_two_files(sums):
    pairs = {name: {tuple(sorted(pair(record))) for record in sums[name]} for name in FILES}
    for one, other in combinations(FILES, 2):
        assert pairs[one].isdisjoint(pairs[other]), (one, other)
    for name in FILES:
        assert all(sum(pair(record)) == answer(record) for record in sums[name])
        digits = {len(str(number)) for record in sums[name] for number in pair(record)}
        assert digits == ({3} if name.startswith("agent") else {1, 2})
    assert len({pair(record) for record in sums["test"]}) == len(sums["test"]) == TEST
    for name in ("sft", "rl"):  # both orders of a pair are on one side
        assert {pair(record) for record in sums[name]} == {pair(record)[::-1] for record in sums[name]}


def test_the_control_has_the_same_questions_and_answers_in_another_order(sums):
    assert [*map(pair, sums["rl_shuffled"])] == [*map(pair, sums["rl"])]
    assert Counter(map(answer, sums["rl_shuffled"])) == Counter(map(answer, sums["rl"]))
    assert sum(sum(pair(record)) == answer(record) for record in sums["rl_shuffled"]) < 0.05 * len(sums["rl"])


def test_the_calls_shown_are_what_the_calculator_answers(sums):
    assert Calculator.tools == [CALCULATE]
    for record in sums["agent_sft"]:
        _, turn, reply, _ = record["conversations"]
        assert Calculator(record).reply([call["function"] for call in turn["tool_calls"]]) == [reply]
    assert not any("tool_calls" in turn for record in sums["agent_rl"] for turn in record["conversations"])
