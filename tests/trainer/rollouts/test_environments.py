"""The shipped environment: a calculator that evaluates nothing else."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from dataset.rollout_prompts import PromptDataset, RolloutPrompt
from dataset.token_cache import load_tokenizer
from tests.conftest import ROOT, write_jsonl
from trainer.rollouts.environments import Calculator, calculate, check_tools, load_environment, tool_schema
from trainer.rollouts.mock_tools import cases


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.sampled_from("+-*"))
def test_whole_numbers_are_exact(a, b, operation):
    assert calculate(f"({a}) {operation} ({b})") == str({"+": a + b, "-": a - b, "*": a * b}[operation])


EXPRESSIONS = {
    "12*(3+4)": "84",
    "1/4": "0.25",
    "-7%3": "2",
    "1/3*3": "1",
    "2**-1 + 3² - 2³": "1.5",
    "math.sqrt(9/4) + 2**0.5": "2.914213562",
    "1**(2**4095) + (-1)**99999999": "0",
    "（3 + 4）× 6 ÷ 2 − 1": "20",
}
REFUSED = ["", "a", "2**9999999", "(10**300)**(10**300)", "(-8)**0.3", "sqrt(-1)", "sqrt.__class__(4)"]
REFUSED += ["__import__('os')", "(" * 150, "1/0", "9" * 201, "1e999"]


def test_expressions():
    assert {expression: calculate(expression) for expression in EXPRESSIONS} == EXPRESSIONS


@pytest.mark.parametrize("expression", REFUSED)
def test_anything_else_is_refused(expression):
    with pytest.raises(ValueError):
        calculate(expression)


@given(st.text(max_size=60))
def test_any_text_gives_a_number_or_is_refused(expression):
    with suppress(ValueError):
        float(calculate(expression))


def call(name: str, **arguments) -> dict:
    return {"name": name, "arguments": arguments}


def test_the_calculator_replies_to_each_call():
    """Also under MiniMind's name of it."""
    calls = [call("calculate", expression="123+456"), call("calculate"), call("other")]
    calls += [call("calculate_math", expression="1/0")]
    replies = ["579", "error: calculate needs an expression", "error: no tool named other"]
    replies += ["error: division by zero"]
    for environment in (Calculator, load_environment("calculate_math")):
        messages = [{"role": "tool", "content": reply} for reply in replies]
        assert environment({}).reply(calls) == messages
    assert load_environment("calculate_math").tools[0]["function"]["name"] == "calculate_math"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("abacus", "--environment abacus: give module:Class, or one of calculator"),
        ("math:pi", "--environment math:pi needs `tools`"),
    ],
)
def test_a_mistake_is_one_line(name, line):
    with pytest.raises(UserError, match=line):
        load_environment(name)


def test_a_tool_that_nothing_answers_is_refused():
    """What the environment does not say it does not answer, it may answer."""
    known, unknown = ([tool_schema(name, "")] for name in ("calculate_math", "get_current_weather"))
    prompts = [RolloutPrompt([], [], tools, {}, 0, "rl.jsonl:7") for tools in (None, known, unknown)]
    check_tools(Calculator, prompts[:2])
    told = r"^rl.jsonl:7: the record names the tool get_current_weather, but Calculator"
    with pytest.raises(UserError, match=told):
        check_tools(Calculator, prompts)
    check_tools(type("Any", (), {"tools": []}), prompts)


@pytest.mark.parametrize(
    ("name", "arguments", "reply"),
    [
        ("calculate_math", {"expression": "256*37"}, '"9472"'),
        ("unit_converter", {"value": "100", "from_unit": "KM", "to_unit": "miles"}, "62.1371"),
        ("get_current_weather", {"location": "北京"}, "28°C"),
        ("get_current_weather", {}, "get_current_weather needs location"),
        ("unit_converter", {"value": [], "from_unit": "km", "to_unit": "miles"}, "error"),
        ("dance", {}, "no tool named dance"),
    ],
)
def test_mock_tools(name, arguments, reply):
    """MiniMind's eight, with the replies that the references of its data belong to; always the same."""
    environment = load_environment("mock_tools")
    (first,), (second,) = (environment({}).reply([{"name": name, "arguments": arguments}]) for _ in range(2))
    assert reply in first["content"] and first == second
    assert {tool["function"]["name"] for tool in environment.tools} == set(environment.answers)


def test_cases_of_the_mock_tools(tmp_path):
    """Prompts for --eval_data_path, each offered some of the tools; its references are what they reply."""
    path = write_jsonl(tmp_path / "cases.jsonl", cases())
    prompts = PromptDataset(str(path), load_tokenizer(ROOT / "model"), 1024).prompts
    assert len(prompts) == 8 and all(2 <= len(prompt.tools) <= 3 for prompt in prompts)
    check_tools(load_environment("mock_tools"), prompts)
    assert [prompt.record["gt"] for prompt in prompts[:3]] == [["903"], ["14:30"], ["8.0467"]]
