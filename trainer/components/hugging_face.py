"""Hugging Face folders of a stock architecture, and of MiniMind's own: what MiniMindForCausalLM can represent is read.

Only `config.json`, safetensors (of MiniMind also `pytorch_model.bin`, as plain tensors) and the tokenizer's files are
read; code that a folder brings is never run.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import UserError, reason
from model.sampling import DEFAULTS, Sampling
from trainer.components.language_model import config_of_weights
from trainer.components.run_files import CONFIG_FILE, PICKLED_WEIGHTS, model_files
from trainer.components.state_files import UNREADABLE, read_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKENIZER_FILE, SAMPLING_FILE = "tokenizer.json", "generation_config.json"
TOLD = ("max_position_embeddings", "rms_norm_eps", "rope_parameters")  # fields that the tensors do not tell
TOLD_MOE = ("num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef")
IN_TENSORS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
ONLY = {  # field of a config -> the values of it that MiniMind's arithmetic has; a missing field is fine
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
    "n_shared_experts": (0, None),  # of MiniMind's earlier generations
}


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a folder under MiniMind's names, and the fields of its config that they do not tell.

    Raises:
        UserError: it is damaged, or of a model that MiniMindForCausalLM cannot represent; what that is is named.
    """
    config = read_config(folder)
    weights = _read_weights(folder)
    embedding = weights.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and embedding is not None:
        weights["lm_head.weight"] = embedding
    told = {name: getattr(config, name) for name in TOLD}
    if "model.layers.0.mlp.gate.weight" in weights:
        told |= {name: getattr(config, name) for name in TOLD_MOE}
    try:
        found = config_of_weights(weights, **told)
    except (ValueError, UserError) as error:
        raise UserError(f"{folder}: {reason(error)}") from error
    for name in IN_TENSORS:
        said, is_so = getattr(config, name, None), getattr(found, name)
        if said is not None and said != is_so:
            raise UserError(f"{folder}: {CONFIG_FILE} says {name} {said}, the tensors {is_so}; it is not a whole model")
    return weights, told


def read_sampling(folder: Path) -> Sampling:
    """The sampling defaults in a folder's generation_config.json; what it leaves out is as in DEFAULTS.

    Raises:
        UserError: it is damaged, or a value is out of range.
    """
    path = folder / SAMPLING_FILE
    if not path.is_file():
        return DEFAULTS
    try:
        given = {
            name: value for name, value in json.loads(path.read_text(encoding="utf-8")).items() if value is not None
        }
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a readable generation config ({reason(error)})") from error
    wrong = {
        name: given[name]
        for name, is_valid in {
            "temperature": lambda value: 0 <= value <= 2,
            "top_k": lambda value: value >= 0 and value == int(value),
            "top_p": lambda value: 0 < value <= 1,
        }.items()
        if name in given and not (type(given[name]) in (int, float) and is_valid(given[name]))
    }
    if wrong:
        values = ", ".join(f"{name} {value!r}" for name, value in wrong.items())
        raise UserError(f"{path}: {values} cannot be sampled with; correct the file or remove the line")
    temperature = 0.0 if given.get("do_sample") is False else given.get("temperature", DEFAULTS.temperature)
    top_k, top_p = given.get("top_k", DEFAULTS.top_k), given.get("top_p", DEFAULTS.top_p)
    return Sampling(float(temperature), int(top_k), float(top_p))


def read_config(folder: Path) -> "PretrainedConfig":
    """The config of a folder: Qwen3Config, Qwen3MoeConfig or MiniMindConfig.

    Raises:
        UserError: it is of another architecture, or has what MiniMindForCausalLM lacks.
    """
    from transformers import Qwen3Config, Qwen3MoeConfig

    from model.model_minimind import MiniMindConfig

    kinds = {kind.model_type: kind for kind in (Qwen3Config, Qwen3MoeConfig, MiniMindConfig)}
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model_type = content.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a readable config ({reason(error)})") from error
    if model_type not in kinds:
        raise UserError(f"{path}: model_type {model_type} is not supported; it must be one of {', '.join(kinds)}")
    for name, values in ONLY.items():
        if name in content and content[name] not in values:
            raise UserError(f"{path}: {name} {content[name]!r} is not supported; it must be {values[0]!r}")
    if other := set(content.get("layer_types") or ()) - {"full_attention"}:
        raise UserError(f"{path}: layers of {', '.join(sorted(other))} are not supported, only of full_attention")
    content.pop("auto_map", None)  # the folder's own code
    if content.get("rope_scaling", ...) is None:
        del content["rope_scaling"]  # transformers warns of this name
    try:
        return kinds[model_type].from_dict(content)
    except Exception as error:  # transformers raises errors of any type for wrong values
        raise UserError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = model_files(folder)
    try:
        if files[-1].name == PICKLED_WEIGHTS:
            return read_file(files[-1])
        shards = [path for path in files if path.suffix == ".safetensors"]
        return {key: value for path in shards for key, value in load_file(path).items()}
    except (SafetensorError, *UNREADABLE) as error:
        raise UserError(f"{folder}: its weights are not readable ({reason(error)})") from error
