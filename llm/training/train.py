"""Train a task with the engine: python -m llm.training.train --task regression

    python -m llm.training.train --task full_sft --data_path data/sft.jsonl --from_weight pretrain
    python -m llm.training.train --task full_sft --config llm/training/configs/full_sft.yaml --batch_size 8
    python -m llm.training.train --task my_tasks:TextClassifier --set classes=4      a task in a file of your own
    python -m llm.training.train --task my_tasks:Six --data_module my_data:Points    and its data in another one
    torchrun --nproc_per_node 2 -m llm.training.train --task pretrain --data_path data/pretrain.jsonl

Without torchrun, --world_size 2 starts two processes. --print_config shows each setting and its source.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run the code beside this file, installed or not

from common.errors import UserError
from common.locks import lock_output
from common.plugins import import_named
from llm.training.core.config import Config
from llm.training.core.engine import TrainingEngine
from llm.training.core.utils import DistributedManager, Logger
from llm.training.data.base import DataModule
from llm.training.tasks.base_task import TrainingTask
from llm.training.tasks.language_model import STAGES
from llm.training.tasks.regression_task import RegressionTask
from trainer.components.device import check_dtype, select_device
from trainer.components.failures import training_errors, translated_failures
from trainer.components.run_files import run_name
from trainer.components.signals import StopRequest

AVAILABLE_TASKS: dict[str, type[TrainingTask]] = {"regression": RegressionTask, **STAGES}


def find_task(name: str) -> type[TrainingTask]:
    """The class of a task: one of AVAILABLE_TASKS, or `package.module:ClassName`, also from the current folder.

    Raises:
        UserError: there is no such class, or it lacks methods that a task must implement.
    """
    task = AVAILABLE_TASKS.get(name)
    if task is None and ":" not in name:
        known = ", ".join(AVAILABLE_TASKS)
        raise UserError(f"--task {name} is unknown; there are {known}, and package.module:ClassName for your own")
    task = task or import_named("--task", name)
    if not (isinstance(task, type) and issubclass(task, TrainingTask)):
        raise UserError(f"--task {name} is not a subclass of TrainingTask (llm/training/tasks/base_task.py)")
    if task.__abstractmethods__:
        raise UserError(f"--task {name} does not implement {', '.join(sorted(task.__abstractmethods__))}")
    return task


def find_data_module(name: str) -> type[DataModule]:
    """The class of a data module, `package.module:ClassName`, also from the current folder.

    Raises:
        UserError: there is no such class, or it lacks methods that a data module must implement.
    """
    module = import_named("--data_module", name) if ":" in name else None
    if not (isinstance(module, type) and issubclass(module, DataModule)):
        raise UserError(
            f"--data_module {name} is not package.module:ClassName of a DataModule (llm/training/data/base.py)"
        )
    if module.__abstractmethods__:
        raise UserError(f"--data_module {name} does not implement {', '.join(sorted(module.__abstractmethods__))}")
    return module


def train_worker(rank: int, world_size: int, config: Config, address: dict[str, str] | None = None) -> None:
    """One process of a run.

    Args:
        rank, world_size: of the process; under torchrun its environment decides.
        address: where spawned processes meet, if their data are prepared; by default they prepare them and meet at
            --master_addr and --master_port.

    Raises:
        UserError: several processes, and no address at which they could meet.
    """
    distributed = DistributedManager(config)
    if address is None and (world_size == 1 or distributed.launched):
        _train(config, prepared=False)
        return
    if address is None and config.distributed.master_port == 0:
        raise UserError(f"train_worker: {world_size} processes need an address to meet: give one, or set master_port")
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update((address or distributed.address()) | {name: str(value) for name, value in ranks.items()})
    with training_errors():
        _train(config, prepared=address is not None)


def _train(config: Config, prepared: bool) -> None:
    logger, distributed = Logger.of(config), DistributedManager(config)
    engine: TrainingEngine | None = None
    with StopRequest() as stop:
        try:
            task, data = _task_and_data(config)
            args = task.args
            lock_output(run_name(args.save_weight, args), save_dir=args.save_dir, checkpoint_dir=args.checkpoint_dir)
            if not prepared:
                distributed.once(data.prepare_data)
            with translated_failures():
                distributed.setup()
                data.setup()
                logger.debug(config.describe())
                engine = TrainingEngine(config, task, data, task.callbacks(), stop)
                engine.run()
        finally:
            distributed.cleanup(engine.state if engine is not None else None)


def _task_and_data(config: Config) -> tuple[TrainingTask, DataModule]:
    task, name = find_task(config.training.task)(config), config.data.data_module
    data = find_data_module(name)(config) if name else task.build_data()
    if not isinstance(data, DataModule):
        raise UserError(f"{type(task).__name__}.build_data returns a {type(data).__name__}, not a DataModule")
    task.data = data
    return task, data


def spawn(world_size: int, config: Config, address: dict[str, str]) -> None:
    """Prepare the data once, start the processes and wait for them. Signals are passed on. The first process that fails
    ends the others and sets the exit status. It reports a UserError itself; other tracebacks are printed here, once."""
    import torch.multiprocessing as mp  # not above: torch is loaded after common

    Logger.of(config)
    _task_and_data(config)[1].prepare_data()
    context = mp.start_processes(train_worker, (world_size, config, address), world_size, join=False)
    assert context is not None  # join=False
    try:
        with StopRequest() as stop:
            stop.defer = True
            while not context.join(timeout=0.2) and not stop.signal:
                pass
            if stop.signal:
                _forward(stop.signal, context)
            while not context.join():
                pass
    except mp.ProcessExitedException as error:  # it has reported why
        sys.exit(error.exit_code if error.exit_code > 0 else 1)
    except mp.ProcessRaisedException as error:
        print(str(error), file=sys.stderr)
        sys.exit(1)
    finally:
        for path in context.error_files:  # torch leaves the traceback of a process that failed in the temporary folder
            Path(path).unlink(missing_ok=True)


def _forward(number: int, context: Any) -> None:
    """Send a signal to the processes and give them time to save; `context.join` would terminate the slower ones."""
    for process in context.processes:
        if process.is_alive():
            os.kill(process.pid, number)
    for process in context.processes:
        process.join(60)


def main() -> None:
    """Read the settings, start the processes if there are several, and train."""
    config = Config.from_args_and_env(
        task_defaults=lambda name: find_task(name).defaults, stage_args=lambda name: find_task(name).stage_args()
    )
    config.validate()
    Logger.of(config)  # from here on the log file receives what is printed
    device = select_device(config.distributed.device)  # refuse what the machine lacks before the data are prepared
    check_dtype(config.to_args().dtype, device)
    distributed = DistributedManager(config)
    world_size = distributed.get_world_size()
    if world_size > 1 and not distributed.launched:
        spawn(world_size, config, distributed.address())
    else:
        train_worker(0, world_size, config)


if __name__ == "__main__":
    with training_errors():
        main()
