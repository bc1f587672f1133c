"""The engine's settings: those of the stage scripts (common/settings.py) and its own, in sections.

Later sources override earlier ones: the defaults below, the task's own defaults, a YAML file (--config), the
environment (MINIMIND_BATCH_SIZE=8), the command line (--batch_size 8).
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from common import settings
from common.arguments import (
    as_yaml,
    checked,
    flag_values,
    print_and_exit,
    read_flags,
    read_yaml,
    stage_parser,
    yaml_values,
)
from common.command_line import Parser
from common.errors import UserError
from common.hub import make_local
from common.settings import CheckpointConfig, LoggingConfig, Settings, StageArgs, setting

PREFIX = "MINIMIND_"  # of environment variables
OTHER_VARIABLES = ("MINIMIND_API_KEY",)  # of other programs
OPTIONS = "task_options"  # section of YAML for the options of a user's own task


class ModelConfig(settings.ModelConfig):
    """The shape of the model. `top_k` is another name of `num_experts_per_tok`."""

    def __init__(self, *, top_k: int | None = None, **values: Any):
        if top_k is not None:
            values["num_experts_per_tok"] = top_k
        super().__init__(**values)

    @property
    def top_k(self) -> int:
        return self.num_experts_per_tok

    @top_k.setter
    def top_k(self, value: int) -> None:
        self.num_experts_per_tok = value


class DataConfig(settings.DataConfig):
    """What the model is trained on."""

    may_change: ClassVar[str] = "data_module num_samples noise validation_share"
    data_module: str | None = setting(
        None, "package.module:ClassName of a data module, instead of the task's own"
    )
    num_samples: int = setting(2048, "size of the synthetic data, training and validation", "samples", ge=2)
    noise: float = setting(0.0, "standard deviation of the noise on the synthetic targets", ge=0)
    validation_share: float = setting(0.2, "share of the synthetic samples that is held out", gt=0, lt=1)


class TrainingConfig(settings.TrainingConfig):
    """How the model is trained."""

    may_change: ClassVar[str] = "task"
    task: str = setting(
        "", "what to train: regression, pretrain, full_sft, or package.module:ClassName for your own"
    )


class DistributedConfig(settings.DistributedConfig):
    """Devices and processes. Under torchrun, torchrun sets the number of processes and their address."""

    may_change: ClassVar[str] = "world_size master_addr master_port"
    world_size: int = setting(0, "processes to start; 0: one per visible GPU, or 1", ge=0)
    master_addr: str = setting("127.0.0.1", "rendezvous address of the processes")
    master_port: int = setting(0, "rendezvous port; 0: a free one", ge=0, le=65535)


class OptimizationConfig(settings.OptimizationConfig):
    """Precision, compilation and memory."""

    may_change: ClassVar[str] = "use_amp"
    use_amp: bool = setting(True, "mixed precision in --dtype; 0: float32, ignoring --dtype")


class EngineArgs(DataConfig, ModelConfig, TrainingConfig, OptimizationConfig, DistributedConfig, StageArgs):
    """All settings, flat, as the functions of `trainer/` take them."""

    section: ClassVar[str] = "engine"

    def contradictions(self) -> list[str]:
        """Values that do not go together."""
        wrong = super().contradictions()
        if not self.task:
            wrong.append(
                "--task is missing: give the name of a task, or package.module:ClassName for one of your own"
            )
        return wrong


@cache
def engine_args(stage_args: type[StageArgs] | None) -> type[EngineArgs]:
    """The class of a task's settings: the engine's and, of a stage, its flags and defaults."""
    if stage_args is None:
        return EngineArgs
    return type("EngineArgs", (stage_args, EngineArgs), {"__module__": __name__})


def engine_parser(args_class: type[EngineArgs]) -> Parser:
    """The engine's command line."""
    description = (
        "Train a built-in task or your own. A task may have its own defaults: --print_config shows them."
    )
    parser = stage_parser(args_class, description, prog="python -m llm.training.train")
    text = f"an option of your own task, stored in config.extra (in YAML: section {OPTIONS}); may be repeated"
    parser.add_argument("--set", action="append", type=named_value, metavar="NAME=VALUE", help=text)
    return parser


def named_value(text: str) -> tuple[str, str]:
    """Name and value of --set."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value


def find_task_name(argv: Sequence[str] | None, environ: Mapping[str, str]) -> str:
    """The name of the task, whose defaults and flags are needed before all else is read; empty for none."""
    parser = Parser(add_help=False)
    parser.add_argument("--task")
    parser.add_argument("--config")
    options = parser.parse_known_args(argv)[0]
    if options.task:
        return options.task
    name = environ.get(f"{PREFIX}TASK")
    if name is None and options.config is not None:
        name = read_yaml(options.config).get("training", {}).get("task")
    return str(name or "")


def checked_options(label: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a task; text such as `3` and `true` becomes what it says in JSON. Raises UserError for the
    name of a setting, after `label`."""
    options = {}
    for name, value in given.items():
        if name in EngineArgs.model_fields:
            raise UserError(f"{label}{name} is a setting of the engine; give it as --{name}")
        options[name] = value
        if isinstance(value, str):
            with suppress(ValueError):
                options[name] = json.loads(value)
    return options


SECTIONS: dict[str, type[Settings]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "distributed": DistributedConfig,
    "optimization": OptimizationConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}


def task_defaults(
    name: str, find_task: Callable[[str], Any] | None
) -> tuple[type[StageArgs] | None, dict[str, Any], dict[str, Any]]:
    """The settings of the task, if it is a stage; the defaults of all settings; and those that are options of
    the task. Raises UserError if they are wrong, or nothing finds the task."""
    if not name:
        return None, dict(EngineArgs()), {}
    if find_task is None:
        raise UserError(
            f"--task {name}: its class is needed; call Config.from_args_and_env(find_task=find_task) "
            "with find_task of llm/training/train.py"
        )
    task = find_task(name)
    args_class = engine_args(task.stage_args)
    values, settings, options = dict(args_class()), [], {}
    if task.stage_args is None:
        values["save_weight"] = name.rpartition(":")[2]
    label = f"task {name}: its default "
    for key, value in task.defaults.items():
        if args_class.aliases.get(key, key) in args_class.model_fields:
            settings.append((key, label + key, value))
        else:
            options[key] = value
    return task.stage_args, values | checked(args_class, settings), options


@dataclass
class Config:
    """All settings of a run.

    extra: the flags of a stage, and the options of a user's own task. stage_args: the settings of the task,
    if it is a stage.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    extra: dict[str, Any] = field(default_factory=dict)
    stage_args: type[StageArgs] | None = None

    @classmethod
    def from_args_and_env(
        cls,
        argv: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        find_task: Callable[[str], Any] | None = None,
    ) -> "Config":
        """Read the settings from all sources. `validate` checks how they go together.

        Args:
            argv: the command line without the program; sys.argv by default.
            environ: the environment; os.environ by default.
            find_task: gives the class of a task, for its `defaults` and `stage_args`; needed only if a task
                is given. `save_weight` defaults to the name of the task.

        Raises:
            UserError: one line with all unknown names and invalid values of a source.
            SystemExit: after `--help` and `--print_config`.
        """
        if environ is None:
            environ = os.environ
        stage_args, values, options = task_defaults(find_task_name(argv, environ), find_task)
        args_class = engine_args(stage_args)
        flags = read_flags(engine_parser(args_class), argv)
        path, print_config = flags.pop("config", None), flags.pop("print_config", False)
        set_options = checked_options("--set ", dict(flags.pop("set", [])))
        variables = []
        for key in sorted(environ):
            if key.startswith(PREFIX) and key not in OTHER_VARIABLES:
                variables.append((key.removeprefix(PREFIX).lower(), f"variable {key}", environ[key]))

        given: dict[str, Any] = {}
        if path is not None:
            sections = read_yaml(path)
            options |= checked_options(f"{path}: ", sections.pop(OPTIONS, {}))
            given = checked(args_class, yaml_values(path, sections))
        given |= checked(args_class, variables)
        given |= checked(args_class, flag_values(flags))
        values |= given

        parts: dict[str, Any] = {}
        for section, kind in SECTIONS.items():
            names = kind.model_fields.keys()
            part = {name: values.pop(name) for name in names}
            parts[section] = kind.model_construct(names & given.keys(), **part)
        config = cls(**parts, extra=values | options | set_options, stage_args=stage_args)
        if print_config:
            print_and_exit(config.describe())
        for section in (config.data, config.model, config.checkpoint):
            make_local(section)
        return config

    # --- what is read from a config

    def values(self) -> dict[str, Any]:
        """All settings by name, with the flags of a stage."""
        values: dict[str, Any] = {}
        for section in SECTIONS:
            values |= dict(getattr(self, section))
        of_stage = engine_args(self.stage_args).model_fields
        return values | {name: value for name, value in self.extra.items() if name in of_stage}

    def to_args(self) -> EngineArgs:
        """All settings, flat; for a stage also its own flags."""
        values, given = self.values(), set()
        for section in SECTIONS:
            given |= getattr(self, section).model_fields_set
        if not self.optimization.use_amp:
            values["dtype"] = "float32"
        return engine_args(self.stage_args).model_construct(given, **values)

    def describe(self) -> str:
        """Every setting as YAML that `--config` can read."""
        values = self.values()
        options = {name: value for name, value in self.extra.items() if name not in values}
        more = {OPTIONS: options} if options else {}
        return as_yaml(engine_args(self.stage_args), values, **more)

    def validate(self) -> None:
        """Check how the values go together; each alone was checked where it was read. Raises UserError: one
        line with all mistakes."""
        wrong = self.to_args().contradictions()
        if wrong:
            raise UserError("; ".join(wrong))
