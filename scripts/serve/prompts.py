"""From a request to the tokens of its prompts. In a conversation, only the chat template writes special
tokens (model/prompts.py). The prompt of a plain completion is used unchanged."""

import json
from collections.abc import Iterator
from itertools import dropwhile
from typing import Any

from common.errors import reason
from dataset.messages import to_message
from model.answers import CALL
from model.prompts import document_tokens, encode_pieces, prompt_pieces
from scripts.conversation import first_kept
from scripts.serve.fields import PREFILLS
from scripts.serve.protocol import ApiError, ChatRequest, CompletionRequest, check_length, least_length


def call_opening(names: list[str]) -> str:
    """How an answer begins that has to call one of these tools, in the form that the chat templates use. If
    there is only one tool, it goes up to the arguments. Empty if there are no tools."""
    if not names:
        return ""
    if len(names) > 1:
        return f'{CALL}\n{{"name": "'
    name = json.dumps(names[0], ensure_ascii=False)
    return f'{CALL}\n{{"name": {name}, "arguments": {{'


def chat_prompt(
    params: ChatRequest, context: int, max_new_tokens: int, tokenizer: Any
) -> tuple[list[int], int]:
    """The tokens of a conversation, up to where the assistant's next turn begins, and how many of the oldest
    messages were dropped. Messages are dropped only with `truncation` "auto", to leave room for an answer.
    Raises ApiError."""
    opening = call_opening(params.forced_tools)
    is_bound = opening or params.schema_of_answer is not None  # from the answer's first token on
    thinks = False if is_bound else params.thinks
    options = {} if thinks is None else {"enable_thinking": thinks}
    tools = params.tools if params.tool_names else []
    turns = messages_of(params)
    lengths = [least_length_of(turn, context) for turn in turns]
    conversation = list(dropwhile(lambda message: message["role"] == "system", turns))
    system = turns[: len(turns) - len(conversation)]
    always = sum(lengths[: len(system)]) + least_length(tools, context)

    def tokens_of(kept: list[dict]) -> list[int]:
        length = sum(lengths[len(turns) - len(kept) :], start=always)
        check_length(length, context, "messages")
        try:
            pieces = prompt_pieces(tokenizer, system + kept, tools, opening, **options)
        except Exception as error:
            raise ApiError(reason(error), param="messages") from error
        check_length(sum(len(piece.text) for piece in pieces), context, "messages")
        return encode_pieces(tokenizer, pieces)

    room = context - min(params.max_tokens or max_new_tokens, max_new_tokens, context // 2)

    # number of messages kept -> their tokens, or an error, such as too many characters
    tried: dict[int, list[int] | ApiError] = {}

    def tokens_or_error(kept: list[dict]) -> list[int] | ApiError:
        if len(kept) not in tried:
            try:
                tried[len(kept)] = tokens_of(kept)
            except ApiError as error:
                tried[len(kept)] = error
        return tried[len(kept)]

    def fits(kept: list[dict]) -> bool:
        found = tokens_or_error(kept)
        return isinstance(found, list) and len(found) <= room

    dropped = first_kept(conversation, fits) if params.truncation == "auto" else 0
    tokens = tokens_or_error(conversation[dropped:])
    if isinstance(tokens, ApiError):
        raise tokens
    check_tokens(tokens, context, "messages")
    return tokens, dropped


def messages_of(params: ChatRequest) -> list[dict[str, Any]]:
    """The messages in the form that chat templates take. Raises ApiError."""
    try:
        for number, item in enumerate(params.messages, 1):
            check_message(item, number)
        return [to_message(item, f"message {number}") for number, item in enumerate(params.messages, 1)]
    except ApiError:
        raise
    except Exception as error:  # a message may contain anything
        raise ApiError(reason(error), param="messages") from error


def least_length_of(turn: dict[str, Any], context: int) -> int:
    """The least number of characters that a message has in a prompt. A template may leave out an assistant's
    reasoning of earlier turns, in whichever field it is, but not its calls."""
    return least_length(turn.get("tool_calls", []) if turn["role"] == "assistant" else turn, context)


def check_message(message: Any, number: int) -> None:
    """Raise ApiError if a message is the beginning of an answer, or if its content has parts that OpenAI's
    chat API does not have."""
    for name in PREFILLS:
        if isinstance(message, dict) and message.get(name):
            text = f"message {number} has '{name}': continuing a message is not supported; leave it out"
            raise ApiError(text, param="messages")
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
        check_tokens(tokens, context, "prompt")
        yield tokens


def check_tokens(tokens: list[int], context: int, param: str) -> None:
    """Raise ApiError if a prompt leaves no room for an answer."""
    if len(tokens) >= context:
        message = f"The prompt has {len(tokens)} tokens; prompt and answer together may have {context}."
        raise ApiError(message, param=param, code="context_length_exceeded")
