"""Train a task with the engine: python -m llm.training.train --task regression

    python -m llm.training.train --task full_sft --data_path data/sft.jsonl --from_weight pretrain
    python -m llm.training.train --task full_sft --config llm/training/configs/full_sft.yaml --batch_size 8
    python -m llm.training.train --task my_tasks:TextClassifier                      a task in your own file
    python -m llm.training.train --task my_tasks:Six --data_module my_data:Points    its data in another one
    torchrun --nproc_per_node 2 -m llm.training.train --task pretrain --data_path data/pretrain.jsonl

Without torchrun, --world_size 2 starts two processes. --print_config shows each setting and its source.
"""

import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import TypeVar

# run the code beside this file, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.errors import UserError, reason
from common.files import lock_output
from common.launcher import launch
from common.plugins import import_named
from llm.training.core.callbacks import Callback
from llm.training.core.checks import check_class, check_spelling, checked_type
from llm.training.core.config import Config, EngineArgs
from llm.training.core.engine import TrainingEngine
from llm.training.core.utils import DistributedManager, Logger
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import Task, TrainingTask
from llm.training.tasks.language_model import FullSFT, Pretrain, StageTask
from llm.training.tasks.regression_task import RegressionTask
from trainer.callbacks.base import check_restores
from trainer.checkpoint.earlier import complete_moves
from trainer.checkpoint.same_run import check_settings_utf8
from trainer.devices.device import check_dtype, select_device
from trainer.devices.errors import StopRequest, training_errors, translated_failures
from trainer.stage import check_names
from trainer.weights.paths import output_folders, run_name

C = TypeVar("C")
AVAILABLE_TASKS: dict[str, type[Task]] = {
    "regression": RegressionTask,
    "pretrain": Pretrain,
    "full_sft": FullSFT,
}


def find_task(name: str) -> type[Task]:
    """The class of a task: one of AVAILABLE_TASKS, or `package.module:ClassName`, also from the current
    folder. Raises UserError if there is no such class, or if it lacks methods that a task must implement."""
    if name in AVAILABLE_TASKS:
        return AVAILABLE_TASKS[name]
    if ":" not in name:
        known = ", ".join(AVAILABLE_TASKS)
        raise UserError(
            f"--task {name} is unknown; there are {known}, and package.module:ClassName for your own"
        )
    task = named_class("--task", name, Task)
    if not issubclass(task.args_class, EngineArgs):
        raise UserError(
            f"{task.__name__}.args_class must be a subclass of EngineArgs (llm.training.core.config)"
        )
    base = next(each for each in (TrainingTask, StageTask, Task) if issubclass(task, each))
    check_class(task, base, called_in_other_ways=("build_scheduler",))
    settings = EngineArgs.model_fields
    check_spelling(task.args_class.__name__, task.args_class.model_fields.keys() - settings.keys(), settings)
    return task


def named_class(flag: str, name: str, base: type[C]) -> type[C]:
    """The class `package.module:ClassName` that a flag names, also from the current folder. Raises UserError
    if there is no such class, or if it lacks methods that a subclass of `base` must implement."""
    from pydantic import (
        PydanticUserError,
    )  # imported only here, so that common can first report missing packages

    try:
        kind = import_named(flag, name)
    except PydanticUserError as error:  # a setting without a type
        raise UserError(f"{flag} {name}: {reason(error)}") from error
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise UserError(f"{flag} {name} is not a subclass of {base.__name__} ({base.__module__})")
    return kind


def build_task(config: Config) -> Task:
    """The task of a run. Raises UserError if another task has a method of TrainingTask, such as
    `train_step`."""
    task = find_task(config.training.task)(config)
    if not hasattr(task, "args"):
        raise UserError(f"{type(task).__name__}.__init__ must call super().__init__(config)")
    if isinstance(task, TrainingTask):
        check_restores(type(task), TrainingTask)
    else:
        for name in sorted(vars(TrainingTask).keys() - dir(Task)):
            if hasattr(task, name):
                raise UserError(
                    f"{type(task).__name__}.{name} has no effect: this task learns by its Objective; write "
                    "it there, for the task of a stage in a subclass that `objective_class` names"
                )
    return task


def checked_callbacks(task: Task) -> list[Callback]:
    """The callbacks of a task. Raises UserError if they are not a list of callbacks, or if one has a wrong
    method."""
    callbacks = checked_type(task, "callbacks", task.callbacks(), list, "a list of callbacks")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            what = f"{type(task).__name__}.callbacks: {callback!r} is not a Callback"
            raise UserError(f"{what}; list objects, such as [MyCallback()]")
        check_class(type(callback), Callback)
    return callbacks


def train_worker(rank: int, world_size: int, config: Config) -> None:
    """One process of a run. Several processes meet at --master_addr and --master_port; under torchrun, the
    environment gives the address and the rank."""
    distributed = DistributedManager(config)
    if world_size == 1 or distributed.launched:
        _train(config)
        return
    os.environ.update(  # the variables that torchrun would set
        MASTER_ADDR=config.distributed.master_addr,
        MASTER_PORT=str(config.distributed.master_port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    with training_errors():
        # from here on the kernel sends SIGINT when the parent ends, because torch has asked it to
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != os.getppid():
            raise UserError("the process that started this rank has ended")
        _train(config)


def _train(config: Config) -> None:
    logger, distributed = Logger.of(config), DistributedManager(config)
    engine: TrainingEngine | None = None
    try:
        task = build_task(config)
        if config.data.data_module:
            data_class = named_class("--data_module", config.data.data_module, DataModule)
            check_class(data_class, DataModule)
            data = data_class(config)
        else:
            data = checked_type(task, "build_data", task.build_data(), DataModule, "a DataModule")
        check_class(type(data), DataModule)
        args, task.data = task.args, data
        check_settings_utf8(args)
        check_names(args)
        lock_output(run_name(args.save_weight, args), **output_folders(args))
        if launch().rank == 0:
            complete_moves(args)
        if launch().local_rank == 0:  # the other ranks of this machine wait in `setup`
            data.prepare_data()
        with translated_failures():
            distributed.setup()
            data.setup()
            logger.debug(config.describe())
            engine = TrainingEngine(config, task, data, checked_callbacks(task))
            engine.run()
    finally:
        distributed.cleanup(engine.state if engine is not None else None)


def spawn(world_size: int, config: Config) -> None:
    """Start the processes and wait for them. Signals are passed on, with time to save. The first process that
    fails ends the others and sets the exit status. It reports a UserError itself; other tracebacks are
    printed once, here."""
    import torch.multiprocessing as mp  # imported only here, because torch must be loaded after common
    from torch.distributed.elastic.utils.distributed import get_free_port

    check_address(config.distributed.master_addr)
    config.distributed.master_port = config.distributed.master_port or get_free_port()
    context = mp.start_processes(train_worker, (world_size, config), world_size, join=False)
    assert context is not None  # join=False
    try:
        with StopRequest() as stop:
            while not context.join(timeout=0.2) and not stop.signal:
                pass
            if stop.signal:
                for process in context.processes:
                    if process.is_alive():
                        os.kill(process.pid, stop.signal)
                for process in context.processes:
                    process.join(60)  # `context.join` would terminate slower processes
            while not context.join():
                pass
    except mp.ProcessExitedException as error:  # it has reported the reason
        sys.exit(error.exit_code if error.exit_code > 0 else 1)
    except mp.ProcessRaisedException as error:
        print(str(error), file=sys.stderr)
        sys.exit(1)


def check_address(address: str) -> None:
    """Raise UserError if --master_addr is not an address of this machine. The engine starts all processes
    here, and they would wait for each other."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        raise UserError(
            f"--master_addr {address} is not of this machine ({error.strerror}), where the engine starts all "
            "processes; leave it out, or start with torchrun"
        ) from error


def main() -> None:
    """Read the settings, start the processes if there are several, and train."""
    config = Config.from_args_and_env(find_task=find_task)
    config.validate()
    Logger.of(config)  # from here on, the log file also receives what is printed
    # before the data are prepared: is there what the settings need?
    device = select_device(config.distributed.device)
    check_dtype(config.args.dtype, device)
    distributed = DistributedManager(config)
    world_size = distributed.get_world_size()
    if world_size > 1 and not distributed.launched:
        spawn(world_size, config)
    else:
        train_worker(0, world_size, config)


if __name__ == "__main__":
    with training_errors():
        main()
