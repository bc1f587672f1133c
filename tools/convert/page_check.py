"""Checks that a page to send answers like the model: both generate greedily for the same prompts.

If Node is installed, the page's own code answers. Otherwise the model answers a second time with the rounded
weights of the page: the same arithmetic, but not the same code.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from common.errors import UserError
from tools.convert.answers import NEW_TOKENS, Answer, Prompts, compare_answers, likeliest_answers
from tools.convert.page_file import PAGE
from tools.convert.parity import sample_texts

# whether Node is new enough: from 18 on
NODE_CAN = "process.exit(typeof DecompressionStream === 'function' && fetch ? 0 : 1)"


def check_page(
    page: Path, expected: Sequence[Answer], rounded: Any, tokenizer: PreTrainedTokenizerBase, prompts: Prompts
) -> str:
    """Compare the answers of a page with those of the model; returns a sentence that says how many agree.
    expected: the model's answers. rounded: the model with the weights of the page. Raises UserError if too
    few agree."""
    node = find_node()
    if node is None:
        answered = likeliest_answers(rounded, tokenizer, prompts)
        how = "computed with the page's weights; if Node is installed, the page itself answers"
    else:
        texts = sample_texts()
        answered = answers_in_node(node, page, tokenizer, texts, prompts)
        how = f"in Node; {len(texts)} texts have the same token ids"
    return f"{compare_answers(expected, answered)}, to {prompts} ({how})"


def find_node() -> str | None:
    """The path of Node; None if it is missing or too old."""
    node = shutil.which("node")
    if node and subprocess.run([node, "-e", NODE_CAN], capture_output=True, check=False).returncode == 0:
        return node
    return None


def answers_in_node(
    node: str, page: Path, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], prompts: Prompts
) -> list[Answer]:
    """The greedy answers of a page, computed by the page's own code. Each prompt is the first of a
    conversation. Raises UserError if the page fails, or if its token ids of a text or prompt differ from the
    tokenizer's."""
    lines = [{"ids": text} for text in texts]
    lines += [{"ask": text, "most": NEW_TOKENS} for text in prompts.texts]
    done = subprocess.run(
        [node, str(PAGE / "run_in_node.js"), str(page)],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True, encoding="utf-8", check=False, env={**os.environ, "NODE_OPTIONS": ""},
    )  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["it printed no message"]
        error = next((line for line in last if "Error" in line), last[-1])
        raise UserError(f"the page does not run in Node: {error.strip()}")
    results = list(map(json.loads, done.stdout.splitlines()))
    for text, ids in zip(texts, results, strict=False):
        if ids != tokenizer.encode(text, add_special_tokens=False):
            raise UserError(f"in the page the text {text[:60]!r} has other token ids")
    answers = []
    for text, tokens, said in zip(prompts.texts, prompts.tokens, results[len(texts) :], strict=True):
        if said is None:
            raise UserError(f"in the page the prompt {text[:60]!r} is too long for the model's context")
        if said["prompt"] != tokens:
            raise UserError(f"in the page the prompt {text[:60]!r} has other token ids")
        answers.append(Answer(said["tokens"], said["text"]))
    return answers
