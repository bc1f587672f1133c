"""Shipped rewards on examples, rewards of a user's own, and their mistakes as one line."""

import time

import pytest

from common.errors import UserError
from trainer.components.rewards import SHIPPED, Reward, compute, load_rewards

EXAMPLES = [
    ("exact_answer", " 42\n", {"answer": 42}, 1.0),
    ("exact_answer", "<think>41?</think>\n\n42", {"answer": "42"}, 1.0),
    ("exact_answer", "It is 42", {"answer": "42"}, 0.0),
    ("numeric_answer", "12 + 30 = 42.0", {"answer": "42"}, 1.0),
    ("numeric_answer", "It costs 1,250 yuan.", {"answer": "#### 1250"}, 1.0),
    ("numeric_answer", "-42", {"answer": "42"}, 0.0),
    ("numeric_answer", "no idea", {"answer": "42"}, 0.0),
    ("think_format", "<think>\na\n</think>\n\nb", {}, 1.0),
    ("think_format", "<think>a</think>", {}, 0.0),
    ("think_format", "<think>a</think><think>b</think>c", {}, 0.0),
    ("think_format", "b", {}, 0.0),
    ("length", "x" * 20, {}, 1.0),
    ("length", "x" * 19, {}, 0.0),
    ("length", "x" * 801, {}, 0.0),
    ("repetition", "one two three four", {}, 0.0),
    ("repetition", "a b c a b c", {}, 3 / 4 - 1),
    ("repetition", "铃谷铃谷铃谷", {}, 2 / 4 - 1),
    ("repetition", "", {}, 0.0),
]


@pytest.mark.parametrize(("name", "completion", "record", "value"), EXAMPLES)
def test_a_shipped_reward(name, completion, record, value):
    assert SHIPPED[name]([], completion, record) == value


def test_a_tool_counts_since_the_users_last_message():
    asked, replied = {"role": "user", "content": "1+1"}, {"role": "tool", "content": "2"}
    called = {"role": "assistant", "content": "<tool_call>"}
    for prompt, value in (
        ([asked, called, replied], 1.0),
        ([asked, called, replied, called, asked], 0.0),
        ([asked], 0.0),
    ):
        assert SHIPPED["tool_used"](prompt, "2", {}) == value


def test_several_rewards_with_weights(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def politeness(prompt, completion, record): return 'please' in completion")
    monkeypatch.syspath_prepend(tmp_path)
    rewards = load_rewards("exact_answer, my_rewards:politeness=0.5")
    assert [(reward.name, reward.weight) for reward in rewards] == [("exact_answer", 1.0), ("politeness", 0.5)]
    assert compute(rewards, [], "42 please", {"answer": 42}, "a:1", 1) == {"exact_answer": 0.0, "politeness": 1.0}


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("", "--reward is empty"),
        ("exact", "--reward exact: give module:function, or one of exact_answer, numeric_answer"),
        ("no_module:f", r"--reward no_module:f cannot be imported \(No module named 'no_module'\)"),
        ("math:no_function", "--reward math:no_function: .* has no 'no_function'"),
        ("math:pi", "--reward math:pi is not a function"),
        ("exact_answer=heavy", "the weight 'heavy' must be a finite number"),
        ("exact_answer=nan", "the weight 'nan' must be a finite number"),
    ],
)
def test_a_mistake_is_one_line(spec, line):
    with pytest.raises(UserError, match=line):
        load_rewards(spec)


def test_a_folder_without_a_classifier(tmp_path):
    with pytest.raises(UserError, match=f"--reward_model {tmp_path} holds no sequence classifier"):
        load_rewards("length", str(tmp_path))


def divide(prompt, completion, record):
    return 1 / 0


def hang(prompt, completion, record):
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (divide, "rl.jsonl:7: reward mine failed .ZeroDivisionError: division by zero.; the last checkpoint is intact"),
        (SHIPPED["exact_answer"], "rl.jsonl:7: reward mine failed .KeyError: .*no reference answer"),
        (hang, "rl.jsonl:7: reward mine took longer than --reward_timeout 0.05 s"),
        (lambda *_: float("nan"), "rl.jsonl:7: reward mine is nan, not a finite number"),
        (lambda *_: "high", "rl.jsonl:7: reward mine failed .ValueError"),
    ],
)
def test_a_reward_that_fails_names_the_record(function, line):
    with pytest.raises(UserError, match=line):
        compute([Reward("mine", function, 1.0)], [], "text", {}, "rl.jsonl:7", 0.05)
