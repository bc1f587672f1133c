"""The engine's settings: those of the stage scripts (common/settings.py) and its own, in sections.

Later sources override earlier ones: the defaults below, the task's own defaults, a YAML file (--config), the
environment (MINIMIND_BATCH_SIZE=8), the command line (--batch_size 8).
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from typing import Any, ClassVar

from common import settings
from common.arguments import (
    checked,
    print_and_exit,
    read_yaml,
    setting_as_yaml,
    settings_as_yaml,
    stage_parser,
)
from common.command_line import Parser
from common.errors import UserError
from common.hub import make_local
from common.settings import CheckpointConfig, LoggingConfig, StageArgs, setting, settings_of

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


@dataclass(kw_only=True)
class DataConfig(settings.DataConfig):
    """What the model is trained on."""

    data_module: str | None = setting(
        None, "package.module:ClassName of a data module, instead of the task's own"
    )
    num_samples: int = setting(2048, "size of the synthetic data, training and validation", "samples", ge=2)
    noise: float = setting(0.0, "standard deviation of the noise on the synthetic targets", ge=0)
    validation_share: float = setting(0.2, "share of the synthetic samples that is held out", gt=0, lt=1)


@dataclass(kw_only=True)
class TrainingConfig(settings.TrainingConfig):
    """How the model is trained."""

    task: str = setting(
        "", "what to train: regression, pretrain, full_sft, or package.module:ClassName for your own"
    )


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


SETTINGS = settings_of(EngineArgs)


@cache
def engine_args(stage_args: type[StageArgs] | None) -> type[EngineArgs]:
    """The class of a task's settings: the engine's and, of a stage, its flags and defaults."""
    if stage_args is None:
        return EngineArgs
    return make_dataclass("EngineArgs", [], bases=(stage_args, EngineArgs), kw_only=True)


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
    """A value of --set, with the section of YAML in its name."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return f"{OPTIONS}.{name}", value


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
        name = read_yaml(options.config).get("training.task")
    return str(name or "")


def option_value(value: Any) -> Any:
    """The value of an option of a task: for text a number, true, false, null, or the text itself."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    words = {"true": True, "false": False, "null": None, "": None}
    return words.get(value.lower(), value)


@dataclass
class Config:
    """All settings of a run.

    extra: the flags of a stage, and the options of a user's own task. stage_args: the settings of the task,
    if it is a stage. sources: where each value comes from, unless it is a default of the engine.
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
    sources: dict[str, str] = field(default_factory=dict, compare=False)

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
        config = cls()
        name = find_task_name(argv, environ)
        if name:
            if find_task is None:
                raise UserError(
                    f"--task {name}: its class is needed; call Config.from_args_and_env(find_task=find_task) "
                    "with find_task of llm/training/train.py"
                )
            config._read_task(name, find_task(name))
        flags = vars(engine_parser(config.args_class).parse_args(argv))
        path, print_config = flags.pop("config", None), flags.pop("print_config", False)
        options = dict(flags.pop("set", []))
        variables = {}
        for key in sorted(environ):
            if key.startswith(PREFIX) and key not in OTHER_VARIABLES:
                variables[key.removeprefix(PREFIX).lower()] = environ[key]

        if path is not None:
            config._take(path, f"{path}: ", read_yaml(path))
        config._take("environment", f"variable {PREFIX}", variables)
        config._take("command line", "--", flags)
        config._take("command line", "--set ", options)
        if print_config:
            print_and_exit(config.describe())
        for section in (config.data, config.model, config.checkpoint):
            make_local(section)
        return config

    @property
    def args_class(self) -> type[EngineArgs]:
        """The class of the settings, flat."""
        return engine_args(self.stage_args)

    def _read_task(self, name: str, task: Any) -> None:
        """The settings of a stage with its defaults, and the defaults of the task; those that are not
        settings are options of the task."""
        self.stage_args = task.stage_args
        settings, defaults = settings_of(self.args_class), {"save_weight": name.rpartition(":")[2]}
        for key, entry in settings.items():
            if key not in SETTINGS or entry.default != SETTINGS[key].default:
                defaults[key] = entry.default
        for key, value in task.defaults.items():
            is_setting = self.args_class.aliases.get(key, key) in settings
            defaults[key if is_setting else f"{OPTIONS}.{key}"] = value
        self._take(f"task {name}", f"task {name}: its default ", defaults)

    def _take(self, source: str, label: str, values: Mapping[str, Any]) -> None:
        """Set the values of a source, of which those in section `task_options` are options of the task.
        Raises UserError: one line with all mistakes, each of which begins with `label`."""
        settings, options, wrong = {}, {}, []
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            if section != OPTIONS:
                settings[key] = value
            elif name in SETTINGS:
                wrong.append(f"{label}{name} is a setting of the engine, in section {SETTINGS[name].section}")
            elif not isinstance(value, str | int | float | None):
                wrong.append(f"{label}{name} must be a single value (in YAML put text in quotes)")
            else:
                options[name] = option_value(value)
        if wrong:
            raise UserError("; ".join(wrong))
        taken = checked(self.args_class, label, settings) | options
        for name, value in taken.items():
            self._set(name, value)
            self.sources[name] = source

    def _set(self, name: str, value: Any) -> None:
        if name in SETTINGS:
            setattr(getattr(self, SETTINGS[name].section), name, value)
        else:
            self.extra[name] = value

    # --- what is read from a config

    def values(self) -> dict[str, Any]:
        """All settings of the engine by name."""
        return {name: getattr(getattr(self, entry.section), name) for name, entry in SETTINGS.items()}

    def to_args(self) -> EngineArgs:
        """All settings, flat; for a stage also its own flags."""
        settings, of_task = settings_of(self.args_class), f"task {self.training.task}"
        values = self.values() | {name: value for name, value in self.extra.items() if name in settings}
        if not self.optimization.use_amp:
            values["dtype"] = "float32"
        given = frozenset(name for name, source in self.sources.items() if source != of_task)
        return self.args_class(**values, given=given)

    def describe(self) -> str:
        """Every setting with its value and source, as YAML that `--config` can read."""
        text = settings_as_yaml(self.args_class, self.values() | self.extra, self.sources)
        options = [name for name in self.extra if name not in settings_of(self.args_class)]
        if options:
            text += f"{OPTIONS}:\n"
        for name in options:
            text += setting_as_yaml(name, self.extra[name], self.sources.get(name, "default")) + "\n"
        return text

    def validate(self) -> None:
        """Check how the values go together; each alone was checked where it was read. Raises UserError: one
        line with all mistakes."""
        wrong = self.to_args().contradictions()
        if wrong:
            raise UserError("; ".join(wrong))
