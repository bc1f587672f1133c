"""A model on the disk: its tensors, and its config, which travels with them.

A weights file of `out/` holds only what belongs to the model: tensors, config and a hash of its tokenizer. So
the same training gives the same bytes. Config and hash are in the zip comment, which `torch.load` ignores, so
a kill cannot separate them from the tensors. A checkpoint has such a comment, too. `<name>.json` beside the
weights says where they come from. For a file from elsewhere (MiniMind's .pth), the config is inferred from
the tensors and the file's name. Nothing in a file is executed."""

import hashlib
import json
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from common.contents import check_content
from common.errors import UserError, reason
from common.files import (
    atomic_write,
    files_in,
    is_file,
    is_folder,
    is_there,
    locked,
    new_path,
    read_errors,
    write_json,
)
from common.settings import ROOT
from dataset.token_cache import file_hash, load_tokenizer
from trainer.devices.process_group import Logger, is_main_process
from trainer.devices.wrapping import full_tensor, is_sharded, unwrap
from trainer.weights.import_hf import flags_of, imported_config, read_folder
from trainer.weights.paths import (
    ADAPTER_CONFIG,
    CONFIG_FILE,
    NAMED_SHAPE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    is_hugging_face,
    model_files,
    weight_files,
)
from trainer.weights.tensor_file import DAMAGED, Writer, comment_of, read_file, write_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

# {"model": the config's fields, "tokenizer": its hash, and where the weights come from}
Description = dict[str, Any]
CHECKPOINT_KEYS = {"model", "optimizer", "epoch", "step", "world_size"}  # what a file to resume from holds
# Fields of the config that may differ for the same weights: they belong to training or to the tokenizer, or
# are changed for longer texts.
MAY_DIFFER = ["dropout", "router_aux_loss_coef", "tokenizer_sha256", "pad_token_id", "bos_token_id"]
MAY_DIFFER += ["eos_token_id", "rope_parameters", "inference_rope_scaling", "max_position_embeddings"]
# Fields that only one kind of model has.
DENSE_FIELDS = ["intermediate_size"]
EXPERT_FIELDS = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"]


# --- writing


def half_weights(model: nn.Module, keep: bool = True) -> dict[str, Any]:
    """The inference weights under MiniMind's names, in fp16, on the CPU; tied tensors stay one tensor. If the
    model is sharded, all ranks must call this (a collective); ranks with keep=False get None for each
    tensor."""
    copies: dict[int, Tensor | None] = {}
    half = {}
    for key, value in unwrap(model).state_dict(keep_vars=True).items():
        if id(value) not in copies:
            whole = full_tensor(value.detach().half())
            copies[id(value)] = whole.to("cpu", copy=True) if keep else None
            del whole  # before the next one is gathered
        half[key] = copies[id(value)]
    return half


def save_weights(
    model: nn.Module, path: Path, writer: Writer | None = None, description: Description | None = None
) -> Path:
    """Write the fp16 inference weights with their description, on rank 0. With a writer, a copy is written in
    the background. description: its further fields, such as the stage. Returns the path."""
    if not (is_main_process() or is_sharded(model)):
        return path
    state = half_weights(model, is_main_process())
    full_description = description_of(model, description)
    if not is_main_process():
        return path

    def write() -> None:
        of_model = (
            {key: full_description.get(key) for key in ("model", "tokenizer")} if full_description else None
        )
        atomic_write(path, lambda file: write_file(state, file, of_model))
        if full_description:
            write_json(path.with_suffix(".json"), full_description)

    if writer is None:
        write()
    else:
        writer.submit(write)
    return path


def description_of(model: nn.Module, more: Description | None = None) -> Description:
    """The description of a model's weights. It is empty if the config is not MiniMind's (a model of a user's
    own task)."""
    from model.model_minimind import MiniMindConfig

    config = getattr(unwrap(model), "config", None)
    if not isinstance(config, MiniMindConfig):
        return {}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"model": config.own_fields()} | (more or {}) | {"versions": versions}


def keep_tokenizer(source: str | Path, folder: str | Path, fingerprint: str) -> None:
    """Copy the tokenizer in `source` into `folder` as `tokenizer_<fingerprint>`, on rank 0. The description
    of the weights in `folder` has this `fingerprint`, so `tokenizer_folder` finds the copy. The tokenizer of
    this repository needs no copy."""
    copy = Path(folder) / f"tokenizer_{fingerprint}"
    if not is_main_process() or is_there(copy):
        return
    with locked(copy.parent / ".tokenizer.lock", "waiting for another run that copies its tokenizer"):
        if not is_there(copy):
            with new_path(copy) as place:
                place.mkdir()
                write_tokenizer(place, load_tokenizer(source))


def write_tokenizer(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write a tokenizer into a folder."""
    source = Path(tokenizer.name_or_path)
    if not is_file(source / TOKENIZER_FILE):
        tokenizer.save_pretrained(folder)
        return
    for name in TOKENIZER_FILES:  # copied unchanged: every version of transformers reads them
        if is_file(source / name):
            shutil.copyfile(source / name, folder / name)


# --- reading


def tokenizer_folder(path: Path) -> Path:
    """The folder of the tokenizer that belongs to a model: the copy that its description names
    (`keep_tokenizer`), or the tokenizer beside its weights, or that of this repository."""
    folder = path if is_folder(path) else path.parent
    fingerprint = read_description(path).get("tokenizer")
    if fingerprint:
        for place in (folder, folder.parent):  # the parent, for files that were set aside in `earlier_<n>`
            copy = place / f"tokenizer_{fingerprint}"
            if is_folder(copy):
                return copy
    if is_hugging_face(path) or is_file(folder / TOKENIZER_FILE):
        return folder
    return ROOT / "model"


def read_description(path: Path) -> Description:
    """The description of the model in a weights file or a checkpoint; empty for a model from elsewhere.
    Raises UserError if the file is damaged, or if it comes from elsewhere and the description of other
    weights lies beside it."""
    if not is_file(path):
        return {}
    check_content(path)
    try:
        comment = comment_of(path)
        if comment:
            return json.loads(comment)
    except DAMAGED as error:
        raise unreadable(path, error) from error
    description_path = path.with_suffix(".json")
    try:
        with read_errors(description_path):
            is_described = is_file(description_path) and "model" in json.loads(
                description_path.read_text(encoding="utf-8")
            )
    except (ValueError, TypeError):  # another program's
        is_described = False
    if is_described:
        raise UserError(
            f"{description_path} describes other weights than {path}, which come from elsewhere or were "
            "written anew by another program; delete it, then the shape is taken from the tensors"
        )
    return {}


def described_config(path: Path) -> "MiniMindConfig | None":
    """The config in the description of a weights file, without reading its tensors; None if it has none.
    Raises UserError if it is damaged, or if the config has a field that this code does not know and would
    therefore ignore."""
    from model.model_minimind import MiniMindConfig

    fields = read_description(path).get("model")
    if fields is None:
        return None
    unknown = [name for name in fields if name not in MiniMindConfig.__annotations__]
    if unknown:
        values = ", ".join(f"{name} {fields[name]!r}" for name in unknown)
        raise UserError(f"{path}: its model has {values}, which this version of the code does not know")
    return MiniMindConfig(**fields)


def read_model(
    path: Path, experts_per_token: int | None = None, **required_shape: Any
) -> "tuple[dict[str, Tensor], MiniMindConfig]":
    """The tensors of a weights file, a checkpoint or a Hugging Face folder under MiniMind's names, and its
    config. experts_per_token: used if a file from elsewhere does not say it. required_shape: settings of the
    shape that it must have. Raises UserError if it is not such a model, or contradicts `required_shape`."""
    if is_hugging_face(path):
        weights, config = read_folder(path)
    else:
        weights, config = _read_file(path, required_shape.get("num_experts_per_tok", experts_per_token))
    wrong = {name: value for name, value in required_shape.items() if getattr(config, name) != value}
    if wrong:
        true = flags_of({name: getattr(config, name) for name in wrong})
        what = f"{flags_of(wrong)} contradicts the weights {path}, which are of {true}"
        raise UserError(f"{what}; leave it out")
    return weights, config


def _read_file(path: Path, experts_per_token: int | None) -> "tuple[dict[str, Tensor], MiniMindConfig]":
    if is_file(path / ADAPTER_CONFIG):
        raise UserError(f"{path} is an adapter (LoRA), not a model; give it to the tools as --lora")
    if is_folder(path):
        if names := [each.name for each in files_in(path, "*.pth")]:
            raise UserError(f"{path} is a folder of weights; name one of them: {', '.join(names)}")
        raise UserError(f"{path}: not a Hugging Face folder, it has no {CONFIG_FILE}")
    if not is_there(path):
        raise missing_weights(path)
    try:
        content = read_file(path)
        weights = content
        if is_checkpoint(content):
            weights = _weights_in_checkpoint(path, content)
            after = f", after update {content['update']}" if "update" in content else ""
            Logger(f"{path} is a checkpoint to resume from{after}: its float32 weights are used")
        _shapes(weights)
    except DAMAGED as error:
        raise unreadable(path, error) from error
    config = described_config(path)
    return weights, config or imported_config(path, weights, experts_per_token)


def is_checkpoint(content: Any) -> bool:
    """Whether the content of a file is a checkpoint to resume from, and not weights."""
    return isinstance(content, dict) and set(content) >= CHECKPOINT_KEYS


def check_model_file(path: Path) -> None:
    """Raise UserError if a file is neither weights nor the checkpoint of a language model. It reads no
    tensor, so it can be called before anything that takes time."""
    if not is_file(path):
        return
    try:
        with read_errors(path):
            content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        _shapes(_weights_in_checkpoint(path, content) if is_checkpoint(content) else content)
    except DAMAGED as error:
        raise unreadable(path, error) from error


def _weights_in_checkpoint(path: Path, state: dict[str, Any]) -> dict[str, Tensor]:
    """The weights in a checkpoint to resume from, in float32. Raises UserError if the checkpoint holds
    anything but one language model."""
    weights, holds = state["model"], ""
    if any(".lora_" in name for name in weights):
        holds = "an adapter without its model; the tools take the adapter's folder, in --save_dir, as --lora"
    elif any(name.startswith("critic.") for name in weights):
        holds = "a policy and its critic (PPO); give the policy's weights, the .pth in --save_dir"
    elif "model.embed_tokens.weight" not in weights:
        holds = "a model that is not MiniMind's"
    if holds:
        raise UserError(f"{path} is a checkpoint to resume from, of {holds}")
    return weights


def unreadable(path: Path, error: BaseException) -> UserError:
    """The error for a file without weights, or with damaged ones."""
    if path.suffix == ".gguf":
        what = "give the .pth or the Hugging Face folder that it was made from"
        return UserError(f"{path} is for llama.cpp; {what}")
    return UserError(f"weights {path}: not a readable weights file ({reason(error)})")


def missing_weights(path: Path) -> UserError:
    """The error for missing weights; it lists the weights that are there."""
    there = sorted(p.name for p in path.parent.glob("*.pth"))
    below = sorted(str(p.relative_to(path.parent)) for p in path.parent.glob("*/*.pth"))
    listed = f"found there: {', '.join(there)}" if there else f"{path.parent} holds no weights"
    if not there and below:
        listed += f", but {below[0]} lies in a folder in it"
    advice = "train that stage first, or name another (--from_weight, --weight) or its shape (--hidden_size)"
    return UserError(f"weights {path} do not exist ({listed}); {advice}")


def find_weights(save_dir: str | Path, weight: str, **required_shape: Any) -> Path:
    """The file of these weights in `save_dir`, of any shape. required_shape: settings that it must have.
    Raises UserError if there is none, none of this shape, or more than one."""
    shapes = weight_files(save_dir, weight)
    if not shapes:
        raise missing_weights(Path(save_dir) / f"{weight}_*.pth")
    named = {name: required_shape[name] for name in NAMED_SHAPE if name in required_shape}
    fitting = [path for path, shape in shapes.items() if named.items() <= shape.items()]
    if (
        not fitting
    ):  # a plain `_moe` may come from elsewhere with any number of experts, which its tensors show
        named = {name: value for name, value in named.items() if name in ("hidden_size", "use_moe")}
        for path, shape in shapes.items():
            if path.stem.endswith("_moe") and named.items() <= shape.items():
                fitting.append(path)
    names = ", ".join(path.name for path in fitting or shapes)
    if not fitting:
        raise UserError(
            f"{flags_of(required_shape)}: {save_dir} holds no such weights, only {names}; leave out "
            "what is wrong"
        )
    if len(fitting) > 1:
        differing = [name for name in NAMED_SHAPE if len({shapes[path][name] for path in fitting}) > 1]
        if (
            "use_moe" in differing
        ):  # use_moe decides the number of experts as well, so those need not be named
            differing = differing[: differing.index("use_moe") + 1]
        flags = " or ".join(f"--{name}" for name in differing)
        raise UserError(f"{save_dir} holds several weights {weight}: {names}; choose one with {flags}")
    return fitting[0]


def files_hash(files: Sequence[Path]) -> str:
    """SHA-256 of the contents of files."""
    hashes = [file_hash(each) for each in files]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def weights_hash(path: Path) -> str | None:
    """SHA-256 of weights, a file or a Hugging Face folder; None if there are none."""
    if not is_there(path):
        return None
    return files_hash(model_files(path) if is_folder(path) else [path])


def fill(
    model: "MiniMindForCausalLM", weights: dict[str, Tensor], path: Path, weights_config: "MiniMindConfig"
) -> None:
    """Load weights that were read from `path`, with the config `weights_config`, into a model, strictly.
    Raises UserError if they do not fit, naming the settings or the tensor that differ."""
    if differing := incompatible_fields(weights_config, cast(Any, model).config):
        raise UserError(f"weights {path} do not fit the model: they are of {', '.join(differing)}")
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:  # its first line only names the class
        differences = " ".join(str(error).split("\n", 1)[-1].split())
        raise UserError(f"weights {path} do not fit the model: {differences[:300]}") from error


def incompatible_fields(weights_config: "MiniMindConfig", config: "MiniMindConfig") -> list[str]:
    """The fields of `weights_config` that differ from `config` and would make the weights compute something
    else, with both values."""
    if weights_config.use_moe != config.use_moe:
        names = ["use_moe"]
    else:
        may_differ = MAY_DIFFER + (DENSE_FIELDS if weights_config.use_moe else EXPERT_FIELDS)
        names = [name for name in weights_config.own_fields() if name not in may_differ]
    differing = []
    for name in names:
        value, wanted = getattr(weights_config, name), getattr(config, name)
        if value != wanted:
            differing.append(f"{name} {value}, not {wanted}")
    return differing


def _shapes(weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in weights.items()}
