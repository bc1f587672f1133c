"""Environments of agents: the tools that a model may call, and the replies to its calls.

A new environment is made for each trajectory from its record. Its replies are a pure function of the record
and the calls, so a resumed run repeats them."""

import ast
import json
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from common.errors import UserError, reason
from common.plugins import import_named
from dataset.messages import BadRecord, to_message
from dataset.report import describe_error
from dataset.rollout_prompts import RolloutPrompt

Call = dict[str, Any]  # {"name": ..., "arguments": {...}}


class Environment(Protocol):
    """What an agent acts in."""

    tools: list[dict]  # JSON schemas of the tools, as chat templates take them

    def __init__(self, record: dict) -> None: ...

    def reply(self, calls: list[Call]) -> list[dict]:
        """One message of role `tool` for each call. If a call cannot be answered, its reply says so."""
        ...


def tool_schema(tool: str, description: str, /, **parameters: str) -> dict:
    """The JSON schema of a tool whose parameters are all texts; `parameters`: their descriptions."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": tool, "description": description, "parameters": schema}}


def tool_message(content: Any) -> dict:
    """The message with a tool's reply."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {"role": "tool", "content": text}


def checked_replies(replies: Any) -> list[dict]:
    """Copies of the messages that an environment's `reply` returned, in the form that chat templates take.
    Raises ValueError if they are not messages, if one has the role assistant, or if a text cannot be encoded
    as UTF-8."""
    if not isinstance(replies, (list, tuple)):
        raise ValueError(f"reply(calls) gave {type(replies).__name__} instead of a list of messages")
    messages = []
    for number, reply in enumerate(replies, 1):
        try:
            messages.append(to_message(reply, f"message {number} of its reply"))
            json.dumps(messages[-1], ensure_ascii=False).encode()  # fails for half a character
        except (BadRecord, TypeError, UnicodeEncodeError) as error:
            raise ValueError(describe_error(error)) from None
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                f"message {number} of its reply has the role assistant, which is the model's; use tool"
            )
    return messages


# --- calculator

MOST_CHARACTERS, MOST_BITS = 200, 4096  # characters of an expression; digits of a whole number


def _power(base: float, exponent: float) -> Any:
    """base ** exponent. A result that is too large is refused without computing it."""
    if isinstance(base, int) and abs(base) > 1 and (base.bit_length() - 1) * abs(exponent) > MOST_BITS:
        raise ValueError("the number is too large")
    return base**exponent


OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
SIGNS = str.maketrans("×÷−（）", "*/-()") | {ord("^"): "**", ord("²"): "**2", ord("³"): "**3"}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: numbers, + - * / // % ** ^, parentheses and sqrt(). Whole
    numbers are exact; other numbers are floats, printed with ten digits. Raises ValueError for anything else,
    a division by zero, or a number that is too large."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"more than {MOST_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip().translate(SIGNS), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the number is too large") from None
    is_whole = isinstance(value, int) or (value.is_integer() and abs(value) < 2**53)
    return str(int(value)) if is_whole else f"{value:.10g}"


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        if isinstance(node.op, ast.USub):
            value = -value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _value(node.left), _value(node.right)
        value = OPERATIONS[type(node.op)](left, right)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("sqrt", "math.sqrt"):
        if len(node.args) != 1 or node.keywords:
            raise ValueError("sqrt() takes one number")
        value = _value(node.args[0]) ** 0.5
    else:
        raise ValueError("only numbers, + - * / // % **, parentheses and sqrt() are allowed")
    if isinstance(value, complex):
        raise ValueError("the root of a negative number")
    too_large = value.bit_length() > MOST_BITS if isinstance(value, int) else not math.isfinite(value)
    if too_large:
        raise ValueError("the number is too large")
    return value


class Calculator:
    """A calculator: `calculate(expression)`. It also answers `calculate_math`, its name in MiniMind's
    data."""

    answers = ("calculate", "calculate_math")
    tools = [  # noqa: RUF012
        tool_schema("calculate", "Compute an arithmetic expression.", expression="such as 12 * (3 + 4)")
    ]

    def __init__(self, record: dict):
        pass

    def reply(self, calls: list[Call]) -> list[dict]:
        """The value of each expression, or an error message."""
        return [tool_message(self._answer(call)) for call in calls]

    @staticmethod
    def _answer(call: Call) -> str:
        if call["name"] not in Calculator.answers:
            return f"error: no tool named {call['name']}"
        expression = call["arguments"].get("expression")
        if not isinstance(expression, str):
            return f"error: {call['name']} needs an expression"
        try:
            return calculate(expression)
        except ValueError as error:
            return f"error: {error}"


class MiniMindCalculator(Calculator):
    """The calculator under the name that it has in MiniMind's data."""

    tools = [  # noqa: RUF012
        tool_schema("calculate_math", "计算数学表达式的结果", expression="如 123+456、2**10、sqrt(144)")
    ]


SHIPPED: dict[str, type[Environment]] = {"calculator": Calculator, "calculate_math": MiniMindCalculator}
IN_OTHER_FILES = {"mock_tools": "trainer.rollouts.mock_tools:MockTools"}


def check_tools(environment: type[Environment], prompts: Iterable[RolloutPrompt]) -> None:
    """Raise UserError if a record names a tool that the environment does not answer, because the model would
    learn from error messages. Environments that do not say what they answer are not checked."""
    answers = getattr(environment, "answers", None)
    if answers is None:
        return
    for prompt in prompts:
        for name in (tool.get("function", tool).get("name") for tool in prompt.tools or ()):
            if name not in answers:
                raise UserError(
                    f"{prompt.source}: the record names the tool {name}, but {environment.__name__} answers "
                    f"only {' and '.join(answers)}; give --environment module:Class of your own"
                )


def load_environment(name: str, flag: str = "--environment") -> type[Environment]:
    """The environment that a flag names. Raises UserError for an unknown name, or a module that cannot be
    imported."""
    if name in SHIPPED:
        return SHIPPED[name]
    name = IN_OTHER_FILES.get(name, name)
    if ":" not in name:
        known = ", ".join([*SHIPPED, *IN_OTHER_FILES])
        raise UserError(f"{flag} {name}: give module:Class, or one of {known}")
    environment = import_named(flag, name)
    has_tools = isinstance(getattr(environment, "tools", None), list)
    if not (has_tools and callable(getattr(environment, "reply", None))):
        raise UserError(f"{flag} {name} needs `tools`, a list of JSON schemas, and a method `reply(calls)`")
    return environment


class Toolbox:
    """The tools of environments, which a chat offers and runs. names: environments as in `--environment` of
    train_agent.py. Raises UserError if there is no such environment, or if it cannot be made."""

    def __init__(self, names: Sequence[str]):
        self.tools: list[dict] = []
        self.owners: dict[str, Environment] = {}  # name of a tool -> its environment
        for name in names:
            try:
                environment = load_environment(name, "--tools")({})
            except UserError:
                raise
            except Exception as error:  # a user's environment can raise anything
                raise UserError(
                    f"--tools {name}: it cannot be made without a record ({reason(error)})"
                ) from error
            self.tools += environment.tools
            for alias in getattr(environment, "answers", ()):
                self.owners[alias] = environment
            for tool in environment.tools:
                self.owners[tool["function"]["name"]] = environment

    def reply(self, calls: Sequence[Call]) -> list[dict]:
        """A message of role `tool` for each call, in their order; an error message for one that cannot be
        answered."""
        return [self._reply(call) for call in calls]

    def _reply(self, call: Call) -> dict:
        if call["name"] not in self.owners:
            return tool_message(f"error: no tool named {call['name']}")
        try:
            (message,) = self.owners[call["name"]].reply([call])
            return tool_message(message["content"])
        except Exception as error:  # a user's environment can raise anything
            return tool_message(f"error: {reason(error)}")
