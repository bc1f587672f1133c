"""The engine's settings: dataclasses whose field docstrings are the help texts, and what fills them.

Each source overrides those before it: the defaults below < the task's own defaults < a YAML file (--config) < the
environment (MINIMIND_BATCH_SIZE=8) < the command line (--batch_size 8). Names are those of the stage scripts' flags.
config_sources.py reads them.
"""

import ast
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dataset.errors import UserError
from llm.training.core.config_sources import (
    OPTIONS,
    Given,
    Setting,
    parse_value,
    python_value,
    read_command_line,
    read_environment,
    read_task_defaults,
    read_yaml,
    to_yaml,
)
from trainer.arguments import check_args
from trainer.trainer_utils import ROOT


@dataclass
class ModelConfig:
    """Which model it is."""

    hidden_size: int = 512
    """width, divisible by 16"""
    num_hidden_layers: int = 8
    """depth, in layers"""
    use_moe: bool = False
    """mixture of experts instead of dense"""
    num_experts: int = 4
    """experts per layer, with --use_moe"""
    top_k: int = 1
    """experts that each token goes through"""
    dropout: float = 0.0
    """probability, at the embedding and after each attention"""
    tokenizer_path: str = str(ROOT / "model")
    """folder of a Hugging Face tokenizer"""


@dataclass
class DataConfig:
    """What it is trained on."""

    data_path: str | None = None
    """training data: file, folder or glob, several with commas (.jsonl .gz .parquet)"""
    eval_data_path: str | None = None
    """held-out data, the same forms; gives eval_loss, eval_bpb and the best checkpoint"""
    cache_dir: str = str(ROOT / "dataset" / "cache")
    """folder of the token cache"""
    max_seq_len: int = 512
    """longest sample, in tokens"""
    packing: bool = False
    """fill rows of --max_seq_len with whole samples"""
    on_bad_data: Literal["stop", "skip"] = "stop"
    """at a record that cannot be used: stop there, or skip and list all of them"""
    max_bad_share: float = 0.1
    """share of bad records above which skipping stops"""
    num_workers: int = 0
    """loader processes per rank"""
    num_samples: int = 2048
    """samples of the synthetic data, training and validation together"""
    noise: float = 0.0
    """standard deviation of the noise on the synthetic targets"""
    validation_share: float = 0.2
    """share of the synthetic samples that is held out"""


@dataclass
class TrainingConfig:
    """How it is trained."""

    task: str = ""
    """name of a task, or package.module:ClassName for one of your own"""
    epochs: int = 2
    """passes over the data"""
    batch_size: int = 32
    """samples (packed: rows) per rank per micro-batch"""
    accumulation_steps: int = 1
    """micro-batches per update"""
    learning_rate: float = 5e-4
    """peak; follows a cosine down to a tenth"""
    warmup_updates: int = 0
    """updates of linear warm-up"""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the layers' matrices"""
    weight_decay: float = 0.01
    """the optimizer's, on matrices only"""
    grad_clip: float = 1.0
    """largest norm of the gradient; 0: no clipping"""
    seed: int = 42
    """of weights, order of samples and dropout"""
    max_bad_updates: int = 5
    """updates in a row without a finite gradient that end the run"""
    patience: int = 0
    """early stopping: evaluations without improvement that end the run; 0: off"""
    min_delta: float = 0.0
    """a smaller change than this is no improvement, in units of --monitor"""
    monitor: str = "eval_loss"
    """metric of early stopping and of the best checkpoint"""
    mode: Literal["min", "max"] = "min"
    """whether a smaller or a larger --monitor is better"""


@dataclass
class DistributedConfig:
    """Where it runs. Under torchrun the number of processes and their address are torchrun's."""

    world_size: int = 0
    """processes to start; 0: one per visible GPU, or 1"""
    master_addr: str = "127.0.0.1"
    """address at which the processes meet"""
    master_port: int = 0
    """port at which they meet; 0: a free one"""
    rank_timeout: int = 600
    """seconds without a sign of another rank until it counts as lost"""
    device: str = "auto"
    """auto, cuda, cuda:N, mps or cpu"""


@dataclass
class OptimizationConfig:
    """How it is computed."""

    use_compile: bool = False
    """torch.compile"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """several ranks: a copy of the model each, or shards"""
    activation_checkpointing: bool = False
    """less memory, a third more work"""
    use_amp: bool = True
    """mixed precision in --dtype; 0: all in float32, whatever --dtype says"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """autocast; weights stay float32"""


@dataclass
class CheckpointConfig:
    """What is kept, and what it starts from."""

    save_dir: str = str(ROOT / "out")
    """folder of weights for use and metrics"""
    save_weight: str = "model"
    """name of the weights that this run writes; by default the task's"""
    checkpoint_dir: str = str(ROOT / "checkpoints")
    """folder of the state to resume from"""
    from_weight: str = "none"
    """name of the weights in --save_dir to start from; 'none' for random weights"""
    from_resume: bool = False
    """go on from the checkpoint, if there is one"""
    extend_epochs: bool = False
    """a resumed run may have more --epochs"""
    save_interval: int = 1000
    """micro-batches between checkpoints; each epoch ends with one"""
    keep_every: int = 0
    """updates between numbered checkpoints; 0: none"""
    keep_last: int = 3
    """numbered checkpoints that are kept, besides the best"""


@dataclass
class LoggingConfig:
    """What it tells, and where."""

    log_interval: int = 100
    """micro-batches between log points"""
    eval_interval: int = 0
    """micro-batches between evaluations; 0: at the end of each epoch"""
    log_file: str | None = None
    """file for the lines of the console"""
    use_wandb: bool = False
    """log to SwanLab"""
    wandb_project: str = "MiniMind-Trainer"
    """SwanLab project"""
    swanlab_mode: Literal["cloud", "disabled", "local", "offline", "online"] = "cloud"
    """where SwanLab keeps the run"""
    tensorboard_dir: str | None = None
    """folder of TensorBoard's event files"""


def read_settings(section: str, cls: type) -> dict[str, Setting]:
    """The fields of a section by name; the string literal below a field is its help."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    texts = {a.target.id: b.value.value for a, b in zip(body, body[1:], strict=False) if isinstance(a, ast.AnnAssign)}
    return {f.name: Setting(section, f.type, f.default, " ".join(texts[f.name].split())) for f in fields(cls)}


SECTIONS = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig, "distributed": DistributedConfig}
SECTIONS |= {"optimization": OptimizationConfig, "checkpoint": CheckpointConfig, "logging": LoggingConfig}
SETTINGS = {name: s for section, cls in SECTIONS.items() for name, s in read_settings(section, cls).items()}
INT_FLAGS = ("use_moe", "packing", "use_compile", "activation_checkpointing", "from_resume", "extend_epochs")  # 0 or 1


@dataclass
class Config:
    """All settings of a run. `extra`: those of a user's own task. `sources`: where each setting was given."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    extra: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_args_and_env(
        cls,
        argv: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        task_defaults: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None,
    ) -> "Config":
        """The settings of a run from all its sources. What they add up to is checked by `validate`.

        Args:
            argv: the command line without the program; sys.argv's by default.
            environ: the environment; os.environ by default.
            task_defaults: the task's own defaults, or a function of the task's name that gives them (not called where
                no task is named). A task's weights are named like the task unless they say otherwise.

        Raises:
            UserError: one line with all unknown and ill-typed settings of a source.
            SystemExit: `--help` and `--print_config`.
        """
        environ = os.environ if environ is None else environ
        options, from_flags = read_command_line(SETTINGS, argv)
        from_file = read_yaml(SETTINGS, options.config) if options.config is not None else {}
        given = from_file | read_environment(SETTINGS, environ) | from_flags
        task, _ = given.get("task", ("", ""))
        if callable(task_defaults):
            task_defaults = task_defaults(task) if task else None
        named = {"save_weight": task.rpartition(":")[2]} if task else {}
        config = cls._of(read_task_defaults(SETTINGS, task, named | dict(task_defaults or {})) | given)
        if options.print_config and environ.get("RANK", "0") == "0":
            print(config.describe(), end="", flush=True)
        if options.print_config:
            raise SystemExit(0)
        return config

    @classmethod
    def _of(cls, given: Given) -> "Config":
        config = cls(sources=dict.fromkeys(SETTINGS, "default"))
        for name, (value, where) in given.items():
            config.sources[name] = where
            if name in SETTINGS:
                setattr(getattr(config, SETTINGS[name].section), name, value)
            else:
                config.extra[name.removeprefix(f"{OPTIONS}.")] = value
        return config

    def values(self) -> dict[str, Any]:
        """All fields of all sections by name."""
        return {name: getattr(getattr(self, setting.section), name) for name, setting in SETTINGS.items()}

    def to_args(self) -> Namespace:
        """All fields, flat, as the stage scripts' command line gives them to trainer/."""
        values = self.values()
        values |= {name: int(values[name]) for name in INT_FLAGS}
        return Namespace(**values if self.optimization.use_amp else values | {"dtype": "float32"})

    def describe(self) -> str:
        """Every field, its value and its source, as YAML that `--config` reads back as the same settings."""
        values, rows = self.values(), []
        for section in SECTIONS:
            names = [name for name, setting in SETTINGS.items() if setting.section == section]
            rows += [(f"{section}:", None)] + [(f"  {name}: {to_yaml(values[name])}", name) for name in names]
        rows += [(f"{OPTIONS}:", None)] if self.extra else []
        rows += [(f"  {name}: {to_yaml(value)}", f"{OPTIONS}.{name}") for name, value in self.extra.items()]
        width = min(60, max(len(text) for text, _ in rows))
        lines = [text if name is None else f"{text:{width}}  # {self._source(name)}" for text, name in rows]
        return "\n".join(lines) + "\n"

    def _source(self, name: str) -> str:
        return "".join(c if c.isprintable() else "?" for c in self.sources.get(name, "default"))

    def validate(self) -> None:
        """Find every impossible setting before anything is built, on this machine.

        Raises:
            UserError: one line naming all of them.
        """
        wrong = []
        for name, value in self.values().items():  # a Config made by hand
            try:
                parse_value(SETTINGS[name].kind, *python_value(value))
            except ValueError as error:
                wrong.append(f"--{name} {error}")
        if not wrong:
            wrong = self._mistakes()
        if wrong:
            raise UserError("; ".join(wrong))

    def _mistakes(self) -> list[str]:
        given, wrong = self.values(), []
        try:
            check_args(self.to_args())
        except UserError as error:
            wrong.append(str(error))
        at_least = {"num_experts": 1, "top_k": 1, "num_samples": 2, "noise": 0, "patience": 0, "min_delta": 0}
        at_least |= {"world_size": 0, "master_port": 0, "keep_every": 0, "keep_last": 0}
        wrong += [f"--{k} {given[k]} must be {low} or more" for k, low in at_least.items() if given[k] < low]
        if given["top_k"] > given["num_experts"]:
            wrong.append(f"--top_k {given['top_k']} must be --num_experts {given['num_experts']} or less")
        if given["master_port"] > 65535:
            wrong.append(f"--master_port {given['master_port']} must be 65535 or less")
        if not 0 < given["validation_share"] < 1:
            wrong.append(f"--validation_share {given['validation_share']} must be between 0 and 1")
        if not given["task"]:
            wrong.append("--task is missing: give the name of a task, or package.module:ClassName for one of your own")
        return wrong + [f"--{k} must not be empty" for k, value in given.items() if value == "" and k != "task"]
