"""From a request to the tokens of its prompts. In a conversation only the chat template writes special tokens
(model/prompts.py); the prompt of a plain completion is taken as it stands."""

import json
from collections.abc import Iterator
from itertools import dropwhile
from typing import Any

from common.errors import reason
from dataset.messages import to_message
from model.answers import CALL
from model.prompts import document_tokens, encode_pieces, prompt_pieces
from scripts.conversation import first_kept
from scripts.serve.protocol import ApiError, ChatRequest, CompletionRequest, check_characters


def call_opening(names: list[str]) -> str:
    """How an answer that has to call one of these tools begins, as the chat templates write calls; with only
    one tool up to its arguments. Empty if there are none."""
    if not names:
        return ""
    if len(names) > 1:
        return f'{CALL}\n{{"name": "'
    name = json.dumps(names[0], ensure_ascii=False)
    return f'{CALL}\n{{"name": {name}, "arguments": {{'


def chat_prompt(
    params: ChatRequest, context: int, max_new_tokens: int, tokenizer: Any
) -> tuple[list[int], int]:
    """The tokens of a conversation, up to where the assistant's next turn begins, and how many of its oldest
    messages were dropped, with `truncation` "auto", to leave room for an answer. Raises ApiError."""
    opening = call_opening(params.forced_tools)
    is_bound = opening or params.schema_of_answer is not None  # from its first token on
    thinks = False if is_bound else params.thinks
    options = {} if thinks is None else {"enable_thinking": thinks}
    tools = params.tools if params.tool_names else []
    for number, item in enumerate(params.messages, 1):
        check_parts(item, number)
    try:
        turns = [to_message(item, f"message {number}") for number, item in enumerate(params.messages, 1)]
    except Exception as error:  # a message may hold anything
        raise ApiError(reason(error), param="messages") from error
    conversation = list(dropwhile(lambda message: message["role"] == "system", turns))
    system = turns[: len(turns) - len(conversation)]

    def tokens_of(kept: list[dict]) -> list[int]:
        try:
            pieces = prompt_pieces(tokenizer, system + kept, tools, opening, **options)
        except Exception as error:
            raise ApiError(reason(error), param="messages") from error
        check_characters(sum(len(piece.text) for piece in pieces), context, "messages")
        return encode_pieces(tokenizer, pieces)

    room = context - min(params.max_tokens or max_new_tokens, max_new_tokens, context // 2)

    def fits(kept: list[dict]) -> bool:
        try:
            return len(tokens_of(kept)) <= room
        except ApiError:  # too many characters; what else is wrong is said below
            return False

    dropped = first_kept(conversation, fits) if params.truncation == "auto" else 0
    tokens = tokens_of(conversation[dropped:])
    check_length(tokens, context, "messages")
    return tokens, dropped


def check_parts(message: Any, number: int) -> None:
    """Raise ApiError if a message's content has parts that are none of OpenAI's chat."""
    content = message.get("content") if isinstance(message, dict) else None
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict | str):
            text = f'message {number} has the part {part!r:.100} instead of {{"type": "text", "text": ...}}'
            raise ApiError(text, param="messages")
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
            text = f"message {number} has a part of type '{part['type']}', of the Responses API; write 'text'"
            raise ApiError(text, param="messages")


def text_prompts(params: CompletionRequest, context: int, tokenizer: Any) -> Iterator[list[int]]:
    """The tokens of each prompt of a completion. Raises ApiError."""
    for text in params.prompt:
        tokens = document_tokens(tokenizer, text)
        check_length(tokens, context, "prompt")
        yield tokens


def check_length(tokens: list[int], context: int, param: str) -> None:
    """Raise ApiError if a prompt leaves no room for an answer."""
    if len(tokens) >= context:
        message = f"The prompt has {len(tokens)} tokens, and the context {context} with the answer."
        raise ApiError(message, param=param, code="context_length_exceeded")
