"""Checks whether a converted model is the same model, by token ids, rendered conversations and logits.

The texts are the demo corpus, which is generated here, and lines that are hard to tokenise. Everything is
computed in float32.
"""

from functools import cache
from itertools import chain, islice
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from scripts.demo.world import make_corpus

LIMIT = 1e-3  # largest allowed difference of logits; another order of float32 operations gives about 1e-5
ROWS, LENGTH = 4, 128  # size of the text whose logits are compared
TEXTS = 400
HARD_TEXTS = (
    "a , b ' s .  don't I'LL they've 'twas",
    "1234567890 3.14159 1,000,000 x² ½ １２３ ١٢٣",
    "\tdef f(x):\r\n\t\treturn x ** 2  # 平方\n\n\n",
    " leading, trailing \r\n\t\n ",
    "中文，标点。“引号”——破折号……　全角空格",
    "e\u0301 한국어 ไทย עברית 👩‍👩‍👧 ﬁ Å",
    "<think>\n先想\n</think>\n\n<tool_call>\n{}\n</tool_call><|im_end|>\n<|endoftext|>",
)
PARAMETERS = {"type": "object", "properties": {}}
WEATHER = {"name": "weather", "description": "天气", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": WEATHER}


@cache
def sample_texts() -> list[str]:
    """Several hundred texts in Chinese and English."""
    corpus = make_corpus(seed=0)
    texts = [record["text"] for record in corpus["pretrain.jsonl"]]
    texts += [record["conversations"][0]["content"] for record in corpus["quiz.jsonl"]]
    return [*HARD_TEXTS, *texts[:: max(1, len(texts) // TEXTS)]]


def sample_chats() -> list[dict[str, Any]]:
    """Arguments of `apply_chat_template`: conversations of one or several turns, with a system message,
    reasoning, and tools."""
    turns = [record["conversations"] for record in make_corpus(seed=0)["sft_eval.jsonl"][:4]]
    system = {"role": "system", "content": "你是 a helpful assistant."}
    question = {"role": "user", "content": "weather?"}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "北京"}}}
    call_turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    reasoning_turn = {"role": "assistant", "reasoning_content": "想一想", "content": " fine\n"}
    chats = [*turns, [system, *turns[0]], [question, reasoning_turn, question]]
    chats.append([question, call_turn, {"role": "tool", "content": "20°C"}])
    return [
        {"conversation": chat, "tools": tools, "add_generation_prompt": prompt}
        for chat in chats
        for tools in (None, [TOOL])
        for prompt in (False, True)
    ]


def rendered(tokenizer: PreTrainedTokenizerBase, chat: dict[str, Any]) -> str | None:
    """A conversation as text; None if the template refuses it."""
    try:
        return str(tokenizer.apply_chat_template(**chat, tokenize=False))
    except (TemplateError, TypeError):
        return None


@torch.no_grad()
def text_logits(model: Any, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The logits [ROWS, LENGTH, V] of built-in text, for the tokens of the tokenizer's own vocabulary."""
    tokens = chain.from_iterable(map(tokenizer.encode, sample_texts()[len(HARD_TEXTS) :]))
    ids = torch.tensor(list(islice(tokens, ROWS * LENGTH))).view(ROWS, LENGTH)
    return model(ids).logits[..., : len(tokenizer)].float()


def compare(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedModel,
    other_tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Compare a model, with its weights as they were stored, with what was read back. Returns a sentence that
    says what they have in common. Raises ValueError if something differs."""
    texts = sample_texts()
    chats = sample_chats() if tokenizer.chat_template else []
    for text in texts:
        if tokenizer.encode(text) != other_tokenizer.encode(text):
            raise ValueError(f"the text {text[:60]!r} has other token ids")
    for number, chat in enumerate(chats, 1):
        if rendered(tokenizer, chat) != rendered(other_tokenizer, chat):
            raise ValueError(f"conversation {number} of {len(chats)} is rendered differently")
    logits = (text_logits(model, tokenizer) - text_logits(other, tokenizer)).abs().max()
    if not logits <= LIMIT:  # NaN fails, too
        raise ValueError(f"the logits differ by up to {logits:.1e}, more than {LIMIT:.0e}")
    return (
        f"{len(texts)} texts have the same token ids, {len(chats)} conversations are rendered alike, "
        f"the logits differ by at most {logits:.1e}"
    )
