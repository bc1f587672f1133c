"""The engine's settings: those of the stage scripts (common/settings.py) and its own.

Later sources override earlier ones: the defaults of the task's `args_class`, a YAML file (--config), the
environment (MINIMIND_BATCH_SIZE=8), the command line (--batch_size 8).
"""

import os
from collections.abc import Callable, Mapping, Sequence
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
from common.settings import CheckpointConfig as CheckpointConfig
from common.settings import LoggingConfig as LoggingConfig
from common.settings import Settings, StageArgs, setting

PREFIX = "MINIMIND_"  # of environment variables
OTHER_VARIABLES = ("MINIMIND_API_KEY",)  # of other programs
DESCRIPTION = "Train a built-in task or your own, with its own defaults: --print_config shows them."


class ModelConfig(settings.ModelConfig):
    """The shape of the model. `top_k` is another name for `num_experts_per_tok`."""

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
    """All settings, flat, as the functions of `trainer/` take them. Your own task subclasses it for its
    defaults and flags, as a stage script subclasses `StageArgs`."""

    def contradictions(self) -> list[str]:
        """Mistakes: values that exclude each other."""
        mistakes = super().contradictions()
        if not self.task:
            mistakes.append(
                "--task is missing: give the name of a task, or package.module:ClassName for one of your own"
            )
        return mistakes


class Config:
    """The settings of a run: from all sources, or `Config(training=TrainingConfig(epochs=3))`.

    args: all settings, flat. Each section is the same object: `config.training.epochs` is
    `config.args.epochs`.
    """

    def __init__(self, args: EngineArgs | None = None, **sections: Settings):
        values: dict[str, Any] = {}
        for section in sections.values():
            values |= section.model_dump(exclude_unset=True)
        args = (args or EngineArgs()).model_copy(update=values)
        if not args.use_amp:
            args.dtype = "float32"
        if args.resume_from is not None:
            args.from_resume = True
        self.args = args
        self.model = self.data = self.training = self.distributed = args
        self.optimization = self.checkpoint = self.logging = args

    @classmethod
    def from_args_and_env(
        cls,
        argv: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        find_task: Callable[[str], Any] | None = None,
    ) -> "Config":
        """Read the settings from all sources. `validate` checks that they fit together.

        Args:
            argv: the command line without the program; sys.argv by default.
            environ: the environment; os.environ by default.
            find_task: returns the class of a task, for its `args_class`; needed only if a task is given.
                `save_weight` defaults to the name of the task.

        Raises:
            UserError: one line with all unknown names and invalid values of a source, or if the task cannot
                be found.
            SystemExit: after `--help` and `--print_config`.
        """
        if environ is None:
            environ = os.environ
        name = find_task_name(argv, environ)
        if not name:
            args_class = EngineArgs
        elif find_task is None:
            raise UserError(
                f"--task {name}: its class is needed; call Config.from_args_and_env(find_task=find_task) "
                "with find_task of llm/training/train.py"
            )
        else:
            args_class = find_task(name).args_class
        parser = stage_parser(args_class, DESCRIPTION, prog="python -m llm.training.train")
        flags = read_flags(parser, argv)
        path, print_config = flags.pop("config", None), flags.pop("print_config", False)
        variables = []
        for key in sorted(environ):
            if key.startswith(PREFIX) and key not in OTHER_VARIABLES:
                variables.append((key.removeprefix(PREFIX).lower(), f"variable {key}", environ[key]))
        values: dict[str, Any] = {}
        if path is not None:
            values = checked(args_class, yaml_values(args_class, path))
        values |= checked(args_class, variables)
        values |= checked(args_class, flag_values(flags))
        if name and args_class.model_fields["save_weight"].default == EngineArgs().save_weight:
            values.setdefault("save_weight", name.rpartition(":")[2])
        args = args_class().model_copy(update=values)
        if print_config:
            print_and_exit(as_yaml(args_class, dict(args)))
        make_local(args)
        return cls(args)

    def describe(self) -> str:
        """Every setting as YAML that `--config` can read."""
        return as_yaml(type(self.args), dict(self.args))

    def validate(self) -> None:
        """Check that the values fit together; each single value was checked when it was read. Raises
        UserError with all mistakes in one line."""
        mistakes = self.args.contradictions()
        if mistakes:
            raise UserError("; ".join(mistakes))


def find_task_name(argv: Sequence[str] | None, environ: Mapping[str, str]) -> str:
    """The name of the task; empty for none. It is needed first, because the task's defaults and flags decide
    how everything else is read."""
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
