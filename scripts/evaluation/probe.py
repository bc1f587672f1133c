"""A probe of how a model writes: whether it ends by itself or goes in circles, how long and varied its texts are."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from scripts.conversation import generate, prompt_tokens
from scripts.evaluation.scores import Item

PROMPTS = Path(__file__).with_name("prompts.jsonl")
COPIES, SHORTEST, LONGEST_PERIOD = 4, 12, 64  # of a loop: copies in a row, tokens in all, tokens of one copy


def read_prompts(path: str | Path) -> list[dict]:
    """The prompts of a JSONL file: `prompt`, and optionally `language`.

    Raises:
        UserError: the file is missing or empty, or a line has no prompt.
    """
    if not Path(path).is_file():
        raise UserError(f"--prompts_path {path} does not exist; leave it out for those of this project")
    prompts = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            prompt, language = found["prompt"], found.get("language", "")
            if not (isinstance(prompt, str) and prompt.strip() and isinstance(language, str)):
                raise TypeError("a field of another type")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            message = f'{path}:{number} is not a prompt; write {{"prompt": ..., "language": ...}}'
            raise UserError(message) from error
        prompts.append({"key": f"{Path(path).name}:{number}", "prompt": prompt, "language": language})
    if not prompts:
        raise UserError(f'--prompts_path {path} is empty; write lines such as {{"prompt": ..., "language": ...}}')
    return prompts


def probe(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[dict],
    form: str,
    batch_size: int,
    max_new_tokens: int,
    **options: Any,
) -> list[Item]:
    """What the model writes after each prompt, and what there is to count in it.

    form: `chat`: the prompt is a user's message; `text`: the beginning of a document. options: of `generate`.
    """

    def tokens_of(prompt: str) -> list[int]:
        if form == "chat":
            return prompt_tokens(tokenizer, [{"role": "user", "content": prompt}])
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        begin = [] if begin is None else [begin]  # as in pretraining
        return begin + tokenizer(prompt, add_special_tokens=False)["input_ids"]

    items = []
    for start in range(0, len(prompts), batch_size):
        chosen = prompts[start : start + batch_size]
        found = generate(model, tokenizer, [tokens_of(each["prompt"]) for each in chosen], max_new_tokens, **options)
        for each, tokens in zip(chosen, found, strict=True):
            stopped = tokens[-1:] == [tokenizer.eos_token_id]
            written = tokens[: len(tokens) - stopped]
            text = tokenizer.decode(written, skip_special_tokens=True)
            items.append(Item(each["key"], counts(written, stopped), each["language"], str(text)))
    return items


def counts(tokens: list[int], stopped: bool) -> dict[str, tuple[float, float]]:
    """The metrics of one text: stopped by itself, looping, length, share of its n-grams that are distinct."""
    found = {"stopped": (float(stopped), 1.0), "looping": (float(is_looping(tokens)), 1.0)}
    found["tokens"] = (float(len(tokens)), 1.0)
    for n in (1, 2, 4):
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        found[f"distinct {n}-grams"] = (float(len(set(grams))), float(len(grams)))
    return found


def is_looping(tokens: list[int]) -> bool:
    """Whether something is said COPIES times or more in a row, SHORTEST tokens or more altogether."""
    for period in range(1, LONGEST_PERIOD + 1):
        needed, run = max((COPIES - 1) * period, SHORTEST - period), 0
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run >= needed:
                return True
    return False


def sampling(temperature: float, seed: int) -> dict[str, Any]:
    """The options of `generate` for a temperature (0: greedy); sets the seed, so every model draws the same numbers."""
    torch.manual_seed(seed)
    return {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
