"""A probe of how a model writes: whether it ends by itself or goes in circles, how long and varied its texts are."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from model.generation import generate
from model.sampling import Sampling
from scripts.conversation import prompt_tokens
from scripts.evaluation.questions import check_types, read_questions
from scripts.evaluation.scores import Item

PROMPTS = Path(__file__).with_name("prompts.jsonl")
COPIES, SHORTEST, LONGEST_PERIOD = 4, 12, 64  # of a loop: copies in a row, tokens in all, tokens of one copy


def read_prompts(path: str | Path) -> list[dict]:
    """The prompts of a JSONL file: `prompt`, and optionally `language`.

    Raises:
        UserError: the file is missing or empty, or a line has no prompt.
    """
    remedy = 'write lines such as {"prompt": ..., "language": ...}'
    return read_questions(path, "--prompts_path", _check_prompt, "a prompt", remedy)


def _check_prompt(line: dict) -> None:
    check_types({"language": ""} | line, {"prompt": str, "language": str})
    if not line["prompt"].strip():
        raise ValueError("an empty prompt")


def probe(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict],
    form: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[Item]:
    """What the model writes after each prompt, and what there is to count in it.

    form: `chat`: the prompt is a user's message; `text`: the beginning of a document. seed: of the sampling; the
    prompts of all models draw the same numbers.
    """

    def tokens_of(prompt: str) -> list[int]:
        if form == "chat":
            return prompt_tokens(tokenizer, [{"role": "user", "content": prompt}])
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        begin = [] if begin is None else [begin]  # as in pretraining
        return begin + tokenizer(prompt, add_special_tokens=False)["input_ids"]

    rows = [tokens_of(each["prompt"]) for each in prompts]
    samplings = [[Sampling(temperature, seed=seed * len(rows) + number)] for number in range(len(rows))]
    written = generate(model, rows, samplings, max_new_tokens, [tokenizer.eos_token_id])
    items = []
    for each, (answer,) in zip(prompts, written, strict=True):
        stopped = answer.finish == "stop"
        tokens = answer.tokens[: len(answer.tokens) - stopped]  # without the end token
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        items.append(Item(each["key"], counts(tokens, stopped), each.get("language", ""), str(text)))
    return items


def counts(tokens: list[int], stopped: bool) -> dict[str, tuple[float, float]]:
    """The metrics of one text: stopped by itself, looping, length, share of its n-grams that are distinct."""
    metrics = {"stopped": (float(stopped), 1.0), "looping": (float(is_looping(tokens)), 1.0)}
    metrics["tokens"] = (float(len(tokens)), 1.0)
    for n in (1, 2, 4):
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        metrics[f"distinct {n}-grams"] = (float(len(set(grams))), float(len(grams)))
    return metrics


def is_looping(tokens: list[int]) -> bool:
    """Whether something is said COPIES times or more in a row, SHORTEST tokens or more altogether."""
    for period in range(1, LONGEST_PERIOD + 1):
        needed, run = max((COPIES - 1) * period, SHORTEST - period), 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run >= needed:
                return True
    return False
