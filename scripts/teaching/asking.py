"""Asks a model questions, and compares its answers before and after."""

from typing import Any

from model.generation import generate
from model.prompts import prompt_tokens
from model.sampling import Sampling

NEW_TOKENS = 96  # of an answer, at most


def ask(
    model: Any, tokenizer: Any, chats: list[list[dict]], tools: list[list[dict] | None] | None = None,
    new_tokens: int | None = None,
) -> list[str]:  # fmt: skip
    """The likeliest answer to each conversation, without thoughts. A conversation that is too long for the
    model gets the answer ""."""
    new_tokens = new_tokens or NEW_TOKENS
    offered = tools or [None] * len(chats)
    prompts = [prompt_tokens(tokenizer, chat, own) for chat, own in zip(chats, offered, strict=True)]
    longest = model.config.max_position_embeddings - new_tokens
    short = [prompt for prompt in prompts if len(prompt) <= longest]
    greedy = [[Sampling(temperature=0.0)]] * len(short)
    generated = iter(generate(model, short, greedy, new_tokens, [tokenizer.eos_token_id]))
    answers = []
    for prompt in prompts:
        tokens = next(generated)[0].tokens if len(prompt) <= longest else []
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        answers.append(text.rpartition("</think>")[2].strip())
    return answers


def ask_all(model: Any, tokenizer: Any, asked: list[dict[str, Any]]) -> list[str]:
    """The answers to questions with `messages` and `tools`."""
    return ask(model, tokenizer, [each["messages"] for each in asked], [each["tools"] for each in asked])
