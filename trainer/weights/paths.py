"""The names of a run's files in `out/` and `checkpoints/`. They are MiniMind's names and contain the shape of
the model. Also which files a run may start from: weights, a checkpoint, a Hugging Face folder."""

import json
import re
from pathlib import Path
from typing import Any

from common.errors import UserError, reason
from common.files import files_in, is_file, read_errors, read_object
from common.settings import LoggingConfig, ModelConfig, StageArgs

METRICS_SUFFIX = "_metrics.jsonl"  # of the file of a run's log records
# MiniMind's numbers, which its file names leave out
EXPERTS = tuple(ModelConfig.model_fields[name].default for name in ("num_experts", "num_experts_per_tok"))
# the settings in a file's name
NAMED_SHAPE = ("hidden_size", "use_moe", "num_experts", "num_experts_per_tok")
WEIGHT_NAME = re.compile(r"(?P<weight>.+)_(\d+)(_moe)?(?:(?<=_moe)_(\d+)x(\d+))?\.pth")
CONFIG_FILE, WEIGHTS_FILE, PICKLED_WEIGHTS = "config.json", "model.safetensors", "pytorch_model.bin"
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def run_name(weight: str, lm_config: Any) -> str:
    """The stem of all files of a run, e.g. `full_sft_512`, `full_sft_512_moe` or, with 8 experts of which
    each token uses 2, `full_sft_512_moe_8x2`. lm_config: a MiniMindConfig, or the settings of a run."""
    name = f"{weight}_{lm_config.hidden_size}"
    if not lm_config.use_moe:
        return name
    experts = lm_config.num_experts, lm_config.num_experts_per_tok
    return f"{name}_moe" if experts == EXPERTS else f"{name}_moe_{experts[0]}x{experts[1]}"


def weight_path(save_dir: str | Path, weight: str, lm_config: Any) -> Path:
    """The file of the fp16 inference weights: `<save_dir>/<run_name>.pth`."""
    return Path(save_dir) / f"{run_name(weight, lm_config)}.pth"


def is_path(weight: str) -> bool:
    """Whether the value of a flag that names weights is the path of a file or folder, and not a name in
    --save_dir."""
    return Path(weight).name != weight or weight.endswith(".pth")


def start_path(save_dir: str | Path, weight: str, lm_config: Any) -> Path:
    """The path of the weights that a run starts from, given as a path or a name."""
    return Path(weight) if is_path(weight) else weight_path(save_dir, weight, lm_config)


def shape_in_name(path: Path) -> dict[str, Any] | None:
    """The settings of NAMED_SHAPE in the name of a weights file; the numbers of experts are None for a dense
    model. None if it is not such a name."""
    name = WEIGHT_NAME.fullmatch(path.name)
    if not name:
        return None
    _, hidden_size, moe, experts, per_token = name.groups()
    if not moe:
        numbers = (None, None)
    elif experts:
        numbers = (int(experts), int(per_token))
    else:
        numbers = EXPERTS
    return dict(zip(NAMED_SHAPE, (int(hidden_size), bool(moe), *numbers), strict=True))


def weight_files(save_dir: str | Path, weight: str) -> dict[Path, dict[str, Any]]:
    """The files of the weights of this name, in all shapes, each with its `shape_in_name`."""
    files = {}
    for path in files_in(save_dir, "*.pth"):
        name, shape = WEIGHT_NAME.fullmatch(path.name), shape_in_name(path)
        if name and shape and name["weight"] == weight:
            files[path] = shape
    return files


def checkpoint_files(checkpoint_dir: str | Path, weight: str) -> dict[Path, dict[str, Any]]:
    """The files of the newest states of the runs of this name, in all shapes, each with its
    `shape_in_name`."""
    files = {}
    for path in files_in(checkpoint_dir, "*_resume*.pth"):
        stem = path.name.removesuffix(".pth").removesuffix("_previous").removesuffix("_resume")
        weights = path.with_name(f"{stem}.pth")
        name, shape = WEIGHT_NAME.fullmatch(weights.name), shape_in_name(weights)
        if name and shape and name["weight"] == weight:
            files[path.with_name(f"{stem}_resume.pth")] = shape
    return files


def is_hugging_face(path: Path) -> bool:
    """Whether it is a Hugging Face folder."""
    return is_file(path / CONFIG_FILE)


def model_files(folder: Path) -> list[Path]:
    """The files that a model is read from: its config and the files of its tensors. Raises UserError if there
    are none, or if some are missing, and ReadError if the index cannot be read at the moment."""
    index = folder / f"{WEIGHTS_FILE}.index.json"
    names = [WEIGHTS_FILE if is_file(folder / WEIGHTS_FILE) else PICKLED_WEIGHTS]
    if names[0] == PICKLED_WEIGHTS and is_file(index):
        try:
            with read_errors(index):
                content = json.loads(index.read_text(encoding="utf-8"))
            names = [index.name, *sorted({Path(name).name for name in content["weight_map"].values()})]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: not a readable index ({reason(error)})") from error
    if missing := [name for name in names if not is_file(folder / name)]:
        what = f"{missing[0]} is missing" if len(names) > 1 else f"it holds no weights ({WEIGHTS_FILE})"
        raise UserError(f"{folder}: {what}")
    return [folder / name for name in (CONFIG_FILE, *names)]


def is_pretrained_only(path: Path) -> bool:
    """Whether weights were only pretrained: they continue texts, but cannot answer. The file beside them says
    so; without it, their name decides."""
    about = read_object(path.with_suffix(".json"))
    data = about.get("data")
    kind = data.get("kind") if isinstance(data, dict) else None
    return "pretrain" in str(kind or about.get("stage") or path.name)  # the stage is the name of its script


def metrics_path(save_dir: str | Path, name: str) -> Path:
    """The file of the log records of a run of this `run_name`."""
    return Path(save_dir) / f"{name}{METRICS_SUFFIX}"


def settings_path(metrics: Path) -> Path:
    """The file of the settings and the environment of a run, `<run_name>_run.json` beside its log records."""
    return metrics.with_name(metrics.name.removesuffix(".jsonl").removesuffix("_metrics") + "_run.json")


def log_path(settings: LoggingConfig, name: str) -> Path | None:
    """The log file of a run of this `run_name`; None if none is wanted."""
    if settings.log_dir:
        return Path(settings.log_dir) / f"{name}.log"
    return Path(settings.log_file) if settings.log_file else None


def output_folders(args: StageArgs) -> dict[str, str]:
    """The folders that a run writes to, by the flags that name them."""
    folders = {"save_dir": args.save_dir, "checkpoint_dir": args.checkpoint_dir}
    return folders | ({"tensorboard_dir": args.tensorboard_dir} if args.tensorboard_dir else {})


def resume_path(checkpoint_dir: str | Path, weight: str, lm_config: Any) -> Path:
    """The file of the state to resume from: `<checkpoint_dir>/<run_name>_resume.pth`."""
    return Path(checkpoint_dir) / f"{run_name(weight, lm_config)}_resume.pth"
