"""The engine's settings: those of the stage scripts (common/settings.py) and its own, in sections.

Later sources override earlier ones: the defaults below, the task's own defaults, a YAML file (--config), the
environment (MINIMIND_BATCH_SIZE=8), the command line (--batch_size 8). config_sources.py reads them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from common import settings
from common.errors import UserError
from common.launcher import launch
from common.settings import StageArgs, parse_values, setting, settings_of
from llm.training.core.config_sources import (
    OPTIONS,
    Given,
    read_command_line,
    read_environment,
    read_task_defaults,
    read_yaml,
    to_yaml,
)


class ModelConfig(settings.ModelConfig):
    """The shape of the model. `top_k` is another name of `num_experts_per_tok`."""

    def __init__(self, *, top_k: int | None = None, **values: Any):
        if top_k is not None and values.setdefault("num_experts_per_tok", top_k) != top_k:
            raise UserError(f"top_k {top_k} contradicts num_experts_per_tok {values['num_experts_per_tok']}; give one")
        super().__init__(**values)

    @property
    def top_k(self) -> int:
        return self.num_experts_per_tok

    @top_k.setter
    def top_k(self, value: int) -> None:
        self.num_experts_per_tok = value


@dataclass(kw_only=True)
class DataConfig(settings.DataConfig):
    """What the model is trained on."""

    data_module: str | None = setting(None, "package.module:ClassName of a data module, instead of the task's own")
    num_samples: int = setting(2048, "size of the synthetic data, training and validation", "samples", ge=2)
    noise: float = setting(0.0, "standard deviation of the noise on the synthetic targets", ge=0)
    validation_share: float = setting(0.2, "share of the synthetic samples that is held out", gt=0, lt=1)


@dataclass(kw_only=True)
class TrainingConfig(settings.TrainingConfig):
    """How the model is trained."""

    task: str = setting("", "what to train: regression, pretrain, full_sft, or package.module:ClassName for your own")
    patience: int = setting(0, "early stopping: evaluations without improvement before it stops; 0: off", ge=0)
    min_delta: float = setting(0.0, "a change of --monitor counts as an improvement if it is larger than this", ge=0)
    monitor: str = setting("eval_loss", "metric for early stopping and for the best checkpoint")
    mode: Literal["min", "max"] = setting("min", "whether a smaller or a larger --monitor is better")


@dataclass(kw_only=True)
class DistributedConfig(settings.DistributedConfig):
    """Devices and processes. Under torchrun, torchrun sets the number of processes and their address."""

    world_size: int = setting(0, "processes to start; 0: one per visible GPU, or 1", ge=0)
    master_addr: str = setting("127.0.0.1", "rendezvous address of the processes")
    master_port: int = setting(0, "rendezvous port; 0: a free one", ge=0, le=65535)


@dataclass(kw_only=True)
class OptimizationConfig(settings.OptimizationConfig):
    """Precision, compilation and memory."""

    use_amp: bool = setting(True, "mixed precision in --dtype; 0: float32, ignoring --dtype")


@dataclass(kw_only=True)
class CheckpointConfig(settings.CheckpointConfig):
    """What is saved, and what the run starts from."""

    resume_from: str | None = setting(None, "checkpoint to continue from, instead of the newest one of --from_resume 1")
    keep_every: int = setting(0, "keep a numbered checkpoint every N updates; 0: none", "updates", ge=0)
    keep_last: int = setting(3, "numbered checkpoints to keep, in addition to the best", ge=0)


@dataclass(kw_only=True)
class LoggingConfig(settings.LoggingConfig):
    """What is reported, and where."""

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least severe lines that are shown")
    log_file: str | None = setting(None, "file to which every console line is appended, with its time and level")
    log_dir: str | None = setting(None, "folder of the log file, which is then <run>.log; instead of --log_file")
    tensorboard_dir: str | None = setting(
        None, "folder of TensorBoard curves; to view them: tensorboard --logdir FOLDER"
    )


@dataclass(kw_only=True)
class EngineArgs(
    DataConfig,
    ModelConfig,
    TrainingConfig,
    OptimizationConfig,
    DistributedConfig,
    CheckpointConfig,
    LoggingConfig,
    StageArgs,
):
    """All settings, flat, as the functions of `trainer/` take them."""

    section: ClassVar[str] = "engine"

    def contradictions(self) -> list[str]:
        """Values that do not go together."""
        wrong = super().contradictions()
        if self.log_file and self.log_dir:
            wrong.append("--log_file and --log_dir both name the log file; leave one of them out")
        if self.resume_from and self.from_resume:
            wrong.append("--resume_from names the checkpoint to continue from; leave --from_resume 1 out")
        if not self.task:
            wrong.append("--task is missing: give the name of a task, or package.module:ClassName for one of your own")
        return wrong


SECTIONS = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig, "distributed": DistributedConfig}
SECTIONS |= {"optimization": OptimizationConfig, "checkpoint": CheckpointConfig, "logging": LoggingConfig}
SETTINGS = settings_of(EngineArgs)


@dataclass
class Config:
    """All settings of a run. `extra`: options of a user's own task. `sources`: where each value comes from."""

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
        """Read the settings from all sources. `validate` checks how they go together.

        Args:
            argv: the command line without the program; sys.argv by default.
            environ: the environment; os.environ by default.
            task_defaults: the task's own defaults, or a function that returns them for the name of the task (called
                only if a task is given). `save_weight` defaults to the name of the task.

        Raises:
            UserError: one line with all unknown names and invalid values of a source.
            SystemExit: after `--help` and `--print_config`.
        """
        environ = os.environ if environ is None else environ
        options, from_flags = read_command_line(SETTINGS, EngineArgs, argv)
        from_file = read_yaml(SETTINGS, options.config) if options.config is not None else {}
        given = from_file | read_environment(SETTINGS, environ) | from_flags
        task, _ = given.get("task", ("", ""))
        if callable(task_defaults):
            task_defaults = task_defaults(task) if task else None
        named = {"save_weight": task.rpartition(":")[2]} if task else {}
        config = cls._of(read_task_defaults(SETTINGS, task, named | dict(task_defaults or {})) | given)
        if options.print_config:
            if launch(environ).rank == 0:
                print(config.describe(), end="", flush=True)
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
        """All settings by name."""
        return {name: getattr(getattr(self, setting.section), name) for name, setting in SETTINGS.items()}

    def to_args(self) -> EngineArgs:
        """All settings, flat."""
        values = self.values()
        return EngineArgs(**values if self.optimization.use_amp else values | {"dtype": "float32"})

    def describe(self) -> str:
        """Every setting with its value and source, as YAML that `--config` can read."""
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
        """Convert and check all values, which may have been set in code, and check how they go together.

        Raises:
            UserError: one line with all mistakes.
        """
        for name, value in parse_values(SETTINGS, {k: (v, f"--{k}") for k, v in self.values().items()}).items():
            setattr(getattr(self, SETTINGS[name].section), name, value)
        if wrong := self.to_args().contradictions():
            raise UserError("; ".join(wrong))
