"""The config of a model, made from its settings, its tokenizer and the weights that it starts from."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.settings import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

# all fields of ModelConfig but two; a field that you add belongs to the shape as well
SHAPE = [name for name in ModelConfig.model_fields if name not in ("dropout", "tokenizer_path")]


def model_config(
    tokenizer: "PreTrainedTokenizerBase",
    shape: ModelConfig,
    start_config: "MiniMindConfig | None" = None,
    **fields: Any,
) -> "MiniMindConfig":
    """The config of a model of this shape with this tokenizer's vocabulary and special tokens.

    start_config: the config of the weights that it starts from. fields: further fields that are not settings,
    such as `head_dim`. Raises UserError if the start weights were trained with another tokenizer."""
    from model.model_minimind import MiniMindConfig

    values: dict[str, Any] = {"vocab_size": len(tokenizer)} | fields
    if start_config is not None:
        check_tokenizer(tokenizer, shape.tokenizer_path, start_config)
        values |= start_config.own_fields()
    values |= tokenizer_fields(tokenizer)
    values |= {name: getattr(shape, name) for name in (*SHAPE, "dropout")} | shape.heads()
    return MiniMindConfig(**values)


def tokenizer_fields(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """The fields of a config that come from the tokenizer: its special tokens and its hash."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return special | {"tokenizer_sha256": vocabulary_hash(tokenizer)}


def vocabulary_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of a tokenizer's tokens and their ids; its template and its version have no effect."""
    tokens = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def check_tokenizer(
    tokenizer: "PreTrainedTokenizerBase", path: str | Path, lm_config: "MiniMindConfig", exactly: bool = False
) -> None:
    """Refuse a tokenizer (in the folder `path`) that is not the model's, if the model's config identifies its
    tokenizer, or that has more tokens than the vocabulary; `exactly`: or fewer."""
    tokens, vocabulary = len(tokenizer), lm_config.vocab_size
    advice = "take the tokenizer that the weights were trained with"
    if tokens > vocabulary or (exactly and tokens != vocabulary):
        raise UserError(
            f"--tokenizer_path {path}: the tokenizer has {tokens} tokens, the model's vocabulary "
            f"{vocabulary}; {advice}"
        )
    known = lm_config.tokenizer_sha256
    if known is not None and known != vocabulary_hash(tokenizer):
        raise UserError(
            f"--tokenizer_path {path}: the tokenizer has other tokens than the one of the weights, so "
            f"every text would be gibberish; {advice}"
        )


def describe_size(model: "MiniMindForCausalLM") -> str:
    """The number of parameters, as text for people."""
    params, config = sum(p.numel() for p in model.parameters()), model.config
    if not config.use_moe:
        return f"model: {params / 1e6:.2f} M parameters"
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = experts * (1 - config.num_experts_per_tok / config.num_experts)
    return f"model: {params / 1e6:.2f} M parameters (active per token: {(params - idle) / 1e6:.2f} M)"
