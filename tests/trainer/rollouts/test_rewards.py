"""Shipped rewards on examples, rewards of a user's own, and their mistakes as one line."""

import json
import time

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from common.errors import UserError
from dataset.messages import BadRecord
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT
from trainer import train_agent
from trainer.rollouts.rewards import SHIPPED, Reward, check_record, compute, load_rewards, reward_model

EXAMPLES = [
    ("exact_answer", "<think>41?</think>\n\n42", {"answer": "42"}, 1.0),
    ("numeric_answer", "12 + 30 = 42.0", {"answer": "42"}, 1.0),
    ("numeric_answer", "It costs 1,250 yuan.", {"answer": "#### 1250"}, 1.0),
    ("numeric_answer", "-42", {"answer": "42"}, 0.0),
    ("think_format", "<think>\na\n</think>\n\nb", {}, 1.0),
    ("think_format", "<think>a</think><think>b</think>c", {}, 0.0),
    ("length", "x" * 20, {}, 1.0),
    ("length", "x" * 801, {}, 0.0),
    ("repetition", "a b c a b c", {}, 3 / 4 - 1),
    ("repetition", "铃谷铃谷铃谷", {}, 2 / 4 - 1),
    ("contains_answer", "It is 28.0 degrees and Sunny", {"answer": ["28", "sunny", "rain", "2"]}, 0.5),
    ("contains_answer", "Fred is hired.", {"answer": "red"}, 0.0),
    ("contains_answer", "She likes (Red)!", {"answer": "red", "wrong_answers": ["blue"]}, 1.0),
    ("contains_answer", "red, blue, green", {"answer": "red", "wrong_answers": ["blue", "green"]}, 0.0),
    ("contains_answer", "卡莫最喜欢红色。", {"answer": "红色", "wrong_answers": ["蓝色"]}, 1.0),
    ("contains_answer", "C++ and été", {"answer": ["c++", "été", "et"]}, 2 / 3),
]


def spelled(name: str, **arguments) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


ADD = spelled("add", a=1)
TWO = {"tools": [{"type": "function", "function": {"name": "add", "parameters": {"required": ["a"]}}}]}


@pytest.mark.parametrize(
    ("turns", "answers", "values"),
    [
        ([ADD, "2"], ["2"], (1, 0, 0)),
        (["2"], ["2"], (0, 0, 0)),
        ([ADD, ADD, "2"], ["2"], (-1, 0, 0)),
        ([spelled("add"), "2"], ["2"], (-2, 0, 0)),
        ([spelled("subtract", a=1), ADD], ["2"], (-1, 0, -1)),
        ([f"{ADD}<tool_call>", "2"], ["2"], (1, -1, 0)),
        ([ADD, ADD, "2"], None, (1, 0, 0)),
    ],
)
def test_rewards_of_tool_calls(turns, answers, values):
    """Of valid calls, closed tags and a finished last turn; the calls before the user's last message do not
    count."""
    prompt = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ADD}]
    prompt.append({"role": "user", "content": "1+1"})
    for turn in turns[:-1]:
        prompt += [{"role": "assistant", "content": turn}, {"role": "tool", "content": "2"}]
    record = TWO if answers is None else TWO | {"gt": answers}
    names = ("valid_calls", "closed_tags", "finished")
    assert tuple(SHIPPED[name](prompt, turns[-1], record) for name in names) == values


@pytest.mark.parametrize(("name", "completion", "record", "value"), EXAMPLES)
def test_a_shipped_reward(name, completion, record, value):
    assert SHIPPED[name]([], completion, record) == value


def test_a_tool_counts_since_the_users_last_message():
    asked, replied = {"role": "user", "content": "1+1"}, {"role": "tool", "content": "2"}
    called = {"role": "assistant", "content": "<tool_call>"}
    prompts = [[asked, called, replied], [asked, called, replied, called, asked], [asked]]
    assert [SHIPPED["tool_used"](prompt, "2", {}) for prompt in prompts] == [1.0, 0.0, 0.0]


# --- numbers


NUMBERS = [  # (reference, completions that give the number, completions that do not)
    ("42", ["42", "+42", "042", "42.0", "The sum is 42.", "x=42", "20+22=42", "是42。", "$42", "42km", "4.2e1",
            "84/2", "\\frac{84}{2}", "\\boxed{42}", "So 42 cm^2", "42 m²", "42 of CO2", "４２", "40 and 42!"],
     ["-42", "42/2", "42:30", "12:42", "42²", "42½", "1.234,42", "4 2", "3\\sqrt{42}", "√42", "2^42", "x^{42}", "2-42", "1/42",
      "42.5", "2026-11-42", "1,42", "42,1", "", "no number", "42/0", "9" * 5000]),
    ("-5", ["-5", "\u22125", "x=-5", "是-5", "-10/2", "-5.0"], ["5", "10-5", "2\u20115"]),
    ("1250", ["1,250", "1 250", "1\u202f250", "1{,}250", "1\\,250", "1.25e3", "1250"], ["1,25", "250", "1.250", "12,50"]),
    ("0.5", ["0.5", ".5", "1/2", "\\dfrac{1}{2}", "5e-1"], ["2", "5", "1/2/1", "1:2", "0,5"]),
    ("1e5", ["100000", "100,000", "1e5", "1E+5"], ["5", "1", "10^5"]),
    ("#### 1,250", ["1250"], ["125"]),
    ("She has 3 + 4 = 7.\n#### 7", ["7"], ["3", "4"]),
    (7, ["7"], ["8"]),
    (0.1, ["0.1", "1/10"], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "right", "wrong"), NUMBERS)
def test_a_number_is_judged_as_a_whole(answer, right, wrong):
    judge = SHIPPED["numeric_answer"]
    assert {text: judge([], text, {"answer": answer}) for text in right} == dict.fromkeys(right, 1.0)
    assert {text: judge([], text, {"answer": answer}) for text in wrong} == dict.fromkeys(wrong, 0.0)


def test_a_part_of_a_number_does_not_occur():
    judge = SHIPPED["contains_answer"]
    for text, value in (("12:30", 0), ("30 min", 1), ("1/30", 0), ("CO30", 0), ("60/2", 1), ("20-30", 0)):
        assert judge([], text, {"answer": ["30"]}) == value, text


REFUSED = [
    ("numeric_answer", {"answer": answer}, "is not one number; write the number alone")
    for answer in ("\\frac{14}{3}", "1/2", "-2 + 7i", "3\\sqrt{13}", "5 \\text{ cm}^2", "12:30", "1.234,56", "7 apples",
                   "It is 7.", "3, 4", "7%", "$7", "#### 7 apples", ["7"], {"value": 7}, "x", True, "1e9999", "9" * 5000)
]  # fmt: skip
REFUSED += [(name, {"answer": {"text": "a"}}, "reference answer {'text': 'a'} is n") for name in
            ("exact_answer", "contains_answer")]  # fmt: skip
REFUSED += [("exact_answer", {"answer": ["a", "b"]}, "is not one text; give contains_answer")]
REFUSED += [(name, record, "no reference answer: add one, or give --reward length,repetition")
            for name in ("exact_answer", "numeric_answer", "contains_answer")
            for record in ({}, {"answer": None}, {"answer": []}, {"answer": ""}, {"solution": "7"})]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "why"), REFUSED)
def test_what_a_reward_cannot_judge_is_refused_before_a_rollout(name, record, why):
    """And in the same words where it is called all the same."""
    rewards = load_rewards(f"length,{name}=0.5")
    with pytest.raises(BadRecord) as caught:
        check_record(rewards, record)
    assert str(caught.value).startswith(f"reward {name}: the re") and why in str(caught.value)
    with pytest.raises(ValueError, match="reference answer"):
        SHIPPED[name]([], "7", record)
    check_record(load_rewards("length,repetition,think_format,valid_calls,finished"), record)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules of a user, by name and source; returns their folder."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        return tmp_path

    return write


POLITE = "def politeness(prompt, completion, record): return 'please' in completion\n"


def test_several_rewards_with_weights(modules):
    modules(my_rewards=POLITE)
    rewards = load_rewards("exact_answer, my_rewards:politeness=0.5")
    names = [(reward.name, reward.weight) for reward in rewards]
    assert names == [("exact_answer", 1.0), ("politeness", 0.5)]
    values = compute(rewards, [], "42 please", {"answer": 42}, "a:1", 1)
    assert values == {"exact_answer": 0.0, "politeness": 1.0}


def test_a_reward_in_a_file(modules):
    """It may import what lies beside it."""
    folder = modules(
        beside="word = 'please'", file="import beside\n" + POLITE.replace("'please'", "beside.word")
    )
    file = (folder / "file.py").rename(folder / "my file.py")
    (reward,) = load_rewards(f"{file}:politeness=2")
    assert (reward.name, reward.weight) == ("politeness", 2.0) and reward.function([], "please", {})


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("no_module:f", r"--reward no_module:f cannot be imported \(No module named 'no_module'\)"),
        ("math:pi", "--reward math:pi is not a function"),
        ("exact_answer=nan", "the weight 'nan' must be a finite number"),
        ("no.py:f", "no such file"),
        ("{}/wrong.py:politeness", "wrong.py:1: invalid syntax"),
        ("ra:score=10,rb:score", "score is named twice, or the name of another metric"),
        ("ra:model", "model is named twice, or the name of another metric"),
    ],
)
def test_a_mistake_is_one_line(modules, spec, line):
    """A name must not be that of a figure of all rewards either, or of the reward model."""
    several = "".join(POLITE.replace("politeness", name) for name in ("score", "model"))
    folder = modules(wrong="def politeness(:", ra=several, rb=several)
    with pytest.raises(UserError, match=line):
        load_rewards(spec.format(folder), (lambda *_: 7.0) if "ra:" in spec else None)


def test_another_reward_model_and_other_code_are_noticed(modules):
    folder = modules(rc=POLITE + "class World: tools = []\n")
    load_rewards("rc:politeness=2")
    names = {"reward": "length,rc:politeness=2", "environment": "rc:World"}
    args = train_agent.Args(**names, reward_model=str(folder), cache_dir=str(folder / "cache"))
    before = args.frozen_model_hashes()
    modules(rc=POLITE)
    assert list(before) == ["reward_model_sha256"] and args.frozen_model_hashes() != before


def divide(prompt, completion, record):
    return 1 / 0


def hang_and_catch(prompt, completion, record):
    try:
        time.sleep(60)
    except Exception:
        return 0.5


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (divide, "rl.jsonl:7: reward mine failed .ZeroDivisionError: division by zero."),
        (SHIPPED["exact_answer"], "rl.jsonl:7: reward mine failed .ValueError: .*no reference answer"),
        (hang_and_catch, "rl.jsonl:7: reward mine took longer than --reward_timeout 0.05 s"),
        (lambda *_: float("nan"), "rl.jsonl:7: reward mine is nan .*, not a finite number"),
    ],
)
def test_a_reward_that_fails_names_the_record(function, line):
    with pytest.raises(UserError, match=line):
        compute([Reward("mine", function, 1.0)], [], "text", {}, "rl.jsonl:7", 0.05)


def test_a_reward_changes_nothing_for_the_next_one():
    def rewrites(prompt, completion, record):
        record["answer"]["value"] += 1
        prompt[0]["content"] += "!"
        return record["answer"]["value"] + len(prompt[0]["content"])

    prompt, record = [{"role": "user", "content": "?"}], {"answer": {"value": 1}}
    rewards = [Reward("one", rewrites, 1.0), Reward("two", rewrites, 1.0)]
    for _ in range(2):
        assert compute(rewards, prompt, "text", record, "a:1", 1) == {"one": 4.0, "two": 4.0}


def test_a_reward_model_is_a_sequence_classifier(tmp_path):
    """The head of a causal language model would be random."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape |= {"vocab_size": 6400, "head_dim": 16, "num_key_value_heads": 1, "num_labels": 1}
    for name, kind in (("lm", Qwen3ForCausalLM), ("classifier", Qwen3ForSequenceClassification)):
        kind(Qwen3Config(**shape, pad_token_id=0)).save_pretrained(tmp_path / name)
        load_tokenizer(ROOT / "model").save_pretrained(tmp_path / name)
    (tmp_path / "empty").mkdir()
    refused = {
        "empty": "no sequence classifier",
        "lm": "no sequence classifier: its weights lack score.weight",
    }
    for name, why in refused.items():
        with pytest.raises(UserError, match=f"--reward_model {tmp_path / name} holds {why}"):
            reward_model(str(tmp_path / name), torch.device("cpu"))
    with pytest.raises(UserError, match="none: no such folder"):
        reward_model(str(tmp_path / "none"), torch.device("cpu"))
    score = reward_model(str(tmp_path / "classifier"), torch.device("cpu"))
    assert isinstance(score([{"role": "user", "content": "1+1?"}], "2", {}), float)
