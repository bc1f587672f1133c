"""Answers that are valid JSON and follow a schema. At each token of an answer, llguidance says which tokens
may come next. It is an optional package, which is loaded at the first such request.

A client's schema runs through native code in the decoding thread, where nothing can interrupt it. So large
schemas are refused, and also keywords with regular expressions, whose automata take seconds and gigabytes.
LIMITS bound everything else. If llguidance gives up within an answer, the answer ends with an error.
"""

import importlib.util
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import reason
from model.sampling import Sampling
from scripts.serve.limits import MAX_SCHEMA_CHARACTERS, MAX_SCHEMA_DEPTH
from scripts.serve.protocol import ApiError

# like json.dumps and the chat templates; if whitespace is free, a weak model writes nothing else
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# the default limits allow seconds; these allow about 0.2 s a schema, 0.04 s a token, 8 MB an answer
LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_lexer_states": 5_000,
    "max_grammar_size": 5_000,
}
# no_forcing: otherwise a stretch with only one continuation is followed to its end at each token, which
# takes minutes if it has no end
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: %json '
REFUSED_KEYWORDS = ("pattern", "multipleOf", "patternProperties", "x-guidance")  # x-guidance: its options


def check_schema(schema: dict[str, Any]) -> None:
    """Refuse a schema that may take long to prepare, by its size and keywords. Raises ApiError."""
    if importlib.util.find_spec("llguidance") is None:
        raise schema_error("needs the package llguidance: pip install -r requirements-serve.txt")
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
        raise schema_error(f"has a schema of more than {MAX_SCHEMA_CHARACTERS} characters")
    check_part(schema, MAX_SCHEMA_DEPTH)


def check_part(part: Any, depth: int) -> None:
    """Check a part of a schema, which may have `depth` further levels. Every object is checked, because a
    reference may use it as a schema. A property with the name `pattern` is no keyword: its value is an
    object. Raises ApiError."""
    if not isinstance(part, dict | list):
        return
    if not depth:
        raise schema_error(f"has a schema that is more than {MAX_SCHEMA_DEPTH} deep")
    if isinstance(part, dict):
        for name in REFUSED_KEYWORDS:
            is_property = name in ("pattern", "multipleOf") and isinstance(part.get(name), dict)
            if name in part and not is_property:
                raise schema_error(f"has a schema with '{name}', which is not supported")
        combined = part.get("allOf")
        if isinstance(combined, list) and len(combined) > 1:
            raise schema_error("has a schema with several entries of 'allOf'; write them as one")
    for inner in part.values() if isinstance(part, dict) else part:
        check_part(inner, depth - 1)


def schema_error(what: str) -> ApiError:
    """The error for a request whose schema cannot be used."""
    return ApiError(f"response_format {what}.", param="response_format")


@lru_cache(maxsize=8)
def vocabulary(tokenizer: Any) -> Any:
    """A tokenizer's tokens in the form that llguidance takes."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=tokenizer.eos_token_id)


def matcher_of(tokenizer: Any, schema: dict[str, Any]) -> Any:
    """llguidance's matcher for a schema that `check_schema` accepted. Raises ApiError if the matcher cannot
    use it."""
    from llguidance import LLMatcher, LLParserLimits

    grammar = LLMatcher.grammar_from_lark(GRAMMAR + json.dumps(schema | {"x-guidance": STYLE}))
    limits = LLParserLimits(**LIMITS, verbose_errors=False)
    try:
        matcher = LLMatcher(vocabulary(tokenizer), grammar, limits=limits, log_level=0)
    except ValueError as error:  # of the tokenizer
        raise schema_error(f"cannot be used with this model: {reason(error)}") from error
    if matcher.is_error():
        raise schema_error(f"has a schema that cannot be followed: {error_message(matcher)}")
    return matcher


def error_message(matcher: Any) -> str:
    """Why a matcher gave up, without the text of our grammar."""
    first_line = matcher.get_error().partition("\n")[0]
    return first_line.rpartition("JSON schema: ")[2][:200]


class JsonTokens:
    """The tokens that may come next in one answer, for `Sampling.allowed`. matcher: that of this answer
    alone."""

    def __init__(self, matcher: Any):
        self.matcher = matcher
        self.consumed = 0  # tokens of the answer

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """The ids that may follow these tokens. After an error only the end token may follow."""
        self.matcher.consume_tokens(list(tokens[self.consumed :]))
        self.consumed = len(tokens)
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.flatnonzero(np.unpackbits(bits, bitorder="little")))


def failure(sampling: Sampling) -> ApiError | None:
    """The error of an answer that could not follow its schema to the end; None if there is none."""
    tokens = sampling.allowed
    if not isinstance(tokens, JsonTokens) or not tokens.matcher.is_error():
        return None
    return schema_error(
        f"has a schema that could not be followed to the end: {error_message(tokens.matcher)}"
    )
