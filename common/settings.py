"""Every setting of a training run, written once: name, type, default, unit, limits, choices and help.

Command lines and YAML files (arguments.py) and the sections of the engine are made from these dataclasses.
pydantic converts and checks the values.

A stage script subclasses `StageArgs` for its own defaults; a field that it adds is a flag of that stage
alone.
"""

import argparse
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

# the repository: default paths start here, not in the current folder
ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")


def data_file(*names: str) -> str:
    """The first of these files of dataset/ that is there, else the first of them."""
    paths = [str(ROOT / "dataset" / name) for name in names]
    for path in paths:
        if os.path.exists(path):
            return path
    return paths[0]


def setting(
    default: T,
    help: str,
    unit: str = "",
    auto: bool = False,
    role: Literal["", "shape", "run", "not_shape"] = "",
    hashed_as: str = "",
    **limits: Any,
) -> T:
    """A field of a section.

    auto: whether `auto` is a value, too: None until the program has chosen one. role: `shape` of the model,
    as each field of ModelConfig but those marked `not_shape`; or `run` for what must be the same in a resumed
    run, as all flags of a stage's own. hashed_as: for a path, the hash in the run fingerprint by which the
    content is recognised, so that it may be moved. limits: pydantic's ge, gt, le, lt, multiple_of.
    """
    metadata = {"help": help, "unit": unit, "auto": auto, "role": role, "hashed_as": hashed_as}
    return cast(T, field(default=default, metadata=metadata | {"limits": limits}))


# --- the settings


@dataclass(kw_only=True)
class DataConfig:
    """What the model is trained on."""

    section: ClassVar[str] = "data"
    data_path: str | None = setting(
        None,
        "training data: file, folder or glob, several separated by commas (JSON, Parquet, CSV, Arrow, text), "
        "each with a weight after a colon to mix them",
    )
    eval_data_path: str | None = setting(
        None, "held-out data, in the same forms; gives eval_loss, eval_bpb and <save_weight>_best"
    )
    eval_share: float = setting(
        0.0, "share of the records of --data_path to hold out, instead of --eval_data_path", ge=0, le=0.5
    )
    max_tokens: int = setting(
        0, "tokens of the data per epoch, from the beginning of its order; 0: all", "tokens", role="run", ge=0
    )
    text_separator: str | None = setting(
        None, "line between the documents of a .txt file; without it the file is one"
    )
    cache_dir: str = setting(str(ROOT / "dataset" / "cache"), "folder of the token cache")
    max_seq_len: int = setting(512, "length of the longest sample", "tokens", role="run", ge=8, le=32768)
    packing: bool = setting(False, "1: fill rows of --max_seq_len tokens with whole samples", role="run")
    on_bad_data: Literal["stop", "skip"] = setting("stop", "at an unusable record: stop, or skip and list it")
    max_bad_share: float = setting(
        0.1, "share of bad records above which --on_bad_data skip stops", ge=0, le=1
    )
    num_workers: int = setting(
        0, "data loader processes per rank; 0: the training process loads", "processes", ge=0
    )


@dataclass(kw_only=True)
class ModelConfig:
    """The shape of the model."""

    section: ClassVar[str] = "model"
    # 8 heads of an even size
    hidden_size: int = setting(512, "width; a multiple of 16", role="shape", ge=16, multiple_of=16)
    num_hidden_layers: int = setting(8, "depth", "layers", role="shape", ge=1)
    use_moe: bool = setting(False, "1: mixture of experts instead of a dense model", role="shape")
    num_experts: int = setting(4, "experts per layer, with --use_moe 1", role="shape", ge=1)
    num_experts_per_tok: int = setting(1, "experts per token, with --use_moe 1", role="shape", ge=1)
    dropout: float = setting(
        0.0, "dropout after the embedding and each attention", role="not_shape", ge=0, lt=1
    )
    tokenizer_path: str = setting(str(ROOT / "model"), "folder of a Hugging Face tokenizer", role="not_shape")


@dataclass(kw_only=True)
class TrainingConfig:
    """How the model is trained."""

    section: ClassVar[str] = "training"
    epochs: int = setting(2, "passes over the data", role="run", ge=1)
    batch_size: int = setting(
        32, "samples (or packed rows) of a rank's micro-batch; auto: by the data", auto=True, ge=1
    )
    accumulation_steps: int = setting(1, "gradient accumulation", "micro-batches per update", ge=1)
    learning_rate: float = setting(
        5e-4,
        "peak learning rate (muon: 8 times it); auto: by width, batch and data",
        auto=True,
        role="run",
        gt=0,
    )
    warmup_updates: int = setting(0, "linear warm-up of the learning rate", "updates", role="run", ge=0)
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon: for the layers' matrices, AdamW for the rest", role="run"
    )
    weight_decay: float = setting(0.01, "weight decay, on matrices only", role="run", ge=0, le=1)
    grad_clip: float = setting(1.0, "largest L2 norm of the gradient; 0: no clipping", role="run", ge=0)
    seed: int = setting(42, "seed of weights, data order and dropout", role="run", ge=0, le=2**63 - 1)
    max_bad_updates: int = setting(5, "non-finite updates in a row that end the run", ge=1)
    patience: int = setting(0, "early stopping: evaluations without improvement; 0: off", ge=0)
    min_delta: float = setting(0.0, "an improvement of --monitor exceeds this", ge=0)
    monitor: str = setting("eval_loss", "held-out metric for early stopping and for the best weights")
    mode: Literal["min", "max"] = setting("min", "whether a smaller or a larger --monitor is better")


@dataclass(kw_only=True)
class OptimizationConfig:
    """Precision, compilation and memory."""

    section: ClassVar[str] = "optimization"
    dtype: Literal["auto", "bfloat16", "float16", "float32", "bfloat16_emulated"] = setting(
        "auto",
        "autocast dtype of matrix products; weights and optimizer state stay float32. A CPU without bfloat16 "
        "arithmetic trains in float32 unless it is bfloat16_emulated",
    )
    use_compile: bool | None = setting(None, "1: torch.compile each layer; auto: where it pays", auto=True)
    parallel: Literal["ddp", "fsdp", "hsdp"] = setting(
        "ddp", "replicate the model (DDP), shard it (FSDP2), or shard within and replicate across machines"
    )
    activation_checkpointing: bool = setting(
        False, "1: recompute activations: less memory, a third more work"
    )
    deterministic: bool = setting(False, "1: deterministic kernels on a GPU: bitwise identical runs, slower")


@dataclass(kw_only=True)
class DistributedConfig:
    """Devices and processes."""

    section: ClassVar[str] = "distributed"
    device: str = setting("auto", "auto (CUDA, then MPS, then CPU), cuda, cuda:N, mps or cpu")
    rank_timeout: int = setting(600, "a rank without a sign for so long is lost", "seconds", ge=1)


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is saved, and what the run starts from."""

    section: ClassVar[str] = "checkpoint"
    save_dir: str = setting(str(ROOT / "out"), "folder of the inference weights and the metrics")
    save_weight: str = setting("model", "name of the weights that this run writes")
    checkpoint_dir: str = setting(str(ROOT / "checkpoints"), "folder of the state to resume from")
    from_weight: str = setting(
        "none",
        "weights to start from: a name in --save_dir, or a path; none: random weights",
        hashed_as="from_weight_sha256",
    )
    from_resume: bool = setting(False, "1: continue from the newest checkpoint, if there is one")
    resume_from: str | None = setting(
        None, "state with which a branch begins; resumed, the branch continues with its own newer one"
    )
    extend_epochs: bool = setting(False, "1: a resumed run may have more --epochs than before")
    save_interval: int = setting(1000, "between checkpoints; each epoch ends with one", "micro-batches", ge=1)
    keep_every: int = setting(0, "interval of numbered checkpoints; 0: none", "updates", ge=0)
    keep_last: int = setting(3, "numbered checkpoints to keep, in addition to the best", ge=0)


@dataclass(kw_only=True)
class LoggingConfig:
    """What is reported, and where."""

    section: ClassVar[str] = "logging"
    log_interval: int = setting(100, "interval of log records", "micro-batches", ge=1)
    eval_interval: int = setting(
        0, "interval of evaluations; 0: only at the end of each epoch", "micro-batches", ge=0
    )
    sample_prompts: str = setting(
        "auto", "to answer at each evaluation: auto (held-out ones), none, or a text file of one per line"
    )
    use_tensorboard: bool = setting(False, "1: curves for TensorBoard, in --tensorboard_dir")
    tensorboard_dir: str | None = setting(None, "folder of the curves; without it <save_dir>/tensorboard")
    use_wandb: bool = setting(False, "log to SwanLab")
    wandb_project: str = setting("MiniMind-Trainer", "SwanLab project")
    swanlab_mode: Literal["cloud", "disabled", "local", "offline", "online"] = setting(
        "cloud", "where SwanLab keeps the run"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least severe lines shown")
    log_file: str | None = setting(None, "appends every console line, with time and level, to this file")
    log_dir: str | None = setting(None, "folder of the log file <run>.log, instead of --log_file")


@dataclass(kw_only=True)
class StageArgs(
    DataConfig,
    ModelConfig,
    TrainingConfig,
    OptimizationConfig,
    DistributedConfig,
    CheckpointConfig,
    LoggingConfig,
):
    """The settings of a training stage, flat. A stage script subclasses it for its own defaults and flags."""

    section: ClassVar[str] = "stage"
    # other names of settings, in every source
    aliases: ClassVar[dict[str, str]] = {"top_k": "num_experts_per_tok"}
    # whether --use_compile auto may compile: it was measured for this stage
    compiling_pays: ClassVar[bool] = False
    # --learning_rate auto, as a multiple of pretraining's; 0: nobody measured it
    auto_rate: ClassVar[float] = 0.0
    # settings that the user gave
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def values(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: value for name, value in vars(self).items() if name != "given"}

    def contradictions(self) -> list[str]:
        """Values that are fine alone but not together, or not as file names."""
        name, wrong = self.save_weight, []
        if Path(name).name != name or name.startswith("."):
            wrong.append(f"--save_weight {name!r} must be a plain name; the folder is --save_dir")
        if name == "none" or name.endswith((".pth", "_best")):
            wrong.append(
                f"--save_weight {name}: none, X.pth and X_best mean something else elsewhere; give another"
            )
        if self.eval_share and self.eval_data_path:
            wrong.append("--eval_share and --eval_data_path both give held-out data; leave one of them out")
        if self.log_file and self.log_dir:
            wrong.append("--log_file and --log_dir both name the log file; leave one of them out")
        experts = (self.num_experts, self.num_experts_per_tok)
        if not self.use_moe and experts != (ModelConfig.num_experts, ModelConfig.num_experts_per_tok):
            wrong.append(
                "--num_experts and --num_experts_per_tok shape a mixture of experts; add --use_moe 1, "
                "or leave them out"
            )
        if self.num_experts_per_tok > self.num_experts:
            wrong.append(
                f"--num_experts_per_tok {self.num_experts_per_tok} must be --num_experts "
                f"{self.num_experts} or less"
            )
        for name in ("learning_rate", "batch_size"):
            if getattr(self, name) is None and not self.auto_rate:
                wrong.append(f"--{name} auto: the rules are those of pretraining and SFT; give a number")
        return wrong


# --- one setting

METAVARS = {bool: "{0,1}", int: "INT", float: "FLOAT"}


@dataclass(frozen=True)
class Setting:
    """A setting of a class of settings; see `setting` for the fields."""

    name: str
    kind: Any  # bool, int, float, str, str | None, or a Literal of texts
    default: Any
    section: str
    help: str = ""
    unit: str = ""
    auto: bool = False
    role: str = ""
    hashed_as: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def parse(self, value: Any) -> Any:
        """A value of this setting, from text or from YAML. Raises ArgumentTypeError, the error whose message
        argparse shows."""
        may_be_none = type(None) in get_args(self.kind)
        if may_be_none and str(value).lower() in ("", "none", "null"):
            return None
        if self.auto and value in ("auto", None):
            return None
        if value == "" and self.kind is str:
            raise argparse.ArgumentTypeError("must not be empty")
        if isinstance(value, bool) and self.kind is not bool:
            value = str(value)  # for pydantic True is the number 1
        limits = {"allow_inf_nan": False, **self.limits} if self.kind is float else self.limits
        try:
            return TypeAdapter(Annotated[self.kind, Field(**limits)]).validate_python(value)
        except ValidationError as error:
            message = error.errors()[0]["msg"].replace("Input should", "must").partition(", unable")[0]
            if self.auto:
                message += " or auto"
            raise argparse.ArgumentTypeError(f"{message}, not {value!r}") from None

    def flag_options(self) -> dict[str, Any]:
        """What argparse is given for the flag, except for its type and default."""
        metavar = METAVARS.get(self.kind, "TEXT")
        if get_origin(self.kind) is Literal:
            metavar = "{" + ",".join(get_args(self.kind)) + "}"
        default = "auto" if self.auto and self.default is None else self.default
        if isinstance(default, bool):
            default = int(default)
        text = self.help
        if default not in (None, ""):
            text += f" (default: {default} {self.unit}".rstrip() + ")"
        options = {"dest": self.name, "metavar": metavar, "help": text.replace("%", "%%")}
        if self.kind is bool:  # a bare flag switches it on
            options |= {"nargs": "?", "const": "1"}
        return options


@cache
def settings_of(args_class: type) -> Mapping[str, Setting]:
    """The settings of a dataclass by name, section by section, a stage's own last. The class that introduces
    a field says what it is; a subclass may only override the default."""
    kinds = get_type_hints(args_class)
    defaults = {declared.name: declared.default for declared in fields(args_class)}
    bases: list[Any] = [base for base in reversed(args_class.__mro__) if is_dataclass(base)]
    settings: dict[str, Setting] = {}
    for base in bases:
        for declared in fields(base):
            name, marks = declared.name, dict(declared.metadata)
            if name in settings or name == "given":
                continue
            kind = kinds[name]
            if marks.get("auto") and type(None) in get_args(kind):
                kind = get_args(kind)[0]  # None stands for `auto`
            if base.section == StageArgs.section:
                marks["role"] = "run"
            settings[name] = Setting(name, kind, defaults[name], base.section, **marks)

    order = {base.section: number for number, base in enumerate(StageArgs.__bases__)}
    by_section = sorted(settings.values(), key=lambda entry: order.get(entry.section, len(order)))
    return {entry.name: entry for entry in by_section}


def add_flags(parser: argparse._ActionsContainer, settings: Iterable[Setting]) -> None:
    """Add a flag for each setting to the command line of a tool."""
    for entry in settings:
        parser.add_argument(
            f"--{entry.name}", type=entry.parse, default=entry.default, **entry.flag_options()
        )
