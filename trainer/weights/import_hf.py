"""Models from elsewhere: Hugging Face folders (stock Qwen3, Qwen3-MoE, MiniMind's own) and MiniMind's .pth
files, whose config is inferred from the names and shapes of their tensors and from the file's name.

In a folder, only `config.json`, the weights and the tokenizer's files are read; code in it is never run."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from common.contents import check_content
from common.errors import ReadError, UserError, reason
from common.files import is_file, read_errors
from model.sampling import DEFAULTS, Sampling
from trainer.weights.paths import CONFIG_FILE, PICKLED_WEIGHTS, model_files, shape_in_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from model.model_minimind import MiniMindConfig

SAMPLING_FILE = "generation_config.json"
# field of a config -> the values that MiniMind's arithmetic supports; a missing field is fine
SUPPORTED_VALUES = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
    "n_shared_experts": (0, None),  # names in MiniMind's earlier generations
}


def read_folder(folder: Path) -> "tuple[dict[str, Tensor], MiniMindConfig]":
    """The tensors of a folder under MiniMind's names, and its config. Raises UserError if it is damaged, or
    if MiniMindForCausalLM cannot represent the model; the error says why."""
    from model.model_minimind import MiniMindConfig

    config = read_config(folder)
    weights = _read_weights(folder)
    embedding = weights.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and embedding is not None:
        weights["lm_head.weight"] = embedding
    fields: dict[str, Any] = {"use_moe": config.model_type == "qwen3_moe"}
    for name in MiniMindConfig.__annotations__:
        if hasattr(config, name):
            fields[name] = getattr(config, name)
    try:
        return weights, MiniMindConfig(**fields)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def imported_config(
    path: Path, weights: dict[str, Tensor], experts_per_token: int | None = None
) -> "MiniMindConfig":
    """The config of weights from elsewhere, from their tensors and from the name of their file.

    experts_per_token: experts per token of a mixture of experts, if the name does not say it. Raises
    UserError if the weights are not from such a model or contradict the name, or if nothing says how many
    experts each token uses."""
    from model.model_minimind import MiniMindConfig

    try:
        fields = shape_of_tensors(weights)
    except ValueError as error:
        raise UserError(f"weights {path}: {reason(error)}") from error
    if fields["use_moe"]:
        fields["num_experts_per_tok"] = _experts_per_token(path, fields, experts_per_token)
    return MiniMindConfig(**fields)


def shape_of_tensors(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of a config that can be inferred from a state dict with MiniMind's and Qwen3's names. Raises
    ValueError if it is not the state dict of such a model."""
    try:
        layers = {int(key.split(".")[2]) for key in weights if key.startswith("model.layers.")}
        attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
        vocab_size, hidden_size = weights["model.embed_tokens.weight"].shape
        (head_dim,) = weights[f"{attention}.q_norm.weight"].shape
        heads = len(weights[f"{attention}.q_proj.weight"]) // head_dim
        kv_heads = len(weights[f"{attention}.k_proj.weight"]) // head_dim
        use_moe = f"{mlp}.gate.weight" in weights
        gate = f"{mlp}.experts.0.gate_proj" if use_moe else f"{mlp}.gate_proj"
        width = len(weights[f"{gate}.weight"])
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not a state dict of MiniMind's or Qwen3's names: {error}") from error
    embedding = weights["model.embed_tokens.weight"]
    shape = {
        "hidden_size": hidden_size,
        "num_hidden_layers": len(layers),
        "use_moe": use_moe,
        "vocab_size": vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": torch.equal(weights.get("lm_head.weight", embedding), embedding),
    }
    if not use_moe:
        return shape | {"intermediate_size": width}
    return shape | {"num_experts": len(weights[f"{mlp}.gate.weight"]), "moe_intermediate_size": width}


def _experts_per_token(path: Path, fields: dict[str, Any], experts_per_token: int | None) -> int:
    num_experts, named = fields["num_experts"], shape_in_name(path)
    if named and named["num_experts"] == num_experts:
        return named["num_experts_per_tok"]
    are = f"weights {path} have {num_experts} experts per layer"
    if named and named["use_moe"] and not path.stem.endswith("_moe"):
        raise UserError(f"{are}, but their name says others; rename them")
    if experts_per_token is None:
        name = f"NAME_{fields['hidden_size']}_moe_{num_experts}xN.pth"
        raise UserError(
            f"{are}, and nothing says how many of them each token uses: name the file {name} with that "
            "number as N, or give --num_experts_per_tok (stages and tools of trained models have it)"
        )
    return experts_per_token


def flags_of(shape: dict[str, Any]) -> str:
    """Settings of a shape as flags."""
    return " ".join(f"--{name} {int(value)}" for name, value in shape.items())


class StoredSampling(BaseModel):
    """The fields that are read from a generation_config.json."""

    do_sample: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)


def read_sampling(folder: Path) -> Sampling:
    """The sampling defaults in a folder's generation_config.json; fields that it leaves out have the values
    of DEFAULTS. Raises UserError if it is damaged, or a value is out of range."""
    path = folder / SAMPLING_FILE
    if not is_file(path):
        return DEFAULTS
    try:
        given = StoredSampling.model_validate_json(path.read_bytes()).model_dump(exclude_none=True)
    except ValidationError as error:
        wrong = []
        for each in error.errors():
            wrong.append(": ".join([*map(str, each["loc"]), each["msg"]]))  # no name, if the file is damaged
        message = "; ".join(wrong)
        raise UserError(f"{path}: {message}; correct the file or remove the line") from error
    if not given.pop("do_sample", True):
        given["temperature"] = 0.0
    return replace(DEFAULTS, **given)


def read_config(folder: Path) -> "PretrainedConfig":
    """The config of a folder: Qwen3Config, Qwen3MoeConfig or MiniMindConfig. Raises UserError if it has
    another architecture, or something that MiniMindForCausalLM does not support, and ReadError if it cannot
    be read at the moment."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    from model.model_minimind import MiniMindConfig

    kinds = {kind.model_type: kind for kind in (Qwen3Config, Qwen3MoeConfig, MiniMindConfig)}
    path = folder / CONFIG_FILE
    try:
        with read_errors(path):
            content = json.loads(path.read_text(encoding="utf-8"))
        model_type = content.get("model_type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a readable config ({reason(error)})") from error
    if model_type not in kinds:
        known = ", ".join(kinds)
        raise UserError(f"{path}: model_type {model_type} is not supported; it must be one of {known}")
    for name, values in SUPPORTED_VALUES.items():
        if name in content and content[name] not in values:
            raise UserError(f"{path}: {name} {content[name]!r} is not supported; it must be {values[0]!r}")
    if other := set(content.get("layer_types") or ()) - {"full_attention"}:
        kinds_of_layers = ", ".join(sorted(other))
        raise UserError(f"{path}: layers of {kinds_of_layers} are not supported, only of full_attention")
    content.pop("auto_map", None)  # the folder's own code
    if content.get("rope_scaling", ...) is None:
        del content["rope_scaling"]  # transformers warns of this name
    try:
        return kinds[model_type].from_dict(content)
    except Exception as error:  # transformers raises errors of any type for wrong values
        raise UserError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = model_files(folder)
    for path in files:
        check_content(path)
    try:
        with read_errors(folder):
            if files[-1].name == PICKLED_WEIGHTS:
                return torch.load(files[-1], map_location="cpu", weights_only=True)
            weights = {}
            for path in files:
                if path.suffix == ".safetensors":
                    weights |= load_file(path)
            return weights
    except ReadError:
        raise
    except Exception as error:  # errors of many types, depending on the damage
        raise UserError(f"{folder}: its weights are not readable ({reason(error)})") from error
