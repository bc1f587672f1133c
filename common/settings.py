"""Every setting of a training run, written once: name, type, default, unit, limits, choices and help.

YAML files, environment variables and command lines (config_sources.py), the engine's sections and the flag
pages of the manual are made from these dataclasses. pydantic converts and checks the values.

A stage script subclasses `StageArgs` for its own defaults; a field that it adds is a flag of that stage
alone.
"""

import argparse
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

# the repository: default paths start here, not in the current folder
ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")
Switch = bool | Literal["auto"]  # auto: the program decides
AUTO = 0  # `auto` for a number: trainer/optim/rules.py decides


def data_file(*names: str) -> str:
    """The first of these files of dataset/ that is there, else the first of them."""
    paths = [str(ROOT / "dataset" / name) for name in names]
    return next(filter(os.path.exists, paths), paths[0])


def setting(default: T, help: str, unit: str = "", auto: bool = False, **limits: Any) -> T:
    """A field of a section; `limits` are pydantic's: ge, gt, le, lt, multiple_of. With `auto` it may be
    AUTO."""
    return cast(
        T, field(default=default, metadata={"help": help, "unit": unit, "auto": auto, "limits": limits})
    )


# --- the table
# -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class DataConfig:
    """What the model is trained on."""

    section: ClassVar[str] = "data"
    data_path: str | None = setting(
        None,
        "training data: file, folder or glob, several separated by commas (JSON, Parquet, CSV, Arrow, text), each with "
        "a weight after a colon to mix them",
    )
    eval_data_path: str | None = setting(
        None, "held-out data, in the same forms; gives eval_loss, eval_bpb and <save_weight>_best"
    )
    eval_share: float = setting(
        0.0,
        "share of the records of --data_path that is held out, instead of --eval_data_path; 0: none",
        ge=0,
        le=0.5,
    )
    text_separator: str | None = setting(
        None, "line between documents in .txt files; without it each file is one document"
    )
    cache_dir: str = setting(str(ROOT / "dataset" / "cache"), "folder of the token cache")
    max_seq_len: int = setting(512, "length of the longest sample", "tokens", ge=8, le=32768)
    packing: bool = setting(False, "1: fill rows of --max_seq_len tokens with whole samples")
    on_bad_data: Literal["stop", "skip"] = setting(
        "stop", "at a record that cannot be used: stop, or skip and list it"
    )
    max_bad_share: float = setting(
        0.1, "with --on_bad_data skip: stop above this share of bad records", ge=0, le=1
    )
    num_workers: int = setting(
        0, "data loader processes per rank; 0 loads in the training process", "processes", ge=0
    )


@dataclass(kw_only=True)
class ModelConfig:
    """The shape of the model."""

    section: ClassVar[str] = "model"
    hidden_size: int = setting(512, "width; divisible by 16 (8 heads of an even size)", ge=16, multiple_of=16)
    num_hidden_layers: int = setting(8, "depth", "layers", ge=1)
    use_moe: bool = setting(False, "1: mixture of experts instead of a dense model")
    num_experts: int = setting(4, "experts per layer, with --use_moe 1", ge=1)
    num_experts_per_tok: int = setting(1, "experts that each token goes through, with --use_moe 1", ge=1)
    dropout: float = setting(0.0, "dropout probability, after the embedding and each attention", ge=0, lt=1)
    tokenizer_path: str = setting(str(ROOT / "model"), "folder of a Hugging Face tokenizer")


@dataclass(kw_only=True)
class TrainingConfig:
    """How the model is trained."""

    section: ClassVar[str] = "training"
    epochs: int = setting(2, "passes over the data", ge=1)
    batch_size: int = setting(
        32,
        "micro-batch size of each rank (with --packing 1 in rows); auto: by the data",
        "samples",
        auto=True,
        ge=1,
    )
    accumulation_steps: int = setting(
        1, "gradient accumulation: micro-batches per update", "micro-batches", ge=1
    )
    learning_rate: float = setting(
        5e-4, "peak learning rate (muon: 8 times this value); auto: by width, batch and data", auto=True, gt=0
    )
    warmup_updates: int = setting(0, "linear warm-up of the learning rate", "updates", ge=0)
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "AdamW, or Muon for the layers' matrices (AdamW for others)"
    )
    weight_decay: float = setting(0.01, "weight decay of the optimizer, on matrices only", ge=0, le=1)
    grad_clip: float = setting(1.0, "largest L2 norm of the gradient; 0: no clipping", ge=0)
    seed: int = setting(
        42, "seed of the initial weights, the order of samples and dropout", ge=0, le=2**63 - 1
    )
    max_bad_updates: int = setting(
        5, "updates in a row with a non-finite loss or gradient that end the run", ge=1
    )
    patience: int = setting(
        0, "early stopping: evaluations without improvement before it stops; 0: off", ge=0
    )
    min_delta: float = setting(
        0.0, "a change of --monitor counts as an improvement if it is larger than this", ge=0
    )
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
    use_compile: bool | Literal["auto"] = setting("auto", "1: torch.compile each layer; auto: where it pays")
    parallel: Literal["ddp", "fsdp", "hsdp"] = setting(
        "ddp",
        "several ranks: replicate the model (DDP), shard it (FSDP2, fully_shard), or shard it within each machine and "
        "replicate it across machines (hsdp)",
    )
    activation_checkpointing: bool = setting(
        False, "1: recompute activations: less memory, a third more work"
    )
    deterministic: bool = setting(
        False, "1: deterministic kernels on a GPU: the same bits in every run, slower"
    )


@dataclass(kw_only=True)
class DistributedConfig:
    """Devices and processes."""

    section: ClassVar[str] = "distributed"
    device: str = setting("auto", "auto (CUDA, then MPS, then CPU), cuda, cuda:N, mps or cpu")
    rank_timeout: int = setting(
        600, "time without a sign of another rank until it counts as lost", "seconds", ge=1
    )


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is saved, and what the run starts from."""

    section: ClassVar[str] = "checkpoint"
    save_dir: str = setting(str(ROOT / "out"), "folder of the weights for use and the metrics")
    save_weight: str = setting("model", "name of the weights that this run writes")
    checkpoint_dir: str = setting(str(ROOT / "checkpoints"), "folder of the state to resume from")
    from_weight: str = setting(
        "none", "weights to start from: a name in --save_dir, or a path; none: random weights"
    )
    from_resume: bool = setting(False, "1: continue from the newest checkpoint, if there is one")
    resume_from: str | None = setting(
        None,
        "state with which a branch begins; once the branch has a newer state of its own, that one is continued",
    )
    extend_epochs: bool = setting(False, "1: a resumed run may have more --epochs than before")
    save_interval: int = setting(
        1000, "interval of checkpoints; each epoch ends with one", "micro-batches", ge=1
    )
    keep_every: int = setting(0, "keep a numbered checkpoint every N updates; 0: none", "updates", ge=0)
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
        "auto",
        "answered at each evaluation: auto (beginnings of held-out data), none, or a text file of one per line",
    )
    use_tensorboard: bool = setting(False, "1: curves for TensorBoard, in --tensorboard_dir")
    tensorboard_dir: str | None = setting(
        None,
        "folder of TensorBoard curves, <save_dir>/tensorboard; to view them: tensorboard --logdir FOLDER",
    )
    use_wandb: bool = setting(False, "log to SwanLab")
    wandb_project: str = setting("MiniMind-Trainer", "SwanLab project")
    swanlab_mode: Literal["cloud", "disabled", "local", "offline", "online"] = setting(
        "cloud", "where SwanLab keeps the run"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "least severe lines that are shown"
    )
    log_file: str | None = setting(
        None, "file to which every console line is appended, with its time and level"
    )
    log_dir: str | None = setting(
        None, "folder of the log file, which is then <run>.log; instead of --log_file"
    )


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
    removed: ClassVar[dict[str, Any]] = {}  # flags of earlier versions -> the value that is now the only one
    # whether --use_compile auto may compile: it was measured for this stage
    compiling_pays: ClassVar[bool] = False
    # --learning_rate auto, as a multiple of pretraining's; 0: nobody measured it
    auto_rate: ClassVar[float] = 0.0
    # settings that the user gave
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def values(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(self, name) for name in settings_of(type(self))}

    @property
    def lr_scales(self) -> dict[str, float]:
        """Learning rates of parts of the model as multiples of --learning_rate."""
        return {}

    def frozen_weights(self) -> dict[str, Path]:
        """Flag -> path of weights that a resumed run reads again: those of a frozen model beside the trained
        one."""
        return {}

    def frozen_hashes(self) -> dict[str, str]:
        """The part of the run fingerprint that identifies frozen models, other than the start weights."""
        return {}

    def code_files(self) -> list[Path]:
        """Files of code, beside the stage script, whose change is a warning when the run is resumed."""
        return []

    def compares_with_start_weights(self) -> bool:
        """Whether a resumed run may read the weights of --from_weight again, so that it must not write over
        them."""
        return False

    def builds_on_start_weights(self) -> bool:
        """Whether a resumed run needs the weights of --from_weight, because its checkpoint does not replace
        them."""
        return False

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
        experts, per_token = self.num_experts, self.num_experts_per_tok
        if not self.use_moe and (experts, per_token) != (
            ModelConfig.num_experts,
            ModelConfig.num_experts_per_tok,
        ):
            wrong.append(
                "--num_experts and --num_experts_per_tok shape a mixture of experts; add --use_moe 1, or leave them out"
            )
        for name in ("learning_rate", "batch_size") if not self.auto_rate else ():
            if getattr(self, name) == AUTO:
                wrong.append(f"--{name} auto: the rules are those of pretraining and SFT; give a number")
        if per_token > experts:
            wrong.append(f"--num_experts_per_tok {per_token} must be --num_experts {experts} or less")
        return wrong


# --- one setting
# -----------------------------------------------------------------------------------------------------

MUST_BE = {  # pydantic's error types; `{...}` is filled from the error's context
    "int": "a whole number",
    "float": "a finite number",
    "finite_number": "a finite number",
    "bool": "0 or 1",
    "string": "text (in YAML put it in quotes)",
    "literal_error": "{expected}",
    "greater_than_equal": "{ge} or more",
    "greater_than": "above {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "below {lt}",
    "multiple_of": "divisible by {multiple_of}",
}


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    kind: Any  # bool, Switch, int, float, str, str | None, or a Literal of texts
    default: Any
    help: str
    unit: str
    limits: dict[str, Any] = field(hash=False)
    section: str
    auto: bool = False

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal or a Switch."""
        if self.kind == Switch:
            return ("auto", "0", "1")
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def parse(self, value: Any) -> Any:
        """A value of this setting, from text or from YAML. Raises ValueError with what it must be."""
        if type(None) in get_args(self.kind) and (
            value is None or str(value).lower() in ("", "none", "null")
        ):
            return None
        if self.auto and value == "auto":
            return AUTO
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
        if self.kind is str and value == "" and self.default != "":
            raise ValueError("must not be empty")
        finite = {"allow_inf_nan": False} if self.kind is float else {}
        try:
            return _adapter(Annotated[self.kind, Field(**self.limits, **finite)]).validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]
            kind = problem["type"] if problem["type"] in MUST_BE else problem["type"].split("_")[0]
            must_be = MUST_BE[kind].format(**problem.get("ctx", {}) | self.limits)
            text = "auto, 0 or 1" if self.kind == Switch else must_be + " or auto" * self.auto
            raise ValueError(f"must be {text}, not {shown}") from None

    def parse_flag(self, text: str) -> Any:
        """`parse` for argparse, which shows the message of its own type of error only."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


@cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


@cache
def settings_of(args_class: type) -> Mapping[str, Setting]:
    """The settings of a dataclass by name, section by section: help and limits from the class that introduces
    a field, the default from the last one that overrides it."""
    introduced: dict[str, type] = {}
    for base in reversed(args_class.__mro__):
        for name in vars(base).get("__annotations__", {}):
            is_field = name in getattr(args_class, "__dataclass_fields__", {}) and name != "given"
            if is_field and get_origin(_hints(base)[name]) != ClassVar:
                introduced.setdefault(name, base)
    rows = []
    for name, base in introduced.items():
        meta: dict[str, Any] = {
            "help": "",
            "unit": "",
            "limits": {},
            **base.__dataclass_fields__[name].metadata,
        }
        default = args_class.__dataclass_fields__[name].default
        rows.append(
            Setting(name=name, kind=_hints(base)[name], default=default, section=base.section, **meta)
        )
    sections = list(dict.fromkeys(base.section for base in args_class.__mro__ if hasattr(base, "section")))
    sections.sort(key=lambda section: section == StageArgs.section)  # a stage's own flags come last
    return {row.name: row for row in sorted(rows, key=lambda row: sections.index(row.section))}


@cache
def _hints(base: type) -> dict[str, Any]:
    return get_type_hints(base, include_extras=True)


def aliases_of(args_class: type) -> dict[str, str]:
    """Other names of settings -> their names: those of a class and of its bases."""
    classes = reversed(args_class.__mro__)
    return {alias: name for base in classes for alias, name in vars(base).get("aliases", {}).items()}


def own_flags(args: StageArgs) -> dict[str, Any]:
    """The values of the flags that a stage adds."""
    rows = settings_of(type(args)).items()
    return {name: getattr(args, name) for name, row in rows if row.section == StageArgs.section}


# --- command lines
# ---------------------------------------------------------------------------------------------------

METAVARS = {bool: "{0,1}", int: "INT", float: "FLOAT"}


def flag_options(setting: Setting) -> dict[str, Any]:
    """What argparse is given for a setting, whose value stays text."""
    metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else METAVARS.get(setting.kind, "TEXT")
    # a bare flag switches it on
    bare = {"nargs": "?", "const": "1"} if setting.kind in (bool, Switch) else {}
    default = int(setting.default) if isinstance(setting.default, bool) else setting.default
    shown = "" if default is None or default == "" else f" (default: {default} {setting.unit}".rstrip() + ")"
    return {
        "metavar": metavar,
        "help": (setting.help + shown).replace("%", "%%"),
        "dest": setting.name,
        **bare,
    }


def add_flags(parser: argparse._ActionsContainer, settings: Iterable[Setting]) -> None:
    """Add a flag for each setting."""
    for each in settings:
        parser.add_argument(
            f"--{each.name}", default=each.default, type=each.parse_flag, **flag_options(each)
        )
