"""The engine's settings: those of the stage scripts (common/settings.py) and its own, in sections.

Later sources override earlier ones: the defaults below, the task's own defaults, a YAML file (--config), the
environment (MINIMIND_BATCH_SIZE=8), the command line (--batch_size 8). common/config_sources.py reads them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from common import settings
from common.config_sources import (
    OPTIONS,
    Parser,
    described,
    given_task,
    print_once,
    read_sources,
    read_task_defaults,
    settings_parser,
)
from common.errors import UserError
from common.settings import CheckpointConfig, LoggingConfig, StageArgs, setting, settings_of


class ModelConfig(settings.ModelConfig):
    """The shape of the model. `top_k` is another name of `num_experts_per_tok`."""

    def __init__(self, *, top_k: int | None = None, **values: Any):
        super().__init__(**values if top_k is None else values | {"num_experts_per_tok": top_k})

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
        missing = (
            "--task is missing: give the name of a task, or package.module:ClassName for one of your own"
        )
        return super().contradictions() + ([] if self.task else [missing])


SETTINGS = settings_of(EngineArgs)


@cache
def engine_args(stage_args: type[StageArgs] | None) -> type[EngineArgs]:
    """The settings of a task: the engine's, and, for a task that is a stage, its flags and defaults."""
    if stage_args is None:
        return EngineArgs
    return dataclass(kw_only=True)(type("EngineArgs", (stage_args, EngineArgs), {"section": "engine"}))


def engine_parser(args_class: type[EngineArgs] = EngineArgs) -> Parser:
    """The engine's command line."""
    description = (
        "Train a built-in task or your own. A task may have its own defaults: --print_config shows them."
    )
    parser = settings_parser(args_class, description, prog="python -m llm.training.train")
    text = f"an option of your own task, stored in config.extra (in YAML: section {OPTIONS}); may be repeated"
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help=text)
    return parser


@dataclass
class Config:
    """All settings of a run.

    extra: the flags of a stage, or options of a user's own task. stage_args: the settings of the task, if it
    is a stage. sources: where each value comes from.
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
        environ = os.environ if environ is None else environ
        name = given_task(argv, environ)
        if name and find_task is None:
            raise UserError(
                f"--task {name}: from_args_and_env() alone does not know its class, whose settings it needs; call "
                "Config.from_args_and_env(find_task=find_task), with find_task of llm/training/train.py"
            )
        task = find_task(name) if name and find_task else None
        config = cls(stage_args=task.stage_args if task else None, sources=dict.fromkeys(SETTINGS, "default"))
        args_class = engine_args(config.stage_args)
        rows = settings_of(args_class)
        # the defaults of a stage where they are not the engine's, and of its own flags; then those of the
        # task
        defaults: dict[str, Any] = {"save_weight": name.rpartition(":")[2]} if name else {}
        defaults |= {
            key: row.default for key, row in rows.items() if row.default != getattr(EngineArgs, key, row)
        }
        own = read_task_defaults(args_class, name, defaults | (task.defaults if task else {}))
        options, given = read_sources(args_class, engine_parser(args_class), argv, environ, own)
        for key, (value, where) in given.items():
            config.sources[key] = where
            if key in SETTINGS:
                setattr(getattr(config, rows[key].section), key, value)
            else:
                config.extra[key.removeprefix(f"{OPTIONS}.")] = value
        if options.print_config:
            print_once(config.describe(), environ)
        return config

    def values(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(getattr(self, setting.section), name) for name, setting in SETTINGS.items()}

    def to_args(self) -> EngineArgs:
        """All settings, flat; for a stage also its own flags."""
        values = self.values() | ({} if self.stage_args is None else self.extra)
        values |= {} if self.optimization.use_amp else {"dtype": "float32"}
        defaults = ("default", f"task {self.training.task}")
        given = frozenset(name for name, where in self.sources.items() if where not in defaults)
        return engine_args(self.stage_args)(**values, given=given)

    def describe(self) -> str:
        """Every setting with its value and source, as YAML that `--config` can read."""
        return described(settings_of(engine_args(self.stage_args)), self.values() | self.extra, self.sources)

    def validate(self) -> None:
        """Check how the values go together; each alone was checked where it was read. Raises UserError: one
        line with all mistakes."""
        if wrong := self.to_args().contradictions():
            raise UserError("; ".join(wrong))
