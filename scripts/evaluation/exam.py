"""The exam of the demo: questions in chat, whose answers must name one value and none of the others.

An answer is right if it names the right value and no other value of that attribute: naming all of them, or
none, is wrong, and a guess is right 1 time in 12.
"""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from model.answers import THINK, answer_message
from model.generation import generate
from model.sampling import Sampling
from scripts.conversation import prompt_tokens
from scripts.evaluation.questions import check_types, read_questions

FIELDS = {"question": str, "accepted": list, "rejected": list, "attribute": str, "language": str}
GREEDY = Sampling(temperature=0)


def read_exam(path: str | Path) -> list[dict]:
    """The questions of an exam file. Raises UserError if the file is missing or empty, or a line is not a
    question."""
    what = f"an exam question (needs {', '.join(FIELDS)})"
    remedy = "generate it with: python -m scripts.demo.corpus"
    return read_questions(path, "--exam_path", lambda question: check_types(question, FIELDS), what, remedy)


def ask(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[str],
    max_new_tokens: int,
    thinking: bool = False,
) -> list[str]:
    """The model's answers to questions, each in its own chat, decoded greedily. thinking: they begin with
    thoughts."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [prompt_tokens(tokenizer, chat, enable_thinking=thinking) for chat in chats]
    written = generate(model, prompts, [[GREEDY]] * len(prompts), max_new_tokens, [tokenizer.eos_token_id])
    texts = tokenizer.batch_decode([answer.tokens for (answer,) in written], skip_special_tokens=True)
    return [(THINK * thinking + text).strip() for text in texts]


def names_value(text: str, value: str) -> bool:
    """Whether a text names a value: in English as complete words in any case, in Chinese anywhere."""
    if value.isascii():
        return re.search(rf"(?<![a-z]){re.escape(value.lower())}(?![a-z])", text.lower()) is not None
    return value in text


def is_right(answer: str, question: dict) -> bool:
    """Whether an answer, its thoughts left aside, names an accepted value and no rejected one."""
    answer = answer_message(answer)["content"]
    accepted = any(names_value(answer, value) for value in question["accepted"])
    return accepted and not any(names_value(answer, value) for value in question["rejected"])
