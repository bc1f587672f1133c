"""Every setting of a training run, declared once: name, type, default, unit, limits and help.

Each section is a pydantic model. A stage's settings are one flat model that inherits from all sections;
arguments.py reads them. A stage script subclasses `StageArgs` for its own defaults. A field that it adds is a
flag of that stage only.
"""

import inspect
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from common.errors import ReadError
from common.files import is_there
from common.session import seconds_in

LONGEST = 32768  # tokens of a sample, or of a prompt with what is written to it: the positions of a model
# of a new model: the size of a head, and the most heads (docs/dev/LOG.md, "Heads of 64")
HEAD_SIZE, HEADS = 64, 8
USUAL_DECAY = 0.01  # AdamW's weight decay in torch, and MiniMind's
LONGEST_NAME = 200  # bytes of --save_weight; a file's name, with what is added to it, may have 255
# the repository: default paths start here, not in the current folder
ROOT = Path(__file__).resolve().parents[1]


def data_file(*names: str) -> str:
    """The first of these files that exists in dataset/; if none does, the first name. A file whose existence
    cannot be checked is returned, too: reading it will give the error."""
    paths = [str(ROOT / "dataset" / name) for name in names]
    for path in paths:
        try:
            is_chosen = is_there(path)
        except ReadError:
            is_chosen = True
        if is_chosen:
            return path
    return paths[0]


def setting(default: Any, help: str, unit: str = "", auto: bool = False, **limits: Any) -> Any:
    """A field of a section.

    auto: whether the user may give `auto`; the value is then None until the program chooses one. limits:
    pydantic's ge, gt, le, lt, multiple_of.
    """
    marks: Any = {"unit": unit, "auto": auto}
    return Field(default, description=help, json_schema_extra=marks, **limits)


def setting_option(field: FieldInfo, name: str) -> Any:
    """The `unit` or `auto` of a field made by `setting`; None for other fields."""
    marks: Any = field.json_schema_extra or {}
    return marks.get(name)


class Settings(BaseModel):
    """A group of settings: a section of YAML files and of --help."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
    section: ClassVar[str]
    # the settings of this class that may differ when a run is resumed; all others must stay the same
    may_change: ClassVar[str] = ""
    # other names of settings, in every source
    aliases: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **options: Any):
        """A field that is declared again, such as `epochs: int = 3`, keeps its limits, help and marks."""
        super().__init_subclass__(**options)
        for name in inspect.get_annotations(cls):
            default = vars(cls).get(name)
            for base in cls.__mro__[1:]:
                fields = getattr(base, "model_fields", {})
                if name in fields and not isinstance(default, FieldInfo):
                    inherited = copy(fields[name])
                    inherited.default = default
                    setattr(cls, name, inherited)
                    break

    @field_validator("*", mode="wrap")
    @classmethod
    def _convert(cls, value: Any, validate: Callable[[Any], Any], info: ValidationInfo) -> Any:
        """A value from text, from YAML or from Python; `auto`, and `none` where there may be none, are
        None."""
        field = cls.model_fields[str(info.field_name)]
        if value == "auto" and info.field_name in ("batch_size", "learning_rate"):
            raise ValueError("must be a number, not auto; scripts/plan.py chooses one for your data")
        is_auto = setting_option(field, "auto")
        if is_auto and value in ("auto", None):
            return None
        may_be_none = not is_auto and type(None) in get_args(field.annotation)
        if may_be_none and str(value).lower() in ("", "none", "null"):
            return None
        if value in ("", None):
            raise ValueError("must not be empty")
        if isinstance(value, bool) and field.annotation is not bool:
            value = str(value)  # for pydantic True is the number 1
        return validate(value)


class DataConfig(Settings):
    """The data that the model is trained on."""

    section: ClassVar[str] = "data"
    may_change: ClassVar[str] = (
        "data_path eval_data_path eval_share text_separator cache_dir on_bad_data max_bad_share "
        "max_lost_text num_workers"
    )
    data_path: str | None = setting(
        None,
        "training data: a file, folder, glob (GLOB[:N]: its first N files) or hf://..., or several with "
        "commas between them (JSON, Parquet, CSV, Arrow, text); a weight after a colon sets the share of "
        "each",
    )
    eval_data_path: str | None = setting(
        None, "held-out data, in the same formats; gives eval_loss, eval_bpb and <save_weight>_best"
    )
    eval_share: float = setting(
        0.0, "share of the records of --data_path to hold out, instead of --eval_data_path", ge=0, le=0.5
    )
    max_tokens: int = setting(
        0, "tokens of the data per epoch; the next epoch takes the rest; 0: all", "tokens", ge=0
    )
    text_separator: str | None = setting(
        None, "line that separates the documents of a .txt file; none: the file is one document"
    )
    cache_dir: str = setting(str(ROOT / "dataset" / "cache"), "folder of the token cache")
    max_seq_len: int = setting(512, "length of the longest sample", "tokens", ge=8, le=LONGEST)
    packing: bool = setting(False, "1: fill rows of --max_seq_len tokens with whole samples")
    on_bad_data: Literal["stop", "skip"] = setting("stop", "at an unusable record: stop, or skip and list it")
    max_bad_share: float = setting(0.1, "share of bad records above which skipping stops", ge=0, le=1)
    max_lost_text: float = setting(
        0.001,
        "share of the text's characters that the tokenizer may lose; above it the run stops",
        ge=0,
        le=1,
    )
    num_workers: int = setting(0, "data loader processes per rank; 0: none", "processes", ge=0)


class ModelConfig(Settings):
    """The shape of the model."""

    section: ClassVar[str] = "model"
    may_change: ClassVar[str] = "tokenizer_path"
    # 8 heads of an even size
    hidden_size: int = setting(512, "width; a multiple of 16", ge=16, multiple_of=16)
    num_hidden_layers: int = setting(8, "depth", "layers", ge=1)
    num_attention_heads: int | None = setting(
        None,
        "attention heads; auto: heads of size 64 below a width of 512, from there on 8 heads",
        auto=True,
        ge=1,
    )
    num_key_value_heads: int | None = setting(
        None, "key/value heads; auto: half of --num_attention_heads", auto=True, ge=1
    )
    use_moe: bool = setting(False, "1: mixture of experts instead of a dense model")
    num_experts: int = setting(4, "experts per layer, with --use_moe 1", ge=1)
    num_experts_per_tok: int = setting(1, "experts per token, with --use_moe 1", ge=1)
    dropout: float = setting(0.0, "dropout after the embedding and each attention", ge=0, lt=1)
    tokenizer_path: str = setting(str(ROOT / "model"), "folder of a Hugging Face tokenizer")

    def heads(self) -> dict[str, int]:
        """The numbers of heads of a new model. If they are `auto`, heads have HEAD_SIZE or the next size that
        divides the width, there are at most HEADS, and half as many key/value heads."""
        heads, of_keys = self.num_attention_heads, self.num_key_value_heads
        if heads is None:
            most = min(HEADS, max(1, round(self.hidden_size / HEAD_SIZE)))
            heads = next(count for count in range(most, 0, -1) if self.hidden_size % (2 * count) == 0)
        if of_keys is None:
            of_keys = next(count for count in range(max(1, heads // 2), 0, -1) if heads % count == 0)
        return {"num_attention_heads": heads, "num_key_value_heads": of_keys}


class TrainingConfig(Settings):
    """How the model is trained."""

    section: ClassVar[str] = "training"
    may_change: ClassVar[str] = (
        "batch_size accumulation_steps max_bad_updates patience min_delta monitor mode"
    )
    epochs: int = setting(2, "passes over the data", ge=1)
    max_steps: int = setting(
        0, "length of the run and of its schedule, instead of --epochs; 0: use --epochs", "updates", ge=0
    )
    batch_size: int = setting(32, "samples (or packed rows) in a micro-batch of one rank", ge=1)
    accumulation_steps: int = setting(1, "gradient accumulation", "micro-batches per update", ge=1)
    learning_rate: float = setting(5e-4, "peak learning rate (muon: 8 times it)", gt=0)
    warmup_updates: int = setting(0, "linear warm-up of the learning rate", "updates", ge=0)
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon: Muon for the matrices of the layers, AdamW for the rest"
    )
    weight_decay: float | None = setting(
        USUAL_DECAY,
        "weight decay, on matrices only; auto: in pretraining and distillation of random weights with muon "
        f"by the length of a pass over the data, else {USUAL_DECAY}",
        auto=True,
        ge=0,
        le=10,
    )
    grad_clip: float = setting(1.0, "maximum L2 norm of the gradient; 0: no clipping", ge=0)
    seed: int = setting(42, "seed of weights, data order and dropout", ge=0, le=2**63 - 1)
    max_bad_updates: int = setting(5, "the run ends after so many non-finite updates in a row", ge=1)
    patience: int = setting(0, "early stopping: evaluations without improvement; 0: off", ge=0)
    min_delta: float = setting(0.0, "an improvement of --monitor must be larger than this", ge=0)
    monitor: str = setting("eval_loss", "held-out metric for early stopping and for the best weights")
    mode: Literal["min", "max"] = setting("min", "whether a smaller or a larger --monitor is better")


class OptimizationConfig(Settings):
    """Precision, compilation and memory."""

    section: ClassVar[str] = "optimization"
    may_change: ClassVar[str] = "dtype use_compile parallel activation_checkpointing deterministic"
    dtype: Literal["auto", "bfloat16", "float16", "float32", "bfloat16_emulated"] = setting(
        "auto",
        "autocast dtype of matrix products; weights and optimizer state stay float32. A CPU without bfloat16 "
        "arithmetic trains in float32 unless it is bfloat16_emulated",
    )
    use_compile: bool | None = setting(
        None, "1: torch.compile the model; auto: on a GPU, and where it pays on a CPU", auto=True
    )
    parallel: Literal["ddp", "fsdp"] = setting("ddp", "replicate the model (DDP), or shard it (FSDP2)")
    activation_checkpointing: bool = setting(
        False, "1: recompute activations: less memory, a third more work"
    )
    deterministic: bool = setting(False, "1: deterministic kernels on a GPU: bitwise identical runs, slower")


class DistributedConfig(Settings):
    """Devices and processes."""

    section: ClassVar[str] = "distributed"
    may_change: ClassVar[str] = "device rank_timeout"
    device: str = setting("auto", "auto (CUDA, then MPS, then CPU), cuda, cuda:N, mps or cpu")
    rank_timeout: int = setting(600, "a rank that gives no sign for so long counts as lost", "seconds", ge=1)


class CheckpointConfig(Settings):
    """What a run saves and what it starts from."""

    section: ClassVar[str] = "checkpoint"
    may_change: ClassVar[str] = (
        "save_dir save_weight checkpoint_dir from_weight from_resume resume_from "
        "extend_epochs save_interval keep_every keep_last stop_after"
    )
    save_dir: str = setting(str(ROOT / "out"), "folder of the inference weights and the metrics")
    save_weight: str = setting("model", "name of the weights that this run writes")
    checkpoint_dir: str = setting(str(ROOT / "checkpoints"), "folder of the checkpoints to resume from")
    from_weight: str = setting(
        "none", "weights to start from: a name in --save_dir, or a path; none: random weights"
    )
    from_resume: bool = setting(False, "1: continue from the newest checkpoint, if there is one")
    resume_from: str | None = setting(
        None, "checkpoint from which a branch starts; a resumed branch continues from its own newer one"
    )
    extend_epochs: bool = setting(False, "1: a resumed run may have more --epochs than before")
    save_interval: int = setting(
        1000, "interval between checkpoints; each epoch also ends with one", "micro-batches", ge=1
    )
    keep_every: int = setting(0, "interval between numbered checkpoints; 0: none", "updates", ge=0)
    keep_last: int = setting(3, "numbered checkpoints to keep, in addition to the best", ge=0)
    stop_after: str | None = setting(
        None,
        "time since the start, such as 11h, 30m or 90s, after which the run saves and ends at an update; "
        "--from_resume 1 continues",
    )

    @field_validator("stop_after")
    @classmethod
    def _is_duration(cls, value: str | None) -> str | None:
        """Refuse a text that is not a time."""
        if value is not None:
            seconds_in(value)
        return value


class LoggingConfig(Settings):
    """What is reported, and where."""

    section: ClassVar[str] = "logging"
    may_change: ClassVar[str] = (
        "log_interval eval_interval sample_prompts tensorboard_dir use_wandb tracker wandb_project "
        " swanlab_mode log_level log_file log_dir"
    )
    log_interval: int = setting(100, "interval between log records", "micro-batches", ge=1)
    eval_interval: int = setting(
        0, "interval between evaluations; each epoch ends with one; 0: only there", "micro-batches", ge=0
    )
    sample_prompts: str = setting(
        "auto",
        "prompts answered at each evaluation: auto (held-out ones), none, or a text file with one per line",
    )
    tensorboard_dir: str | None = setting(None, "writes curves for TensorBoard to a folder <run> in this one")
    use_wandb: bool = setting(False, "log to SwanLab, as in MiniMind; the same as --tracker swanlab")
    tracker: Literal["none", "swanlab", "wandb"] = setting("none", "log to SwanLab or to Weights & Biases")
    wandb_project: str = setting("MiniMind-Trainer", "project of the tracker")
    swanlab_mode: Literal["cloud", "disabled", "local", "offline", "online"] = setting(
        "cloud", "where the tracker stores the run"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "lowest level of lines that are shown"
    )
    log_file: str | None = setting(None, "appends every console line, with time and level, to this file")
    log_dir: str | None = setting(None, "folder of the log file <run>.log, instead of --log_file")


class StageArgs(
    DataConfig,
    ModelConfig,
    TrainingConfig,
    OptimizationConfig,
    DistributedConfig,
    CheckpointConfig,
    LoggingConfig,
):
    """The settings of a training stage, flat. A stage script subclasses it for its own defaults and flags.
    `model_fields_set` holds the names of those that the user gave."""

    section: ClassVar[str] = "stage"
    # other names of settings, in every source
    aliases: ClassVar[dict[str, str]] = {"top_k": "num_experts_per_tok"}
    # whether --use_compile auto may compile on a CPU: it was measured for this stage
    compiling_pays: ClassVar[bool] = False
    # whether --weight_decay auto goes by the data: it was measured for this stage
    decays_by_pass: ClassVar[bool] = False

    def compared(self) -> dict[str, Any]:
        """The settings that must stay the same when the run is resumed."""
        may_change: set[str] = set()
        for base in type(self).__mro__:
            may_change.update(vars(base).get("may_change", "").split())
        return {name: value for name, value in self if name not in may_change}

    def is_default(self, name: str) -> bool:
        """Whether a setting has the value of its stage's default."""
        return getattr(self, name) == type(self).model_fields[name].default

    def check_names(self) -> None:
        """Raise UserError if a setting names something that does not exist or is of the wrong kind. It is
        called before the data are read. A stage with more such flags overrides it."""

    def contradictions(self) -> list[str]:
        """Problems with combinations of values, and with values that are not allowed in file names."""
        name, wrong = self.save_weight, []
        if Path(name).name != name or name.startswith("."):
            wrong.append(f"--save_weight {name!r} must be a plain name; the folder is --save_dir")
        if name == "none" or name.endswith((".pth", "_best")):
            wrong.append(
                f"--save_weight {name}: none, X.pth and X_best mean something else elsewhere; give another"
            )
        if len(name.encode(errors="surrogateescape")) > LONGEST_NAME:
            wrong.append(f"--save_weight: the name is too long for files; at most {LONGEST_NAME} bytes")
        if self.eval_share and self.eval_data_path:
            wrong.append("--eval_share and --eval_data_path both give held-out data; leave one of them out")
        if self.log_file and self.log_dir:
            wrong.append("--log_file and --log_dir both name the log file; leave one of them out")
        has_default_experts = self.is_default("num_experts") and self.is_default("num_experts_per_tok")
        if not self.use_moe and not has_default_experts:
            wrong.append(
                "--num_experts and --num_experts_per_tok shape a mixture of experts; add --use_moe 1, "
                "or leave them out"
            )
        if self.num_experts_per_tok > self.num_experts:
            wrong.append(
                f"--num_experts_per_tok {self.num_experts_per_tok} must be --num_experts "
                f"{self.num_experts} or less"
            )
        if self.from_weight == "none":  # else the weights say it
            heads, of_keys = self.heads().values()
            if self.hidden_size % (2 * heads):
                wrong.append(
                    f"--num_attention_heads {heads}: --hidden_size {self.hidden_size} is not made up of so "
                    "many heads of an even size"
                )
            if heads % of_keys:
                wrong.append(
                    f"--num_key_value_heads {of_keys} must divide the number of heads, which is {heads} "
                    "(--num_attention_heads)"
                )
        if self.parallel == "fsdp" and self.optimizer == "muon":
            wrong.append(
                "--parallel fsdp: Muon needs whole matrices; use --parallel ddp, or --optimizer adamw"
            )
        return wrong


class FrozenModelArgs(StageArgs):
    """Settings of a stage that also reads frozen models, apart from its start weights. A resumed run reads
    them again."""

    def frozen_model_paths(self) -> dict[str, list[Path]]:
        """Flag -> paths of the weights of other frozen models, such as teachers."""
        return {}

    def frozen_model_hashes(self) -> dict[str, str | None]:
        """The part of the run fingerprint that identifies other frozen models."""
        return {}
