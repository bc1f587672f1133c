"""Answers that are valid JSON, by a schema: llguidance tells at each token of an answer which ones may come
next. It is an optional package, loaded with the first such request.

A schema of strangers runs through native code in the decoding thread, where nothing can interrupt it. It is
refused by size, and for keywords with regular expressions, whose automata take seconds and gigabytes; LIMITS
bound the rest, and an answer at which llguidance gives up ends with an error.
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

# as json.dumps and the chat templates write; with free whitespace a weak model writes nothing else
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# the default limits allow seconds; these some 0.2 s for a schema, 0.04 s for a token, and 8 MB for an answer
LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_lexer_states": 5_000,
    "max_grammar_size": 5_000,
}
# without forcing: what can come next in one way alone is otherwise sought to its end at each token, for
# minutes if it has none
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: %json '
REFUSED_KEYWORDS = ("pattern", "multipleOf", "patternProperties", "x-guidance")  # x-guidance: its options


def check_schema(schema: dict[str, Any]) -> None:
    """Refuse by its size and its words what may take long to prepare. Raises ApiError."""
    if importlib.util.find_spec("llguidance") is None:
        raise schema_error("needs llguidance beside the server: pip install -r requirements-serve.txt")
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
        raise schema_error(f"has a schema of more than {MAX_SCHEMA_CHARACTERS} characters")
    check_part(schema, MAX_SCHEMA_DEPTH)


def check_part(part: Any, depth: int) -> None:
    """Refuse a part of a schema, which may be `depth` deep. Wherever an object stands, a reference may make
    it a schema. A property that is named `pattern` is no keyword: its value is an object. Raises ApiError."""
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
    """The error of a request whose answers cannot be constrained."""
    return ApiError(f"response_format {what}.", param="response_format")


@lru_cache(maxsize=8)
def vocabulary(tokenizer: Any) -> Any:
    """A tokenizer's tokens in llguidance's form."""
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=tokenizer.eos_token_id)


def matcher_of(tokenizer: Any, schema: dict[str, Any]) -> Any:
    """llguidance's matcher of a schema that `check_schema` accepts. Raises ApiError if it cannot be
    followed."""
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
    """Why a matcher gave up, without our grammar."""
    first_line = matcher.get_error().partition("\n")[0]
    return first_line.rpartition("JSON schema: ")[2][:200]


class JsonTokens:
    """The tokens that may come next in one answer, for `Sampling.allowed`. matcher: this answer's own."""

    def __init__(self, matcher: Any):
        self.matcher = matcher
        self.consumed = 0  # tokens of the answer

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """The ids that may follow these tokens. After an error the end token alone."""
        self.matcher.consume_tokens(list(tokens[self.consumed :]))
        self.consumed = len(tokens)
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.flatnonzero(np.unpackbits(bits, bitorder="little")))


def failure(sampling: Sampling) -> ApiError | None:
    """The error of an answer that could not be kept to its schema to the end."""
    tokens = sampling.allowed
    if not isinstance(tokens, JsonTokens) or not tokens.matcher.is_error():
        return None
    return schema_error(
        f"has a schema that could not be followed to the end: {error_message(tokens.matcher)}"
    )
