"""Rewards of reinforcement learning: pure Python functions `(prompt, completion, record) -> float`.

`--reward` names them: `module:function` or one of the rewards below; several are separated by commas, each
with an optional weight. prompt: the messages before the completion. completion: its text, without special
tokens. record: the record of the data file, with the reference answer as `answer` and the offered `tools`.
prompt and record are copies."""

import math
import re
from collections.abc import Callable
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.errors import UserError, reason
from common.files import is_folder
from common.plugins import import_named, user_code
from dataset.messages import BadRecord, preview
from model.answers import CALL, END_CALL, parse_call
from trainer.weights.paths import CONFIG_FILE, is_hugging_face

LARGEST = 1e15  # limit of a reward and of its weighted value, so that squares stay finite in float32
RESERVED_NAMES = ("std", "square", "seconds")  # `reward_std` and so on are metrics of all rewards together
RewardFn = Callable[[list[dict], str, dict], float]
LETTER = r"[^\W_\u3040-\u30ff\u3400-\u9fff]"  # or digit, of a script with spaces between words
DIGITS = r"(?:\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?!\d)|\d+)"  # perhaps in groups of thousands
NUMBER = re.compile(
    rf"[-+]?(?:\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|{DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?"
)
# Digits with everything that is joined to them: a fraction, a time, a date, a power, a root. An exponent
# alone, or digits after a letter (cm^2, H2O), do not count as numbers.
NUMERAL = re.compile(
    rf"(?<!{LETTER})(?<!\^)√?[-+]?(?:(?<![\w.])\.)?{DIGITS}(?:(?:[.,:/^*×√+-]+|[eE][-+]?){DIGITS})*"
    r"[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2079]*"  # 10², 2½
)
LATEX = (  # replacements in a text before numbers are looked for
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\sqrt\s*\{([^{}]*)\}"), r"√\1"),
    (re.compile(r"\^\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"\{,\}|\\,(?=\d)"), ","),  # thousands
    (re.compile("\u2212"), "-"),
)
CALLED = re.compile(rf"{CALL}(.*?){END_CALL}", re.DOTALL)
THINKING = re.compile(r"<think>\n?(?P<thoughts>.+?)\n?</think>\s*(?P<answer>\S.*)", re.DOTALL)


class Reward(NamedTuple):
    """One of the rewards of a run."""

    name: str  # unique
    function: RewardFn
    weight: float


# --- shipped rewards


def exact_answer(prompt: list[dict], completion: str, record: dict) -> float:
    """1 if the completion, without its thoughts, is the reference answer."""
    return float(spoken(completion) == reference_text(record))


def numeric_answer(prompt: list[dict], completion: str, record: dict) -> float:
    """1 if the last number of the completion, without its thoughts, equals the reference answer, which is one
    number, alone or after "####"."""
    given = numbers_in(spoken(completion))
    return float(bool(given) and given[-1] == reference_number(record))


def contains_answer(prompt: list[dict], completion: str, record: dict) -> float:
    """The share of the texts in the reference answer (a text, or a list of them, such as MiniMind's `gt`)
    that occur in the completion, without its thoughts, as whole words; a number occurs if an equal number
    does. 0 if one of the record's `wrong_answers` occurs: a completion that names all colors is no answer."""
    answers, text = reference_texts(record), spoken(completion).lower()
    if any(occurs(str(wrong), text) for wrong in record.get("wrong_answers") or ()):
        return 0.0
    return sum(occurs(part, text) for part in answers) / len(answers)


def occurs(part: str, text: str) -> bool:
    """Whether a text in lower case contains a number or whole words. Chinese and Japanese have no border
    between words."""
    part = part.strip().lower()
    if NUMBER.fullmatch(part):
        return number_of(part) in numbers_in(text)
    before = rf"(?<!{LETTER})" if re.match(LETTER, part) else ""
    after = rf"(?!{LETTER})" if re.search(rf"{LETTER}$", part) else ""
    return re.search(before + re.escape(part) + after, text) is not None


def think_format(prompt: list[dict], completion: str, record: dict) -> float:
    """1 if the completion is <think> thoughts </think> and then an answer, each tag exactly once."""
    once = completion.count("<think>") == completion.count("</think>") == 1
    return float(once and THINKING.fullmatch(completion.strip()) is not None)


def length(prompt: list[dict], completion: str, record: dict) -> float:
    """1 for an answer of 20 to 800 characters, else 0 (MiniMind's bounds)."""
    return float(20 <= len(spoken(completion)) <= 800)


def repetition(prompt: list[dict], completion: str, record: dict) -> float:
    """Minus the share, 0 to 1, of the word triples (character triples of Chinese) that occurred before."""
    words = re.findall(r"[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+", completion.lower())
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(triples)) / len(triples) - 1.0 if triples else 0.0


def tool_used(prompt: list[dict], completion: str, record: dict) -> float:
    """1 if a tool has replied since the user's last message."""
    return float(any(message["role"] == "tool" for message in messages_since_user(prompt)))


def valid_calls(prompt: list[dict], completion: str, record: dict) -> float:
    """1 if there are as many calls as reference answers and each call names an offered tool and has its
    required arguments. Otherwise minus the number of surplus, missing and invalid calls; 0 if no tool was
    called."""
    bodies = [body for turn in turns_since_user(prompt, completion) for body in CALLED.findall(turn)]
    if not bodies:
        return 0.0
    required = {}
    for tool in record.get("tools") or ():
        function = tool.get("function", tool)
        required[function.get("name")] = (function.get("parameters") or {}).get("required") or ()
    valid = 0
    for call in map(parse_call, bodies):
        if call and call["name"] in required:
            arguments = [call["arguments"].get(name) for name in required[call["name"]]]
            valid += all(value not in (None, "") for value in arguments)
    wanted = valid  # without a reference
    answers = record.get("gt", record.get("answer"))
    if answers is not None:
        wanted = len(answers) if isinstance(answers, list) else 1
    wrong = abs(valid - wanted) + len(bodies) - valid
    return 1.0 if wrong == 0 else -float(wrong)


def closed_tags(prompt: list[dict], completion: str, record: dict) -> float:
    """Minus the number of tags of tool calls in all turns that are opened and not closed, or closed and not
    opened."""
    turns = map(spoken, turns_since_user(prompt, completion))
    return 0.0 - sum(abs(turn.count(CALL) - turn.count(END_CALL)) for turn in turns)


def finished(prompt: list[dict], completion: str, record: dict) -> float:
    """-1 if the last turn still calls a tool, else 0."""
    return 0.0 if CALLED.search(spoken(completion)) is None else -1.0


FUNCTIONS = (
    exact_answer, numeric_answer, contains_answer, think_format, length, repetition, tool_used,
    valid_calls, closed_tags, finished,
)  # fmt: skip
SHIPPED: dict[str, RewardFn] = {function.__name__: function for function in FUNCTIONS}


def messages_since_user(prompt: list[dict]) -> list[dict]:
    """The messages after the user's last one, the oldest first."""
    first = 0
    for number, message in enumerate(prompt, 1):
        if message["role"] == "user":
            first = number
    return prompt[first:]


def turns_since_user(prompt: list[dict], completion: str) -> list[str]:
    """The texts of the assistant's turns since the user's last message, up to the completion."""
    since = messages_since_user(prompt)
    return [*(message["content"] for message in since if message["role"] == "assistant"), completion]


def spoken(completion: str) -> str:
    """The completion without its thoughts."""
    return completion.rsplit("</think>", 1)[-1].strip()


def plain_numbers(text: str) -> str:
    """A text with the numbers of LaTeX written plainly."""
    for pattern, plain in LATEX:
        text = pattern.sub(plain, text)
    return text


def numbers_in(text: str) -> list[Fraction | None]:
    """The numbers in a text, with None for digits that are not one number, such as a time or a date."""
    return [number_of(found) for found in NUMERAL.findall(plain_numbers(text))]


def number_of(text: str) -> Fraction | None:
    """The value of a text that is a number or a fraction; None if it is neither."""
    parts = text.split("/")
    if len(parts) > 2 or not all(map(NUMBER.fullmatch, parts)):
        return None
    try:
        numbers = [Fraction(re.sub(r"[,\s]", "", part)) for part in parts]
        return numbers[0] / numbers[1] if len(numbers) > 1 else numbers[0]
    except (ValueError, ZeroDivisionError):  # thousands of digits; 1/0
        return None


# --- references


def reference(record: dict) -> Any:
    """The reference answer of a record. Raises ValueError with what to do."""
    if record.get("answer") in (None, [], ""):
        raise ValueError("the record has no reference answer: add one, or give --reward length,repetition")
    return record["answer"]


def reference_number(record: dict) -> Fraction:
    """The reference answer of a record as a number. Raises ValueError if it is not one."""
    answer = reference(record)
    text = plain_numbers(str(answer)).rpartition("####")[2].strip()
    number = number_of(text) if NUMBER.fullmatch(text) else None
    if number is None:
        raise ValueError(
            f"the reference answer {preview(answer)} is not one number; write the number alone, or behind "
            '"####", or give --reward contains_answer'
        )
    return number


def reference_text(record: dict) -> str:
    """The reference answer of a record as one text. Raises ValueError if it is not one."""
    answer = reference(record)
    if not isinstance(answer, str | int | float):
        raise ValueError(f"the reference answer {preview(answer)} is not one text; give contains_answer")
    return str(answer).strip()


def reference_texts(record: dict) -> list[str]:
    """The texts of a reference answer, of which there may be several. Raises ValueError if it is neither a
    text nor a list of them."""
    answer = reference(record)
    answers = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(one, str | int | float) for one in answers):
        raise ValueError(f"the reference answer {preview(answer)} is neither a text nor a list of texts")
    return [str(one) for one in answers]


# shipped reward -> function that raises ValueError for a record that the reward cannot judge
CHECKS: dict[RewardFn, Callable[[dict], Any]] = {
    exact_answer: reference_text,
    numeric_answer: reference_number,
    contains_answer: reference_texts,
}


def check_record(rewards: list[Reward], record: dict) -> None:
    """Raise BadRecord if a shipped reward cannot judge the answers to a record. A user's own rewards report
    this when they are first called."""
    for name, function, _ in rewards:
        if function in CHECKS:
            try:
                CHECKS[function](record)
            except ValueError as error:
                raise BadRecord(f"reward {name}: {error}") from None


# --- choosing and computing


def load_rewards(spec: str, score: RewardFn | None = None) -> list[Reward]:
    """The rewards that `--reward` names, and the score of a reward model. Raises UserError for an unknown
    name, a name that is given twice, a module that cannot be imported, and a weight that is not a number."""
    rewards = [_reward_named(part) for part in reward_parts(spec)]
    if score is not None:
        rewards.append(Reward("model", score, 1.0))
    if not rewards:
        raise UserError(f"--reward is empty; give module:function, or one of {', '.join(SHIPPED)}")
    taken = set(RESERVED_NAMES)
    for reward in rewards:
        if reward.name in taken:
            raise UserError(
                f"--reward: {reward.name} is named twice, or the name of another metric; name it once, or "
                "rename the function"
            )
        taken.add(reward.name)
    return rewards


def reward_parts(spec: str) -> list[str]:
    """The parts `NAME` or `NAME=WEIGHT` of `--reward`."""
    return [part.strip() for part in spec.split(",") if part.strip()]


def _reward_named(part: str) -> Reward:
    name, _, weight = part.partition("=")
    try:
        factor = float(weight) if weight else 1.0
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor):
        raise UserError(f"--reward {part}: the weight {weight!r} must be a finite number")
    if name in SHIPPED:
        return Reward(name, SHIPPED[name], factor)
    if ":" not in name:
        raise UserError(f"--reward {name}: give module:function, or one of {', '.join(SHIPPED)}")
    function = import_named("--reward", name)
    if not callable(function):
        raise UserError(f"--reward {name} is not a function")
    return Reward(name.rpartition(":")[2], function, factor)


def compute(
    rewards: list[Reward], prompt: list[dict], completion: str, record: dict, where: str, limit: float
) -> dict[str, float]:
    """The rewards of a completion by name, without their weights.

    where: FILE:LINE of the record, for the error. limit: seconds that each function may take. Raises
    UserError if a reward raises, takes too long or is not a finite number; the line names the record."""
    values = {}
    for name, function, weight in rewards:
        with user_code(f"reward {name}", where, limit):
            value = float(function(deepcopy(prompt), completion, deepcopy(record)))
        if not abs(value) * max(1.0, abs(weight)) <= LARGEST:  # NaN is not either
            raise UserError(
                f"{where}: reward {name} is {value:g} (its weight: {weight:g}), not a finite number of at "
                f"most {LARGEST:g}; make it one"
            )
        values[name] = value
    return values


# --- reward models


def check_reward_model(folder: str) -> None:
    """Raise UserError if it is not a Hugging Face folder."""
    if not is_folder(folder):
        raise UserError(f"--reward_model {folder}: no such folder")
    if not is_hugging_face(Path(folder)):
        raise UserError(f"--reward_model {folder} holds no sequence classifier (it has no {CONFIG_FILE})")


def reward_model(folder: str, device: torch.device) -> RewardFn:
    """The score of a conversation by the sequence classifier in a Hugging Face folder, which must have one
    output. Code in the folder is not run. Raises UserError if there is no such model."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    check_reward_model(folder)
    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, **options)
        options |= {"num_labels": 1, "output_loading_info": True}
        model, loading = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises errors of any type for untrusted files
        raise UserError(f"--reward_model {folder} holds no sequence classifier ({reason(error)})") from error
    if missing := sorted(loading["missing_keys"])[:3]:
        raise UserError(
            f"--reward_model {folder} holds no sequence classifier: its weights lack {', '.join(missing)}, "
            "which would be random numbers; give a model that was trained to score answers"
        )
    model = model.eval().to(device)

    def score(prompt: list[dict], completion: str, record: dict) -> float:
        messages = [*prompt, {"role": "assistant", "content": completion}]
        inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True).to(device)
        with torch.inference_mode():
            return float(model(**inputs).logits)

    return score
