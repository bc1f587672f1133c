"""LoRA adapters: added to a model for training, written and read in PEFT's format, merged into the weights.

An adapter is a folder with `adapter_model.safetensors`, in float32, and `adapter_config.json`. PEFT loads it
onto the exported model. The exception is adapters inside experts, because stock Qwen3-MoE keeps all experts
in one tensor."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from common.errors import UserError, reason, warn
from common.files import atomic_write, is_file, is_folder, is_there, read_errors, write_json
from model.lora import LoRALinear
from trainer.devices.process_group import Logger, is_main_process
from trainer.devices.wrapping import full_tensor, is_sharded, unwrap
from trainer.weights.files import Description, description_of
from trainer.weights.paths import ADAPTER_CONFIG
from trainer.weights.tensor_file import DAMAGED, Writer

if TYPE_CHECKING:
    from model.model_minimind import MiniMindForCausalLM

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the tensor names in the file
# fields of the config that may differ between the model and the one that the adapter was trained on
NOT_COMPARED = {"dropout", "router_aux_loss_coef", "max_position_embeddings", "inference_rope_scaling"}
NOT_COMPARED |= {"rope_parameters", "vocab_size", "tie_word_embeddings", "tokenizer_sha256"}
NOT_COMPARED |= {"pad_token_id", "bos_token_id", "eos_token_id"}
# fields of PEFT's config -> the values for which LoRALinear computes the same
SUPPORTED_PEFT_VALUES: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "fan_in_fan_out": (False, None),
}


def add_adapters(
    model: "MiniMindForCausalLM", rank: int, alpha: float, dropout: float, targets: Sequence[str]
) -> None:
    """Freeze a model and add adapters to its layers of these names, in place, also inside experts. Raises
    UserError for a layer that cannot have an adapter."""
    cast(Any, model).base_sha256 = layers_hash(model)
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in targets:
            if hasattr(module, name):
                setattr(module, name, LoRALinear(getattr(module, name), rank, alpha / rank, dropout))
    adapted = [layer.base for layer in model.modules() if isinstance(layer, LoRALinear)]
    if others := sorted({type(layer).__name__ for layer in adapted if not can_merge(layer)}):
        warn(
            f"adapters cannot be merged into layers that are not plain nn.Linear ({', '.join(others)}): "
            "chat, evaluation and export will refuse this adapter"
        )
    config = {"r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "target_modules": list(targets)}
    cast(Any, model).adapter = config
    Logger(f"{sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6:.2f} M of them are trained")


def layers_hash(model: nn.Module) -> str:
    """SHA-256 of the layers of a model without its adapters, rounded to fp16. It is equal for a weights file,
    its copies and exports, and the checkpoint of the same update."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if name.startswith("model.layers."):  # head and embedding may be resized, and have no adapters
            digest.update(f"{name} {tuple(value.shape)} ".encode())
            digest.update(value.half().cpu().flatten().numpy())
    return digest.hexdigest()


def can_merge(layer: nn.Module) -> bool:
    """Whether a layer is a plain nn.Linear, not a subclass, so that the product of an adapter can be added to
    its weight."""
    return type(layer) is nn.Linear


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the adapters by name, without those of the frozen model."""
    state = unwrap(model).state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if ".lora_" in name}


def check_that_adapters_alone_are_trained(model: nn.Module) -> None:
    """Raise UserError if a trained parameter belongs to no adapter, or if an adapter is not a product of two
    matrices: `save_adapter` could not write what was trained."""
    for name, layer in unwrap(model).named_modules():
        if isinstance(layer, LoRALinear) and not (can_merge(layer.lora_A) and can_merge(layer.lora_B)):
            raise UserError(f"{name}: lora_A and lora_B must be plain nn.Linear layers, as their file says")
    for name, parameter in unwrap(model).named_parameters():
        if parameter.requires_grad and ".lora_" not in name:
            raise UserError(f"{name} is trained besides the adapters, whose file cannot hold it; freeze it")


def save_adapter(
    model: nn.Module, path: Path, writer: Writer, description: Description | None = None
) -> Path:
    """Write the adapters of a model as the folder `path` without its suffix, and their description beside it,
    on rank 0. A copy is written in the background. For a sharded model all ranks must call this (a
    collective). Returns the folder."""
    folder, inner = path.with_suffix(""), unwrap(model)
    if not (is_main_process() or is_sharded(model)):
        return folder
    tensors = {}
    for name, value in adapter_weights(model).items():
        tensors[PREFIX + name] = full_tensor(value.detach()).float().cpu().clone()
    full_description = description_of(model, description) | {"base_sha256": cast(Any, inner).base_sha256}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
    config |= {"base_model_name_or_path": None} | cast(dict[str, Any], inner.adapter)

    def job() -> None:
        atomic_write(folder / ADAPTER_CONFIG, lambda file: file.write(json.dumps(config, indent=2).encode()))
        atomic_write(folder / WEIGHTS, lambda file: file.write(save(tensors, {"format": "pt"})))
        write_json(path.with_suffix(".json"), full_description)

    if is_main_process():
        writer.submit(job)
    return folder


@torch.no_grad()
def merge_adapter(model: "MiniMindForCausalLM", folder: Path) -> "MiniMindForCausalLM":
    """Add scale B A of each layer to the weights of a model in float32, in place. The result is a model
    without adapters. Raises UserError as `read_adapter` does."""
    config, tensors = read_adapter(model, folder)
    scale = config["lora_alpha"] / config["r"]
    for name in {name.rsplit(".lora_", 1)[0] for name in tensors}:
        weight = model.get_parameter(f"{name}.weight")
        a = tensors[f"{name}.lora_A.weight"].to(weight)
        b = tensors[f"{name}.lora_B.weight"].to(weight)
        weight += scale * (b @ a)
    Logger(f"merged the adapter {folder}")
    return model


def read_adapter(model: "MiniMindForCausalLM", folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config of an adapter, and its tensors under the model's names. It also reads MiniMind's file of an
    adapter. Raises UserError if the folder is missing or damaged, or if the adapter is of another kind or
    belongs to another model, and ReadError if it cannot be read at the moment."""
    for file in (folder / ADAPTER_CONFIG, folder / WEIGHTS) if is_folder(folder) else (folder,):
        if not is_there(file):
            text = f"{file} does not exist; the folder of an adapter holds {WEIGHTS} and {ADAPTER_CONFIG}"
            raise UserError(f"adapter {folder}: {text}")
    try:
        with read_errors(folder):
            config, tensors = _read_folder(folder) if is_folder(folder) else _read_minimind(folder)
        config["lora_alpha"] / config["r"], list(config["target_modules"])
    except (SafetensorError, ZeroDivisionError, *DAMAGED) as error:
        raise UserError(f"adapter {folder}: it is not readable ({reason(error)})") from error
    for name, values in SUPPORTED_PEFT_VALUES.items():
        if name in config and config[name] not in values:
            raise UserError(f"adapter {folder}: {name} {config[name]!r} is not supported, only {values[0]!r}")
    if not set(config["target_modules"]) <= set(TARGETS):
        raise UserError(f"adapter {folder}: its targets must be of {', '.join(TARGETS)}")
    check_base(model, folder)
    expected_shapes = {}
    for name, layer in model.named_modules():
        if name.rsplit(".", 1)[-1] not in config["target_modules"]:
            continue
        if not can_merge(layer):
            what = f"{name}, which is not an nn.Linear but a {type(layer).__name__}"
            raise UserError(f"adapter {folder}: it cannot be merged into {what}")
        out, into = cast(Tensor, layer.weight).shape
        expected_shapes |= {
            f"{name}.lora_A.weight": (config["r"], into),
            f"{name}.lora_B.weight": (out, config["r"]),
        }
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if shapes != expected_shapes:
        names = shapes.keys() | expected_shapes.keys()
        name = min(name for name in names if shapes.get(name) != expected_shapes.get(name))
        found, expected = shapes.get(name, "missing"), expected_shapes.get(name, "none")
        raise UserError(
            f"adapter {folder} is of another model: {name} is {found}, the model wants {expected}"
        )
    return config, tensors


def check_base(model: "MiniMindForCausalLM", folder: Path) -> None:
    """Refuse an adapter if the description beside it says that it was trained on other weights, or on a model
    that computes something else. Without a description, print that its base is unknown."""
    description_path = folder.with_name(f"{folder.name}.json")
    try:
        with read_errors(description_path):
            description = (
                json.loads(description_path.read_text(encoding="utf-8")) if is_file(description_path) else {}
            )
        trained_on, wanted = description.get("model", {}), description.get("base_sha256")
        fields = trained_on.keys() - NOT_COMPARED
        start = description.get("from_weight", {}).get("name", "unknown")
    except (ValueError, AttributeError):  # another program's
        trained_on, fields, wanted, start = {}, set(), None, "unknown"
    own, others = model.config.own_fields(), []
    for name in sorted(fields):
        here = own.get(name, "unknown")
        if trained_on[name] != here:
            others.append(f"{name} {trained_on[name]!r}, which is {here!r} here")
    if others:
        raise UserError(f"adapter {folder} is of another model: it was trained with {', '.join(others)}")
    if wanted is None:
        Logger(f"adapter {folder}: no file beside it says which weights it was trained on")
    elif wanted != layers_hash(model):
        raise UserError(
            f"adapter {folder} was trained on other weights than these (on --from_weight {start}, whose "
            f"base_sha256 in {description_path} begins with {wanted[:12]}); give those, or train "
            "it anew on these"
        )


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return config, {name.removeprefix(PREFIX): value for name, value in load_file(folder / WEIGHTS).items()}


def _read_minimind(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file of MiniMind's `save_lora`: `<layer>.lora.A.weight` and `.lora.B.weight`, whose product is
    not scaled."""
    file = torch.load(path, map_location="cpu", weights_only=True)
    tensors = {}
    for key, value in file.items():
        name = key.removeprefix("module.").replace(".lora.", ".lora_")
        if not re.search(r"\.lora_[AB]\.weight$", name):
            raise UserError(f"adapter {path}: it holds {key}, which is not a tensor of an adapter")
        tensors[name] = value
    rank = max((len(value) for name, value in tensors.items() if ".lora_A." in name), default=0)
    targets = sorted({name.split(".")[-3] for name in tensors})
    return {"r": rank, "lora_alpha": rank, "target_modules": targets}, tensors
