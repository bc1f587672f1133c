"""What makes a run the training of a language model: its config, its loss on flat batches, and their size."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from model.model_minimind import MiniMindConfig, pad_rows
from trainer.components.flops import training_flops
from trainer.components.meter import Size

Batch = dict[str, Any]  # flat; see `collate_flat` in dataset/lm_dataset.py


def model_config(
    tokenizer: PreTrainedTokenizerBase,
    hidden_size: int,
    num_hidden_layers: int,
    use_moe: bool,
    dropout: float = 0.0,
    **shape: Any,
) -> MiniMindConfig:
    """The config of a model with this tokenizer's vocabulary and special tokens; `shape`: further fields."""
    shape |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    shape |= {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers, "use_moe": use_moe}
    return MiniMindConfig(**shape, dropout=dropout, vocab_size=len(tokenizer))


def next_token_loss(model: nn.Module, batch: Batch, args: Any = None) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropies of the batch's targets, and the MoE load-balancing loss summed over its tokens
    (zero for a dense model). `args`, the settings, are not used."""
    out = model(**_inputs(batch), targets=batch["targets"])
    return out.loss, out.aux_loss


def target_logits(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """For a loss of your own: the logits [M, V] that predict `batch["targets"]` [M], and the load-balancing loss."""
    out = model(**_inputs(batch))
    return out.logits, out.aux_loss


def _inputs(batch: Batch) -> dict[str, Any]:
    return {key: batch[key] for key in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen", "target_index")}


def held_out_loss(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What is evaluated on held-out data: the cross entropy, whatever the training loss is."""
    return {"loss": next_token_loss(model, batch)[0]}


def flat_size(batch: Batch, lm_config: MiniMindConfig) -> Size:
    """The size of a flat batch for a language model of this shape."""
    targets, tokens, samples = len(batch["targets"]), len(batch["input_ids"]), len(batch["cu_seqlens"]) - 1
    flops = training_flops(lm_config, tokens, targets, batch["cu_seqlens"])
    return Size(targets, tokens, batch["target_bytes"], flops, samples, pad_rows(batch["input_ids"]))
