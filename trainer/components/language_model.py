"""What makes a run the training of a language model: its config, its loss on flat batches, and their size."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.settings import ModelConfig
from model.flat_batch import cross_entropy, pad_rows
from trainer.components.flops import training_flops
from trainer.components.meter import Size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

SHAPE = ("hidden_size", "num_hidden_layers", "use_moe", "num_experts", "num_experts_per_tok")  # settings of a shape
Batch = dict[str, Any]  # flat; see `collate_flat` in dataset/lm_dataset.py


def model_config(tokenizer: "PreTrainedTokenizerBase", shape: ModelConfig, **fields: Any) -> "MiniMindConfig":
    """The config of a model of this shape (a stage's settings, or the engine's `config.model`), with this tokenizer's
    vocabulary and special tokens; `fields`: further ones of the config."""
    from model.model_minimind import MiniMindConfig

    told: dict[str, Any] = {"vocab_size": len(tokenizer)} | fields | special_tokens(tokenizer)
    told |= {name: getattr(shape, name) for name in (*SHAPE, "dropout")}
    return MiniMindConfig(**told)


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """The fields of a config that name special tokens."""
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}


def config_of_weights(weights: Mapping[str, Tensor], **fields: Any) -> "MiniMindConfig":
    """The config of the model whose state dict this is, under MiniMind's and Qwen3's names.

    fields: what its tensors do not tell: `num_experts_per_tok` of a mixture of experts, the special tokens.

    Raises:
        ValueError: it is not the state dict of such a model.
    """
    from model.model_minimind import MiniMindConfig

    try:
        layers = {int(key.split(".")[2]) for key in weights if key.startswith("model.layers.")}
        attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
        vocab_size, hidden_size = weights["model.embed_tokens.weight"].shape
        (head_dim,) = weights[f"{attention}.q_norm.weight"].shape
        heads, kv_heads = (len(weights[f"{attention}.{name}_proj.weight"]) // head_dim for name in ("q", "k"))
        use_moe = f"{mlp}.gate.weight" in weights
        width = len(weights[f"{mlp}.experts.0.gate_proj.weight" if use_moe else f"{mlp}.gate_proj.weight"])
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a state dict of MiniMind's or Qwen3's names: {error}") from error
    embedding = weights["model.embed_tokens.weight"]
    if use_moe:
        fields |= {"num_experts": len(weights[f"{mlp}.gate.weight"]), "moe_intermediate_size": width}
    return MiniMindConfig(
        hidden_size=hidden_size,
        num_hidden_layers=len(layers),
        use_moe=use_moe,
        vocab_size=vocab_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=0 if use_moe else width,
        tie_word_embeddings=torch.equal(weights.get("lm_head.weight", embedding), embedding),
        **fields,
    )


def check_vocabulary(
    tokenizer: "PreTrainedTokenizerBase", path: str | Path, lm_config: "MiniMindConfig", exactly: bool = False
) -> None:
    """Refuse a tokenizer (in the folder `path`) that does not fit the model's vocabulary; `exactly`: nor may it be
    smaller."""
    tokens, vocabulary = len(tokenizer), lm_config.vocab_size
    if tokens > vocabulary or (exactly and tokens != vocabulary):
        raise UserError(
            f"--tokenizer_path {path}: the tokenizer has {tokens} tokens, the model's vocabulary {vocabulary}; take "
            "the tokenizer that the weights were trained with"
        )


def describe_size(model: "MiniMindForCausalLM") -> str:
    """The number of parameters, as text for people."""
    params, config = sum(p.numel() for p in model.parameters()), model.config
    if not config.use_moe:
        return f"model: {params / 1e6:.2f} M parameters"
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = experts * (1 - config.num_experts_per_tok / config.num_experts)
    return f"model: {params / 1e6:.2f} M parameters (active per token: {(params - idle) / 1e6:.2f} M)"


def next_token_loss(model: nn.Module, batch: Batch, args: Any = None) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropies of the batch's targets, and the MoE load-balancing loss summed over its tokens
    (zero for a dense model). `args`, the settings, are not used."""
    out = model(**_inputs(batch), targets=batch["targets"])
    return out.loss, out.aux_loss


def target_log_probs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The log-probability of each target [M] under softmax(logits / temperature), and the load-balancing loss."""
    if temperature != 1.0:
        logits, aux_loss = target_logits(model, batch)
        return -cross_entropy(logits / temperature, batch["targets"], "none"), aux_loss
    out = model(**_inputs(batch), targets=batch["targets"], reduction="none")
    return -out.loss, out.aux_loss


def target_logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """For a loss of your own: the logits [M, V] that predict `batch["targets"]` [M], and the load-balancing loss."""
    out = model(**_inputs(batch))
    return out.logits, out.aux_loss


def frozen_model(model: "MiniMindForCausalLM", device: torch.device) -> "MiniMindForCausalLM":
    """A model that takes part in training but is not trained (a teacher, a reference): no gradients, no dropout."""
    cast(nn.Module, model).to(device)  # in place
    return model.requires_grad_(False).eval()


@torch.no_grad()
def target_states(model: "MiniMindForCausalLM", batch: Batch) -> Tensor:
    """The hidden states [M, C] of a frozen model at the batch's targets. Its `lm_head` makes logits of them piece by
    piece: all of them at once, [M, V], may be more than the memory holds."""
    return model(**_inputs(batch), head=False).hidden_states


def _inputs(batch: Batch) -> dict[str, Any]:
    inputs = {key: batch[key] for key in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen", "target_index")}
    return inputs | {"host_cu_seqlens": batch.get("host_cu_seqlens")}


def held_out_loss(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What is evaluated on held-out data: the cross entropy, whatever the training loss is."""
    return {"loss": next_token_loss(model, batch)[0]}


def flat_size(batch: Batch, lm_config: "MiniMindConfig") -> Size:
    """The size of a flat batch for a language model of this shape."""
    targets, tokens, samples = len(batch["targets"]), len(batch["input_ids"]), len(batch["cu_seqlens"]) - 1
    flops = training_flops(lm_config, tokens, targets, batch["cu_seqlens"])
    return Size(targets, tokens, batch["target_bytes"], flops, samples, pad_rows(batch["input_ids"]))
