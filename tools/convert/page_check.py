"""Whether a page to send is the model: it answers prompts with the likeliest tokens, and so does the model.

Where Node is installed the page's own code answers. Elsewhere the model answers a second time, with its
weights rounded as the page has them: the same arithmetic, but not the same code.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

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
from tools.convert.page_file import PAGE
from tools.convert.parity import sample_texts
from trainer.weights.paths import metrics_path, settings_path

PROMPTS, NEW_TOKENS = 64, 32
LONGEST = 400  # characters of a prompt
OPENING = 40  # characters of a document that is to be continued
LEAST_SHARE = 0.9  # of the tokens up to the first other one; below it the page is refused
# whether Node is new enough: from 18 on
NODE_CAN = "process.exit(typeof DecompressionStream === 'function' && fetch ? 0 : 1)"

Answer = tuple[list[int], list[int], str]  # the tokens of the prompt and of the answer, and its text


def check_page(page: Path, exact: Any, rounded: Any, tokenizer: PreTrainedTokenizerBase, source: Path) -> str:
    """Compare the answers of a page with those of the model; what they have in common, as a sentence. exact:
    the model. rounded: the model with the weights of the page. source: of the model, beside which the
    settings of its run may lie. Raises UserError if they are not those of the same model."""
    continues_text = json.loads(element(page, "spec"))["continues_text"]
    own = own_prompts(source, continues_text)
    prompts = [*own, *built_in_prompts(continues_text)][:PROMPTS]

    def tokens_of(text: str) -> list[int]:
        if continues_text:
            return document_tokens(tokenizer, text)
        return prompt_tokens(tokenizer, [{"role": "user", "content": text}])

    expected = answers_of(exact, tokenizer, [tokens_of(text) for text in prompts])
    node = find_node()
    if node:
        texts = sample_texts()
        ids, answered = ask_node(node, page, texts, prompts)
        _compare_ids(tokenizer, texts, ids)
        how = f"in Node; {len(texts)} texts have the same token ids"
    else:
        answered = answers_of(rounded, tokenizer, [tokens_of(text) for text in prompts])
        how = "by the same arithmetic; with Node installed, the page itself answers"
    whose = f"{len(prompts)} prompts, {len(own)} of them from the data of its run"
    return f"{_compare(expected, answered)}, to {whose} ({how})"


def element(page: Path, name: str) -> str:
    """The text of an element of a page."""
    return page.read_text(encoding="utf-8").partition(f'id="{name}">')[2].partition("</script>")[0]


def answers_of(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]]) -> list[Answer]:
    """The likeliest answers of a model. Raises NotFinite."""
    samplings = [[Sampling(temperature=0)]] * len(prompts)
    end_ids = [tokenizer.eos_token_id]
    found = generate(model, prompts, samplings, NEW_TOKENS, end_ids)
    answers = []
    for prompt, (answer,) in zip(prompts, found, strict=True):
        text = str(tokenizer.decode(answer.tokens, skip_special_tokens=True))
        answers.append((prompt, answer.tokens, text))
    return answers


def find_node() -> str | None:
    """The program Node, if there is one that is new enough."""
    node = shutil.which("node")
    if node and subprocess.run([node, "-e", NODE_CAN], capture_output=True, check=False).returncode == 0:
        return node
    return None


def ask_node(
    node: str, page: Path, texts: Sequence[str], prompts: Sequence[str]
) -> tuple[list[list[int]], list[Answer]]:
    """The token ids of texts and the likeliest answers to prompts, each the first of a conversation, by the
    code of a page. Raises UserError if it fails."""
    lines = [{"ids": text} for text in texts] + [{"ask": text, "most": NEW_TOKENS} for text in prompts]
    done = subprocess.run(
        [node, str(PAGE / "run_in_node.js"), str(page)],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True, encoding="utf-8", check=False, env={**os.environ, "NODE_OPTIONS": ""},
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["it says nothing"]
        error = next((line for line in last if "Error" in line), last[-1])
        raise UserError(f"the page does not run in Node: {error.strip()}")
    results = list(map(json.loads, done.stdout.splitlines()))
    if None in results:
        raise UserError("the page refuses a prompt: it is too long for the model's context")
    answers = results[len(texts) :]
    return results[: len(texts)], [(each["prompt"], each["tokens"], each["text"]) for each in answers]


def _compare_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], ids: Sequence[list[int]]) -> None:
    for text, own in zip(texts, ids, strict=True):
        if own != tokenizer.encode(text, add_special_tokens=False):
            raise UserError(f"in the page the text {text[:60]!r} has other token ids")


def _compare(expected: Sequence[Answer], answered: Sequence[Answer]) -> str:
    """Up to the first other token of each answer the contexts are the same, so tokens are compared as far as
    that."""
    compared = equal = same_answers = 0
    for (prompt, tokens, text), (own_prompt, own_tokens, own_text) in zip(expected, answered, strict=True):
        if own_prompt != prompt:
            raise UserError("in the page a prompt has other token ids than here")
        if own_tokens == tokens and own_text != text:
            raise UserError(f"in the page the tokens of {text[:60]!r} spell {own_text[:60]!r}")
        pairs = list(zip(tokens, own_tokens, strict=False))
        differing = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        compared += len(pairs) if differing is None else differing + 1
        equal += len(pairs) if differing is None else differing
        same_answers += own_tokens == tokens
    share = equal / compared
    if share < LEAST_SHARE:
        raise UserError(
            f"the page is not the same model: it gives {100 * share:.0f} % of the model's tokens; "
            "with --bits 4, try --bits 8"
        )
    of_tokens = "" if same_answers == len(expected) else f", and {100 * share:.1f} % of the tokens"
    return f"{same_answers} of {len(expected)} answers are the model's{of_tokens}"


# --- prompts


def built_in_prompts(continues_text: bool) -> list[str]:
    """Prompts in both languages, from the demo's data."""
    corpus = make_corpus(seed=0)
    if continues_text:
        texts = [record["text"][:OPENING] for record in corpus["pretrain_eval.jsonl"]]
    else:
        texts = [record["conversations"][0]["content"] for record in corpus["quiz.jsonl"]]
    return texts[:: max(1, len(texts) // PROMPTS)][:PROMPTS]


def own_prompts(source: Path, continues_text: bool) -> list[str]:
    """Up to PROMPTS prompts of the held-out data of a model's run, or of its training data, if their files
    are where they were."""
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
    except UserError:  # the files are elsewhere now
        return []
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
