"""A model as a Hugging Face folder of a stock architecture, Qwen3 or Qwen3-MoE. It can be used without this
repository."""

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3MoeConfig,
)

from common.errors import UserError
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.sampling import default_sampling
from trainer.weights.files import write_tokenizer
from trainer.weights.paths import CONFIG_FILE, WEIGHTS_FILE

# Fields that a stock config does not need: the kind of model, settings of training, the model's origin.
NOT_EXPORTED = ("use_moe", "dropout", "tokenizer_sha256", "inference_rope_scaling")


def stock_config(config: MiniMindConfig) -> PretrainedConfig:
    """The config of the stock model that computes the same as this one. Raises UserError if a field has a
    value that stock Qwen3 lacks."""
    kind, architecture = Qwen3Config, "Qwen3ForCausalLM"
    if config.use_moe:
        kind, architecture = Qwen3MoeConfig, "Qwen3MoeForCausalLM"
    fields = config.own_fields()
    exported = [name for name in fields if name not in NOT_EXPORTED]
    common = {name: fields[name] for name in exported if name in kind.__annotations__}
    stock = kind(**common, architectures=[architecture])
    exported_values = {name: getattr(stock, name) for name in common}
    as_default = MiniMindConfig(**exported_values).own_fields()
    lost = []
    for name in exported:
        is_off = not as_default[name] and not fields[name]  # 0, False, None
        if as_default[name] != fields[name] and not is_off:
            lost.append(f"{name} {fields[name]!r}")
    if lost:
        raise UserError(
            f"stock Qwen3 has no {', '.join(lost)}; the model can only be used with this repository"
        )
    return stock


def own_tensors(model: MiniMindForCausalLM) -> dict[str, Tensor]:
    """The tensors of a model by name, on the CPU. If embedding and head are tied, only the embedding is
    included."""
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def write_folder(folder: Path, model: MiniMindForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the folder with float16 weights."""
    folder.mkdir()
    tensors = {name: tensor.half().contiguous() for name, tensor in own_tensors(model).items()}
    (folder / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    config = stock_config(cast(MiniMindConfig, model.config))
    config.dtype = torch.float16
    config.save_pretrained(folder)
    _add_earlier_names(folder / CONFIG_FILE, config)
    special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    own = default_sampling(model)
    sampling: dict[str, Any] = {"do_sample": False}
    if own.temperature:
        sampling = {"do_sample": True, "temperature": own.temperature, "top_p": own.top_p, "top_k": own.top_k}
    if own.repetition_penalty != 1:
        sampling["repetition_penalty"] = own.repetition_penalty
    GenerationConfig(**sampling, **special).save_pretrained(folder)
    write_tokenizer(folder, tokenizer)


def _add_earlier_names(path: Path, config: PretrainedConfig) -> None:
    """Add the names that renamed settings had before transformers 5, because vLLM and others read these."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(config.rope_parameters or {})
    content["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type") != "default":
        content["rope_scaling"] = rope
    if "num_local_experts" in content:
        content["num_experts"] = content["num_local_experts"]
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_stock(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 and the tokenizer, loaded with transformers like any other model."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval(), cast(Any, AutoTokenizer.from_pretrained(folder, **options))
