"""Checks that a model with rounded weights still answers like the model: both generate greedily for the same
prompts."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from common.files import read_object
from dataset.files import expand_paths, read_records
from dataset.messages import BadRecord
from dataset.records import parse
from model.generation import generate
from model.prompts import document_tokens, prompt_tokens
from model.sampling import Sampling
from scripts.demo.world import make_corpus
from trainer.weights.paths import metrics_path, settings_path

PROMPTS, NEW_TOKENS = 64, 32
LONGEST = 400  # characters of a prompt
OPENING = 40  # characters of a document that is to be continued
LEAST_SHARE = 0.9  # share of equal tokens up to the first difference; a form with less is refused


class Prompts(NamedTuple):
    """The prompts of a check: texts, each a message or the beginning of a document, and their tokens. own:
    how many of them come from the data of the model's run; these are the first ones."""

    texts: list[str]
    tokens: list[list[int]]
    own: int

    def __str__(self) -> str:
        return f"{len(self.texts)} prompts, {self.own} of them from the data of its run"


class Answer(NamedTuple):
    """An answer, including its end token if it has one, and its text."""

    tokens: list[int]
    text: str


def prompts_for(tokenizer: PreTrainedTokenizerBase, source: Path, continues_text: bool) -> Prompts:
    """PROMPTS prompts for a model: first from the data of its run, if these files still exist, then from the
    demo's. source: the path of the model; the settings of its run may be beside it."""
    own = own_prompts(source, continues_text)
    texts = [*own, *built_in_prompts(continues_text)][:PROMPTS]
    if continues_text:
        tokens = [document_tokens(tokenizer, text) for text in texts]
    else:
        tokens = [prompt_tokens(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    return Prompts(texts, tokens, len(own))


def likeliest_answers(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> list[Answer]:
    """The answers of a model at temperature 0. Raises NotFinite."""
    samplings = [[Sampling(temperature=0)]] * len(prompts.tokens)
    end_ids = [tokenizer.eos_token_id]
    groups = generate(model, prompts.tokens, samplings, NEW_TOKENS, end_ids)
    texts = [str(tokenizer.decode(found.tokens, skip_special_tokens=True)) for (found,) in groups]
    return [Answer(found.tokens, text) for (found,), text in zip(groups, texts, strict=True)]


def compare_answers(expected: Sequence[Answer], answered: Sequence[Answer]) -> str:
    """Compare answers with those of the model; returns a sentence that says how many agree. Tokens of an
    answer are compared up to the first difference, because the contexts differ after it. Raises UserError if
    less than LEAST_SHARE of these tokens agree."""
    compared = equal = same_answers = 0
    for (tokens, text), (other, other_text) in zip(expected, answered, strict=True):
        if other == tokens and other_text != text:
            raise UserError(f"the tokens of {text[:60]!r} are decoded as {other_text[:60]!r}")
        pairs = list(zip(tokens, other, strict=False))
        differing = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        compared += len(pairs) if differing is None else differing + 1
        equal += len(pairs) if differing is None else differing
        same_answers += other == tokens
    if equal < LEAST_SHARE * compared:
        share = f"it gives {100 * equal / compared:.0f} % of the model's tokens"
        raise UserError(f"it is no longer the same model: {share}; with --bits 4, try --bits 8")
    of_tokens = "" if same_answers == len(expected) else f", and {100 * equal / compared:.1f} % of the tokens"
    return f"{same_answers} of {len(expected)} answers are the model's{of_tokens}"


# --- prompts


def built_in_prompts(continues_text: bool) -> list[str]:
    """Prompts in both languages, from the demo's data."""
    corpus = make_corpus(seed=0)
    if continues_text:
        texts = [record["text"][:OPENING] for record in corpus["pretrain_eval.jsonl"]]
    else:
        texts = [record["conversations"][0]["content"] for record in corpus["quiz.jsonl"]]
    return _spread(texts)


def own_prompts(source: Path, continues_text: bool) -> list[str]:
    """Up to PROMPTS prompts from the held-out data of a model's run, or without any from its training data.
    There are none if the files have been moved."""
    settings = read_object(settings_path(metrics_path(source.parent, source.stem))).get("settings") or {}
    path = settings.get("eval_data_path") or settings.get("data_path")
    if not isinstance(path, str):
        return []
    prompt_of: Callable[[dict], str] = _opening if continues_text else _question
    prompts = []
    try:
        for _, record in islice(read_records(expand_paths(path)), 10 * PROMPTS):
            if isinstance(record, dict) and (prompt := prompt_of(record)):
                prompts.append(prompt)
    except UserError:  # the files have been moved
        return []
    return _spread(prompts)


def _spread(prompts: list[str]) -> list[str]:
    return prompts[:: max(1, len(prompts) // PROMPTS)][:PROMPTS]


def _opening(record: dict) -> str:
    try:
        return (parse(record, "pretrain").document or "")[:OPENING]
    except BadRecord:
        return ""


def _question(record: dict) -> str:
    """The first message, if it is a short one of a user."""
    try:
        first = parse(record, "prompt").chats[0].messages[0]
    except (BadRecord, LookupError):
        return ""
    text = first["content"] if first["role"] == "user" else ""
    return text if isinstance(text, str) and len(text) <= LONGEST else ""
